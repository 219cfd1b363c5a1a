"""on_pressure and guard of a device: by what is allocated and what others have of it, before torch
runs out. A made-up device, which takes a program of its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import memtools
from memtools import DeviceMemoryPressure, HostMemoryPressure, MemoryMonitor, read_record
from tests.kit.fakedevice import FakeCuda, cuda
from tests.kit.madeupdevice import Program, device_program

__all__ = ["cuda", "device_program"]
GIB = 2**30


@pytest.mark.slow
def test_a_guard_raises_before_the_device_is_full(device_program: Program, tmp_path: Path) -> None:
    device_program("""
        monitor = MemoryMonitor("run.mem", interval_ms=1, device="cuda", leaks=False)
        monitor.guard(0.9, device="cuda:0")
        with monitor:
            monitor.step()
            device.begin()
            for step in range(36):  # 1 GiB a step, beside 2 GiB that others have
                device.hold((step + 1) * GIB, cached=GIB // 2, others=2 * GIB)
                settle(monitor, device)
                try:
                    monitor.step()
                except DeviceMemoryPressure as error:
                    assert isinstance(error, MemoryPressure) and isinstance(error, MemtoolsError)
                    assert not isinstance(error, HostMemoryPressure)
                    assert step == 33, step
                    assert str(error) == (
                        "device memory runs out at step 35: 36.0 GiB of 40.0 GiB used (90.0%; "
                        "cuda:0, 2.00 GiB of it held by others), watermark 90%; save a checkpoint, "
                        "release what is kept on the device, or use smaller micro-batches"
                    ), error
                    break
            else:
                raise AssertionError("it did not act")
            monitor.step()  # once for a crossing
    """)
    record = read_record(tmp_path / "run.mem")
    texts = {event.kind: event.text for event in record.events}
    assert texts["pressure"] == "90.0 % of the limit passed: 36864 of 40960 MiB (cuda:0)"
    assert texts["guard"].startswith("raise: 36.0 GiB of 40.0 GiB used (90.0%; cuda:0")


@pytest.mark.slow
def test_what_comes_and_goes_within_a_step_counts(device_program: Program) -> None:
    """Activations: by the end of the step they are free again, and torch keeps them reserved."""
    device_program("""
        told = []
        device.begin()
        device.hold(10 * GIB)
        with MemoryMonitor(interval_ms=1, device="cuda", leaks=False) as monitor:
            handle = monitor.on_pressure(0.8, told.append, device="cuda")
            settle(monitor, device)
            for _ in range(3):
                device.hold(35 * GIB)
                settle(monitor, device)
                device.hold(10 * GIB, cached=25 * GIB)
                settle(monitor, device)
                monitor.step()
            assert [p.used_bytes for p in told] == [35 * GIB] * 3, told
            first = told[0]
            assert (first.device, first.limit_bytes, first.fraction) == (0, 40 * GIB, 0.8)
            assert first.stalled_percent is None
            handle.remove()
            device.hold(39 * GIB)
            settle(monitor, device)
            monitor.step()
            assert len(told) == 3
    """)


@pytest.mark.slow
def test_what_torch_gave_back_is_nobody_elses(device_program: Program) -> None:
    """empty_cache() of 25 GiB: between two readings of the driver they would seem to be others'."""
    device_program("""
        told = []
        device.begin()
        with MemoryMonitor(interval_ms=1, device="cuda", leaks=False) as monitor:
            monitor.on_pressure(0.8, told.append, device=0)
            for _ in range(20):
                device.hold(10 * GIB, cached=25 * GIB)
                settle(monitor, device)
                device.hold(10 * GIB)
                settle(monitor, device)
                monitor.step()
            assert told == [], told
            device.hold(10 * GIB, others=25 * GIB)
            settle(monitor, device)
            monitor.step()
            assert [p.used_bytes for p in told] == [35 * GIB], told
    """)


@pytest.mark.slow
def test_the_summary_and_device_memory_of_it(device_program: Program) -> None:
    out = device_program("""
        with MemoryMonitor(interval_ms=1, device="cuda", leaks=False) as monitor:
            assert device_memory() == DeviceMemory(0, None, None, None, None, None)
            assert device_memory().used is None and device_memory().percent is None
            assert host_memory().pinned is None
            device.begin()
            device.hold(12 * GIB, cached=2 * GIB, others=1 * GIB, pinned=3 * GIB)
            assert host_memory().pinned == 3 * GIB
            settle(monitor, device)
            print(monitor.summary().splitlines()[1])
        for device in (None, "cuda", "cuda:0", 0):
            print(device_memory(device))
        memory = device_memory()
        assert (memory.used, memory.others, memory.percent) == (13 * GIB, GIB, 32.5)
        assert (memory.free, memory.total) == (25 * GIB, 40 * GIB)
    """)
    first, *others = out.splitlines()
    assert first == "  GPU: 12.00/40.00 GB (30.0%), reserved 14.00 GB"
    assert (
        others
        == [
            "cuda:0: 12.0 GiB allocated, 14.0 GiB reserved, 1.00 GiB held by others, "
            "25.0 GiB of 40.0 GiB free"
        ]
        * 4
    )


def monitor(**options: object) -> MemoryMonitor:
    return MemoryMonitor(interval_ms=1, leaks=False, **options)  # type: ignore[arg-type]


def test_a_device_that_is_not_watched_is_said_and_raises_nothing(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.ready = False
    with monitor(device="cuda:1") as m:
        m.guard(0.9, device="cuda:0")
        m.guard(0.8, device="cuda")
        m.guard(0.7, device="cuda:1")
        m.step()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "<guard raise at 90% of cuda:0> cannot act: the monitor watches cuda:1"
    ]


def test_without_any_device_a_script_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    """The same script with and without a GPU."""
    m = monitor(device="cpu")
    m.guard(0.9, device="cuda")
    with m:
        m.step()
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == "<guard raise at 90% of cuda> cannot act: the monitor watches no CUDA device"


def test_a_device_in_use_that_no_thread_can_read_is_said(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """torch says that it is in use; the sampler's thread, without torch's allocator, sees none."""
    with monitor(device="cuda") as m:
        m.guard(0.9, device="cuda:0")
        while m.samples_taken < 3:
            m.step()
    (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "cannot act: torch's counters of cuda:0 could not be read by a thread" in said


def test_devices_that_are_none() -> None:
    m = monitor(device="cpu")
    for device in ("auto", "cuda:8", "tpu", -1, 8, True, 0.5, "cpu:0"):
        with pytest.raises(ValueError, match="device"):
            m.guard(0.9, device=device)
        with pytest.raises(ValueError, match="device"):
            m.on_pressure(0.9, print, device=device)
        with pytest.raises(ValueError, match="device"):
            memtools.device_memory(device)
    for device in ("cpu", torch.device("cpu")):
        assert repr(m.guard(0.9, device=device)) == "<guard raise at 90%>"
        with pytest.raises(ValueError, match="device"):
            memtools.device_memory(device)
    assert repr(m.guard(0.9, device=torch.device("cuda:1"))) == "<guard raise at 90% of cuda:1>"
    assert len(m._watermarks.all) == 3


def test_more_devices_than_there_is_room_for(cuda: FakeCuda) -> None:
    cuda.__init__(8)  # type: ignore[misc]
    m = monitor(device="cuda")
    for _ in range(4):
        m.guard(0.9, "record", device="cuda")
    m.guard(0.9, "record")
    with m:
        m.step()
        with pytest.raises(ValueError, match="5 callbacks and guards are registered already"):
            m.guard(0.9, device="cuda:0")


def test_device_memory_without_a_context(cuda: FakeCuda) -> None:
    cuda.ready = False
    memory = memtools.device_memory("cuda:1")
    assert (memory.index, memory.allocated, memory.free, memory.others) == (1, None, None, None)
    assert str(memory) == "cuda:1: unknown, the program has made no CUDA context"
    assert cuda.calls == 0
    cuda.ready = True
    cuda.allocate(1, 3 * GIB)
    cuda.cached[1], cuda.others[1] = GIB, 2 * GIB
    memory = memtools.device_memory(1)
    assert (memory.allocated, memory.reserved, memory.others) == (3 * GIB, 4 * GIB, 2 * GIB)
    assert (memory.used, memory.free, memory.total) == (5 * GIB, 18 * GIB, 24 * GIB)
    assert (memory.inactive, memory.allocated_peak) == (5, 3 * GIB)
    assert issubclass(DeviceMemoryPressure, memtools.MemoryPressure)
    assert issubclass(HostMemoryPressure, memtools.MemoryPressure)
