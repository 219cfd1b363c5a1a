"""`memtools.allocator_settings()`: how torch's CUDA allocator and malloc are set, and by whom.

    allocator_settings() ─► AllocatorSettings ─┬─ .cuda, .host   each value and its source
                                               ├─ .advice()      what to set, and why
                                               ├─ .set(...)      sets malloc, or says it is too late
                                               └─ str()          a table

Reading changes nothing: torch is not imported, and torch reads its variable at the first use of its
allocator, so it is not asked before the program has begun to use CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from memtools import _core
from memtools._allocators import advice as allocator_advice
from memtools._allocators.change import change
from memtools._allocators.conf import NO_CACHING, chosen, parse
from memtools._base import malloc
from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._base.limits import lowest_limit_of_process
from memtools._base.malloc import (
    ARENA_TEST,
    ARENAS_A_CORE,
    BY_MALLOPT,
    END_THE_DYNAMIC,
    Heap,
)
from memtools._base.size import format_bytes
from memtools._base.text import aligned

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value and who set it."""

    #: None if not set
    value: T | None = None
    #: the variable or call that set it
    source: str = ""


@dataclass(frozen=True)
class CudaDevice:
    """Memory of torch's allocator on a device in use, in bytes."""

    #: the device's number
    index: int
    #: in tensors
    allocated: int
    #: from the driver
    reserved: int
    #: unallocated, in segments that are partly in use
    inactive: int
    #: allocations that succeeded only after the cache was freed
    retries: int
    #: the share of the device that torch may use, 0 to 1
    fraction: float


@dataclass(frozen=True)
class CudaAllocator:
    """The settings of torch's CUDA allocator, which may not be in use yet."""

    #: "native" or "cudaMallocAsync"
    backend: Setting[str]
    #: whether segments can grow, against fragmentation
    expandable_segments: Setting[bool]
    #: larger blocks are not split
    max_split_size_mb: Setting[int]
    #: share of memory in use above which unused blocks are freed
    garbage_collection_threshold: Setting[float]
    #: False with PYTORCH_NO_CUDA_MEMORY_CACHING
    caching: Setting[bool]
    #: all set keys; a list in brackets is a text
    values: Mapping[str, Any]
    #: of the variable
    text: Setting[str]
    #: devices with allocations
    devices: tuple[CudaDevice, ...]
    #: whether the process has used CUDA
    in_use: bool

    @property
    def reserved(self) -> int:
        """From the driver, on all devices."""
        return sum(device.reserved for device in self.devices)


@dataclass(frozen=True)
class HostAllocator:
    """The settings of malloc, in bytes. Only those of glibc can be read."""

    #: "glibc", "musl", "jemalloc", "tcmalloc", "mimalloc", or the file's name
    name: str
    #: glibc's, like "2.36"
    version: str | None
    #: the file whose malloc the process calls
    path: str | None
    #: files of other allocators, mapped but not used
    others: tuple[str, ...]
    #: the most arenas
    arena_max: Setting[int]
    #: free memory that stays at the end of a heap
    trim_threshold: Setting[int]
    #: blocks of this size or more are mapped one by one
    mmap_threshold: Setting[int]
    #: extra bytes by which a heap grows
    top_pad: Setting[int]
    #: all that were set
    values: Mapping[str, Setting[int]]
    #: what the arenas hold
    heap: Heap | None
    #: the most arenas, by arena_max or the number of cores
    arena_limit: int

    @property
    def arenas(self) -> int | None:
        """The present number of arenas."""
        return None if self.heap is None else self.heap.arenas

    @property
    def dynamic(self) -> bool:
        """Whether glibc raises its thresholds (to 32 and 64 MiB) as large blocks are freed."""
        return self.name == "glibc" and not any(name in self.values for name in END_THE_DYNAMIC)

    @property
    def arena_test(self) -> int:
        """Arenas at which glibc fixes their maximum."""
        return self.values.get("arena_test", Setting(ARENA_TEST)).value or ARENA_TEST


@dataclass(frozen=True)
class AllocatorSettings:
    """The allocators of this process at one moment; `str()` is a table."""

    #: torch's allocator
    cuda: CudaAllocator
    #: malloc
    host: HostAllocator
    #: what else the advice uses; not in repr(), as it may hold paths
    seen: allocator_advice.Seen = field(repr=False)

    def advice(self) -> list[str]:
        """What to set and why, a text each; usually empty."""
        return allocator_advice.advise(self)

    def set(
        self,
        *,
        arena_max: int | None = None,
        trim_threshold: int | str | None = None,
        mmap_threshold: int | str | None = None,
    ) -> list[str]:
        """Change malloc's settings for this process: all given ones, or none.

        This object does not change. torch's CUDA allocator is set by an environment variable: see
        `advice()`.

        Args:
            arena_max: the most arenas that glibc makes, at least the present number.
            trim_threshold: free memory that glibc keeps at the end of a heap: 1 byte to 2 GiB - 1,
                or like "16 MiB".
            mmap_threshold: blocks of this size or more are mapped one by one and returned when
                freed, at the cost of page faults: 4 KiB to 32 MiB.

        Returns what was done, in words. An error changes nothing.

        Raises ValueError if an argument is out of range, or none is given; RuntimeError if it is
        too late, or malloc is another allocator's: the message has the variables to set before the
        program starts.
        """
        wanted = {
            "arena_max": arena_max,
            "trim_threshold": trim_threshold,
            "mmap_threshold": mmap_threshold,
        }
        given = {name: value for name, value in wanted.items() if value is not None}
        return change(given, _read_host)

    def __str__(self) -> str:
        rows = [*_host_rows(self.host), *_cuda_rows(self.cuda)]
        body = aligned([row for row in rows if len(row) == 3])
        lines = [row[0] if len(row) == 1 else next(body) for row in rows]
        return "\n".join(
            [*lines, "advice", *(f"  {a}" for a in self.advice() or ["nothing to set"])]
        )


def allocator_settings() -> AllocatorSettings:
    """Read the settings of malloc and of torch's CUDA allocator, and what glibc's arenas hold.

    Takes 2 to 3 ms, more if the arenas have many free blocks. Imports no torch and does not start
    CUDA. Settings that other code made with mallopt cannot be read.
    """
    return AllocatorSettings(_read_cuda(), _read_host(), _see())


# --- reading --------------------------------------------------------------------------------------


def _read_cuda() -> CudaAllocator:
    torch = bridge.loaded()
    in_use = initialised(torch)
    variable = chosen(os.environ)
    text = Setting[str]() if variable is None else Setting(variable[1], variable[0])
    getter = getattr(torch._C, "_accelerator_getAllocatorSettings", None) if in_use else None
    if getter is not None and (now := getter()) != (text.value or ""):
        text = Setting(now, "torch, at run time")
    values = parse(text.value or "")

    def value(name: str, kind: type[T]) -> Setting[T]:
        found = values.get(name)
        return Setting(found, text.source) if isinstance(found, kind) else Setting()

    return CudaAllocator(
        backend=value("backend", str),
        expandable_segments=value("expandable_segments", bool),
        max_split_size_mb=value("max_split_size_mb", int),
        garbage_collection_threshold=value("garbage_collection_threshold", float),
        caching=Setting(False, NO_CACHING) if NO_CACHING in os.environ else Setting(),
        values=values,
        text=text,
        devices=_devices(torch) if in_use else (),
        in_use=in_use,
    )


def _devices(torch: Any) -> tuple[CudaDevice, ...]:
    """Read by torch's counters alone: the driver is not asked, and no context is made."""
    found = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        reserved = stats["reserved_bytes"]["all"]["current"]
        if reserved or stats["reserved_bytes"]["all"]["peak"]:
            fraction = torch.cuda.get_per_process_memory_fraction(index)
            allocated = stats["allocated_bytes"]["all"]["current"]
            inactive = stats["inactive_split_bytes"]["all"]["current"]
            retries = stats["num_alloc_retries"]
            found.append(CudaDevice(index, allocated, reserved, inactive, retries, fraction))
    return tuple(found)


def _read_host() -> HostAllocator:
    serving = malloc.find_serving()
    values: dict[str, Setting[int]] = {}
    heap = None
    if serving.name == "glibc":
        found = malloc.settings(malloc.environment_at_start())
        values = {name: Setting(value, source) for name, (value, source) in found.items()}
        xml = malloc.malloc_info()
        heap = None if xml is None else malloc.read_heap(xml)
    most = values.get("arena_max", Setting[int]())
    return HostAllocator(
        serving.name,
        serving.version,
        serving.path,
        serving.others,
        arena_max=most,
        trim_threshold=values.get("trim_threshold", Setting()),
        mmap_threshold=values.get("mmap_threshold", Setting()),
        top_pad=values.get("top_pad", Setting()),
        values=values,
        heap=heap,
        arena_limit=most.value or ARENAS_A_CORE * len(os.sched_getaffinity(0)),
    )


def _see() -> allocator_advice.Seen:
    return allocator_advice.Seen(
        rss=_core.Probe().rss(),
        at_start=_of_allocators(malloc.environment_at_start()),
        now=_of_allocators(os.environ),
        limit=lowest_limit_of_process(),
    )


def _of_allocators(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that allocators read. Others may hold tokens and passwords, which must not get
    into notebooks, logs and tracebacks through an object that the program keeps."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("MALLOC_", "PYTORCH_")) or name in ("GLIBC_TUNABLES", "LD_PRELOAD")
    }


# --- the table ------------------------------------------------------------------------------------

Row = tuple[str, ...]


def _host_rows(host: HostAllocator) -> list[Row]:
    version = f" {host.version}" if host.version else ""
    rows: list[Row] = [(f"malloc: {host.name}{version} ({host.path or 'file unknown'})",)]
    if host.name != "glibc":
        return rows
    if host.heap is not None:
        sizes = f"{format_bytes(host.heap.arena_bytes)}, idle {format_bytes(host.heap.idle_bytes)}"
        rows.append(("arenas", str(host.heap.arenas), sizes))
    own = f"{host.arena_limit}"
    rows.append(_row("arena_max", host.arena_max, own, f"glibc's own, {ARENAS_A_CORE} a core"))
    way = "glibc's own"
    by_hand = any(setting.source == BY_MALLOPT for setting in host.values.values())
    rising = f"128.0 KiB{', rising' if host.dynamic else ' or more' if by_hand else ''}"
    rows += [
        _row("trim_threshold", host.trim_threshold, rising, way, format_bytes),
        _row("mmap_threshold", host.mmap_threshold, rising, way, format_bytes),
    ]
    shown = ("arena_max", "trim_threshold", "mmap_threshold")
    return rows + [_row(name, s, "", "") for name, s in host.values.items() if name not in shown]


def _row(name: str, setting: Setting[Any], own: str, way: str, form: Any = str) -> Row:
    if setting.value is None:
        return name, own, way
    return name, form(setting.value), setting.source


def _cuda_rows(cuda: CudaAllocator) -> list[Row]:
    use = "in use" if cuda.in_use else "not in use yet"
    rows: list[Row] = [(f"CUDA allocator of torch: {use}",)]
    own = {
        "backend": "native",
        "expandable_segments": "False",
        "max_split_size_mb": "no limit",
        "garbage_collection_threshold": "off",
    }
    for name, text in own.items():
        rows.append(_row(name, getattr(cuda, name), text, "torch's own"))
    rows += [(name, str(v), cuda.text.source) for name, v in cuda.values.items() if name not in own]
    if cuda.caching.value is False:
        rows.append(("caching", "off", cuda.caching.source))
    for device in cuda.devices:
        sizes = f"reserved, {format_bytes(device.allocated)} in tensors"
        rows.append((f"cuda:{device.index}", format_bytes(device.reserved), sizes))
    return rows
