"""Files whose memory is mapped, and descriptors that are kept.

A program may close what it did not open (`os.closerange(3, 256)`, to become a daemon) and open
files of its own, which then have the same numbers. Python's `mmap` keeps a copy of the descriptor,
resizes by it and closes it. So:

    map_file(fd, ...) ──► memory of the file, which keeps no descriptor
    Descriptor(fd)    ──► a number and the file it meant; they are compared before each use
    file_of(fd)       ──► the same question for the descriptor of a socket or a library
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED: Final = ctypes.c_void_p(-1).value
_MS_SYNC: Final = 4

Memory = ctypes.Array[ctypes.c_char]


def map_file(fd: int, nbytes: int, *, offset: int = 0) -> Memory:
    """Map bytes of a file, which are unmapped together with the object that is returned.

    Args:
        fd: a descriptor, which may be closed afterwards.
        nbytes: at least 1.
        offset: a multiple of the page size.

    Raises OSError.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _LIBC.mmap(None, nbytes, access, mmap.MAP_SHARED, fd, offset)
    if address == _FAILED:
        raise _error()
    memory = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, nbytes).atexit = False
    return memory


def flush(memory: Memory) -> None:
    """Write mapped memory to the disk. Raises OSError."""
    if _LIBC.msync(ctypes.addressof(memory), len(memory), _MS_SYNC) != 0:
        raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def file_of(fd: int) -> tuple[int, int] | None:
    """The device and inode that a descriptor leads to; None if it is closed. Takes 0.5 us."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Descriptor:
    """A descriptor that is kept, with the file that it meant. It is closed with this object, unless
    the program has closed it and taken its number meanwhile."""

    __slots__ = ("_fd", "_file")

    def __init__(self, fd: int) -> None:
        """Take over a descriptor that was opened just now."""
        self._fd, self._file = fd, file_of(fd)

    def get(self) -> int | None:
        """The descriptor; None if the program has closed it. Takes 0.5 us."""
        return self._fd if self._file and file_of(self._fd) == self._file else None

    def close(self) -> None:
        fd = self.get()
        self._fd = -1
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.close()
