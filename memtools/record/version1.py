"""What sentences of older records say, as the typed events that they are today.

Version 1 of the format had no fields, and the first writers of version 2 used them for few kinds: a
verdict, a limit or the end stood in a record as it was shown, and what read it took the sentence
apart. That is done here and nowhere else. A sentence may come from anywhere, and was cut at 192
bytes: what is not understood is left unsaid, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from memtools._base.size import parse_bytes
from memtools._base.text import shown
from memtools.record.kinds import (
    Cleanup,
    End,
    Event,
    GuardAct,
    GuardSet,
    Heap,
    Holder,
    Leak,
    Limit,
    Pressure,
    Start,
)

_SIZE = r"(?<![\w.])(\d{1,18}(?:\.\d{1,9})?) ?(B|bytes|[KMGT]i?B)\b"
_TIME = r"(?<![\w.])(\d{1,12}(?:\.\d{1,9})?) ?(us|ms|s)\b"
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}

_VERDICT = re.compile(
    r"(leak|likely|growing|fragmentation): \+(\d{1,9}(?:\.\d{1,2})?) (B|[KMGT]iB)/step"
    r" in (\w{1,16}) since step ([\d,]{1,19})"
)
_FILLS = ", but no leak: a buffer fills, "
_RATE = re.compile(r"\+(\d[\d,]{0,8}(?:\.\d{1,2})?) (B|[KMGT]iB)/step: ")
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


def _start(text: str) -> Start:
    before, _, limit = text.partition("; ")
    outside = before.startswith("process tree")
    command = before.removeprefix("process tree of ").partition(" every ")[0] if outside else ""
    given = re.search(rf"limit given,? {_SIZE}|limit {_SIZE} \(given\)", text)
    machine = re.search(rf"machine {_SIZE}|limit {_SIZE} \(machine\)", text)
    return Start(
        name="memtools run" if before.startswith("memtools run: ") else "",
        command=command,
        limit=limit,
        given_bytes=_first_size(given),
        machine_bytes=_first_size(machine),
    )


def _end(text: str) -> End:
    how = re.sub(r"^exit\b:? ?", "", text.strip())
    code = re.fullmatch(r"(?:code )?(-?\d{1,9})(?:: (.*))?", how, re.S)
    if code:
        return End(code=int(code[1]), text=code[2] or "")
    by = re.match(r"(?:killed |ended |terminated )?(?:by )?(?:signal )?(SIG[A-Z0-9]{2,9})\b", how)
    if by:
        return End(signal=by[1])
    if re.match(r"killed\b", how):
        return End(signal="", text=how)
    if re.match(r"exception\b", how):
        name, _, said = how.removeprefix("exception").strip().partition(":")
        return End(exception=name or "unknown", text=said.strip())
    if re.match(r"not started\b", how):
        return End("not started", how.removeprefix("not started").lstrip(":, "))
    return End(how)


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


def _cleanup(text: str) -> Cleanup:
    """Of "gc (12 objects) 3.1 ms, malloc_trim 0.2 ms: freed 4.0 MiB on the host"; the times of all
    actions as one."""
    what, _, rest = text.partition(":")
    names = re.sub(rf"\([^()]*\)|{_TIME}|{_SIZE}", "", what)
    name = re.sub(r"\s+", " ", shown(names)).replace(" ,", ",").strip(" ,;") or "cleanup"
    ms = sum(float(number) * _MS[unit] for number, unit in re.findall(_TIME, text))
    sizes = [_bytes(*found) for found in re.findall(_SIZE, rest or text)]
    return Cleanup((name,), (ms,), host_freed_bytes=sum(sizes) if sizes else None)


def _bytes(number: str, unit: str) -> int:
    try:
        return parse_bytes(f"{number} {unit.replace('bytes', 'B')}")
    except ValueError:  # less than one byte
        return 0


def _first_size(found: re.Match[str] | None) -> int | None:
    parts = [part for part in found.groups() if part] if found else []
    return _bytes(*parts) or None if parts else None


def _pressure(text: str) -> Pressure | None:
    handle, found, why = text.partition(" cannot act: ")
    return Pressure("cannot act", handle=handle, why=why) if found else None


def _guard(text: str) -> GuardAct:
    """Of "raise: 450 MiB of 500 MiB used (...)"; a guard that sent SIGTERM named no action."""
    action, _, pressure = text.partition(": ")
    if not re.match(rf"{_SIZE} of {_SIZE}", pressure):
        action, pressure = "", text
    return GuardAct(action, words=pressure)


def _guard_set(text: str) -> GuardSet | None:
    found = _GUARD_SET.match(text)
    return None if found is None else GuardSet(float(found[1]))


_READERS: dict[str, Callable[[str], Event | None]] = {
    "start": _start,
    "end": _end,
    "leak": _leak,
    "holder": _holder,
    "limit": _limit,
    "heap": _heap,
    "cleanup": _cleanup,
    "pressure": _pressure,
    "guard": _guard,
    "guard_set": _guard_set,
}
