"""What grows with each round, told from what grows once: a page that is touched for the first time,
another thread's arena, what malloc gave back to the system before and takes again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence

STRETCHES = 4


def python_blocks() -> int:
    """Blocks that Python's allocator has handed out, without what the interpreter keeps for itself:
    up to 4,096 names that attributes were looked up by, of which C code makes a new one each time,
    and up to 2,000 freed tuples of each length, to which every tuple(generator) adds one, as it is
    made for ten entries and shrunk. A full collection empties these lists; nothing that lives, or
    waits for the collector, is in it."""
    sys._clear_type_cache()
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    gc.collect()
    if not was_frozen:
        gc.unfreeze()
    return sys.getallocatedblocks()


def least_growth(run: Callable[[int], object], rounds: int, read: Callable[[], int]) -> int:
    """The least that a reading grew by in a quarter of the rounds, times four: a leak grows in
    every quarter, and what happens once is in one of them."""
    return least_growths(run, rounds, [read])[0]


def least_growths(
    run: Callable[[int], object], rounds: int, readings: Sequence[Callable[[], int]]
) -> list[int]:
    """The same of several readings over the same rounds."""
    grown = []
    for _ in range(STRETCHES):
        before = [read() for read in readings]
        run(rounds // STRETCHES)
        grown.append([read() - was for read, was in zip(readings, before, strict=True)])
    return [STRETCHES * min(of_one) for of_one in zip(*grown, strict=True)]
