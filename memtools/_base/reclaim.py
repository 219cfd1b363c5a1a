"""Giving memory back: Python's cycles, torch's cached blocks, malloc's idle pages, and what parts
of memtools keep for later, such as the idle pages of a KVPool."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from memtools import _core
from memtools._base import devices as devices_of_torch
from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._base.environment import is_off

WORTH = 64 << 20  # Fewer idle bytes of malloc are not worth a walk through its free lists.
#: The keys of what `cleanup` returns.
FIGURES = (
    "freed_bytes",
    "host_freed_bytes",
    "device_freed_bytes",
    "collected_objects",
    "ms",
    "gc_ms",
    "empty_cache_ms",
    "trim_ms",
)


class Trims(Protocol):
    """A part that keeps memory which it can give back."""

    def trim(self) -> int:
        """Give back what is idle; return how many bytes that were."""


_trims: weakref.WeakSet[Any] = weakref.WeakSet()
times_trimmed = 0  # How often malloc has given its idle pages back.


def offer(part: Trims) -> None:
    """Register a part for `ask()`, for as long as it is alive. Its `trim()` is called on the main
    thread, also in the middle of a forward pass."""
    _trims.add(part)


def ask() -> int:
    """Ask every part that keeps memory to give back what is idle. Returns the bytes that came back.
    A part that fails, as one that is closed or in use by another thread, is left out."""
    freed = 0
    for part in list(_trims):
        try:
            freed += part.trim()
        except Exception:  # the others can still give back
            continue
    return freed


def cleanup(probe: _core.Probe, devices: Sequence[int], aggressive: bool) -> dict[str, float]:
    """What MemoryMonitor.cleanup_memory returns."""
    if is_off:
        return dict.fromkeys(FIGURES, 0.0)
    rss, reserved = probe.rss(), _reserved(devices)
    collected, gc_ms = _timed(lambda: gc.collect() + (gc.collect() if aggressive else 0))
    emptied, cache_ms = _timed(empty_cache)
    idle = probe.read(_core.READ_HEAP).heap_free
    trims = aggressive or (idle is not None and idle >= WORTH)
    trimmed, trim_ms = _timed(trim) if trims else (False, 0.0)
    host, device = fallen(rss, probe.rss()), fallen(reserved, _reserved(devices))
    took = [gc_ms, cache_ms if emptied else 0.0, trim_ms if trimmed else 0.0]
    figures = [host + device, host, device, collected, gc_ms + cache_ms + trim_ms, *took]
    return dict(zip(FIGURES, figures, strict=True))


def event_of(done: dict[str, float]) -> dict[str, object]:
    """What `cleanup` returned as the fields of a record's cleanup event."""
    keys = {"gc": "gc_ms", "empty_cache": "empty_cache_ms", "malloc_trim": "trim_ms"}
    ran = {name: done[key] for name, key in keys.items() if name == "gc" or done[key]}
    return {
        "actions": tuple(ran),
        "ms": tuple(ran.values()),
        "notes": (f"{done['collected_objects']:.0f} objects",),
        "host_freed_bytes": int(done["host_freed_bytes"]),
        "device_freed_bytes": int(done["device_freed_bytes"]),
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    result = call()
    return result, 1e3 * (time.perf_counter() - begin)


def _reserved(devices: Sequence[int]) -> int | None:
    held = devices_of_torch.held(devices)
    return None if held is None else held[1]


def empty_cache() -> bool:
    torch = bridge.loaded()
    if not initialised(torch):
        return False
    torch.cuda.empty_cache()
    return True


def trim() -> bool:
    """False on a C library that cannot."""
    global times_trimmed
    try:
        give_back = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return False
    give_back(ctypes.c_size_t(0))
    times_trimmed += 1
    return True


def fallen(before: int | None, after: int | None) -> int:
    return 0 if before is None or after is None else max(0, before - after)
