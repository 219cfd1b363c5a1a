"""The figures of a record, computed once; run, watch, explain, report and export print them.

    samples, buckets ──► cells ──► process, workers, together, group, machine ──► used of the limit
    events ──► how it ended, limits of the process, verdicts and holders of the run itself
    cells, events ──► growth: one verdict, one rate, one forecast

The process, its workers (child processes) and the machine are three figures under three names.
`used` is what counts against the limit: the control group's use against the group's limit, the
process and its workers against a limit that was given. Without either there is only the machine,
which other programs use as well: the process and its workers are never blamed for what those take.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memtools._base.size import format_bytes
from memtools._base.text import duration, percent, shown
from memtools.record.events import (
    Ending,
    ending,
    events_of,
    guard_set,
    idle_heap,
    process_limits,
    start_of,
)
from memtools.record.holdings import Holding, holdings
from memtools.record.kinds import Cleanup, Pressure, Start
from memtools.record.series import UNKNOWN, Timeline, own_column, timeline
from memtools.record.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from memtools.record.record import Record, RecordEvent, RecordPhase

#: from here on the limit is taken for the reason of a kill
NEAR = 0.95
#: how control groups write "no limit"; no machine has as much
UNLIMITED = 2**62
#: the memory of a process that is watched from outside is seen falling while it ends
LAST_NS = 10**9


@dataclass(frozen=True)
class Use:
    """Memory of one party in bytes: the newest reading, and the most of the run. `peak_seconds` is
    None where only the kernel's own mark knows the peak, which does not say when it was."""

    last_bytes: int
    peak_bytes: int
    peak_seconds: float | None


@dataclass(frozen=True)
class Workers(Use):
    """Private memory of the child processes, and how many there were."""

    last_count: int
    most: int


@dataclass(frozen=True)
class Machine(Use):
    """What is not available on the machine, whoever uses it."""

    total_bytes: int


@dataclass(frozen=True)
class Used:
    """What counts against the limit. `of` says what is counted, `source` whose limit it is: given,
    cgroup, machine or none. `near_since_seconds`: how long before the last sample it passed 95 %
    for good; of a machine's limit, when the whole machine did. `at_last` says when `last_bytes` was
    in use."""

    of: str
    last_bytes: int
    peak_bytes: int
    peak_seconds: float | None
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
class Cleanups:
    """All cleanups of one kind; `freed_bytes` is None where no event says it."""

    what: str
    count: int
    seconds: float
    freed_bytes: int | None


@dataclass(frozen=True)
class Repeated:
    """The newest of several like lines of a record: when, at which step, how often."""

    seconds: float
    step: int | None
    text: str
    count: int


@dataclass(frozen=True)
class Guard:
    """A guard that was set: its share of the limit, and whether it could act. It acts at the end of
    a step, so that a run without steps has a guard that cannot."""

    fraction: float
    could_act: bool
    passed: bool


@dataclass(frozen=True)
class Figures:
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
    outside: bool
    own_monitor: bool
    used: Used | None
    process: Use | None
    workers: Workers | None
    together: Use | None
    children_most: int | None
    machine: Machine | None
    process_limits: dict[str, int]
    idle_heap: int | None
    guard: Guard | None
    tiers: tuple[Tier, ...]
    phases: tuple[RecordPhase, ...]
    leaks: tuple[Repeated, ...]
    holders: tuple[Holding, ...]
    guards: tuple[Repeated, ...]
    cleanups: tuple[Cleanups, ...]
    kinds: dict[str, int]
    devices: tuple[int, ...]
    line: Timeline = field(repr=False)
    record: Record = field(repr=False)

    # --- growth: judged when it is asked for, which takes some 30 ms ---

    @cached_property
    def verdict(self) -> Verdict:
        """What is known of growth: by the run's own test and by the record's series."""
        return verdict_of(self)

    @property
    def room_bytes(self) -> int | None:
        """What is left until the limit at the end; None without a limit."""
        used = self.used
        if used is None or used.limit_bytes is None:
            return None
        if used.source == "machine" and self.machine is not None:
            return max(0, self.machine.total_bytes - self.machine.last_bytes)
        return max(0, used.limit_bytes - used.last_bytes)

    # --- the peaks and the limit, None where they are not known: for the JSON of every command ---

    @property
    def peak_bytes(self) -> int | None:
        return None if self.process is None else self.process.peak_bytes

    @property
    def peak_with_workers_bytes(self) -> int | None:
        return None if self.together is None else self.together.peak_bytes

    @property
    def used_peak_bytes(self) -> int | None:
        return None if self.used is None else self.used.peak_bytes

    @property
    def limit_bytes(self) -> int | None:
        return None if self.used is None else self.used.limit_bytes

    @property
    def limit_source(self) -> str:
        return "none" if self.used is None else self.used.source

    @property
    def near_limit(self) -> bool:
        return self.used is not None and self.used.near_since_seconds is not None

    @property
    def limit_acted(self) -> str | None:
        """The limit that ended the run, in words; None where none is known to have."""
        if self.ending.out_of_memory == "host" and self.process_limits:
            return " and ".join(f"{n} of {format_bytes(b)}" for n, b in self.process_limits.items())
        used = self.used
        if used is None or not self.near_limit or not self.ending.by_memory(near=True):
            return None
        return f"the {used.source} limit of {format_bytes(used.limit_bytes or 0)}"

    # --- words ---

    def peaks(self) -> str:
        """`peak: the process 376.3 MiB; with its workers 2.00 GiB; the machine 14.1 of 23.5 GiB`;
        the figure that counts against the limit with that limit."""
        parts = self._parts("peak_bytes")
        return f"peak: {parts}" if parts else "peak unknown"

    def now(self) -> str:
        """The same at the end, or now."""
        return self._parts("last_bytes") or "memory unknown"

    def _parts(self, which: str) -> str:
        used, parts = self.used, []
        limit = None if used is None else used.limit_bytes
        given = used is not None and used.source == "given"
        name = "the process tree" if self.outside else "the process"
        if self.process is not None:
            own = f"{name} {format_bytes(getattr(self.process, which))}"
            alone = given and (self.together is None or self.workers is None)
            parts.append(own + (self._of_limit(which) if alone else ""))
        if self.workers is not None and self.together is not None:
            parts.append(f"its workers {format_bytes(getattr(self.workers, which))}")
            both = f"together {format_bytes(getattr(self.together, which))}"
            parts.append(both + (self._of_limit(which) if given else ""))
        if used is not None and used.of == "control group":
            group = f"the control group {format_bytes(getattr(used, which))}"
            parts.append(group + (self._of_limit(which) if limit else ""))
        if self.machine is not None and (used is None or used.source == "machine"):
            parts.append(
                f"the machine {of(getattr(self.machine, which), self.machine.total_bytes)}"
            )
        return "; ".join(parts)

    def _of_limit(self, which: str) -> str:
        assert self.used is not None
        limit = self.used.limit_bytes or 0
        share = percent(getattr(self.used, which), limit)
        return f" of {format_bytes(limit)} ({self.used.source} limit, {share})"

    def standing(self) -> str:
        """Where memory stood at the end, as one clause; "" where it is not known."""
        if self.used is None:
            return ""
        line = f"{self.used.at_last}: {self.now()}"
        if self.used.source == "none":
            line += ", no limit is recorded"
        if self.used.near_since_seconds is not None and self.ending.kind != "running":
            line += f", {duration(self.used.near_since_seconds)} after passing {percent(NEAR, 1)}"
        return line

    def headline(self) -> str:
        """One sentence: what ended the run, and where memory stood."""
        parts = [self.ending.text]
        if self.ending.out_of_memory == "host" and self.limit_acted:
            parts.append(f"{self.limit_acted} was in force")
        return "; ".join([*parts, *([self.standing()] if self.used is not None else [])])

    def guard_words(self) -> str | None:
        """That a guard was set and could not act; None where there is nothing to say."""
        if self.guard is None or self.guard.could_act:
            told = events_of(self.record, Pressure)
            return next((shown(p.sentence()) for p in told if p.what == "cannot act"), None)
        passed = " although memory passed it" if self.guard.passed else ""
        return (
            f"the guard at {100 * self.guard.fraction:g}% could not act{passed}: it acts at the "
            "end of a torch optimizer's step, and none was made"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain types with stable keys; sizes in bytes, times in seconds, null for the unknown."""
        left_out = ("line", "record")
        found = {
            f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in left_out
        }
        for phase in found["phases"]:
            phase["name"] = shown(phase["name"])
        return {
            **found,
            "peak_with_workers_bytes": self.peak_with_workers_bytes,
            "limit_acted": self.limit_acted,
            "guard_text": self.guard_words(),
            **self.verdict.as_json(),
            "headline": self.headline(),
        }


def of(part: int, whole: int) -> str:
    """`14.1 of 23.5 GiB (60 %)`: the unit once where both have the same."""
    first, second = format_bytes(part), format_bytes(whole)
    number, _, unit = first.rpartition(" ")
    first = number if unit == second.rpartition(" ")[2] else first
    return f"{first} of {second} ({percent(part, whole)})"


def figures_of(record: Record) -> Figures:
    """Read everything out of a record. Takes about 30 ms for the usual size; growth is judged when
    it is asked for, which takes as long again."""
    line = timeline(record)
    start = start_of(record)
    outside = bool(start.command)  # which goes on writing while the command ends
    process, workers, together = _process(record, line, outside)
    limit, source = _limit(line, start)
    machine = _machine(line, start.machine_bytes)
    used = _used(line, limit, source, together, outside)
    kinds: dict[str, int] = {}
    for event in record.events:
        kinds[shown(event.kind)] = kinds.get(shown(event.kind), 0) + 1
    steps, children = line.last("step"), line.peak("children")
    return Figures(
        path=shown(record.path),
        command=shown(" ".join(record.command)),
        pid=record.pid,
        start=record.start_ns / 1e9,
        seconds=record.seconds,
        samples=record.total,
        unreadable=record.unreadable,
        steps=steps,
        ending=ending(record),
        outside=outside,
        own_monitor=not outside and start.name != "memtools run",
        used=used,
        process=process,
        workers=workers,
        together=together,
        children_most=None if children is None else children[0],
        machine=machine,
        process_limits=process_limits(record),
        idle_heap=idle_heap(record),
        guard=_guard(record, line, used, steps),
        tiers=tuple(_tiers(record, line)),
        phases=tuple(sorted(record.phases, key=lambda p: (-(p.peak_bytes or -1), p.name))),
        leaks=_repeated(record, "leak"),
        holders=holdings(record),
        guards=_repeated(record, "guard"),
        cleanups=_cleanups(record),
        kinds=kinds,
        devices=tuple(devices_of(record)),
        line=line,
        record=record,
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


# --- who uses how much ----------------------------------------------------------------------------


def together_cells(line: Timeline) -> list[int]:
    """Resident memory and the workers' private memory in each cell. Workers are read less often:
    between two readings they keep what they had."""
    own, found, workers = line.most.get(own_column(line), []), [], 0
    theirs = line.most.get("children_private", [UNKNOWN] * len(own))
    for size_now, private in zip(own, theirs, strict=True):
        workers = workers if private == UNKNOWN else private
        found.append(UNKNOWN if size_now == UNKNOWN else size_now + workers)
    return found


def used_cells(line: Timeline, source: str) -> tuple[str, list[int]] | None:
    """(what is counted, the most of each cell) of what counts against the limit."""
    if line.known("cgroup_used") and (source == "cgroup" or not line.known(own_column(line))):
        return "control group", line.most["cgroup_used"]
    if not line.known(own_column(line)):
        return None
    name = "process and workers" if _has_workers(line) else "process"
    return name, together_cells(line)


def _newest(line: Timeline, cells: list[int], outside: bool) -> tuple[int, int]:
    """(the newest reading, its cell); from outside the most of the last second, in which memory is
    seen falling while the command ends. pre: there is a reading."""
    known = [(value, i) for i, value in enumerate(cells) if value != UNKNOWN]
    late = [pair for pair in known if line.last_ns[pair[1]] >= line.last_ns[-1] - LAST_NS]
    if outside and late:
        return max(late)
    return known[-1]


def _has_workers(line: Timeline) -> bool:
    peak = line.peak("children_private")
    return peak is not None and peak[0] > 0


def _use(line: Timeline, cells: list[int]) -> Use | None:
    known = [(value, -i) for i, value in enumerate(cells) if value != UNKNOWN]
    if not known:
        return None
    peak, at = max(known)
    return Use(known[-1][0], peak, line.first_ns[-at] / 1e9)


def _process(
    record: Record, line: Timeline, outside: bool
) -> tuple[Use | None, Workers | None, Use | None]:
    """(the process, its workers, both together). The kernel's own marks of the phases, from which
    the probe has taken pages that are mapped again, count: what lies between two samples is a peak,
    too."""
    column = own_column(line)
    own = _use(line, line.most.get(column, []))
    if own is None:
        return None, None, None
    newest = _newest(line, line.most[column], outside)[0] if outside else line.last(column) or 0
    marks = max((p.peak_bytes for p in record.phases if p.peak_bytes is not None), default=0)
    process = Use(newest, own.peak_bytes, own.peak_seconds)
    if marks > own.peak_bytes:
        process = Use(newest, marks, None)
    if not _has_workers(line):
        return process, None, process
    theirs, sums = line.peak("children_private"), _use(line, together_cells(line))
    assert theirs is not None
    assert sums is not None
    counts, last = line.peak("children"), line.last("children_private") or 0
    workers = Workers(
        last, theirs[0], theirs[1] / 1e9, line.last("children") or 0, counts[0] if counts else 0
    )
    both = Use(process.last_bytes + last, sums.peak_bytes, sums.peak_seconds)
    if process.peak_bytes > both.peak_bytes:
        both = Use(both.last_bytes, process.peak_bytes, None)
    return process, workers, both


def _machine(line: Timeline, total: int | None) -> Machine | None:
    if total is None or not line.known("available"):
        return None
    cells = [UNKNOWN if n == UNKNOWN else max(0, total - n) for n in line.least["available"]]
    use = _use(line, cells)
    left = line.last("available")
    assert use is not None
    last = use.last_bytes if left is None else max(0, total - left)
    return Machine(last, use.peak_bytes, use.peak_seconds, total)


def _used(
    line: Timeline, limit: int | None, source: str, together: Use | None, outside: bool
) -> Used | None:
    counted = used_cells(line, source)
    if counted is None:
        return None
    of_what, most = counted
    last, at = _newest(line, most, outside)
    use = together
    if of_what == "control group":
        use = _use(line, most)
        last = last if outside else line.last("cgroup_used") or last
    elif together is not None:
        last = together.last_bytes
    assert use is not None  # what is counted has a reading
    near = None
    if limit is not None and source == "machine" and line.known("available"):
        left = line.least["available"]
        near = _near(line, [UNKNOWN if n == UNKNOWN else max(0, limit - n) for n in left], limit)
    elif limit is not None:
        near = _near(line, most[: 1 + at], limit)
    when = "in its last second" if outside else "at the last sample"
    return Used(of_what, last, use.peak_bytes, use.peak_seconds, limit, source, near, when)


def _limit(line: Timeline, start: Start) -> tuple[int | None, str]:
    """The control group's limit has a column; the start event tells of one that was given, and of
    the machine's, which counts where there is no other."""
    group = line.last("cgroup_limit")
    known = [(group, "cgroup")] if group is not None and 0 < group < UNLIMITED else []
    known += [(start.given_bytes, "given")] if start.given_bytes else []
    known += [(start.machine_bytes, "machine")] if start.machine_bytes and not known else []
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


# --- what else a record tells ---------------------------------------------------------------------


def _guard(record: Record, line: Timeline, used: Used | None, steps: int | None) -> Guard | None:
    fraction = guard_set(record)
    if fraction is None:
        return None
    limit = None if used is None else used.limit_bytes
    passed = used is not None and limit is not None and used.peak_bytes >= fraction * limit
    return Guard(fraction, could_act=bool(steps), passed=passed)


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


def _repeated(record: Record, kind: str) -> tuple[Repeated, ...]:
    """The events of a kind, those that differ in numbers alone as one: the newest."""
    found: dict[tuple[object, ...], tuple[RecordEvent, int]] = {}
    for event in record.events:
        if event.kind == kind:
            values = vars(event.data).values() if event.data else [event.text]
            key = tuple(v for v in values if v is None or isinstance(v, (str, bool)))
            times = found.pop(key, (event, 0))[1]
            found[key] = (event, times + 1)
    return tuple(
        Repeated(seconds_of(record, event.time_ns), event.step, shown(event.text), times)
        for event, times in found.values()
    )


def _cleanups(record: Record) -> tuple[Cleanups, ...]:
    """Added up by what was done."""
    sums: dict[str, tuple[int, float, int | None]] = {}
    for event in record.events:
        if isinstance(event.data, Cleanup):
            what, freed = shown(", ".join(event.data.actions))[:60], event.data.freed_bytes
            took = event.duration_ns / 1e9 or sum(event.data.ms) / 1e3
            count, seconds, sum_freed = sums.get(what, (0, 0.0, None))
            sum_freed = sum_freed if freed is None else (sum_freed or 0) + freed
            sums[what] = (count + 1, seconds + took, sum_freed)
    return tuple(Cleanups(what, *rest) for what, rest in sorted(sums.items()))


def plain(value: Any) -> Any:
    """Plain types for JSON, which has no infinity: a forecast without an end is null."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
