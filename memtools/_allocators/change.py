"""Set malloc: everything that was requested, or nothing and a sentence that says why.

check values ─► read how it is now ─► too late for one of them? RuntimeError
                                          │ no
                                          ▼
                                       mallopt, which cannot be taken back
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memtools._base import malloc
from memtools._base.number import any_whole_number, shown
from memtools._base.size import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memtools._allocators.settings import HostAllocator

_LARGEST_INT = 2**31 - 1  # mallopt takes a C int.
# The minimum and the maximum of each setting, in arenas or bytes.
_RANGES = {
    "arena_max": (1, _LARGEST_INT),
    "trim_threshold": (1, _LARGEST_INT),
    "mmap_threshold": (4096, 32 * 2**20),
}

_lock = threading.Lock()


def change(wanted: Mapping[str, Any], read: Callable[[], HostAllocator]) -> list[str]:
    """What AllocatorSettings.set() does.

    Args:
        wanted: the settings that were given, by name.
        read: reads how malloc is set now.
    """
    if not wanted:
        raise ValueError("set() got no setting: pass at least one, such as arena_max=2")
    values = {name: _checked(name, value) for name, value in wanted.items()}
    with _lock:
        host = read()
        if late := _too_late(host, values):
            raise RuntimeError(f"set() changed nothing: {late}")
        # The one that glibc may refuse comes first, because none can be taken back.
        order = sorted(values, key=lambda name: name != "mmap_threshold")
        return [_set(host, name, values[name]) for name in order]


def _checked(name: str, value: Any) -> int:
    is_count = name == "arena_max"
    value = any_whole_number(name, value) if is_count else parse_bytes(value, name)
    least, most = _RANGES[name]
    if not least <= value <= most:
        unit = "arenas" if is_count else "bytes"
        raise ValueError(f"{name} must be {least:,} to {most:,} {unit}, got {shown(value)}")
    return int(value)


def _too_late(host: HostAllocator, wanted: Mapping[str, int]) -> str:
    """Why these settings cannot be made any more, or not in this process; "" where they can."""
    if host.name != "glibc":
        return f"malloc is {host.name}'s ({host.path}), which does not know {', '.join(wanted)}"
    if "arena_max" not in wanted:
        return ""
    most, before, arenas = wanted["arena_max"], host.arena_max.value, host.arenas or 1
    if arenas > most:
        reason = f"glibc already has {arenas} arenas and never removes one"
    elif before != most and arenas > host.arena_test:
        reason = f"with {arenas} arenas glibc has fixed its limit"
    elif before not in (None, most) and (arenas > 1 or before == 1):
        reason = f"glibc keeps the first limit that it used, {before} by {host.arena_max.source}"
    else:
        return ""
    return (
        f"too late for arena_max={most}: {reason}; "
        f"put MALLOC_ARENA_MAX={most} before the program in the shell"
    )


def _set(host: HostAllocator, name: str, value: int) -> str:
    """Make one setting; returns what was done, in words."""
    if not malloc.mallopt(name, value):
        raise RuntimeError(f"set() changed nothing: glibc refuses {name}={value:,}")
    if name == "arena_max":
        return (
            f"glibc: at most {value} arena{'' if value == 1 else 's'}, of which {host.arenas} exist"
        )
    ends = ", and no longer raises its thresholds automatically" if host.dynamic else ""
    return f"glibc: {name} {format_bytes(value)} ({value:,} bytes) by mallopt{ends}"
