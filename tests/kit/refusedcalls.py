"""System calls that the kernel refuses in this process, as a container's seccomp profile does."""

from __future__ import annotations

import ctypes
import platform

#: numbers of system calls, by name
NUMBERS = {"memfd_create": {"x86_64": 319, "aarch64": 279}[platform.machine()]}
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort), ("if_true", ctypes.c_ubyte), ("if_false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.POINTER(_Instruction)))


def refuse(call: str, error: int) -> None:
    """From here on this process gets `error` from the call. Nothing takes that back, so it is for a
    child."""
    code = (_Instruction * 4)(
        _Instruction(_LOAD, 0, 0, 0),
        _Instruction(_EQUALS, 0, 1, NUMBERS[call]),
        _Instruction(_RETURN, 0, 0, _ERRNO | error),
        _Instruction(_RETURN, 0, 0, _ALLOW),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    program = ctypes.byref(_Program(len(code), code))
    assert libc.prctl(_SET_SECCOMP, _FILTER, program, 0, 0) == 0
