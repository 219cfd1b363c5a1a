"""Setting malloc: all that is asked for, or nothing and a sentence that says why.

check values ─► read how it is now ─► too late for one of them? RuntimeError
                                          │ no
                                          ▼
                                       mallopt, which cannot be taken back
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memtools._base import malloc
from memtools._base.size import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memtools.allocators.settings import HostAllocator

LARGEST_INT = 2**31 - 1  # mallopt takes a C int
PAGE, MOST_MMAP = 4096, 32 * 2**20

_lock = threading.Lock()


def change(wanted: Mapping[str, Any]) -> list[str]:
    """What AllocatorSettings.set() does, with what is not None."""
    from memtools.allocators.settings import allocator_settings

    if not wanted:
        raise ValueError("set() was given nothing: name at least one setting, as arena_max=2")
    values = {name: _CHECKS[name](name, value) for name, value in wanted.items()}
    with _lock:
        host = allocator_settings().host
        if late := _too_late(host, values):
            raise RuntimeError(f"set() changed nothing: {late}")
        return _apply(host, values)


# --- values ---------------------------------------------------------------------------------------


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, got {type(value).__name__}")
    return value


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
    "arena_max": _arenas,
    "trim_threshold": _trim,
    "mmap_threshold": _mmap,
}


# --- too late -------------------------------------------------------------------------------------


def _too_late(host: HostAllocator, wanted: Mapping[str, int]) -> str:
    """Why it cannot be set any more, or here; "" where it can."""
    if host.name != "glibc":
        return f"malloc is {host.name}'s ({host.path}), which does not know {', '.join(wanted)}"
    if "arena_max" not in wanted:
        return ""
    most, before, arenas = wanted["arena_max"], host.arena_max.value, host.arenas or 1
    instead = f"put MALLOC_ARENA_MAX={most} before the program in the shell"
    if arenas > most:
        reason = f"glibc already has {arenas} arenas and never takes one away"
        return f"too late for arena_max={most}: {reason}; {instead}"
    if before != most and arenas > host.arena_test:
        reason = f"with {arenas} arenas glibc has fixed its limit"
        return f"too late for arena_max={most}: {reason}; {instead}"
    if before not in (None, most) and (arenas > 1 or before == 1):
        reason = f"glibc keeps the first limit that it used, {before} by {host.arena_max.source}"
        return f"too late for arena_max={most}: {reason}; {instead}"
    return ""


# --- doing it -------------------------------------------------------------------------------------


def _apply(host: HostAllocator, wanted: Mapping[str, int]) -> list[str]:
    done = []
    # The one that glibc may refuse comes first, because none can be taken back.
    for name in sorted(wanted, key=lambda name: name != "mmap_threshold"):
        if not malloc.mallopt(name, wanted[name]):
            raise RuntimeError(f"set() changed nothing: glibc refuses {name}={wanted[name]:,}")
        done.append(_sentence(host, name, wanted[name]))
    return done


def _sentence(host: HostAllocator, name: str, value: int) -> str:
    if name == "arena_max":
        return (
            f"glibc: at most {value} arena{'' if value == 1 else 's'}, of which {host.arenas} exist"
        )
    ends = ", and no longer raises its thresholds by itself" if host.dynamic else ""
    return f"glibc: {name} {format_bytes(value)} ({value:,} bytes) by mallopt{ends}"
