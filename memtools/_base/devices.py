"""CUDA devices as a monitor sees them: torch's own counters, and exact peaks of nested phases.

Nothing here makes a CUDA context: until the program has made one, all figures are unknown.
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
from memtools._base.size import format_bytes
from memtools.errors import DeviceError

MOST_DEVICES = 8  # A sample has room for 8 devices.


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device at one moment, in bytes; None if unknown.

    ├── allocated ──┤ inactive, cached ├── others ──┤        free         ├── total
    └─────────────── reserved ─────────┘
    ├── used = allocated + others ...
    """

    #: the device's number
    index: int
    #: in tensors, as torch's allocator counts
    allocated: int | None
    #: reserved from the driver
    reserved: int | None
    #: what the driver can give to any program
    free: int | None
    #: the device's size
    total: int | None
    #: unallocated, in segments that are partly in use
    inactive: int | None
    #: the largest `allocated` since torch's peak was reset
    allocated_peak: int | None = None

    @property
    def others(self) -> int | None:
        """Memory of other programs, the CUDA context and NCCL."""
        if self.total is None or self.free is None or self.reserved is None:
            return None
        return max(0, self.total - self.free - self.reserved)

    @property
    def used(self) -> int | None:
        """The sum of `allocated` and `others`, which no new tensor can use."""
        others = self.others
        return None if self.allocated is None or others is None else self.allocated + others

    @property
    def percent(self) -> float | None:
        """`used` in percent of `total`, 0 to 100; None if unknown."""
        used = self.used
        return None if used is None or not self.total else 100.0 * used / self.total

    def __str__(self) -> str:
        name = f"cuda:{self.index}"
        if self.allocated is None or self.reserved is None:
            return f"{name}: unknown, the program has made no CUDA context"
        line = f"{name}: {format_bytes(self.allocated)} allocated, "
        line += f"{format_bytes(self.reserved)} reserved"
        if self.total is None or self.free is None or self.others is None:
            return line
        line += f", {format_bytes(self.others)} held by others, "
        line += f"{format_bytes(self.free)} of {format_bytes(self.total)} free"
        return line


def device_memory(device: object = None) -> DeviceMemory:
    """Return what torch's allocator has of a CUDA device, and what is free.

    Takes about 2 us. Does not import torch or make a CUDA context: until the program has made one,
    all figures are None, and `free` and `total` are None for a device that it does not use.

    Args:
        device: "cuda", "cuda:0" to "cuda:7", a number or a torch.device. None, the default, and
            "cuda": the current device.

    Raises ValueError if it is not a CUDA device.
    """
    return tiers(_one_device("cuda" if device is None else device))


def _one_device(device: object) -> int:
    """The number of the one device that is meant."""
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    kind, index = parse_device(device)
    if kind != "cuda":
        raise ValueError(f'device must be "cuda", "cuda:N" or a number, got {str(device)!r}')
    if index is not None:
        return index
    torch = bridge.loaded()
    return int(torch.cuda.current_device()) if initialised(torch) else 0


def parse_device(device: object) -> tuple[str, int | None]:
    """What a `device` argument means: "auto", "cpu" or "cuda", and which CUDA device: None for all.

    Raises ValueError if it is not a device that can be watched.
    """
    text = str(device)  # of a torch.device, too
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", text)
    if match is None or (match[2] and match[1] != "cuda"):
        raise ValueError(f'device must be "auto", "cpu", "cuda" or "cuda:N", got {text!r}')
    index = None if match[2] is None else int(match[2])
    if index is not None and index >= MOST_DEVICES:
        raise ValueError(f"device: cuda:0 to cuda:{MOST_DEVICES - 1} can be watched, got {text!r}")
    return match[1], index


def find_devices(device: object, root: str = "/") -> tuple[int, ...]:
    """The indexes of the devices to watch. Imports torch where the machine has any.

    Args:
        device: "auto", "cpu", "cuda" or like "cuda:1".
        root: where the file system begins; tests give a made-up one.

    Raises ValueError as parse_device, DeviceError if a device was asked for by name and is not
    there.
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
    """The same as find_devices("auto"), but none until the program has imported torch."""
    return () if bridge.loaded() is None else find_devices("auto", root)


def _count(torch: Any) -> int:
    """How many devices torch sees. It asks NVML where it can, and makes no context."""
    if torch.version.cuda is None:
        return 0
    return int(torch.cuda.device_count())


def _count_any(root: str) -> int:
    """The same, but torch is imported only where the kernel's driver lists devices."""
    torch = bridge.loaded()
    if torch is None:
        try:
            if not os.listdir(Path(root, "proc/driver/nvidia/gpus")):
                return 0
            torch = bridge.connect().torch
        except (OSError, ImportError):  # no driver, or no torch that would use the devices
            return 0
    return _count(torch)


def initialised(torch: Any) -> bool:
    """Whether the program has made a CUDA context in this process."""
    return torch is not None and torch.version.cuda is not None and torch.cuda.is_initialized()


def tiers(index: int) -> DeviceMemory:
    """What torch and the driver count now: one call of the shim, without it some 10 us of torch."""
    torch = bridge.loaded()
    if not initialised(torch):
        return DeviceMemory(index, None, None, None, None, None)
    native = _core.device_memory(index)
    if native is not None:
        return DeviceMemory(index, *native)
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    free, total = torch.cuda.mem_get_info(index)
    allocated = stats["allocated_bytes"]["all"]
    return DeviceMemory(
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
    figures = held(indexes)
    return None if figures is None else figures[0]


def pinned() -> int | None:
    """The pinned bytes in blocks of torch's allocator of host memory, in use or cached; None before
    there is a context, and if torch does not report them. Takes some 10 us."""
    torch = bridge.loaded()
    if not initialised(torch):
        return None
    try:
        return int(torch.cuda.host_memory_stats_as_nested_dict()["allocated_bytes"]["current"])
    except (AttributeError, KeyError, TypeError, RuntimeError):
        return None


def held(indexes: Sequence[int]) -> tuple[int, int] | None:
    """Bytes (in tensors, reserved by torch) on all these devices together; None before there is a
    context. One call of the shim for each device, without it some 10 us of torch."""
    torch = bridge.loaded()
    if not indexes or not initialised(torch):
        return None
    in_tensors = reserved = 0
    for index in indexes:
        native = _core.device_memory(index)
        if native is not None and native[0] is not None and native[1] is not None:
            in_tensors, reserved = in_tensors + native[0], reserved + native[1]
        else:
            stats = torch.cuda.memory_stats_as_nested_dict(index)
            in_tensors += stats["allocated_bytes"]["all"]["current"]
            reserved += stats["reserved_bytes"]["all"]["current"]
    return in_tensors, reserved


class DevicePeaks:
    """The exact peak of each of several intervals that overlap, although torch has one peak for
    each device.

    It works as csrc/core/monitor/peaks.h does for the host: the beginning of an interval reads
    torch's peak for all intervals that are open and then resets it, and the end of one reads it. So
    phases of this monitor may nest. Other code that calls `torch.cuda.reset_peak_memory_stats`
    makes the peaks too low.
    """

    __slots__ = ("_indexes", "_lock", "_open", "run")

    def __init__(self, indexes: Sequence[int]) -> None:
        self._indexes = tuple(indexes)
        self._open: dict[int, dict[int, int]] = {}
        #: the peak of the whole run in bytes, by device
        self.run: dict[int, int] = {}
        self._lock = threading.RLock()  # a signal handler may leave a phase while another begins
        self._look(reset=True)
        self.run.clear()  # what was before does not belong to this run

    def enter(self, token: int) -> None:
        """Begin the interval `token`."""
        with self._lock:
            self._look(reset=True)
            self._open[token] = {}

    def leave(self, token: int) -> dict[int, int]:
        """End the interval `token`. Returns its peak in bytes by device, empty where it is not
        known."""
        with self._lock:
            self._look(reset=False)
            return self._open.pop(token, {})

    def look(self) -> None:
        """Bring the peaks of all open intervals, and of the run, up to date."""
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
