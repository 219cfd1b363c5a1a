"""What the sentences of version 1 of the format say, as the typed events that they are today.

Version 1 had no fields: a verdict, a holder or a limit stood in a record as it was shown, and what
read it took the sentence apart. That is done here and nowhere else. A sentence may come from
anywhere, and was cut at 192 bytes: what is not understood is left unsaid, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from memtools._base.size import parse_bytes
from memtools._base.text import shown
from memtools.record.kinds import Event, GuardSet, Heap, Holder, Leak, Limit

_VERDICT = re.compile(
    r"(leak|likely|growing|fragmentation): \+(\d{1,9}(?:\.\d)?) (B|[KMGT]iB)/step in (\w{1,16})"
    r" since step ([\d,]{1,19})"
)
_FILLS = ", but no leak: a buffer fills, "
_RATE = re.compile(r"\+(\d[\d,]{0,8}(?:\.\d)?) (B|[KMGT]iB)/step: ")
_NODES = re.compile(r"autograd graphs? of (?:some )?([\d,]{1,19}) nodes")
_BOUND = re.compile(r", which holds (?:[\d,]+ of )?at most ")
_LIMIT = re.compile(r"(RLIMIT_[A-Z]{1,10}) (?:(\d{1,18}) B|unlimited)")
_HEAP = re.compile(r"malloc keeps (\d{1,18}) B of freed memory")
_GUARD_SET = re.compile(r"(0?\.\d{1,9}|0|1(?:\.0{1,9})?)\b")


def read(kind: str, text: str) -> Event | None:
    """The event that such a sentence tells; None for one that is not understood, and for kinds that
    are texts today."""
    reader = _READERS.get(kind)
    return None if reader is None else reader(text)


def _leak(text: str) -> Leak | None:
    if text.startswith("no longer"):
        return Leak("quiet", None, 0.0, None, over=True)
    found = _VERDICT.match(text)
    if found is None:
        return None
    kind, number, unit, signal, since = found.groups()
    rate = parse_bytes(f"{number} {unit}") if float(number) >= 1 else 0
    filling = shown(text.partition(_FILLS)[2])
    return Leak(kind, signal, rate, int(since.replace(",", "") or 0), filling=filling)


def _holder(text: str) -> Holder:
    """With the rate of one step, as two steps tell it; of what else it said no more is known."""
    text = shown(text)
    rate = _RATE.match(text)
    path = text
    for word in (", held by ", ", kept by ", ": held by "):
        before, found, rest = text.partition(word)
        if found and " kept by " not in before:
            path = rest
            break
    bound = _BOUND.search(path)
    path = _BOUND.split(path)[0]
    nodes = _NODES.search(path)
    count = int(nodes[1].replace(",", "") or 0) if nodes else None
    taken = 0.0
    if rate is not None:
        taken = 2 * float(rate[1].replace(",", "")) * float(1024 ** "BKMGT".find(rate[2][0]))
    capacity = None if bound is None else 0
    return Holder(path, _kind(path), count, capacity, 0, round(taken), steps=2)


def _kind(path: str) -> str:
    if path.startswith("C code"):
        return "C code"
    if path.startswith("nobody"):
        return "nobody"
    if path.startswith(("autograd graph of", "autograd graphs of")):
        return "autograd graph"
    if path.startswith(("local ", "values of ", "module attribute ")):
        return "variable"
    return re.split(r"[ (]", path, maxsplit=1)[0]


def _limit(text: str) -> Limit | None:
    found = _LIMIT.fullmatch(text)
    return None if found is None else Limit(found[1], int(found[2]) if found[2] else None)


def _heap(text: str) -> Heap | None:
    found = _HEAP.fullmatch(text)
    return None if found is None else Heap(int(found[1]))


def _guard_set(text: str) -> GuardSet | None:
    found = _GUARD_SET.match(text)
    return None if found is None else GuardSet(float(found[1]))


_READERS: dict[str, Callable[[str], Event | None]] = {
    "leak": _leak,
    "holder": _holder,
    "limit": _limit,
    "heap": _heap,
    "guard_set": _guard_set,
}
