"""The out-of-memory observer on a real device: run by `make test-gpu` on a machine that has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memtools
from memtools._monitor import oom

MIB = 2**20


class Keeper:
    """Holds tensors that the holder line is to name."""

    def __init__(self) -> None:
        self.kept = [torch.empty(257, 1021, device="cuda") for _ in range(64)]


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test may leave an event at once; torch keeps the one observer."""
    monkeypatch.setattr(oom, "EVENT_EVERY", 0.0)
    monkeypatch.setattr(oom, "CENSUS_EVERY", 0.0)
    oom.observer._next_event = oom.observer._next_census = 0.0
    yield
    torch.cuda.empty_cache()


def too_much() -> None:
    torch.empty(torch.cuda.get_device_properties(0).total_memory * 2, dtype=torch.int8, device=0)


def texts(path: Path, kind: str) -> list[str]:
    return [event.text for event in memtools.read_record(path).events if event.kind == kind]


def test_the_event_is_there_before_the_exception_and_names_the_holder(tmp_path):
    path, keeper = tmp_path / "run.mem", Keeper()
    with memtools.MemoryMonitor(path, leaks=False) as monitor, monitor.phase("forward"):
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with pytest.raises(torch.OutOfMemoryError):
            too_much()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        (event,) = texts(path, "oom")
        assert event.startswith("cuda:0: no ")
        assert "in phase forward" in event
        assert "largest free block" in event
        holders = texts(path, "holder")
        assert any("64 [257, 1021] float32 tensors" in line for line in holders), holders
        assert any("held by list Keeper.kept" in line for line in holders), holders
    assert len(keeper.kept) == 64


def test_the_largest_free_block_is_that_of_the_allocator(tmp_path):
    torch.cuda.empty_cache()
    parts = [torch.empty(64 * MIB, dtype=torch.int8, device=0) for _ in range(3)]
    del parts[1]
    assert oom.largest_free(torch, 0) >= 64 * MIB
    assert len(parts) == 2


def test_one_in_the_backward_pass_is_seen_too(tmp_path):
    """There the observer runs on a thread of autograd's."""

    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            too_much()
            return grad

    path = tmp_path / "run.mem"
    with memtools.MemoryMonitor(path, leaks=False):
        x = torch.ones(4, device="cuda", requires_grad=True)
        out = Greedy.apply(x).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(torch.OutOfMemoryError):
            out.backward()
    assert len(texts(path, "oom")) == 1


def test_a_monitor_that_began_before_the_context_attaches_at_a_step(tmp_path):
    path = tmp_path / "run.mem"
    with memtools.MemoryMonitor(path, leaks=False) as monitor:
        torch.ones(1, device="cuda")
        monitor.step()
        assert oom.observer.attach()
        with pytest.raises(torch.OutOfMemoryError):
            too_much()
    assert len(texts(path, "oom")) == 1
