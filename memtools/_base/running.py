"""The monitors that run now, so that other parts of memtools can report to them what they do.

    MemoryMonitor.start() ──► monitors ◄── event(...)    a cleanup policy, the back-off
                                       ◄── phases(...)   generation

These parts import this module and not the monitor, which is not even loaded where none runs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

#: Every MemoryMonitor between start() and stop(), also if the program holds no reference to it.
monitors: set[Any] = set()


def event(kind: str, body: object, **details: Any) -> None:
    """Write an event to the record of every monitor that runs.

    Args:
        kind: the kind of event.
        body: a text, or the fields of that kind (memtools/_record/kinds.py).
        details: as of the monitor's Log.event: the time and the duration in nanoseconds.
    """
    for monitor in list(monitors):
        monitor._event(kind, body, **details)


def phases(name: str) -> list[AbstractContextManager[Any]]:
    """A phase called `name` of every monitor that runs, each to be entered by the caller."""
    return [monitor.phase(name) for monitor in list(monitors)]
