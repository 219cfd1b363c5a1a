"""GateHistory with gates that lie on a GPU: run by `make test-gpu` on a machine that has one.

How to read the proofs of "does not wait": `busy()` keeps the current stream busy for about a second
and returns an event behind that. While the event has not been reached, nothing has waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_are_those_of_cpu(dtype: torch.dtype) -> None:
    history = history_of()
    wanted = []
    for rows in (1, 7, 512, 0, 64):
        gates = gates_of(rows, dtype=dtype)
        history.append(gates)
        wanted.append(gates.cpu())
    assert len(history) == 5
    for read, gates in zip(history, wanted, strict=True):
        assert read.device.type == "cpu"
        assert read.dtype == dtype
        assert torch.equal(read, gates)


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


def test_gates_keep_their_graph_and_the_record_has_none() -> None:
    logits = torch.randn(16, 8, device=CUDA, requires_grad=True)
    gates = logits.softmax(-1)
    history = history_of()
    history.append(gates)
    gates.square().sum().backward()
    assert logits.grad is not None
    assert not history[0].requires_grad
    assert torch.equal(history[0], gates.detach().cpu())


def test_cpu_and_cuda_entries_keep_their_order() -> None:
    history = history_of()
    entries = [gates_of() if i % 3 else gates_of().cpu() for i in range(20)]
    for gates in entries:
        history.append(gates)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(history, entries, strict=True))


# --- nobody waits ---------------------------------------------------------------------------------


def test_append_does_not_wait_for_the_device(history: memtools.GateHistory) -> None:
    gates = gates_of()
    behind = busy()
    history.append(gates)
    assert not behind.query()
    assert history.pending == 1
    assert torch.equal(history[0], gates.cpu())
    assert behind.query()
    assert history.device_waits == 0


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


def test_a_hundred_appends_fit_behind_a_busy_device(history: memtools.GateHistory) -> None:
    gates = gates_of(16, 8)
    behind = busy()
    for _ in range(100):
        history.append(gates)
    assert not behind.query()
    assert len(history) == 100
    assert history.device_waits == 0


# --- the record is the value at append ------------------------------------------------------------


def test_a_later_write_in_place_changes_nothing(history: memtools.GateHistory) -> None:
    gates = gates_of()
    wanted = gates.cpu()
    busy()
    history.append(gates)
    gates.zero_()
    assert torch.equal(history[0], wanted)


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


def test_both_limits_hold_at_every_append() -> None:
    history = memtools.GateHistory(max_entries=10, max_bytes=20_000)
    for rows in (1, 10, 100, 200, 50, 3) * 5:
        history.append(gates_of(rows, 8))
        assert len(history) <= 10
        assert history.nbytes <= 20_000
    assert history.appended == 30


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


# --- statistics -----------------------------------------------------------------------------------


def test_statistics_are_torchs() -> None:
    history = history_of(max_entries=4)  # most of it is evicted
    entries = [gates_of(rows, 16) for rows in (300, 1, 77, 512, 5, 64, 9)]
    for gates in entries:
        history.append(gates)
    everything = torch.cat(entries).double().cpu()
    stats = history.stats()
    load = torch.bincount(everything.argmax(-1), minlength=16)
    assert stats.tokens == len(everything)
    assert list(stats.load) == load.tolist()
    assert stats.importance == pytest.approx(everything.mean(0).tolist(), rel=1e-12)
    assert stats.cv == pytest.approx(float(load.double().std(correction=0) / load.double().mean()))


def test_non_finite_gates_are_recorded_and_counted() -> None:
    history = history_of()
    gates = gates_of(8, 4)
    gates[3, 1] = float("nan")
    history.append(gates)
    assert history.stats().nonfinite_tokens == 1
    assert torch.equal(history[0].isnan(), gates.isnan().cpu())


# --- a list of tensors ----------------------------------------------------------------------------


def test_it_reads_like_a_list() -> None:
    history = history_of()
    assert not history
    entries = [gates_of(4, 8) for _ in range(6)]
    for gates in entries:
        history.append(gates)
    assert history
    assert torch.equal(history[-1], entries[-1].cpu())
    assert torch.equal(torch.cat(history, dim=0), torch.cat(entries).cpu())
    assert torch.equal(torch.stack(history), torch.stack(entries).cpu())
    tail = history[-2:]
    assert isinstance(tail, memtools.GateHistory)
    assert torch.equal(torch.cat(tail), torch.cat(entries[-2:]).cpu())
    history.clear()
    assert len(history) == 0
    with pytest.raises(IndexError):
        history[0]


def test_records_may_be_rounded_or_cut_to_the_largest() -> None:
    gates = gates_of(32, 8)
    half = history_of(dtype="float16")
    half.append(gates)
    assert torch.equal(half[0], gates.half().cpu())
    largest = history_of(keep="topk", top_k=2)
    largest.append(gates)
    values, experts = gates.topk(2, dim=-1)
    assert torch.equal(largest[0], torch.zeros_like(gates).scatter(1, experts, values).cpu())


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


def test_a_recomputed_forward_records_nothing_twice() -> None:
    history = history_of()
    linear = torch.nn.Linear(8, 4, device=CUDA)

    def forward(x: torch.Tensor) -> torch.Tensor:
        gates = linear(x).softmax(-1)
        history.append(gates)
        return gates * gates

    x = torch.randn(16, 8, device=CUDA, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False).sum().backward()
    assert len(history) == 1


def test_the_auxiliary_loss_reaches_the_gate() -> None:
    aux = memtools.AuxLoss()
    logits = torch.randn(16, 8, device=CUDA, requires_grad=True)
    aux.add(logits.softmax(-1).square().mean())
    (torch.zeros((), device=CUDA) + 0.01 * aux.total()).backward()
    aux.reset()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False], ids=["first append", "later append"])
def test_append_under_capture_is_refused_and_spoils_nothing(fresh: bool) -> None:
    history = history_of()
    gates = gates_of()
    if not fresh:
        history.append(gates)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = gates * 2
        with pytest.raises(RuntimeError, match="capture"):
            history.append(gates)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(doubled, gates * 2)
    assert len(history) == (0 if fresh else 1)
    history.append(gates)
    assert torch.equal(history[-1], gates.cpu())


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
