"""limit, would_fit, trim and the queue: bytes are bounded, and whoever does not fit is told why."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from memtools import Budget, BudgetError, KVLease, KVPool
from tests.kv.model import BLOCK, Plain, fill, same, small_pool, some, step


def test_pages_past_the_limit_are_refused_and_nothing_has_changed():
    with small_pool(limit=6 * BLOCK) as pool, pool.acquire(2) as lease:
        model = Plain(2)
        step(lease, model, 40)
        before = pool.stats()
        assert (before.live_bytes, before.reserved_bytes, before.limit_bytes) == (6 * BLOCK,) * 3
        for _ in range(2):
            with pytest.raises(BudgetError, match="update") as caught:
                lease.update(0, some(2, 20), some(2, 20))
        text = str(caught.value)
        assert "used 192.0 KiB of 192.0 KiB" in text
        assert "KVPool 192.0 KiB" in text
        assert "0.0 MiB reserved but unallocated" in text
        assert "raise limit" in text
        assert "\n" not in text
        assert pool.stats() == before
        assert same(lease, model)
        step(lease, model, 8)
        assert pool._check()


def test_a_limit_counts_shared_pages_once():
    with small_pool(limit=4 * BLOCK) as pool, pool.acquire(1) as lease:
        model = Plain(1)
        step(lease, model, 64)
        with lease.fork(8) as child:
            assert same(child, model.fork(8))
            with pytest.raises(BudgetError):
                child.update(0, some(8, 1), some(8, 1))
            assert same(child, model.fork(8))


def test_a_promise_is_reserved_at_once_and_counts_until_it_is_used():
    with small_pool(limit=4 * BLOCK) as pool, pool.acquire(1, 48) as lease:
        stats = pool.stats()
        assert (stats.promised_bytes, stats.reserved_bytes, stats.live_bytes) == (
            3 * BLOCK,
            3 * BLOCK,
            0,
        )
        with pytest.raises(BudgetError, match="0.1 MiB reserved but unallocated"):
            pool.acquire(1, 20)
        fill(lease, 17)
        assert pool.stats().promised_bytes == BLOCK
        assert pool.stats().reserved_bytes == 3 * BLOCK


def test_a_promise_ends_with_its_lease():
    with small_pool(limit=4 * BLOCK) as pool:
        for _ in range(3):
            with pool.acquire(1, 64):
                pass
            assert pool.stats().reserved_bytes == 0
        assert pool.acquire(2, 32).batch_size == 2


def test_num_tokens_is_a_hint_capped_at_max_tokens():
    with small_pool(limit=7 * BLOCK) as pool, pool.acquire(1, 10**6) as lease:
        fill(lease, 100)
        assert pool.stats().live_bytes == 7 * BLOCK


def test_idle_pages_make_room_before_anything_is_refused():
    with small_pool(limit=4 * BLOCK) as pool:
        with pool.acquire(1) as lease:
            fill(lease, 60)
        assert pool.stats().idle_bytes == 4 * BLOCK
        with pool.acquire(4) as lease:
            fill(lease, 10)
            assert pool.stats().live_bytes == 4 * BLOCK
            assert pool.stats().physical_bytes <= 4 * BLOCK


def test_would_fit_says_what_acquire_will():
    with small_pool(limit=8 * BLOCK) as pool, pool.acquire(2) as lease:
        fill(lease, 20)
        for rows, tokens in [(1, 0), (1, 64), (1, 65), (4, 16), (4, 17), (8, 100), (2, 32)]:
            fits = pool.would_fit(rows, tokens)
            try:
                pool.acquire(rows, tokens).release()
            except BudgetError:
                assert not fits
            else:
                assert fits
        assert pool.would_fit(2, 48, shared_tokens=32)
        assert not pool.would_fit(2, 48)
        assert not pool.would_fit(9, 1)  # more rows than a lease can have
        assert not pool.would_fit(1, 101)  # more tokens than a row can hold
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            pool.would_fit(0, 1)
        with pytest.raises(ValueError, match="num_tokens must be at least 0, got -1"):
            pool.would_fit(1, -1)


def test_trim_gives_idle_pages_back_down_to_a_target():
    with small_pool() as pool:
        kept = pool.acquire(1)
        fill(kept, 16)
        with pool.acquire(2) as lease:
            fill(lease, 64)
            lease.crop([64, 48])
        before = pool.stats()
        assert (before.idle_bytes, before.live_bytes) == (8 * BLOCK, BLOCK)
        freed = pool.trim(6 * BLOCK)
        assert 3 * BLOCK <= freed <= 4 * BLOCK
        assert pool.trim(6 * BLOCK) == 0
        freed += pool.trim("64 KiB")
        assert 7 * BLOCK <= freed <= 8 * BLOCK
        assert pool.trim() == 8 * BLOCK - freed
        assert pool.trim() == 0
        after = pool.stats()
        assert (after.live_bytes, after.idle_bytes, after.physical_bytes) == (BLOCK, 0, BLOCK)
        assert after.dropped == 8
        assert after.address_bytes == before.address_bytes
        for bad, error in [(-1, ValueError), ("x", ValueError), (1.5, TypeError)]:
            with pytest.raises(error):
                pool.trim(bad)  # type: ignore[arg-type]


def test_two_pools_of_one_budget_make_room_for_each_other():
    budget = Budget(8 * BLOCK, name="rollouts")
    with small_pool(limit=budget, name="actor") as one, small_pool(limit=budget, name="ref") as two:
        assert one.budget is two.budget is budget
        with one.acquire(1) as lease:
            fill(lease, 100)
        assert budget.used == one.stats().idle_bytes == 7 * BLOCK
        with two.acquire(1) as lease:
            fill(lease, 100)
            assert two.stats().live_bytes == 7 * BLOCK
            assert budget.used <= 8 * BLOCK
            with pytest.raises(BudgetError, match=r"ref 224.0 KiB"):
                one.acquire(1, 40)
    assert budget.used == 0


def test_a_budget_of_another_device_is_refused():
    with pytest.raises(ValueError, match="KVPool lies on cpu, this budget counts memory of cuda"):
        small_pool(limit=Budget("1 MiB", device="cuda"))
    small_pool(limit=Budget("1 MiB", device="cpu")).close()


def test_a_budget_of_no_limit_is_no_limit():
    with small_pool() as pool:
        assert pool.stats().limit_bytes is None


# --- the queue --------------------------------------------------------------------------------


def test_waiting_ends_when_a_lease_does():
    with small_pool(limit=4 * BLOCK) as pool:
        first = pool.acquire(1, 64)
        got: list[int] = []
        waiter = threading.Thread(
            target=lambda: got.append(pool.acquire(1, 64, wait=True).batch_size)
        )
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        first.release()
        waiter.join(20)
        assert got == [1]


def overtakes(pool: KVPool) -> bool:
    """Whether a small request gets through, or has to wait behind somebody."""
    try:
        pool.acquire(1, 16, wait=True, timeout=0.1).release()
    except TimeoutError:
        return False
    return True


def test_who_waits_for_much_is_not_overtaken_by_who_waits_for_little():
    with small_pool(limit=4 * BLOCK) as pool:
        held = pool.acquire(1, 32)
        got: list[int] = []
        first = threading.Thread(
            target=lambda: got.append(pool.acquire(1, 64, wait=True).batch_size)
        )
        first.start()
        end = time.monotonic() + 60
        while overtakes(pool):  # until `first` has a place in the queue
            assert time.monotonic() < end
        assert pool.acquire(1, 16).batch_size == 1  # who does not wait takes what there is
        assert got == []
        held.release()
        first.join(60)
        assert got == [1]
        assert overtakes(pool)


def test_a_timeout_is_a_timeout_error_with_the_numbers():
    with small_pool(limit=4 * BLOCK) as pool, pool.acquire(1, 64):
        began = time.monotonic()
        with pytest.raises(
            TimeoutError, match=r"no room for 1 rows of 20 tokens in \d+ ms"
        ) as caught:
            pool.acquire(1, 20, wait=True, timeout=0.15)
        assert time.monotonic() - began > 0.1
        assert f"used, limit {4 * BLOCK}; 1 leases are alive, {4 * BLOCK} bytes promised" in str(
            caught.value
        )
        with pytest.raises(TimeoutError):
            pool.acquire(1, 20, wait=True, timeout=0)
        assert pool.stats().leases == 1


def test_what_can_never_fit_is_not_waited_for():
    with small_pool(limit=4 * BLOCK) as pool, pytest.raises(BudgetError, match="acquire"):
        pool.acquire(1, 65, wait=True)


def test_what_fits_at_once_does_not_wait():
    with small_pool(limit=4 * BLOCK) as pool:
        assert pool.acquire(1, 64, wait=True, timeout=0).batch_size == 1


def test_ctrl_c_ends_the_waiting():
    class PressedError(Exception):
        pass

    def press(*_: object) -> None:
        raise PressedError

    def wait(pool: KVPool) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        pool.acquire(1, 1, wait=True)

    with small_pool(limit=4 * BLOCK) as pool, pool.acquire(1, 64) as lease:
        before = signal.signal(signal.SIGALRM, press)
        try:
            with pytest.raises(PressedError):
                wait(pool)
        finally:
            signal.signal(signal.SIGALRM, before)
        lease.release()
        assert pool.acquire(1, 64, wait=True, timeout=0).batch_size == 1  # no ticket is left


def test_close_wakes_those_who_wait():
    pool = small_pool(limit=4 * BLOCK)
    lease = pool.acquire(1, 64)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            pool.acquire(1, 64, wait=True)
        except ValueError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.1)
    pool.close()
    waiter.join(20)
    assert "this KVPool is closed" in str(errors[0])
    lease.update(0, some(1, 3), some(1, 3))
    assert lease.lengths == [3]


def fill_up(lease: KVLease) -> None:
    one = torch.ones(4, 1, 1, 64, dtype=lease.pool.dtype)
    for _ in range(lease.pool.max_tokens):
        lease.update(0, one, one)


def test_limits_hold_for_every_dtype_and_row_count():
    for dtype in (torch.float16, torch.float64):
        pool = KVPool(1, 1, 64, max_tokens=256, max_sequences=4, dtype=dtype, limit="64 KiB")
        with pool, pool.acquire(4) as lease:
            per_block = pool.block_bytes
            with pytest.raises(BudgetError):
                fill_up(lease)
            assert pool.stats().reserved_bytes <= 64 << 10
            assert pool.stats().reserved_bytes > (64 << 10) - 4 * per_block - 1


def test_more_tokens_than_there_are_addresses_are_refused_with_the_numbers():
    with KVPool(80, 8, 128, dtype="bfloat16", max_tokens=10**9, max_sequences=64) as pool:
        with pytest.raises(MemoryError, match="max_tokens 1000000000 for max_sequences 64 rows"):
            pool.acquire(1)
        assert pool.stats().leases == 0


@pytest.mark.slow
def test_tokens_and_rows_that_nobody_uses_cost_no_memory():
    code = """if True:
        from memtools import KVPool
        def resident():  # bytes
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        pool = KVPool(80, 8, 128, dtype="bfloat16", max_tokens=131_072, max_sequences=64)
        pool.acquire(1).release()  # the libraries' own first use
        other = KVPool(80, 8, 128, dtype="bfloat16", max_tokens=131_072, max_sequences=64)
        before = resident()
        lease = other.acquire(1)
        print(resident() - before)"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(said.stdout) < 8 << 20  # the tables alone are 168 MiB
