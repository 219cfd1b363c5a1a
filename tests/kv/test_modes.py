"""torch's modes: inference_mode, no_grad, autocast, compile; and code that writes for itself."""

from __future__ import annotations

import copy

import pytest
import torch

from memtools import BudgetError, KVLease
from tests.kv.model import BLOCK, HEADS, MAX_TOKENS, WIDTH, fill, small_pool, some

pytestmark = pytest.mark.usefixtures("either_way")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_views_made_under_inference_mode_are_normal_tensors():
    with small_pool() as pool:
        with torch.inference_mode():
            lease = pool.acquire(2)
            k, v = lease.update(0, some(2, 5), some(2, 5))
            more = [*lease.layer(0), *lease.buffers()]
        for view in (k, v, *more):
            assert not view.is_inference()
            assert not view.requires_grad
        k[:, :, 0].add_(1)  # an inference tensor would refuse this here
        q = some(2, 1).requires_grad_()
        attend(q, k, v).sum().backward()
        assert q.grad is not None
        with torch.inference_mode():
            assert attend(q, *lease.update(0, some(2, 1), some(2, 1))).shape == (2, HEADS, 1, WIDTH)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tensors_that_require_grad_are_taken_where_no_graph_is_kept(mode):
    with small_pool() as pool, pool.acquire(1) as lease:
        leaf = torch.nn.Parameter(some(1, 3))
        made = leaf * 2
        for k in (leaf, made):
            with pytest.raises(ValueError, match="keeps no graph"):
                lease.update(0, k, k.detach())
            with pytest.raises(ValueError, match="keeps no graph"):
                lease.update(0, k.detach(), k)
        with mode():
            got, _ = lease.update(0, leaf, made)
        assert torch.equal(got, leaf.detach())


def test_views_and_writes_pass_autocast_and_dispatch_modes_by():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Nothing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with small_pool() as pool, pool.acquire(1) as lease:
        k = some(1, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16), Nothing():
            got, _ = lease.update(0, k, k)
        assert torch.equal(got, k)


def test_inside_vmap_update_is_refused():
    with small_pool() as pool, pool.acquire(1) as lease:

        def body(k: torch.Tensor) -> torch.Tensor:
            return lease.update(0, k, k)[0]

        with pytest.raises(TypeError, match="functorch transform"):
            torch.vmap(body)(torch.randn(3, 1, HEADS, 1, WIDTH))
        assert lease.num_tokens == 0


@pytest.mark.slow
def test_compile_breaks_the_graph_and_goes_on():
    with small_pool() as pool, pool.acquire(1) as lease:

        def forward(lease: KVLease, x: torch.Tensor) -> torch.Tensor:
            k, v = lease.update(0, x * 2, x + 1)
            return attend(x, k, v) * 3

        compiled = torch.compile(forward, backend="eager")
        wanted: list[torch.Tensor] = []
        xs = [some(1, 1) for _ in range(3)]
        with torch.no_grad():
            for n, x in enumerate(xs):
                seen = torch.cat(xs[: n + 1], 2)
                wanted.append(attend(x, seen * 2, seen + 1) * 3)
                torch.testing.assert_close(compiled(lease, x), wanted[-1])
        assert lease.num_tokens == 3


def test_a_copy_of_a_view_owns_its_bytes():
    with small_pool() as pool, pool.acquire(2) as lease:
        k, _ = lease.update(0, some(2, 20), some(2, 20))
        copied = k.clone()
        assert copied.untyped_storage().nbytes() == copied.nbytes
        assert torch.equal(copy.copy(k), copied)
        lease.crop(0)
        fill(lease, 30)
        assert not torch.equal(lease.layer(0)[0][:, :, :20], copied)


def test_writing_into_a_view_is_writing_into_the_cache():
    with small_pool() as pool, pool.acquire(1) as lease:
        k, _ = lease.update(0, some(1, 20), some(1, 20))
        k[:, :, 3] = 7.0
        assert lease.layer(0)[0][:, :, 3].eq(7.0).all()
        assert lease.update(0, some(1, 1), some(1, 1))[0][:, :, 3].eq(7.0).all()


# --- buffers, reserve and advance: code that writes for itself ----------------------------------


@pytest.mark.parametrize("layout", ["head", "token"])
def test_code_that_writes_into_the_buffers_itself_is_served(layout):
    with small_pool(layout=layout) as pool, pool.acquire(2) as lease:
        k, v = lease.buffers()
        assert k.shape == v.shape == (2, 2, HEADS, MAX_TOKENS, WIDTH)
        wanted = torch.randn_like(k)
        for at in range(0, 60, 20):
            k[:, :, :, at : at + 20] = wanted[:, :, :, at : at + 20]
            v[:, :, :, at : at + 20] = -wanted[:, :, :, at : at + 20]
            lease.advance(20)
        assert lease.lengths == [60, 60]
        for layer in range(2):
            got, gotten = lease.layer(layer)
            assert torch.equal(got, wanted[layer][:, :, :60])
            assert torch.equal(gotten, -got)
        assert pool.stats().live_bytes == 2 * -(-60 // pool.block_tokens) * pool.block_bytes
        assert pool._check()


def test_updates_and_writes_by_hand_may_alternate():
    with small_pool() as pool, pool.acquire(2) as lease:
        k, v = lease.buffers()
        first = some(2, 20)
        lease.update(0, first, first)
        lease.update(1, first, first)
        for row, tokens in enumerate((5, 3)):
            k[:, row, :, 20 : 20 + tokens] = 2.0
            v[:, row, :, 20 : 20 + tokens] = 3.0
        lease.advance([5, 3])
        lease.update(0, some(2, 4), some(2, 4))
        assert lease.lengths == [29, 27]
        got, gotten = lease.layer(1)
        assert got.shape[2] == 25
        assert torch.equal(got[:, :, :20], first)
        assert got[0, :, 20:25].eq(2.0).all()
        assert gotten[1, :, 20:23].eq(3.0).all()
        assert not got[1, :, 23:].any()


def test_reserve_makes_room_ahead_of_advance():
    with small_pool(limit="256 KiB") as pool, pool.acquire(1) as lease:
        fill(lease, 10)
        lease.reserve(40)
        assert lease.lengths == [10]
        assert pool.stats().live_bytes == 3 * pool.block_bytes
        k, _ = lease.layer(1, tokens=40)
        k[:, :, 10:40] = 5.0
        lease.advance(30)
        assert lease.lengths == [40]
        assert lease.layer(1)[0][:, :, 10:].eq(5.0).all()
        assert not lease.layer(0)[0][:, :, 10:].any()


def test_advance_without_a_write_means_zeros_and_takes_no_page():
    with small_pool() as pool:
        with pool.acquire(2) as lease:
            for layer in range(2):
                lease.update(layer, some(2, 60) / 0, some(2, 60) / 0)  # inf stays in the pages
        with pool.acquire(2) as lease:
            lease.advance([50, 20])
            assert pool.stats().live_bytes == 0
            k, v = lease.layer(1)
            assert k.shape[2] == 50
            assert not k.any()
            assert not v.any()
            lease.update(1, some(2, 1), some(2, 1))
            k, v = lease.layer(1)
            assert not k[0, :, :50].any()
            assert not v[1, :, :20].any()
            assert not v[1, :, 21:].any()
            assert pool._check()


def test_reserve_on_shared_pages_copies_them_first():
    with small_pool() as pool, pool.acquire(1) as lease:
        fill(lease, 20)
        before = lease.layer(0)[0].clone()
        with lease.fork(2) as child:
            child.reserve(30)
            child.layer(0)[0][:] = 9.0
            assert torch.equal(lease.layer(0)[0], before)
            assert child.layer(0)[0].eq(9.0).all()


#: ways to share tokens: each makes the lease that is written to, and what else shows them
SHARED = {
    "parent of a fork": lambda lease: (lease, [lease.fork(2)]),
    "a fork": lambda lease: (lease.fork(2), [lease]),
    "one of two forks": lambda lease: (lease.fork(1), [lease, lease.fork(1)]),
    "rows after reorder": lambda lease: (lease.reorder([0, 0]), (lease, []))[1],
    "rows after select": lambda lease: (lease.select([1, 1]), (lease, []))[1],
}


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("layout", ["head", "token"])
@pytest.mark.parametrize("way", SHARED)
def test_private_tokens_are_written_to_without_another_row_that_shows_it(way, layout, tokens):
    with small_pool(layout=layout) as pool, pool.acquire(2) as lease:
        fill(lease, tokens)
        written, others = SHARED[way](lease)
        before = [other.layer(0)[0].clone() for other in others]
        wanted = written.layer(0)[0].clone()
        written.reserve(0, private=True)
        for row in range(written.batch_size):
            for token in (0, tokens - 1):
                written.layer(0)[0][row, :, token] = wanted[row, :, token] = row + 5.0
                assert torch.equal(written.layer(0)[0], wanted)
        assert all(torch.equal(o.layer(0)[0], b) for o, b in zip(others, before, strict=True))
        for other in others:
            other.release()
        assert torch.equal(written.layer(0)[0], wanted)
        assert pool._check()


def test_reserve_leaves_a_shared_prompt_shared_until_it_is_asked_for():
    with small_pool(limit=6 * BLOCK) as pool, pool.acquire(1) as lease:
        fill(lease, 48)
        with lease.fork(2) as child:
            child.reserve(49)
            assert pool.stats().shared_bytes == 3 * BLOCK
            before = pool.stats()
            with pytest.raises(BudgetError):
                child.reserve(0, private=True)
            assert pool.stats() == before


def test_what_was_written_and_never_announced_is_gone_with_the_lease():
    with small_pool() as pool:
        with pool.acquire(1) as lease:
            k, _ = lease.buffers()
            k[:, :, :, 50:] = torch.nan
            assert pool.stats().physical_bytes > 0
            del k
        with pool.acquire(1) as lease:
            fill(lease, 1)
            assert not lease.layer(0, tokens=MAX_TOKENS)[0][:, :, 1:].any()


def test_buffers_need_layers_at_one_stride():
    with small_pool(layout="token", layer_group=2) as pool, pool.acquire(1) as lease:
        assert lease.buffers()[0].shape[0] == 2
    from memtools import KVPool

    options = {"max_tokens": 9, "max_sequences": 1, "layout": "token", "layer_group": 2}
    with (
        KVPool(4, 2, 64, **options) as pool,  # type: ignore[arg-type]
        pool.acquire(1) as lease,
        pytest.raises(ValueError, match="layer_group is 2 of 4 layers, use 1 or 4"),
    ):
        lease.buffers()
