"""Points: what parts of memory were at the looks of a run, and how they grow from look to look."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from memtools._leak.growth import Pace, pace_of, slope_of

MOST_POINTS = 256
MOST_OF_PACE = 64  # of them, the newest, that tell how fast something grows now


def since_of(looks: Sequence[int], step: int) -> int:
    """The step from which on slopes are taken: that of the first look, but of the newer three
    quarters of a run that is at `step`."""
    return max(looks[0], step // 4)


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
        return pace_of(points) if points else Pace(0.0, since, math.inf)

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
