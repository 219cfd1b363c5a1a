"""The signals of a leak test: what is read at the end of a step, and where each of them ends.

    Signal.read() ──► bytes now, less what the looks of memtools itself have added
          │
          ├─ at a look ─────────────► Points: one row for each look, at the same point of a step
          └─ between, where cheap ──► LeakDetector, at even units of steps

What a reading costs changes by a factor of ten thousand from program to program (mallinfo2 counts
every free chunk), and so does the time of a step. A look reads each signal whatever that costs, as
there are few of them. Between the looks a signal is read as often as it is cheap. The leak test
wants readings that are even in steps: so each signal gets a unit of steps, set once, and the units
in between lie on the line from one reading to the next. Lows are kept by that, and no stairs are
made.

    steps     | | | | | | | | | | | | |
    read      0       4           10
    unit 2    0   2   4   6   8   10          what the test sees
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from memtools import _core
from memtools._base import devices as cuda_devices
from memtools.blocks.reports import HostBlocks
from memtools.monitor.host import rooms_of_process

EACH_READING = 16  # units from one reading to the next, as long as costs stay what they were
FEED_NS = 2_500  # that the test takes for a value
MOST_POINTS = 256
MOST_OF_PACE = 64  # of them, the newest, that tell how fast something grows now
SAME = 0.1  # two rates that differ by less are the same
LEAST_PACE = 1024.0  # bytes a step: what grows more slowly has ended, which is judged elsewhere
EXACT = 0.1  # steps of growth by which a point may lie beside a line without any noise
CHANGED = 1.0  # so many times as much better as chance alone makes it


#: signals that torch counts anyhow, to the byte: a reading of them takes less than 1 us
COUNTED = ("device", "tensors")


class Signal:
    """One series of readings."""

    __slots__ = (
        *("_fed", "_newest", "_origin", "_own", "_read"),
        *("cost_ns", "due", "name", "recent_ns", "unit"),
    )

    #: after a reading between looks it rests for so many times what the reading took
    PAUSE = 800

    def __init__(self, name: str, read: Callable[[], int | None]) -> None:
        self.name, self._read = name, read
        #: the least that a reading has taken
        self.cost_ns = 1 << 62
        #: what one takes now, between looks; 0: none was taken yet
        self.recent_ns = 0
        #: when to read next, on the monotonic clock; 0 while it is fed as it is read
        self.due = 0
        #: steps from one value that the test sees to the next; 0 while it is fed as it is read
        self.unit = 0
        self._origin = self._fed = 0
        self._newest: tuple[int, int | None] = 0, None
        self._own = 0  # bytes that looks have added

    def read(self) -> int | None:
        """Bytes now, less what looks have added; None where it is not known."""
        size = self._read()
        return None if size is None else max(0, size - self._own)

    @property
    def newest(self) -> tuple[int, int | None]:
        """The step of the newest reading that the test was given, and its bytes."""
        return self._newest

    def rest(self, now: int, took_ns: int, pause: int) -> None:
        """A reading has taken so long: read again after so many times that. What takes more than
        twice as long as the one before was interrupted by another program, most likely, and is no
        measure; if it stays so slow, the next ones tell."""
        most = 2 * self.recent_ns or took_ns
        self.recent_ns = max(1, min(took_ns, most))
        self.due = now + pause * self.recent_ns

    def leave_out(self, before: int | None, after: int | None) -> None:
        """Do not count what memtools has added, or given back, between these two readings."""
        if before is not None and after is not None:
            self._own += after - before

    def begin(self, step: int, step_ns: float) -> None:
        """From this step on values are given for each unit of steps: a sixteenth of the steps that
        will lie between two readings, where a step takes so many nanoseconds. In fast steps more,
        so that a value for each unit takes less time than readings may."""
        apart = max(self.cost_ns / EACH_READING, 2 * FEED_NS)
        self.unit = 1
        while self.unit * max(1.0, step_ns) < self.PAUSE * apart:
            self.unit *= 2
        self._origin, self._fed = step, 0

    def feed(self, step: int, size: int | None) -> Iterator[tuple[int, int | None]]:
        """(step, bytes) of each unit since the reading before, of which `size` is the newest."""
        last_step, last_size = self._newest
        self._newest = step, size
        if self.unit == 0:
            yield step, size
            return
        last = (step - self._origin) // self.unit
        for n in range(self._fed + 1, last + 1):
            at = self._origin + n * self.unit
            if size is None or last_size is None:
                yield at, size
            else:
                yield at, last_size + (size - last_size) * (at - last_step) // (step - last_step)
        self._fed = max(self._fed, last)


def python_bytes() -> int:
    """Bytes of the interpreter's own blocks; where it tells their number only, about."""
    size = _core._python_bytes()
    return 64 * sys.getallocatedblocks() if size is None else size


def signals_of(
    probe: _core.Probe, devices: Sequence[int], blocks: HostBlocks | None = None
) -> list[Signal]:
    """The signals of a run, the resident bytes first.

    Args:
        probe: what reads the memory of the process.
        devices: CUDA devices, by number.
        blocks: the reports of torch's host allocator; None, the default: no signal `tensors`.
    """

    def figure(fields: int, name: str) -> Callable[[], int | None]:
        return lambda: getattr(probe.read(fields), name)

    def shared() -> int | None:
        size = probe.read(_core.READ_SHM).shm
        _core._hear_files()
        return size

    signals = [
        # Resident bytes, less what pools map more than once: forks of a cache are no growth.
        Signal("rss", figure(_core.READ_RSS, "process")),
        Signal("heap", figure(_core.READ_HEAP, "heap_used")),
        Signal("python", python_bytes),
        Signal("children", figure(_core.READ_CHILDREN, "children_private")),
        Signal("shm", shared),
    ]
    if blocks is not None:
        signals.append(Signal("tensors", blocks.in_use))
    if devices:
        signals.append(Signal("device", lambda: cuda_devices.allocated(devices)))
    return signals


class Limits:
    """Where the signals end: how much memory there is to grow into."""

    def __init__(self, sampler: _core.Sampler, probe: _core.Probe, devices: Sequence[int]) -> None:
        self._sampler, self._probe, self._devices = sampler, probe, devices

    def host(self) -> int | None:
        """Bytes at which this process, with its children and its shared memory, reaches the limit;
        None when unknown."""
        sample = self._sampler.latest() or self._probe.read()
        room = self.room()
        if sample.process is None or room is None:
            return None
        beside = (sample.children_private or 0) + (sample.shm or 0)
        return sample.process + beside + max(0, room)

    def room(self) -> int | None:
        """Bytes from what is used now to the limit that is met first: the host's, or one of this
        process (`ulimit -d`, `ulimit -v`). None when no limit is known."""
        used, limit = self._sampler.used(), self._sampler.limit()
        rooms = [] if used is None or limit is None else [limit[0] - used]
        return min([*rooms, *rooms_of_process()], default=None)

    def share(self, part: float) -> int | None:
        """So much of the host's limit, in bytes; None when unknown."""
        limit = self._sampler.limit()
        return None if limit is None else int(part * limit[0])

    def used(self) -> int | None:
        """What counts against the host's limit, by the newest sample."""
        return self._sampler.used()

    def device(self) -> int | None:
        """Bytes at which all watched devices are full; None when unknown."""
        total = 0
        for tiers in map(cuda_devices.tiers, self._devices):
            if tiers.reserved is None or tiers.free is None:
                return None
            total += tiers.reserved + tiers.free
        return total if self._devices else None


class Points:
    """What the signals were at the looks: a table of steps and bytes, of bounded length.

    `use` is what is in use in this process: the heap and Python's own blocks. Where the heap cannot
    be read, it is the resident bytes. `all` is what the gate of the census goes by: use, shared
    memory, children and devices together.
    """

    #: which signals make which sums
    SUMS = {"use": ("heap", "python"), "all": ("heap", "python", "shm", "children", "device")}

    def __init__(self, *, noisy: bool = False) -> None:
        self.steps: list[int] = []
        self._values: list[dict[str, int]] = []
        self._is_noisy = noisy  # they are not of the same point of a step

    def add(self, step: int, values: dict[str, int]) -> None:
        """The signals that are known at this step, which is above all before."""
        if "heap" not in values and "rss" in values:
            values = {**values, "heap": values["rss"]}
        self.steps.append(step)
        self._values.append(values)
        if len(self.steps) > MOST_POINTS:  # the older half becomes half as dense
            keep = [*range(0, MOST_POINTS // 2, 2), *range(MOST_POINTS // 2, len(self.steps))]
            self.steps = [self.steps[i] for i in keep]
            self._values = [self._values[i] for i in keep]

    def series(self, name: str, since: int = 0) -> list[tuple[int, int]]:
        """(step, bytes) of a signal, or of one of the sums, from a step on; parts of a sum that are
        not known at a point count as they were before."""
        parts, last = self.SUMS.get(name, (name,)), dict[str, int]()
        found = []
        for step, values in zip(self.steps, self._values, strict=True):
            known = [part for part in parts if part in values]
            last |= {part: values[part] for part in known}
            if known and step >= since:
                found.append((step, sum(last.values())))
        return found

    def slope(self, name: str, since: int = 0) -> float:
        """Bytes a step by a straight line through the points from a step on; 0 below two."""
        return slope_of(self.series(name, since))

    def _settled(self, name: str, since: int = 0) -> list[tuple[int, int]]:
        """The series. Of noisy points without the newest, which may be of the end of all, when the
        program has let go of things."""
        points = self.series(name, since)
        return points[:-1] if self._is_noisy and len(points) > 3 else points

    def pace(self, name: str, since: int = 0) -> Pace:
        """Bytes a step as it goes on now: by a line through the points from a step on, without
        those of before it became faster or slower."""
        points = self._settled(name, since)[-MOST_OF_PACE:]
        begin = 0
        while (knee := _knee(points[begin:])) > 0:
            begin += knee
        line = _Fit()
        for point in points[begin:]:
            line.add(*point)
        return Pace(line.slope, points[begin][0] if points else since, line.error)

    def recent(self, name: str, steps: int, but_a_fall: float = 0) -> float | None:
        """Bytes a step from the newest point that is so many steps old to the newest one; None
        where there is none. A fall between two points of `but_a_fall` bytes at most does not count,
        where it is the largest: garbage of many steps goes at once."""
        points = self._settled(name)
        before = [point for point in points if points[-1][0] - point[0] >= steps]
        if not before:
            return None
        (begin, first), (end, last) = before[-1], points[-1]
        if self._is_noisy:
            return slope_of(points[len(before) - 1 :])
        fall = max((a - b for (_, a), (_, b) in pairwise(points[len(before) - 1 :])), default=0)
        forgiven = fall if 0 < fall <= but_a_fall else 0
        return (last - first + forgiven) / (end - begin)

    def rises(self, name: str) -> list[int]:
        """The steps of the points at which it was above all that it had been."""
        most, found = -1, []
        for step, size in self.series(name):
            if size > most + (0 if most < 0 else max(1024, most // 10_000)):
                found.append(step)
            most = max(most, size)
        return found[1:]


class Pace(NamedTuple):
    """Bytes a step, the step from which on they have come so, and the standard error of them."""

    rate: float
    since: int
    error: float = 0.0


def _knee(points: Sequence[tuple[int, int]]) -> int:
    """The number of the point from which on the points lie on a line of their own, beside the one
    through those before; 0 where one line through all of them is as good.

    Both are fitted by least squares. What is left over of each tells noise from a bend: two lines
    always leave less, but for less than one time in a thousand not so much less by chance alone.
    """
    best, knee = CHANGED, 0
    whole = _Fit()
    for point in points:
        whole.add(*point)
    before, after = _Fit(), _Fit()
    left = [before.add(*point) for point in points]
    right = [after.add(*point) for point in reversed(points)][::-1]
    for k in range(2, len(points) - 2):
        rate = right[k].slope
        if rate < LEAST_PACE or abs(rate - whole.slope) <= SAME * rate:
            continue
        free = len(points) - 4
        rest = left[k - 1].rest + right[k].rest
        better = (whole.rest - rest) / 2 / max(rest / free, (EXACT * rate) ** 2)
        if better / _by_chance(free) > best:
            best, knee = better / _by_chance(free), k
    return knee


class _Line(NamedTuple):
    """By least squares: bytes a step, and the squares of what is left over."""

    slope: float
    rest: float


class _Fit:
    """A line through ever more points."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y", "_yy", "rest", "slope")

    def __init__(self) -> None:
        self._n, self._x, self._y = 0, 0.0, 0.0  # how many, and their means
        self._xx = self._xy = self._yy = 0.0  # around these
        self.slope = self.rest = 0.0

    def add(self, x: float, y: float) -> _Line:
        self._n += 1
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._n
        self._y += dy / self._n
        self._xx += dx * (x - self._x)
        self._xy += dx * (y - self._y)
        self._yy += dy * (y - self._y)
        self.slope = self._xy / self._xx if self._xx else 0.0
        self.rest = max(0.0, self._yy - self.slope * self._xy)
        return _Line(self.slope, self.rest)

    @property
    def error(self) -> float:
        """Of the slope; without bound where there are too few points."""
        if self._n < 3 or not self._xx:
            return math.inf
        return math.sqrt(self.rest / (self._n - 2) / self._xx)


def _by_chance(free: int) -> float:
    """How much better two lines are than one in one of a thousand cases without a bend, by so many
    points more than the lines have numbers: the F distribution's of (2, free). Where these are one
    or two, in one of a hundred: so few points say something where there is no noise."""
    known = (5000.0, 99.0, 80.0, 60.0, 37.1, 27.0, 21.7, 18.5, 16.4, 14.9)
    return known[free - 1] if free <= len(known) else 6.9 + 80.0 / free


def error_of(steps: Sequence[int], sizes: Sequence[int]) -> float:
    """The standard error of the slope of a line through readings, in bytes a step; infinite for
    fewer than three."""
    line = _Fit()
    for step, size in zip(steps, sizes, strict=True):
        line.add(step, size)
    return line.error


def slope_of(points: Sequence[tuple[int, int]]) -> float:
    """By least squares; 0 for fewer than two points."""
    n = len(points)
    if n < 2:
        return 0.0
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    over = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / over if over else 0.0
