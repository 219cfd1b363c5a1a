"""When steps are traced, to learn the line that makes what grows, and what tracing leaves behind.

a finding stands, its line is not known ──► Tracing wants some steps
before the window ──► what is in use is noted ─┐
after it ───────────► what tracing has left ◄──┘ is left out of the books
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from memtools._leak.finding import LeakFinding
from memtools._monitor.schedule import START_BY_TIME
from memtools._monitor.sensor import Sensor
from memtools._monitor.signals import Signal
from memtools._monitor.tracing import Tracing

SLOW_NS = 1_000_000  # a reading of what is in use that takes more is not taken at each step
#: bytes that traced steps may leave: lines of torch's blocks, which are kept for the next ones, and
#: 48 to 250 of each stack that tracemalloc has seen, which it never frees before Python 3.13
MOST_LEFT = 128 << 10


class TracedSteps:
    """Opens and ends the windows of a Tracing at the ends of steps.

    Args:
        tracing: what traces; None: nothing is traced.
        sensor: whose books leave out what tracing takes.
    """

    def __init__(self, tracing: Tracing | None, sensor: Sensor) -> None:
        self._tracing, self._sensor = tracing, sensor
        #: something is to be done at the end of each step
        self.is_wanted = False
        #: before a window was opened: the step, and (signal, bytes) of those that it changes
        self._before: tuple[int, list[tuple[Signal, int | None]]] | None = None
        self._left = 0, 0  # when the newest step's end was left, and this thread's time then

    @property
    def is_open(self) -> bool:
        """Whether the step that begins is one that is traced."""
        return self._tracing is not None and self._tracing.is_open

    @property
    def slows(self) -> bool:
        """Whether what is in use has in it what the tracing takes: it is not to be read now."""
        return self._tracing is not None and self._tracing.slows

    def step_ended(
        self,
        step: int,
        now: int,
        standing: Sequence[LeakFinding],
        collect: Callable[[], None] | None,
    ) -> list[LeakFinding]:
        """The end of a step, at `now` on the monotonic clock. Returns the findings whose line is
        known by it. `collect`: collects garbage before lines are read."""
        tracing = self._tracing
        if tracing is None:
            return []
        if self.is_wanted:
            self._tell_progress(now, tracing)
        known: list[LeakFinding] = []
        if tracing.is_open:
            made = tracing.turn(step, standing, collect)
            known = [replace(one, made_at=made[one.key]) for one in standing if one.key in made]
        if not tracing.is_open:
            self._leave_out(step)
        return known

    def _tell_progress(self, now: int, tracing: Tracing) -> None:
        """How the program has gone on since the step before: by steps, or by time."""
        if tracing.is_by_time:
            heap = next(signal for signal in self._sensor.signals if signal.name == "heap")
            tracing.ticked(heap.read() or 0, heap.cost_ns)
        else:
            left, had = self._left
            tracing.step_took(now - left, time.thread_time_ns() - had)

    def plan(self, step: int, standing: Sequence[LeakFinding]) -> None:
        """Open a window where a finding stands whose line is not known."""
        tracing = self._tracing
        if tracing is None:
            return
        self.is_wanted = tracing.wants(step, standing)
        if not self.is_wanted:
            return
        in_use = self._sensor.in_use()
        if tracing.reads:
            if sum(signal.cost_ns for signal in in_use) > SLOW_NS:
                self.is_wanted = False
                return
            tracing.read(sum(signal.read() or 0 for signal in in_use))
        if tracing.is_by_time and step < START_BY_TIME:
            return
        if tracing.is_due(step):
            with self._sensor.left_out():
                tracing.prepare()
            self._before = step, [(signal, signal.read()) for signal in in_use]
            tracing.begin(step)  # from here on Python does not tell how large its blocks are

    def _leave_out(self, step: int) -> None:
        """A window is over: memory has grown by what the program has kept in these steps, and by
        what tracing has left. The first is taken to be what each step has kept before."""
        if self._before is None:
            return
        (begun, known), self._before = self._before, None
        for signal, before in known:
            after = signal.read()
            if before is None or after is None:
                continue
            pace = self._sensor.points.pace(signal.name, self._sensor.since(begun)).rate
            left = after - before - int(max(0.0, pace) * (step - begun))
            signal.leave_out(0, min(max(0, left), MOST_LEFT))

    def leave(self) -> None:
        """The program goes on: its next step begins here."""
        if self.is_wanted:
            self._left = time.monotonic_ns(), time.thread_time_ns()

    def interrupt(self) -> None:
        """End the window that is open: nothing that slows the program is to be on."""
        if self._tracing is not None:
            self._tracing.interrupt()

    def close(self) -> None:
        """Leave nothing on. May be called twice."""
        if self._tracing is not None:
            self._tracing.close()
