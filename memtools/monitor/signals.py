"""The series that a monitor's leak test is fed with, and how often each is read.

The test wants readings that are even in steps: if they came closer at the beginning of a run than
at its end, a warm-up would look like a line. But what a reading costs changes by a factor of fifty
while a program runs (mallinfo2 counts every free chunk), and so does the time of a step. So each
series has a unit of steps, set once; it is read as often as it is cheap, and the units in between
lie on the line from one reading to the next. Lows are kept by that, and no stairs are made.

    steps     | | | | | | | | | | | | |
    read      0       4           10
    unit 2    0   2   4   6   8   10          what the test sees
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from memtools import _core
from memtools._base import devices as monitor_device

FIRST_STEPS = 32  # in which steps and readings are timed; they are not fed
FIRST_LOOKS = 4
EACH_READING = 16  # units from one reading to the next, as long as costs stay what they were


class Signal:
    """One series."""

    __slots__ = (
        "_fed",
        "_newest",
        "_origin",
        "_own",
        "cost_ns",
        "due",
        "name",
        "pause",
        "read",
        "unit",
    )

    def __init__(self, name: str, read: Callable[[], int | None], pause: int) -> None:
        self.name, self.read = name, read
        #: after a reading it rests for so many times what the reading took
        self.pause = pause
        #: the least that a reading has taken
        self.cost_ns = 1 << 62
        self.due = 0
        self.unit = 1
        self._origin = self._fed = 0
        self._newest: tuple[int, int | None] = 0, None
        self._own = 0

    def begin(self, step: int, steps: int, looks: int, ns: int) -> None:
        """After so many steps, looks and ns: sets the unit."""
        apart = max(steps / looks, self.pause * self.cost_ns * steps / max(1, ns))
        while self.unit < apart / EACH_READING:
            self.unit *= 2
        self._origin = step

    def taken(self) -> int | None:
        """A reading, less what the monitor's own census has added."""
        size = self.read()
        return None if size is None else max(0, size - self._own)

    def leave_out(self, before: int | None, after: int | None) -> None:
        """What the monitor has added, or given back, between two readings."""
        if before is not None and after is not None:
            self._own += after - before

    def feed(self, step: int) -> Iterator[tuple[int, int | None]]:
        """Takes a reading at this step: (step, bytes) of each unit since the one before."""
        size, (before, was) = self.taken(), self._newest
        self._newest = step, size
        last = (step - self._origin) // self.unit
        for n in range(self._fed + 1, last + 1):
            at = self._origin + n * self.unit
            if size is None or was is None:
                yield at, size
            else:
                yield at, was + (size - was) * (at - before) // (step - before)
        self._fed = max(self._fed, last)


def _heap(probe: _core.Probe) -> Callable[[], int | None]:
    return lambda: probe.read(_core.READ_HEAP).heap_used


def _process(probe: _core.Probe) -> Callable[[], int | None]:
    """Resident bytes, less what pools map more than once: forks of a cache are no growth."""
    return lambda: probe.read(_core.READ_RSS).process


def _children(probe: _core.Probe) -> Callable[[], int | None]:
    return lambda: probe.read(_core.READ_CHILDREN).children_private


def _python() -> int:
    """Bytes of the interpreter's own blocks, about."""
    return 64 * sys.getallocatedblocks()


def signals_of(probe: _core.Probe, devices: Sequence[int]) -> list[Signal]:
    """Each takes 0.13 to 0.5 % of the time at most, four times as much while something grows."""
    found = [
        Signal("rss", _process(probe), 200),
        Signal("heap", _heap(probe), 800),
        Signal("children", _children(probe), 800),
        Signal("python", _python, 800),
    ]
    if devices:
        found.append(Signal("device", lambda: monitor_device.allocated(devices), 800))
    return found
