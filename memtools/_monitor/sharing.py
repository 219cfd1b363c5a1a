"""Notes which blocks of shared memory the program makes: a block of Python's SharedMemory that was
closed and not unlinked lies in /dev/shm under a name that does not show which process made it.

    SharedMemory(create=True) ──► resource_tracker.register(name) ──► _core._note_shm(name)
                                                                             │
    READ_SHM of every probe, also of forked children ◄── the inode ─────────┘

Files that the program itself writes there are noted by a hook of sys.audit(), in C, which is added
once such files have been seen (_core._watch_files()): a program without them has no hook.
"""

from __future__ import annotations

import sys
from typing import Any

from memtools import _core

TRACKER = "multiprocessing.resource_tracker"
#: the tracker's own function and ours that calls it, while ours is in its place
_placed: list[tuple[Any, Any]] = []


def _with_ours(register: Any) -> Any:
    """Return a function that calls the tracker's `register`, and notes blocks of shared memory. It
    also works after rest(), because the program may have imported it by its name meanwhile."""

    def register_and_note(name: str, rtype: str) -> None:
        register(name, rtype)
        if rtype == "shared_memory":
            _core._note_shm(name)

    return register_and_note


def watch(*, load: bool = False) -> None:
    """Note each block that is made from now on, if the tracker of multiprocessing is loaded; `load`
    loads it. Costs 1 us a block."""
    if load:
        import multiprocessing.resource_tracker  # noqa: F401
    tracker: Any = sys.modules.get(TRACKER)
    if _placed or tracker is None:
        return
    _placed.append((tracker.register, _with_ours(tracker.register)))
    _core._note_shm(None)
    tracker.register = _placed[0][1]


def rest() -> None:
    """Restore the tracker's function, unless another one was set meanwhile."""
    tracker: Any = sys.modules.get(TRACKER)
    if _placed and tracker is not None and tracker.register is _placed[0][1]:
        tracker.register = _placed.pop()[0]
