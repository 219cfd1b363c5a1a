"""What only a GPU can show of GateHistory: `make test-gpu` runs it, and tests/gate/test_device.py.

How to read the proofs of "does not wait": `busy()` keeps the current stream busy for about a second
and returns an event behind that. While the event has not been reached, nothing has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtools

CUDA = torch.device("cuda")
MIB = 2**20


def gates_of(rows: int = 64, experts: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(rows, experts, device=CUDA).softmax(-1).to(dtype)


def history_of(max_entries: int = 100, **options: Any) -> memtools.GateHistory:
    return memtools.GateHistory(max_entries=max_entries, max_bytes="64 MiB", **options)


def busy() -> torch.cuda.Event:
    torch.cuda._sleep(int(2e9))
    behind = torch.cuda.Event()
    behind.record()
    return behind


@pytest.fixture
def history() -> Iterator[memtools.GateHistory]:
    """A history that has made its stage: only the first append allocates, and may wait for that."""
    with_stage = history_of()
    with_stage.append(gates_of())
    with_stage.clear()
    torch.cuda.synchronize()
    yield with_stage
    with_stage.close()


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1:5],
        lambda x: x[:1].expand(5, -1),
        lambda x: x.unsqueeze(0)[0],
    ],
    ids=["transposed", "every second row", "some columns", "expanded", "view of a view"],
)
def test_a_tensor_need_not_be_contiguous(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gates = cut(gates_of(8, 8))
    history = history_of()
    history.append(gates)
    assert torch.equal(history[0], gates.cpu())


# --- nobody waits ---------------------------------------------------------------------------------


def test_reading_waits_for_just_what_it_reads(history: memtools.GateHistory) -> None:
    first, second = gates_of(), gates_of()
    wanted = first.cpu(), second.cpu()
    history.append(first)
    behind = busy()
    history.append(second)
    assert torch.equal(history[0], wanted[0])
    assert not behind.query()
    assert torch.equal(history[1], wanted[1])
    assert behind.query()


# --- the record is the value at append ------------------------------------------------------------


def test_the_tensor_may_be_freed_at_once(history: memtools.GateHistory) -> None:
    gates = gates_of(512)
    wanted, shape, address = gates.cpu(), gates.shape, gates.data_ptr()
    busy()
    history.append(gates)
    del gates
    others = [torch.full(shape, -1.0, device=CUDA) for _ in range(4)]
    assert address in [other.data_ptr() for other in others]  # the block is used again already
    assert torch.equal(history[0], wanted)


def test_another_stream_is_followed(history: memtools.GateHistory) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        behind = busy()
        gates = gates_of() * 2 + 1  # behind the busy second, on this stream alone
        history.append(gates)
        assert not behind.query()
    read = history[0]
    stream.synchronize()
    assert torch.equal(read, gates.cpu())


def test_streams_may_alternate(history: memtools.GateHistory) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    entries = []
    for i in range(60):
        with torch.cuda.stream(streams[i % 3]):
            entries.append(gates_of(i + 1))
            history.append(entries[-1])
    torch.cuda.synchronize()
    assert all(torch.equal(a, b.cpu()) for a, b in zip(history, entries, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_the_other_gpu_is_recorded_and_the_current_one_stays() -> None:
    history = history_of()
    gates = torch.rand(32, 8, device="cuda:1")
    history.append(gates)
    history.append(gates.to("cuda:0"))
    assert torch.cuda.current_device() == 0
    assert torch.equal(history[0], gates.cpu())
    assert torch.equal(history[1], gates.cpu())


# --- limits and memory ----------------------------------------------------------------------------


def test_thousands_of_appends_keep_memory_flat() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    history = history_of(max_entries=200)
    gates = gates_of(512, 8)
    for _ in range(500):
        history.append(gates)
    history.stats()
    free, _ = torch.cuda.mem_get_info()
    before = resident()
    for _ in range(5000):
        history.append(gates)
    history.stats()
    assert torch.cuda.mem_get_info()[0] >= free - 4 * MIB
    assert resident() <= before + 4 * MIB  # pinned memory is resident too
    assert history.appended == 5500
    assert history.pending == 0


def test_close_with_copies_in_flight_gives_everything_back() -> None:
    gates = gates_of(512, 64)
    history_of().append(gates)
    busy().synchronize()
    free, _ = torch.cuda.mem_get_info()
    for _ in range(20):
        history = history_of()
        history.append(gates)
        busy()
        history.append(gates)
        history.close()
    assert torch.cuda.mem_get_info()[0] >= free - 4 * MIB


def test_what_cannot_be_recorded_is_refused_and_changes_nothing() -> None:
    history = history_of()
    history.append(gates_of(4, 8))
    for refused in (
        torch.zeros(4, 8, dtype=torch.complex64, device=CUDA),
        torch.zeros(4, 8, device=CUDA).to_sparse(),
        torch.zeros(8, device=CUDA),
        torch.zeros(4, 9, device=CUDA),
        torch.zeros(2**22, 8, device=CUDA),
    ):
        with pytest.raises((TypeError, ValueError, memtools.BudgetError)):
            history.append(refused)
    assert len(history) == 1
    assert history.appended == 1


# --- CUDA graphs ----------------------------------------------------------------------------------


def test_reading_during_a_capture_spoils_nothing(history: memtools.GateHistory) -> None:
    gates = gates_of()
    wanted = gates.cpu()
    history.append(gates)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = gates * 2
        assert torch.equal(history[0], wanted)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled.cpu(), wanted * 2)
