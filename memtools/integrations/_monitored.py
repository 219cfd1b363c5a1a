"""What the callbacks share: they start a monitor once, stop it once, and keep phases in pairs."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any, Self

from memtools import MemoryMonitor
from memtools._base.metrics import finite


class MonitoredRun:
    """A monitor for one training at a time. A monitor that already runs belongs to the code
    that started it: it gets steps and phases, and is not stopped.

    Args:
        monitor: the monitor; None makes one.
        expert: `figures()` are all that the monitor has.
    """

    def __init__(self, monitor: MemoryMonitor | None, expert: bool) -> None:
        if monitor is not None and not isinstance(monitor, MemoryMonitor):
            raise TypeError(
                f"MemoryCallback takes a memtools.MemoryMonitor, got a {type(monitor).__name__}"
            )
        self.monitor = MemoryMonitor() if monitor is None else monitor
        self._expert = expert
        self._is_owner = False
        self._open: dict[str, AbstractContextManager[Any]] = {}

    def start(self) -> None:
        """Start the monitor unless it runs. A training that did not end leaves its phases here."""
        self.leave_all()
        if not self.monitor.running:
            self.monitor.start()
            self._is_owner = True

    def is_in(self, name: str) -> bool:
        """Whether a phase was entered and not left."""
        return name in self._open

    def enter(self, name: str, *, own_steps: bool = False) -> None:
        """Enter a phase, unless it was entered and not left."""
        if name not in self._open:
            phase = self.monitor.phase(name, own_steps=own_steps)
            phase.__enter__()
            self._open[name] = phase

    def leave(self, name: str) -> None:
        """Leave a phase if it was entered."""
        phase = self._open.pop(name, None)
        if phase is not None:
            phase.__exit__(None, None, None)

    def leave_all(self, but: str = "") -> None:
        """Leave all phases except `but`, the innermost first."""
        for name in reversed(list(self._open)):
            if name != but:
                self.leave(name)

    def figures(self) -> dict[str, float]:
        """The monitor's figures that can be plotted; none while it does not run."""
        return finite(self.monitor.metrics(self._expert)) if self.monitor.running else {}

    def stop(self, error: BaseException | None = None) -> None:
        """Leave all phases, and stop the monitor if it was started here. Calling it again does
        nothing. The record says that the training ended by `error`."""
        self.leave_all()
        if not self._is_owner:
            return
        self._is_owner = False
        if error is None:
            self.monitor.stop()
        else:
            self.monitor.__exit__(type(error), error, error.__traceback__)

    def log_summary(self) -> None:
        """Write the monitor's summary to the log named `memtools`."""
        logging.getLogger("memtools").info("%s", self.monitor.summary())


class MonitoringCallback:
    """What the callbacks for transformers and for Lightning offer a program."""

    def __init__(self, monitor: MemoryMonitor | None, expert: bool) -> None:
        self._run = MonitoredRun(monitor, expert)

    @property
    def monitor(self) -> MemoryMonitor:
        """The monitor of the training."""
        return self._run.monitor

    @property
    def is_training(self) -> bool:
        """Whether a training has begun and not ended."""
        return self._run.is_in("train")

    def stop(self, error: BaseException | None = None) -> None:
        """Stop the monitor if the callback started it. The record says that the training ended by
        `error`, if given."""
        self._run.stop(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)
