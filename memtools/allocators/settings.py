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
from pathlib import Path
from typing import Any, Generic, TypeVar

from memtools._base import malloc
from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._base.malloc import (
    ARENA_TEST,
    ARENAS_A_CORE,
    BY_MALLOPT,
    END_THE_DYNAMIC,
    Heap,
)
from memtools._base.size import format_bytes
from memtools._base.text import aligned
from memtools.allocators import advice as allocator_advice
from memtools.allocators.conf import NO_CACHING, chosen, parse

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value and where it comes from."""

    #: None: nobody set it
    value: T | None = None
    #: the variable, or who set it; "" where nobody did and the allocator's own way counts
    source: str = ""


@dataclass(frozen=True)
class CudaDevice:
    """What torch's allocator has of a device that the process uses, in bytes."""

    index: int
    allocated: int
    reserved: int
    #: reserved, not allocated, in blocks that are partly in use; expandable segments count none
    inactive: int
    #: how often an allocation failed until torch gave its cache back
    retries: int
    #: how much of the device torch may take, 0 to 1
    fraction: float


@dataclass(frozen=True)
class CudaAllocator:
    """How torch's allocator for CUDA is set, or will be where the program has not used it yet."""

    backend: Setting[str]
    expandable_segments: Setting[bool]
    max_split_size_mb: Setting[int]
    garbage_collection_threshold: Setting[float]
    #: False: each tensor is one cudaMalloc, by PYTORCH_NO_CUDA_MEMORY_CACHING
    caching: Setting[bool]
    #: all keys that are set; a list in brackets is its text
    values: Mapping[str, Any]
    #: the whole text and where it comes from
    text: Setting[str]
    #: devices on which the process has allocated; empty before it uses CUDA
    devices: tuple[CudaDevice, ...]
    #: whether the process has begun to use CUDA
    in_use: bool

    @property
    def reserved(self) -> int:
        """Bytes in segments, on all devices."""
        return sum(device.reserved for device in self.devices)


@dataclass(frozen=True)
class HostAllocator:
    """How malloc is set. None for arenas and sizes: this allocator does not tell."""

    #: "glibc", "musl", "jemalloc", "tcmalloc", "mimalloc", or the file's name
    name: str
    version: str | None
    #: the file whose malloc the process calls
    path: str | None
    #: allocators that are mapped as well, and do not serve
    others: tuple[str, ...]
    arena_max: Setting[int]
    trim_threshold: Setting[int]
    mmap_threshold: Setting[int]
    top_pad: Setting[int]
    #: all of glibc's values that somebody set
    values: Mapping[str, Setting[int]]
    heap: Heap | None
    #: what glibc allows, by arena_max or the cores
    arena_limit: int

    @property
    def arenas(self) -> int | None:
        """That exist now."""
        return None if self.heap is None else self.heap.arenas

    @property
    def dynamic(self) -> bool:
        """Whether glibc raises its thresholds by itself, up to 32 and 64 MiB, as blocks go."""
        return self.name == "glibc" and not any(name in self.values for name in END_THE_DYNAMIC)

    @property
    def arena_test(self) -> int:
        """With so many arenas glibc fixes their number, for the life of the process."""
        return self.values.get("arena_test", Setting(ARENA_TEST)).value or ARENA_TEST


@dataclass(frozen=True)
class AllocatorSettings:
    """The allocators of this process as they are set at one moment; `str()` is a table."""

    cuda: CudaAllocator
    host: HostAllocator
    #: what else the advice goes by; paths may stand in it, so no repr shows it
    seen: allocator_advice.Seen = field(repr=False)

    def advice(self) -> list[str]:
        """What to set and why, by this machine and what was seen of this program; most often
        empty. Each is one or two sentences."""
        return allocator_advice.advise(self)

    def set(
        self,
        *,
        arena_max: int | None = None,
        trim_threshold: int | str | None = None,
        mmap_threshold: int | str | None = None,
    ) -> list[str]:
        """Set malloc for this process, all that is given or nothing. Returns what was done, in
        words.

        This object stays as it was read; `memtools.allocator_settings()` reads anew. torch's CUDA
        allocator is set by its variable, before the program in the shell: `advice()` has the line.

        Args:
            arena_max: most arenas of glibc; possible until there are more.
            trim_threshold: bytes or "16 MiB" of free memory at a heap's end that glibc keeps.
            mmap_threshold: bytes or "1 MiB", 4 KiB to 32 MiB; from there on each block is mapped
                by itself and given back when it is freed, at the price of its page faults.

        Raises ValueError or TypeError for what cannot be, and RuntimeError where it is too late or
        another allocator serves: it says what to put before the program in the shell. Then nothing
        is changed.
        """
        from memtools.allocators import change

        wanted = {
            "arena_max": arena_max,
            "trim_threshold": trim_threshold,
            "mmap_threshold": mmap_threshold,
        }
        return change.change({name: v for name, v in wanted.items() if v is not None})

    def __str__(self) -> str:
        rows = [*_host_rows(self.host), *_cuda_rows(self.cuda)]
        body = aligned([row for row in rows if len(row) == 3])
        lines = [row[0] if len(row) == 1 else next(body) for row in rows]
        return "\n".join(
            [*lines, "advice", *(f"  {a}" for a in self.advice() or ["nothing to set"])]
        )


def allocator_settings() -> AllocatorSettings:
    """Reads how malloc and torch's CUDA allocator are set now, and what glibc's arenas hold.

    Takes 2 to 3 ms, more where glibc's arenas have many free blocks. Imports no torch,
    starts nothing of CUDA and changes nothing. What somebody else set by mallopt cannot be read:
    glibc does not tell.
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
    """By torch's counters alone: the driver is not asked, and no context made."""
    found = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        reserved = stats["reserved_bytes"]["all"]["current"]
        if reserved or stats["reserved_bytes"]["all"]["peak"]:
            fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
            allocated = stats["allocated_bytes"]["all"]["current"]
            inactive = stats["inactive_split_bytes"]["all"]["current"]
            retries = stats.get("num_alloc_retries", 0)
            found.append(CudaDevice(index, allocated, reserved, inactive, retries, fraction(index)))
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
    threads = _number_of_threads()
    return allocator_advice.Seen(
        rss=_resident(),
        threads=threads,
        kernel=os.uname().release,
        at_start=_of_allocators(malloc.environment_at_start()),
        now=_of_allocators(os.environ),
        limit=malloc.lowest_limit(),
    )


def _of_allocators(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that allocators read. The rest of an environment holds tokens and passwords,
    which must not get into notebooks, logs and tracebacks through an object that somebody keeps."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(("MALLOC_", "PYTORCH_")) or name in ("GLIBC_TUNABLES", "LD_PRELOAD")
    }


def _resident() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _number_of_threads() -> int | None:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


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
