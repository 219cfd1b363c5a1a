"""A straight line through readings, by least squares: bytes a step, and how certain that is.

Each line that memtools fits is fitted here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple


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

    def beside(self, xs: Sequence[float], ys: Sequence[float]) -> list[float]:
        """How far above the line points lie."""
        mean_x, mean_y, slope = self.x, self.y, self.slope
        return [y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True)]

    def at(self, x: float) -> float:
        """The y of the line at an x."""
        return self.y + self.slope * (x - self.x)


def line_through(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Fit a line. There must be one point at least."""
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
