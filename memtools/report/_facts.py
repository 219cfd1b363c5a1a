"""What a record says, as plain facts: `memtools explain` prints them and the report shows them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from memtools.report._events import (
    Ending,
    cleanup,
    ending,
    started_with,
    watched_from_outside,
)
from memtools.report._growth import Growth, judge
from memtools.report._timeline import UNKNOWN, Timeline, timeline
from memtools.report._words import duration, percent, shown, size

if TYPE_CHECKING:
    from memtools._record import Record, RecordEvent, RecordPhase

#: from here on the limit is taken for the reason of a kill
NEAR = 0.95
#: how control groups write "no limit"; no machine has as much
UNLIMITED = 2**62
#: the memory of a process that is watched from outside is seen falling while it ends
LAST_NS = 10**9


@dataclass(frozen=True)
class Used:
    """Memory in use against the limit. `of` says what is counted, `source` whose limit it is.
    `near_since_seconds`: how long before the last sample it passed 95 % for good. `at_last` says
    when `last_bytes` was in use."""

    of: str
    last_bytes: int
    peak_bytes: int
    peak_seconds: float
    limit_bytes: int | None
    source: str
    near_since_seconds: float | None
    at_last: str


@dataclass(frozen=True)
class Tier:
    """One column: its first, least, largest and newest reading, in the column's unit."""

    name: str
    unit: str
    first: int
    least: int
    peak: int
    peak_seconds: float
    last: int


@dataclass(frozen=True)
class Cleanup:
    """All cleanups of one kind; `freed_bytes` is None where no event says it."""

    what: str
    count: int
    seconds: float
    freed_bytes: int | None


@dataclass(frozen=True)
class Said:
    """The newest of several like lines of a record: when, at which step, how often."""

    seconds: float
    step: int | None
    text: str
    count: int


@dataclass(frozen=True)
class Facts:
    """Everything about one record. Texts are made harmless; sizes are bytes, times seconds."""

    path: str
    command: str
    pid: int
    start: float
    seconds: float
    samples: int
    unreadable: int
    steps: int | None
    ending: Ending
    used: Used | None
    tiers: tuple[Tier, ...]
    phases: tuple[RecordPhase, ...]
    leaks: tuple[Said, ...]
    holders: tuple[Said, ...]
    guards: tuple[Said, ...]
    growth: tuple[Growth, ...]
    not_judged: str | None
    forecast: str | None
    cleanups: tuple[Cleanup, ...]
    kinds: dict[str, int]
    devices: tuple[int, ...]
    line: Timeline = field(repr=False)


def gather(record: Record) -> Facts:
    """Read everything out of a record. Takes about 60 ms for the usual size."""
    line = timeline(record)
    devices = devices_of(record)
    used = _used(record, line)
    growth, why = judge(line, used.limit_bytes if used else None, devices)
    steps = line.last("step") if "step" in line.most else None
    lines = [text for text in (one.forecast() for one in growth) if text]
    kinds: dict[str, int] = {}
    for event in record.events:
        kinds[shown(event.kind)] = kinds.get(shown(event.kind), 0) + 1
    return Facts(
        path=shown(record.path),
        command=shown(" ".join(record.command)),
        pid=record.pid,
        start=record.start_ns / 1e9,
        seconds=record.seconds,
        samples=record.total,
        unreadable=record.unreadable,
        steps=steps,
        ending=ending(record),
        used=used,
        tiers=tuple(_tiers(record, line)),
        phases=tuple(sorted(record.phases, key=lambda p: (-(p.peak_bytes or -1), p.name))),
        leaks=_said(record, "leak"),
        holders=_said(record, "holder"),
        guards=_said(record, "guard"),
        growth=tuple(growth),
        not_judged=why,
        forecast=lines[0] if lines else None,
        cleanups=_cleanups(record),
        kinds=kinds,
        devices=tuple(devices),
        line=line,
    )


def is_bytes(unit: str) -> bool:
    return unit.lower() in ("b", "bytes", "byte")


def devices_of(record: Record) -> list[int]:
    """The numbers of the devices that the record has columns of."""
    found = (re.fullmatch(r"cuda(\d{1,3})_\w+", column.name) for column in record.columns)
    return sorted({int(match[1]) for match in found if match})


def seconds_of(record: Record, time_ns: int) -> float:
    """Of the run's clock, from the start; never negative."""
    return max(0, time_ns - record.clock_ns) / 1e9


def used_cells(line: Timeline, source: str, limit: int | None) -> tuple[str, list[int]] | None:
    """(what is counted, the most of each cell): what counts against the limit is the control
    group's use where it is the group's limit, what the machine has not available where it is the
    machine's, else resident memory with the children's."""
    if source == "machine" and limit is not None and line.known("available"):
        left = line.least["available"]
        return "machine", [UNKNOWN if n == UNKNOWN else max(0, limit - n) for n in left]
    if line.known("cgroup_used") and (source == "cgroup" or not line.known("rss")):
        return "control group", line.most["cgroup_used"]
    if not line.known("rss"):
        return None
    if not line.known("children_private"):
        return "process", line.most["rss"]
    pairs = zip(line.most["rss"], line.most["children_private"], strict=True)
    return "process and children", [_sum(*pair) for pair in pairs]


def _used(record: Record, line: Timeline) -> Used | None:
    limit, source = _limit(record, line)
    counted = used_cells(line, source, limit)
    if counted is None:
        return None
    of, most = counted
    known = [(value, -i) for i, value in enumerate(most) if value != UNKNOWN]
    if not known:
        return None
    peak, at = max(known)
    last, when = known[-1], "at the last sample"
    if watched_from_outside(record):
        late = [p for p in known if line.last_ns[-p[1]] >= line.last_ns[-1] - LAST_NS]
        last = max(late, key=lambda pair: (pair[0], -pair[1]))
        when = "in its last second"
    near = None if limit is None else _near(line, most[: 1 - last[1]], limit)
    return Used(of, last[0], peak, line.first_ns[-at] / 1e9, limit, source, near, when)


def _sum(one: int, other: int) -> int:
    if one == UNKNOWN:
        return UNKNOWN
    return one if other == UNKNOWN else one + other


def _limit(record: Record, line: Timeline) -> tuple[int | None, str]:
    """The control group's limit has a column; the start event tells of one that was given, and of
    the machine's, which counts where there is no other."""
    group = line.last("cgroup_limit") if "cgroup_limit" in line.most else None
    known = [(group, "cgroup")] if group is not None and 0 < group < UNLIMITED else []
    start = next((event.text for event in record.events if event.kind == "start"), "")
    given, machine = started_with(start)
    known += [(given, "given")] if given else []
    known += [(machine, "machine")] if machine and not known else []
    return min(known, default=(None, "none"))


def _near(line: Timeline, most: list[int], limit: int) -> float | None:
    """Seconds from when it passed 95 % of the limit, for good, to the last sample."""
    since = None
    for i in range(len(most) - 1, -1, -1):
        if most[i] != UNKNOWN and most[i] < NEAR * limit:
            break
        if most[i] != UNKNOWN:
            since = line.first_ns[i]
    return None if since is None else (line.last_ns[len(most) - 1] - since) / 1e9


def _tiers(record: Record, line: Timeline) -> list[Tier]:
    tiers = []
    for column in record.columns:
        peak, first = line.peak(column.name), line.first(column.name)
        last = line.last(column.name)
        if peak is not None and first is not None and last is not None:
            name, unit = shown(column.name), shown(column.unit)
            least = min(line.least[column.name])
            tiers.append(Tier(name, unit, first, least, peak[0], peak[1] / 1e9, last))
    return tiers


def _said(record: Record, kind: str) -> tuple[Said, ...]:
    """The events of a kind, those that differ in numbers alone as one: the newest."""
    found: dict[str, tuple[RecordEvent, int]] = {}
    for event in record.events:
        if event.kind == kind:
            key = re.sub(r"[\d.,]+( ?[KMGT]?i?B)?", "#", event.text)
            times = found.pop(key, (event, 0))[1]
            found[key] = (event, times + 1)
    return tuple(
        Said(seconds_of(record, event.time_ns), event.step, shown(event.text), times)
        for event, times in found.values()
    )


def _cleanups(record: Record) -> tuple[Cleanup, ...]:
    """Added up by what was done."""
    sums: dict[str, tuple[int, float, int | None]] = {}
    for event in record.events:
        if event.kind == "cleanup":
            what, took, freed = cleanup(event)
            count, seconds, sum_freed = sums.get(what, (0, 0.0, None))
            sum_freed = sum_freed if freed is None else (sum_freed or 0) + freed
            sums[what] = (count + 1, seconds + took, sum_freed)
    return tuple(Cleanup(what, *rest) for what, rest in sorted(sums.items()))


def headline(facts: Facts) -> str:
    """One sentence: what ended the run, and where memory stood."""
    return facts.ending.text + (f"; {standing(facts)}" if facts.used is not None else "")


def standing(facts: Facts) -> str:
    """Where memory stood at the end, as one clause; "" where it is not known."""
    used, line = facts.used, ""
    if used is not None and used.limit_bytes is not None:
        last, limit = size(used.last_bytes), size(used.limit_bytes)
        line = f"{used.at_last} it used {last} of {limit} ({used.source} limit"
        line += f", {percent(used.last_bytes, used.limit_bytes)})"
        if used.near_since_seconds is not None and facts.ending.kind != "running":
            passed = percent(NEAR, 1)
            line += f", {duration(used.near_since_seconds)} after passing {passed}"
    elif used is not None:
        line = f"{used.at_last} the {used.of} used {size(used.last_bytes)}"
        line += ", no limit is recorded"
    return line


def as_json(facts: Facts) -> dict[str, Any]:
    """Plain types with stable keys; sizes in bytes, times in seconds, null for what is unknown."""
    found = {f.name: _plain(getattr(facts, f.name)) for f in fields(facts) if f.name != "line"}
    for phase in found["phases"]:
        phase["name"] = shown(phase["name"])
    for plain, growth in zip(found["growth"], facts.growth, strict=True):
        plain |= {"text": str(growth), "forecast": growth.forecast()}
    return {**found, "headline": headline(facts)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity: a forecast without an end
    return value
