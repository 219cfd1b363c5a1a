"""Steps of a program under Tracing, as LeakWatch calls it, and programs whose time is made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from memtools import LeakFinding
from memtools._monitor.tracing import PLAIN, Tracing

MS = 10**6
#: How slow a traced step is, and what a look costs, depend on the machine: here on calls alone.
STEADY = """
import itertools, time
time.thread_time_ns = itertools.count(time.thread_time_ns(), 10**6).__next__
time.monotonic_ns = itertools.count(time.monotonic_ns(), 10**6).__next__
"""


def line_of(function: Callable[..., object], after: int = 1) -> int:
    return function.__code__.co_firstlineno + after


class Traced:
    """Tracing, and the events that it writes.

    Args:
        blocks: torch's blocks; None, the default: tracemalloc alone.
        took: the nanoseconds that each step takes, and those of the processor in it.
        more: arguments of Tracing.
    """

    def __init__(
        self,
        blocks: Any = None,
        took: Callable[[int], tuple[int, int]] = lambda step: (10 * MS, 10 * MS),
        reports: Any = None,
        **more: Any,
    ) -> None:
        self.took, self.events = took, list[dict[str, Any]]()
        if blocks is not None and reports is None:
            reports = SimpleNamespace(blocks=blocks, reason="", join=lambda: True)
        write = lambda fields: self.events.append(dict(fields))  # noqa: E731
        self.tracing = Tracing(reports, write=write, **more)

    def takes_plain_steps(self) -> None:
        for _ in range(PLAIN):
            self.step_took(MS, MS)

    def step_took(self, ns: int, cpu_ns: int) -> None:
        """Steps count as a thousand times as long: a window is given up after some steps of real
        time, which a busy machine must not reach."""
        self.tracing.step_took(1000 * ns, 1000 * cpu_ns)

    def turn(self, n: int, standing: list[LeakFinding]) -> bool:
        """What LeakWatch does between two steps, or ticks. Returns whether a window is opened."""
        tracing = self.tracing
        if tracing.is_open:
            made = tracing.turn(n, standing)
            standing[:] = [replace(one, made_at=made.get(one.key, one.made_at)) for one in standing]
        if not tracing.wants(n, standing):
            return False
        if tracing.reads:
            tracing.read(10**9)
        if not tracing.is_due(n):
            return False
        tracing.begin(n)
        return True

    def run(
        self, steps: range, standing: list[LeakFinding], step: Callable[[], object]
    ) -> list[int]:
        """Make these steps. Returns those at which a window was opened."""
        opened = []
        for n in steps:
            step()
            self.step_took(*self.took(n))
            if self.turn(n, standing):
                opened.append(n)
        return opened
