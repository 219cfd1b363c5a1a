"""The model of torch's caching allocator: its segments, and what always holds."""

from __future__ import annotations

import random
from typing import Any

import pytest

from memtools._blocks.lifetimes import Life
from memtools._plan.allocator import CachingAllocator, Served, served

KIB, MIB = 1 << 10, 1 << 20


def free_in(allocator: CachingAllocator) -> int:
    return sum(size for pool in allocator._pools.values() for size, _ in pool.keys)


@pytest.mark.parametrize(
    ("requests", "reserved"),
    [
        ([1], 2 * MIB),
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),
        ([10 * MIB + 1], 12 * MIB),
        ([1, 2 * MIB], 22 * MIB),  # two pools
    ],
)
def test_segments_are_those_of_torch(requests: list[int], reserved: int) -> None:
    allocator = CachingAllocator()
    for nbytes in requests:
        assert allocator.allocate(nbytes)
    assert allocator.reserved == allocator.highest == reserved


def test_a_rest_of_1_mib_or_less_is_not_split_off_a_large_block() -> None:
    allocator = CachingAllocator()
    for nbytes, free in ((10 * MIB - 512, 10 * MIB + 512), (9 * MIB + 512, 0)):
        assert allocator.allocate(nbytes)
        assert free_in(allocator) == free


def test_blocks_are_split_and_merged_and_never_overlap() -> None:
    shuffle, allocator = random.Random(0), CachingAllocator()
    held = list[Any]()
    for _ in range(5000):
        if held and shuffle.random() < 0.5:
            allocator.free(held.pop(shuffle.randrange(len(held))))
        else:
            held.append(allocator.allocate(int(2 ** shuffle.uniform(0, 25))))
        assert free_in(allocator) + sum(block.bytes for block in held) == allocator.reserved
    for block in held:
        allocator.free(block)
    assert all(
        block.before is block.after is None
        for pool in allocator._pools.values()
        for block in pool.blocks.values()
    )


def life(number: int, nbytes: int, birth: int, death: int | None) -> Life:
    return Life(number, nbytes, birth, birth, death, "forward", "inputs")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, Served(True, 60 * MIB)),
        (40 * MIB, Served(True, 40 * MIB)),  # The free segment of 20 MiB was given back.
        (39 * MIB, Served(False, 40 * MIB)),
    ],
)
def test_a_limit_makes_it_give_free_segments_back(limit: int | None, expected: Served) -> None:
    lives = [life(0, 20 * MIB, -1, 2), life(1, 40 * MIB, 2, None), life(2, 20 * MIB, 9, None)]
    assert served(lives, 3, limit) == expected


def test_what_dies_before_an_operator_gives_it_room() -> None:
    lives = [life(number, 16 * MIB, number, number + 1) for number in range(8)]
    assert served(lives, 8) == Served(True, 16 * MIB)
    longer = [one._replace(death=one.birth + 2) for one in lives]
    assert served(longer, 8) == Served(True, 32 * MIB)
    assert served([life(0, 100 * KIB, 0, None)], 1) == Served(True, 2 * MIB)
