"""CUDA tensors without a GPU: torch's CPU build wraps host memory as a "cuda" tensor, and the fake
runtime (tests/fake_cuda) runs the copies when a test says so."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p as ptr
from pathlib import Path

import torch

KDL_CUDA = 2
CODES = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}


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
_kept: list[object] = []  # torch frees a managed tensor late or never: keep what it points to


def as_cuda(host: torch.Tensor, device: int = 0) -> torch.Tensor:
    """A tensor that says it lies on cuda:<device> and has host's memory, shape and strides."""
    api = _Exchange.from_address(
        _pointer_of(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    )
    shape = (c_int64 * host.ndim)(*host.shape)
    strides = (c_int64 * host.ndim)(*host.stride())
    code, bits = CODES[host.dtype]
    managed = _Managed(
        1, 3, None, None, 0,
        _Tensor(host.data_ptr(), KDL_CUDA, device, host.ndim, code, bits, 1, shape, strides, 0),
    )  # fmt: skip
    _kept.append((managed, shape, strides, host))
    made = ctypes.py_object()
    to_object = ctypes.PYFUNCTYPE(ctypes.c_int, ptr, POINTER(ctypes.py_object))(api.to_object)
    assert to_object(ctypes.addressof(managed), ctypes.byref(made)) == 0
    assert made.value.is_cuda
    return made.value  # type: ignore[no-any-return]


class FakeRuntime:
    """The controls of libfakecudart.so (tests/fake_cuda/fakecudart.h), by their short names."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._lib.fake_cuda_stream.restype = ptr
        self._lib.fake_cuda_fail_at.argtypes = (ctypes.c_long, ctypes.c_int)
        self._lib.fake_cuda_write.argtypes = (ptr, ptr, ctypes.c_size_t, ptr)
        for name in ("run", "run_all"):
            getattr(self._lib, f"fake_cuda_{name}").restype = ctypes.c_size_t
        for name in ("live", "queued", "host_syncs", "calls", "busy_frees", "pinned_bytes"):
            getattr(self._lib, f"fake_cuda_{name}").restype = ctypes.c_long

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        return getattr(self._lib, f"fake_cuda_{name}")  # type: ignore[no-any-return]
