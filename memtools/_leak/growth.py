"""A straight line through readings, by least squares: bytes a step, and how certain that is.

Each line that memtools fits is fitted here: through the floor of a series (floor.py), its newest
readings (drift.py), the looks of a run (series.py), the floor of a record, and the ticks of a
program without steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import NamedTuple

SAME = 0.1  # two rates that differ by less are the same
LEAST_PACE = 1024.0  # bytes a step: what grows more slowly has ended, which is judged elsewhere
EXACT = 0.1  # steps of growth by which a point may lie beside a line without any noise
EVENLY = 0.5  # a pace rises evenly if no quarter adds less than this share of what another adds,
NOISE = 3.0  # and by more than so many standard errors
CHANGED = 1.0  # so many times as much better as chance alone makes it
QUARTERS = 4  # What is kept rises if it does in each of so many parts of the steps,
PART, EVEN_PART = 1 / 4, 1 / 2  # by at least these shares of what a part adds on average.
NEWEST = 1 / 16  # The end of a series is the lowest of this share of its newest steps.


class Line(NamedTuple):
    """A line through points (x, y)."""

    #: points, and the means of their x and y
    points: int
    x: float
    y: float
    #: sums of the squares and of the products of the distances from these means
    xx: float
    xy: float
    yy: float

    @property
    def slope(self) -> float:
        """0 if all points have one x."""
        return self.xy / self.xx if self.xx else 0.0

    @property
    def rest(self) -> float:
        """The sum of the squares of the distances from the line."""
        return max(0.0, self.yy - self.slope * self.xy)

    @property
    def error(self) -> float:
        """The standard error of the slope; infinite for fewer than three points."""
        if self.points < 3 or not self.xx:
            return math.inf
        return math.sqrt(self.rest / (self.points - 2) / self.xx)

    @property
    def straight(self) -> float:
        """The share of the variance of y that the line explains; 0 if all points have one x or one
        y."""
        return self.xy**2 / (self.xx * self.yy) if self.xx and self.yy else 0.0

    def beside(self, xs: Sequence[float], ys: Sequence[float]) -> list[float]:
        """How far above the line points lie."""
        mean_x, mean_y, slope = self.x, self.y, self.slope
        return [y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True)]

    def at(self, x: float) -> float:
        """The y of the line at an x."""
        return self.y + self.slope * (x - self.x)


def line_through(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit a line. Without points all of it is 0."""
    if not xs:
        return Line(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    count, first = len(xs), ys[0]
    mean_x = sum(xs) / count
    from_x = [x - mean_x for x in xs]
    from_y = [y - first for y in ys]  # small numbers: sums of large ones would lose the noise
    mean_y = sum(from_y) / count
    from_y = [y - mean_y for y in from_y]
    return Line(
        count,
        mean_x,
        first + mean_y,
        sum(map(mul, from_x, from_x)),
        sum(map(mul, from_x, from_y)),
        sum(map(mul, from_y, from_y)),
    )


def line_of(points: Sequence[tuple[float, float]]) -> Line:
    """The same of points in pairs."""
    return line_through([x for x, _ in points], [y for _, y in points])


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """Of a line through the points; 0 for fewer than two."""
    return line_of(points).slope


# --- a line that bends ----------------------------------------------------------------------------


class Pace(NamedTuple):
    """Bytes a step, the step from which on they have come so, the standard error of them, and by
    how much they rise with each step where they do so evenly."""

    rate: float
    since: int
    error: float
    rising: float = 0.0


def pace_of(points: Sequence[tuple[int, float]]) -> Pace:
    """How fast a series grows now: by a line through its points, without those of before it became
    faster or slower. There must be one point at least."""
    begin = 0
    while (knee := _knee(points[begin:])) > 0:
        begin += knee
    *_, line = _lines(points[begin:])
    return Pace(line.slope, points[begin][0], line.error)


def _knee(points: Sequence[tuple[int, float]]) -> int:
    """The number of the point from which on the points lie on a line of their own, beside the one
    through those before; 0 where one line through all of them is as good.

    Two lines always fit better than one. They count as a bend if chance alone would make the fit so
    much better less than once in a thousand times.
    """
    best, knee, free = CHANGED, 0, len(points) - 4
    if free < 1 or all(b - a < LEAST_PACE * (t - s) for (s, a), (t, b) in pairwise(points)):
        return 0  # No line through some of them is steeper than the steepest rise.
    before = list(_lines(points))
    after = list(_lines(reversed(points)))[::-1]
    whole = before[-1]
    for k in range(2, len(points) - 2):
        rate = after[k].slope
        if rate < LEAST_PACE or abs(rate - whole.slope) <= SAME * rate:
            continue
        rest = before[k - 1].rest + after[k].rest
        better = (whole.rest - rest) / 2 / max(rest / free, (EXACT * rate) ** 2)
        if better / _by_chance(free) > best:
            best, knee = better / _by_chance(free), k
    return knee


def _lines(points: Iterable[tuple[float, float]]) -> Iterator[Line]:
    """The lines through the first point, the first two, the first three and so on."""
    line = Line(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for x, y in points:
        count = line.points + 1
        from_x, from_y = x - line.x, y - line.y
        mean_x, mean_y = line.x + from_x / count, line.y + from_y / count
        line = Line(
            count,
            mean_x,
            mean_y,
            line.xx + from_x * (x - mean_x),
            line.xy + from_x * (y - mean_y),
            line.yy + from_y * (y - mean_y),
        )
        yield line


def rising_pace(points: Sequence[tuple[int, float]]) -> Pace | None:
    """How fast a series grows at its newest point, where it has become faster evenly: steps that
    become longer do so. None where it has not."""
    if not points:
        return None
    first, last = points[0][0], points[-1][0]
    quarters: list[list[tuple[float, float]]] = [[], [], [], []]
    for point in points:
        quarters[min(3, int(4 * (point[0] - first) / max(1, last - first)))].append(point)
    if min(map(len, quarters)) < 3:
        return None
    lines = [line_of(quarter) for quarter in quarters]
    gains = [(b.slope - a.slope) / (b.x - a.x) for a, b in pairwise(lines)]
    rise = lines[-1].slope - lines[0].slope
    is_even = 0 < EVENLY * max(gains) <= min(gains)
    if not is_even or lines[0].slope < 0 or rise <= NOISE * max(line.error for line in lines):
        return None
    pace = line_of([(line.x, line.slope) for line in lines])
    return Pace(pace.at(last), first, lines[-1].error, pace.slope)


class Kept(NamedTuple):
    """How fast rises what a series never gives back.

    Attributes:
        rate: bytes a step.
        since: the step from which on.
        gain: the bytes that were added since then.
        is_even: whether each quarter of the steps adds about the same, and the newer half does not
            add clearly less than the older one.
    """

    rate: float
    since: float
    gain: float
    is_even: bool


def kept_pace(points: Sequence[tuple[float, float]], even: float) -> Kept | None:
    """How fast rises what a series never gives back: at each point, the lowest of it and of all
    that come later. The teeth of a sawtooth do not count, whatever their length. None where it does
    not rise in each quarter of the steps, or there are too few points.

    Args:
        points: (step, bytes).
        even: the newer half adds clearly less if it adds less than this share of what the older one
            adds a step.
    """
    if len(points) < 2 * QUARTERS:
        return None
    lowest = list(accumulate((size for _, size in reversed(points)), min))[::-1]
    steps = [step for step, _ in points]
    first, span = steps[0], steps[-1] - steps[0]
    ends = [first + span * part / QUARTERS for part in range(QUARTERS)]
    ends.append(steps[-1] - span * NEWEST)
    sizes = [lowest[bisect_left(steps, end)] for end in ends]
    gains = [after - before for before, after in pairwise(sizes)]
    gain, half = sizes[-1] - sizes[0], QUARTERS // 2
    if min(gains) <= PART * gain / QUARTERS:
        return None
    older = (sizes[half] - sizes[0]) / (ends[half] - ends[0])
    newer = (sizes[-1] - sizes[half]) / (ends[-1] - ends[half])
    is_even = min(gains) >= EVEN_PART * gain / QUARTERS and newer >= even * older
    return Kept(gain / (ends[-1] - first), first, gain, is_even)


def _by_chance(free: int) -> float:
    """How much better two lines are than one in one of a thousand cases without a bend, by so many
    points more than the lines have numbers: the F distribution's of (2, free). Where these are one
    or two, in one of a hundred: so few points say something where there is no noise."""
    known = (5000.0, 99.0, 80.0, 60.0, 37.1, 27.0, 21.7, 18.5, 16.4, 14.9)
    return known[free - 1] if free <= len(known) else 6.9 + 80.0 / free
