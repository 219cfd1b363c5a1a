"""integrations.nanochat.KVCache in the older style: insert_kv, kv_cache and pos."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memtools
from memtools.integrations.nanochat import KVCache
from tests.kv.poolback import everything_is_back

L, H, D = 3, 2, 16
SIZES = {"num_heads": H, "head_dim": D, "num_layers": L}


@pytest.fixture
def pool() -> Iterator[memtools.KVPool]:
    """A pool of these sizes; everything is back at the end."""
    with memtools.KVPool(L, H, D, max_tokens=4096, max_sequences=8, dtype=torch.float32) as pool:
        yield pool
        assert everything_is_back(pool)


def older(batch_size: int, seq_len: int, pool: memtools.KVPool | None = None) -> KVCache:
    return KVCache(batch_size, seq_len=seq_len, **SIZES, pool=pool)


def insert(c: KVCache, tokens: int, seed: int, layers: range = range(L)) -> list[torch.Tensor]:
    """One forward; K and V of each layer up to now."""
    draw = torch.Generator().manual_seed(seed)
    out: list[torch.Tensor] = []
    for layer in layers:
        k, v = torch.randn(2, c.batch_size, H, tokens, D, generator=draw)
        out += [x.clone() for x in c.insert_kv(layer, k, v)]
    return out


def test_insert_kv_returns_all_up_to_now() -> None:
    c, so_far = older(2, 64), [torch.zeros(2, H, 0, D)] * (2 * L)
    assert (c.kv_shape, c.kv_cache, c.pos) == ((L, 2, 2, H, 64, D), None, 0)
    for step, tokens in enumerate([10, 1, 1, 7]):
        draw = torch.Generator().manual_seed(step)
        new = [x for _ in range(L) for x in torch.randn(2, 2, H, tokens, D, generator=draw)]
        so_far = [torch.cat(pair, 2) for pair in zip(so_far, new, strict=True)]
        got = insert(c, tokens, step)
        assert all(map(torch.equal, got, so_far))
        assert c.pos == c.get_pos() == so_far[0].shape[2]
    assert c.kv_cache is not None
    assert c.kv_cache.shape == c.kv_shape
    expected = torch.stack(so_far).view(L, 2, 2, H, 19, D)
    assert torch.equal(c.kv_cache[:, :, :, :, :19], expected)
    assert not c.kv_cache[:, :, :, :, 19:].any()
    c.kv_cache[1, 1, 0, 0, 3, 2] = 7
    assert c.v_cache[1, 0, 3, 0, 2] == 7


@pytest.mark.parametrize("given", [False, True])
def test_insert_kv_grows_past_seq_len_as_nanochat_does(pool: memtools.KVPool, given: bool) -> None:
    c = older(2, 4, pool if given else None)
    first = [x for _ in range(4) for x in [insert(c, 1, 3)]][-1]
    assert c.kv_cache is not None
    assert c.kv_cache.shape[4] == 4
    more = insert(c, 1, 5)
    assert c.pos == 5
    assert c.kv_cache.shape[4] == c.kv_shape[4] == c.k_cache.shape[2] == c.max_seq_len == 2048
    assert all(torch.equal(new[:, :, :4], old) for new, old in zip(more, first, strict=True))
    assert torch.equal(c.kv_cache[0, 0, :, :, :4], first[0])


def test_growth_ends_with_the_pool_or_moves_to_a_larger_one(pool: memtools.KVPool) -> None:
    c = older(1, 100, pool)
    old = insert(c, 4090, 1)
    assert c.max_seq_len == pool.max_tokens == 4096
    with pytest.raises(IndexError):
        insert(c, 7, 2)
    assert (c.pos, insert(c, 6, 2)[0].shape[2]) == (4090, 4096)
    c = older(1, 100)
    insert(c, 4090, 1)
    before = c._rows().pool
    new = insert(c, 5000, 2)
    assert c._rows().pool.max_tokens > before.max_tokens
    assert (c.pos, c.max_seq_len) == (9090, 10240)
    assert all(torch.equal(a[:, :, :4090], b) for a, b in zip(new, old, strict=True))
    assert before.stats().leases == 0
    c.reset()
    assert insert(c, 9090, 3)[0].shape[2] == 9090


def test_the_older_style_prefills_too(pool: memtools.KVPool) -> None:
    prompt, rows = older(1, 64, pool), older(3, 80, pool)
    with pytest.raises(AssertionError, match="Cannot prefill with a None KV cache"):
        older(3, 80).prefill(older(1, 64))
    held = insert(prompt, 50, 1)
    rows.prefill(prompt)
    assert (rows.pos, pool.stats().forked) == (50, 1)
    new = insert(rows, 2, 2)
    pairs = zip(new, held, strict=True)
    assert all(torch.equal(a[:, :, :50], b.expand(3, -1, -1, -1)) for a, b in pairs)
    with pytest.raises(AssertionError, match="non-empty"):
        rows.prefill(prompt)
    bare = older(2, 64)
    insert(bare, 3, 4, range(1))  # and no further
    bare.prefill(prompt)  # copied
    assert torch.equal(insert(bare, 1, 3)[0][:, :, :50], held[0].expand(2, -1, -1, -1))


def test_a_forward_that_failed_half_way_may_be_run_again(pool: memtools.KVPool) -> None:
    c, good = older(2, 64, pool), older(2, 64, pool)
    for x in (c, good):
        insert(x, 10, 1)
    insert(c, 4, 2, range(2))  # layer 2 never came
    assert c.pos == 10
    child = older(2, 64, pool)
    child.prefill(c)
    for tokens in (6, 3, 4):
        insert(c, tokens, 7, range(1))
    got, expected = insert(c, 4, 3), insert(good, 4, 3)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(insert(child, 4, 3)[3], expected[3])


def test_pos_may_be_set(pool: memtools.KVPool) -> None:
    c = older(2, 64, pool)
    held, child = insert(c, 10, 1), older(2, 64, pool)
    child.prefill(c)
    c.pos = 6
    new = insert(c, 2, 2)
    assert torch.equal(insert(child, 1, 3)[5][:, :, :10], held[5])
    assert (c.pos, new[0].shape[2]) == (8, 8)
    assert torch.equal(new[5][:, :, :6], held[5][:, :, :6])
    del child
    c.reset()
    assert (c.pos, pool.stats().live_bytes) == (0, 0)
    c.pos = 3
    assert not insert(c, 1, 1)[0][:, :, :3].any()


def test_insert_kv_casts_and_repeats_as_assignment_does() -> None:
    c = KVCache(3, seq_len=8, **SIZES, device="cpu", dtype=torch.bfloat16)
    x = torch.randn(1, H, 2, D)
    k, _ = c.insert_kv(0, x, x)
    assert torch.equal(k, x.bfloat16().expand(3, -1, -1, -1))


def test_the_limit_of_the_pool_is_kept() -> None:
    with memtools.KVPool(
        L, H, D, max_tokens=4096, max_sequences=8, dtype=torch.float32, limit="200 KiB"
    ) as pool:
        c = older(1, 4096, pool)
        with pytest.raises(memtools.BudgetError):
            insert(c, 4096, 1)
        insert(c, 32, 1)
        assert c.pos == 32
        del c


def test_without_the_shim_it_is_the_same(without_shim: Any) -> None:
    with without_shim():
        test_insert_kv_returns_all_up_to_now()
