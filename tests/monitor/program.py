"""A made-up program under a leak test: series by the step, whoever holds them, and a clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memtools import LeakFinding
from memtools._census.holders import Holder
from memtools._monitor.children import ChildProcesses
from memtools._monitor.leakwatch import LeakWatch
from memtools._monitor.log import Log
from memtools._monitor.reporter import Listeners, Reporter, Says
from memtools._monitor.signals import Signal
from memtools._record import kinds

KIB, MIB, GIB = 2**10, 2**20, 2**30
LOOKS = [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


class Clock:
    """Time that passes by steps and readings alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 10**9
        monkeypatch.setattr("memtools._monitor.leakwatch.time.monotonic_ns", lambda: self.ns)
        monkeypatch.setattr("memtools._monitor.leakwatch.time.thread_time_ns", lambda: self.ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Events:
    """A RecordWriter that keeps what it is told."""

    path, closed = "run.mem", False

    def __init__(self) -> None:
        self.told: list[tuple[int, LeakFinding]] = []

    def event(self, kind: str, body: bytes, *, step: int, **_: object) -> None:
        event = kinds.read(kind, body)[0]
        assert isinstance(event, LeakFinding)
        self.told.append((step, event))


class Bounds:
    """Limits that are what a test says."""

    def __init__(self, program: Program, host: int | None, device: int | None) -> None:
        self._program, self._host, self._device = program, host, device

    def rooms(self) -> dict[str, int]:
        return {} if self._host is None else {"counted": self._host - self._program.total()}

    def above(self) -> int:
        return self._program.above

    def leave_out(self) -> None:
        pass

    def admit_look(self) -> bool:
        return True

    def share(self, part: float) -> int | None:
        return None if self._host is None else int(part * self._host)

    def used(self) -> int | None:
        return self._program.total()

    def device(self) -> int | None:
        return self._device


class FakeCensus:
    """A census whose holders a test gives."""

    def __init__(self, program: Program) -> None:
        self.program, self.looks, self.at = program, 0, list[int]()
        self.cut, self.reached_bytes = False, 0
        self.quick = list[bool]()

    def look(self, step: int, *, quick: bool = False) -> None:
        self.looks += 1
        self.quick.append(quick)
        self.at.append(step)
        self.program.census_looks()

    def holders(self) -> tuple[Holder, ...]:
        return tuple(self.program.held) if self.looks >= 3 else ()


class Program:
    """Series that depend on the step, and whoever holds them."""

    def __init__(
        self, clock: Clock, *, limit: int | None = None, device: int | None = None,
        census: bool = True, step_ns: int = 10**6, seconds: float | None = None,
        tensors: bool = False, workers: Any = None, tracing: Any = None, resident: bool = False,
        says: Says | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.step_ns, self.step, self.cost_ns = clock, step_ns, 0, 1000
        self.sizes = {"heap": 100 * MIB, "python": 20 * MIB, "rss": 200 * MIB}
        if device is not None:
            self.sizes["device"] = 0
        if tensors:
            self.sizes["tensors"] = 50 * MIB
        if workers is not None:
            self.sizes["children"] = 100 * MIB
        if resident:
            self.sizes |= {"resident": 150 * MIB, "idle": 10 * MIB, "VmData": 400 * MIB}
        self.above = 0
        self.held: list[Holder] = []
        self.reads: list[tuple[int, str]] = []
        self.census_looks: Callable[[], None] = lambda: None
        self.events, self.said = Events(), list[LeakFinding]()
        self.log = Log(self.events, lambda: self.step)  # type: ignore[arg-type]
        self.listeners = Listeners()
        self.texts = list[str]()
        self.signals = [Signal(name, lambda name=name: self.read(name)) for name in self.sizes]  # type: ignore[misc]
        self.census = FakeCensus(self)
        self.watch = LeakWatch(
            self.signals,
            Bounds(self, limit, device),  # type: ignore[arg-type]
            Reporter(self.log, self.listeners, says or self.says),
            (lambda: self.census) if census else None,
            children=ChildProcesses(workers=workers),
            seconds=seconds,
            tracing=tracing,
        )

    @property
    def looks(self) -> list[int]:
        """The steps of the looks so far."""
        return self.watch._sensor.looks

    def says(self, finding: LeakFinding) -> None:
        self.said.append(finding)
        self.texts.append(str(finding))

    def total(self) -> int:
        return self.sizes.get("resident", self.sizes["rss"] + self.sizes["heap"])

    def read(self, name: str) -> int | None:
        self.reads.append((self.step, name))
        self.clock.ns += self.cost_ns
        return self.sizes[name]

    def run(self, steps: int, **grow: int) -> None:
        """As step() of the monitor does it."""
        for _ in range(steps):
            self.step += 1
            for name, size in grow.items():
                self.sizes[name] += size
            self.clock.ns += self.step_ns
            if self.step >= self.watch.due_step or self.clock.ns >= self.watch.due_ns > 0:
                self.watch.look(self.step)

    def lines(self) -> list[str]:
        return [str(one) for one in self.said]


def holder(rate: int, **more: Any) -> Holder:
    """Somebody who gains so many bytes a step."""
    given = {"path": "list Trainer.losses", "kind": "list", "length": 64, "capacity": None}
    given |= {"new_objects": 200, "new_bytes": 100 * rate, "steps": 100, "what": "tensors"}
    return Holder(**(given | more))
