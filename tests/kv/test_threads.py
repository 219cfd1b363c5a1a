"""Threads share a pool; a lease belongs to one thread at a time, and says so to the others."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from memtools import BudgetError, KVLease
from tests.gate.test_threads import run_all
from tests.kv.model import BLOCK, HEADS, WIDTH, Plain, fill, same, small_pool, some, step


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns every tenth of a millisecond, and not every 5 ms."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


def test_generations_on_several_threads_do_not_see_each_other():
    with small_pool() as pool:

        def generate() -> None:
            for _ in range(15):
                with pool.acquire(2) as lease:
                    model = Plain(2)
                    step(lease, model, 20, [20, 11])
                    with lease.fork(2) as child:
                        twin = model.fork(2)
                        for _ in range(4):
                            step(child, twin, 3)
                        child.reorder([3, 0, 0, 1])
                        twin.select([3, 0, 0, 1])
                        step(child, twin, 8)
                        assert same(child, twin)
                    assert same(lease, model)

        run_all(*[generate] * 4)
        stats = pool.stats()
        assert (stats.leases, stats.live_bytes) == (0, 0)
        assert stats.acquired == stats.forked == 60
        assert pool._check()


def test_leases_trims_and_statistics_from_everywhere_under_a_limit(often):
    with small_pool(limit=40 * BLOCK) as pool:
        done = threading.Event()

        def generate() -> None:
            for n in range(40):
                try:
                    with pool.acquire(1 + n % 4) as lease:
                        fill(lease, 30)
                        with lease.fork(2) as child:
                            fill(child, 20)
                except BudgetError:
                    pass

        def watch() -> None:
            while not done.is_set():
                stats = pool.stats()
                assert stats.live_bytes <= 40 * BLOCK
                assert stats.reserved_bytes <= 40 * BLOCK
                assert pool.would_fit(1, 0)
                pool.trim(8 * BLOCK)

        watcher = threading.Thread(target=watch)
        watcher.start()
        run_all(*[generate] * 3)
        done.set()
        watcher.join(60)
        assert not watcher.is_alive()
        assert pool.stats().live_bytes == 0
        assert pool._check()


def test_a_queue_of_many_lets_everybody_through():
    with small_pool(limit=8 * BLOCK) as pool:

        def generate() -> None:
            for _ in range(10):
                with pool.acquire(2, 48, wait=True, timeout=60) as lease:
                    fill(lease, 48)

        run_all(*[generate] * 6)
        assert pool.stats().acquired == 60
        assert pool.stats().reserved_bytes <= 8 * BLOCK


def test_views_dropped_by_other_threads_while_leases_come_and_go():
    with small_pool() as pool:
        box: list[object] = []

        def generate() -> None:
            for _ in range(100):
                with pool.acquire(1) as lease:
                    box.append(lease.update(0, some(1, 20), some(1, 20)))

        def drop() -> None:
            for _ in range(3000):
                if box:
                    box.pop()
                pool.stats()

        run_all(generate, generate, drop, drop)
        box.clear()
        assert (pool.stats().live_bytes, pool.stats().lingering) == (0, 0)
        assert pool._check()


class Busy(torch.Tensor):
    """Runs `meanwhile` while update() reads it: a moment in which the lease is in use."""

    meanwhile: object

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for arg in args:
            if isinstance(arg, cls) and callable(getattr(arg, "meanwhile", None)):
                body, arg.meanwhile = arg.meanwhile, None
                body()
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_lease_in_use_refuses_a_second_user_and_is_not_harmed():
    with small_pool() as pool, pool.acquire(1) as lease:
        k = some(1, 3)
        busy = k.as_subclass(Busy)
        errors: list[str] = []

        def use(lease: KVLease) -> None:
            for call in (
                lambda: lease.update(0, k, k),
                lambda: lease.lengths,
                lease.release,
                lease.fork,
                lambda: lease.crop(0),
                lease.buffers,
            ):
                try:
                    call()
                except RuntimeError as error:
                    errors.append(str(error))
            assert repr(lease) == "KVLease(lease 1, in use elsewhere)"

        busy.meanwhile = lambda: use(lease)
        assert torch.equal(lease.update(0, busy, k)[0], k)
        assert len(errors) == 6
        assert all("in use by another thread" in error for error in errors)
        assert lease.lengths == [3]


@pytest.mark.slow
def test_two_leases_may_be_in_long_updates_at_once():
    from memtools import KVPool

    with KVPool(1, 8, 128, max_tokens=4096, max_sequences=8) as pool:
        lease, other = pool.acquire(8), pool.acquire(8)
        prompt = torch.randn(8, 8, 2048, 128).bfloat16()

        def prefill(lease: KVLease) -> None:
            for _ in range(5):
                got, _ = lease.update(0, prompt, prompt)
                assert torch.equal(got[:, :, -1], prompt[:, :, -1])
                lease.crop(0)

        run_all(lambda: prefill(lease), lambda: prefill(other))


@pytest.mark.parametrize("count", [2, 4])
def test_one_lease_used_by_several_threads_by_turns(count):
    with small_pool() as pool, pool.acquire(1) as lease:
        turn = threading.Lock()

        def append() -> None:
            for _ in range(10):
                with turn:
                    lease.update(0, torch.ones(1, HEADS, 1, WIDTH), torch.ones(1, HEADS, 1, WIDTH))

        run_all(*[append] * count)
        assert lease.lengths == [10 * count]
        assert lease.layer(0)[0].eq(1.0).all()


def test_who_waits_behind_others_times_out_with_the_numbers_of_its_own_request():
    with small_pool(limit=4 * BLOCK) as pool, pool.acquire(1, 32) as held:
        got: list[int] = []
        first = threading.Thread(
            target=lambda: got.append(pool.acquire(1, 64, wait=True).batch_size)
        )
        first.start()
        said = ""
        while "behind others that wait" not in said:  # until `first` has a place in the queue
            assert first.is_alive()
            with pytest.raises(TimeoutError) as caught:
                pool.acquire(2, 20, wait=True, timeout=0)
            said = str(caught.value)
        held.release()
        first.join(60)
        assert got == [1]
        assert re.search(
            rf"no room for 2 rows of 20 tokens in \d+ ms: {4 * BLOCK} bytes asked behind others "
            rf"that wait, {2 * BLOCK} used, limit {4 * BLOCK}; 1 leases are alive",
            said,
        )
