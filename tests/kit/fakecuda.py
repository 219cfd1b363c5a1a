"""CUDA tensors without a GPU: torch's CPU build wraps host memory as a "cuda" tensor, and the fake
runtime (tests/fake_cuda) runs the copies when a test says so."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as ptr
from pathlib import Path

try:
    import torch
except ModuleNotFoundError:  # make test-pythons: the fake runtime by itself needs none
    torch = None  # type: ignore[assignment]

KDL_CPU, KDL_CUDA = 1, 2
CODES = {"float64": (2, 64), "float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16)}


class _Tensor(Structure):
    _fields_ = (
        ("data", ptr),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class _Managed(Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", ptr),
        ("deleter", ptr),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


class _Exchange(Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", ptr),
        ("allocate", ptr),
        ("from_object", ptr),
        ("to_object", ptr),
    )


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ptr, (ctypes.py_object, ctypes.c_char_p)
_kept: list[object] = []  # what tensors and enqueued copies point to


def as_cuda(host: torch.Tensor, device: int = 0) -> torch.Tensor:
    """A tensor that says it lies on cuda:<device> and has host's memory, shape and strides."""
    made = _same_memory(host, KDL_CUDA, device)
    assert made.is_cuda
    _kept.append(host)
    return made


def as_host(cuda: torch.Tensor) -> torch.Tensor:
    """The opposite: a host tensor over the memory of one that says it lies on a CUDA device."""
    return _same_memory(cuda, KDL_CPU, 0)


def _same_memory(tensor: torch.Tensor, device_type: int, device: int) -> torch.Tensor:
    api = _Exchange.from_address(
        _pointer_of(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    )
    shape = (c_int64 * tensor.ndim)(*tensor.shape)
    strides = (c_int64 * tensor.ndim)(*tensor.stride())
    code, bits = CODES[str(tensor.dtype).removeprefix("torch.")]
    where = tensor.data_ptr(), device_type, device
    managed = _Managed(
        1, 3, None, None, 0, _Tensor(*where, tensor.ndim, code, bits, 1, shape, strides, 0)
    )
    _kept.append((managed, shape, strides))
    made = ctypes.py_object()
    to_object = ctypes.PYFUNCTYPE(ctypes.c_int, ptr, POINTER(ctypes.py_object))(api.to_object)
    assert to_object(ctypes.addressof(managed), ctypes.byref(made)) == 0
    same = made.value
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(same))  # the reference that to_object gave
    same.lender = tensor
    return same  # type: ignore[no-any-return]


class FakeRuntime:
    """The controls of libfakecudart.so (tests/fake_cuda/fakecudart.h), by their short names."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.fake_cuda_stream.restype = ptr
        self._lib.fake_cuda_fail_at.argtypes = (ctypes.c_long, ctypes.c_int)
        self._lib.fake_cuda_write.argtypes = (ptr, ptr, ctypes.c_size_t, ptr)
        for name in ("run", "run_all"):
            getattr(self._lib, f"fake_cuda_{name}").restype = ctypes.c_size_t
        for name in ("set_granularity", "set_capacity", "set_taken"):
            getattr(self._lib, f"fake_cuda_{name}").argtypes = (ctypes.c_size_t,)
        for name in ("live", "queued", "host_syncs", "calls", "busy_frees", "pinned_bytes",
                     "page_bytes", "misuses", "spoiled_captures"):  # fmt: skip
            getattr(self._lib, f"fake_cuda_{name}").restype = ctypes.c_long
        self._lib.fake_cuda_hold.argtypes = (ctypes.c_bool,)
        self._lib.fake_cuda_called.restype = ctypes.c_long
        self._lib.fake_cuda_called.argtypes = (ctypes.c_char_p,)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        return getattr(self._lib, f"fake_cuda_{name}")  # type: ignore[no-any-return]
