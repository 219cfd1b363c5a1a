"""CUDA devices as a monitor sees them: torch's own counters, and exact peaks of nested phases.

Nothing here makes a CUDA context: as long as the program has not, all figures are unknown.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools.errors import DeviceError

MOST_DEVICES = 8  # that a sample has room for


@dataclass(frozen=True, slots=True)
class DeviceTiers:
    """A device's memory in bytes; None where it is not known (yet)."""

    index: int
    #: in tensors, as torch's allocator counts them
    allocated: int | None
    #: that the allocator has from the driver
    reserved: int | None
    #: that the driver would still give to anybody
    free: int | None
    total: int | None
    #: reserved, not allocated, and in blocks that are partly in use
    inactive: int | None
    #: the most in tensors since the program last reset torch's peak
    allocated_peak: int | None = None


def parse_device(device: object) -> tuple[str, int | None]:
    """("auto", None), ("cpu", None), ("cuda", None for all or the index)."""
    text = str(device)  # a torch.device shows itself so
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", text)
    if match is None or (match[2] and match[1] != "cuda"):
        raise ValueError(f'device is "auto", "cpu", "cuda" or like "cuda:1", got {text!r}')
    index = None if match[2] is None else int(match[2])
    if index is not None and index >= MOST_DEVICES:
        raise ValueError(f"device: cuda:0 to cuda:{MOST_DEVICES - 1} can be watched, got {text!r}")
    return match[1], index


def find_devices(device: object, root: str = "/") -> tuple[int, ...]:
    """Indexes of the devices to watch. Imports torch where there are any.

    Raises DeviceError where a device was asked for by name and is not there.
    """
    kind, index = parse_device(device)
    if kind == "cpu":
        return ()
    if kind == "auto":
        return tuple(range(min(_count_any(root), MOST_DEVICES)))
    try:
        count = _count(bridge.connect().torch)
    except ImportError as error:
        raise DeviceError(f"device={str(device)!r}: {error}") from error
    if count <= (index or 0):
        raise DeviceError(
            f"device={str(device)!r}: torch sees {count} CUDA devices; pass device='auto', "
            "which watches what is there"
        )
    return tuple(range(min(count, MOST_DEVICES))) if index is None else (index,)


def seen_devices(root: str = "/") -> tuple[int, ...]:
    """As find_devices("auto"), but without importing torch: none as long as nobody has."""
    return () if bridge.loaded() is None else find_devices("auto", root)


def _count(torch: Any) -> int:
    """That torch would see. Asks NVML where it can, and makes no context."""
    if torch.version.cuda is None:
        return 0
    return int(torch.cuda.device_count())


def _count_any(root: str) -> int:
    """By torch, which is imported only where the kernel's driver lists devices."""
    torch = bridge.loaded()
    if torch is None and _count_files(root) > 0:
        try:
            torch = bridge.connect().torch
        except ImportError:  # then nobody here will use them
            return 0
    return 0 if torch is None else _count(torch)


def _count_files(root: str) -> int:
    """Devices that the kernel's driver lists."""
    try:
        return len(os.listdir(Path(root, "proc/driver/nvidia/gpus")))
    except OSError:
        return 0


def initialised(torch: Any) -> bool:
    """Whether the program has made a CUDA context in this process."""
    return torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized()


def tiers(index: int) -> DeviceTiers:
    """As torch and the driver count now: one call of the shim, without it some 10 us of torch."""
    torch = bridge.loaded()
    if not initialised(torch):
        return DeviceTiers(index, None, None, None, None, None)
    native = _core.device_memory(index)
    if native is not None:
        return DeviceTiers(index, *native)
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    free, total = torch.cuda.mem_get_info(index)
    allocated = stats["allocated_bytes"]["all"]
    return DeviceTiers(
        index,
        allocated["current"],
        stats["reserved_bytes"]["all"]["current"],
        free,
        total,
        stats["inactive_split_bytes"]["all"]["current"],
        allocated["peak"],
    )


def allocated(indexes: Sequence[int]) -> int | None:
    """Bytes in tensors on all these devices; None before there is a context."""
    both = held(indexes)
    return None if both is None else both[0]


def held(indexes: Sequence[int]) -> tuple[int, int] | None:
    """Bytes (in tensors, reserved by torch) on all these devices; None before there is a context.
    One call of the shim for each, without it some 10 us of torch."""
    torch = bridge.loaded()
    if not indexes or not initialised(torch):
        return None
    both = [_held(torch, index) for index in indexes]
    return sum(one[0] for one in both), sum(one[1] for one in both)


def _held(torch: Any, index: int) -> tuple[int, int]:
    native = _core.device_memory(index)
    if native is not None and native[0] is not None and native[1] is not None:
        return native[0], native[1]
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    now = [stats[key]["all"]["current"] for key in ("allocated_bytes", "reserved_bytes")]
    return int(now[0]), int(now[1])


class DevicePeaks:
    """The exact peak of each of several intervals that overlap, by torch's one mark a device.

    As csrc/core/monitor/peaks.h does it for the host: whoever begins reads the mark for all that
    are open and sets it back, whoever ends reads it. So the phases of this monitor may nest; what
    else in the program calls `torch.cuda.reset_peak_memory_stats` makes peaks too low.
    """

    __slots__ = ("_indexes", "_lock", "_open", "run")

    def __init__(self, indexes: Sequence[int]) -> None:
        self._indexes = tuple(indexes)
        self._open: dict[int, dict[int, int]] = {}
        #: of the whole run, by device
        self.run: dict[int, int] = {}
        self._lock = threading.RLock()  # a signal handler may leave a phase while another begins
        self._look(reset=True)
        self.run.clear()  # what was before is not of this run

    def enter(self, token: int) -> None:
        with self._lock:
            self._look(reset=True)
            self._open[token] = {}

    def leave(self, token: int) -> dict[int, int]:
        """Bytes by device; empty where nothing is known."""
        with self._lock:
            self._look(reset=False)
            return self._open.pop(token, {})

    def look(self) -> None:
        """Brings the peaks of everything that is open, and of the run, up to date."""
        with self._lock:
            self._look(reset=False)

    def _look(self, reset: bool) -> None:
        torch = bridge.loaded()
        if not initialised(torch):
            return
        for index in self._indexes:
            stat = torch.cuda.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]
            for peaks in (self.run, *self._open.values()):
                peaks[index] = max(peaks.get(index, 0), stat["peak"])
            if reset and stat["peak"] > stat["current"]:
                torch.cuda.reset_peak_memory_stats(index)
