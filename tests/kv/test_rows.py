"""fork, reorder, select and crop: rows change as wholes and share pages while they can."""

from __future__ import annotations

import pytest
import torch

from tests.kv.model import BLOCK, MAX_TOKENS, Plain, fill, same, small_pool, some, step

pytestmark = pytest.mark.usefixtures("either_way")


def test_a_fork_goes_on_from_what_is_there_and_neither_sees_the_other():
    with small_pool() as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 40, [40, 25])
        with lease.fork(3) as child:
            twin = model.fork(3)
            step(child, twin, 1)
            step(lease, model, 2)
            step(child, twin, 9)
            assert child.lengths == [50, 50, 50, 35, 35, 35]
            assert same(child, twin)
            assert same(lease, model)
            assert pool._check()
        step(lease, model, 5)
        assert same(lease, model)


def test_a_prompt_is_stored_once_and_only_written_pages_are_copied():
    with small_pool() as pool, pool.acquire(1) as lease:
        fill(lease, 40)  # two full blocks and a half
        assert pool.stats().live_bytes == 3 * BLOCK
        with lease.fork(8) as child:
            stats = pool.stats()
            assert (stats.live_bytes, stats.shared_bytes) == (3 * BLOCK, 3 * BLOCK)
            fill(child, 1)
            stats = pool.stats()
            assert stats.live_bytes == (3 + 8) * BLOCK
            assert stats.copied <= 8
            assert stats.payload_bytes == (40 + 8 * 41) * BLOCK // 16
        assert pool.stats().live_bytes == 3 * BLOCK


def test_sixteen_samples_of_one_prompt_fit_where_one_row_leases_do():
    with small_pool(max_sequences=16) as pool, pool.acquire(1) as lease:
        fill(lease, 20)
        assert lease.fork(16).batch_size == 16
        with pytest.raises(ValueError, match="17 rows was asked for, max_sequences .* is 16"):
            lease.fork(17)


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda x: torch.tensor(x).int()])
def test_reorder_is_index_select(kind):
    with small_pool() as pool, pool.acquire(4) as lease:
        model = Plain(4)
        step(lease, model, 40, [40, 31, 17, 2])
        for index in ([3, 2, 1, 0], [0, 0, 2, 2], [1, 1, 1, 1], [0, 1, 2, 3]):
            lease.reorder(kind(index))
            model.select(index)
            assert same(lease, model)
            step(lease, model, 3)
            assert same(lease, model)
            assert pool._check()


def test_reorder_shares_full_blocks():
    with small_pool() as pool, pool.acquire(4) as lease:
        fill(lease, 64)
        assert pool.stats().live_bytes == 16 * BLOCK
        lease.reorder([2, 2, 2, 2])
        assert pool.stats().live_bytes == 4 * BLOCK


def test_finished_rows_give_their_pages_back():
    with small_pool() as pool, pool.acquire(4) as lease:
        fill(lease, 48)
        lease.select([1])
        assert pool.stats().live_bytes == 3 * BLOCK
        assert pool.stats().rows == 1


@pytest.mark.parametrize("n", [30, 17, 16, 1, 0, 100, -1, -17, -1000, [40, 3, 0], [9, 9, 9]])
def test_crop_shortens_rows(n):
    with small_pool() as pool, pool.acquire(3) as lease:
        model = Plain(3)
        step(lease, model, 40, [40, 25, 8])
        lease.crop(torch.tensor(n) if n == 17 else n)
        model.crop(n)
        assert same(lease, model)
        step(lease, model, 20)
        assert same(lease, model)
        assert pool._check()


def test_what_was_cropped_never_comes_back():
    with small_pool() as pool, pool.acquire(1) as lease:
        lease.update(0, torch.full((1, 2, 30, 64), torch.nan), some(1, 30))
        lease.crop(5)
        assert not lease.layer(0, tokens=MAX_TOKENS)[0][:, :, 5:].any()
        lease.crop(0)
        assert (lease.num_tokens, pool.stats().live_bytes) == (0, 0)
