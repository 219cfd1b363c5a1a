"""Device columns without a device: a made-up allocator registered with torch's CPU build, and the
fake driver. Each case is a program of its own, because an allocator is for a process's life."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from memtools import _core
from tests.kit.children import wait_for
from tests.kit.fakecuda import FakeRuntime
from tests.monitor.samplercases import columns
from tests.monitor.test_sampler import MS
from tests.monitor.test_sampler_life import ENV, PROJECT

BEGIN = f"""
import ctypes, sys, time
import torch
from pathlib import Path
from memtools import _core, read_record
from tests.kit.fakecuda import FakeRuntime
UNKNOWN, MS = 2**64 - 1, 10**6
NOTHING = (None,) * 6
allocator, cuda = ctypes.CDLL(sys.argv[1]), FakeRuntime(Path(sys.argv[2]))
put = lambda device, *bytes: allocator.fake_allocator_set(device, *map(ctypes.c_int64, bytes))
cuda.reset()
cuda.set_capacity(1000)
allocator.fake_allocator_register()
writer = _core.RecordWriter(sys.argv[3], {columns(2)!r})
sampler = _core.Sampler(MS, writer, devices=2)
def wait():
    seen = sampler.samples
    while sampler.samples < seen + 50:  # longer than the driver's answer is kept
        time.sleep(0.001)
sampler.start()
wait()
assert sampler.devices() == [NOTHING] * 2, sampler.devices()
assert _core.device_memory(0) is None
assert cuda.calls() == 0, "the driver was asked before the program used CUDA"
put(0, 10, 20, 30, 15)
put(1, 2**40, 2**41, 3, 2**42)
allocator.fake_allocator_begin()
wait()
"""


Program = Callable[[str], None]


@pytest.fixture
def program(allocator: Path, _fake_library: FakeRuntime, tmp_path: Path) -> Program:
    def run(code: str) -> None:
        path = tmp_path / "program.py"
        path.write_text(BEGIN + code)
        library = PROJECT / "build/c/libfakecudart.so"
        done = subprocess.run(
            [sys.executable, path, allocator, library, tmp_path / "run.mem"],
            capture_output=True, text=True, timeout=120, cwd=PROJECT,
            env=ENV | {"MEMTOOLS_CUDART": str(library)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")

    return run


@pytest.mark.slow
def test_the_allocators_bytes_and_the_drivers_where_there_is_a_context(program: Program) -> None:
    program("""
assert sampler.devices() == [(10, 20, None, None, 30, 15), (2**40, 2**41, None, None, 3, 2**42)]
assert not cuda.has_context(0) and not cuda.has_context(1) and cuda.contexts_made() == 0
cuda.set_device(1)
stream = cuda.stream()
wait()
assert sampler.devices() == [(10, 20, None, None, 30, 15), (2**40, 2**41, 1000, 1000, 3, 2**42)]
assert not cuda.has_context(0) and cuda.contexts_made() == 0 and cuda.retained() == 0
put(1, 5, 6, 7, 8)
wait()
assert sampler.devices()[1] == (5, 6, 1000, 1000, 7, 8)
assert _core.device_memory(1) == (5, 6, 1000, 1000, 7, 8)
assert _core.device_memory(0) == (10, 20, None, None, 30, 15)
assert _core.device_memory(2) is None
sampler.stop()
values = read_record(sys.argv[3]).samples.values
assert [values[f"cuda0_{name}"][-1] for name in ("allocated", "reserved")] == [10, 20]
assert [values[f"cuda0_{name}"][-1] for name in ("free", "total")] == [UNKNOWN] * 2
assert [values[f"cuda1_{name}"][-1] for name in ("allocated", "reserved", "free", "total")] == [
    5, 6, 1000, 1000]
assert values["cuda1_allocated"][0] == UNKNOWN
assert cuda.misuses() == 0
""")


@pytest.mark.slow
def test_what_a_driver_or_an_allocator_refuses_is_unknown_and_a_fork_has_no_devices(
    program: Program,
) -> None:
    program("""
import os
cuda.set_device(0)
stream = cuda.stream()
wait()
assert sampler.devices()[0] == (10, 20, 1000, 1000, 30, 15)
cuda.set_capturing(ctypes.c_void_p(stream), True)  # a graph is being captured, which goes on
wait()
assert sampler.devices()[0] == (10, 20, 1000, 1000, 30, 15) and cuda.spoiled_captures() == 0
cuda.set_devices(0)
wait()
assert sampler.devices()[0] == (10, 20, None, None, 30, 15)
pid = os.fork()
if pid == 0:
    os._exit(0 if not sampler.running and sampler.devices() == [] else 1)
assert os.waitpid(pid, 0)[1] == 0
sampler.stop()
wide = _core.Sampler(MS, devices=3)
wide.start()
while wide.samples < 3:
    time.sleep(0.001)
first, second = (10, 20, None, None, 30, 15), (2**40, 2**41, None, None, 3, 2**42)
assert wide.devices() == [first, second, NOTHING]
""")


@pytest.mark.usefixtures("_fake_library")
def test_without_the_shim_devices_are_unknown(without_shim: Callable[..., object]) -> None:
    with without_shim():  # type: ignore[attr-defined]
        sampler = _core.Sampler(MS, devices=1)
        sampler.start()
        wait_for(lambda: sampler.samples > 3)
        sampler.stop()
        assert sampler.devices() == [(None,) * 6]


def test_a_device_that_cannot_be_is_refused() -> None:
    for device in (-1, 128, 2**40):
        with pytest.raises(ValueError, match=f"a device must be 0 to 127, got {device}"):
            _core.device_memory(device)
