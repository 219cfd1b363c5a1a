"""A small model of torch's caching allocator: what it reserves for given lives of storages.

    segment of 20 MiB    [ block in use | free        | in use |  free     ]
                          512 B rounded   ▲ best fit: the smallest free block that is enough;
                                            split where the rest is worth it, merged when freed

The sizes are those of c10/core/AllocatorConfig.h. Requests of 1 MiB or less come from segments of
2 MiB, those below 10 MiB from segments of 20 MiB, larger ones have a segment of their own, rounded
up to 2 MiB. Under a limit it gives back segments that are all free, before it fails. One stream,
the default settings; not yet measured on a GPU.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memtools._blocks.lifetimes import Life, Trace

MIB = 1 << 20
ROUND, SMALL, LARGE = 512, MIB, 10 * MIB
SMALL_SEGMENT, LARGE_SEGMENT, ROUND_SEGMENT = 2 * MIB, 20 * MIB, 2 * MIB


class Served(NamedTuple):
    """Whether an allocator served all lives, and the most bytes that it reserved; if it did not,
    what it had reserved with the segment that it could not have."""

    fits: bool
    reserved_bytes: int


@dataclass(eq=False)
class _Block:
    """A part of a segment, with its neighbours there."""

    bytes: int
    is_small: bool
    number: int  # so that blocks of one size are ordered
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = True

    @property
    def key(self) -> tuple[int, int]:
        return self.bytes, self.number


@dataclass
class _Pool:
    """The free blocks of one pool, the smallest first."""

    keys: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        insort(self.keys, block.key)
        self.blocks[block.number] = block

    def remove(self, block: _Block) -> None:
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.number]

    def best(self, nbytes: int) -> _Block | None:
        at = bisect_left(self.keys, (nbytes, -1))
        return self.blocks[self.keys[at][1]] if at < len(self.keys) else None


class CachingAllocator:
    """Serves requests from segments.

    Attributes:
        reserved: bytes, now.
        highest: the most that was reserved.

    Args:
        limit: the bytes that it may reserve; None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.highest = 0
        self._pools = {True: _Pool(), False: _Pool()}
        self._blocks = 0

    def allocate(self, nbytes: int) -> _Block | None:
        """A block for a request, or None if the limit leaves no room for its segment; `highest` is
        then what would have been reserved with it."""
        size = max(ROUND, -(-nbytes // ROUND) * ROUND)
        is_small = size <= SMALL
        pool = self._pools[is_small]
        block = pool.best(size)
        if block is None:
            segment = SMALL_SEGMENT if is_small else LARGE_SEGMENT
            if size >= LARGE:
                segment = -(-size // ROUND_SEGMENT) * ROUND_SEGMENT
            if self.limit is not None and self.reserved + segment > self.limit:
                self._give_back()
            self.highest = max(self.highest, self.reserved + segment)
            if self.limit is not None and self.reserved + segment > self.limit:
                return None
            self.reserved += segment
            block = self._new_block(segment, is_small)
        else:
            pool.remove(block)
        rest = block.bytes - size
        if rest >= ROUND if is_small else rest > SMALL:
            other = self._new_block(rest, is_small)
            other.before, other.after, block.after = block, block.after, other
            if other.after is not None:
                other.after.before = other
            block.bytes = size
            pool.add(other)
        block.is_free = False
        return block

    def free(self, block: _Block) -> None:
        """Free a block, which joins its free neighbours."""
        pool = self._pools[block.is_small]
        before, after = block.before, block.after
        if before is not None and before.is_free:
            pool.remove(before)
            block.bytes += before.bytes
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free:
            pool.remove(after)
            block.bytes += after.bytes
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        block.is_free = True
        pool.add(block)

    def _new_block(self, nbytes: int, is_small: bool) -> _Block:
        self._blocks += 1
        return _Block(nbytes, is_small, self._blocks)

    def _give_back(self) -> None:
        """Give back the segments that are one free block."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.bytes


def served(lives: Sequence[Life], operators: int, limit: int | None = None) -> Served:
    """Replay lives in their order: before each operator what is dead by then is freed, then what it
    makes is allocated.

    Args:
        lives: of a trace.
        operators: how many the trace has.
        limit: the bytes that may be reserved; None, the default: no limit.
    """
    births: list[list[int]] = [[] for _ in range(operators)]
    deaths: list[list[int]] = [[] for _ in range(operators + 1)]
    for number, life in enumerate(lives):  # After a change, two lives may have one id.
        if life.bytes and life.birth < operators:
            births[max(life.birth, 0)].append(number)
            if life.death is not None:
                deaths[min(life.death, operators)].append(number)
    allocator, blocks = CachingAllocator(limit), dict[int, _Block]()
    for position, born in enumerate(births):
        for number in deaths[position]:
            if (block := blocks.pop(number, None)) is not None:
                allocator.free(block)
        for number in born:
            given = allocator.allocate(lives[number].bytes)
            if given is None:
                return Served(False, allocator.highest)
            blocks[number] = given
    return Served(True, allocator.highest)


def reserved(trace: Trace, device: str, limit: int | None = None) -> Served:
    """What the allocator of a device reserves for a trace. That of the CPU reserves what is in use.

    Args:
        trace: the trace.
        device: "cuda" or "cpu".
        limit: the bytes that may be reserved; None, the default: no limit.
    """
    if device == "cpu":
        peak = trace.peak()[1]
        return Served(limit is None or peak <= limit, peak)
    return served(trace.lives, len(trace.ops), limit)
