"""Every way in which running out of memory is said, and what only looks like it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import memtools
from memtools._base import oom
from memtools.errors import HostMemoryPressure


class CudaApiError(Exception):
    """As libraries beside torch make them: of no built-in type."""


class NoTextError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoTextMemoryError(NoTextError, MemoryError):
    pass


def raised(call):
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def caused(cause: BaseException) -> BaseException:
    def call():
        raise ValueError("the model failed") from cause

    return raised(call)


CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.20 GiB is free."
)
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 268435456 bytes. Error code 12 (Cannot allocate memory)"
)

OUT = {
    "torch": torch.OutOfMemoryError(CUDA),
    "torch without a text": torch.OutOfMemoryError(),
    "older torch": RuntimeError(CUDA),
    "two arguments": RuntimeError("CUDA out of memory.", 2),
    "a runtime call": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might"),
    "oneDNN": RuntimeError("could not create a primitive"),
    "oneDNN, at its run": RuntimeError("could not execute a primitive"),
    "oneDNN's memory": RuntimeError("could not create a memory object"),
    "HPU": RuntimeError(
        "[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB"
    ),
    "HIP": RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    "MPS": RuntimeError("MPS backend out of memory (MPS allocated: 9.0 GB, max allowed: 9.1 GB)"),
    "XPU": RuntimeError("Native API failed. UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
    "XLA": RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes"),
    "DataParallel": RuntimeError("Caught OutOfMemoryError in replica 0 on device 0.\nCUDA out of "
                                 "memory."),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    "cuBLAS opening": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling x"),
    "cuDNN": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN, not supported": RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may"),
    "cuDNN, no engine": RuntimeError("GET was unable to find an engine to execute this comp"),
    "cuFFT": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "host": RuntimeError(CPU),
    "host, another system": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to "
                                         "allocate 8 bytes."),
    "C++": RuntimeError("std::bad_alloc"),
    "mmap": RuntimeError("unable to mmap 400000000 bytes from file </tmp/x>: Cannot allocate memory"
                         " (12)"),
    "MemoryError": MemoryError(),
    "numpy": np._core._exceptions._ArrayMemoryError((10**9,), np.dtype("float64")),
    "BudgetError": memtools.BudgetError("pool asks for 2.0 MiB, 1.0 MiB of 1.5 MiB are used"),
    "the system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "another library": CudaApiError("[2] Call to cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"),
    "a cause": caused(caused(torch.OutOfMemoryError(CUDA))),
    "a group": ExceptionGroup("two workers", [MemoryError(), RuntimeError(CPU)]),
    "a group as a cause": caused(ExceptionGroup("", [MemoryError()])),
}  # fmt: skip

OTHER = {
    "a missing key": KeyError("out of memory"),
    "a wrong value": ValueError("this text is not about being out of memory"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "a device fault": torch.AcceleratorError("CUDA error: an illegal memory access"),
    "Triton's shared memory": RuntimeError("out of resource: shared memory, Required: 180"),
    "threads": RuntimeError("can't start new thread"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"),
    "the guard": HostMemoryPressure("host memory is at 98 %"),
    "another fault of the system": OSError(errno.ENOENT, "no such file: out of memory.txt"),
    "oneDNN has nothing for these shapes": RuntimeError(
        "could not create a primitive descriptor for the convolution forward propagation primitive"
    ),
    "oneDNN's text as a key": KeyError("could not create a primitive"),
    "another allocation of an HPU": RuntimeError("MODULE:PT_BRIDGE Allocation failed"),
    "a collective": torch.distributed.DistBackendError("NCCL: Cuda failure 2 'out of memory'"),
    "caused by a collective": caused(torch.distributed.DistBackendError("out of memory")),
    "while handling one": raised(lambda: _while_handling()),
    "an interrupt": KeyboardInterrupt("out of memory"),
    "a text that fails": NoTextError(),
    "a group of two kinds": ExceptionGroup("", [MemoryError(), ValueError("x")]),
}  # fmt: skip


def _while_handling():
    try:
        raise MemoryError
    except MemoryError:
        raise ValueError("a fault of the handler's own")  # noqa: B904


@pytest.mark.parametrize("name", OUT)
def test_it_is_out_of_memory(name):
    assert oom.shortage(OUT[name]) is not None


@pytest.mark.parametrize("name", OTHER)
def test_it_is_something_else(name):
    assert oom.shortage(OTHER[name]) is None


@pytest.mark.parametrize(
    ("name", "text", "is_out"),
    [
        ("MemoryError", "", True),
        ("memtools.BudgetError", "the pool is full", True),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 7.45 GiB", True),
        ("OSError", "[Errno 12] Cannot allocate memory", True),
        ("OSError", "Can't read data (memory allocation failed for raw data chunk)", True),
        ("OSError", "[Errno 2] No such file or directory", False),
        ("HostMemoryPressure", "not enough memory", False),
        ("memtools.errors.HostMemoryPressure", "not enough memory", False),
    ],
)
def test_an_error_of_which_only_the_name_and_the_text_are_left(name, text, is_out):
    assert oom.says_out_of_memory(name, text) is is_out


def test_a_ring_of_causes_ends():
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert oom.shortage(first) is None
    second.__cause__ = caused(MemoryError())
    assert oom.shortage(first) == ("ValueError: a", None, True)


@pytest.mark.parametrize(
    ("error", "bytes_"),
    [
        (OUT["torch"], 5 << 29),
        (OUT["host"], 268435456),
        (OUT["a cause"], 5 << 29),
        (OUT["mmap"], 400000000),
        (OUT["HIP"], 20 << 20),
        (MemoryError("Unable to allocate 7.45 GiB for an array"), int(7.45 * 2**30)),
        (MemoryError("Unable to allocate 512. B for an array"), 512),
        (RuntimeError("out of memory: tried to allocate 3 KB"), 3072),
        (MemoryError(), None),
    ],
)
def test_the_bytes_asked_for_are_read_where_they_are_said(error, bytes_):
    assert oom.shortage(error).asked == bytes_


#: Sizes as numpy writes them: three digits, and no unit's fraction from 100 on.
SIZES = [0, 1, 9, 99, 100, 512, 999, 1000, 1023] + [
    int(count * 1024**power)
    for power in range(1, 7)
    for count in (1, 1.5, 9.99, 10, 57.6, 99, 99.9, 100, 512, 966, 999, 1000, 1023)
    if count * 1024**power < 2**63
]


def test_every_size_that_numpy_writes_is_read():
    for size in SIZES:
        with pytest.raises(MemoryError) as caught:
            raise np._core._exceptions._ArrayMemoryError((size,), np.dtype("uint8"))
        text = str(caught.value)
        asked = oom.shortage(caught.value).asked
        assert asked == pytest.approx(size, rel=0.005), text


def test_what_numpy_itself_raises_is_read():
    with pytest.raises(MemoryError, match=r"128\. TiB") as caught:
        np.empty(2**47, np.uint8)
    assert oom.shortage(caught.value).asked == 2**47


def test_a_budgets_own_error_says_what_was_asked():
    history = memtools.GateHistory(max_bytes=memtools.Budget("1 MiB"))
    with pytest.raises(memtools.BudgetError) as caught:
        history.append(torch.rand(100_000, 64))
    assert oom.shortage(caught.value).asked > 1 << 20


def test_a_line_has_the_type_and_the_first_line_and_is_not_long():
    assert oom.shortage(MemoryError("a\nb")).line == "MemoryError: a"
    assert oom.shortage(MemoryError()).line == "MemoryError"
    assert oom.shortage(NoTextMemoryError()).line == "NoTextMemoryError"
    long = oom.shortage(MemoryError("x" * 500)).line
    assert len(long) == 200
    assert long.endswith("...")


REAL = """
import json, resource, torch
from memtools._base import oom

def few(call, kind, beside=64 << 20):
    which = getattr(resource, "RLIMIT_" + kind)
    before = resource.getrlimit(which)
    column = {"DATA": 5, "AS": 0}[kind]
    used = int(open("/proc/self/statm").read().split()[column]) * 4096
    resource.setrlimit(which, (used + beside, before[1]))
    try:
        call()
    except Exception as error:
        resource.setrlimit(which, before)
        found = oom.shortage(error)
        return type(error).__name__, found is not None, found and found.asked
    resource.setrlimit(which, before)
    return "nothing", False, None

def many():
    kept = []
    while True:
        kept.append(torch.empty(1000))

layer = torch.nn.Linear(64, 64)
layer(torch.randn(4, 64)).sum().backward()
deep = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(40)])
calls = {
    "tensor": lambda: torch.empty(1 << 28),
    "many": many,
    "python": lambda: bytes(1 << 30),
    "list": lambda: [0] * (1 << 28),
    "layers": lambda: deep(torch.randn(20000, 64)).sum().backward(),
}
torch.set_num_threads(1)
print(json.dumps({f"{kind} {name}": few(call, kind) for kind in ("DATA", "AS")
                  for name, call in calls.items()}))
"""


@pytest.mark.slow
def test_what_a_process_at_its_limit_raises_is_recognised():
    run = [sys.executable, "-c", REAL]
    out = subprocess.run(run, capture_output=True, text=True, check=True, timeout=300).stdout
    found = json.loads(out)
    assert len(found) == 10
    assert [name for name, (_, out_of_memory, _) in found.items() if not out_of_memory] == []
    assert found["DATA tensor"] == ["RuntimeError", True, 4 << 28]
    assert found["AS python"][0] == "MemoryError"


OF_HOST = {
    "oneDNN", "oneDNN, at its run", "oneDNN's memory", "host", "host, another system", "C++",
    "mmap", "MemoryError", "numpy", "the system", "a group", "a group as a cause",
}  # fmt: skip


@pytest.mark.parametrize("name", OUT)
def test_the_hosts_own_memory_is_told_from_a_devices(name):
    assert oom.shortage(OUT[name]).of_host == (name in OF_HOST)


def test_the_remedy_names_freed_heap_only_where_it_is_in_the_way():
    assert "checkpoint_layers()" in oom.remedy(None)
    assert "checkpoint_layers()" in oom.remedy(63 << 20)
    assert "checkpoint_layers()" in oom.remedy(512 << 20, thresholds_are_set=True)
    text = oom.remedy(180 << 20)
    assert text.startswith("malloc keeps 180.0 MiB of freed memory, which counts against the limit")
    assert "set(mmap_threshold='1 MiB')" in text
    assert "MALLOC_MMAP_THRESHOLD_=1048576" in text
