"""Recording from a CUDA device, the fake runtime or a GPU: nothing waits, nothing is lost."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from memtools import Budget, DeviceError, GateHistory, KVPool, _core
from memtools._base import torch as base_torch
from tests.kit.cudadevice import Device
from tests.kit.fakecuda import FakeRuntime, as_cuda, as_host

pytestmark = pytest.mark.slow


def make(rows: int = 16, experts: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, experts), -1).to(dtype)


@pytest.fixture
def history(device: Device) -> Iterator[GateHistory]:
    """A history that has made its stage: only the first append allocates, and may wait for that."""
    with_stage = GateHistory()
    with_stage.append(device.put(make()))
    with_stage.clear()
    with_stage.reset_stats()
    assert not with_stage
    yield with_stage
    with_stage.close()


def test_appends_return_before_the_device_has_done_anything(device: Device, history: GateHistory):
    tensors = [make() for _ in range(100)]
    gates = [device.put(tensor) for tensor in tensors]
    device.keep_busy()
    history.extend(gates)
    assert not device.waited()
    assert (len(history), history.pending, bool(history)) == (100, 100, True)
    assert history.nbytes == 100 * 16 * 8 * 4
    assert torch.equal(torch.cat(history), torch.cat(tensors))
    assert device.waited()
    assert (history.pending, history.device_waits) == (0, 0)


def test_an_append_gets_what_a_pool_holds_idle(fake_cuda: FakeRuntime):
    budget = Budget("1 MiB")
    pool = KVPool(1, 4, 64, max_tokens=256, max_sequences=16, dtype="float32", limit=budget)
    with pool.acquire(16, 16) as lease:
        lease.update(0, *torch.rand(2, 16, 4, 16, 64))
    idle = pool.stats().idle_bytes
    assert idle == budget.used > 0
    history = GateHistory(max_bytes=budget)
    tensors = [make(4096) for _ in range(7)]
    for tensor in tensors:
        history.append(as_cuda(tensor))
    assert len(history) == 7
    assert torch.equal(torch.cat(history), torch.cat(tensors))
    assert pool.stats().idle_bytes < idle
    assert budget.used <= 2**20


def test_reading_waits_for_just_what_it_reads(fake_cuda: FakeRuntime):
    history = GateHistory()
    tensors = [make() for _ in range(5)]
    for tensor in tensors:
        history.append(as_cuda(tensor))
    assert torch.equal(history[1], tensors[1])
    assert (history.pending, fake_cuda.host_syncs()) == (3, 2)
    assert history.stats().tokens == 5 * 16
    assert history.pending == 0


def test_what_has_arrived_is_taken_by_the_next_append_without_waiting(fake_cuda: FakeRuntime):
    history = GateHistory()
    for _ in range(4):
        history.append(as_cuda(make()))
        fake_cuda.run_all()
    assert (history.pending, fake_cuda.host_syncs()) == (1, 0)


def test_a_later_write_on_the_stream_does_not_change_the_entry(
    device: Device, history: GateHistory
):
    wanted = make()
    gates, zeros = device.put(wanted.clone()), device.put(torch.zeros_like(wanted))
    device.keep_busy()
    history.append(gates)
    device.write(gates, zeros)
    assert not device.waited()
    assert not device.get(gates).any()
    assert torch.equal(history[0], wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"keep": "topk", "top_k": 2}])
def test_records_and_statistics_are_those_of_the_host_tensor(device, dtype, options):
    ours, theirs = GateHistory(**options), GateHistory(**options)
    for n in range(1, 6):
        tensor = make(n, 8, dtype)
        ours.append(device.put(tensor))
        theirs.append(tensor)
    assert ours.stats() == theirs.stats()
    assert ours.windows() == theirs.windows()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_evicted_before_it_arrived_it_still_counts(device: Device):
    history = GateHistory(max_entries=2, trim="oldest")
    tensors = [make() for _ in range(9)]
    for tensor in tensors:
        history.append(device.put(tensor))
    assert history.pending == 9
    assert history.stats().tokens == 9 * 16
    assert torch.equal(torch.cat(history), torch.cat(tensors[-2:]))


def test_host_and_device_entries_mix_in_order(device: Device):
    history = GateHistory()
    tensors = [make() for _ in range(6)]
    for n, tensor in enumerate(tensors):
        history.append(device.put(tensor) if n % 2 else tensor)
    assert torch.equal(history[4], tensors[4])
    assert [torch.equal(a, b) for a, b in zip(history, tensors, strict=True)] == [True] * 6
    assert history.stats().entries == 6


def test_slices_copies_and_clear_see_what_was_in_flight(device: Device):
    history = GateHistory()
    tensors = [make() for _ in range(4)]
    for tensor in tensors:
        history.append(device.put(tensor))
    part = history[1:3]
    assert torch.equal(torch.cat(part), torch.cat(tensors[1:3]))
    history.append(device.put(tensors[0]))
    history.clear()
    assert (len(history), history.stats().entries) == (0, 5)


def test_two_devices_one_history(fake_cuda: FakeRuntime):
    history = GateHistory()
    tensors = [make() for _ in range(4)]
    for n, tensor in enumerate(tensors):
        history.append(as_cuda(tensor, device=n % 2))
    assert fake_cuda.device() == 0
    assert torch.equal(torch.cat(history), torch.cat(tensors))


def test_an_entry_larger_than_the_stage_gets_a_larger_stage(fake_cuda: FakeRuntime):
    history = GateHistory(max_bytes="64 MiB")
    small, large = make(), make(300_000, 8)
    history.append(as_cuda(small))
    history.append(as_cuda(large))
    assert torch.equal(history[1], large)
    assert torch.equal(history[0], small)


def test_a_device_far_behind_makes_append_wait_and_is_counted(fake_cuda: FakeRuntime):
    history = GateHistory(max_entries=10)
    tensor = as_cuda(make())
    for _ in range(1100):
        history.append(tensor)
    assert history.device_waits == 1100 - 1024
    assert history.stats().entries == 1100


def test_pinned_memory_stays_flat(fake_cuda: FakeRuntime):
    fake_cuda.set_eager(True)
    history = GateHistory(max_entries=10)
    tensor = as_cuda(make())
    history.append(tensor)
    held = fake_cuda.pinned_bytes()
    for _ in range(3000):
        history.append(tensor)
    assert fake_cuda.pinned_bytes() == held
    assert history.device_waits == 0


@pytest.mark.parametrize("shim", ["with", "without"])
@pytest.mark.parametrize("layout", ["transposed", "column_step", "row_step", "expanded"])
def test_gates_with_gaps_are_packed_before_they_are_fetched(fake_cuda, layout, shim):
    base = torch.rand(16, 16)
    host = {
        "transposed": base.t(),
        "column_step": base[:, ::2],
        "row_step": base[::2],
        "expanded": base[:1].expand(8, 16),
    }[layout]
    packed = []

    def contiguous(tensor: torch.Tensor) -> torch.Tensor:  # torch's CPU build cannot, for cuda
        packed.append(tensor.stride())
        return as_cuda(host.contiguous())

    bridge = base_torch.connect()
    parts = base_torch.parts(torch)
    ops = bridge.shim.ops if bridge.shim else None
    _core._connect(*parts[:5], contiguous, ops if shim == "with" else None)
    try:
        history = GateHistory()
        history.append(as_cuda(host))
    finally:
        _core._connect(*parts, ops)
    assert packed == [host.stride()]
    assert torch.equal(history[0], host)


def test_zero_rows_on_the_device_need_no_copy(device: Device):
    history = GateHistory()
    history.append(device.put(make(0)))
    assert (len(history), history.pending, history[0].shape) == (1, 0, (0, 8))


@pytest.mark.parametrize("first", ["first", "later"])
def test_a_failure_at_any_runtime_call_records_nothing(fake_cuda: FakeRuntime, first):
    tensors = [make(), make()]
    failures, n = 0, 0
    while True:
        history = GateHistory()
        if first == "later":
            history.append(as_cuda(tensors[0]))
        before = (len(history), history.nbytes, history.appended)
        fake_cuda.reset()
        fake_cuda.fail_at(n, 719)
        try:
            history.append(as_cuda(tensors[1]))
        except (DeviceError, MemoryError) as error:
            assert "\n" not in str(error)
            failures += 1
            assert (len(history), history.nbytes, history.appended) == before
        fired = fake_cuda.faults()
        fake_cuda.fail_at(-1, 0)
        history.append(as_cuda(tensors[1]))
        assert torch.equal(history[-1], tensors[1])
        history.close()
        if not fired:
            break
        n += 1 if n < 40 else 50  # a new stage makes a thousand events, all alike
    assert failures >= (40 if first == "first" else 6)


def test_a_failed_first_append_does_not_fix_the_number_of_experts(fake_cuda: FakeRuntime):
    history = GateHistory()
    fake_cuda.fail_at(0, 2)
    with pytest.raises((DeviceError, MemoryError)):
        history.append(as_cuda(make(4, 8)))
    fake_cuda.fail_at(-1, 0)
    history.append(as_cuda(make(4, 5)))
    assert history.n_experts == 5


@pytest.mark.parametrize("first", ["first", "later"])
def test_refused_during_graph_capture(device: Device, first):
    history = GateHistory()
    gates = device.put(make())
    if first == "later":
        history.append(gates)
    before = len(history)
    with device.capturing(), pytest.raises(DeviceError, match="CUDA graph capture"):
        history.append(gates)
    assert len(history) == before
    history.append(gates)
    assert torch.equal(history[-1], device.get(gates))


@pytest.mark.parametrize("bad", ["experts", "rank", "size"])
def test_what_is_refused_on_the_host_is_refused_on_the_device(fake_cuda: FakeRuntime, bad):
    history = GateHistory(max_bytes=4096)
    history.append(as_cuda(make()))
    tensor = {"experts": make(4, 9), "rank": torch.rand(3), "size": make(4096, 8)}[bad]
    calls = fake_cuda.calls()
    with pytest.raises((ValueError, MemoryError)):
        history.append(as_cuda(tensor))
    assert (len(history), fake_cuda.calls()) == (1, calls)


def test_closing_and_dropping_with_copies_in_flight(fake_cuda: FakeRuntime):
    history = GateHistory()
    history.append(as_cuda(make()))
    history.close()
    dropped = GateHistory()
    dropped.append(as_cuda(make()))
    del dropped
    gc.collect()
    assert fake_cuda.queued() == 0


def test_a_forked_child_loses_what_was_in_flight_and_says_so(fake_cuda: FakeRuntime):
    history = GateHistory()
    history.append(make())
    history.append(as_cuda(make()))
    calls = fake_cuda.calls()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert len(history) == 2
            assert history[0].shape == (16, 8)
            for use in (lambda: history[1], lambda: torch.cat(history)):
                with pytest.raises(DeviceError, match="forked"):
                    use()
            history.append(make())
            assert history[2].shape == (16, 8)
            del history
            assert fake_cuda.calls() == calls
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert history[1].shape == (16, 8)


FULL = 1024  # copies that a stage holds: the next append waits for the oldest


@contextmanager
def waiting(fake_cuda: FakeRuntime, call: Callable[[], object]) -> Iterator[list[Exception]]:
    """Runs call in a thread, which is known to wait for the device inside of the block; the list
    holds what it raised once the block is over."""
    raised: list[Exception] = []

    def body() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    fake_cuda.hold(True)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        fake_cuda.await_held(1)
        yield raised
    finally:
        fake_cuda.hold(False)
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"


def close_elsewhere(history: GateHistory) -> threading.Thread:
    """Another thread closes the history; it goes on to wait for those who wait for the device."""
    closer = threading.Thread(target=history.close, daemon=True)
    closer.start()
    while not history.closed:
        pass
    return closer


def full_of_copies(**options: object) -> GateHistory:
    history = GateHistory(max_entries=4000, **options)
    for _ in range(FULL):
        history.append(as_cuda(torch.full((64, 8), 2.0)))
    return history


def test_a_host_append_while_a_device_append_waits_gets_a_number_of_its_own(fake_cuda):
    history = full_of_copies()
    gates = as_cuda(torch.full((64, 8), 3.0))
    with waiting(fake_cuda, lambda: history.append(gates)) as raised:
        history.append(torch.full((1, 8), 1.0))
    assert (raised, history.device_waits) == ([], 1)
    assert [entry.shape[0] for entry in history] == [64] * FULL + [1, 64]
    assert [entry.unique().item() for entry in history] == [2.0] * FULL + [1.0, 3.0]
    assert history.stats().tokens == 64 * (FULL + 1) + 1


def test_experts_fixed_while_a_first_device_append_waits_refuse_it(fake_cuda: FakeRuntime):
    history = GateHistory()
    fake_cuda.set_capturing(None, True)
    with pytest.raises(DeviceError):  # leaves a stage on cuda:0, and no entry
        history.append(as_cuda(make(4, 8)))
    fake_cuda.set_capturing(None, False)
    gates = as_cuda(make(4, 8), device=1)
    with waiting(fake_cuda, lambda: history.append(gates)) as raised:
        history.append(torch.ones(2, 5))
    assert [type(error) for error in raised] == [ValueError]
    assert "5" in str(raised[0])
    assert [entry.shape for entry in history] == [(2, 5)]


def test_a_history_that_is_cleared_while_a_device_append_waits(fake_cuda: FakeRuntime):
    history = full_of_copies(max_bytes=Budget("16 MiB"))
    gates = as_cuda(torch.full((64, 8), 3.0))
    with waiting(fake_cuda, lambda: history.append(gates)) as raised:
        history.clear()
    assert (raised, len(history)) == ([], 1)
    assert torch.equal(history[0], torch.full((64, 8), 3.0))
    assert history.stats().entries == FULL + 1


def test_a_history_that_is_closed_while_a_device_append_waits(fake_cuda: FakeRuntime):
    budget = Budget("16 MiB")
    history = full_of_copies(max_bytes=budget)
    gates = as_cuda(torch.full((64, 8), 3.0))
    with waiting(fake_cuda, lambda: history.append(gates)) as raised:
        closer = close_elsewhere(history)
    closer.join(timeout=60)
    assert [str(error) for error in raised] == ["this GateHistory is closed"]
    assert budget.used == 0


READS: dict[str, Callable[[GateHistory], object]] = {
    "item": lambda history: history[0],
    "slice": lambda history: history[0:1],
    "cat": torch.cat,  # type: ignore[dict-item]
    "stats": lambda history: history.stats(),
    "copy": copy.copy,
}


@pytest.mark.parametrize("read", READS)
def test_a_history_that_is_closed_while_a_read_waits(fake_cuda: FakeRuntime, read):
    history = GateHistory()
    history.append(as_cuda(make()))
    with waiting(fake_cuda, lambda: READS[read](history)) as raised:
        closer = close_elsewhere(history)
    closer.join(timeout=60)
    assert [str(error) for error in raised] == ["this GateHistory is closed"]


def test_a_child_forked_while_another_thread_frees_the_stage_records_on(fake_cuda: FakeRuntime):
    history = GateHistory(max_bytes=Budget("64 MiB"))
    history.append(as_cuda(make()))
    assert history[0].shape == (16, 8)  # nothing is pending: the wait is that of freeing the stage
    larger = as_cuda(make(300_000, 8))  # wants another stage
    with waiting(fake_cuda, lambda: history.append(larger)) as raised:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits for ever
            history.append(make())
            history.clear()
            history.close()
            os._exit(0)
    assert (os.waitpid(child, 0)[1], raised) == (0, [])
    assert torch.equal(history[1], as_host(larger))
