"""The text of PYTORCH_ALLOC_CONF, read as torch 2.11 to 2.13 read it.

    "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:4]"
         │
         └─► items at the commas outside of brackets ─► key and value, or a fault in one sentence

What has no fault here is taken by torch; what torch refuses has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: The first that is set counts, also an empty one. torch's documentation has it the other way
#: round, and its code as here.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
DEFAULT_SEGMENT_MB = 20
SPLIT_KEYS = ("max_split_size_mb", "max_non_split_rounding_mb")
LARGEST = 2**64 - 1
#: That the allocator cudaMallocAsync heeds; it ignores all others.
ASYNC_KEYS = frozenset({"backend", "per_process_memory_fraction"})


@dataclass(frozen=True)
class Conf:
    """What one such text says."""

    text: str
    values: dict[str, Any] = field(default_factory=dict)
    #: keys that memtools does not know; torch's build for CUDA raises ValueError for its own ones
    unknown: tuple[str, ...] = ()
    #: what torch raises for, each in a sentence
    faults: tuple[str, ...] = ()


def chosen(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The variable that torch reads, and its text; None where none is set."""
    for name in VARIABLES:
        if name in environ:
            return name, environ[name]
    return None


# --- values: each returns what it reads, or raises ValueError with what it must be ----------------


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text) or int(text) > LARGEST:
        raise ValueError("is a whole number")
    return int(text)


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if (value := _whole(text)) < least:
            raise ValueError(f"is at least {least}")
        return value

    return read


def _power_of_2(text: str) -> int:
    if (value := _whole(text)).bit_count() != 1:
        raise ValueError("is a power of 2")
    return value


def _threads(text: str) -> int:
    if (value := _power_of_2(text)) > 128:
        raise ValueError("is a power of 2 up to 128")
    return value


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError("is True or False, written so")
    return text == "True"


def _decimal(text: str) -> float:
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?([eE]-?[0-9]{1,2})?|\.[0-9]+", text):
        raise ValueError("is a number")
    return float(text)


def _share(text: str) -> float:
    if not 0 < (value := _decimal(text)) < 1:
        raise ValueError("lies between 0 and 1, both left out")
    return value


def _fraction(text: str) -> float:
    if not 0 <= (value := _decimal(text)) <= 1:
        raise ValueError("lies between 0 and 1")
    return value


def _backend(text: str) -> str:
    if text not in ("native", "cudaMallocAsync", "hipMallocAsync"):
        raise ValueError("is native or cudaMallocAsync")
    return text


def _divisions(text: str) -> int | tuple[tuple[str, int], ...]:
    """4 for all sizes, or a number for each size in MiB: (("256", 1), (">", 4))."""
    if not text.startswith("["):
        return _power_of_2(text)
    if not text.endswith("]"):
        raise ValueError("lacks its closing bracket")
    pairs = [item.partition(":") for item in text[1:-1].split(",")]
    for size, _, divisions in pairs:
        if size != ">":
            _power_of_2(size)
        if divisions != "0":
            _power_of_2(divisions)
    return tuple((size, int(divisions)) for size, _, divisions in pairs)


_READ: dict[str, Callable[[str], Any]] = {
    "backend": _backend,
    "expandable_segments": _flag,
    "garbage_collection_threshold": _share,
    "graph_capture_record_stream_reuse": _flag,
    "large_segment_size_mb": _at_least(11),
    "max_non_split_rounding_mb": _whole,
    "max_split_size_mb": _whole,
    "per_process_memory_fraction": _fraction,
    "pinned_free_catch_all": _flag,
    "pinned_max_cached_size_mb": _whole,
    "pinned_max_round_threshold_mb": _whole,
    "pinned_num_register_threads": _threads,
    "pinned_reserve_segment_size_mb": _at_least(1),
    "pinned_use_background_threads": _flag,
    "pinned_use_cuda_host_register": _flag,
    "pinned_use_hip_host_register": _flag,
    "release_lock_on_cudamalloc": _flag,
    "release_lock_on_hipmalloc": _flag,
    "roundup_power2_divisions": _divisions,
    "throw_on_cudamalloc_oom": _flag,
}
KEYS = frozenset(_READ)

# --- the text -------------------------------------------------------------------------------------


def _items(text: str) -> list[str]:
    """Split at the commas outside of brackets; blanks mean nothing, as to torch."""
    found, depth = [""], 0
    for letter in "".join(text.split()):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            found.append("")
        else:
            found[-1] += letter
    if len(found) > 1 and not found[-1]:  # one comma at the end is allowed
        found.pop()
    return found


def parse(text: str) -> Conf:
    """Every key, the last of equal ones; raises nothing."""
    values: dict[str, Any] = {}
    unknown, faults = [], []
    sizes: list[tuple[str, int]] = []
    for item in _items(text) if text.strip() else []:
        key, colon, value = item.partition(":")
        if not key or not colon or not value or re.search(r"[\[\]]", key):
            faults.append(f"{item!r} is no key with a value after a colon")
        elif key not in _READ:
            unknown.append(key)
            if re.search(r"[\[\]:]", value) and not re.fullmatch(r"\[[^\[\]]*\]", value):
                faults.append(f"{key}: {value!r} is neither one value nor a list in brackets")
        else:
            try:
                values[key] = _READ[key](value)
            except ValueError as error:
                faults.append(f"{key} {error}, got {value!r}")
            else:
                sizes += [(key, values[key])] if key in SPLIT_KEYS else []
    least = least_split_mb(values)
    faults += [
        f"{key} is at least {least}, a segment's size in MiB, got {size}"
        for key, size in sizes
        if size < least
    ]
    return Conf(text, values, tuple(dict.fromkeys(unknown)), tuple(faults))


def least_split_mb(values: Mapping[str, Any]) -> int:
    """What torch demands of max_split_size_mb: the size of a segment."""
    return int(values.get("large_segment_size_mb", DEFAULT_SEGMENT_MB))
