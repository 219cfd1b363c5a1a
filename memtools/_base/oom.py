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
guard raises before memory is out (MemoryPressure), which is meant for the program.
"""

from __future__ import annotations

import errno
import operator
import re
from typing import Final, NamedTuple

from memtools._base.size import format_bytes
from memtools.errors import BudgetError

#: Freed bytes that malloc keeps are mentioned from this size on: less rarely decides.
MUCH_IDLE: Final = 64 << 20
_TEXTS: Final = (
    "out of memory",  # CUDA, HIP, XPU, MPS, XLA, with or without a number
    "can't allocate memory",  # torch on the host
    "cannot allocate memory",  # the system's words for ENOMEM
    "not enough memory",
    "memory allocation failed",  # HDF5, in an OSError without a number
    "bad_alloc",  # torch passes on what C++ throws
    "failed to allocate",
    "unable to allocate",
)
#: statuses of a device's libraries, also in the texts that memtools._oom reads
CODES: Final = (
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
_NUMBER: Final = r"(\d+(?:\.\d*)?)\s*(B|bytes|[KMGTPE]i?B)\b"  # numpy writes "966. GiB"
_ASKED: Final = re.compile(
    rf"(?:(?:tried|unable) to allocate|unable to mmap|asked|refused|takes)\s+{_NUMBER}",
    re.IGNORECASE,
)
_UNITS: Final = {"b": 1, "bytes": 1} | {
    f"{letter}{i}b": 1024**power
    for power, letter in enumerate("kmgtpe", 1)
    for i in ("", "i")  # torch once wrote MB for what it counts in MiB
}
_DEEPEST: Final = 64  # The maximum length of a chain of causes, which may be a ring.
_LONGEST: Final = 200  # The maximum number of characters of a line.


_NAME: Final = operator.attrgetter("__name__")


class Shortage(NamedTuple):
    """What an exception says of the memory that ran out.

    Attributes:
        line: the exception's type and the first line of its text, of at most 200 characters.
        asked: the bytes that could not be had; None where no text says so.
        of_host: whether the process's own memory ran out, rather than a device's or a budget.
    """

    line: str
    asked: int | None
    of_host: bool


def shortage(error: BaseException) -> Shortage | None:
    """What `error`, or one that it was raised from, says of memory that ran out; None where they
    speak of something else.

    A group of exceptions counts when all in it do. Takes 5 us. Never raises.
    """
    asked, says_so, of_host = None, False, False
    one: BaseException | None = error
    for _ in range(_DEEPEST):
        if one is None:
            break
        # By name, so that torch need not be there.
        kinds, text = set(map(_NAME, type(one).__mro__)), _text(one)
        if "DistBackendError" in kinds:  # of a collective
            return None
        if asked is None and (number := _ASKED.search(text)) is not None:
            asked = int(float(number[1]) * _UNITS[number[2].lower()])
        if isinstance(one, BaseExceptionGroup):
            parts = list(map(shortage, one.exceptions))
            says_so = says_so or None not in parts
            of_host = of_host or any(part is not None and part.of_host for part in parts)
        elif isinstance(one, MemoryError):
            says_so, of_host = True, of_host or not isinstance(one, BudgetError)
        elif "OutOfMemoryError" in kinds:
            says_so = True
        elif isinstance(one, OSError):
            if one.errno == errno.ENOMEM:
                says_so = of_host = True
        elif isinstance(one, Exception):
            # Without a code in it, a text counts of a RuntimeError alone: other types have other
            # subjects, and KeyError("out of memory") is a missing key.
            words = isinstance(one, RuntimeError) and _has_words(text)
            says_so = says_so or words or _has_code(text)
            of_host = of_host or (words and _is_of_host(text))
        one = one.__cause__
    if not says_so:
        return None
    first_line = _text(error).strip().partition("\n")[0]
    line = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    if len(line) > _LONGEST:
        line = line[: _LONGEST - 3] + "..."
    return Shortage(line, asked, of_host)


def says_out_of_memory(name: str, text: str) -> bool:
    """The same of an exception of which only its type's name and its text are left, as in a record.
    What a guard raises before memory is out does not count."""
    kind = name.rpartition(".")[2]
    if kind in ("MemoryError", "OutOfMemoryError", "BudgetError"):
        return True
    if kind in ("HostMemoryPressure", "DeviceMemoryPressure"):
        return False
    return _has_code(text) or _has_words(text)


def remedy(idle_bytes: int | None, thresholds_are_set: bool = False) -> str:
    """What to do where the host's memory ran out and nothing smaller can be tried, in one clause.

    Freed memory that glibc keeps in its heap counts against RLIMIT_DATA, RLIMIT_AS and, as far as
    its pages were used, against a control group.

    Args:
        idle_bytes: freed bytes that malloc kept at that time (`heap_free` of a reading,
            `allocator_settings().host.heap.idle_bytes`); None: not known, or not glibc.
        thresholds_are_set: whether glibc's thresholds are set, as
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


def _has_code(text: str) -> bool:
    """Whether it names a status of a device's library, or an HPU (Habana's) ran out."""
    if "PT_DEVMEM" in text and "Allocation failed" in text:
        return True
    return any(code in text for code in CODES)


def _has_words(text: str) -> bool:
    return any(one in text.lower() for one in _TEXTS) or _ONEDNN.search(text) is not None


def _is_of_host(text: str) -> bool:
    return any(one in text.lower() for one in _HOST_TEXTS) or _ONEDNN.search(text) is not None


def _text(error: BaseException) -> str:
    """Of all its arguments; an exception whose own text fails has none."""
    try:
        return str(error)
    except Exception:
        return ""
