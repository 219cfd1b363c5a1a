"""How fast a program without steps goes on, and how much slower tracing makes it.

    ByTime, each 0.2 s ──► Progress.read(heap) ──► (time, bytes in use, processor time)
          plain ────────────► rate, noise, processor ──► ticks: how long to trace
          while traced ─────► slower: against the plain ones ──► how many frames, or no more

The work of such a program is not counted. What grows is what it leaves behind of its work, so the
bytes that it keeps stand for its progress:

    slower = (processor time / bytes kept) while traced : (processor time / bytes kept) before

A program that waits, such as a server, keeps as much a second as before, and takes more of the
processor for that. A program that computes all the time takes all of a processor as before, and
keeps less a second; if that is lost in the noise of what is in use, its slowdown is not known, and
it is not traced. Two things stay unknown: how much slower a part of it gets that keeps nothing, and
how much of its processor time has to do with what it keeps.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from memtools._leak.growth import line_through

LEAST_READINGS, MOST_READINGS = 16, 40  # The rate and the noise are taken from so many plain ticks.
LEAST_TICKS = 4  # A window has at least so many ticks: what is made and dropped must come and go.
USUAL_TICKS = 15  # It has so many if what is in use rises evenly, ...
MOST_TICKS = 50  # ... and never more than these.
LEAST_PROBE = 5  # At least so many first ticks show how slow the program gets.
#: Memory in use must grow by so many times its noise in each half of a window. A lump that is kept
#: from time to time is noise as well: both halves have one of them.
ABOVE_NOISE = 4.0
CERTAIN = 10.0  # By so many times the noise it is certain that it has grown ten times as slowly.
NO_PROGRESS = 0.05  # A smaller share of the plain rate counts as this.
#: Tracing itself makes what is in use uncertain by so many bytes, for stacks that it sees for the
#: first time after its first tick.
OWN = 16384.0
BUSY = 0.8  # A program that takes more than this share of a tick may have no processor time left.
CHANGED = 1.5  # A program that is slower by a smaller factor is not slower: that is noise.
LEAST_CPU = 0.005  # A program that takes a smaller share of a tick counts as taking this.
BLOCK = 64.0  # A block of Python's takes about so many bytes.
#: tracemalloc takes so many times as much of the heap as it reports: it counts what it has asked
#: for, in pieces of 16 to 32 bytes.
TABLES = 1.75
#: tracemalloc may take so many bytes, for some 65,000 blocks: while these are listed, for some
#: 30 ms, nothing else of the program can run.
MOST_TABLES = 4 << 20
PLANNED = 0.75  # A window is planned to take this share of it: programs work faster and slower.


class _Reading(NamedTuple):
    at_ns: int
    in_use: float
    cpu_ns: int


def clocks() -> tuple[int, int]:
    """The monotonic clock, and what the process has had of processors without this thread."""
    return time.monotonic_ns(), time.process_time_ns() - time.thread_time_ns()


def tables_bytes() -> int:
    """Bytes that tracemalloc takes for itself, as it reports them."""
    module = sys.modules.get("tracemalloc")
    return 0 if module is None or not module.is_tracing() else module.get_tracemalloc_memory()


class Progress:
    """What a program keeps and computes, tick by tick, before it is traced and while it is.

    Args:
        seconds: of a tick.
        blocks: returns how many blocks Python has handed out.
        tables: returns how many bytes tracemalloc takes for itself.
        now: returns the time, and the processor time of all threads but this one, in nanoseconds.
    """

    def __init__(
        self,
        seconds: float,
        blocks: Callable[[], int] = sys.getallocatedblocks,
        tables: Callable[[], int] = tables_bytes,
        now: Callable[[], tuple[int, int]] = clocks,
    ) -> None:
        self.seconds = seconds
        self._blocks, self._tables, self._now = blocks, tables, now
        self._plain: deque[_Reading] = deque(maxlen=MOST_READINGS)
        #: the reading from which on it goes on as it does while it is traced
        self._since: _Reading | None = None
        self._newest: _Reading | None = None
        self._is_traced = False
        #: bytes a tick that it keeps while nothing is traced, and the noise of that
        self.rate = self.noise = 0.0
        self._cpu = 0.0  # nanoseconds of processors a tick that it takes then

    def read(self, heap: int) -> None:
        """Note that a tick has ended, at which so many bytes of the heap are in use."""
        in_use = heap + BLOCK * self._blocks() - TABLES * self._tables()
        at_ns, cpu_ns = self._now()
        self._newest = _Reading(at_ns, in_use, cpu_ns)
        if not self._is_traced:
            self._plain.append(self._newest)
            self._fit()
        elif self._since is None:
            self._since = self._newest

    def _fit(self) -> None:
        first, last, n = self._plain[0], self._plain[-1], len(self._plain)
        ticks = [self._ticks(first, one) for one in self._plain]
        if n < 3 or ticks[-1] <= 0:
            return
        line = line_through(ticks, [one.in_use for one in self._plain])
        self.rate, self.noise = line.slope, math.sqrt(line.rest / (n - 2))
        self._cpu = (last.cpu_ns - first.cpu_ns) / ticks[-1]

    def _ticks(self, a: _Reading, b: _Reading) -> float:
        return (b.at_ns - a.at_ns) / (1e9 * self.seconds)

    # --- before ---

    @property
    def is_known(self) -> bool:
        """Whether there are enough readings to know the rate and the noise."""
        return len(self._plain) >= LEAST_READINGS

    @property
    def is_full(self) -> bool:
        """Whether there are as many readings as are kept."""
        return len(self._plain) == MOST_READINGS

    @property
    def least_ticks(self) -> int | None:
        """Ticks to trace at least, so that growth stands out of the noise in each half. None if it
        never does and the program has no processor time left: its slowdown would not be known."""
        if self.rate <= 0:
            return None
        is_busy = self._cpu > self._busy
        noise = math.hypot(self.noise, OWN if is_busy else 0.0)
        ticks = max(LEAST_TICKS, math.ceil(2 * ABOVE_NOISE * noise / self.rate))
        return ticks if ticks <= MOST_TICKS else None if is_busy else MOST_TICKS

    @property
    def _busy(self) -> float:
        return BUSY * 1e9 * self.seconds

    def ticks(self, *, longest: bool) -> int:
        """How many ticks to trace."""
        return MOST_TICKS if longest else max(USUAL_TICKS, self.least_ticks or MOST_TICKS)

    @property
    def probe(self) -> int:
        """The number of ticks that measure how slow the program gets. The first does not count."""
        return max(LEAST_PROBE, (self.least_ticks or MOST_TICKS) // 2 + 1)

    def affordable(self, ticks: int, probed: int, tables: int) -> int | None:
        """So many of these ticks as tracemalloc's memory allows, if it has taken `tables` bytes in
        the `probed` ticks; None if growth does not stand out of the noise by then."""
        ticks = min(ticks, int(PLANNED * MOST_TABLES * probed / max(1, tables)) - 1)
        return ticks if ticks >= (self.least_ticks or MOST_TICKS) else None

    def forget(self) -> None:
        """Forget all readings."""
        self._plain.clear()
        self._since, self._is_traced = None, False

    # --- while it is traced ---

    def begin(self) -> None:
        """Note that it is traced from now on, or traced in another way. What that takes in its
        first tick does not count."""
        self._since, self._is_traced = None, True

    @property
    def tables(self) -> int:
        """Bytes that tracemalloc takes now."""
        return self._tables()

    def _traced(self) -> tuple[float, float, float]:
        """Ticks, and in each of them the bytes that were kept and the processor time."""
        if self._since is None or self._newest is None or self._newest is self._since:
            return 0.0, 0.0, 0.0
        first, last = self._since, self._newest
        ticks = self._ticks(first, last)
        return ticks, (last.in_use - first.in_use) / ticks, (last.cpu_ns - first.cpu_ns) / ticks

    def _shows(self, times: float) -> bool:
        """Whether it has been traced for so long that it would have grown by so many times the
        noise at the plain rate."""
        return self._traced()[0] * self.rate >= times * math.hypot(self.noise, OWN) > 0

    @property
    def is_certain(self) -> bool:
        """Whether `slower` is certain, if it is 10 or more."""
        ticks, _, cpu = self._traced()
        return self._shows(CERTAIN) or (ticks > 0 and cpu < self._busy)

    @property
    def slowed(self) -> float | None:
        """How many times as much it kept in the same time before it was traced, at least 1; None if
        that is not known."""
        _, kept, cpu = self._traced()
        if self._shows(ABOVE_NOISE):
            slowed = self.rate / max(kept, NO_PROGRESS * self.rate)
            return slowed if slowed >= CHANGED else 1.0
        return 1.0 if cpu < self._busy else None

    @property
    def slower(self) -> float | None:
        """How many times as long it would take for what it keeps if it did nothing else; None if
        that is not known."""
        ticks, _, cpu = self._traced()
        if ticks <= 0:
            return None
        least = LEAST_CPU * 1e9 * self.seconds
        slowed = self.slowed
        return (
            None if slowed is None else max(1.0, slowed * max(cpu, least) / max(self._cpu, least))
        )
