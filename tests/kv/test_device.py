"""KVPool on a CUDA device: over the fake driver, or on a GPU by `make test-gpu`. The fake one has
pages, waits and orders like a device, and runs nothing before it is read. Values are compared with
torch.cat."""

from __future__ import annotations

import functools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from memtools import BudgetError, DeviceError, KVLease, KVPool
from memtools._kv import tensors
from tests.kit.cudadevice import REAL, Device, FakeDevice
from tests.kit.fakecuda import FakeRuntime, as_cuda
from tests.kv.model import OnDevice, Plain, same, small_pool, some, step

PAGE = 2 << 20 if REAL else 4096
N = PAGE // 4096  # 8 * N tokens of K or of V of a layer are a page
BLOCK = 2 * 2 * PAGE  # two layers
LAUNCH_FAILURE, OUT_OF_MEMORY = 719, 2


def push(lease: OnDevice, model: Plain, counts: list[int]) -> None:
    """step() without reading: what it enqueues runs later."""
    for layer in range(lease.pool.num_layers):
        k, v = (some(lease.batch_size, max(counts)) for _ in range(2))
        lease.lease.update(layer, lease.device.put(k), lease.device.put(v), counts)
        model.update(layer, k, v, counts)


def address(tensor: torch.Tensor, *at: int) -> int:
    steps = zip(at, tensor.stride(), strict=False)
    return tensor.data_ptr() + tensor.element_size() * sum(i * step for i, step in steps)


@pytest.fixture
def fake(fake_cuda: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRuntime]:
    """The fake device, with small pages. torch's CPU build has no kernels for CUDA tensors, so here
    update() writes by the fake's own, one per head and token, on the default stream."""

    def write(views: Any, k: torch.Tensor, v: torch.Tensor, rows: list[tuple[int, int]]) -> None:
        for to, source in zip(views, (k, v), strict=True):
            for row, (start, count) in enumerate(rows):
                for i in range(count * to.shape[1]):
                    at = (row, i % to.shape[1], i // to.shape[1])
                    dst = address(to, at[0], at[1], start + at[2])
                    fake_cuda.write(
                        dst, address(source, *at), to.shape[3] * to.element_size(), None
                    )

    monkeypatch.setattr(tensors, "write", write)
    fake_cuda.set_granularity(PAGE)
    yield fake_cuda
    assert fake_cuda.spoiled_captures() == 0


def device_pool(**changes: Any) -> KVPool:
    return small_pool(**{"device": "cuda:0", "max_tokens": 100 * N, **changes})


@pytest.fixture
def device(request: pytest.FixtureRequest, device: Device) -> Device:
    """With the small pages and the kernels that the fake one needs."""
    if isinstance(device, FakeDevice):
        request.getfixturevalue("fake")
    return device


@pytest.fixture
def lend(device: Device) -> Callable[..., OnDevice]:
    return lambda pool, *args, **kwargs: OnDevice(pool.acquire(*args, **kwargs), device)


# --- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"layer_group": 2}, {"layout": "head"}, {"page_bytes": 4 * PAGE}]
)
def test_rows_of_any_length_show_what_torch_cat_would(lend, options):
    with device_pool(**options) as pool, lend(pool, 3) as lease:
        model = Plain(3)
        step(lease, model, 7 * N)
        step(lease, model, 1, [1, 0, 1])
        step(lease, model, 20 * N, [20 * N, 3 * N, 0])
        step(lease, model, 1)
        step(lease, model, 33 * N)
        assert same(lease, model)
        assert pool._check()


def test_rows_are_cut_moved_and_repeated(lend):
    with device_pool() as pool, lend(pool, 4) as lease:
        model = Plain(4)
        step(lease, model, 20 * N)
        for n in (-3 * N, 12 * N, [12 * N, 4 * N, 8 * N, 0]):
            lease.crop(n)
            model.crop(n)
            step(lease, model, 2 * N)
        for index in ([3, 2, 1, 0], [0, 0, 2, 2]):
            lease.reorder(index)
            model.select(index)
            step(lease, model, 3 * N)
        lease.select([1, 3])
        model.select([1, 3])
        step(lease, model, 1)
        assert same(lease, model)
        assert pool._check()


def test_forked_rows_share_full_pages_and_write_to_their_own(lend):
    with device_pool() as pool:
        with lend(pool) as prompt:
            parent = Plain(1)
            step(prompt, parent, 20 * N)
            rows = prompt.fork(4)
            model = parent.fork(4)
            assert pool.stats().shared_bytes == 3 * BLOCK
            step(rows, model, 1)
            assert pool.stats().physical_bytes <= (3 + 4) * BLOCK  # the last block is copied
            step(prompt, parent, 5)
            assert same(rows, model)
            assert same(prompt, parent)
        step(rows, model, 10 * N)
        assert same(rows, model)
        assert pool._check()
        rows.release()


def test_tails_read_as_zeros_and_buffers_reach_the_end(lend, device):
    garbage = device.put(
        torch.full((1 << 20,), torch.nan)
    )  # new pages of the fake are full of 0xFF
    del garbage
    with device_pool() as pool, lend(pool, 2) as lease:
        lease.update(0, some(2, 9 * N), some(2, 9 * N), [9 * N, 1])
        k, _ = lease.layer(0, tokens=pool.max_tokens)
        assert k[0, :, : 9 * N].any()
        assert not k[0, :, 9 * N :].any()
        assert not k[1, :, 1:].any()
        k, v = lease.read(lease.buffers())
        assert k.shape == (2, 2, 2, pool.max_tokens, 64)
        assert not v[1].any()


def test_code_that_writes_by_itself_reserves_and_announces(lend, fake):
    with device_pool() as pool, lend(pool, 2) as lease:
        lease.reserve(20)
        k, _ = lease.lease.buffers()
        line = torch.full((64,), 3.0)
        for layer in range(2):
            for head in range(2):
                fake.write(address(k, layer, 1, head, 19), line.data_ptr(), 256, None)
        del k
        lease.advance(20)
        assert lease.lengths == [20, 20]
        k, v = lease.layer(1)
        assert k[1, :, 19].eq(3).all()
        assert not k[1, :, :19].any()
        assert not v.any()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_anything_in_any_order_shows_what_torch_cat_would(lend, device, seed):
    rng, n = random.Random(seed), -(-N // 4)
    device.seed(seed + 1)
    with device_pool(layer_group=1 + seed % 2) as pool:
        leases: list[tuple[OnDevice, Plain]] = []
        for _ in range(60):
            if not leases or (len(leases) < 4 and rng.random() < 0.1):
                rows = rng.randint(1, 4)
                leases.append((lend(pool, rows, rng.choice([0, 30 * n])), Plain(rows)))
            lease, model = rng.choice(leases)
            rows = len(model.rows)
            match rng.randrange(8):
                case 0 if len(leases) < 5 and rows <= 4:
                    leases.append((lease.fork(2), model.fork(2)))
                case 1:
                    keep = [rng.randint(0, length) for length in model.lengths]
                    lease.crop(keep)
                    model.crop(keep)
                case 2:
                    index = [rng.randrange(rows) for _ in range(rows)]
                    lease.reorder(index)
                    model.select(index)
                case 3:
                    leases.remove((lease, model))
                    lease.release()
                case 4:
                    pool.trim(rng.choice([0, 10 * BLOCK]))
                case _ if max(model.lengths) < 80 * n:
                    push(lease, model, [rng.randint(0, 20 * n) for _ in range(rows)])
            device.run_some(rng.randrange(40))
            assert pool._check()
            if rng.random() < 0.2:
                assert all(same(*pair) for pair in leases)
        assert all(same(*pair) for pair in leases)
        for lease, _ in leases:
            lease.release()


# --- memory -----------------------------------------------------------------------------------


def test_a_second_generation_makes_no_page_and_maps_nothing(lend):
    def generation() -> tuple[int, int]:
        with lend(pool, 2, 40 * N) as lease:
            model = Plain(2)
            step(lease, model, 30 * N)
            for _ in range(10):
                step(lease, model, 1)
            assert same(lease, model)
        return pool.stats().taken, pool.stats().map_calls

    with device_pool() as pool:
        first = generation()
        assert generation() == first


def test_trim_gives_memory_back_to_the_driver_and_keeps_addresses(lend, device):
    slack = (8 << 20) if REAL else 0  # what the driver keeps for addresses
    before = device.used_bytes()
    with device_pool() as pool:
        with lend(pool, 2) as lease:
            step(lease, Plain(2), 40 * N)
            where = lease.lease.layer(0)[0].data_ptr()
            assert pool.trim() == 0
        held = pool.stats().physical_bytes
        assert held == pool.stats().idle_bytes <= device.used_bytes() - before
        given = pool.trim(6 * BLOCK)
        assert held - given <= 6 * BLOCK
        assert pool.trim() == held - given
        assert device.used_bytes() - before <= slack
        with lend(pool, 2) as lease:
            step(lease, Plain(2), 20 * N)
            assert lease.lease.layer(0)[0].data_ptr() == where


def test_growing_waits_for_nothing(lend, fake):
    with device_pool() as pool, lend(pool, 2) as lease:
        model = Plain(2)
        step(lease, model, 30)
        for _ in range(20):
            step(lease, model, 1)
        assert fake.host_syncs() == 0


def test_a_view_that_outlives_its_lease_keeps_its_pages(lend, device):
    with device_pool() as pool:
        lease, model = lend(pool), Plain(1)
        step(lease, model, 20 * N)
        pair = lease.lease.layer(1)
        lease.release()
        assert pool.trim() == 0
        assert pool.stats().lingering == 1
        assert torch.equal(device.get(pair[0]), model.layer(1)[0])
        del pair
        assert pool.stats().lingering == 0
        assert pool.trim() == 3 * BLOCK


def test_a_limit_counts_shared_pages_once(lend):
    with device_pool(limit=7 * BLOCK) as pool, lend(pool) as prompt:
        model = Plain(1)
        step(prompt, model, 24 * N)
        rows, twins = prompt.fork(4), model.fork(4)
        step(rows, twins, 1)
        with pytest.raises(BudgetError):
            rows.update(0, some(4, 8 * N), some(4, 8 * N))
        assert rows.lengths == [24 * N + 1] * 4
        assert same(rows, twins)
        rows.release()


# --- what goes wrong --------------------------------------------------------------------------


def test_a_device_without_memory_is_asked_again_after_torch_gave_its_own_back(
    lend, fake, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        tensors, "free_device_memory", lambda: (asked.append(1), fake.set_capacity(4 * BLOCK))
    )
    with device_pool() as pool, lend(pool) as lease:
        model = Plain(1)
        fake.set_capacity(BLOCK)
        step(lease, model, 20)
        assert len(asked) == 1
        monkeypatch.setattr(tensors, "free_device_memory", lambda: asked.append(1))
        with pytest.raises(MemoryError, match="cuMemCreate failed with code 2 for"):
            lease.update(0, some(1, 30), some(1, 30))
        assert same(lease, model)
        assert pool._check()


@pytest.mark.slow
def test_a_failure_at_any_driver_call_changes_nothing(lend, fake):
    failures, n, fired = 0, 0, True
    while fired:
        with device_pool() as pool, lend(pool, 2) as lease:
            model = Plain(2)
            step(lease, model, 12, [12, 5])
            before = fake.faults()
            fake.fail_at(n, LAUNCH_FAILURE)
            try:
                lease.lease.update(0, as_cuda(some(2, 9)), as_cuda(some(2, 9)))
                lease.lease.crop([12, 5])
            except DeviceError as error:
                assert "\n" not in str(error)
                failures += 1
            fake.fail_at(-1, 0)
            fired = fake.faults() > before
            assert same(lease, model)
            step(lease, model, 9)
            assert same(lease, model)
            assert pool._check()
        n += 1
    assert failures > 40


def test_while_a_graph_is_captured_reserved_rows_may_grow_and_others_not(lend, fake):
    with device_pool() as pool, lend(pool) as lease:
        model = Plain(1)
        step(lease, model, 5)
        lease.reserve(16)
        fake.set_capturing(None, True)
        for _ in range(11):
            step(lease, model, 1)
        with pytest.raises(DeviceError, match="CUDA graph capture; reserve the tokens"):
            lease.update(0, some(1, 1), some(1, 1))
        fake.set_capturing(None, False)
        assert same(lease, model)
        step(lease, model, 1)
        assert same(lease, model)


def test_a_forked_child_makes_no_call_of_the_device(lend, fake):
    with device_pool() as pool:
        lease, model = lend(pool), Plain(1)
        step(lease, model, 20)
        calls = fake.calls()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(RuntimeError, match="forked"):
                    lease.lease.layer(0)
                del lease, pool
                code = int(fake.calls() != calls)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert same(lease, model)
        lease.release()


@pytest.mark.parametrize("bad", [PAGE // 2, 3 * PAGE])
def test_page_bytes_that_the_driver_cannot_do_are_refused(fake, bad):
    with pytest.raises(ValueError, match=f"multiple of {PAGE} here, got {bad}"):
        device_pool(page_bytes=bad)
    assert device_pool(page_bytes=4 * PAGE).close() is None


def test_tensors_of_the_host_and_of_other_devices_are_refused(lend, fake):
    with device_pool() as pool, lend(pool) as lease:
        for tensor in (some(1, 2), as_cuda(some(1, 2), 1)):
            with pytest.raises(ValueError, match="on cuda:0, where the pool is, got"):
                lease.lease.update(0, tensor, tensor)
        assert lease.lengths == [0]


def test_cuda_without_a_number_is_the_first_device_where_torch_has_none_of_its_own(fake):
    """This torch is built for the CPU: it cannot tell its current device."""
    with small_pool(device="cuda") as pool:
        assert pool.device == torch.device("cuda:0")
    for device in ("cuda", "cuda:0"):
        fake.fail_at(0, LAUNCH_FAILURE)
        with pytest.raises(DeviceError, match="failed with code 719"):
            small_pool(device=device)
    fake.fail_at(-1, 0)


def test_who_needs_the_pool_while_another_thread_trims_lets_other_threads_run(lend, fake, request):
    """The trim waits for the device, which the test holds, and nobody is made to give up the
    interpreter's lock: whoever waited for the trim with it would stop the test for ever."""
    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1000)
    uses: list[Callable[[KVPool, KVLease], object]] = [
        lambda pool, lease: pool.stats(),
        lambda pool, lease: pool.would_fit(1, 8),
        lambda pool, lease: pool.acquire(1).release(),
        lambda pool, lease: pool.trim(),
        lambda pool, lease: lease.crop(3),
        lambda pool, lease: lease.lengths,
        lambda pool, lease: lease.release(),
    ]
    for use in uses:
        with device_pool() as pool:
            lease, other = lend(pool, 2), lend(pool, 2)
            for filled in (lease, other):
                step(filled, Plain(2), 20)
            other.release()
            begun = threading.Event()

            def wait(use=use, pool=pool, lease=lease, begun=begun) -> None:  # type: ignore[no-untyped-def]
                begun.set()
                use(pool, lease.lease)

            fake.hold(True)
            threads = [threading.Thread(target=pool.trim), threading.Thread(target=wait)]
            threads[0].start()
            fake.await_held(1)
            threads[1].start()
            begun.wait()
            fake.hold(False)
            for thread in threads:
                thread.join()
            assert pool._check()
            del lease, other, wait, threads
