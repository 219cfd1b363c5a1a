"""oneDNN on a thread where it once found no memory for a kernel's code.

oneDNN writes a kernel for each new shape, and its assembler (Xbyak) remembers the first error of a
thread for ever. So one kernel that found no memory is followed by the refusal of every new one on
that thread, "could not create a primitive", however much memory there is by then. Other threads
go on, and so do kernels that were there before.

    a small kernel of a new shape ─► made: nothing to do
             │ refused
             ▼
    the thread's error, an int that oneDNN has no call for, set back to 0 ─► a kernel is made
             │ not found, or refused again
             ▼
    oneDNN turned off: torch's own kernels are slower, take more memory and round differently

Where the int lies is said by the symbols of the library that torch came with, and by the loader.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from pathlib import Path
from typing import Any, Final

REFUSAL: Final = "could not create a primitive"
CLEARED: Final = (
    "cleared the error that oneDNN had kept on this thread since it found no memory for a kernel, "
    "and refused all others for"
)
TURNED_OFF: Final = (
    "turned oneDNN off, which makes no kernel on this thread any more since it found no memory for "
    "one"
)
_ERROR: Final = b"_ZZN5Xbyak5local11GetErrorRefEvE3err"  # Xbyak::local::GetErrorRef()::err
_LARGEST: Final = 64  # of Xbyak's errors there are fewer
_SYMTAB, _STRTAB, _TLS, _INT = 2, 3, 6, 4  # <elf.h>: kinds of sections, of a symbol; its size
_PIECE: Final = 4 << 20  # bytes of a file that are held at a time

_widths = itertools.count(100_003, 2)  # of shapes for which there is no kernel yet


def mend(torch: Any) -> str:
    """See whether oneDNN refuses new kernels on this thread, and end that. Returns what was done,
    for a sentence, or "". Takes 0.2 ms and 400 KiB for a moment where nothing is to be done, else
    a tenth of a second. Never raises."""
    try:
        if not torch._C._get_mkldnn_enabled() or not _refuses(torch):
            return ""
        library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
        if _clear_error(library) and not _refuses(torch):
            return CLEARED
        torch._C._set_mkldnn_enabled(False)
    except Exception:  # no memory for as much, or a torch without oneDNN
        return ""
    return TURNED_OFF


def _refuses(torch: Any) -> bool:
    try:
        torch.zeros(1, next(_widths)).to_mkldnn()
    except RuntimeError as error:
        return REFUSAL in str(error)
    return False


def _clear_error(library: Path) -> bool:
    """Set this thread's error back; False where it is not found, or where none is set."""
    offset, begin = _offset_of(library), _thread_locals(library)
    if offset is None or begin is None:
        return False
    error = ctypes.c_int.from_address(begin + offset)
    if not 0 < error.value < _LARGEST:
        return False
    error.value = 0
    return True


class _Loaded(ctypes.Structure):
    """What the loader says of a library: <link.h>, struct dl_phdr_info."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("header_count", ctypes.c_uint16),
        ("added", ctypes.c_ulonglong),
        ("removed", ctypes.c_ulonglong),
        ("tls_module", ctypes.c_size_t),
        ("tls_begin", ctypes.c_void_p),
    )


def _thread_locals(library: Path) -> int | None:
    """Where the thread-local variables of a loaded library begin on this thread."""
    found: list[int] = []
    visitor = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Loaded), ctypes.c_size_t, ctypes.c_void_p
    )

    def visit(info: Any, size: int, _: object) -> int:
        loaded = info.contents
        if size < ctypes.sizeof(_Loaded) or not loaded.name or not loaded.tls_begin:
            return 0
        if os.path.basename(loaded.name) == os.fsencode(library.name):
            found.append(loaded.tls_begin)
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(visitor(visit), None)
    return found[0] if len(found) == 1 else None


def _offset_of(library: Path) -> int | None:
    """Of the error among the thread-local variables of the library; None where no symbol of its
    file says so."""
    with library.open("rb", buffering=0) as file:
        header = file.read(64)
        if header[:6] != b"\x7fELF\x02\x01":  # 64 bits, the lowest byte first
            return None
        (sections_at,) = struct.unpack_from("<Q", header, 40)
        size, count = struct.unpack_from("<HH", header, 58)
        if size != 64:
            return None
        table = os.pread(file.fileno(), size * count, sections_at)
        # name, kind, flags, address, offset, size, the section that this one's names are in, ...
        sections = list(struct.iter_unpack("<IIQQQQIIQQ", table))
        for section in sections:
            if section[1] == _SYMTAB and sections[section[6]][1] == _STRTAB:
                _, _, _, _, names_at, names, *_ = sections[section[6]]
                name = _find(file.fileno(), b"\0" + _ERROR + b"\0", names_at, names, 1)
                if name is None:
                    return None
                return _symbol(file.fileno(), name + 1, section[4], section[5])
    return None


def _symbol(file: int, name: int, begin: int, size: int) -> int | None:
    """The value of the thread-local int of that name, as an offset among names says it."""
    at = _find(file, struct.pack("<I", name), begin, size, 24)
    if at is None:
        return None
    _, info, _, _, value, length = struct.unpack("<IBBHQQ", os.pread(file, 24, begin + at))
    return int(value) if info & 15 == _TLS and length == _INT else None


def _find(file: int, what: bytes, begin: int, size: int, step: int) -> int | None:
    """Where in a part of a file the bytes are, at a multiple of `step`."""
    for piece in range(0, size, _PIECE // step * step):
        data = os.pread(file, min(_PIECE + len(what), size - piece), begin + piece)
        at = data.find(what)
        while at >= 0:
            if at % step == 0:
                return piece + at
            at = data.find(what, at + 1)
    return None
