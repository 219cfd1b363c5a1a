"""Growth in few large jumps: a buffer that is filled and, each time it is full, is made larger.

    bytes |                 .______   A std::vector doubles, so the jumps become larger and rarer.
          |        ._______.          What one jump has got lasts until the next: its bytes, divided
          |   .___.                   by the steps to the next, are what each step adds. That is the
          |__.                        same between all jumps, whatever the factor.
          +------------------- steps

A line through such a series shows nothing that lasts, and a test that leaves single jumps out calls
it flat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

LEAST = 1 << 18  # A rise of fewer bytes from one reading to the next is not a jump.
LARGE = 8.0  # A jump is so many times what readings usually differ by.
USUAL = 16  # What is usual is the mean of about so many differences.
KEPT = 0.5  # If less than this share of a jump remains, it was given back.
MOST = 16  # So many jumps are kept.
LARGER = 1.4  # Each jump is at least so many times the one before,
LARGEST = 3.0  # and at most so many times.
SAME = 1.25  # What each step adds is the same between all jumps, up to this factor.
ENOUGH = 3  # So many jumps, in two intervals that agree, are growth;
FILLED = 2  # or so many, if resident memory has risen in between by what the first one got.
LATE = 1.5  # If the next jump comes after so many times what was expected, growth has ended.


class Jump(NamedTuple):
    """A rise from one reading to the next, at some step between the two."""

    #: the steps of the two readings, and their bytes
    since: int
    step: int
    before: int
    after: int

    @property
    def bytes(self) -> int:
        return self.after - self.before

    @property
    def at(self) -> float:
        """The step of the jump, as far as it is known."""
        return (self.since + 1 + self.step) / 2


class Stairs(NamedTuple):
    """Growth in jumps, of one buffer."""

    #: the jumps that are of it, and bytes a step that are added to it
    jumps: tuple[Jump, ...]
    rate: float

    @property
    def next_bytes(self) -> float:
        """The bytes of the next jump, if it is to the last one as that is to the one before."""
        before, last = self.jumps[-2:]
        return last.bytes**2 / before.bytes

    @property
    def pause(self) -> float:
        """The steps from the last jump to the next."""
        return self.jumps[-1].bytes / self.rate

    @property
    def next_step(self) -> float:
        """The step of the next jump."""
        return self.jumps[-1].at + self.pause


class Jumps:
    """The jumps of one signal."""

    def __init__(self) -> None:
        self._jumps: list[Jump] = []
        self._last: tuple[int, int] | None = None
        self._usual = 0.0

    def add(self, step: int, size: int) -> None:
        """Add a reading."""
        if self._last is not None and step > self._last[0]:
            since, before = self._last
            jumps, rise = self._jumps, size - before
            while jumps and size < jumps[-1].before + KEPT * jumps[-1].bytes:
                jumps.pop()
            if rise >= max(LEAST, LARGE * self._usual):
                self._jumps = [*jumps[1 - MOST :], Jump(since, step, before, size)]
            else:
                self._usual += (abs(rise) - self._usual) / USUAL
        self._last = step, size

    def stairs(self, enough: int = ENOUGH) -> Stairs | None:
        """The growth that goes on now, in so many jumps at least; None if there is none."""
        found = self._newest()
        if self._last is None or len(found) < enough:
            return None
        rate = sum(jump.bytes for jump in found[:-1]) / (found[-1].at - found[0].at)
        stairs = Stairs(tuple(found), rate)
        return stairs if self._last[0] <= found[-1].step + LATE * stairs.pause else None

    def _newest(self) -> list[Jump]:
        """The newest jumps between which each step adds the same."""
        found: list[Jump] = []
        least, most = 0.0, float("inf")  # what each step may add, as far as steps are known
        for jump in reversed(self._jumps):
            if found:
                after = found[0]
                if not LARGER <= after.bytes / jump.bytes <= LARGEST:
                    break
                if len(found) == 1 and not _stands_out(after, jump):
                    break
                least = max(least, jump.bytes / (after.step - jump.since))
                most = min(most, jump.bytes / max(1, after.since + 1 - jump.step))
                if least > SAME * most:
                    break
            found.insert(0, jump)
        return found


def _stands_out(jump: Jump, before: Jump) -> bool:
    """Whether so much more comes in the steps of a jump than in each step since the jump before.
    Where growth is even, a rise is as large as the steps between two readings are many."""
    steps = jump.since - before.step
    each = (jump.before - before.after) / steps if steps > 0 else math.inf
    return jump.bytes / (jump.step - jump.since) >= LARGE * each


def jumps_of(readings: Iterable[tuple[int, int]]) -> Jumps:
    """The jumps of a whole series of (step, bytes)."""
    jumps = Jumps()
    for step, size in readings:
        jumps.add(step, size)
    return jumps


def without(points: list[tuple[int, int]], jumps: tuple[Jump, ...]) -> list[tuple[int, int]]:
    """The points of a series as if it had not risen by these jumps."""
    return [
        (step, size - sum(jump.bytes for jump in jumps if jump.step <= step))
        for step, size in points
    ]
