"""LeakDetector: does a program leak, how fast, and how long is left? From memory readings alone.

                                            ┌─► floor.py ──► by the floor: noise of any size, slowly
    bytes of a signal ─► less declared growth
                                            └─► drift.py ──► by the newest readings of an exact
                                                             signal: in 16 to 32 steps
    heap ──┐ bytes in use: exact        early, quiet     nothing grows, or it is too early to say
    python │                            fragmentation    only rss grows, what is in use does not
    tensors   ─► the highest grade      suspect          it grew at the same point of 16 to 32 steps
    children     decides                growing          and goes on; a warm-up may do so, too
    device │                            likely           and has not clearly slowed down
    shm ───┘                            leak             and does not slow down, 3 times in a row
    rss ───────► resident: noisy, may grow without a leak and faster than one

Of each signal the blocks of its floor and the 64 newest readings are kept, 6 KiB with the lines
through them. A floor is judged 40 times in 8,000 readings, the newest readings each 8 steps and
later each 16. Only steps count, never time.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

from memtools._base import sentences
from memtools._base.number import any_whole_number, positive, shown, whole_number
from memtools._base.size import parse_bytes
from memtools._base.text import as_name
from memtools._leak.declared import Declared
from memtools._leak.finding import GRADES
from memtools._leak.forecast import Trend, steps_left
from memtools._leak.readings import EARLY, FRAGMENTATION, LEAK, LIKELY, QUIET, SUSPECT, Readings

#: The signals, and the bytes from which on a rise counts. All but rss are exact.
_BARS = {
    "heap": 2.0**18,
    "python": 2.0**19,
    "tensors": 2.0**18,
    "children": 2.0**20,
    "device": 2.0**20,
    "shm": 2.0**20,
    "rss": 2.0**20,
}
SIGNALS = tuple(_BARS)
_OUTSIDE = ("children", "shm")  # what fills a limit beside the process
#: The readings have to cover so many steps before growth can be said, and before it can be said
#: that nothing grows.
STEPS_TO_SUSPECT, STEPS_NEEDED = sentences.STEPS_TO_SUSPECT, sentences.STEPS_NEEDED
#: Growth that no container explains matters from so many bytes a step on, more than most buffers
#: and caches of a warm-up take, or from so many a second, which fill 16 GiB within a day.
LEAST_PER_STEP, LEAST_PER_SECOND = 1024, 256 * 1024

_FARTHEST = 2**53  # steps, which a float counts exactly
_UNKNOWN = 2**64 - 1  # bytes that are not known
_STRAIGHTEST = 0.95  # late over early


class StepsLeft(NamedTuple):
    """Steps until a limit, as an interval; `math.inf` if the series does not grow."""

    #: the fewest that are likely
    lo: float
    #: at the present rate
    mid: float
    #: the most that are likely
    hi: float

    def __str__(self) -> str:
        return sentences.of_steps_left(self.lo, self.hi)


@dataclass(frozen=True)
class LeakVerdict:
    """The verdict of a LeakDetector at one moment; `str()` is one line."""

    #: one of the grades of LeakFinding
    kind: str
    #: growth of the signal that decided, in bytes a step; 0 when early or quiet
    rate_bytes_per_step: float
    #: "high" or "good" (leak), "fair" (likely), "low" (suspect, growing), "none"
    confidence: str
    #: steps until the detector's limit; None without one, and when quiet
    steps_left: StepsLeft | None = None
    #: the signal that decided; None when early or quiet
    signal: str | None = None
    #: the step at which the growth began, as far as known
    since_step: int | None = None
    #: half the width of the rate's 95 % interval
    rate_error: float = 0.0
    #: growth of resident memory; None where rss is not read
    rss_bytes_per_step: float | None = None
    #: growth late in the run over growth early in it; 1 is a straight line
    shape: float = 0.0
    #: the limit may be reached within a tenth of the steps done, or 100 steps
    pressure: bool = False
    #: it may be a buffer to declare by `expect_growth`
    declarable: bool = False
    #: steps that the readings cover
    steps_known: int = 0

    def __str__(self) -> str:
        return sentences.of_verdict(self)


def matters(bytes_per_step: float, steps_per_second: float) -> bool:
    """Whether growth without a known holder is worth reporting."""
    per_second = bytes_per_step * steps_per_second
    return bytes_per_step >= LEAST_PER_STEP or per_second >= LEAST_PER_SECOND


def _together(a: StepsLeft | None, b: StepsLeft | None) -> StepsLeft | None:
    """Steps until two series that grow side by side have filled what each alone would fill after
    `a` and after `b` steps."""
    if a is None or b is None:
        return a or b
    steps = []
    for x, y in zip(a, b, strict=True):
        steps.append(1 / (1 / x + 1 / y) if x and y else 0.0)
    return StepsLeft(*steps)


def _bars(bar: int | str | Mapping[str, int | str] | None) -> dict[str, float]:
    """The bytes from which on a rise of each signal counts."""
    if bar is None:
        return _BARS
    if not isinstance(bar, Mapping):
        return dict.fromkeys(SIGNALS, float(parse_bytes(bar, "bar_bytes")))
    for name in bar:
        if name not in SIGNALS:
            names = f"{', '.join(SIGNALS[:-1])} and {SIGNALS[-1]}"
            raise ValueError(f"bar_bytes: there is no signal {name!r}; there are {names}")
    given = {name: float(parse_bytes(size, f"bar_bytes[{name!r}]")) for name, size in bar.items()}
    return _BARS | given


class LeakDetector:
    """A leak test for a training loop, or for any series of memory readings.

        detector = memtools.LeakDetector(limit_bytes="16 GiB")
        for step in range(steps):
            ...
            detector.update(step, heap=bytes_in_use, rss=bytes_resident)
        print(detector.verdict())

    Six signals are exact and decide: `heap` (malloc's bytes in use), `python` (the interpreter's
    blocks), `tensors`, `children` (private bytes of child processes), `device` (allocated bytes)
    and `shm` (the job's shared memory). `rss` decides only without `heap`. Read them always at the
    same point of a step. Takes 6 KiB per signal; not thread-safe.

    Args:
        limit_bytes: bytes that the process, its children and shared memory may use, or like
            `"16 GiB"`; for forecasts.
        device_limit_bytes: the same for the device.
        span_steps: steps that a window must cover before its shape counts, at least 1. If memory
            has a period, such as an epoch, pass at least 2.5 times its length.
        bar_bytes: growth below this does not count: one size, or a dict by signal. None: 1 MiB for
            rss, children, device and shm, 512 KiB for python, 256 KiB for heap and tensors.

    Attributes:
        limit_bytes: may be set at any time.
        device_limit_bytes: the same.

    Raises ValueError for an invalid size or an unknown signal.
    """

    __slots__ = (
        *("_bars", "_declared", "_series", "_signals", "_span"),
        *("device_limit_bytes", "limit_bytes"),
    )

    def __init__(
        self,
        limit_bytes: int | str | None = None,
        *,
        device_limit_bytes: int | str | None = None,
        span_steps: int = 1500,
        bar_bytes: int | str | Mapping[str, int | str] | None = None,
    ) -> None:
        self._span = whole_number("span_steps", span_steps)
        self._bars = _bars(bar_bytes)
        self.limit_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "limit_bytes")
        self.device_limit_bytes = (
            None
            if device_limit_bytes is None
            else parse_bytes(device_limit_bytes, "device_limit_bytes")
        )
        self._signals = SIGNALS  # that it judges
        self._series: dict[str, Readings] = {}  # of the signals that were read
        self._declared = Declared()

    def update(self, step: SupportsIndex, **bytes_by_signal: SupportsIndex | None) -> None:
        """Add the readings of one step. Takes 1 to 5 us per signal.

        Args:
            step: the number of the step, greater than before.
            bytes_by_signal: bytes by signal, such as `heap=`; None if unknown.

        Raises ValueError for an unknown signal, a step out of order, or a negative reading; nothing
        is added then.
        """
        at = _step_of("update(): step", step)
        sizes = {name: _bytes_of(name, value) for name, value in bytes_by_signal.items()}
        self._check_order(sizes, at, "update()")
        for name, size in sizes.items():
            if size is not None:
                self._add(name, at, size)

    def update_many(self, step: SupportsIndex, **arrays_by_signal: Any) -> list[tuple[int, str]]:
        """Add the readings of many steps.

        Args:
            step: the number of the first step.
            arrays_by_signal: arrays of bytes by signal, of one length and dtype int64, uint64 or
                float64; NaN if unknown.

        Returns the steps at which the kind changed, as (step, kind). Raises as update does.
        """
        first = _step_of("update_many(): step", step)
        columns = {
            _signal(name, "update_many()"): _column(name, array)
            for name, array in arrays_by_signal.items()
        }
        lengths = {len(column): name for name, column in columns.items()}
        if len(lengths) > 1:
            (a, one), (b, other), *_ = lengths.items()
            raise ValueError(
                f"update_many(): {one} has {a} readings, {other} has {b}; pass arrays of the same "
                "length"
            )
        self._check_order(columns, first, "update_many()")
        before, changes = self.kind, []
        for at, row in enumerate(zip(*columns.values(), strict=True), first):
            changed = False
            for name, size in zip(columns, row, strict=True):
                changed = (size is not None and self._add(name, at, size)) or changed
            if changed and (kind := self.kind) != before:
                changes.append((at, kind))
                before = kind
        return changes

    def _check_order(self, signals: Iterable[str], step: int, call: str) -> None:
        for name in signals:
            series = self._series.get(name)
            if series is not None and step <= series.last:
                raise ValueError(
                    f"{call}: step {step} of {name} comes after step {series.last}; pass steps "
                    "that grow, or call reset() where their count begins again"
                )

    def _add(self, name: str, step: int, size: int) -> bool:
        """Add a known reading; True if the kind may be another."""
        series = self._series.get(name)
        if series is None:
            series = Readings(self._bars[name], self._span, step, exact=name != "rss")
            self._series[name] = series
        return series.add(step, size, self._declared.without_declared(name, step, float(size)))

    def reset(self) -> None:
        """Forget all readings, but not growth declared by `expect_growth`."""
        self._series.clear()

    @property
    def kind(self) -> str:
        """The verdict's kind. Takes 2 us."""
        return GRADES[self._judged()[0]]

    @property
    def steps_known(self) -> int:
        """Steps from the first to the newest reading. Below 32 it is too early to say that nothing
        grows."""
        return max((series.steps for _, series in self._read()), default=0)

    def _read(self) -> list[tuple[str, Readings]]:
        """The series of the signals that were read and that it judges, rss last."""
        return [(name, self._series[name]) for name in self._signals if name in self._series]

    def _exact(self) -> list[tuple[str, Readings]]:
        return [(name, series) for name, series in self._read() if name != "rss"]

    def _judged(self) -> tuple[int, str | None]:
        """The grade, and the signal that decided; None if it is early or quiet.

        Exact signals decide. If they are quiet and the heap is among them, rss grows by free memory
        between the blocks in use. If the heap is not read, rss decides alone.
        """
        grade, signal = QUIET, None
        for name, series in self._exact():
            if series.grade > grade:
                grade, signal = series.grade, name
        read = dict(self._read())
        heap, rss = read.get("heap"), read.get("rss")
        of_rss = QUIET if rss is None else rss.grade
        knows_heap = heap is not None and heap.steps >= STEPS_TO_SUSPECT
        if grade < LIKELY and of_rss > grade and not (knows_heap and grade > QUIET):
            grade, signal = FRAGMENTATION if knows_heap else of_rss, "rss"
        if grade == QUIET and self.steps_known < STEPS_NEEDED:
            return EARLY, None
        return grade, signal

    def _fastest(self, grade: int, signal: str) -> str:
        """Of the exact signals that have a grade, the one that grows fastest."""
        most, found = -math.inf, signal
        for name, series in self._exact():
            trend = series.trend() if series.grade == grade else None
            if trend is not None and trend.slope > most:
                most, found = trend.slope, name
        return found

    def _confidence(self, grade: int, series: Readings) -> str:
        if grade < LEAK:
            return "none" if grade < SUSPECT else "fair" if grade == LIKELY else "low"
        agree = sum(one.grade >= LIKELY for _, one in self._exact())
        straightest = min(window.shape for window in series.windows()) >= _STRAIGHTEST
        return "high" if agree > 1 or straightest else "good"

    def verdict(self) -> LeakVerdict:
        """Return the verdict. Takes up to 0.4 ms."""
        grade, signal = self._judged()
        rss = dict(self._read()).get("rss")
        of_rss = None if rss is None else rss.trend()
        cost, done = None if of_rss is None else of_rss.slope, self.steps_known
        if signal is None:
            return LeakVerdict(
                GRADES[grade], 0.0, "none", rss_bytes_per_step=cost, steps_known=done
            )
        if signal != "rss":
            signal = self._fastest(grade, signal)
        series = self._series[signal]
        trend = series.trend()
        assert trend is not None  # what grows has one
        since, shape = series.begun()
        limit = self.device_limit_bytes if signal == "device" else self.limit_bytes
        left = None if limit is None else self._left(signal, limit)
        return LeakVerdict(
            GRADES[grade],
            trend.slope,
            self._confidence(grade, series),
            left,
            signal,
            since,
            trend.error,
            cost,
            shape,
            pressure=left is not None and left.lo < max(100, done / 10),
            declarable=True,
            steps_known=done,
        )

    def forecast(
        self, limit_bytes: int | str | None = None, *, signal: str | None = None
    ) -> StepsLeft | None:
        """Return how many steps are left until the limit, as an interval; None before 16 steps.

        If the program continues as it is, the truth lies between `lo` and `hi` about nine times out
        of ten. Declared growth is included. Takes up to 0.4 ms.

        Args:
            limit_bytes: the limit, or like `"16 GiB"`. None: the detector's.
            signal: the signal that reaches the limit. None: `rss`, or the growing signal without
                `rss`.

        Raises ValueError without a limit, or for an unknown signal.
        """
        limit = self.device_limit_bytes if signal == "device" else self.limit_bytes
        if limit_bytes is not None:
            limit = parse_bytes(limit_bytes, "limit_bytes")
        if limit is None:
            raise ValueError("forecast() knows no limit; pass limit_bytes, here or to LeakDetector")
        if signal is not None:
            return self._until(_signal(signal, "forecast()"), limit)
        grade, grows = self._judged()
        if grows not in (None, "rss"):
            grows = self._fastest(grade, grows)
        return self._left(None if grows == "device" else grows, limit)

    def _until(self, signal: str, limit: float) -> StepsLeft | None:
        """Steps until a signal reaches its limit, with what is declared and still to come; None
        before its readings cover 16 steps."""
        series = self._series.get(signal)
        if series is None or series.steps < STEPS_TO_SUSPECT:
            return None
        size, step = float(series.newest), series.last
        trend = series.trend() or Trend(0.0, 0.0, size, highest=size)
        return StepsLeft(*steps_left(trend, self._declared.outlook(signal, step, limit)))

    def _left(self, signal: str | None, limit: int) -> StepsLeft | None:
        """Steps until the limit of the device, or of the process with its children, is reached.

        What is resident runs into the limit, and children and shared memory beside it. But rss may
        sleep for a long time while malloc fills its holes: an exact signal that grows makes the
        forecast sooner, where it is, never later. Series that grow side by side reach the limit
        together.
        """
        if signal == "device":
            return self._until(signal, limit)
        last = {name: float(series.newest) for name, series in self._series.items()}
        rss = last.get("rss", 0.0)
        outside = sum(last.get(name, 0.0) for name in _OUTSIDE)
        resident = self._until("rss", limit - outside)
        inside = "tensors" if signal == "tensors" or "heap" not in last else "heap"
        left: StepsLeft | None = None
        for name in (inside, "python"):  # the interpreter's own blocks are not in malloc's figure
            # What is in use may be more than what is resident, while it is not written yet.
            beside = rss - last.get(name, 0.0) if "rss" in last else 0.0
            left = _together(left, self._growing(name, signal, limit - beside - outside))
        if left is None or resident is None:
            left = left or resident
        else:
            left = StepsLeft(*map(min, left, resident))
        for name in _OUTSIDE:
            more = self._growing(name, signal, limit - rss - outside + last.get(name, 0.0))
            if more is not None:
                left = more if left is None or left.hi == math.inf else _together(left, more)
        return left

    def _growing(self, name: str, signal: str | None, limit: float) -> StepsLeft | None:
        """The same as `_until`, of a series that decided or that grows for certain; else None."""
        left = self._until(name, limit)
        return left if left is not None and (name == signal or left.hi < math.inf) else None

    def expect_growth(
        self,
        name: str,
        *,
        bytes: int | str | None = None,
        rate: int | float | None = None,
        until: int | None = None,
        signal: str | None = None,
    ) -> None:
        """Declare a buffer that is meant to fill, so that its growth does not count.

        Growth beyond it still counts, and forecasts include it.

        Args:
            name: declaring a name again replaces its figures.
            bytes: the size of the full buffer, or like `"2 GiB"`.
            rate: bytes per step, above 0. `bytes` or `rate` is needed.
            until: the last step at which the buffer grows.
            signal: the only signal in which it grows.

        Raises ValueError beyond eight names.
        """
        as_name("expect_growth(): name", name)
        if bytes is None and rate is None:
            raise ValueError(f"expect_growth({name!r}) declares nothing; pass bytes or rate")
        a_step = math.inf if rate is None else positive(f"expect_growth({name!r}): rate", rate)
        size = math.inf if bytes is None else float(parse_bytes(bytes, "bytes"))
        last = None if until is None else _step_of("expect_growth(): until", until)
        only = None if signal is None else _signal(signal, "expect_growth()")
        self._declared.declare(name, size, a_step, last, only)

    def __repr__(self) -> str:
        readings = max((series.count for series in self._series.values()), default=0)
        return f"LeakDetector({self.kind}, {readings:,} readings of {len(self._series)} signals)"


def part_of(detector: LeakDetector, signals: Sequence[str]) -> LeakDetector:
    """A detector that judges some signals alone, by the readings of another one."""
    part = LeakDetector()
    part._series, part._declared = detector._series, detector._declared
    part._signals = tuple(name for name in SIGNALS if name in signals)
    return part


def add_known(
    detector: LeakDetector, signal: str, readings: Iterable[tuple[int, int | None]]
) -> None:
    """Add (step, bytes) of one signal, which are known to be in order, as `update` does."""
    for step, size in readings:
        if size is not None:
            detector._add(signal, step, size)


# --- arguments ------------------------------------------------------------------------------------


def _signal(name: str, call: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{call}: a signal must be a str, not {type(name).__name__}")
    if name not in _BARS:
        raise ValueError(
            f"{call}: there is no signal {name!r}; the signals are {', '.join(SIGNALS[:-2])} and "
            f"{SIGNALS[-2]}, which are exact, and {SIGNALS[-1]}"
        )
    return name


def _step_of(what: str, value: SupportsIndex) -> int:
    step = value if type(value) is int else any_whole_number(what, value)
    if not -_FARTHEST <= step <= _FARTHEST:
        raise ValueError(f"{what} {shown(step)} is beyond 2**53; count steps from 0")
    return step


def _bytes_of(signal: str, value: SupportsIndex | None) -> int | None:
    """A reading of `update`; None where it is not known."""
    if signal not in _BARS:
        _signal(signal, "update()")
    if value is None:
        return None
    if type(value) is not int and not hasattr(value, "__index__"):
        raise TypeError(
            f"update(): {signal} must be an int of bytes, or None, not {type(value).__name__}"
        )
    size = operator.index(value)
    if not 0 <= size <= _UNKNOWN:
        raise ValueError(
            f"update(): {signal} must be from 0 to 2**64 - 1 bytes, not {shown(size)}; pass None "
            "for a reading that is not known"
        )
    return None if size == _UNKNOWN else size


def _column(signal: str, readings: Any) -> list[int | None]:
    """The readings of `update_many`."""
    try:
        view = memoryview(readings)
    except TypeError:
        view = memoryview(b"")
    code = (view.format or "").lstrip("@=<")
    if view.ndim != 1 or not view.c_contiguous or view.itemsize != 8 or code not in tuple("lqLQd"):
        raise TypeError(
            f"update_many(): {signal} is not an array of int64, uint64 or float64 with one "
            "dimension in one piece; numpy.ascontiguousarray(x, numpy.int64) makes one"
        )
    column: list[int | None] = []
    for i, value in enumerate(array(code, view.tobytes())):
        if value == _UNKNOWN or math.isnan(value):
            column.append(None)
        elif 0 <= value < 2**63 or (code in "LQ"):
            column.append(int(value))
        else:
            raise ValueError(
                f"update_many(): {signal}[{i}] is not a number of bytes from 0 on; put NaN into a "
                "float64 array for a reading that is not known"
            )
    return column
