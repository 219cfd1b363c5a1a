"""The state of Python's collector, taken over for a training loop and given back as it was found.

    begin() ── remembers: enabled? thresholds? frozen by others?
    freeze() ─ collect, freeze, disable: from here a collection sees only what is newer
    end() ──── thaws what was frozen here, puts the rest back

There is one collector in a process and there may be many managers: the first that begins remembers
what it found, the last that ends puts it back, in whatever order and on whatever threads they
come. The state at the end is the one found at the beginning, whatever was changed in between: a
change made by the program cannot be told from one made by another library for a moment, and a
block that ends gives back what it was given.

Interrupts: Python delivers KeyboardInterrupt after any call here. So everything is remembered
before it is changed, what has been begun to be put back is put back whole, and a manager counts
as active until that is done: when end() is interrupted before it has begun, calling it again, the
manager's own death or the interpreter's end does it.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import NamedTuple

from memtools._base import process

# Python 3.12 itself puts its immortal objects aside at the start (375 of them), and 3.14.0 to
# 3.14.4 one now and then; gc.freeze() puts aside all of thousands.
_IMMORTAL = 0 if sys.version_info < (3, 12) else 1_000


class _Found(NamedTuple):
    """How the collector was before the first manager."""

    enabled: bool
    thresholds: tuple[int, ...]


class _Shared:
    """What all managers of this process have in common. Holds none of them alive."""

    def __init__(self) -> None:
        # Re-entrant: a finalizer may run under it, and may begin or end a manager itself.
        self.lock = threading.RLock()
        self.members: dict[weakref.ref[ManagedGc], int] = {}  # begin() calls without their end()
        self.found: _Found | None = None
        self.frozen = 0  # objects, by us; 0 where others had frozen before

    def begin(self, member: weakref.ref[ManagedGc]) -> None:
        with self.lock:
            self.members[member] = self.members.get(member, 0) + 1
            if self.found is None:
                self.found = _Found(gc.isenabled(), gc.get_threshold())

    def end(self, member: weakref.ref[ManagedGc], whole: bool = False) -> None:
        """One end(), or with `whole` all that are due: the manager is no more."""
        with self.lock:
            depth = self.members.get(member, 0)
            if depth > 1 and not whole:
                self.members[member] = depth - 1
                return
            try:
                if depth and len(self.members) == 1:
                    self.restore()
            finally:
                if self.found is None or len(self.members) > 1:
                    self.members.pop(member, None)

    def freeze(self, member: weakref.ref[ManagedGc]) -> None:
        """Puts all objects aside, unless others have done so before: theirs could not be told from
        ours afterwards. Nothing for a member that has ended while it collected."""
        with self.lock:
            if member not in self.members:
                return
            if self.found is None:  # begin() was interrupted
                self.found = _Found(gc.isenabled(), gc.get_threshold())
            if self.frozen or gc.get_freeze_count() <= _IMMORTAL:
                self.frozen = max(1, self.frozen)  # before it is true: to thaw nothing does no harm
                gc.freeze()
                self.frozen = max(1, gc.get_freeze_count())
            gc.disable()

    def restore(self) -> None:
        """All as found. Each part is done even if an interrupt comes before it."""
        found = self.found
        if found is None:
            return
        try:
            gc.set_threshold(*found.thresholds)
        finally:
            try:
                if self.frozen:
                    gc.unfreeze()
            finally:
                try:
                    (gc.enable if found.enabled else gc.disable)()
                finally:
                    self.found, self.frozen = None, 0

    def thaw(self) -> None:
        """In a forked child, where nobody manages: what the parent has put aside."""
        if self.frozen and not self.members:
            gc.unfreeze()
            self.frozen = 0


_shared = _Shared()


class ManagedGc:
    """One user's share in the management of the collector.

    A manager that dies without end() has ended, and so have all at the interpreter's end. In a
    forked child the management is over: gc is enabled there if it was found enabled, the frozen
    objects stay aside, so that their pages stay shared, and end() of a manager that came along
    thaws them.
    """

    __slots__ = ("__weakref__", "_member", "_shared")

    def __init__(self) -> None:
        self._shared = _shared
        self._member = weakref.ref(self, _gone)
        hash(self._member)  # kept by it: of a manager that is gone there is none any more

    def begin(self) -> None:
        """Take part: how the collector is now is remembered, unless another manager has done so.

        Changes nothing yet. Each begin() wants an end().
        """
        process.at_fork(_forked)
        process.at_exit(_exit)
        self._shared = _shared
        self._shared.begin(self._member)

    def freeze(self) -> tuple[int, float]:
        """Collect, put aside what is alive and switch automatic collections off: (objects put
        aside, milliseconds).

        To be called when the program has set up what it will keep. Where others have used
        gc.freeze() before, nothing is put aside, (0, ms); in a forked child nothing is done,
        (0, 0.0). Takes as long as gc.collect(), some 70 ms with torch imported. Raises
        RuntimeError before begin().
        """
        if not self.managed:
            if self._shared is not _shared:
                return 0, 0.0
            raise RuntimeError("freeze() comes between begin() and end(); call begin() first")
        start = time.perf_counter()
        gc.collect()
        self._shared.freeze(self._member)
        return self.frozen, 1e3 * (time.perf_counter() - start)

    def end(self) -> None:
        """Take part no more; after the last manager's end() all is as the first one found it.

        Nothing happens without a begin(). Takes microseconds: nothing is collected.
        """
        if self._shared is _shared:
            self._shared.end(self._member)
        else:  # forked since begin()
            _shared.thaw()

    @property
    def managed(self) -> bool:
        """Whether this manager has begun and not ended."""
        return self._shared is _shared and self._member in _shared.members

    @property
    def frozen(self) -> int:
        """How many objects freeze() has put aside, this manager's or another's; 0 when it has
        ended, or where others had frozen before."""
        return self._shared.frozen if self.managed else 0


def worker_setup() -> None:
    """Make a data-loading worker cheap to share memory with.

    For `DataLoader(worker_init_fn=...)`. Puts aside what the worker was born with: a collection
    writes to each object that it looks at, and in a forked worker each page that is written to is
    copied. No collection comes before, for the same reason. gc is enabled in the worker if it was
    in the parent before memtools managed it. In a spawned worker nothing is shared; there it saves
    the time of looking at the imported modules again and again. Takes microseconds.
    """
    gc.freeze()


def _gone(member: weakref.ref[ManagedGc]) -> None:
    _shared.end(member, whole=True)


def _forked() -> None:
    """In the child. The lock may be held by a thread that is not here, so it is a new one."""
    global _shared
    before, _shared = _shared, _Shared()
    _shared.frozen = before.frozen
    if before.members and before.found is not None and before.found.enabled:
        gc.enable()


def _exit() -> None:
    """Python collects at its end what it finds, if gc is enabled: so that no finalizer is left out,
    it finds all."""
    with _shared.lock:
        _shared.restore()
        _shared.members.clear()
        _shared.thaw()
