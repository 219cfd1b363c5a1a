"""Arrays that are written for the first time, such as the rows of a replay buffer.

    look      16       24       32       48
    mapping   rises ─► rises    ...                 /proc/self/smaps: something is written
                         └─► which arrays has it?   all objects, once
    array              1.6 MiB  2.0 MiB  2.8 MiB    mincore: it fills by 51 KiB a step, of 586 MiB

What an array has in memory is exact, whatever else the process takes and frees meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from memtools._base.pages import mappings, resident_bytes
from memtools._census.arrays import extents
from memtools._leak.judge import THRESHOLDS, Block

LEAST = 1 << 20  # What has fewer bytes left to be written does not matter.
LEAST_RISE = 1 << 16  # Something is written where so many bytes more are resident.
NEEDED, MOST = 3, 8  # looks that show it at the earliest, and those that are remembered
MOST_OF_MAPPING = 0.9  # An array that has this share of a mapping is written as the mapping was.
LATE = 2  # Large pages come one by one: the next may take so many times as long as the others.

_Points = list[tuple[int, int]]


class FirstWrites:
    """Finds arrays and tensors of which more and more is resident."""

    def __init__(self) -> None:
        #: (step, resident bytes) of the mappings that are not all written, at the newest looks
        self._mappings: dict[tuple[int, int], _Points] = {}
        #: the same of arrays, by their address and size
        self._arrays: dict[tuple[int, int], _Points] = {}
        self._shared: set[tuple[int, int]] = set()  # those arrays that lie in shared memory

    @property
    def are_known(self) -> bool:
        """Whether there are arrays that are not all written yet."""
        return bool(self._arrays)

    def may_be_new(self, step: int, found: Sequence[Block]) -> bool:
        """Whether a mapping is written for the first time without one of these blocks, so that it
        has an array that is not known yet. To be called once at each look."""
        is_new, gone = False, set(self._mappings)
        for one in mappings():
            if one.size - one.resident < LEAST:
                continue
            key = one.begin, one.size
            gone.discard(key)
            points = self._mappings.setdefault(key, [])
            _add(points, step, one.resident)
            is_known = any(_is_in(block.begin, block.size, *key) for block in found)
            if len(points) > 1 and not is_known:
                is_new |= points[-1][1] - points[-2][1] >= LEAST_RISE
        for key in gone:
            del self._mappings[key]
        return is_new

    def find(self, step: int) -> None:
        """Look for arrays that are there by now, after a look at this step. Takes some 0.3 us for
        each object of the process."""
        partly = [one for one in mappings() if one.size - one.resident >= LEAST]
        for array in extents(LEAST):
            inside = [one for one in partly if _is_in(*array, one.begin, one.size)]
            resident = resident_bytes(*array) if inside else None
            if resident is None or array[1] - resident < LEAST or array in self._arrays:
                continue
            whole = inside[0]
            history = self._mappings.get((whole.begin, whole.size), [])
            is_most = array[1] >= MOST_OF_MAPPING * whole.size
            self._arrays[array] = list(history) if is_most else [(step, resident)]
            if whole.is_shared:
                self._shared.add(array)

    def part_of(self, block: Block) -> Block:
        """The largest array in a block that is known not to be all written; the block itself if
        there is none."""
        within = [
            Block(size, points[-1][1], begin)
            for (begin, size), points in self._arrays.items()
            if _is_in(begin, size, block.begin, block.size)
        ]
        return max(within, key=lambda one: one.unwritten, default=block)

    def look(self, step: int) -> list[Block]:
        """What fills, as of this step."""
        found = []
        for (begin, size), points in list(self._arrays.items()):
            resident = resident_bytes(begin, size)
            if resident is None or resident >= size:
                del self._arrays[begin, size]  # It is gone, or full.
                self._shared.discard((begin, size))
                continue
            _add(points, step, resident)
            rises = [until for (_, a), (until, b) in pairwise(points) if b > a]
            if len(points) < NEEDED or len(rises) < NEEDED - 1:
                continue
            (first, some), (last, more) = points[0], points[-1]
            rate = (more - some) / (last - first)
            is_over = last - rises[-1] > LATE * (rises[-1] - first) / len(rises)
            if rate >= THRESHOLDS.least_rate and not is_over:
                signal = "shm" if (begin, size) in self._shared else "resident"
                found.append(Block(size, resident, begin, None, signal, rate, first))
        return found


def _add(points: _Points, step: int, resident: int) -> None:
    if points and points[-1][1] > resident + LEAST_RISE:
        points.clear()  # It was freed, and another one has its place.
    points[: 1 - MOST] = []
    points.append((step, max(resident, points[-1][1] if points else 0)))


def _is_in(begin: int, size: int, other: int, other_size: int) -> bool:
    """Whether one range lies in another: its middle does, as its first page may be a mapping of its
    own."""
    return other <= begin + size // 2 < other + other_size
