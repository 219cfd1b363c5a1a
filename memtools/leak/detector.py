"""LeakDetector: does a program leak, how fast, and how long is left? From memory readings alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from memtools import _core
from memtools._base import sentences
from memtools._base.number import positive, whole_number
from memtools._base.size import parse_bytes
from memtools._base.text import as_name

SIGNALS = ("heap", "python", "tensors", "children", "device", "shm", "rss")
_OUTSIDE = ("children", "shm")  # what fills a limit beside the process
#: The readings have to cover so many steps before it can be said that nothing grows. Growth can be
#: said from 16 steps on, but it may take as many as these.
STEPS_NEEDED = sentences.STEPS_NEEDED
#: Growth that no container explains matters from so many bytes a step on, which a buffer or a cache
#: of a warm-up seldom takes, or from so many a second, which fill 16 GiB within a day.
LEAST_PER_STEP, LEAST_PER_SECOND = 1024, 256 * 1024


class StepsLeft(NamedTuple):
    """Steps until a limit is reached, as an interval; `math.inf` where the series does not grow."""

    #: the fewest steps that are likely, if nothing else is loaded
    lo: float
    #: the steps that are left at the present rate
    mid: float
    #: the most steps that are likely
    hi: float

    def __str__(self) -> str:
        return sentences.of_steps_left(self.lo, self.hi)


@dataclass(frozen=True)
class LeakVerdict:
    """What a LeakDetector says at one moment; `str()` is one plain line."""

    #: how certain it is, from "early", "quiet", "fills", "fragmentation", "suspect", "growing" and
    #: "likely" to "leak"
    kind: str
    #: growth of the signal that decided, in bytes a step; 0 when early or quiet
    rate_bytes_per_step: float
    #: how sure it is that what grows is a leak, "high" or "good" (leak), "fair" (likely), "low"
    #: (suspect, growing), "none"
    confidence: str
    #: how many steps are left until the limit that the detector was given; None without one, and
    #: when quiet
    steps_left: StepsLeft | None = None
    #: "heap", "python", "tensors", "children", "device", "shm" or "rss"; None when early or quiet
    signal: str | None = None
    #: the step at which the growth began, as far as the readings show it
    since_step: int | None = None
    #: the rate is within so much of the truth, 19 times out of 20 if the program stays as it is
    rate_error: float = 0.0
    #: what it costs in resident memory, in bytes a step; None where rss is not read
    rss_bytes_per_step: float | None = None
    #: growth late in the run over growth early in it; 1 is a straight line
    shape: float = 0.0
    #: the limit may be reached within a tenth of the steps done, or a hundred steps
    pressure: bool = False
    #: what grows may be a buffer that the caller can declare by `expect_growth`
    declarable: bool = False
    #: steps that the readings cover; below 32 it is "early" unless growth was found
    steps_known: int = 0

    def __str__(self) -> str:
        return sentences.of_verdict(self)


def matters(bytes_per_step: float, steps_per_second: float) -> bool:
    """Whether growth is worth a word also where nobody is known to hold it."""
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


def _bars(bar: int | str | Mapping[str, int | str] | None) -> tuple[float, ...]:
    """One threshold per signal, in SIGNALS order; 0 means the default."""
    if bar is None:
        return (0.0,) * len(SIGNALS)
    if not isinstance(bar, Mapping):
        return (float(parse_bytes(bar, "bar_bytes")),) * len(SIGNALS)
    for name in bar:
        if name not in SIGNALS:
            names = f"{', '.join(SIGNALS[:-1])} and {SIGNALS[-1]}"
            raise ValueError(f"bar_bytes: there is no signal {name!r}; there are {names}")
    given = {name: parse_bytes(size, f"bar_bytes[{name!r}]") for name, size in bar.items()}
    return tuple(float(given.get(name, 0)) for name in SIGNALS)


class LeakDetector(_core.LeakDetector):
    """A leak test for a training loop, or for any series of memory readings.

        detector = memtools.LeakDetector(limit_bytes="16 GiB")
        for step in range(steps):
            ...
            detector.update(step, heap=bytes_in_use, rss=bytes_resident)
        print(detector.verdict())

    It reads signals. Six of them are exact, and they decide: `heap` (malloc's bytes in use),
    `python` (the interpreter's own blocks), `tensors`, `children` (private bytes of child
    processes), `device` (bytes allocated there) and `shm` (shared memory of the job). `rss` is
    noisy and may grow without a leak; it decides only if `heap` is not read. Pass the signals that
    you have, always at the same point of a step. docs/guides/leaks.md says what can be told apart.

    A detector takes 26 KiB, however long the run is. Use it from one thread at a time.

    Args:
        limit_bytes: the bytes that the process may use, with its children and shared memory, at
            least 1, as an int or like `"16 GiB"`. None, the default: no limit is known, and there
            is no forecast.
        device_limit_bytes: the same for the device. None, the default: no limit is known.
        span_steps: how many steps a window has to cover before its shape counts, at least 1; 1,500
            by default. If memory has a period, for example an epoch, pass 2.5 times its length if
            that is more.
        bar_bytes: the bytes below which growth does not count: one size, or a dict of sizes by
            signal. None, the default: 1 MiB for rss, children, device and shm, 512 KiB for python,
            256 KiB for heap and tensors.

    Attributes:
        limit_bytes: the limit in bytes as an int, or None. It may be set at any time: verdicts and
            forecasts use the limit of their moment.
        device_limit_bytes: the same for the device.

    Raises ValueError if a size or `span_steps` is below 1, or for an unknown signal.
    """

    __slots__ = ("device_limit_bytes", "limit_bytes")
    limit_bytes: int | None
    device_limit_bytes: int | None

    def __new__(
        cls,
        limit_bytes: int | str | None = None,
        *,
        device_limit_bytes: int | str | None = None,
        span_steps: int = 1500,
        bar_bytes: int | str | Mapping[str, int | str] | None = None,
    ) -> LeakDetector:
        span_steps = whole_number("span_steps", span_steps)
        self = super().__new__(cls, span_steps, _bars(bar_bytes))
        self.limit_bytes = None if limit_bytes is None else parse_bytes(limit_bytes, "limit_bytes")
        self.device_limit_bytes = (
            None
            if device_limit_bytes is None
            else parse_bytes(device_limit_bytes, "device_limit_bytes")
        )
        return self

    def verdict(self) -> LeakVerdict:
        """Return what the readings so far say. Takes about 10 us; `kind` alone is cheaper."""
        kind, signal, confidence, rate, error, shape, rss, since = self._judge()
        cost = None if math.isnan(rss) else rss
        if signal is None:
            return LeakVerdict(
                kind, 0.0, confidence, rss_bytes_per_step=cost, steps_known=self.steps_known
            )
        limit = self.device_limit_bytes if signal == "device" else self.limit_bytes
        left = None if limit is None else self._left(signal, limit)
        done = self.steps_known
        pressure = left is not None and left.lo < max(100, done / 10)
        return LeakVerdict(
            kind, rate, confidence, left, signal, since, error, cost, shape, pressure, True, done
        )

    def forecast(
        self, limit_bytes: int | str | None = None, *, signal: str | None = None
    ) -> StepsLeft | None:
        """Return how many steps are left until the limit is reached, as an interval.

        If the program goes on as it is, the truth lies between `lo` and `hi` about nine times out
        of ten. Declared growth that is still to come is counted. Takes 10 us.

        Args:
            limit_bytes: the limit in bytes, at least 1, as an int or like `"16 GiB"`. None, the
                default: the limit that the detector was given.
            signal: the signal that is to reach the limit. None, the default: `rss`, or the signal
                that grows if `rss` is not read.

        Returns None before 16 steps.

        Raises ValueError if there is no limit, or if `signal` is not one of the signals.
        """
        limit = self.device_limit_bytes if signal == "device" else self.limit_bytes
        if limit_bytes is not None:
            limit = parse_bytes(limit_bytes, "limit_bytes")
        if limit is None:
            raise ValueError("forecast() knows no limit; pass limit_bytes, here or to LeakDetector")
        if signal is not None:
            return self._until(signal, limit)
        grows = self._judge()[1]
        return self._left(None if grows == "device" else grows, limit)

    def _until(self, signal: str, limit: float) -> StepsLeft | None:
        interval = self._forecast(signal, limit)
        return None if interval is None else StepsLeft(*interval)

    def _left(self, signal: str | None, limit: int) -> StepsLeft | None:
        """Steps until the limit of the device, or of the process with its children, is reached.

        What is resident runs into the limit, and children and shared memory beside it. But rss may
        sleep for a long time while malloc fills its holes: an exact signal that grows makes the
        forecast sooner, where it is, never later. Series that grow side by side reach the limit
        together.
        """
        if signal == "device":
            return self._until(signal, limit)
        last = {name: line[1] for name, line in self._last().items()}
        rss = last.get("rss", 0.0)
        outside = sum(last.get(name, 0.0) for name in _OUTSIDE)
        resident = self._until("rss", limit - outside)
        inside = "tensors" if signal == "tensors" or "heap" not in last else "heap"
        left: StepsLeft | None = None
        for name in (inside, "python"):  # the interpreter's own blocks are not in malloc's figure
            beside = max(0.0, rss - last.get(name, 0.0)) + outside
            left = _together(left, self._growing(name, signal, limit - beside))
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

        From now on the buffer is taken out of the readings: only growth beside it counts. Forecasts
        go on counting it.

        Args:
            name: the name of the buffer; to declare it again changes its figures.
            bytes: how much the buffer takes in all, at least 1, as an int or like `"2 GiB"`. None,
                the default: no bound.
            rate: bytes a step, above 0; together with `bytes`, until that much has come. None, the
                default: as fast as it comes.
            until: the last step at which the buffer grows. None, the default: no last step.
            signal: the only signal in which the buffer grows. None, the default: each of them.

        Raises ValueError if neither `bytes` nor `rate` is given, if `rate` is not above 0 or not
        finite, if the signal is unknown, or if eight other names are declared already.
        """
        as_name("expect_growth(): name", name)
        if bytes is None and rate is None:
            raise ValueError(f"expect_growth({name!r}) declares nothing; pass bytes or rate")
        a_step = math.inf if rate is None else positive(f"expect_growth({name!r}): rate", rate)
        size = math.inf if bytes is None else float(parse_bytes(bytes, "bytes"))
        self._expect(name, size, a_step, until, signal)

    def __repr__(self) -> str:
        readings = max((line[2] for line in self._last().values()), default=0)
        return f"LeakDetector({self.kind}, {readings:,} readings of {len(self._last())} signals)"
