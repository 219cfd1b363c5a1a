"""The out-of-memory observer, called as torch calls it; tests/gpu has it on a device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtools
from memtools._monitor import oom

GIB = 2**30


class FakeCuda:
    """torch's side: it keeps observers for good, and calls them with four integers each time an
    allocation fails, then raises. What an observer raises takes the place of its own error."""

    def __init__(self) -> None:
        self.observers: list[Callable[[int, int, int, int], object]] = []
        self.is_initialized = True

    def attach(self, observer: Callable[[int, int, int, int], object]) -> None:
        self.observers.append(observer)

    def fail(self, asked: int = 3 * GIB, device: int = 0) -> None:
        for observer in self.observers:
            observer(device, asked, 79 * GIB, GIB // 2)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def stats(self, device: int) -> dict[str, Any]:
        return {
            "allocated_bytes": {"all": {"current": 70 * GIB, "peak": 71 * GIB}},
            "reserved_bytes": {"all": {"current": 75 * GIB, "peak": 76 * GIB}},
            "inactive_split_bytes": {"all": {"current": GIB, "peak": GIB}},
        }

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        assert not include_traces  # traces can be gigabytes
        sizes = {9 * GIB: "active_allocated", GIB: "inactive", GIB // 4: "inactive"}
        blocks = [{"size": size, "state": state} for size, state in sizes.items()]
        other = [{"size": 50 * GIB, "state": "inactive"}]
        return [{"device": 0, "blocks": blocks}, {"device": 1, "blocks": other}]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch._C, oom._HOOK, fake.attach, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.is_initialized)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fake.stats)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", fake.snapshot)
    return fake


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> oom.Observer:
    made = oom.Observer()
    monkeypatch.setattr(oom, "observer", made)
    return made


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[memtools.MemoryMonitor]:
    made = memtools.MemoryMonitor(tmp_path / "run.mem", leaks=False, device="cpu")
    with made:
        yield made


def events(monitor: memtools.MemoryMonitor, kind: str) -> list[str]:
    assert monitor.record_path is not None
    record = memtools.read_record(monitor.record_path)
    return [event.text for event in record.events if event.kind == kind]


def test_tiers_largest_block_and_phase_are_recorded_before_the_exception(cuda, observer, monitor):
    observer.follow(monitor)
    with monitor.phase("train"), monitor.phase("forward"), pytest.raises(torch.OutOfMemoryError):
        cuda.fail()
    assert events(monitor, "oom") == [
        "cuda:0: no 3.00 GiB: allocated 70.0 GiB, reserved 75.0 GiB, free 512.0 MiB of 79.0 GiB; "
        "largest free block 1.00 GiB; in phase forward"
    ]


class Buffer:
    """Holds what the holder lines are to name."""


def pages_never_touched(count: int, width: int) -> list[torch.Tensor]:
    """Tensors that are larger than what any other test keeps alive, and cost no memory."""
    return [torch.empty(4111, width) for _ in range(count)]


@pytest.mark.slow
def test_the_biggest_holders_are_named(cuda, observer, monitor, monkeypatch):
    monkeypatch.setattr(oom, "SLOW_CENSUS", 3600.0)  # however long it takes here and now
    buffer = Buffer()
    buffer.kept = pages_never_touched(40, 4093)
    (most, *more) = oom.tensors_on("cpu")
    kept = "40 [4111, 4093] float32 tensors, 2.51 GiB, most held by list Buffer.kept"
    assert most.sentence() == kept
    assert len(more) <= oom.GROUPS - 1
    assert list(oom.tensors_on("cuda:0")) == []


def test_holders_go_into_the_record(cuda, observer, monitor, monkeypatch):
    lines = ["a", "b" * 400]
    monkeypatch.setattr(oom, "tensors_on", lambda device: [f"{device} {x}" for x in lines])
    observer.follow(monitor)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.fail(device=1)
    found = events(monitor, "holder")
    assert found[0] == "cuda:1 a"
    assert found[1].startswith("cuda:1 bbb")


def test_a_slow_census_is_not_followed_by_passes_that_take_ten_times_as_long(monkeypatch):
    kept = pages_never_touched(40, 4091)
    monkeypatch.setattr(oom, "SLOW_CENSUS", 0.0)
    (most, *_) = oom.tensors_on("cpu")
    assert most.sentence() == "40 [4111, 4091] float32 tensors, 2.51 GiB"
    assert len(kept) == 40


def test_it_is_attached_once_and_only_when_the_program_has_a_context(cuda, observer, monitor):
    cuda.is_initialized = False
    observer.follow(monitor)
    assert cuda.observers == []
    assert not observer.attach()
    cuda.is_initialized = True
    assert observer.attach()
    assert observer.attach()
    observer.follow(monitor)
    assert cuda.observers == [observer]


def test_a_monitor_of_devices_attaches_it_at_the_start_or_at_a_safe_point(
    cuda, observer, monkeypatch
):
    monkeypatch.setattr("memtools._base.devices.find_devices", lambda device, root: (0,))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GIB, 79 * GIB))
    cuda.is_initialized = False
    with memtools.MemoryMonitor(leaks=False) as monitor:
        monitor.step()
        assert cuda.observers == []
        cuda.is_initialized = True
        monitor._live.due = 0
        monitor.step()
        assert cuda.observers == [observer]
    with memtools.MemoryMonitor(leaks=False):
        assert len(cuda.observers) == 1


def test_many_failures_are_one_event_a_second_with_their_number(
    cuda, observer, monitor, monkeypatch
):
    clock = [100.0]
    monkeypatch.setattr(oom.time, "monotonic", lambda: clock[0])
    looks = []
    monkeypatch.setattr(oom, "tensors_on", lambda device: looks.append(device) or [])
    observer.follow(monitor)
    for now in (100.0, 100.1, 100.9, 101.0, 129.0, 130.0):
        clock[0] = now
        with pytest.raises(torch.OutOfMemoryError):
            cuda.fail()
    found = events(monitor, "oom")
    assert [text.partition("largest free block 1.00 GiB")[2] for text in found] == [
        "", "; 2 more before", "", ""
    ]  # fmt: skip
    assert len(looks) == 2


def test_it_holds_no_monitor_and_a_stopped_one_gets_nothing(cuda, observer, tmp_path):
    monitor = memtools.MemoryMonitor(tmp_path / "run.mem", leaks=False)
    with monitor:
        observer.follow(monitor)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.fail()
    assert events(monitor, "oom") == []
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None
    with pytest.raises(torch.OutOfMemoryError):
        cuda.fail()


@pytest.mark.parametrize("error", [RuntimeError("no"), MemoryError(), KeyboardInterrupt()])
def test_nothing_it_does_takes_the_place_of_the_error(cuda, observer, monitor, monkeypatch, error):
    def broken(device: int) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", broken)
    observer.follow(monitor)
    with (
        pytest.warns(RuntimeWarning, match="the event of an out-of-memory error failed"),
        pytest.raises(torch.OutOfMemoryError),
    ):
        cuda.fail()
    assert not observer._is_busy


def test_a_failure_within_it_does_not_begin_it_again(cuda, observer, monitor, monkeypatch):
    def fails_too(device: int) -> dict[str, Any]:
        with pytest.raises(torch.OutOfMemoryError):
            cuda.fail()
        return cuda.stats(device)

    monkeypatch.setattr(oom, "EVENT_EVERY", 0.0)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fails_too)
    observer.follow(monitor)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.fail()
    assert len(events(monitor, "oom")) == 1


def test_an_allocator_without_observers_is_said_once(cuda, observer, monitor, monkeypatch):
    def refuse(observer: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support it")

    monkeypatch.setattr(torch._C, oom._HOOK, refuse)
    with pytest.warns(RuntimeWarning, match="out of device memory is not recorded: CUDAPluggable"):
        observer.follow(monitor)
    assert observer.attach()


def test_an_older_torch_has_snapshots_with_traces_only(cuda):
    def older() -> list[dict[str, Any]]:
        return cuda.snapshot(include_traces=False)

    assert oom.largest_free(torch, 0) == GIB
    torch.cuda.memory_snapshot = older  # the fixture puts it back
    assert oom.largest_free(torch, 1) == 50 * GIB
    assert oom.largest_free(torch, 2) == 0
