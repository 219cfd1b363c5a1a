"""What can be done to the rows of a PooledCache: crop, rewind, reorder, select, repeat, fork."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import memtools
from memtools.integrations.transformers import PooledCache, pool_for
from tests.integrations.tinyhf import CACHE, prompt, tiny
from tests.kv.poolback import everything_is_back


@pytest.fixture
def pool() -> Iterator[memtools.KVPool]:
    """A pool for the tiny Llama; every row is back at the end."""
    with pool_for(tiny("llama"), max_tokens=128, max_sequences=16) as pool:
        yield pool
        assert everything_is_back(pool)


@pytest.fixture
def filled(pool: memtools.KVPool) -> Iterator[tuple[PooledCache, list[tuple[Any, Any]]]]:
    """A cache of 3 rows with 10 tokens, and copies of its K and V by layer."""
    with PooledCache(pool) as cache:
        with torch.no_grad():
            tiny("llama")(prompt(10, rows=3), **{CACHE: cache})
        yield cache, [(x.keys.clone(), x.values.clone()) for x in cache.layers]


Filled = tuple[PooledCache, list[tuple[torch.Tensor, torch.Tensor]]]


def holds(cache: PooledCache, copies: list[Any], change: Callable[[Any], Any]) -> bool:
    """Whether every layer of the cache holds `change` of what it held."""
    return all(
        torch.equal(x.keys, change(k)) and torch.equal(x.values, change(v))
        for x, (k, v) in zip(cache.layers, copies, strict=True)
    )


@pytest.mark.parametrize(
    ("crop", "left"), [(0, 10), (-3, 7), (-10, 0), (-11, 0), (4, 4), (10, 10), (12, 10)]
)
def test_crop(filled: Filled, crop: int, left: int) -> None:
    cache, copies = filled
    cache.crop(crop)
    assert cache.get_seq_length() == cache.get_seq_length(1) == left
    assert holds(cache, copies, lambda x: x[:, :, :left])


def test_rewind_goes_back_and_no_further(filled: Filled) -> None:
    cache, copies = filled
    for wrong in (11, -1):
        with pytest.raises(IndexError, match="cannot rewind a cache of 10 tokens"):
            cache.rewind(wrong)
    cache.rewind(6)
    assert holds(cache, copies, lambda x: x[:, :, :6])
    cache.rewind(0)
    assert cache.get_seq_length() == 0


def test_reorder(filled: Filled) -> None:
    cache, copies = filled
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    assert holds(cache, copies, lambda x: x[[2, 0, 2]])
    with pytest.raises(IndexError):
        cache.reorder_cache(torch.tensor([0, 1, 3]))


def test_batch_repeat_interleave_and_select(filled: Filled) -> None:
    cache, copies = filled
    cache.batch_repeat_interleave(2)
    assert holds(cache, copies, lambda x: x.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([True, False, False, True, False, True]))
    assert holds(cache, copies, lambda x: x)
    cache.batch_select_indices(torch.tensor([-1, 1]))
    assert holds(cache, copies, lambda x: x[[2, 1]])
    cache.batch_select_indices([0] * 9)  # more rows than there ever were
    assert holds(cache, copies, lambda x: x[[2] * 9])
    assert cache.pool.stats().leases == 1


@pytest.mark.parametrize(
    "indices",
    [
        (0, 2),
        [2, 0],
        (1,),
        [True, False, True],
        slice(0, 2),
        torch.tensor([1, 1]),
        np.array([2]),
        [0, 1, 2, 1, 0],
    ],  # more rows than there were
    ids=str,
)
def test_batch_select_indices_takes_what_dynamic_cache_takes(filled: Filled, indices: Any) -> None:
    cache, copies = filled
    twin = DynamicCache()
    for layer, (k, v) in enumerate(copies):
        twin.update(k.clone(), v.clone(), layer)
    cache.batch_select_indices(indices)
    twin.batch_select_indices(indices)
    for ours, theirs in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)


def test_fork_and_deepcopy_share_the_prompt_and_go_their_own_way(filled: Filled) -> None:
    cache, copies = filled
    before = cache.pool.stats().payload_bytes
    with cache.fork(2) as fork, copy.deepcopy(cache) as twin:
        assert (fork.batch_size, twin.batch_size) == (6, 3)
        with torch.no_grad():
            tiny("llama")(prompt(1, rows=6, seed=9), **{CACHE: fork})
        assert holds(twin, copies, lambda x: x)
        assert holds(cache, copies, lambda x: x)
        assert torch.equal(fork.layers[1].keys[:, :, :10], copies[1][0].repeat_interleave(2, 0))
        assert cache.pool.stats().payload_bytes > before
    assert holds(cache, copies, lambda x: x)
    with pytest.raises(ValueError, match="no rows to fork"):
        PooledCache(cache.pool).fork()
    assert copy.deepcopy(PooledCache(cache.pool)).batch_size == -1


def test_one_layer_cannot_be_changed_alone(filled: Filled) -> None:
    cache, _ = filled
    for name in ("reset", "crop", "reorder_cache", "batch_select_indices", "offload", "prefetch"):
        with pytest.raises(NotImplementedError, match="of the cache itself"):
            getattr(cache.layers[0], name)()


def test_a_cache_over_a_lease_owns_it(pool: memtools.KVPool) -> None:
    lease = pool.acquire(2)
    cache = PooledCache.from_lease(lease)
    assert (cache.lease, cache.pool, cache.batch_size) == (lease, pool, 2)
    cache.batch_repeat_interleave(3)
    assert lease.released
    assert (cache.batch_size, repr(cache)) == (6, "PooledCache(6 rows of 0 tokens)")
    cache.release()
    assert (cache.lease, repr(cache)) == (None, "PooledCache(no rows)")
