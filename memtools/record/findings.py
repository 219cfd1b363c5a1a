"""The findings that stand at the end of a record: what grows, and who holds it.

    "finding" events ──────────────────► standing() ──► LeakFinding ...   said by the run itself
    series ──► growth.judge() ──┐
    "leak", "holder" events ────┴──────► made_of() ───► LeakFinding ...   where the run said none

A monitor makes its findings while the program runs, and then nothing is judged again: the record
tells the newest state of each. Older monitors wrote verdicts and holders apart, and a command that
is watched from outside is judged by nobody: their findings are made here, in the same form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from memtools._base import sentences
from memtools._base.text import duration, shown
from memtools.leak.finding import EXPLAINED, OF_USE, RANK, LeakFinding, advice_for, measured
from memtools.record.kinds import Finding, Holder, Leak

if TYPE_CHECKING:
    from memtools.record.growth import Growth
    from memtools.record.record import Record

_NOBODY = ("C code", "nobody")
_ENTRY = re.compile(r", as \S+ of each entry$")
_BUFFER = re.compile(r"(.*?) with (.*)", re.S)
#: kinds of holders whose entries pile up until somebody takes them out
COLLECTING = ("list", "dict", "set", "deque", "OrderedDict", "defaultdict", "Counter", "lru_cache")


def standing(record: Record) -> list[LeakFinding]:
    """As the run itself said them: the newest state of each, without those that are over."""
    found: dict[tuple[str, str], LeakFinding] = {}
    for event in record.events:
        if not isinstance(event.data, Finding) or event.data.grade not in RANK:
            continue
        one = _harmless(event.data)
        found.pop(one.key, None)
        if not one.over and RANK[one.grade] > RANK["quiet"]:
            found[one.key] = one
    return list(found.values())


def _harmless(event: Finding) -> LeakFinding:
    """A record may come from anywhere."""
    given: dict[str, Any] = {one.name: getattr(event, one.name) for one in fields(LeakFinding)}
    texts = {name: shown(value) for name, value in given.items() if isinstance(value, str)}
    return LeakFinding(**{**given, **texts})


# --- of older records, and of those that nobody judged --------------------------------------------


def made_of(record: Record, growth: Sequence[Growth]) -> list[LeakFinding]:
    """Of what the series say, of the verdicts that the run wrote, and of its holders."""
    verdict, first_step, taken_back = _verdict(record)
    if taken_back:  # by the exact signals: resident memory alone says less
        growth = [one for one in growth if one.signal != "rss" or one.grade in ("likely", "leak")]
    found = [_of_growth(one) for one in growth]
    if verdict is not None:
        found = _with_verdict(growth, verdict)
    if first_step is not None:
        found = [replace(one, first_step=first_step) for one in found]
    return [replace(one, advice=advice_for(one)) for one in _with_holders(record, found)]


def _of_growth(growth: Growth) -> LeakFinding:
    kind = "children" if growth.signal == "children" else ""
    kind = "shared memory" if growth.signal == "shm" else kind
    over = f"{growth.over:,.0f} steps" if growth.per == "step" else duration(growth.over)
    what = [f"over the last {over}"] if growth.over and not growth.shared else []
    what += [f"on {growth.device}"] if growth.device else []
    return LeakFinding(
        "fills" if growth.shared else growth.grade,
        growth.signal,
        growth.per,
        growth.rate_bytes,
        since_step=growth.since,
        kind="mapped files" if growth.shared else kind,
        what=", ".join(what),
    )


def _verdict(record: Record) -> tuple[LeakFinding | None, int | None, bool]:
    """(the newest verdict of the run itself; the step at which it first said so; whether it took
    all back)."""
    newest: Leak | None = None
    first: int | None = None
    for event in record.events:
        if isinstance(event.data, Leak):
            newest = event.data
            first = None if newest.over else event.step if first is None else first
    if newest is None or newest.over:
        return None, None, newest is not None
    rate = newest.rate_bytes_per_step
    if newest.signal is None or newest.kind not in RANK or rate < 0.5:
        return None, None, False
    kind, holder, what = "children" if newest.signal == "children" else "", "", ""
    buffer = _BUFFER.fullmatch(shown(newest.filling))
    if newest.filling:
        holder, what = (buffer[1], buffer[2]) if buffer else (shown(newest.filling), "")
        kind = holder.partition(" ")[0]
    verdict = LeakFinding(
        "fills" if newest.filling else newest.kind,
        shown(newest.signal),
        rate_bytes=rate if rate >= 1 else 0.0,
        since_step=newest.since_step,
        holder=holder,
        kind=kind,
        what=what,
    )
    return verdict, first, False


def _with_verdict(growth: Sequence[Growth], verdict: LeakFinding) -> list[LeakFinding]:
    """The run's own test saw signals of which a record has no column; the series go on to the end.
    Where both speak of one signal, the series have the newer rate, and the higher grade stands."""
    of_use = verdict.signal in OF_USE
    tested = {one.signal: one for one in growth if not one.over and one.per == "step"}
    same = tested.get(verdict.signal) or (tested.get("heap") if verdict.signal == "rss" else None)
    # A line of the process's own memory is the same growth, seen by fewer readings.
    signals = OF_USE if of_use else (verdict.signal,)
    lines = [one for one in growth if one.over and one.signal in signals]
    newer = same or next((one for one in lines if one.per == "step"), None)
    rest = [one for one in growth if one is not same and one not in lines]
    if same is None and of_use and verdict.signal != "rss":
        rest = [one for one in rest if one.signal != "rss"]  # its own cost, told by what is exact
    if newer is not None:
        grade = verdict.grade
        if grade != "fills":
            grade = max(verdict.grade, newer.grade, key=RANK.__getitem__)
        verdict = replace(
            verdict,
            grade=grade,
            signal=newer.signal,
            rate_bytes=newer.rate_bytes,
            since_step=newer.since if newer.since is not None else verdict.since_step,
        )
    return [verdict, *map(_of_growth, rest)]


# --- who holds it, as holder events tell ----------------------------------------------------------


@dataclass(frozen=True)
class _Told:
    """The newest event about one holder."""

    path: str
    kind: str
    rate_bytes: float | None
    what: str
    bounded: bool

    def beside(self, other: _Told) -> _Told:
        """Another part of the same entries: both take what one container gains."""
        rates = [one.rate_bytes for one in (self, other) if one.rate_bytes is not None]
        return replace(self, rate_bytes=sum(rates) if rates else None, what="")


def _with_holders(record: Record, found: list[LeakFinding]) -> list[LeakFinding]:
    """Each holder that has a name takes its part of the growth of what is in use."""
    at = next((i for i, one in enumerate(found) if _may_be_held(one)), None)
    told = _told(record)
    if at is None or not told:
        return found
    own = found[at]
    if told[0].kind in _NOBODY:
        found[at] = replace(own, kind="C heap")
        return found
    named = [one for one in told if one.kind not in _NOBODY and not one.bounded]
    named = [one for one in named if one.rate_bytes is not None] or named[:1]
    total = sum(one.rate_bytes or own.rate_bytes for one in named)
    share = total / own.rate_bytes if own.rate_bytes > 0 else math.inf
    scale = 1 / share if measured(share, own.rate_bytes) else 1.0
    held = [
        replace(
            own,
            holder=one.path,
            kind=one.kind,
            what=one.what,
            rate_bytes=(one.rate_bytes or own.rate_bytes) * scale,
        )
        for one in named
    ]
    whole = [own] if share < EXPLAINED else []
    return [*found[:at], *whole, *held, *found[at + 1 :]]


def _may_be_held(finding: LeakFinding) -> bool:
    named = finding.holder or finding.kind or finding.grade in ("fills", "fragmentation")
    return not named and finding.signal in OF_USE


def _told(record: Record) -> list[_Told]:
    """Those that may matter, a name of Python's before C code, then the largest rate first.

    A graph of which nobody saw that it grows is left out: it is that of the current step. A monitor
    that records `process` names one only where it has grown; older ones named the largest. What a
    verdict that was taken back had named does not count, nor what a full device is full of.
    """
    seen = any(column.name == "process" for column in record.columns)
    found: dict[str, _Told] = {}
    nodes: dict[str, list[int]] = {}
    for event in record.events:
        data = event.data
        if isinstance(data, Leak) and data.over:
            found.clear()
            nodes.clear()
        elif isinstance(data, Holder) and data.kind != "tensors":
            one = _told_by(data, event.text)
            key = data.path
            if one.kind == "autograd graph":
                key = f"autograd graph kept by {one.path.rpartition(' kept by ')[2]}"
                nodes.setdefault(key, []).append(data.length or 0)
            older = found.pop(key, None)
            found[key] = older if older is not None and one.rate_bytes is None else one
    kept: dict[str, _Told] = {}
    for key, one in found.items():
        if one.kind != "autograd graph" or seen or one.rate_bytes or _grew(nodes.get(key, [])):
            kept[one.path] = one.beside(kept[one.path]) if one.path in kept else one
    return sorted(kept.values(), key=lambda one: (one.kind in _NOBODY, -(one.rate_bytes or 0)))


def _grew(nodes: list[int]) -> bool:
    return len(nodes) > 1 and nodes[-1] > nodes[0]


def _told_by(data: Holder, text: str) -> _Told:
    many = f" ({data.containers} of them)" if data.containers > 1 else ""
    return _Told(
        _ENTRY.sub("", shown(data.path or text)) + many,
        _kind(data),
        data.rate_bytes,
        shown(sentences.of_new_objects(data)),
        data.capacity is not None,
    )


def _kind(holder: Holder) -> str:
    """The kind of a container counts where the path begins with it: another path leads to a single
    object, which is a variable whatever it lies in."""
    if holder.path.startswith("lru_cache"):
        return "lru_cache"
    if holder.path.startswith(("C code", "nobody", "autograd graph", holder.kind)):
        return shown(holder.kind)
    return "variable"
