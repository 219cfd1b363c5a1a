"""Pages: recycled without the system, counted as the system does, never showing what they held."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
import torch

from memtools import KVPool
from tests.kit.growth import least_growth
from tests.kv.model import (
    BLOCK,
    HEADS,
    MAX_TOKENS,
    WIDTH,
    Plain,
    fill,
    same,
    small_pool,
    step,
)


def pool_pss() -> int:
    """Bytes of this process's pool mappings, each page once however often it is mapped."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            counted = "memfd:" in line  # and not memtools/_core.so, which others map as well
        elif counted and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


def test_a_second_generation_takes_no_page_and_has_no_page_fault():
    pool = KVPool(4, 4, 128, max_tokens=1024, max_sequences=4, dtype=torch.float32)
    prompt, token = torch.randn(4, 4, 256, 128), torch.randn(4, 4, 1, 128)

    def generate() -> None:
        with pool.acquire(4, 288) as lease:
            for layer in range(4):
                lease.update(layer, prompt, prompt)
            for _ in range(32):
                for layer in range(4):
                    lease.update(layer, token, token)

    with pool:
        generate()
        generate()
        gc.collect()
        before = pool.stats()
        faults = least_growth(
            lambda n: [generate() for _ in range(n)],
            8,
            lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        )
        after = pool.stats()
        pages = after.physical_bytes // os.sysconf("SC_PAGE_SIZE")
        assert pages > 4000
        assert (after.taken, after.map_calls, after.dropped) == (
            before.taken,
            before.map_calls,
            before.dropped,
        )
        assert after.recycled > before.recycled
        assert after.physical_bytes == before.physical_bytes
        assert faults < pages // 100


LENGTHS = [40, 90, 17, 66, 5, 90, 33, 71]


def answers(pool: KVPool, tokens: int, hint: bool) -> None:
    """One prompt and four answers of eight tokens to it."""
    with pool.acquire(1, tokens if hint else 0) as prompt:
        fill(prompt, tokens)
        with prompt.fork(4, tokens + 8 if hint else None) as samples:
            for _ in range(8):
                fill(samples, 1)


@pytest.mark.parametrize("hint", [False, True])
def test_generations_of_any_length_take_no_more_than_the_largest(hint):
    alone = []
    for tokens in sorted(set(LENGTHS)):
        with small_pool() as pool:
            answers(pool, tokens, hint)
            alone.append(pool.stats().peak_bytes)
    with small_pool() as pool:
        for tokens in LENGTHS:
            answers(pool, tokens, hint)
            assert pool._check()
        stats = pool.stats()
    assert stats.taken * BLOCK == stats.peak_bytes == max(alone)
    assert stats.dropped == 0


def test_what_the_pool_counts_is_what_the_system_counts():
    with small_pool() as pool, pool.acquire(4) as lease:
        gc.collect()  # pools of other tests
        before = pool_pss()
        fill(lease, 100)
        with lease.fork(2) as child:
            fill(child, 0)
            child.layer(0)
            stats = pool.stats()
            assert stats.physical_bytes == stats.live_bytes + stats.idle_bytes == 28 * BLOCK
            assert abs(pool_pss() - before - 28 * BLOCK) <= BLOCK
        assert stats.payload_bytes == 3 * 4 * 100 * BLOCK // 16


def test_physical_bytes_are_payload_and_at_most_a_page_for_each_range():
    with small_pool() as pool, pool.acquire(3) as lease:
        for tokens in (1, 15, 16, 17, 33):
            lease.crop(0)
            pool.trim()
            fill(lease, tokens)
            stats = pool.stats()
            assert stats.physical_bytes <= stats.payload_bytes + 3 * BLOCK
            assert stats.payload_bytes == 3 * tokens * BLOCK // 16


def test_an_acquired_lease_costs_addresses_and_no_memory():
    with KVPool(32, 8, 128, max_tokens=8192, max_sequences=4) as pool, pool.acquire(4) as lease:
        assert pool.stats().address_bytes >= 4 * 32 * 2 * 8 * 8192 * 128 * 2
        assert pool.stats().physical_bytes == 0
        assert lease.lengths == [0] * 4


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("layout", ["head", "token"])
def test_recycled_pages_never_show_what_they_held(layout):
    poison = torch.full((4, HEADS, MAX_TOKENS, WIDTH), torch.nan)
    with small_pool(layout=layout) as pool:
        for counts in ([1, 1, 1, 1], [40, 3, 17, 0], [100, 1, 50, 99]):
            with pool.acquire(4) as lease:
                for layer in range(2):
                    lease.update(layer, poison, poison)
            with pool.acquire(4) as lease:
                model = Plain(4)
                step(lease, model, max(counts), counts)
                for layer in range(2):
                    for whole in lease.layer(layer, tokens=MAX_TOKENS):
                        assert whole.isfinite().all()
                        for row, count in enumerate(counts):
                            assert not whole[row, :, count:].any()
                assert same(lease, model)


def test_larger_pages_are_a_matter_of_taste():
    with small_pool(page_bytes="64 KiB") as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 90, [90, 20])
        child, twin = lease.fork(2), model.fork(2)
        step(child, twin, 5)
        assert same(child, twin)
        assert same(lease, model)
        assert pool.block_tokens == 256


def test_memory_goes_back_to_the_system_with_the_pool(rss):
    block = torch.ones(4, 4, 2048, 128)

    def use_and_close(count: int) -> None:
        for _ in range(count):
            pool = KVPool(2, 4, 128, max_tokens=4096, max_sequences=4, dtype=torch.float32)
            with pool.acquire(4) as lease:
                for layer in range(2):
                    lease.update(layer, block, block)
            assert pool.stats().physical_bytes == 2 * 2 * block.nbytes
            kept = pool.trim()
            assert kept == 2 * 2 * block.nbytes
            pool.close()

    assert least_growth(use_and_close, 4, rss) < 8 << 20
