"""How fast a program without steps goes on, and how much slower tracing makes it.

    ByTime, each 0.2 s ──► Progress.read(heap) ──► (time, bytes in use, processor time)
          plain ────────────► rate, noise, processor ──► ticks: how long to trace
          while traced ─────► slower: against the plain ones ──► how many frames, or no more

Nobody counts what such a program does. What grows is what it leaves behind of its work, so that
the bytes that it keeps stand for its progress:

    slower = (processor time / bytes kept) while traced : (processor time / bytes kept) before

Where it waits for something, as a server does, it keeps as much a second as before, and takes more
of the processor for that. Where it computes all the time, it takes all of a processor as before,
and keeps less a second. What is not known: how much slower a part of it gets that keeps nothing,
and how much of its processor time has to do with what it keeps.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

LEAST_READINGS, MOST_READINGS = 16, 40  # plain ticks, from which the rate and the noise are known
LEAST_TICKS = 4  # of a window: what is made and dropped has to be seen to come and go
USUAL_TICKS = 10  # of a window, where what is in use rises evenly
MOST_TICKS = 50  # of a window; where it would take more the growth is lost in noise
#: times its noise has memory in use to grow by in each half of a window. A lump that is kept from
#: time to time is noise as well: both halves have one of them
ABOVE_NOISE = 4.0
CERTAIN = 10.0  # times its noise: by then it is certain that it has grown ten times as slowly
NO_PROGRESS = 0.05  # of the plain rate: less than that cannot be told from nothing
LEAST_CPU = 0.005  # of a tick: a program that takes less of the processor counts as taking that
BLOCK = 64.0  # bytes that a block of Python's takes, about
#: times what tracemalloc tells of its own memory, that it takes of the heap: it counts what it has
#: asked for, in pieces of 16 to 32 bytes
TABLES = 1.75
#: bytes of tracemalloc's own, some 65,000 blocks: a list of these is made while nothing else of the
#: program can run, for some 30 ms
MOST_TABLES = 4 << 20
PLANNED = 0.75  # of it, that a window is to take: programs work faster and slower


class _Reading(NamedTuple):
    at_ns: int
    in_use: float
    cpu_ns: int


def clocks() -> tuple[int, int]:
    """The monotonic clock, and what the process has had of processors without this thread."""
    return time.monotonic_ns(), time.process_time_ns() - time.thread_time_ns()


def tables_bytes() -> int:
    """Bytes that tracemalloc takes for itself, as far as it tells."""
    module = sys.modules.get("tracemalloc")
    return 0 if module is None or not module.is_tracing() else module.get_tracemalloc_memory()


class Progress:
    """What a program keeps and computes, tick by tick, before it is traced and while it is.

    Args:
        seconds: of a tick.
        blocks: tells how many blocks Python has given out.
        tables: tells what tracemalloc takes for itself, in bytes.
        now: tells the time, and the processor time of all threads but this one, in nanoseconds.
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
        self._since: _Reading | None = None  # when tracing has begun
        self._newest: _Reading | None = None
        #: bytes a tick that it keeps while nothing is traced, and what readings lie beside that by
        self.rate = self.noise = 0.0
        self._cpu = 0.0  # nanoseconds a tick that it takes of processors then

    def read(self, heap: int) -> None:
        """A tick has ended, and so many bytes of the heap are in use."""
        in_use = heap + BLOCK * self._blocks() - TABLES * self._tables()
        at_ns, cpu_ns = self._now()
        self._newest = _Reading(at_ns, in_use, cpu_ns)
        if self._since is None:
            self._plain.append(self._newest)
            self._fit()

    def _fit(self) -> None:
        first, last, n = self._plain[0], self._plain[-1], len(self._plain)
        ticks = [self._ticks(first, one) for one in self._plain]
        if n < 3 or ticks[-1] <= 0:
            return
        mean_x, mean_y = sum(ticks) / n, sum(one.in_use for one in self._plain) / n
        over = sum((x - mean_x) ** 2 for x in ticks)
        pairs = [
            (x - mean_x, one.in_use - mean_y) for x, one in zip(ticks, self._plain, strict=True)
        ]
        self.rate = sum(x * y for x, y in pairs) / over
        self.noise = math.sqrt(sum((y - self.rate * x) ** 2 for x, y in pairs) / (n - 2))
        self._cpu = (last.cpu_ns - first.cpu_ns) / ticks[-1]

    def _ticks(self, a: _Reading, b: _Reading) -> float:
        return (b.at_ns - a.at_ns) / (1e9 * self.seconds)

    # --- before ---

    @property
    def is_known(self) -> bool:
        """Whether there are readings enough to know the rate and the noise."""
        return len(self._plain) >= LEAST_READINGS

    @property
    def is_full(self) -> bool:
        """Whether more of them will not tell more."""
        return len(self._plain) == MOST_READINGS

    @property
    def least_ticks(self) -> int | None:
        """Ticks after which growth stands out of the noise in each half; None where it is lost."""
        if self.rate <= 0:
            return None
        ticks = max(LEAST_TICKS, math.ceil(2 * ABOVE_NOISE * self.noise / self.rate))
        return ticks if ticks <= MOST_TICKS else None

    def ticks(self, *, longest: bool) -> int:
        """How many to trace."""
        return MOST_TICKS if longest else max(USUAL_TICKS, self.least_ticks or MOST_TICKS)

    def affordable(self, ticks: int, probed: int, tables: int) -> int | None:
        """So many of these ticks as tracemalloc's memory allows, where it has taken so many bytes in
        the ticks that were probed; None where growth does not stand out of the noise by then."""
        ticks = min(ticks, int(PLANNED * MOST_TABLES * probed / max(1, tables)) - 1)
        return ticks if ticks >= (self.least_ticks or MOST_TICKS) else None

    def forget(self) -> None:
        """What has been read is of another time."""
        self._plain.clear()
        self._since = None

    # --- while it is traced ---

    def begin(self) -> None:
        """From the newest reading on it is traced, or traced in another way."""
        self._since = self._newest

    @property
    def tables(self) -> int:
        """Bytes that tracemalloc takes now."""
        return self._tables()

    @property
    def _traced_ticks(self) -> float:
        if self._since is None or self._newest is None:
            return 0.0
        return self._ticks(self._since, self._newest)

    @property
    def is_certain(self) -> bool:
        """Whether noise cannot have made what is read of `slower`, where that is 10 and more."""
        return self._traced_ticks * self.rate >= CERTAIN * self.noise and self._traced_ticks > 0.5

    @property
    def slowed(self) -> float:
        """So many times as much it kept in the same time before it was traced, at least once."""
        ticks = self._traced_ticks
        if ticks <= 0 or self.rate <= 0:
            return 1.0
        assert self._since is not None
        assert self._newest is not None
        now = (self._newest.in_use - self._since.in_use) / ticks
        return max(1.0, self.rate / max(now, NO_PROGRESS * self.rate))

    @property
    def slower(self) -> float:
        """So many times as long it would take for what it keeps, beside no other work."""
        ticks = self._traced_ticks
        if ticks <= 0:
            return 1.0
        assert self._since is not None
        assert self._newest is not None
        least = LEAST_CPU * 1e9 * self.seconds
        cpu = (self._newest.cpu_ns - self._since.cpu_ns) / ticks
        return max(1.0, self.slowed * max(cpu, least) / max(self._cpu, least))
