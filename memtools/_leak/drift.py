"""Does a series rise steadily at its end? Decided from few readings, and exact ones.

    bytes |                 . '          The 64 newest readings with their steps, whether one comes
          |             . '              at each step or only at steps 16, 24, 32, 48, 64 ...
          |   .     . '                  In windows of 5 to 64 of them that cover 16 steps or more:
          | '   ' '                      how far does it rise from one to the next, on average, and
          +---------|------- steps       how much do these rises differ?
                  since

Windows are tried from the longest on. One whose readings lie far from a line through them, or that
rises too little, is given up at once. Then two tests ask whether the rise is certain, because noise
comes in two sorts. Where readings scatter about the line and each on its own, the line's own error
is right. Where they wander it is not: then the mean of the rises from one reading to the next
is compared with their scatter, as a walk with a drift has it (a rise over h steps scatters with the
square root of h). One jump is not a drift, and noise is none: both make rises that differ. Averages
of 2, 4 and 8 neighbours take away noise from reading to reading and leave the drift. The more often
a series is looked at, the more certain the drift has to be.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import pairwise
from operator import mul, sub
from typing import NamedTuple

from memtools._leak.growth import line_through

MOST_READINGS = 64  # So many readings are kept.
LEAST_SPAN = 16  # A window covers at least so many steps.
WINDOWS = (64, 33, 17, 9, 5)  # readings; those of each step cover 16, 32
MANY, LEAST_READINGS, LEAST_GROUPS = 12, 4, 5
GROUPS = (1, 2, 4, 8)  # So many neighbours are averaged.
LEAST_RATE = 512.0  # Slower growth, in bytes a step, needs a longer series.
QUIETEST = 100.0  # Any rise is taken to scatter by so many bytes.
CERTAIN = 3.5  # A drift must be certain by so many standard deviations at the first look,
CERTAIN_MORE = 0.25  # and by so many more for each e-fold of looks.
STRAIGHT = 0.25  # A reading may lie this share of the rise from the line.
EVEN = 1.5  # The longest distance between two readings may be so many times the average.
MOST_RHO = 0.98  # The correlation of residuals with the next is taken to be at most this.
GOES_ON = 0.4  # The newest quarter must rise by this share of the mean rate.


class Drift(NamedTuple):
    """A certain rise at the end of a series."""

    #: the first and the last step of it
    since: int
    until: int
    #: bytes a step, and the standard error
    slope: float
    error: float
    #: where the drift is at `until`, in bytes
    end: float
    #: how far a reading lies from the line at most, and above it, in bytes
    off: float
    above: float
    #: the largest rise from a reading to the next, beyond the drift, in bytes
    jump: float
    #: late half over early half: 1 is a straight line
    shape: float
    #: over the window that is certain, in bytes
    rise: float


class Recent:
    """The newest readings of a series: the last ones of arrays that are as long from the first
    reading on, as these must not be growth themselves."""

    __slots__ = ("_known", "_sizes", "_steps")

    def __init__(self) -> None:
        self._steps = array("q", bytes(8 * MOST_READINGS))
        self._sizes = array("d", bytes(8 * MOST_READINGS))
        self._known = 0

    def add(self, step: int, size: float) -> None:
        del self._steps[0], self._sizes[0]
        self._steps.append(step)
        self._sizes.append(size)
        self._known = min(self._known + 1, MOST_READINGS)

    def drift(self, least: float, looks: int) -> Drift | None:
        """The drift of the longest window that is certain and goes on; None where there is none.

        Args:
            least: bytes below which a rise does not count.
            looks: how often the series was looked at before.
        """
        sizes, known = self._sizes, self._known
        if known < LEAST_READINGS:
            return None
        enough = CERTAIN + CERTAIN_MORE * math.log(looks + 1)
        newest_step, newest = self._steps[-1], sizes[-1]
        tried = 0
        for most in WINDOWS:
            count = min(known, most)
            begin = MOST_READINGS - count
            if count == tried or not _may_rise(sizes, count):
                continue
            if newest_step - self._steps[begin] < LEAST_SPAN:
                continue
            tried = count
            # Less the newest, so that squares keep their digits.
            ys = [size - newest for size in sizes[begin:]]
            found = _rise(self._steps[begin:].tolist(), ys, least, enough)
            if found is not None:
                found = found._replace(end=found.end + newest)
                return found._replace(since=self._longest_line(begin, found))
        return None

    def _longest_line(self, begin: int, found: Drift) -> int:
        """The first step from which on all readings lie on the line, as near as those from number
        `begin` on do."""
        since = self._steps[begin]
        for i in range(begin - 1, MOST_READINGS - self._known - 1, -1):
            step = self._steps[i]
            beside = abs(self._sizes[i] - found.end - found.slope * (step - found.until))
            if beside > found.off + (2.5 * found.error + found.slope) * (since - step):
                break
            since = step
        return since


def _may_rise(sizes: array[float], count: int) -> bool:
    """Whether the newest readings lie higher at their end than in the middle, and there higher than
    at their start. Most windows of a series that does not rise end here, after a dozen readings."""
    if count < MANY:
        return True
    begin, middle = len(sizes) - count, len(sizes) - count // 2 + 2
    middle_four = sum(sizes[middle - 4 : middle])
    return sum(sizes[-4:]) > middle_four > sum(sizes[begin : begin + 4])


def _rise(xs: list[int], ys: list[float], least: float, enough: float) -> Drift | None:
    """The drift through the points, if they rise for certain and go on."""
    count, span = len(xs), xs[-1] - xs[0]
    line = line_through(xs, ys)
    slope = line.slope
    rise = span * slope
    if slope < LEAST_RATE or rise < least:
        return None
    beside = line.beside(xs, ys)
    above = max(0.0, max(beside))
    off = max(above, -min(beside))
    if off > STRAIGHT * rise:
        return None
    quarter = max(2, count // 4)
    if _rate(xs[-quarter:], ys[-quarter:]) < GOES_ON * slope:
        return None
    scatter = sum(map(mul, beside, beside))
    rho = sum(map(mul, beside, beside[1:])) / scatter if scatter > 0 else 0.0
    rho = min(max(rho + (2 + 4 * max(rho, 0.0)) / count, 0.0), MOST_RHO)  # few make it seem less
    scatter = max(scatter / (count - 2), QUIETEST * QUIETEST)
    error = math.sqrt(scatter * (1 + rho) / (1 - rho) / line.xx)
    is_even = max(map(sub, xs[1:], xs)) * (count - 1) <= EVEN * span
    is_certain = is_even and count >= MANY and _certainty(slope / error, count - 2) >= enough
    if not is_certain and _certainty_of_walk(xs, ys) < enough:
        return None
    middle = count // 2
    early = _rate(xs[: middle + 1], ys[: middle + 1])
    shape = _rate(xs[middle:], ys[middle:]) / early if early > 0 else 0.0
    jump = max(0.0, max(map(sub, beside[1:], beside)))
    end = line.at(xs[-1])
    return Drift(xs[0], xs[-1], slope, error, end, off, above, jump, shape, rise)


def _rate(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Bytes a step, from the first half of the points to the second."""
    half = len(xs) // 2
    later = len(xs) - half
    rise = sum(ys[half:]) / later - sum(ys[:half]) / half
    return rise / (sum(xs[half:]) / later - sum(xs[:half]) / half)


def _certainty_of_walk(xs: Sequence[float], ys: Sequence[float]) -> float:
    """How certain the drift of a walk through the points is, or through averages of neighbours:
    the highest. Points that are left over are the oldest."""
    most = -math.inf
    for each in GROUPS:
        count = len(xs) // each
        if count < (LEAST_READINGS if each == 1 else LEAST_GROUPS):
            break
        begins = range(len(xs) % each, len(xs), each)
        averages = [(sum(xs[i : i + each]) / each, sum(ys[i : i + each]) / each) for i in begins]
        most = max(most, _certainty_of_drift(averages))
    return most


def _certainty_of_drift(points: Sequence[tuple[float, float]]) -> float:
    (x, y), (last_x, last_y) = points[0], points[-1]
    span, rises, slope = last_x - x, len(points) - 1, (last_y - y) / (last_x - x)
    scatter = sum(
        (after - before - slope * (b - a)) ** 2 / (b - a)
        for (a, before), (b, after) in pairwise(points)
    )
    scatter = max(scatter / (rises - 1), QUIETEST * QUIETEST * rises / span)
    return _certainty(slope / math.sqrt(scatter / span), rises - 1)


def _certainty(t: float, freedom: float) -> float:
    """`t`, which has so many degrees of freedom, as standard deviations of a normal distribution
    (Wallace's approximation)."""
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    return math.copysign(z, t)
