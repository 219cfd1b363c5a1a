"""Guards of a real device, and its figures beside torch's: run by `make test-gpu` where there is
one."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

import memtools

MIB = 2**20
UNUSED = """
import torch, memtools
monitor = memtools.MemoryMonitor(interval_ms=1, device="cuda", leaks=False)
monitor.guard(0.5, device="cuda")
with monitor:
    while monitor.samples_taken < 50:
        monitor.step()
    assert memtools.device_memory().allocated is None
assert not torch.cuda.is_initialized()
"""


def wait(monitor: memtools.MemoryMonitor, samples: int = 60) -> None:
    seen = monitor.samples_taken
    while monitor.samples_taken < seen + samples:
        time.sleep(0.001)


def test_the_figures_are_torchs_and_the_drivers() -> None:
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    memory = memtools.device_memory()
    free, total = torch.cuda.mem_get_info()
    assert memory.allocated == torch.cuda.memory_allocated() >= kept.nbytes
    assert memory.reserved == torch.cuda.memory_reserved()
    assert (memory.free, memory.total) == (free, total)
    assert memory.others is not None
    assert memory.others >= 100 * MIB, "the context of this process itself"
    assert str(memtools.device_memory("cuda:0")) == str(memory)


def test_a_guard_raises_before_the_device_is_full_and_training_can_go_on() -> None:
    """The watermark lies 1 GiB above what is in use now, and each step takes 64 MiB."""
    torch.empty(1, device="cuda")
    torch.cuda.empty_cache()
    memory = memtools.device_memory()
    assert memory.used is not None
    assert memory.total is not None
    kept: list[torch.Tensor] = []

    def fill() -> None:
        for _ in range(64):
            kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
            wait(monitor)
            monitor.step()

    monitor = memtools.MemoryMonitor(interval_ms=1, device="cuda:0", leaks=False)
    monitor.guard((memory.used + 1024 * MIB) / memory.total, device="cuda:0")
    with monitor:
        wait(monitor)
        monitor.step()
        with pytest.raises(memtools.DeviceMemoryPressure, match="device memory runs out at step"):
            fill()
        assert 16 <= len(kept) <= 20
        kept.clear()
        monitor.step()


def test_a_peak_within_a_step_counts() -> None:
    torch.empty(1, device="cuda")
    memory, told = memtools.device_memory(), []
    assert memory.used is not None
    assert memory.total is not None
    with memtools.MemoryMonitor(interval_ms=1, device="cuda:0", leaks=False) as monitor:
        share = (memory.used + 512 * MIB) / memory.total
        monitor.on_pressure(share, told.append, device="cuda:0")
        wait(monitor)
        activations = torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
        wait(monitor)
        del activations
        wait(monitor)
        monitor.step()
    (pressure,) = told
    assert pressure.device == 0
    assert pressure.used_bytes >= memory.used + 1000 * MIB


def test_a_guard_makes_no_context() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
