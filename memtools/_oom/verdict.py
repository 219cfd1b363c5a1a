"""What the figures of a message mean: the tiers, size or fragmentation, and what to change.

    capacity  = allocated + reserved but unallocated + not PyTorch's + other processes + free
    requested > free + unallocated           size: packed as well as can be, it does not fit
    requested > free, but <= their sum       fragmentation: it is there, in pieces
    requested <= free                        the text cannot tell

Before torch raises, it gives all whole segments back and asks the driver again. So what is reserved
but unallocated then lies in segments of which another block is in use, and cannot be given back.

The figures of torch have two decimals. Where the difference is less than they leave open, the text
cannot tell either.

A container does not know its own process number on the host: torch lists the process itself as
"Process 4711 has ... in use" then. The process that has at least what torch had reserved, and least
beyond, is taken for it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from memtools._base.size import format_bytes
from memtools._oom.codes import exit_code
from memtools._oom.message import DEVICE, HOST, SHM, UNCLEAR, OomMessage

SIZE, FRAGMENTATION, LIMIT, UNKNOWN = "size", "fragmentation", "limit", "unknown"
#: torch asks for segments of these sizes where a tensor is smaller: up to 1 MiB, up to 10 MiB
_SMALL, _LARGE = 2 << 20, 20 << 20
#: bytes that no device has
NO_DEVICE: Final = 1 << 50
#: what C writes of a negative number of bytes
_NEGATIVE: Final = re.compile(r"allocate 1844674\d{13}\b")
#: The driver and a CUDA context take less than this.
MUCH: Final = 1 << 30
#: bytes of one element, by the names of numpy's types
_DTYPES: Final = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16, "float32": 4,
    "int32": 4, "uint32": 4, "float16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Tier:
    """A part of memory: its name, its bytes, and whether it follows from others."""

    name: str
    bytes: int
    derived: bool = False


@dataclass(frozen=True)
class Change:
    """Something to change.

    Attributes:
        text: what, one clause.
        most: the bytes that it can bring at most; None if the text does not tell.
        enough: whether that is as much as is missing; None if it is not known.
    """

    text: str
    most: int | None = None
    enough: bool | None = None


@dataclass(frozen=True)
class Verdict:
    """What a message means.

    Attributes:
        cause: SIZE, FRAGMENTATION, LIMIT or UNKNOWN.
        text: one clause that says so, with the figures that decide.
        missing: the bytes that were missing; None if it is not known.
        scale: the size that the tiers are parts of; None without one.
        tiers: they, from allocated to free.
        notes: what else the figures mean.
        changes: what to change, the most useful first.
    """

    cause: str
    text: str
    missing: int | None
    scale: int | None
    tiers: tuple[Tier, ...]
    notes: tuple[str, ...]
    changes: tuple[Change, ...]


def verdict_of(message: OomMessage, expandable: bool | None = None) -> Verdict:
    """What a message means.

    Args:
        message: it.
        expandable: whether expandable segments were on; None if the text does not say so.
    """
    if message.kind == "mps":
        return _mps(message)
    if message.where == DEVICE:
        return _device(message, expandable)
    return _host(message)


# --- a device -------------------------------------------------------------------------------------


def own_process(message: OomMessage) -> int | None:
    """The index in `others` of the process that wrote the message, in a container."""
    reserved = _sum(message.allocated, message.unallocated)
    if message.process is not None or reserved is None:
        return None
    fit = [
        (size, i)
        for i, (_, size) in enumerate(message.others)
        if size + _doubt(size, message.allocated, message.unallocated) >= reserved
    ]
    return min(fit)[1] if fit else None


@dataclass(frozen=True)
class _Parts:
    """The parts of a device that a message gives, or from which they follow."""

    reserved: int | None
    own: int | None  # of this process, beyond what is reserved
    others: int | None  # of other processes
    rest: int | None  # of either: the text does not say whose
    itself: tuple[int, int] | None  # the process listed by another number


def _parts(message: OomMessage) -> _Parts:
    reserved = _sum(message.allocated, message.unallocated)
    index = own_process(message)
    itself = None if index is None else message.others[index]
    process = message.process if itself is None else itself[1]
    own = None if process is None or reserved is None else max(0, process - reserved)
    listed = [size for i, (_, size) in enumerate(message.others) if i != index]
    others = sum(listed) if message.others else None
    rest = None
    if message.capacity is not None and message.free is not None and reserved is not None:
        left = message.capacity - message.free - reserved - (own or 0) - (others or 0)
        rest = left if left > _doubt(message.capacity, message.free, reserved) else None
    return _Parts(reserved, own, others, rest, itself)


def _device(message: OomMessage, expandable: bool | None) -> Verdict:
    parts = _parts(message)
    cause, text, missing = _cause(message, parts, expandable)
    scale = message.capacity
    tiers = _tiers(message, parts)
    if scale is not None:
        scale = max(scale, sum(tier.bytes for tier in tiers))
    notes = tuple(_notes(message, parts, expandable))
    changes = _device_changes(message, parts, expandable, cause, missing)
    return Verdict(cause, text, missing, scale, tiers, notes, changes)


def _cause(
    message: OomMessage, parts: _Parts, expandable: bool | None
) -> tuple[str, str, int | None]:
    asked, free, idle = message.requested, message.free, message.unallocated
    if asked is None:
        return UNKNOWN, "the text does not give the requested size", None
    size = format_bytes(asked)
    if asked >= NO_DEVICE:
        return SIZE, "no device has that much: a shape is wrong, or a product overflowed", None
    if message.capacity is not None and asked > message.capacity:
        text = f"{size} requested at once, more than the device has: {_of(message.capacity)}"
        return SIZE, text, asked - (free or 0)
    allowed = message.allowed
    if allowed is not None and parts.reserved is not None:
        left = max(0, allowed - parts.reserved)
        doubt = _doubt(allowed, message.allocated, idle)
        if asked + doubt > left and (free is None or free >= asked):
            text = (
                f"a limit of {_of(allowed)} is set for this process (a memory fraction), of which "
                f"{_of(left)} were left for {size}"
            )
            if abs(asked - left) <= doubt:
                return LIMIT, f"{text}, to the precision of the text", None
            if asked > left + (idle or 0):
                return LIMIT, text, asked - left - (idle or 0)
            return LIMIT, f"{text} and {_of(idle)} were fragmented", asked - left
        free = left if free is None else min(free, left)
    if free is None:
        unknown = f"{size} requested, and the text does not say how much was free"
        return _beyond(message) or (UNKNOWN, unknown, None)
    if asked <= free:
        text = (
            f"{_of(free)} were free for {size}, so the figures show neither size nor "
            "fragmentation: another process may have used it at that moment, or the driver may "
            "not give that much at once"
        )
        return UNKNOWN, text, None
    if idle is None:
        unknown = (
            f"{size} requested, {_of(free)} free; the text does not say how much was reserved but "
            "unallocated"
        )
        return _beyond(message) or (UNKNOWN, unknown, None)
    both = f"{_of(free)} free and {_of(idle)} reserved but unallocated"
    missing = asked - free - idle
    sums = () if message.reserved is None else (message.reserved, message.allocated)
    if abs(missing) <= _doubt(asked, free, idle, *sums):
        text = f"{both} are as much as the {size} requested, within rounding"
        return UNKNOWN, text, None
    if missing > 0:
        text = (
            f"{both} are {_of(free + idle)}, less than the {size} requested: {_of(missing)} are "
            "missing even without fragmentation"
        )
        return SIZE, text, missing
    if expandable:
        text = (
            f"{both} are {_of(free + idle)}, more than the {size} requested, but expandable "
            "segments are on, which prevent fragmentation: the memory may be in other streams, in "
            "private pools, or in older segments"
        )
        return UNKNOWN, text, asked - free
    text = (
        f"{both} are {_of(free + idle)}, more than the {size} requested, but not in one piece; "
        f"without fragmentation, {_of(-missing)} would be left"
    )
    return FRAGMENTATION, text, asked - free


def _beyond(message: OomMessage) -> tuple[str, str, int | None] | None:
    """That a request does not fit with what is allocated, whatever else the device holds."""
    if message.requested is None or message.capacity is None or message.allocated is None:
        return None
    room = max(0, message.capacity - message.allocated)
    if message.requested <= room:
        return None
    asked = format_bytes(message.requested)
    text = f"{asked} requested, and {_of(room)} of the device are not allocated"
    return SIZE, text, message.requested - room


def _tiers(message: OomMessage, parts: _Parts) -> tuple[Tier, ...]:
    tiers = []
    if message.allocated is not None:
        tiers.append(Tier("allocated by PyTorch", message.allocated))
    if message.unallocated is not None:
        tiers.append(Tier("reserved but unallocated", message.unallocated))
    if parts.own is not None:
        tiers.append(Tier("this process, not PyTorch's", parts.own, derived=True))
    for i, (pid, size) in enumerate(message.others):
        if (pid, size) != parts.itself and i < 8:
            tiers.append(Tier(f"process {pid}", size))
    more = [size for pair in message.others[8:] if pair != parts.itself for size in pair[1:]]
    if more:
        tiers.append(Tier(f"{len(more)} other processes", sum(more)))
    if parts.rest is not None:
        name = (
            "the rest: the driver, others" if parts.own is not None else "the rest: context, others"
        )
        tiers.append(Tier(name, parts.rest, derived=True))
    if message.free is not None:
        tiers.append(Tier("free", message.free))
    return tuple(tiers)


def _notes(message: OomMessage, parts: _Parts, expandable: bool | None) -> list[str]:
    notes = []
    if message.requested == _LARGE:
        notes.append(
            "20.00 MiB is the segment size for any tensor of 1 to 10 MiB, so the tensor was smaller"
        )
    elif message.requested == _SMALL:
        notes.append(
            "2.00 MiB is the segment size for tensors of at most 1 MiB, so the tensor was smaller"
        )
    if message.private:
        notes.append(
            f"{_of(message.private)} of the allocated memory are in private pools (CUDA graphs), "
            "which other tensors cannot use"
        )
    if parts.itself is not None:
        pid, size = parts.itself
        notes.append(
            f"process {pid} with {_of(size)} is most likely this process itself, whose number "
            "differs inside a container"
        )
    allocated, capacity = message.allocated, message.capacity
    if allocated is not None and capacity is not None and allocated > capacity:
        notes.append(
            "more is allocated than the device has: the driver moves memory to the host (as on "
            "Windows), which is slow"
        )
    if message.unallocated is not None and message.backend in ("CUDA", "HIP", None):
        if message.reserved is not None:
            notes.append("the text is from a torch before 2.1, which has no expandable_segments")
        elif expandable is None:
            notes.append("the text does not say whether expandable_segments is on")
        elif expandable:
            notes.append(
                "expandable_segments is on: one segment grows, so there is little fragmentation"
            )
        else:
            notes.append("expandable_segments is off: segments have fixed sizes and fragment")
    return notes


_RUN: Final = (
    "run a few steps under memtools run (a CPU will do): it names the tensors at the peak of a "
    "step and the lines that made them"
)


def _device_changes(
    message: OomMessage,
    parts: _Parts,
    expandable: bool | None,
    cause: str,
    missing: int | None,
) -> tuple[Change, ...]:
    """Those first that can bring what is missing, each with what it can bring at most; of those
    the ones that leave the training as it is."""
    settings: list[Change] = []
    capacity, allocated = message.capacity, message.allocated

    def add(text: str, most: int | None, needed: int | None = missing) -> None:
        enough = None if most is None or needed is None else most >= needed
        settings.append(Change(text, most, enough))

    if message.allowed is not None and capacity is not None and cause == LIMIT:
        module = "xpu" if message.backend == "XPU" else "cuda"
        add(
            f"raise the limit: torch.{module}.set_per_process_memory_fraction()",
            max(0, min(capacity - message.allowed, message.free or capacity)),
        )
    idle = message.unallocated
    if idle and message.backend in ("CUDA", "HIP", None) and not expandable:
        needed = None
        if message.requested is not None and message.free is not None:
            needed = message.requested - message.free
        add(_packing(message), idle, needed)
    others = [pair for pair in message.others if pair != parts.itself]
    if others:
        named = ", ".join(str(pid) for pid, _ in others[:4])
        more = "" if len(others) <= 4 else f" and {len(others) - 4} more"
        word = "process" if len(others) == 1 else "processes"
        add(f"end the other {word} on the device ({named}{more}), or use another device",
            sum(size for _, size in others))  # fmt: skip
    elif parts.rest is not None and parts.rest > MUCH:
        add("check nvidia-smi: other processes on the device may hold the rest", parts.rest)
    if parts.own is not None and parts.own > MUCH:
        add(
            "check what this process holds outside PyTorch: NCCL (fewer process groups, a smaller "
            "NCCL_BUFFSIZE), or another framework that takes memory at its start (JAX: "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false)",
            parts.own,
            None,  # a part of it is the CUDA context
        )
    work: list[Change] = []
    if message.requested is not None and capacity is not None and message.requested > capacity // 2:
        work.append(
            Change(
                "check the shape of the tensor that was requested: a batch, a sequence squared "
                "(attention without a fused kernel), an outer product, a wrong dimension",
                message.requested,
                None if missing is None else True,
            )
        )
    if allocated:
        work.append(
            Change(
                "use smaller micro-batches with the same gradient: acc.step(batch, loss_fn) of "
                "memtools.GradAccumulator halves them when memory runs out; this shrinks only "
                "activations, whose share the text does not give",
                allocated,
            )
        )
        work.append(
            Change(
                "recompute activations in the backward pass: memtools.checkpoint_layers(model), "
                "or use bfloat16 with torch.autocast",
                allocated,
            )
        )
    else:
        work.append(
            Change(
                "use smaller micro-batches: acc.step(batch, loss_fn) of memtools.GradAccumulator"
            )
        )
    if message.kind in ("library", "nccl", "driver", "bitsandbytes") and not allocated:
        work.insert(
            0,
            Change(
                "leave room for allocations outside PyTorch (cuBLAS, cuDNN, NCCL, the CUDA "
                "context): torch.cuda.set_per_process_memory_fraction(0.9) before the first tensor",
            ),
        )
    work.append(Change(_RUN))
    enough = [one for one in settings if one.enough]
    rest = [one for one in settings if not one.enough]
    return tuple(enough + work[:-1] + sorted(rest, key=lambda one: -(one.most or 0)) + work[-1:])


def _packing(message: OomMessage) -> str:
    """The setting that packs what is reserved but unallocated."""
    variable = message.variable or "PYTORCH_CUDA_ALLOC_CONF"
    if message.backend == "HIP" and message.variable is None:
        variable = "PYTORCH_HIP_ALLOC_CONF"
    if message.reserved is not None:
        return (
            f"use torch 2.1 or later and set {variable}=expandable_segments:True before Python "
            "starts, which makes reserved but unallocated memory usable; until then "
            "max_split_size_mb:128"
        )
    return (
        f"set {variable}=expandable_segments:True before Python starts, which makes reserved but "
        "unallocated memory usable"
    )


def _mps(message: OomMessage) -> Verdict:
    asked, allocated, other = message.requested, message.allocated, message.other
    allowed, used = message.allowed, _sum(message.allocated, message.other)
    tiers: list[Tier] = []
    if allocated is not None:
        tiers.append(Tier("allocated by MPS", allocated))
    if other is not None:
        tiers.append(Tier("other allocations", other))
    missing = None
    if asked is None or allowed is None or used is None:
        cause, text = UNKNOWN, "the text is truncated: figures are missing"
    else:
        left = allowed - used
        if left > 0:
            tiers.append(Tier("left of the limit", left, derived=True))
        missing = asked - max(0, left)
        doubt = _doubt(asked, allowed, allocated, other)
        if missing > doubt:
            cause = SIZE
            text = (
                f"{_of(used)} in use and {_of(asked)} requested are more than the {_of(allowed)} "
                f"that MPS may use: {_of(missing)} are missing"
            )
        else:
            cause, missing = UNKNOWN, None
            text = f"{_of(max(0, left))} of {_of(allowed)} were left for {_of(asked)}"
    changes = [
        Change("torch.mps.empty_cache() between phases, which gives back cached memory", other),
        Change("use smaller micro-batches: acc.step(batch, loss_fn) of memtools.GradAccumulator",
               allocated),
        Change("close other programs: the GPU and the host share one memory"),
        Change(
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 removes the limit, but the whole system may "
            "then run out of memory"
        ),
        Change(_RUN),
    ]  # fmt: skip
    scale = None
    if allowed is not None:
        scale = max(allowed, used or 0)
    return Verdict(cause, text, missing, scale, tuple(tiers), (), tuple(changes))


# --- the host -------------------------------------------------------------------------------------


def _host(message: OomMessage) -> Verdict:
    tiers: list[Tier] = []
    for name, value in (
        ("anonymous: heap and tensors", message.anonymous),
        ("pages of files", message.file),
        ("shared memory", message.shared),
    ):
        if value is not None:
            tiers.append(Tier(name, value))
    scale: int | None = message.limit
    total = sum(tier.bytes for tier in tiers)
    if tiers:
        scale = max(total, scale or 0)
    cause, text, missing = _host_cause(message)
    return Verdict(
        cause,
        text,
        missing,
        scale,
        tuple(tiers),
        tuple(_host_notes(message)),
        _host_changes(message),
    )


def _host_cause(message: OomMessage) -> tuple[str, str, int | None]:
    if message.where == SHM:
        return LIMIT, "/dev/shm is full: workers pass their batches through it", None
    if message.kind == "kernel":
        whom = f"process {message.pid}" if message.pid is not None else "a process"
        name = f" ({message.name})" if message.name else ""
        if message.constraint == "CONSTRAINT_MEMCG":
            group = f" {message.group}" if message.group else ""
            limit = f" of {_of(message.limit)}" if message.limit is not None else ""
            text = f"the kernel killed {whom}{name} at the limit{limit} of the control group{group}"
            return LIMIT, text, None
        if message.constraint == "CONSTRAINT_NONE":
            return (
                SIZE,
                f"the kernel killed {whom}{name}: the whole machine had no memory left",
                None,
            )
        return SIZE, f"the kernel killed {whom}{name} because memory ran out", None
    if message.kind == "slurm":
        if message.used is not None and message.limit is not None:
            text = f"the job used {_of(message.used)}, and its limit is {_of(message.limit)}"
            return LIMIT, text, message.used - message.limit
        many = "" if not message.count else f" ({message.count} processes killed)"
        return LIMIT, f"the job exceeded the memory that it requested from Slurm{many}", None
    if message.kind == "kubernetes":
        if "low on resource" in message.quote:
            return SIZE, "the node ran out of memory and evicted the pod", None
        limit = f" of {_of(message.limit)}" if message.limit is not None else ""
        return LIMIT, f"the container exceeded its memory limit{limit}", None
    if message.kind == "early oom":
        group = "" if message.group is None else f" {message.group}"
        text = f"a memory watchdog (systemd-oomd, earlyoom) ended it{group} in time"
        return SIZE, f"{text}: little memory of the machine was left", None
    if message.kind == "ray":
        return LIMIT, "the node exceeded Ray's memory threshold, and Ray killed the task", None
    if message.requested is not None:
        text = f"the system refused a single allocation of {_of(message.requested)}"
        if message.shape is not None and message.dtype in _DTYPES:
            count, width = math.prod(message.shape), _DTYPES[message.dtype]
            product = " x ".join(f"{n:,}" for n in message.shape)
            text += f": {product} elements of {width} bytes are {_of(count * width)}"
        return SIZE, f"{text}; the text does not say how much was left", None
    if _NEGATIVE.search(message.quote):
        text = (
            "the number of bytes is negative (printed as 2**64 minus it): a product of sizes "
            "overflowed"
        )
        return SIZE, text, None
    if message.certain:
        return UNKNOWN, "the system refused an allocation; the text gives no size", None
    if message.where == UNCLEAR:
        words = {
            "dataloader": "a worker ended without a message: the kernel killed it because memory "
            "ran out, or its own code ended it",
            "pool": "a worker of a pool ended without a message: the kernel killed it because "
            "memory ran out, or native code failed",
        }
        return UNKNOWN, words.get(message.kind, "the text does not say whose memory ran out"), None
    if message.kind == "onednn":
        return (
            UNKNOWN,
            "oneDNN reports this when memory is short, and for shapes that it does not support",
            None,
        )
    if message.code is not None and message.kind != "kubernetes":
        code = exit_code(message.code)
        return UNKNOWN, f"exit code {message.code} means {code.signal}: {code.meaning}", None
    return (
        UNKNOWN,
        "a process got SIGKILL, usually from the kernel because host memory ran out; the text "
        "does not say who sent it",
        None,
    )


def _host_notes(message: OomMessage) -> list[str]:
    notes = []
    if message.virtual is not None:
        notes.append(
            f"{_of(message.virtual)} of addresses (total-vm) are not memory: CUDA alone reserves "
            "tens of GiB of them"
        )
    if message.kind == "dataloader" and message.where != SHM:
        notes.append("the workers' memory counts as well as the main process's")
    return notes


_MORE_ROOM: Final = {
    "slurm": "ask for more: #SBATCH --mem=, or --mem-per-cpu= (sacct -j JOB -o MaxRSS: the peak)",
    "kubernetes": "raise resources.limits.memory of the container",
    "ray": "give the node fewer tasks at once, or raise RAY_memory_usage_threshold",
}


def _host_changes(message: OomMessage) -> tuple[Change, ...]:
    if message.where == SHM:
        return (
            Change("give /dev/shm more room: docker run --shm-size=8g or --ipc=host, in Kubernetes "
                   "an emptyDir of medium Memory"),
            Change("fewer workers and a smaller prefetch_factor: it needs num_workers x "
                   "prefetch_factor x the bytes of a batch; memtools.data.bounded() keeps a limit"),
            Change("remove files that killed programs left: ls -l /dev/shm"),
        )  # fmt: skip
    changes = []
    if message.kind in ("host allocator", "array", "mapped file"):
        changes.append(
            Change(
                "check the shape: a huge one is usually a wrong dimension, an outer product or a "
                "one-hot vector over a vocabulary",
                message.requested,
            )
        )
        if message.dtype in ("float64", "int64") and message.requested is not None:
            half = "float32" if message.dtype == "float64" else "int32"
            changes.append(Change(f"make it {half}, which is half", message.requested // 2))
        changes.append(
            Change("check the limits of the process (ulimit -v, ulimit -d); memtools doctor shows "
                   "them and vm.overcommit_memory")
        )  # fmt: skip
    else:
        changes.append(
            Change(
                "run it again under memtools run: its record survives SIGKILL, and memtools "
                "explain shows which limit memory came near, what grew and what held it"
            )
        )
    if message.anonymous is not None:
        changes.append(
            Change(
                "use smaller batches, fewer workers, or data that is read from files when needed",
                message.anonymous,
            )
        )
    elif message.where in (HOST, UNCLEAR):
        changes.append(Change("use fewer workers and smaller batches, and keep no list of tensors"))
    more = "give it more memory: a higher limit of the container or job, or another machine"
    changes.append(Change(_MORE_ROOM.get(message.kind, more)))
    return tuple(changes)


# --- figures --------------------------------------------------------------------------------------


def _sum(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _doubt(*sizes: int | None) -> int:
    """By how much a sum of figures may be wrong, each of which is rounded to two decimals."""
    return sum(_unit(size) // 200 + 1 for size in sizes if size is not None)


def _unit(size: int) -> int:
    return next((1 << power for power in (30, 20, 10) if size >= 1 << power), 0)


def _of(size: int | None) -> str:
    return "an unknown size" if size is None else format_bytes(size)
