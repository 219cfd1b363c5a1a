"""InFlight: how many bytes of batches are on their way from the workers to the loop, and how many
may be.

    dispatched ──► being made ──► made, in /dev/shm ──► in the parent, waits its turn ──► the loop
    └────────────────────────────── in flight ────────────────────────────┘

The size of a batch is known when it arrives in the parent. Until then it counts as the largest
batch that has been seen, so the first batch is requested alone. One batch of each iterator may
always be in flight: a limit below the size of a batch makes the loop slow and does not stop it.

The count is needed for every batch, so it is one walk over a few tuples: some microseconds.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from memtools import _core
from memtools._base import running
from memtools._base.limits import SHM, left_of, nearest_limit, shm_room
from memtools._base.size import format_bytes
from memtools.errors import BudgetError

READ_AGAIN_NS = 20_000_000  # what is left of the job's memory is read again after so long
GROWS_EVERY = 16  # A limit that was halved grows by one batch after this many batches.


class Room:
    """What the job may still take of the host's memory.

    Args:
        root: the folder under which `proc` and `sys` are read.
    """

    __slots__ = ("_left", "_probe", "_until")

    def __init__(self, root: str = "/") -> None:
        self._probe = _core.Probe(root, True)
        self._until = 0
        self._left: int | None = None

    def left(self) -> int | None:
        """Bytes until the control group's limit, the end of the machine's memory, or of /dev/shm,
        whichever comes first; None where none of them is known. Takes some 20 us, 50 times a second
        at most."""
        now = time.monotonic_ns()
        if now >= self._until:
            self._left, self._until = self._read(), now + READ_AGAIN_NS
        return self._left

    def _read(self) -> int | None:
        job, shm = left_of(*nearest_limit(self._probe.read(_core.READ_ROOM))), shm_room()
        known = [room for room in (job, None if shm is None else shm[0]) if room is not None]
        return min(known, default=None)


class InFlight:
    """The bytes of one BoundedLoader that are in flight, over all its iterators.

    Args:
        limit: the most bytes; None for no limit.
        largest: bytes of the largest batch; 0 if it is not known.
        part: what the loader reserves in a Budget; None without one.
        room: returns the bytes that the job may still take; None where it is not known.
    """

    def __init__(
        self,
        limit: int | None,
        largest: int,
        part: Any = None,
        room: Callable[[], int | None] | None = None,
    ) -> None:
        self.limit = limit
        #: the largest batch so far
        self.largest = largest
        #: the most bytes that were in flight so far
        self.peak = 0
        self._allowed: int | None = None  # below the limit, after shrink()
        self._since_growth = 0  # batches
        self._asked = self._noted = (0, 0)  # batches and bytes
        self._part = part
        self._room = Room().left if room is None else room
        self._iterators: list[weakref.ref[Any]] = []

    def join(self, iterator: Any) -> None:
        """Count what `iterator.flying()` returns: how many batches have not arrived, and the bytes
        of those that have."""
        others = [ref for ref in self._iterators if ref() not in (None, iterator)]
        self._iterators = [*others, weakref.ref(iterator)]

    def _flying(self, but: Any = None) -> tuple[int, list[int]]:
        """What all iterators say, or all `but` one."""
        coming, arrived = 0, list[int]()
        for ref in self._iterators:
            iterator = ref()
            if iterator is not None and iterator is not but:
                more, sizes = iterator.flying()
                coming += more
                arrived += sizes
        return coming, arrived

    def held(self) -> tuple[int, int]:
        """How many batches are in flight, and their bytes."""
        coming, arrived = self._flying()
        return coming + len(arrived), coming * self.largest + sum(arrived)

    @property
    def allowed(self) -> int | None:
        """The most bytes that may be in flight now; None for any number."""
        return self.limit if self._allowed is None else self._allowed

    def set_limit(self, limit: int | None) -> None:
        self.limit, self._allowed = limit, None

    def admits(self, iterator: Any) -> bool:
        """Whether `iterator` may ask for one more batch. With a Budget it is reserved then. Call
        `asked()` once a worker was asked."""
        if self._surely_fits(iterator.asked_for()):
            return True
        coming, arrived = iterator.flying()
        is_first = coming == 0 and not arrived  # it would wait for ever, or seem to be at its end
        others, sizes = self._flying(but=iterator)
        coming, arrived = coming + others, arrived + sizes
        held = coming * self.largest + sum(arrived)
        self._asked = coming + len(arrived) + 1, held + self.largest
        if is_first:
            return True
        if self.largest == 0:
            return False  # nothing has come yet, so a batch may be as large as the memory
        allowed = self.allowed
        if allowed is not None and held + self.largest > allowed:
            return False
        left = self._room()
        if left is not None and (coming + 1) * self.largest > left:
            return False  # those that are being made take their memory only now
        return self._reserve(held)

    def _surely_fits(self, batches: int) -> bool:
        """Whether one more than so many batches fits, if all of them are as large as the largest.
        That saves the walk where the limit is far away; in flight is then no more than ever was."""
        most = (batches + 1) * self.largest
        if len(self._iterators) != 1 or self._part is not None:
            return False
        if not 0 < most <= self.peak:
            return False
        allowed, left = self.allowed, self._room()
        if (allowed is not None and most > allowed) or (left is not None and most > left):
            return False
        self._asked = batches + 1, most
        return True

    def asked(self) -> None:
        """A worker was asked for the batch that `admits()` allowed last."""
        self._note(*self._asked)

    def _reserve(self, wanted: int) -> bool:
        """Reserve so many bytes in the Budget, or leave it as it is and return False."""
        if self._part is None:
            return True
        more = wanted - self._part.reserved
        try:
            if more > 0:
                self._part.reserve(more, "bounded()", "pass a smaller in_flight")
        except BudgetError:
            return False
        return True

    def arrived(self, size: int) -> None:
        """A batch of so many bytes has come out of a worker."""
        if size > self.largest:  # then those that have not arrived count more, too
            self.largest = size
            self._note(*self.held())

    def _note(self, batches: int, total: int) -> None:
        """Keep what is in flight, and the most that ever was."""
        self._noted = batches, total
        self.peak = max(self.peak, total)

    def handed(self) -> None:
        """A batch goes to the loop: what it had reserved is free for others."""
        self.release()
        if self._allowed is None:
            return
        self._since_growth += 1
        if self._since_growth >= GROWS_EVERY:
            self._since_growth = 0
            self._allowed += max(1, self.largest)
            if self.limit is not None and self._allowed >= self.limit:
                self._allowed = None

    def release(self) -> None:
        """Reserve no more than what is in flight, less the batch that the loop waits for."""
        if self._part is not None:
            wanted = max(0, self.held()[1] - self.largest)
            self._part.release(max(0, self._part.reserved - wanted))

    def shrink(self) -> None:
        """Allow half of what is in flight, and at least one batch."""
        before = self.held()[1]
        if self.allowed is not None:
            before = min(before, self.allowed)
        self._allowed, self._since_growth = max(1, self.largest, before // 2), 0
        if self.limit is not None:
            self._allowed = min(self._allowed, self.limit)
        running.event("mark", f"bounded loader: at most {format_bytes(self._allowed)} in flight")

    def cause(self) -> str:
        """What was in flight when a worker was last asked for a batch, and how much memory there
        is: a sentence beside the error of a worker that is gone."""
        batches, held = self._noted
        line = f"memtools: {batches:,} batch{'es' * (batches != 1)} in flight"
        line = f"{line}, about {format_bytes(held)}"
        allowed, left, shm = self.allowed, self._room(), shm_room()
        if allowed is not None:
            line = f"{line} of {format_bytes(allowed)} allowed"
        if shm is not None:
            line = f"{line}; {SHM} has {format_bytes(shm[0])} of {format_bytes(shm[1])} free"
        if left is not None:
            line = f"{line}; the job may take {format_bytes(left)} more"
        return f"{line}; if memory ran out, pass a smaller in_flight or use fewer workers"
