"""The figures of a record, computed once. run, watch, explain, report and export print them.

    samples, buckets ──► cells ──► process, workers, shared, job, group, machine ──► used of a limit
    events ──► how it ended, limits of the process, verdicts and holders of the run itself
    cells, events ──► growth: one verdict, one rate, one forecast

The process, the job (the process with its workers and their shared memory) and the machine are
three figures with three names. `used` is what counts against the limit: the control group's use
against the group's limit, the job against a limit that was given. Without either of them there is
only the machine, which other programs use as well. What those take is never counted as the job's.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memtools._base.limits import lowest_limit
from memtools._base.size import format_bytes
from memtools._base.text import duration, percent, shown
from memtools._record import peaks
from memtools._record.events import (
    Ending,
    ending,
    events_of,
    guard_set,
    idle_heap,
    limits_that_acted,
    process_limits,
    start_of,
)
from memtools._record.kills import explained
from memtools._record.kinds import Cleanup, Pressure, Start
from memtools._record.record import UNKNOWN
from memtools._record.series import (
    Timeline,
    median_step_seconds,
    own_column,
    timeline,
)
from memtools._record.verdict import Verdict, verdict_of

if TYPE_CHECKING:
    from memtools._record.record import Record, RecordPhase

#: A kill at this share of the limit or above is explained by the limit.
NEAR = 0.95
#: A process that is watched from outside gives back memory while it ends: for about this long.
LAST_NS = 10**9
#: A figure that is so much older than the last sample is shown with its age.
OLD_SECONDS = 2.0
#: Less shared memory is not shown: libraries take it for semaphores.
LEAST_SHARED = 2**20


@dataclass(frozen=True)
class Use:
    """The memory of a process or a job in bytes: the newest reading, and the highest of the run.
    `peak_seconds` is when that was; None if it is the kernel's own mark, which has no time."""

    last_bytes: int
    peak_bytes: int
    peak_seconds: float | None


@dataclass(frozen=True)
class Workers(Use):
    """The private memory of the child processes, and how many there were. It is read less often
    than that of the process: the newest reading is `age_seconds` older than the last sample, and
    from `step`; None without steps."""

    last_count: int
    most: int
    age_seconds: float
    step: int | None

    def age(self) -> str:
        """` (as of step 223, 13.0 s before the last sample)`; "" if it is new, or if they had
        ended by then."""
        if self.age_seconds < OLD_SECONDS or not self.last_bytes:
            return ""
        of_step = f"step {self.step:,}, " if self.step else ""
        return f" (read at {of_step}{duration(self.age_seconds)} before the last sample)"


@dataclass(frozen=True)
class Machine(Use):
    """The memory in use on the machine, by all processes."""

    total_bytes: int


@dataclass(frozen=True)
class Used:
    """What counts against the limit.

    Attributes:
        of: what is counted: "process", "job" or "control group".
        source: where the limit comes from: "given", "cgroup", "machine" or "none".
        near_since_seconds: how long before the last sample it passed 95 % for good (if the limit is
            the machine's, how long before it the whole machine did); None if it did not.
        at_last: when `last_bytes` were in use, in words.
    """

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
    """A column: its first, smallest, largest and newest reading, in the column's unit."""

    name: str
    unit: str
    first: int
    least: int
    peak: int
    peak_seconds: float
    last: int


@dataclass(frozen=True)
class Cleanups:
    """All cleanups of one kind; `freed_bytes` is None if no event has it."""

    what: str
    count: int
    seconds: float
    freed_bytes: int | None


@dataclass(frozen=True)
class Guard:
    """A guard that was set: its share of the limit, whether it could act, and whether memory passed
    it. A guard acts at the end of a step, so in a run without steps it cannot act."""

    fraction: float
    could_act: bool
    passed: bool


@dataclass(frozen=True)
class Figures:
    """All figures of a record. Sizes are bytes, times are seconds, and texts are made harmless."""

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
    shared: Use | None
    job: Use | None
    children_most: int | None
    machine: Machine | None
    process_limits: dict[str, int]
    idle_heap: int | None
    guard: Guard | None
    tiers: tuple[Tier, ...]
    phases: tuple[RecordPhase, ...]
    cleanups: tuple[Cleanups, ...]
    kinds: dict[str, int]
    devices: tuple[int, ...]
    line: Timeline = field(repr=False)
    record: Record = field(repr=False)

    # --- growth: judged when it is used for the first time, which takes some 30 ms ---

    @cached_property
    def verdict(self) -> Verdict:
        """What is known about growth, by the run's own test and by the record's series."""
        return verdict_of(self)

    @cached_property
    def step_seconds(self) -> float | None:
        """The median time of a step; None if the record has too few steps."""
        return median_step_seconds(self.line)

    @property
    def room_bytes(self) -> int | None:
        """How much was left until the limit at the end; None without a limit."""
        used = self.used
        if used is None or used.limit_bytes is None:
            return None
        if used.source == "machine" and self.machine is not None:
            return max(0, self.machine.total_bytes - self.machine.last_bytes)
        return max(0, used.limit_bytes - used.last_bytes)

    # --- the peaks and the limit for the JSON of every command; None if they are not known ---

    @property
    def peak_bytes(self) -> int | None:
        return None if self.process is None else self.process.peak_bytes

    @property
    def job_peak_bytes(self) -> int | None:
        return None if self.job is None else self.job.peak_bytes

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
    def refusing(self) -> dict[str, int]:
        """The limits of the process that refused an allocation: those that are known to have acted,
        or else all that may have."""
        acted = limits_that_acted(self.record)
        return {n: b for n, b in self.process_limits.items() if n in acted} or self.process_limits

    @property
    def limit_acted(self) -> str | None:
        """The limit that ended the run, in words; None if that is not known."""
        cause = self.ending.cause
        if cause is not None and cause.by == "shm":
            return f"/dev/shm of {format_bytes(cause.limit_bytes or 0)}"
        if self.ending.out_of_memory == "host" and self.refusing:
            return " and ".join(f"{n} of {format_bytes(b)}" for n, b in self.refusing.items())
        if cause is not None and cause.by == "group" and cause.limit_bytes is not None:
            return f"the cgroup limit of {format_bytes(cause.limit_bytes)}"
        used = self.used
        if used is None or not self.near_limit or not self.ending.by_memory(near=True):
            return None
        return f"the {used.source} limit of {format_bytes(used.limit_bytes or 0)}"

    # --- words ---

    def peaks(self) -> str:
        """`peak: the process 376.3 MiB; its workers 1.64 GiB; the job 2.00 GiB; the machine 14.1 of
        23.5 GiB`. The figure that counts against the limit has the limit beside it."""
        parts = self._parts("peak_bytes")
        return f"peak: {parts}" if parts else "peak unknown"

    def now(self) -> str:
        """The same figures at the end, or now."""
        return self._parts("last_bytes") or "memory unknown"

    def _parts(self, which: str) -> str:
        used, parts = self.used, []
        limit = None if used is None else used.limit_bytes
        given = used is not None and used.source == "given"
        name = "the process tree" if self.outside else "the process"
        if self.process is not None:
            own = f"{name} {format_bytes(getattr(self.process, which))}"
            # Workers that have ended and files that are gone are not shown.
            beside = {"its workers": self.workers, "shared memory": self.shared}
            sizes = {name: getattr(use, which) for name, use in beside.items() if use is not None}
            alone = self.job is None or not any(sizes.values())
            parts.append(own + (self._of_limit(which) if alone and given else ""))
            ages = {"its workers": "" if self.workers is None else self.workers.age()}
            parts += [
                f"{name} {format_bytes(size)}{ages.get(name, '')}"
                for name, size in sizes.items()
                if size
            ]
            if self.job is not None and not alone:
                job = f"the job {format_bytes(getattr(self.job, which))}"
                parts.append(job + (self._of_limit(which) if given else ""))
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
        """How much memory was in use at the end, as one clause; "" if it is not known."""
        if self.used is None:
            return ""
        line = f"{self.used.at_last}: {self.now()}"
        if self.used.source == "none":
            line += ", no limit is recorded"
        if self.used.near_since_seconds is not None and self.ending.kind != "running":
            line += f", {duration(self.used.near_since_seconds)} after passing {percent(NEAR, 1)}"
        return line

    def headline(self) -> str:
        """One sentence: what ended the run, and how much memory was in use."""
        parts = [self.ending.text]
        if self.ending.out_of_memory == "host" and self.limit_acted:
            parts.append(f"{self.limit_acted} was in force")
        return "; ".join([*parts, *([self.standing()] if self.used is not None else [])])

    def guard_words(self) -> str | None:
        """A sentence about a guard that was set and could not act; None if there is none."""
        if self.guard is None or self.guard.could_act:
            pressure = events_of(self.record, Pressure)
            return next((shown(p.sentence()) for p in pressure if p.what == "cannot act"), None)
        passed = " although memory passed it" if self.guard.passed else ""
        return (
            f"the guard at {100 * self.guard.fraction:g}% could not act{passed}: it acts at the "
            "end of a torch optimizer's step, and none was made"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain types with stable keys. Sizes are bytes, times are seconds; null is not known."""
        left_out = ("line", "record")
        found = {
            f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name not in left_out
        }
        for phase in found["phases"]:
            phase["name"] = shown(phase["name"])
        return {
            **found,
            "job_peak_bytes": self.job_peak_bytes,
            "limit_acted": self.limit_acted,
            "guard_text": self.guard_words(),
            **self.verdict.as_json(),
            "peak_of_step": peaks.as_json(self),
            "headline": self.headline(),
        }


def of(part: int, whole: int) -> str:
    """`14.1 of 23.5 GiB (60 %)`: the unit is written once if both have the same."""
    first, second = format_bytes(part), format_bytes(whole)
    number, _, unit = first.rpartition(" ")
    first = number if unit == second.rpartition(" ")[2] else first
    return f"{first} of {second} ({percent(part, whole)})"


def figures_of(record: Record) -> Figures:
    """Compute the figures of a record. Takes about 30 ms for the usual size. Growth is judged when
    it is used for the first time, which takes as long again."""
    line = timeline(record)
    start = start_of(record)
    outside = bool(start.command)  # then samples are taken while the command ends
    process, workers = _process(line, record, outside), _workers(line)
    job = _job(line, process, workers)
    limit, source = _limit(line, start)
    machine = _machine(line, start.machine_bytes)
    used = _used(line, limit, source, job, outside)
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
        ending=explained(ending(record), record, used),
        outside=outside,
        own_monitor=not outside and start.name != "memtools run",
        used=used,
        process=process,
        workers=workers,
        shared=_shared(line),
        job=job,
        children_most=None if children is None else children[0],
        machine=machine,
        process_limits=process_limits(record),
        idle_heap=idle_heap(record),
        guard=_guard(record, used, steps),
        tiers=tuple(_tiers(record, line)),
        phases=tuple(sorted(record.phases, key=lambda p: (-(p.peak_bytes or -1), p.name))),
        cleanups=_cleanups(record),
        kinds=kinds,
        devices=tuple(devices_of(record)),
        line=line,
        record=record,
    )


#: programs that start the kernel of a notebook
_KERNELS = re.compile(r"(?:ipykernel|(?:ipykernel|colab_kernel)_launcher)(?:\.py)?")
A_NOTEBOOK = "a notebook"


def script_of(record: Record) -> str:
    """The name of a program by its command: the script's file name, the module after -m, or the
    program's name; "" if there is no command. For a notebook, its file name, or "a notebook" if
    that is not known."""
    name = _program_of(record.command)
    return shown(start_of(record).notebook) or A_NOTEBOOK if _KERNELS.fullmatch(name) else name


def _program_of(command: Sequence[str]) -> str:
    script = next((part for part in command if part.endswith(".py")), "")
    if not script and "-m" in command[:-1]:
        script = command[list(command).index("-m") + 1]
    return os.path.basename(script or (command[0] if command else ""))


def is_bytes(unit: str) -> bool:
    return unit.lower() in ("b", "bytes", "byte")


def devices_of(record: Record) -> list[int]:
    """The numbers of the devices for which the record has columns."""
    found = (re.fullmatch(r"cuda(\d{1,3})_\w+", column.name) for column in record.columns)
    return sorted({int(match[1]) for match in found if match})


def seconds_of(record: Record, time_ns: int) -> float:
    """Convert a time of the run's clock to seconds since the start, which are never negative."""
    return max(0, time_ns - record.clock_ns) / 1e9


# --- process, workers, job, control group and machine ---------------------------------------------


def job_cells(line: Timeline) -> list[int]:
    """The highest reading of the job in each cell: the sampler's own sum, which it computes at one
    moment. Records that were made from outside have the process and the workers' private memory,
    which is read less often: its last reading counts until the next one."""
    if line.known("job"):
        return line.most["job"]
    own = line.most.get(own_column(line), [])
    theirs = line.most.get("children_private", [UNKNOWN] * len(own))
    found, workers = list[int](), 0
    for process, private in zip(own, theirs, strict=True):
        workers = workers if private == UNKNOWN else private
        # A damaged record may hold any numbers: their sum must not be UNKNOWN.
        found.append(UNKNOWN if process == UNKNOWN else min(process + workers, UNKNOWN - 1))
    return found


def used_cells(line: Timeline, source: str) -> tuple[str, list[int]] | None:
    """What counts against the limit: its name, and the highest reading in each cell."""
    if line.known("cgroup_used") and (source == "cgroup" or not line.known(own_column(line))):
        return "control group", line.most["cgroup_used"]
    if not line.known(own_column(line)):
        return None
    return ("job" if _is_job(line) else "process"), job_cells(line)


def _is_job(line: Timeline) -> bool:
    """Whether there are workers or shared memory beside the process."""
    workers, shared = (line.peak(name) or (0, 0) for name in ("children_private", "shm"))
    return workers[0] > 0 or shared[0] >= LEAST_SHARED


def _newest(line: Timeline, cells: list[int], outside: bool) -> tuple[int, int]:
    """The newest reading and its cell. From outside: the highest reading of the last second, in
    which memory falls while the command ends. There must be a reading."""
    known = [(value, i) for i, value in enumerate(cells) if value != UNKNOWN]
    late = [pair for pair in known if line.last_ns[pair[1]] >= line.last_ns[-1] - LAST_NS]
    if outside and late:
        return max(late)
    return known[-1]


def _use(line: Timeline, cells: list[int]) -> Use | None:
    known = [(value, -i) for i, value in enumerate(cells) if value != UNKNOWN]
    if not known:
        return None
    peak, at = max(known)
    return Use(known[-1][0], peak, line.first_ns[-at] / 1e9)


def _process(line: Timeline, record: Record, outside: bool) -> Use | None:
    """The kernel's own marks of the phases count as well: a peak may lie between two samples. The
    probe has subtracted pages that are mapped again."""
    column = own_column(line)
    own = _use(line, line.most.get(column, []))
    if own is None:
        return None
    newest = _newest(line, line.most[column], outside)[0] if outside else line.last(column) or 0
    marks = max((p.peak_bytes for p in record.phases if p.peak_bytes is not None), default=0)
    if marks > own.peak_bytes:
        return Use(newest, marks, None)
    return Use(newest, own.peak_bytes, own.peak_seconds)


def _workers(line: Timeline) -> Workers | None:
    theirs, counts = line.peak("children_private"), line.peak("children")
    if theirs is None or theirs[0] == 0:
        return None
    last = line.last("children_private") or 0
    most = counts[0] if counts else 0
    readings = line.most["children_private"]
    at = max(i for i, value in enumerate(readings) if value != UNKNOWN)
    age = (line.last_ns[-1] - line.last_ns[at]) / 1e9
    made = [step for step in line.most.get("step", ())[: at + 1] if 0 < step < UNKNOWN]
    now = line.last("children") or 0
    step = made[-1] if made else None
    return Workers(last, theirs[0], theirs[1] / 1e9, now, most, age, step)


def _shared(line: Timeline) -> Use | None:
    use = _use(line, line.most.get("shm", []))
    return use if use is not None and use.peak_bytes >= LEAST_SHARED else None


def _job(line: Timeline, process: Use | None, workers: Workers | None) -> Use | None:
    """The process, its workers and their shared memory at the same moment."""
    if process is None or not _is_job(line):
        return process
    sums = _use(line, job_cells(line))
    assert sums is not None  # the process has a reading
    newest = line.last("job")
    if newest is None:
        newest = process.last_bytes + (0 if workers is None else workers.last_bytes)
    job = Use(newest, sums.peak_bytes, sums.peak_seconds)
    if process.peak_bytes > job.peak_bytes:
        return Use(job.last_bytes, process.peak_bytes, None)
    return job


def _machine(line: Timeline, total: int | None) -> Machine | None:
    if total is None or total <= 0 or not line.known("available"):
        return None
    cells = [UNKNOWN if n == UNKNOWN else max(0, total - n) for n in line.least["available"]]
    use = _use(line, cells)
    left = line.last("available")
    assert use is not None
    last = use.last_bytes if left is None else max(0, total - left)
    return Machine(last, use.peak_bytes, use.peak_seconds, total)


def _used(
    line: Timeline, limit: int | None, source: str, job: Use | None, outside: bool
) -> Used | None:
    counted = used_cells(line, source)
    if counted is None:
        return None
    of_what, most = counted
    last, at = _newest(line, most, outside)
    use = job
    if of_what == "control group":
        use = _use(line, most)
        last = last if outside else line.last("cgroup_used") or last
    elif job is not None:
        last = job.last_bytes
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
    """The control group's limit has a column. The start event has a limit that was given, and the
    machine's memory, which is the limit if there is no other."""
    group = line.last("cgroup_limit")
    found = lowest_limit(given=start.given_bytes, cgroup=group, machine=start.machine_bytes)
    return found or (None, "none")


def _near(line: Timeline, most: list[int], limit: int) -> float | None:
    """Seconds from the moment at which it passed 95 % of the limit for good to the last sample."""
    since = None
    for i in range(len(most) - 1, -1, -1):
        if most[i] != UNKNOWN and most[i] < NEAR * limit:
            break
        if most[i] != UNKNOWN:
            since = line.first_ns[i]
    return None if since is None else (line.last_ns[len(most) - 1] - since) / 1e9


# --- guards, columns and cleanups -----------------------------------------------------------------


def _guard(record: Record, used: Used | None, steps: int | None) -> Guard | None:
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


def _cleanups(record: Record) -> tuple[Cleanups, ...]:
    """The cleanups, added up by what was done."""
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
    """Convert to plain types for JSON. JSON has no infinity: a forecast without an end is null."""
    if isinstance(value, tuple):
        return [plain(part) for part in value]
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
