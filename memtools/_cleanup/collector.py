"""Take over Python's garbage collector for a training loop, and restore its state afterwards.

    begin() ── remembers: enabled? thresholds? frozen by others?
    freeze() ─ collect, freeze, disable: from here a collection sees only what is newer
    end() ──── thaws what was frozen here, restores everything else

A process has one collector, and may have many managers, on any threads. The first that begins
remembers the collector's state, and the last that ends restores it, also if the state was changed
in between: a change by the program looks like a temporary one by another library.

Python may deliver KeyboardInterrupt after any call here. So everything is remembered before it is
changed, and a restoration that has begun is completed. A manager counts as active until then: if
end() is interrupted before it has begun, it must be called again. A CleanupPolicy calls it at the
latest when it is freed, or at the interpreter's end.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import NamedTuple

from memtools._base import process

# Python 3.12 itself puts its immortal objects aside at the start (375 of them), and 3.14.0 to
# 3.14.4 one now and then; gc.freeze() puts aside all of thousands.
_IMMORTAL = 0 if sys.version_info < (3, 12) else 1_000


class _Found(NamedTuple):
    """The state of the collector before the first manager."""

    enabled: bool
    thresholds: tuple[int, ...]


class _Shared:
    """The state that all managers of this process share."""

    def __init__(self) -> None:
        # Re-entrant: a finalizer may run under it, and may begin or end a manager itself.
        self.lock = threading.RLock()
        self.members: set[ManagedGc] = set()  # that have begun and not ended
        self.found: _Found | None = None
        self.frozen = 0  # objects, by us; 0 where others had frozen before

    def begin(self, member: ManagedGc) -> None:
        with self.lock:
            self.members.add(member)
            if self.found is None:
                self.found = _Found(gc.isenabled(), gc.get_threshold())

    def end(self, member: ManagedGc) -> None:
        with self.lock:
            try:
                if self.members == {member}:
                    self.restore()
            finally:
                if self.found is None or len(self.members) > 1:
                    self.members.discard(member)

    def freeze(self, member: ManagedGc) -> None:
        """Put all objects aside, unless other code has done so: its objects could not be
        distinguished from ours afterwards. Does nothing for a member that has ended meanwhile."""
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
        """Restore the state that was found, each part even if an interrupt comes before it."""
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
        """Thaw what the parent has put aside, in a forked child without a manager."""
        if self.frozen and not self.members:
            gc.unfreeze()
            self.frozen = 0


_shared = _Shared()


class ManagedGc:
    """One user's share in the management of the collector.

    A manager that has begun is held until its end(). In a forked child the management is over: gc
    is enabled there if it was found enabled, the frozen objects stay aside, so that their pages
    stay shared, and end() of a manager that came along thaws them.
    """

    __slots__ = ("_shared",)

    def __init__(self) -> None:
        self._shared = _shared

    def begin(self) -> None:
        """Join the management, and remember the collector's state unless another manager has.
        Changes nothing yet."""
        process.at_fork(_forked)
        self._shared = _shared
        self._shared.begin(self)

    def freeze(self) -> int:
        """Collect, put aside what is alive and switch automatic collections off; returns how many
        objects were put aside.

        To be called when the program has set up what it will keep. Where others have used
        gc.freeze() before, nothing is put aside; in a forked child, and outside begin() and end(),
        nothing is done. Takes as long as gc.collect(), some 70 ms with torch imported.
        """
        if self.managed:
            gc.collect()
            self._shared.freeze(self)
        return self.frozen

    def end(self) -> None:
        """Leave the management; the last end() restores the state that the first manager found.

        Nothing happens without a begin(). Takes microseconds: nothing is collected.
        """
        if self._shared is _shared:
            self._shared.end(self)
        else:  # forked since begin()
            _shared.thaw()

    @property
    def managed(self) -> bool:
        """Whether this manager has begun and not ended."""
        return self._shared is _shared and self in _shared.members

    @property
    def frozen(self) -> int:
        """How many objects freeze() has put aside, this manager's or another's; 0 when it has
        ended, or where others had frozen before."""
        return self._shared.frozen if self.managed else 0


def _forked() -> None:
    """Make new shared state in a forked child: the lock may belong to a thread that is gone."""
    global _shared
    before, _shared = _shared, _Shared()
    _shared.frozen = before.frozen
    if before.members and before.found is not None and before.found.enabled:
        gc.enable()
