"""When the leak test of a run looks, and how much time that may take.

    step  16  24  32  48  64  96  128  192 ...   a look: all signals, and the heap if they grow
               └ large growth ┘                  looks in between, at most half of the time
                                  │  │  │  │     while a finding stands: the signals alone

When it looks is a matter of steps and of bytes alone: what is said about a loop does not depend on
how fast its steps are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

FIRST_LOOK = 16
EARLIEST_LOOK = 4  # where growth is large
DENSE_STEPS = 128  # in which counters that cost next to nothing are read at each step
GRACE_NS = 1_500_000_000  # that looks may take in any run
SHARE = 0.01  # of a run that they may take beyond that
START_BY_TIME = 45  # steps of time in which growth may be the program's start


class Schedule:
    """At which steps to look: 16, 24, 32, 48, 64, 96, 128, 192 and so on. Where large growth begins
    late the looks are dense once more from there on.

    Args:
        origin: the step after which the run begins, 0 by default.
    """

    def __init__(self, origin: int = 0) -> None:
        self.origin = origin
        #: the newest step at which signals were read; `origin` before the first
        self.newest = origin
        #: the step of the next look
        self.next, self._gap, self._half = origin + FIRST_LOOK, 8, False
        self._first: tuple[int, int] | None = None  # the first step, and when that was

    def begin(self, step: int) -> bool:
        """A step has ended. Returns whether it is the first."""
        if self._first is not None:
            return False
        self._first = step, time.monotonic_ns()
        return True

    def step_ns(self, step: int) -> float:
        """Nanoseconds that a step has taken from the first to this one."""
        first, begun = self._first or (step, time.monotonic_ns())
        return (time.monotonic_ns() - begun) / max(1, step - first)

    def passed(self, step: int) -> None:
        """A look was taken. The next one is where the gaps, each of them twice, lead to."""
        while self.next <= step:
            self.next += self._gap
            if self._half:
                self._gap *= 2
            self._half = not self._half

    def again(self, step: int) -> None:
        """Begin again, as after the first look."""
        self.next, self._gap, self._half = step + 8, 8, True

    def soon(self, step: int) -> None:
        """Somebody new grows. In a run that has gone on for long, who it is takes some looks."""
        if not self.is_dense(step) and self.next > step + 8:
            self.again(step)

    def is_dense(self, step: int) -> bool:
        """Whether this is one of the first steps, in which looks and readings are dense."""
        return step - self.origin < DENSE_STEPS

    def may_look_early(self, step: int) -> bool:
        """Whether a look beside the schedule, at large growth, takes half of the time at most."""
        apart = max(EARLIEST_LOOK, (self.newest - self.origin) // 4)
        return step - self.origin <= DENSE_STEPS and step >= self.newest + apart

    @property
    def next_check(self) -> int:
        """The step at which findings that stand are checked."""
        return self.newest + max(8, self.newest // 40)

    def due_step(self, step: int, *, stands: bool, every: int) -> int:
        """The step after this one at which there is something to do.

        Args:
            step: that has ended.
            stands: whether a finding stands.
            every: in how many of the first steps something is read.
        """
        due = min(self.next, self.next_check) if stands else self.next
        return min(due, step + every) if self.is_dense(step) else due


class Budget:
    """Time of the processor that looks may take: 1.5 s in any run, and 1 % of the run beyond."""

    def __init__(self) -> None:
        self._begun_ns, self._spent_ns = time.monotonic_ns(), 0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """What the block takes of this thread's time is spent."""
        begun = time.thread_time_ns()
        try:
            yield
        finally:
            self._spent_ns += time.thread_time_ns() - begun

    def can_afford(self, ns: int, steps: int) -> bool:
        """Whether so much can be spent after so many steps of the run."""
        allowed = GRACE_NS
        if steps > 512:
            allowed += int(SHARE * (time.monotonic_ns() - self._begun_ns))
        return self._spent_ns + ns <= allowed
