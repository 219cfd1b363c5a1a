"""KVPool and KVLease by the plain ways: update, lengths, layers, dtypes, what it says of itself."""

from __future__ import annotations

import pytest
import torch

import memtools
from memtools import KVLease, KVPool
from memtools._kv import tensors
from tests.kv.model import (
    BLOCK,
    HEADS,
    LAYERS,
    MAX_TOKENS,
    WIDTH,
    Plain,
    same,
    small_pool,
    some,
    step,
)

pytestmark = pytest.mark.usefixtures("either_way")


def test_updates_show_what_torch_cat_would():
    with small_pool() as pool, pool.acquire(3) as lease:
        model = Plain(3)
        for tokens in (7, 1, 1, 20, 1, 0, 33):
            step(lease, model, tokens)
        assert same(lease, model)
        assert lease.lengths == [63, 63, 63]
        assert (lease.num_tokens, lease.batch_size, lease.seq_length(1)) == (63, 3, 63)
        assert pool._check()


def test_rows_of_different_lengths_read_zeros_behind_their_end():
    with small_pool() as pool, pool.acquire(3) as lease:
        model = Plain(3)
        step(lease, model, 20, [20, 3, 0])
        step(lease, model, 1)
        step(lease, model, 5, [0, 5, 1])
        assert lease.lengths == [21, 9, 2]
        assert same(lease, model)
        k, _ = lease.layer(0)
        assert k.shape == (3, HEADS, 21, WIDTH)
        assert not k[1, :, 9:].any()


@pytest.mark.parametrize("counts", [2, [2, 2], (2, 2), torch.tensor([2, 2]), torch.tensor(2)])
def test_counts_may_be_one_number_a_sequence_or_a_tensor(counts):
    with small_pool() as pool, pool.acquire(2) as lease:
        k = some(2, 4)
        got, _ = lease.update(0, k, k, counts)
        assert torch.equal(got, k[:, :, :2])
        assert lease.update(layer=1, k=k, v=k, counts=counts)[0].shape[2] == 2
        assert lease.lengths == [2, 2]


def test_an_update_copies_nothing_of_the_past_and_moves_nothing():
    with small_pool() as pool, pool.acquire(2) as lease:
        first, _ = lease.update(0, some(2, 30), some(2, 30))
        kept = first.clone()
        then, _ = lease.update(0, some(2, 50), some(2, 50))
        assert then.data_ptr() == first.data_ptr()
        assert then.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        assert torch.equal(first, kept)
        assert torch.equal(then[:, :, :30], kept)


def test_k_and_v_may_lie_in_memory_in_any_way():
    with small_pool() as pool, pool.acquire(2) as lease:
        wide = torch.randn(2, 5, HEADS, WIDTH)
        ways = [
            wide.transpose(1, 2),  # as projections give them: [B, T, H, D]
            torch.randn(2, 2 * HEADS, 5, WIDTH)[:, ::2],
            torch.randn(2, HEADS, 5, 2 * WIDTH)[..., ::2],  # gaps in the last dimension
            torch.randn(1, 1, 5, WIDTH).expand(2, HEADS, 5, WIDTH),
            torch.randn(2, HEADS, WIDTH, 5).transpose(2, 3),
            torch.randn(2, HEADS, 5, WIDTH, dtype=torch.complex64).conj().imag,  # lazily negated
            torch._neg_view(some(2, 5)),  # the same, packed
            torch.nn.Parameter(torch.randn(2, HEADS, 5, WIDTH), requires_grad=False),
            some(2, 5).as_subclass(type("Tokens", (torch.Tensor,), {})),
        ]
        for number, k in enumerate(ways):
            got, gotten = lease.update(0, k, some(2, 5))
            assert torch.equal(got[:, :, 5 * number :], k.clone().as_subclass(torch.Tensor))
            assert type(got) is type(gotten) is torch.Tensor


@pytest.mark.parametrize("name", sorted(tensors._DTYPES))
def test_every_dtype_of_one_two_four_or_eight_bytes_comes_back_bit_for_bit(name):
    dtype = getattr(torch, name)
    with small_pool(dtype=name) as pool, pool.acquire(2) as lease:
        assert pool.dtype is dtype
        k, v = (some(2, 40).mul(9).to(dtype) for _ in range(2))
        lease.update(0, k[:, :, :1], v[:, :, :1])
        got, gotten = lease.update(0, k[:, :, 1:], v[:, :, 1:])
        assert got.dtype is dtype
        assert torch.equal(got.view(torch.uint8), k.view(torch.uint8))
        assert torch.equal(gotten.view(torch.uint8), v.view(torch.uint8))


@pytest.mark.parametrize("layout", ["head", "token"])
@pytest.mark.parametrize("group", [1, 2])
def test_layouts_differ_in_memory_and_in_nothing_else(layout, group):
    if layout == "head" and group == 2:
        with pytest.raises(ValueError, match='goes with layout="token"'):
            small_pool(layout=layout, layer_group=group)
        return
    with small_pool(layout=layout, layer_group=group) as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 21, [21, 4])
        step(lease, model, 1)
        child, twin = lease.fork(2), model.fork(2)
        step(child, twin, 3)
        assert same(lease, model)
        assert same(child, twin)
        assert (pool.layout, pool.layer_group) == (layout, group)


def test_layers_may_be_filled_one_after_the_other():
    with small_pool() as pool, pool.acquire(1) as lease:
        k = some(1, 40)
        lease.update(1, k, k)
        assert (lease.seq_length(0), lease.seq_length(1), lease.lengths) == (0, 40, [40])
        assert lease.layer(0)[0].shape[2] == 0
        assert torch.equal(lease.layer(1)[1], k)


def test_layer_gives_views_in_both_orders_and_of_any_length():
    with small_pool() as pool, pool.acquire(2) as lease:
        k, v = some(2, 20), some(2, 20)
        lease.update(0, k, v)
        got, gotten = lease.layer(0, layout="BTHD")
        assert torch.equal(got, k.transpose(1, 2))
        assert torch.equal(gotten, v.transpose(1, 2))
        assert torch.equal(lease.layer(0, tokens=5)[0], k[:, :, :5])
        longer, _ = lease.layer(0, tokens=MAX_TOKENS)
        assert torch.equal(longer[:, :, :20], k)
        assert not longer[:, :, 20:].any()
        assert pool.stats().physical_bytes <= 4 * BLOCK


def test_attention_takes_the_views_as_they_are():
    with small_pool() as pool, pool.acquire(2) as lease:
        k, v, q = some(2, 50), some(2, 50), some(2, 1)
        views = lease.update(0, k, v)
        attend = torch.nn.functional.scaled_dot_product_attention
        torch.testing.assert_close(attend(q, *views), attend(q, k, v))


def test_a_pool_is_described_by_its_attributes_also_when_closed():
    pool = small_pool(name="draft", limit=1 << 20)
    assert (pool.num_layers, pool.num_kv_heads, pool.head_dim) == (LAYERS, HEADS, WIDTH)
    assert (pool.max_tokens, pool.max_sequences, pool.name) == (MAX_TOKENS, 8, "draft")
    assert (pool.dtype, pool.device) == (torch.float32, torch.device("cpu"))
    assert (pool.block_tokens, pool.block_bytes) == (16, BLOCK)
    assert (pool.budget, pool.closed, pool.layout) == (None, False, "head")
    assert repr(pool).startswith("draft(2 layers x 2 heads x 64, float32, cpu: 0 B live")
    pool.close()
    assert (pool.name, pool.closed) == ("draft", True)
    assert repr(pool) == "draft(2 layers x 2 heads x 64, float32, cpu, closed)"


def test_a_lease_says_what_it_is():
    with small_pool() as pool:
        with pool.acquire(2) as lease:
            assert isinstance(lease, KVLease)
            assert (lease.pool, lease.name, lease.released) == (pool, "lease 1", False)
            assert repr(lease) == "KVLease(lease 1, 2 rows x 0 tokens)"
            assert repr(lease.fork(2)) == "KVLease(lease 2, 4 rows x 0 tokens)"
        assert repr(lease) == "KVLease(lease 1, released)"
        assert (lease.pool, lease.name, lease.released) == (pool, "lease 1", True)


def test_leases_come_from_pools_alone():
    with pytest.raises(TypeError, match="KVLease"):
        KVLease()


def test_names_are_exported():
    assert memtools.KVPool is KVPool
    assert {"KVPool", "KVLease", "KVStats"} <= set(memtools.__all__)
