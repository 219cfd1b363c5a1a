"""Setting allocators: all that is asked for, or nothing and a sentence that says why.

check values ─► read how it is now ─► too late for one of them? RuntimeError
                                          │ no
                                          ▼
torch's setter and its variable ─► mallopt, which cannot be taken back, last
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools._base.size import format_bytes, parse_bytes
from memtools.allocators import malloc
from memtools.allocators.conf import NO_CACHING, VARIABLES, chosen, least_split_mb, merged

if TYPE_CHECKING:
    from memtools.allocators.settings import AllocatorSettings, CudaAllocator, HostAllocator

CUDA = ("expandable_segments", "max_split_size_mb", "garbage_collection_threshold")
LARGEST_INT = 2**31 - 1  # mallopt takes a C int
PAGE, MOST_MMAP = 4096, 32 * 2**20

_lock = threading.Lock()


def change(wanted: Mapping[str, Any]) -> list[str]:
    """What AllocatorSettings.set() does, with what is not None."""
    from memtools.allocators.settings import allocator_settings

    if not wanted:
        raise ValueError("set() was given nothing: name at least one setting, as arena_max=2")
    values = {name: _CHECKS[name](name, value) for name, value in wanted.items()}
    cuda = {name: value for name, value in values.items() if name in CUDA}
    host = {name: value for name, value in values.items() if name not in CUDA}
    with _lock:
        now = allocator_settings()
        late = [*_late_for_cuda(now.cuda, cuda), *_late_for_host(now.host, host)]
        if late:
            raise RuntimeError(f"set() changed nothing: {'; '.join(late)}")
        return _apply(now, cuda, host)


# --- values ---------------------------------------------------------------------------------------


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, got {type(value).__name__}")
    return value


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, got {type(value).__name__}")
    return value


def _split(name: str, value: object) -> int:
    count = _whole(name, value)
    least = least_split_mb({})
    if not least <= count <= 2**44:
        raise ValueError(f"{name} is {least} MiB or more, which torch demands, got {count}")
    return count


def _share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number, got {type(value).__name__}")
    if not 0.001 <= value <= 0.999:
        raise ValueError(f"{name} is 0.001 to 0.999 of what torch may take, got {value}")
    return round(float(value), 6)


def _arenas(name: str, value: object) -> int:
    count = _whole(name, value)
    if not 1 <= count <= LARGEST_INT:
        raise ValueError(f"{name} is 1 arena or more, got {count}")
    return count


def _trim(name: str, value: object) -> int:
    size = parse_bytes(value, name)  # type: ignore[arg-type]
    if size > LARGEST_INT:
        raise ValueError(f"{name} is at most {LARGEST_INT:,} bytes, got {size:,}")
    return size


def _mmap(name: str, value: object) -> int:
    size = parse_bytes(value, name)  # type: ignore[arg-type]
    if not PAGE <= size <= MOST_MMAP:
        raise ValueError(f"{name} is 4,096 to {MOST_MMAP:,} bytes (32 MiB), got {size:,}")
    return size


_CHECKS: dict[str, Any] = {
    "expandable_segments": _flag,
    "max_split_size_mb": _split,
    "garbage_collection_threshold": _share,
    "arena_max": _arenas,
    "trim_threshold": _trim,
    "mmap_threshold": _mmap,
}


# --- too late -------------------------------------------------------------------------------------


def _late_for_cuda(cuda: CudaAllocator, wanted: Mapping[str, Any]) -> list[str]:
    if not wanted:
        return []
    if cuda.faults:
        return [f"{cuda.text.source} cannot be read: {cuda.faults[0]}; correct it first"]
    if NO_CACHING in os.environ:
        return [f"{NO_CACHING} is set, so torch's allocator keeps nothing; unset it first"]
    if cuda.backend.value not in (None, "native"):
        key = f"backend:{cuda.backend.value} in {cuda.text.source}"
        return [f"{key} ignores {', '.join(wanted)}; take backend:native and start anew"]
    least = least_split_mb(cuda.values)
    if wanted.get("max_split_size_mb", least) < least:
        return [f"max_split_size_mb is at least large_segment_size_mb, here {least}"]
    # The threshold is read at each allocation; the others only where a segment is made or split.
    late = [name for name in wanted if name != "garbage_collection_threshold"]
    if late and cuda.reserved:
        line = _line(merged(cuda.text.value or "", wanted))
        return [
            f"too late for {' and '.join(late)}: torch already has {format_bytes(cuda.reserved)} "
            f"in segments; put {line} before the program in the shell, or call it before the "
            "first tensor on a GPU"
        ]
    return []


def _late_for_host(host: HostAllocator, wanted: Mapping[str, int]) -> list[str]:
    if not wanted:
        return []
    if host.name != "glibc":
        return [f"malloc is {host.name}'s ({host.path}), which does not know {', '.join(wanted)}"]
    if "arena_max" not in wanted:
        return []
    most, before, arenas = wanted["arena_max"], host.arena_max.value, host.arenas or 1
    instead = f"put MALLOC_ARENA_MAX={most} before the program in the shell"
    if arenas > most:
        there = f"glibc already has {arenas} arenas and never takes one away"
        return [f"too late for arena_max={most}: {there}; {instead}"]
    if before != most and arenas > host.arena_test:
        there = f"with {arenas} arenas glibc has fixed its limit"
        return [f"too late for arena_max={most}: {there}; {instead}"]
    if before not in (None, most) and (arenas > 1 or before == 1):
        there = f"glibc keeps the first limit that it used, {before} by {host.arena_max.source}"
        return [f"too late for arena_max={most}: {there}; {instead}"]
    return []


# --- doing it -------------------------------------------------------------------------------------


def _variable() -> str:
    """The one that torch reads; where none is set, the one that is for all devices."""
    found = chosen(os.environ)
    return VARIABLES[-1] if found is None else found[0]


def _line(text: str) -> str:
    return f"{_variable()}={shlex.quote(text)}"


def _apply(now: AllocatorSettings, cuda: Mapping[str, Any], host: Mapping[str, int]) -> list[str]:
    variable, before = _variable(), os.environ.get(_variable())
    done = _set_cuda(now.cuda, cuda) if cuda else []
    # The one that glibc may refuse comes first, because none can be taken back.
    for name in sorted(host, key=lambda name: name != "mmap_threshold"):
        if not malloc.mallopt(name, host[name]):
            if cuda:
                _undo_cuda(now.cuda, variable, before)
            raise RuntimeError(f"set() changed nothing: glibc refuses {name}={host[name]:,}")
        done.append(_told(now.host, name, host[name]))
    return done


def _told(host: HostAllocator, name: str, value: int) -> str:
    if name == "arena_max":
        return (
            f"glibc: at most {value} arena{'' if value == 1 else 's'}, of which {host.arenas} exist"
        )
    ends = ", and no longer raises its thresholds by itself" if host.dynamic else ""
    return f"glibc: {name} {format_bytes(value)} ({value:,} bytes) by mallopt{ends}"


def _setter() -> Any:
    """torch's own, once torch is imported; None where it is not, or has none."""
    torch = bridge.loaded()
    return None if torch is None else getattr(torch._C, "_accelerator_setAllocatorSettings", None)


def _set_cuda(cuda: CudaAllocator, wanted: Mapping[str, Any]) -> list[str]:
    variable, text = _variable(), merged(cuda.text.value or "", wanted)
    keys = ", ".join(f"{name}:{value}" for name, value in wanted.items())
    setter = _setter()
    if setter is None and cuda.in_use:
        raise RuntimeError(
            "set() changed nothing: torch uses CUDA already and this torch has no setter; put "
            f"{_line(text)} before the program in the shell"
        )
    if setter is not None:
        try:
            setter(text)
        except Exception as error:
            _undo_cuda(cuda, variable, os.environ.get(variable))
            first = str(error).splitlines()[0]
            raise RuntimeError(f"set() changed nothing: torch refuses {text!r}: {first}") from error
    os.environ[variable] = text
    if setter is None:
        return [f"{keys} in {variable}: torch reads it at its first use of CUDA"]
    return [f"{keys} in torch's allocator, and in {variable} for processes started from here"]


def _undo_cuda(cuda: CudaAllocator, variable: str, before: str | None) -> None:
    setter = _setter()
    if setter is not None:
        with contextlib.suppress(Exception):  # it may never have read the text, and refuse it too
            setter(cuda.text.value or "")
    if before is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = before
