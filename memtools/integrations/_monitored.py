"""What the callbacks do with a monitor: start it once, stop it once, keep phases in pairs."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from memtools import MemoryMonitor
from memtools._base.metrics import finite


class MonitoredRun:
    """One training at a time. A monitor that runs already belongs to who started it: it gets steps
    and phases, and is not stopped."""

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
        """Also where a training begins again without having ended: its phases are left then."""
        self.leave_all()
        if not self.monitor.running:
            self.monitor.start()
            self._is_owner = True

    def enter(self, name: str) -> None:
        if name not in self._open:
            phase = self.monitor.phase(name)
            phase.__enter__()
            self._open[name] = phase

    def leave(self, name: str) -> None:
        phase = self._open.pop(name, None)
        if phase is not None:
            phase.__exit__(None, None, None)

    def leave_all(self, but: str = "") -> None:
        """The innermost first."""
        for name in reversed(list(self._open)):
            if name != but:
                self.leave(name)

    def figures(self) -> dict[str, float]:
        """What can be plotted; nothing while the monitor does not run."""
        return finite(self.monitor.metrics(self._expert)) if self.monitor.running else {}

    def stop(self, error: BaseException | None = None) -> None:
        """Leaves all phases, and stops the monitor if it was started here. May be called again."""
        self.leave_all()
        if not self._is_owner:
            return
        self._is_owner = False
        if error is None:
            self.monitor.stop()
        else:  # the record says by what it ended
            self.monitor.__exit__(type(error), error, error.__traceback__)

    def say(self) -> None:
        """The summary, to the log named `memtools`."""
        logging.getLogger("memtools").info("%s", self.monitor.summary())
