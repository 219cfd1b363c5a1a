"""Hears which blocks of shared memory the program makes: a block of Python's SharedMemory that was
closed and not unlinked lies in /dev/shm under a name that does not say whose it is.

    SharedMemory(create=True) ──► resource_tracker.register(name) ──► _core._tell_shm(name)
                                                                             │
    READ_SHM of every probe, also of forked children ◄── the inode ─────────┘

Files that the program itself writes there are heard by a hook of sys.audit(), in C, which is added
once such files have been seen (_core._hear_files()): a program without them has no hook.
"""

from __future__ import annotations

import sys
from typing import Any

from memtools import _core

TRACKER = "multiprocessing.resource_tracker"
_before: list[Any] = []  # the tracker's own function, while we hear


def _register(name: str, rtype: str) -> None:
    _before[0](name, rtype)
    if rtype == "shared_memory":
        _core._tell_shm(name)


def hear(*, load: bool = False) -> None:
    """Hear of each block that is made from now on, if the tracker of multiprocessing is loaded;
    `load` loads it. Costs 1 us a block."""
    if load:
        import multiprocessing.resource_tracker  # noqa: F401
    tracker: Any = sys.modules.get(TRACKER)
    if _before or tracker is None:
        return
    _before.append(tracker.register)
    _core._tell_shm(None)
    tracker.register = _register


def rest() -> None:
    """Hear no more, unless somebody else has taken the place meanwhile."""
    tracker: Any = sys.modules.get(TRACKER)
    if _before and tracker is not None and tracker.register is _register:
        tracker.register = _before.pop()
