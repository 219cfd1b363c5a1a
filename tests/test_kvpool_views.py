"""Views are tensors like any other: whatever torch does with their storage, the pool's books and
everybody's tokens stay right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from memtools import KVPool
from tests.kvmodel import Plain, fill, same, small_pool, some, step

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
