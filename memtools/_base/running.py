"""The monitors that run now, so that other rooms can tell them what they do.

    MemoryMonitor.start() ──► monitors ◄── event(...)    a cleanup policy, the back-off
                                       ◄── phases(...)   generation

Whoever tells a monitor something comes here and does not import the monitor: where none runs,
nothing of it is loaded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

#: Every MemoryMonitor between start and stop. A program may lose sight of one, as of a thread.
monitors: set[Any] = set()


def event(kind: str, body: object, **details: Any) -> None:
    """Write an event to the record of every monitor that runs: a text, or the fields of its kind
    (memtools/record/kinds.py). `details` are those of Log.event: the time and the duration in
    nanoseconds."""
    for monitor in list(monitors):
        monitor._event(kind, body, **details)


def phases(name: str) -> list[AbstractContextManager[Any]]:
    """A phase of that name for every monitor that runs."""
    return [monitor.phase(name) for monitor in list(monitors)]
