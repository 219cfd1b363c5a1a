"""What a record says, as plain facts: `memtools explain` prints them and the report shows them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from memtools._size import parse_bytes
from memtools.report._growth import Growth, judge
from memtools.report._timeline import UNKNOWN, Timeline, timeline
from memtools.report._words import duration, percent, shown, size

if TYPE_CHECKING:
    from memtools._record import Record, RecordEvent, RecordPhase

#: from here on the limit is taken for the reason of a kill
NEAR = 0.95
#: how control groups write "no limit"; no machine has as much
UNLIMITED = 2**62


@dataclass(frozen=True)
class Ending:
    """How the run ended: `kind` is "clean", "failed" (an exception or another exit code),
    "killed" (no end mark) or "running"; `text` is one clause about it."""

    kind: str
    text: str


@dataclass(frozen=True)
class Used:
    """Memory in use against the limit. `of` says what is counted, `source` whose limit it is.
    `near_since_seconds`: how long before the last sample it passed 95 % for good."""

    of: str
    last_bytes: int
    peak_bytes: int
    peak_seconds: float
    limit_bytes: int | None
    source: str
    near_since_seconds: float | None


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
        ending=_ending(record),
        used=used,
        tiers=tuple(_tiers(record, line)),
        phases=tuple(sorted(record.phases, key=lambda p: (-(p.peak_bytes or -1), p.name))),
        leaks=_said(record, "leak"),
        holders=_said(record, "holder"),
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


def _ending(record: Record) -> Ending:
    said = next((e.text for e in reversed(record.events) if e.kind == "end"), None)
    if said is None and not record.complete:
        if record.written:
            return Ending("running", "the process is alive and still writes it")
        return Ending("killed", "no end mark: the process was killed")
    text = shown(said or "").strip()
    code = re.search(r"\b(?:exit|code|status)\w*\W{0,3}(-?\d{1,9})\b", text, re.I)
    if re.search(r"\bSIG[A-Z]+\b|\bsignal\b|\bkilled\b", text):
        return Ending("killed", text)
    if (code and int(code[1]) != 0) or re.search(r"\w(Error|Exception|Interrupt|Pressure)\b", text):
        return Ending("failed", text)
    if code is None and text and not re.fullmatch(r"(?i)(ok|clean|done|exit|stopped|closed)", text):
        return Ending("clean" if record.complete else "killed", text)
    return Ending("clean", "it ended properly" + (f" ({text})" if text else ""))


def used_cells(line: Timeline, source: str) -> tuple[str, list[int]] | None:
    """(what is counted, the most of each cell): what counts against the limit is the control
    group's use where it is the group's limit, else resident memory with the children's."""
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
    counted = used_cells(line, source)
    if counted is None:
        return None
    of, most = counted
    known = [(value, -i) for i, value in enumerate(most) if value != UNKNOWN]
    peak, at = max(known)
    near = None if limit is None else _near(line, most, limit)
    return Used(of, known[-1][0], peak, line.first_ns[-at] / 1e9, limit, source, near)


def _sum(one: int, other: int) -> int:
    if one == UNKNOWN:
        return UNKNOWN
    return one if other == UNKNOWN else one + other


def _limit(record: Record, line: Timeline) -> tuple[int | None, str]:
    """A limit that was given stands in the start event; the control group's has a column."""
    group = line.last("cgroup_limit") if "cgroup_limit" in line.most else None
    if group is not None and not 0 < group < UNLIMITED:
        group = None
    start = next((event.text for event in record.events if event.kind == "start"), "")
    named = re.search(r"limit\D{0,20}?(\d[\d.]*) ?([KMGT]i?B|B)\b[^,;]{0,40}\bgiven\b", start)
    given = None
    if named:
        try:
            given = parse_bytes(f"{named[1]} {named[2]}")
        except ValueError:
            given = None
    if given is not None and (group is None or given <= group):
        return given, "given"
    return group, "none" if group is None else "cgroup"


def _near(line: Timeline, most: list[int], limit: int) -> float | None:
    """Seconds from when it passed 95 % of the limit, for good, to the last sample."""
    since = None
    for i in range(len(line) - 1, -1, -1):
        if most[i] != UNKNOWN and most[i] < NEAR * limit:
            break
        if most[i] != UNKNOWN:
            since = line.first_ns[i]
    return None if since is None else (line.last_ns[-1] - since) / 1e9


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
    """Added up by what was done: the text up to the first colon, comma or figure."""
    sums: dict[str, tuple[int, float, int | None]] = {}
    for event in record.events:
        if event.kind != "cleanup":
            continue
        what = shown(re.split(r"[:,;(]|\s-?\d", event.text, maxsplit=1)[0].strip()) or "cleanup"
        count, seconds, freed = sums.get(what, (0, 0.0, None))
        more = freed_bytes(event.text)
        freed = freed if more is None else (freed or 0) + more
        sums[what] = (count + 1, seconds + cleanup_seconds(event), freed)
    return tuple(Cleanup(what, *rest) for what, rest in sorted(sums.items()))


def freed_bytes(text: str) -> int | None:
    """The one size in a cleanup's text, as in "gc: 12.3 ms, freed 4.0 MiB"."""
    found = re.search(r"(?<![\w.])(-?)(\d{1,18}(?:\.\d{1,9})?) ?(B|bytes|[KMGT]i?B)\b", text)
    if found is None:
        return None
    unit = found[3].replace("bytes", "B")
    whole = parse_bytes(f"{found[2]} {unit}") if float(found[2]) >= 1 else 0
    return -whole if found[1] else whole


def cleanup_seconds(event: RecordEvent) -> float:
    if event.duration_ns:
        return event.duration_ns / 1e9
    took = re.search(r"(?<![\w.])(\d{1,12}(?:\.\d{1,9})?) ?(us|ms|s)\b", event.text)
    return float(took[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[took[2]] if took else 0.0


def headline(facts: Facts) -> str:
    """One sentence: what ended the run, and where memory stood."""
    return facts.ending.text + (f"; {standing(facts)}" if facts.used is not None else "")


def standing(facts: Facts) -> str:
    """Where memory stood at the end, as one clause; "" where it is not known."""
    used, line = facts.used, ""
    if used is not None and used.limit_bytes is not None:
        last, limit = size(used.last_bytes), size(used.limit_bytes)
        line = f"at the last sample it used {last} of {limit} ({used.source} limit"
        line += f", {percent(used.last_bytes, used.limit_bytes)})"
        if used.near_since_seconds is not None and facts.ending.kind != "running":
            passed = percent(NEAR, 1)
            line += f", {duration(used.near_since_seconds)} after passing {passed}"
    elif used is not None:
        line = f"at the last sample the {used.of} used {size(used.last_bytes)}"
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
