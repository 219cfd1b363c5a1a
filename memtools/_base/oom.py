"""Which exceptions say that memory ran out: a smaller micro-batch may pass where these were raised.

    error ─► its type says so?  ─► its text says so?  ─► the error that it was raised from? ─► ...
             MemoryError           of a RuntimeError      (`raise ... from error`)
             OutOfMemoryError

A host says it as MemoryError, "DefaultCPUAllocator: can't allocate memory", "std::bad_alloc" or
ENOMEM; a device as OutOfMemoryError, "out of memory", or through a library of its own that could
not allocate. The last ones speak of memory in words of their own, and some of theirs
(CUDNN_STATUS_NOT_SUPPORTED, "unable to find an engine", oneDNN's "could not create a primitive")
have other causes as well. They count, since a smaller micro-batch mends most of them, and where it
does not, the error comes out as it is.

A collective that failed does not count, whatever its text: other ranks are in it. Nor does what a
guard raises before memory is out (HostMemoryPressure), which is meant for the program.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from typing import Final

from memtools._base import torch as bridge
from memtools._base.size import format_bytes
from memtools.errors import BudgetError

#: Freed bytes that malloc keeps are mentioned from this size on: less rarely decides.
MUCH_IDLE: Final = 64 << 20
_TEXTS: Final = (
    "out of memory",  # CUDA, HIP, XPU, MPS, XLA, with or without a number
    "can't allocate memory",  # torch on the host
    "cannot allocate memory",  # the system's words for ENOMEM
    "not enough memory",
    "bad_alloc",  # torch passes on what C++ throws
    "failed to allocate",
    "unable to allocate",
)
_CODES: Final = (
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # its workspace did not fit when it was opened
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_ALLOC_FAILED",
    "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    "CUFFT_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryAllocation",
    "hipErrorOutOfMemory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "miopenStatusAllocFailed",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "was unable to find an engine to execute",  # cuDNN: no algorithm's workspace fits
)
#: oneDNN, whose texts name no status. "could not create a primitive descriptor" is another error:
#: it says that no implementation fits the shapes.
_ONEDNN: Final = re.compile(
    r"could not (create a primitive(?! desc)|execute a primitive|create a memory( object)?$)"
)
#: Of the texts above, those that the host's allocators write.
_HOST_TEXTS: Final = ("cpuallocator", "cannot allocate memory", "bad_alloc")
_NUMBER: Final = r"(\d+(?:\.\d+)?)\s*(B|bytes|[KMGT]i?B)\b"
_ASKED: Final = re.compile(
    rf"(?:(?:tried|unable) to allocate|unable to mmap|asked|refused|takes)\s+{_NUMBER}",
    re.IGNORECASE,
)
_UNITS: Final = {"b": 1, "bytes": 1} | {
    f"{letter}{i}b": 1024**power
    for power, letter in enumerate("kmgt", 1)
    for i in ("", "i")  # torch once wrote MB for what it counts in MiB
}
_DEEPEST: Final = 64  # of `raise ... from`: a chain may be a ring


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, says that memory ran out.

    A group of exceptions counts when all in it do. Takes 2 us. Never raises.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_out_of_memory(one) for one in error.exceptions)
    chain = list(_chain(error))
    return not any(map(_is_collective, chain)) and any(map(_says_so, chain))


def says_out_of_memory(name: str, text: str) -> bool:
    """The same of an exception of which only its type's name and its text are left, as in a record.
    What a guard raises before memory is out does not count."""
    if name in ("MemoryError", "OutOfMemoryError", "BudgetError") or name.endswith(
        (".OutOfMemoryError", ".MemoryError")
    ):
        return True
    if name == "HostMemoryPressure":
        return False
    words = any(code in text for code in _CODES) or _ONEDNN.search(text) is not None
    return words or any(one in text.lower() for one in _TEXTS)


def is_of_host(error: BaseException) -> bool:
    """Whether the process's own memory ran out, rather than a device's or a budget."""
    return any(map(_says_host, _chain(error)))


def _says_host(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_of_host, error.exceptions))
    if isinstance(error, MemoryError):
        return not isinstance(error, BudgetError)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError) or _is_torchs(error):
        return False
    text = _text(error)
    return any(one in text.lower() for one in _HOST_TEXTS) or _ONEDNN.search(text) is not None


def remedy(idle_bytes: int | None, thresholds_are_set: bool = False) -> str:
    """What to do where the host's memory ran out and nothing smaller can be tried, in one clause.

    Freed memory that glibc keeps in its heap counts against RLIMIT_DATA, RLIMIT_AS and, as far as
    its pages were used, against a control group.

    Args:
        idle_bytes: freed bytes that malloc kept at that time (`heap_free` of a reading,
            `allocator_settings().host.heap.idle_bytes`); None: not known, or not glibc.
        thresholds_are_set: whether somebody set glibc's thresholds, as
            `not allocator_settings().host.dynamic` says.
    """
    if idle_bytes is None or idle_bytes < MUCH_IDLE or thresholds_are_set:
        return "make one row take less, by checkpoint_layers() or a lower precision"
    return (
        f"malloc keeps {format_bytes(idle_bytes)} of freed memory, which counts against the limit: "
        "call memtools.allocator_settings().set(mmap_threshold='1 MiB') at the program's start, or "
        "put MALLOC_MMAP_THRESHOLD_=1048576 before it in the shell, so that large blocks go back "
        "to the system when they are freed"
    )


def asked_bytes(error: BaseException) -> int | None:
    """The bytes that could not be had, where the text says so."""
    for one in _chain(error):
        found = _ASKED.search(_text(one))
        if found is not None:
            return int(float(found[1]) * _UNITS[found[2].lower()])
    return None


def first_line(error: BaseException, most: int = 200) -> str:
    """The error's type and the first line of its text, of at most so many characters."""
    name = type(error).__name__
    text = _text(error).strip().partition("\n")[0]
    line = f"{name}: {text}" if text else name
    return line if len(line) <= most else line[: most - 3] + "..."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(_DEEPEST):
        if error is None:
            return
        yield error
        error = error.__cause__


def _says_so(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(is_out_of_memory(one) for one in error.exceptions)
    if isinstance(error, MemoryError) or _is_torchs(error):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, Exception):
        return False
    text = _text(error)
    if any(code in text for code in _CODES) or _is_hpus(text):
        return True
    # other types have other subjects: KeyError("out of memory") is a missing key
    if not isinstance(error, RuntimeError):
        return False
    return any(one in text.lower() for one in _TEXTS) or _ONEDNN.search(text) is not None


def _is_hpus(text: str) -> bool:
    """Whether an HPU (Habana's) ran out of its device memory."""
    return "PT_DEVMEM" in text and "Allocation failed" in text


def _is_torchs(error: BaseException) -> bool:
    torch = bridge.loaded()
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def _is_collective(error: BaseException) -> bool:
    torch = bridge.loaded()
    kind = getattr(getattr(torch, "_C", None), "_DistBackendError", None)
    return kind is not None and isinstance(error, kind)


def _text(error: BaseException) -> str:
    """Of all its arguments; an exception whose own text fails has none."""
    try:
        return str(error)
    except Exception:
        return ""
