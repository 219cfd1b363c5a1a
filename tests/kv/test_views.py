"""Views are tensors like any other: whatever torch does with their storage, the pool's books and
everybody's tokens stay right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from memtools import KVLease, KVPool
from memtools._kv import tensors
from tests.kv.model import Plain, fill, same, small_pool, some, step

pytestmark = pytest.mark.usefixtures("either_way")


# --- memory that torch takes elsewhere ----------------------------------------------------------


def by_simple_queue(view: torch.Tensor) -> torch.Tensor:
    queue = torch.multiprocessing.SimpleQueue()
    queue.put(view)
    got: torch.Tensor = queue.get()
    return got


SHARED: dict[str, Callable[[torch.Tensor], object]] = {
    "share_memory_": torch.Tensor.share_memory_,
    "the storage's own": lambda view: view.untyped_storage().share_memory_(),
    "the pickler of queues": ForkingPickler.dumps,
    "a queue": by_simple_queue,
}


def check_books(pool: KVPool) -> None:
    """Nothing is alive, and the pages go to whoever comes next."""
    stats = pool.stats()
    assert (stats.leases, stats.live_bytes, stats.lingering) == (0, 0, 0)
    assert stats.lingering_names == ()
    assert pool._check()
    with pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 40)
        assert same(lease, model)


@pytest.mark.parametrize("share", SHARED.values(), ids=SHARED)
def test_a_view_that_is_shared_between_processes_ends_the_lease_and_harms_nobody(share):
    with small_pool() as pool, pool.acquire(2) as other:
        twin = Plain(2)
        step(other, twin, 30)
        lease = pool.acquire(2)
        k, v = lease.update(0, some(2, 40), some(2, 40))
        wanted = k.clone(), v.clone()
        share(k)
        for use in (
            lambda: lease.layer(0),
            lambda: lease.update(0, some(2, 1), some(2, 1)),
            lambda: lease.fork(2),
            lambda: lease.buffers(),
            lambda: lease.crop(1),
            lambda: lease.lengths,
        ):
            with pytest.raises(RuntimeError, match=r"release\(\) it, and share a copy: clone\(\) "):
                use()
        assert repr(lease) == "KVLease(lease 2, in use elsewhere)"
        lease.release()
        for _ in range(3):
            with pool.acquire(2) as again:
                fill(again, 40)
        assert torch.equal(k, wanted[0])
        assert torch.equal(v, wanted[1])
        assert same(other, twin)
        step(other, twin, 5)
        other.release()
        check_books(pool)


@pytest.mark.slow
def test_a_lease_whose_views_moved_may_end_by_any_way():
    with small_pool() as pool:
        with pool.acquire(1) as lease:
            lease.update(0, some(1, 20), some(1, 20))[0].share_memory_()
        check_books(pool)
        lease = pool.acquire(1)
        view = lease.update(0, some(1, 20), some(1, 20))[0]
        view.share_memory_()
        del lease
        gc.collect()
        del view
        check_books(pool)
    pool = small_pool()
    lease = pool.acquire(1)
    view, _ = lease.update(0, some(1, 20), some(1, 20))
    pool.close()
    view.share_memory_()
    lease.release()


def test_views_of_a_released_lease_may_be_shared():
    with small_pool() as pool:
        with pool.acquire(1) as lease:
            k, _ = lease.update(0, some(1, 20), some(1, 20))
        wanted = k.clone()
        k.share_memory_()
        check_books(pool)
        assert torch.equal(k, wanted)


def test_a_clone_is_shared_and_the_lease_goes_on():
    with small_pool() as pool:
        with pool.acquire(2) as lease:
            model = Plain(2)
            step(lease, model, 20)
            copy = lease.layer(0)[0].clone()
            assert torch.equal(by_simple_queue(copy), copy)
            step(lease, model, 20)
            assert same(lease, model)
        check_books(pool)


class Views(Dataset[torch.Tensor]):
    """What a worker process is sent: the data set, and in it a view."""

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.view[index].clone()


@pytest.mark.slow
def test_a_view_in_a_data_set_of_spawned_workers():
    with small_pool() as pool:
        lease = pool.acquire(2)
        k, _ = lease.update(0, some(2, 20), some(2, 20))
        wanted = k.clone()
        loader = DataLoader(
            Views(k), batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        assert torch.equal(torch.stack(list(loader)), wanted)
        with pytest.raises(RuntimeError, match="clone"):
            lease.layer(0)
        lease.release()
        check_books(pool)
        assert torch.equal(k, wanted)


def test_a_storage_that_cannot_grow_or_shrink_and_tensors_that_leave_it():
    with small_pool() as pool, pool.acquire(1) as lease:
        model = Plain(1)
        step(lease, model, 20)
        views = lease.layer(0)
        with pytest.raises(RuntimeError, match="not resizable"):
            views[0].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="not resizable"):
            views[0].resize_(1 << 40)
        elsewhere = torch.ones(3)
        views[0].set_(elsewhere)  # type: ignore[call-overload]
        views[1].data = elsewhere
        assert same(lease, model)
        del views
        step(lease, model, 20)
        lease.release()
        check_books(pool)


def test_storages_that_trade_their_memory():
    """torch.utils.swap_tensors, and what deserialisation does with a storage."""
    with small_pool() as pool:
        lease = pool.acquire(1)
        model = Plain(1)
        step(lease, model, 20)
        view, other = lease.layer(0)[0], torch.ones(4)
        torch.utils.swap_tensors(view, other)
        assert view.eq(1).all()
        assert torch.equal(other, model.layer(0)[0])
        assert same(lease, model)
        lease.release()
        assert torch.equal(other, model.layer(0)[0])
        assert pool.stats().lingering == 1
        del other
        check_books(pool)


# --- what autograd saved ------------------------------------------------------------------------


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v).square().sum()


def crop_and_update(lease: KVLease) -> None:
    lease.crop(20)
    fill(lease, 20)


def write_by_hand(lease: KVLease) -> None:
    lease.layer(0)[0].zero_()


CHANGES: dict[str, Callable[[KVLease], object]] = {
    "crop and update": crop_and_update,
    "crop to nothing": lambda lease: lease.crop(0),
    "crop of one row": lambda lease: lease.crop([40, 3]),
    "reorder": lambda lease: lease.reorder([1, 0]),
    "select": lambda lease: lease.select([1]),
    "buffers, written": lambda lease: lease.buffers()[0].zero_(),
    "a view, written": write_by_hand,
    "another layer, written": lambda lease: lease.layer(1)[1].zero_(),
}
APPENDS: dict[str, Callable[[KVLease], object]] = {
    "nothing": lambda lease: None,
    "update": lambda lease: fill(lease, 5),
    "update of one row": lambda lease: lease.update(0, some(2, 3), some(2, 3), [3, 0]),
    "update of no token": lambda lease: lease.update(0, some(2, 3), some(2, 3), 0),
    "crop beyond the end": lambda lease: lease.crop(100),
    "crop by nothing": lambda lease: lease.crop([40, 40]),
    "advance": lambda lease: lease.advance(3),
    "reserve": lambda lease: lease.reserve(90),
    "layer, buffers": lambda lease: (lease.layer(0), lease.buffers()),
    "fork": lambda lease: fill(lease.fork(2), 30),
    "release": lambda lease: lease.release(),
}


def saved_for_backward(lease: KVLease) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q, what was computed of it and the lease, the gradient that is right)."""
    k, v = some(2, 40), some(2, 40)
    views = lease.update(0, k, v)
    lease.update(1, k, v)
    q = some(2, 1).requires_grad_()
    (right,) = torch.autograd.grad(attend(q, k, v), q)
    return q, attend(q, *views), right


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_backward_through_views_that_changed_is_refused(change):
    with small_pool() as pool, pool.acquire(2) as lease:
        q, loss, _ = saved_for_backward(lease)
        change(lease)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, q)


@pytest.mark.parametrize("append", APPENDS.values(), ids=APPENDS)
def test_backward_through_views_that_only_grew_is_right(append):
    with small_pool() as pool, pool.acquire(2) as lease:
        q, loss, right = saved_for_backward(lease)
        append(lease)
        assert torch.equal(torch.autograd.grad(loss, q)[0], right)


def test_backward_through_views_whose_lease_ended_is_right():
    with small_pool() as pool:
        lease = pool.acquire(2)
        q, loss, right = saved_for_backward(lease)
        lease.release()
        with pool.acquire(2) as other:
            fill(other, 40)
            assert torch.equal(torch.autograd.grad(loss, q)[0], right)


def test_a_child_that_changes_does_not_change_its_parent():
    with small_pool() as pool, pool.acquire(2) as lease:
        q, loss, right = saved_for_backward(lease)
        with lease.fork(2) as child:
            child.crop(20)
            fill(child, 20)
            child.reorder([3, 2, 1, 0])
        assert torch.equal(torch.autograd.grad(loss, q)[0], right)


def test_what_a_call_refused_has_not_changed():
    with small_pool() as pool, pool.acquire(2) as lease:
        q, loss, right = saved_for_backward(lease)
        for call in (
            lambda: lease.update(0, some(2, 99), some(2, 99)),
            lambda: lease.update(0, some(3, 1), some(3, 1)),
            lambda: lease.reorder([0, 2]),
            lambda: lease.select([]),
            lambda: lease.crop([1]),
        ):
            with pytest.raises((IndexError, ValueError)):
                call()
        assert torch.equal(torch.autograd.grad(loss, q)[0], right)


def test_one_forward_pass_after_a_crop_or_over_ragged_rows_can_go_backward():
    """Only the first layer that writes over what was shown ends the older views; the pass itself
    is left whole."""
    with small_pool() as pool, pool.acquire(2) as lease:
        for layer in range(2):
            lease.update(layer, some(2, 40), some(2, 40), [40, 30])
        for cut in (None, 20):
            if cut is not None:
                lease.crop(cut)
            older = lease.layer(1)
            q = some(2, 1).requires_grad_()
            stale = attend(q, *older)
            pairs, losses = [], []
            for layer in range(2):
                views = lease.update(layer, some(2, 3), some(2, 3))
                pairs.append([view.clone() for view in views])
                losses.append(attend(q, *views))
            (got,) = torch.autograd.grad(sum(losses), q)
            (right,) = torch.autograd.grad(sum(attend(q, *pair) for pair in pairs), q)
            assert torch.equal(got, right)
            if cut is None:  # rows of 40 and 30: position 30 was shown, as a zero
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.autograd.grad(stale, q)


def test_updates_write_over_buffers_each_time():
    with small_pool() as pool, pool.acquire(1) as lease:
        buffer = lease.buffers()[0]
        versions = []
        for _ in range(3):
            versions.append(buffer._version)
            fill(lease, 2)
        assert versions[0] < versions[1] < versions[2] < buffer._version


def test_more_was_asked_to_be_shown_than_there_was():
    with small_pool() as pool, pool.acquire(1) as lease:
        fill(lease, 3)
        ahead = lease.layer(0, tokens=50)[0]
        before = ahead._version
        fill(lease, 1)
        assert ahead._version > before


def test_a_write_by_torch_calls_is_an_append_as_well():
    """What update() does on a device."""
    with small_pool() as pool, pool.acquire(2) as lease:
        q, loss, right = saved_for_backward(lease)
        lease.reserve(60)
        views = lease.layer(0, tokens=50)
        for rows in ([(40, 10)] * 2, [(40, 3), (40, 5)]):
            k, v = some(2, 10), some(2, 10)
            tensors.write(views, k, v, rows)
            for row, (start, count) in enumerate(rows):
                assert torch.equal(views[0][row, :, start : start + count], k[row, :, :count])
                assert torch.equal(views[1][row, :, start : start + count], v[row, :, :count])
        assert torch.equal(torch.autograd.grad(loss, q)[0], right)
