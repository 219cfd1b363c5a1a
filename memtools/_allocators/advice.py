"""What to set and why: rules over the settings that were read, each in a sentence or two."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtools._allocators.conf import ASYNC_KEYS, NO_CACHING, VARIABLES
from memtools._base import malloc
from memtools._base.size import format_bytes

if TYPE_CHECKING:
    from memtools._allocators.settings import AllocatorSettings, CudaAllocator, HostAllocator

MIB = 2**20
IDLE = 64 * MIB  # Less than this, or than 5 % of the resident memory, needs no setting.
FRAGMENTED = 0.25  # A smaller share of the reserved memory in holes needs no setting.


@dataclass(frozen=True)
class Seen:
    """What the advice looks at besides the settings."""

    #: resident memory in bytes; None where /proc cannot be read
    rss: int | None
    #: the variables that allocators read, when the program began
    at_start: Mapping[str, str]
    #: the same variables now
    now: Mapping[str, str]
    #: the lower of RLIMIT_DATA and RLIMIT_AS in bytes, and its name; None where both are unlimited
    limit: tuple[int, str] | None = None


def advise(settings: AllocatorSettings) -> list[str]:
    """What AllocatorSettings.advice() returns."""
    seen = settings.seen
    return [
        *_preload(settings.host, seen),
        *_host_variables(settings.host, seen),
        *_idle(settings.host, seen),
        *_limited(settings.host, seen),
        *_cuda_text(settings.cuda, seen),
        *_cuda_pairs(settings.cuda),
        *_cuda_devices(settings.cuda),
    ]


# --- malloc ---------------------------------------------------------------------------------------


def _preload(host: HostAllocator, seen: Seen) -> Iterator[str]:
    mapped = {path for path in (host.path, *host.others) if path}
    for name in re.split(r"[ :]+", seen.at_start.get("LD_PRELOAD", "")):
        kind = malloc.name_of(name)
        if kind and kind != host.name and not any(malloc.name_of(path) == kind for path in mapped):
            yield (
                f"LD_PRELOAD names {name}, which is not mapped into this process: give a path that "
                "exists, and set it before the program starts."
            )
    if host.name == "glibc" and host.others:
        files = ", ".join(host.others)
        yield (
            f"{files} is mapped, but malloc is glibc's: to be used it must be in LD_PRELOAD when "
            "the program starts."
        )


def _host_variables(host: HostAllocator, seen: Seen) -> Iterator[str]:
    names = [variable for variable, _, _ in malloc.TUNABLES.values()] + ["GLIBC_TUNABLES"]
    present = [name for name in names if name in seen.at_start]
    if host.name != "glibc":
        if present:
            yield f"{' and '.join(present)}: without effect, because malloc is {host.name}'s."
        return
    for name in names:
        was, now = seen.at_start.get(name), seen.now.get(name)
        cut = name == "GLIBC_TUNABLES" and was and now and was.startswith(now)  # by glibc itself
        if was != now and not cut:
            yield (
                f"{name} was changed after the program began: glibc read it at the start, so it "
                "counts only for processes started from here; put it before the program in the "
                "shell, or use set()."
            )
    inner = malloc.tunables(seen.at_start.get("GLIBC_TUNABLES", ""))
    for variable, tunable, least in malloc.TUNABLES.values():
        text = seen.at_start.get(variable)
        if text is not None and ((value := malloc.number(text)) is None or value < least):
            yield (
                f"{variable}={text}: glibc ignores it; it must be a whole number of at least "
                f"{least}."
            )
        elif text is not None and inner.get(tunable, text) != text:
            yield f"{variable}={text} does not count: {tunable} in GLIBC_TUNABLES wins."
    if host.trim_threshold.value is not None and host.mmap_threshold.value is None:
        yield (
            "trim_threshold is set and mmap_threshold is not: glibc then leaves the latter at "
            "128 KiB, or where it was, so that larger blocks are mapped again each time; set "
            "mmap_threshold too, 32 MiB at most."
        )


def _idle(host: HostAllocator, seen: Seen) -> Iterator[str]:
    heap = host.heap
    if heap is None or heap.idle_bytes < max(IDLE, (seen.rss or 0) // 20):
        return
    share = f" of {format_bytes(seen.rss)} resident" if seen.rss else ""
    idle = f"glibc's arenas hold {format_bytes(heap.idle_bytes)} idle{share}"
    if host.dynamic:
        yield (
            f"{idle}: freeing large blocks has raised its thresholds, up to 32 MiB for mapping "
            "and 64 MiB for trimming, so what is freed stays. malloc_trim at a safe point "
            "(CleanupPolicy's trim) gives it back at the lowest cost; set(mmap_threshold='1 MiB', "
            "trim_threshold='16 MiB'), or MALLOC_MMAP_THRESHOLD_=1048576 "
            "MALLOC_TRIM_THRESHOLD_=16777216 before the program in the shell, gives back each "
            "block when it is freed, at the cost of page faults for the next one."
        )
    else:
        yield (
            f"{idle} although the thresholds are set: it lies between used blocks; malloc_trim "
            "(CleanupPolicy's trim) gives back its pages."
        )
    if heap.idle_elsewhere >= IDLE and heap.arenas > 2 and host.arena_max.value is None:
        yield (
            f"{format_bytes(heap.idle_elsewhere)} of it is in {heap.arenas - 1} arenas other than "
            f"the main one (at most {host.arena_limit}): MALLOC_ARENA_MAX=2 before the program in "
            "the shell lets DataLoader and pool threads share two, at the cost of lock contention."
        )


def _limited(host: HostAllocator, seen: Seen) -> Iterator[str]:
    if seen.limit is None or not host.dynamic:
        return
    size, name = seen.limit
    yield (
        f"{name} is {format_bytes(size)}, and what glibc keeps of freed memory counts against it: "
        "set(mmap_threshold='1 MiB', trim_threshold='16 MiB') at the program's start, or "
        "MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_TRIM_THRESHOLD_=16777216 before the program in the "
        "shell, gives back each large block when it is freed."
    )


# --- torch's CUDA allocator -----------------------------------------------------------------------


def _cuda_text(cuda: CudaAllocator, seen: Seen) -> Iterator[str]:
    present = [name for name in VARIABLES if name in seen.now]
    if len({seen.now[name] for name in present}) > 1:
        yield (
            f"{' and '.join(present)} are set and differ: torch reads {present[0]} alone; put all "
            "keys into one."
        )
    if cuda.in_use and cuda.text.source not in VARIABLES and present:
        yield (
            f"{present[0]} is not what torch uses: it was changed after torch had read it, or "
            "torch was set at run time; put it before the program in the shell."
        )
    if NO_CACHING in seen.now:
        yield (
            f"{NO_CACHING} is set (any value counts): each tensor is one cudaMalloc, many times "
            "slower, and the other keys do nothing; unset it except for debugging."
        )


def _cuda_pairs(cuda: CudaAllocator) -> Iterator[str]:
    if cuda.backend.value not in (None, "native"):
        ignored = sorted(cuda.values.keys() - ASYNC_KEYS)
        if ignored:
            yield f"backend:{cuda.backend.value} ignores {', '.join(ignored)}: leave them out."
        return
    growing, split = cuda.expandable_segments.value, cuda.max_split_size_mb.value
    share = cuda.garbage_collection_threshold.value
    if growing and split is not None:
        yield (
            "expandable_segments:True splits blocks of any size, so max_split_size_mb keeps none "
            "whole and only bars large free blocks from smaller tensors: leave one of them out."
        )
    if growing and share is not None:
        yield (
            "garbage_collection_threshold frees whole segments, which expandable segments never "
            "are: with expandable_segments:True it does nothing."
        )
    limited = "per_process_memory_fraction" in cuda.values
    limited |= any(device.fraction < 1 for device in cuda.devices)
    if share is not None and not limited:
        yield (
            "garbage_collection_threshold is a share of the process's limit: it does nothing "
            "until torch.cuda.set_per_process_memory_fraction() is called."
        )


def _cuda_devices(cuda: CudaAllocator) -> Iterator[str]:
    if cuda.expandable_segments.value or cuda.backend.value not in (None, "native"):
        return
    why = []
    for device in cuda.devices:
        if device.inactive >= max(IDLE, FRAGMENTED * device.reserved):
            part = f"{format_bytes(device.inactive)} of {format_bytes(device.reserved)} reserved"
            why.append(f"cuda:{device.index} has {part} in holes between tensors")
        if device.retries:
            times = "once" if device.retries == 1 else f"{device.retries} times"
            why.append(f"cuda:{device.index} had to free its cache {times} to continue")
    if why:
        variable = cuda.text.source if cuda.text.source in VARIABLES else VARIABLES[-1]
        yield (
            f"{'; '.join(why)}: {variable}=expandable_segments:True before the program in the "
            "shell lets segments grow, so that holes can be used."
        )
