"""A CUDA device that says what a test says, in a program of its own: to torch, to the shim's thread
that samples, and by the driver. tests/kit/fakedevice.py is for tests that need no such thread.

    device = MadeUpDevice(allocator, runtime, total=40 << 30)   sees no context yet
    device.begin()                                              the program makes one
    device.hold(allocated, cached=..., others=...)              now and until the next hold()
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memtools import MemoryMonitor
from memtools._base import torch as bridge
from tests.kit.fakecuda import FakeRuntime

PROJECT = Path(__file__).resolve().parents[2]
BEGIN = """
import sys
from memtools import *
from tests.kit.madeupdevice import MadeUpDevice, settle
GIB, MIB = 2**30, 2**20
device = MadeUpDevice(*sys.argv[1:3], total=40 * GIB)
"""


class MadeUpDevice:
    """cuda:0 of this process, for the rest of its life."""

    def __init__(self, allocator: str, runtime: str, total: int) -> None:
        self.total, self.is_begun = total, False
        self.allocated = self.reserved = self.peak = self.others = self.pinned = 0
        self._allocator = ctypes.CDLL(allocator)
        self._runtime = FakeRuntime(Path(runtime))
        self._runtime.reset()
        self._runtime.set_capacity(total)
        bridge.connect()
        self._allocator.fake_allocator_register()
        torch.version.cuda = "13.0"
        for name in ("device_count", "is_initialized", "current_device", "mem_get_info",
                     "memory_stats_as_nested_dict", "reset_peak_memory_stats",
                     "host_memory_stats_as_nested_dict"):  # fmt: skip
            setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def begin(self) -> None:
        """The program makes its CUDA context."""
        self._runtime.set_device(0)
        self._runtime.stream()
        self._allocator.fake_allocator_begin()
        self.is_begun = True

    def hold(self, allocated: int, *, cached: int = 0, others: int = 0, pinned: int = 0) -> None:
        """Bytes in tensors, bytes that torch's allocator keeps beside them, and others'; and on
        the host those that torch has pinned."""
        self.allocated, self.reserved, self.others = allocated, allocated + cached, others
        self.pinned = pinned
        self.peak = max(self.peak, allocated)
        self._put()

    def _put(self) -> None:
        self._runtime.set_taken(self.reserved + self.others)
        figures = (self.allocated, self.reserved, 0, self.peak)
        self._allocator.fake_allocator_set(0, *map(ctypes.c_int64, figures))

    # --- what torch.cuda says ---

    def _device_count(self) -> int:
        return 1

    def _is_initialized(self) -> bool:
        return self.is_begun

    def _current_device(self) -> int:
        assert self.is_begun, "this would have made a CUDA context"
        return 0

    def _mem_get_info(self, index: int) -> tuple[int, int]:
        assert self.is_begun, "this would have made a CUDA context"
        return self.total - self.reserved - self.others, self.total

    def _memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        assert self.is_begun, "this would have made a CUDA context"
        figures = {"allocated": (self.allocated, self.peak), "reserved": (self.reserved, 0),
                   "inactive_split": (0, 0)}  # fmt: skip
        return {
            f"{name}_bytes": {"all": {"current": now, "peak": peak}}
            for name, (now, peak) in figures.items()
        }

    def _host_memory_stats_as_nested_dict(self) -> dict[str, Any]:
        assert self.is_begun, "this would have made a CUDA context"
        return {"allocated_bytes": {"current": self.pinned, "peak": self.pinned}}

    def _reset_peak_memory_stats(self, index: int) -> None:
        self.peak = self.allocated
        self._put()


def settle(monitor: MemoryMonitor, device: MadeUpDevice) -> None:
    """Until the monitor's thread has seen what the device holds."""
    sampler = monitor._last.sampler  # type: ignore[union-attr]
    free = device.total - device.reserved - device.others
    while not sampler.devices() or sampler.devices()[0][:3] != (
        device.allocated,
        device.reserved,
        free,
    ):
        torch.randn(10)  # some work between two looks


Program = Callable[[str], str]


@pytest.fixture
def device_program(allocator: Path, _fake_library: FakeRuntime, tmp_path: Path) -> Program:
    """Runs a program with a `device` of 40 GiB in tmp_path; returns what it printed."""

    def run(code: str) -> str:
        path, library = tmp_path / "program.py", PROJECT / "build/c/libfakecudart.so"
        path.write_text(BEGIN + textwrap.dedent(code))
        done = subprocess.run(
            [sys.executable, path, allocator, library], capture_output=True, text=True,
            timeout=120, cwd=tmp_path,
            env=os.environ | {"MEMTOOLS_CUDART": str(library), "PYTHONPATH": str(PROJECT)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    return run
