"""What the looks of a run show: what parts of memory were at each, and how they grow between them.

    Points: each signal at all looks ──┐
    LeakDetector: grades, since when ──┼──► Looks.evidence() ──► memtools._leak.judge
    GrowthCensus: who gains ───────────┘

A line through all looks includes what a program allocates once, as it warms up, and the noise of
its batches. Looks separates that from growth that goes on.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from memtools._leak.finding import RANK, WORKERS, LeakFinding
from memtools._leak.forecast import Course, course_of
from memtools._leak.growth import (
    Kept,
    Pace,
    kept_pace,
    line_of,
    pace_of,
    rising_pace,
    slope_of,
)
from memtools._leak.judge import (
    C_HEAP,
    OF_CENSUS,
    THRESHOLDS,
    Block,
    Children,
    Evidence,
    Part,
    Resident,
    at_least_suspect,
    keeps_graphs,
    trust_in,
)
from memtools._leak.jumps import FILLED, SAME, Jump, Jumps, Stairs, without

if TYPE_CHECKING:
    from memtools._census.holders import Holder

MOST_POINTS = 256
_UNKNOWN = -(2**63)  # bytes that are not known
MOST_OF_PACE = 64  # The pace is taken from up to so many of the newest points.
FEWEST_POINTS = 3  # A slope that holders explain is taken from at least so many points.


def key_of(holder: Holder) -> str:
    """The name of the signal: all that a holder has gained."""
    return f"{holder.kind} {holder.path}"


def since_of(looks: Sequence[int], step: int) -> int:
    """The step from which on slopes are taken: that of the first look, but within the newer three
    quarters of a run that is at `step`."""
    return max(looks[0], step // 4)


class Lows:
    """(step, bytes) of a series that is read often: the lowest of so many readings that the points
    stay few."""

    def __init__(self) -> None:
        self._steps, self._sizes = array("q"), array("q")
        self._each = self._count = 1  # readings of a point, and of the newest one

    @property
    def points(self) -> list[tuple[int, int]]:
        return list(zip(self._steps, self._sizes, strict=True))

    def add(self, step: int, size: int) -> None:
        """A reading at a step, which is not before that of the newest one."""
        if self._count < self._each:
            self._count += 1
            self._sizes[-1] = min(self._sizes[-1], size)
            return
        self._count = 1
        self._steps.append(step)
        self._sizes.append(size)
        if len(self._steps) == MOST_POINTS:
            self._steps = self._steps[::2]
            self._sizes = array("q", map(min, self._sizes[::2], self._sizes[1::2]))
            self._each *= 2
            self._count = self._each // 2 + 1


class Points:
    """The signals at the looks: a table of steps and bytes, of bounded length.

    `use` is what this process has in use: the heap and Python's own blocks. If the heap cannot be
    read, it is the resident bytes. `all` decides whether a census walks: use, shared memory,
    children and devices together. `counted` is what a limit of the host counts of the job: resident
    bytes that are of no file, children and shared memory. `highest` is the same at the peaks of
    steps. WORKERS is what all workers have gained that report it.
    """

    #: The signals of each sum.
    SUMS = {
        "use": ("heap", "python"),
        "all": ("heap", "python", "shm", "children", "device"),
        "counted": ("resident", "children", "shm"),
        "highest": ("resident", "children", "shm", "above"),
    }

    def __init__(self, *, noisy: bool = False) -> None:
        self.steps: list[int] = []
        #: the bytes of each signal at these steps, _UNKNOWN where they are not known
        self._columns: dict[str, array[int]] = {}
        #: whether they are not read at the same point of a step
        self.is_noisy = noisy
        #: whether several threads make the steps: then they are noisy, and vary more
        self.is_shared = False
        #: the jumps of the heap, of which there are readings between the looks
        self.jumps = Jumps()
        #: the resident bytes, of which there are such readings too
        self.resident = Lows()
        #: by signal, first step and jumps that are left out, as of the newest point
        self._paces: dict[tuple[str, int, tuple[Jump, ...]], Pace] = {}
        #: the first and the newest of some points of `resident`, and what they show
        self._kept: tuple[object, Kept | None] = None, None

    def add(self, step: int, values: dict[str, int]) -> None:
        """The signals that are known at this step, which is above all before."""
        if "heap" not in values and "rss" in values:
            values = {**values, "heap": values["rss"]}
        self._paces.clear()
        if len(self.steps) == MOST_POINTS:  # The older half becomes half as dense.
            keep = [*range(0, MOST_POINTS // 2, 2), *range(MOST_POINTS // 2, MOST_POINTS)]
            columns = {
                name: array("q", [column[i] for i in keep])
                for name, column in self._columns.items()
            }
            self._columns = {
                name: column for name, column in columns.items() if set(column) != {_UNKNOWN}
            }
            self.steps = [self.steps[i] for i in keep]
        for column in self._columns.values():
            column.append(_UNKNOWN)
        self.steps.append(step)
        self._enter(values)

    def _enter(self, values: Mapping[str, int]) -> None:
        """Enter values of the newest point."""
        for name, size in values.items():
            if name not in self._columns:
                self._columns[name] = array("q", [_UNKNOWN] * len(self.steps))
            self._columns[name][-1] = size

    def note(self, step: int, values: dict[str, int]) -> None:
        """Add to the newest point what a walk of the heap at its step has shown."""
        if self.steps and self.steps[-1] == step:
            self._enter(values)
            self._paces.clear()

    def series(self, name: str, since: int = 0) -> list[tuple[int, int]]:
        """(step, bytes) of a signal, or of one of the sums, from a step on. A part of a sum that is
        not known at a point counts as at the point before."""
        steps, columns = self.steps, self._columns  # One may be added now.
        names: Iterable[str] = self.SUMS.get(name, (name,))
        if name == WORKERS:
            names = [one for one in list(columns) if one.startswith("worker ")]
        parts = [columns[one] for one in names if one in columns]
        begin, end = bisect_left(steps, since), min(map(len, (steps, *parts)))
        before = (reversed(part[:begin]) for part in parts)
        last = [next((size for size in part if size != _UNKNOWN), 0) for part in before]
        found = []
        for at in range(begin, end):
            is_known = False
            for i, part in enumerate(parts):
                if part[at] != _UNKNOWN:
                    last[i], is_known = part[at], True
            if is_known:
                found.append((steps[at], sum(last)))
        return found

    def newest(self, name: str) -> int | None:
        """The newest bytes of a signal; None if it was never known."""
        points = self.series(name)
        return points[-1][1] if points else None

    def slope(self, name: str, since: int = 0) -> float:
        """Bytes a step by a line through the points from a step on; 0 for fewer than two."""
        return slope_of(self.series(name, since))

    def _without_end(self, name: str, since: int = 0) -> list[tuple[int, int]]:
        """The series. Noisy points come without the newest, which may be from the end of the
        program, when it has released objects."""
        points = self.series(name, since)
        return points[:-1] if self.is_noisy and len(points) > 3 else points

    def pace(self, name: str, since: int = 0) -> Pace:
        """Bytes a step now: by a line through the points from a step on, without those before the
        series became faster or slower; where it becomes faster evenly, at the newest point. Of
        resident memory by what is never given back, if that rises: the teeth of a sawtooth are in
        the points."""
        if name == "resident" and (kept := self.kept(since)) is not None:
            return Pace(kept.rate, int(kept.since), 0.0)
        stairs = self.stairs(name)
        key = name, since, () if stairs is None else stairs.jumps
        pace = self._paces.get(key)
        if pace is None:
            points = without(self._without_end(name, since)[-MOST_OF_PACE:], key[2])
            pace = rising_pace(points)
            if pace is None:
                pace = pace_of(points) if points else Pace(0.0, since, math.inf)
            self._paces[key] = pace
        return pace if stairs is None else pace._replace(rate=pace.rate + stairs.rate)

    def kept(self, since: int) -> Kept | None:
        """How fast resident memory rises that is never given back, where it has done so evenly from
        a step on, by enough to matter; None where it has not."""
        points = [point for point in self.resident.points if point[0] >= since]
        if not points or points[-1][0] - points[0][0] < 2 * THRESHOLDS.confirmed_steps:
            return None  # In its first steps a program takes what it keeps.
        key = points[0], points[-1]
        if self._kept[0] != key:  # One look asks several times.
            kept = kept_pace(points, THRESHOLDS.even)
            is_growth = kept and kept.is_even and kept.gain >= THRESHOLDS.least_gain
            self._kept = key, kept if is_growth else None
        return self._kept[1]

    def stairs(self, name: str) -> Stairs | None:
        """The growth of a signal in jumps; None if there is none."""
        if self.is_noisy or "heap" not in self.SUMS.get(name, (name,)):
            return None
        stairs = self.jumps.stairs()
        if stairs is None and (two := self.jumps.stairs(FILLED)) and self._is_filled(two):
            return two
        return stairs

    def _is_filled(self, stairs: Stairs) -> bool:
        """Whether resident memory has risen between the last two jumps by what is added to the
        buffer: pages that are written for the first time."""
        before, last = stairs.jumps[-2:]
        points = [point for point in self.series("rss", before.step) if point[0] <= last.since]
        if len(points) < 2 or points[-1][0] - points[0][0] < (last.since - before.step) / 4:
            return False
        return stairs.rate / SAME <= slope_of(points) <= stairs.rate * SAME

    def certain(self, name: str, since: int) -> Course:
        """How a series grows now, as far as its points from a step on show that for certain."""
        pace = self.pace(name, since)
        if pace.rising:
            steps = self._without_end(name, since)[-1][0] - pace.since
            return Course(pace.rate, pace.rate, pace.rising, steps)
        rate = pace.rate if pace.rate > THRESHOLDS.certain_errors * pace.error else 0.0
        return Course(rate, rate)

    def course(self, name: str, since: int, room: float) -> Course | None:
        """How a series may go on, by its points from a step on; None for fewer than three.

        Args:
            name: of the series.
            since: the step.
            room: bytes until its limit.
        """
        points = self._without_end(name, since)
        if len(points) < FEWEST_POINTS:
            return None
        certain = self.certain(name, since)
        if certain.rising:
            return certain
        bend = self.pace(name, since).since
        earlier = [point for point in points if point[0] < bend]
        bent = points[len(earlier) :]
        return (
            course_of(bent, room, earlier) if len(bent) > FEWEST_POINTS else course_of(points, room)
        )

    def recent(
        self, name: str, steps: int, *, but_a_fall: float = 0, freed_until: int = -1
    ) -> float | None:
        """Bytes a step from the newest point that is at least `steps` old to the newest one; None
        if there is no such point. Falls until the step `freed_until` do not count: a walk has found
        after them that the holder still has all it had. Of later ones the largest does not count if
        it is at most `but_a_fall` bytes: garbage of many steps goes at once."""
        points = self._without_end(name)
        before = [point for point in points if points[-1][0] - point[0] >= steps]
        if not before:
            return None
        (begin, first), (end, last) = before[-1], points[-1]
        if self.is_noisy:
            return slope_of(points[len(before) - 1 :])
        falls = [(step, a - b) for (_, a), (step, b) in pairwise(points[len(before) - 1 :])]
        others = sum(max(0, fall) for step, fall in falls if step <= freed_until)
        fall = max((fall for step, fall in falls if step > freed_until), default=0)
        garbage = fall if 0 < fall <= but_a_fall else 0
        return (last - first + others + garbage) / (end - begin)

    def rises(self, name: str) -> list[int]:
        """The steps of the points at which it was higher than ever before."""
        most, found = -1, []
        for step, size in self.series(name):
            if size > most + (0 if most < 0 else max(1024, most // 10_000)):
                found.append(step)
            most = max(most, size)
        return found[1:]


@dataclass(frozen=True)
class Looks:
    """What is known after a look.

    Attributes:
        step: of the look.
        steps: of the looks so far, without those that only watch what stands.
        points: the signals at all looks.
        grades: what the leak test says, by part of memory.
        tested: by part of memory, where the leak test sees growth: since when, and bytes a step. It
            has readings between the looks too.
    """

    step: int
    steps: Sequence[int]
    points: Points
    grades: Mapping[str, str]
    tested: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def since(self) -> int:
        """The step from which on the points show how something grows now."""
        return since_of(self.steps, self.step)

    def pace(self, name: str) -> float:
        """Bytes a step of a signal, as it goes on now."""
        return self.points.pace(name, self.since).rate

    def part(self, name: str) -> Part:
        """How a part of memory grows."""
        pace, rises = self.points.pace(name, self.since), self.points.rises(name)
        signal = name
        if name == "use":
            signal = "python" if self.pace("python") > self.pace("heap") else "heap"
        grade, since, begun = self.grades.get(name, "quiet"), rises[0] if rises else None, 0.0
        if self.points.stairs(name) is not None:
            grade = at_least_suspect(grade)
        at, tested = self.tested.get(name, (0, 0.0))
        # What has begun since the look before is in one point alone: the leak test has it.
        newest = self.steps[-2] if len(self.steps) > 1 else math.inf
        if at > max(self.since, newest - THRESHOLDS.confirmed_steps):
            since, begun = at, max(0.0, tested - pace.rate)
        return Part(signal, pace.rate, pace.error, grade, since, begun)

    def evidence(
        self,
        holders: Sequence[Holder] = (),
        *,
        children: Children | None = None,
        unheld: str = "",
        new_objects: str = "",
        walked: bool = True,
        unlooked: str = "",
        is_collected: bool = True,
        profiles: bool = False,
        declared: tuple[float, str] = (0.0, ""),
        seconds: float | None = None,
        resident: Resident | None = None,
        fills: Sequence[Block] = (),
        used: tuple[int, int] | None = None,
        least_rate: float = THRESHOLDS.least_rate,
    ) -> Evidence:
        """Everything that the judge reads. The arguments are fields of Evidence; holders are as of
        `now`."""
        return Evidence(
            use=self._use(holders),
            beside={name: self.part(name) for name in OF_CENSUS[1:]},
            children=children,
            holders=holders,
            step=self.step,
            walked=walked,
            unlooked=unlooked,
            looks=len(self.steps),
            unheld=unheld,
            new_objects=new_objects,
            c_heap_bytes=self._cost_of_c() if unheld == C_HEAP else 0.0,
            stairs=self.points.stairs("use"),
            is_collected=is_collected,
            profiles=profiles,
            declared=declared,
            is_shared=self.points.is_shared,
            seconds=seconds,
            resident=resident,
            fills=fills,
            used=used,
            least_rate=least_rate,
        )

    def resident(
        self,
        held: float,
        block: Callable[[int], Block | None],
    ) -> Resident | None:
        """How resident memory grows; None where that is not read.

        Args:
            held: bytes a step of the findings of use that stand.
            block: returns the block of memory that has got at least so many resident bytes, and
                has others that are not; None if there is none. It is called where such a block may
                be what grows, as it takes some milliseconds.
        """
        pace, is_even = self._resident_pace()
        points = self.points.series("resident", pace.since)
        if len(points) < FEWEST_POINTS:
            return None
        part = replace(self.part("resident"), rate_bytes=pace.rate, error=pace.error,
                       begun_bytes=0.0)  # fmt: skip
        found = Resident(
            part,
            max(held, self._over("use", pace.since)),
            points[-1][0],
            points[-1][0] - points[0][0],
            is_even,
            idle_bytes=self._over("idle", pace.since),
            idle=self.points.newest("idle"),
            mapped_bytes=self._over("VmData", pace.since),
            allocated=self.points.newest("heap"),
        )
        if not found.is_growth or not found.is_filling:
            return found
        return replace(found, block=block(points[-1][1] - points[0][1]))

    def _resident_pace(self) -> tuple[Pace, bool]:
        """How fast resident memory grows, and whether it does so evenly."""
        pace = self.points.pace("resident", self.since)
        if self.points.kept(self.since) is not None:
            return pace, True
        if not self.points.is_noisy and self.is_even("resident"):
            return pace, True
        if RANK[self.grades.get("resident", "quiet")] >= RANK["growing"]:
            since, rate = self.tested["resident"]
            return Pace(rate, max(since, self.since), 0.0), False
        return pace, False

    def _over(self, name: str, since: int) -> float:
        """Bytes a step of a signal from a step on. Where it rises in stairs, it is what it has
        risen by, if that is more than a line through the stairs shows."""
        points = self.points.series(name, since)
        if len(points) < 2:
            return 0.0
        (begin, first), (end, last) = points[0], points[-1]
        return max(slope_of(points), (last - first) / (end - begin))

    def children(
        self,
        count: int = 0,
        growing: Sequence[tuple[str, float]] = (),
        found: Sequence[LeakFinding] = (),
        in_use: float | None = None,
    ) -> Children:
        """How the child processes grow. The arguments are fields of Children."""
        rises = self.points.rises("children")
        part = Part(
            "children",
            self.pace("children"),
            grade=self.grades.get("children", "quiet"),
            since_step=rises[0] if rises else None,
        )
        return Children(part, count, self._steps_each(), growing, found, in_use)

    def now(self, holders: Sequence[Holder]) -> list[Holder]:
        """Holders that gain as they do now, and not on the average of all looks: steps may become
        longer."""
        return [self._now(holder) for holder in holders]

    def _now(self, holder: Holder) -> Holder:
        """What a holder gains is compared with what is in use at the same looks, because both may
        come in lumps; the pace of what is in use has more points than there are walks."""
        pace = self.points.pace("use", self.since)
        gained = self.points.series(key_of(holder), pace.since)
        if len(gained) < FEWEST_POINTS or gained[-1][0] != self.step or holder.new_bytes <= 0:
            return holder
        walked, at = [step for step, _ in gained], dict(self.points.series("use"))
        own, use = slope_of(gained), line_of([(step, at[step]) for step in walked if step in at])
        if own <= 0:
            return holder
        if pace.rising:  # which it may do because of another holder
            own = min(max(own, _at_end(gained)), pace.rate)
        elif use.slope > 0:
            trust = trust_in(pace.rate, pace.error) * trust_in(use.slope, use.error)
            own *= 1 + trust * (pace.rate / use.slope - 1)
        faster = own / holder.rate_bytes
        return replace(
            holder,
            new_bytes=round(faster * holder.new_bytes),
            new_objects=max(min(holder.new_objects, 1), round(faster * holder.new_objects)),
        )

    def _steps_each(self) -> float | None:
        """After how many steps there is one process more; None where they do not become more."""
        counts = self.points.series("count", self.since)
        if len(counts) <= 2 or counts[-1][1] <= counts[0][1]:
            return None
        more = [b - a for (_, a), (_, b) in pairwise(counts)]
        if min(more) < 0 or sum(1 for n in more if n) < 2:
            return None
        return (counts[-1][0] - counts[0][0]) / (counts[-1][1] - counts[0][1])

    def _use(self, holders: Sequence[Holder]) -> Part:
        """How use grows. The slope has in it what a program makes once, as it warms up; holders
        have not. Where the two differ, and the newer points lie on a slope that the holders
        explain, that is the one."""
        use, held = self.part("use"), sum(holder.rate_bytes for holder in holders)
        near = THRESHOLDS.near * held
        is_theirs = abs(use.rate_bytes - held) <= near
        is_known = is_theirs or self.points.stairs("use") is not None
        if held < THRESHOLDS.least_rate or keeps_graphs(holders) or is_known:
            return use
        points = self.points.series("use", self.points.pace("use", self.since).since)
        while len(points) > FEWEST_POINTS:
            points = points[1:]
            rate = slope_of(points)
            if abs(rate - held) <= near:
                return _at(rate, use)
        return use

    # --- what C code keeps ---

    def of_c(self, held: float, *, goes_on: bool = False) -> bool:
        """Whether what is in use grows as what C code keeps does, beside `held` bytes a step that
        are another's: evenly, or by a buffer that is made larger from time to time.

        Args:
            held: bytes a step that are another's.
            goes_on: whether that was found before; False by default. Noise alone does not end it.
        """
        if self.points.is_shared:
            return self._is_straight(held, goes_on=goes_on)
        return self.points.stairs("use") is not None or self.is_even(held=held)

    def _is_straight(self, held: float, *, goes_on: bool) -> bool:
        """Whether what is in use grows along a line, where the work of other threads is in every
        reading: the line through the later half of the points is certain to be about as steep as
        the one through the earlier half, or, if that `goes_on`, not certain to be less steep."""
        points = self.points.series("use", self.since)
        half = len(points) // 2
        if len(points) <= THRESHOLDS.even_intervals:
            return goes_on
        early, late, whole = map(line_of, (points[: half + 1], points[half:], points))
        if whole.error > THRESHOLDS.straight_error * (whole.slope - held):
            return False
        less = THRESHOLDS.slows * (early.slope - held) - (late.slope - held)
        error = math.hypot(THRESHOLDS.slows * early.error, late.error)
        return less <= (THRESHOLDS.certain_errors * error if goes_on else -error)

    def is_even(self, signal: str = "use", held: float = 0.0) -> bool:
        """Whether a signal grew in each of the last intervals between looks by about the same,
        without `held` bytes a step that are another's: what C code keeps does so; a cache of it
        that fills gets slower, and work that varies does not."""
        even = self._even(signal, held)
        return len(even) >= THRESHOLDS.even_intervals and not self._slows(signal, held)

    def _slows(self, signal: str, held: float) -> bool:
        """Whether the later intervals between looks, of those that count, show clearly less than
        the earlier ones: the kernels of a library come one for each new shape, and these become
        fewer."""
        points = [point for point in self.points.series(signal) if point[0] >= self.since]
        rates = [(b - a) / (t - s) - held for (s, a), (t, b) in pairwise(points)]
        half = len(rates) // 2
        if half < 2:
            return False
        return median(rates[half:]) < THRESHOLDS.slows * median(rates[:half])

    def _even(self, signal: str, held: float = 0.0) -> list[tuple[int, int]]:
        """(step, bytes) of the newest looks between which a signal grew by about the same a step.
        Empty where it did not grow in one of the last intervals."""
        at = dict(self.points.series(signal))
        known = [(step, at[step]) for step in self.steps if step in at]
        rates = [(b - a) / (t - s) - held for (s, a), (t, b) in pairwise(known)]
        least = THRESHOLDS.even_intervals
        if len(rates) < least or min(rates[-least:]) <= 0:
            return []
        begin = len(rates) - 1
        while begin > 0:
            newest = rates[begin - 1 :]
            if not 0 < THRESHOLDS.even * max(newest) <= min(newest):
                break
            begin -= 1
        return known[begin:]

    def _cost_of_c(self) -> float:
        """Bytes a step that C code and holders take together. Small blocks that stay keep what is
        freed around them from being used again: where resident memory goes on growing faster for
        certain, that is what they cost."""
        newest, use = self._even("use"), self.pace("use")
        if len(newest) > 2 and self.points.stairs("use") is None:
            use = min(use, slope_of(newest))
        use = max(0.0, use)
        resident = self._even("rss")
        cost = slope_of(resident) if len(resident) >= THRESHOLDS.even_intervals else 0.0
        is_trusted = THRESHOLDS.rss_from * use <= cost <= THRESHOLDS.rss_to * use
        return cost if is_trusted else use


def _at_end(points: Sequence[tuple[int, float]]) -> float:
    """Bytes a step at the newest of at least three points: by a line through their rates."""
    rates = [((s + t) / 2, (b - a) / (t - s)) for (s, a), (t, b) in pairwise(points)]
    return line_of(rates).at(points[-1][0])


def _at(rate: float, part: Part) -> Part:
    """The part at another rate, which is known as well as the one before."""
    before = part.rate_bytes
    error = part.error * rate / before if before > 0 else rate
    later = max(0.0, before + part.begun_bytes - max(rate, before))
    return replace(part, rate_bytes=rate, error=error, begun_bytes=later)
