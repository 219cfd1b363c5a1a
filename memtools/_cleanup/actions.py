"""The actions of a cleanup policy: each does its work, and reports what that cost and freed.

held before ──► the work, timed ──► held after ──► Outcome
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from memtools import _core
from memtools._base import devices, reclaim
from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._census.cycles import Collected, collect

GC, GC_YOUNG, EMPTY_CACHE, TRIM, POOL_TRIM = range(5)
FIRST_CALLBACK, WARM_UP = 5, 15
NAMES: Final = {
    GC: "gc",
    GC_YOUNG: "gc_young",
    EMPTY_CACHE: "empty_cache",
    TRIM: "trim",
    POOL_TRIM: "pool_trim",
    WARM_UP: "freeze",
}
#: Callbacks release objects, a collection more of them, pools pages; caches and heaps come last.
ORDER: Final = (
    WARM_UP,
    *range(FIRST_CALLBACK, WARM_UP),
    GC_YOUNG,
    GC,
    POOL_TRIM,
    EMPTY_CACHE,
    TRIM,
)
#: Programs may soon allocate again what these actions free, so they are judged later.
LATER: Final = frozenset((EMPTY_CACHE, TRIM, POOL_TRIM))
HOST, DEVICE, FRAGMENTED, IDLE_CACHE, IDLE_HEAP, CADENCE = 1, 2, 4, 8, 16, 32
_WORDS: Final = {
    CADENCE: "cadence",
    HOST: "host pressure",
    DEVICE: "device pressure",
    FRAGMENTED: "fragmented",
    IDLE_CACHE: "idle cache",
    IDLE_HEAP: "idle heap",
}
#: What an action is due for, by the mask of triggers that the core names.
REASONS: Final = tuple(
    tuple(text for bit, text in _WORDS.items() if mask & bit) for mask in range(2 * CADENCE)
)
TRIGGERS: Final = {
    GC: HOST | DEVICE,
    GC_YOUNG: 0,
    EMPTY_CACHE: DEVICE | FRAGMENTED | IDLE_CACHE,
    TRIM: IDLE_HEAP | HOST,
    POOL_TRIM: HOST | DEVICE,
}
#: Shares of memory are computed of at least this size: in a smaller process changes are noise.
LEAST_TOTAL: Final = 256 << 20
PAYS: Final = 0.01  # An action pays if it frees this share of what the process holds.
#: The next reading of malloc's bytes waits this many times as long as the last one took: where the
#: last collection found nothing, and where it found something whose size must be measured.
HEAP_REST, HEAP_REST_FOUND = 4000, 500


class Change(NamedTuple):
    """Bytes before and after an action, and those of which it may have freed a share."""

    before: int = 0
    after: int = 0
    total: int = 0

    @property
    def freed(self) -> int:
        return max(0, self.before - self.after)


UNKNOWN: Final = (-1, -1, -1)  # How _core.Policy.done takes a Change that was not measured.


class Outcome(NamedTuple):
    """The result of one action."""

    ns: int
    host: Change
    device: Change
    note: str  #: "12 objects", or ""
    collected: Collected | None
    error: BaseException | None
    gain: float = 0.0  #: the larger of the shares that it freed of the host and of the devices
    #: whether malloc's bytes were read: without them, memory that went back to malloc is not seen
    knows_heap: bool = True


class Usage(NamedTuple):
    """The memory that this process holds, in bytes; None where it was not read."""

    rss: int | None
    heap: int | None  #: in use, as malloc counts
    allocated: int | None  #: on devices, in tensors
    reserved: int | None  #: on devices, by torch


class Readings:
    """Reads what an action may change."""

    __slots__ = ("_heap_ended", "_heap_ns", "found", "probe")

    def __init__(self, root: str) -> None:
        self.probe = _core.Probe(root)
        self._heap_ns = self._heap_ended = 0
        #: whether the last collect found anything
        self.found = False

    def read(self, heap: bool) -> Usage:
        used, indexes = None, devices_in_use()
        on_devices = (devices.held(indexes) if indexes else None) or (None, None)
        if heap:
            begin = time.perf_counter_ns()
            used = self.probe.read(_core.READ_HEAP).heap_used
            end = time.perf_counter_ns()
            # The second reading of two finds all in the cache, the next one will not.
            self._heap_ns = max(end - begin, self._heap_ns // 2)
            self._heap_ended = end
        return Usage(self.probe.read(_core.READ_RSS).process, used, *on_devices)

    def heap_is_cheap(self, beside_ns: int = 0) -> bool:
        """Whether malloc's bytes may be read again, or take little beside so many ns: with many
        free chunks that is 0.2 ms, on a busy machine 10."""
        rest = self._heap_ns * (HEAP_REST_FOUND if self.found else HEAP_REST)
        over = time.perf_counter_ns() >= self._heap_ended + rest
        return over or 10 * self._heap_ns <= beside_ns


def devices_in_use() -> tuple[int, ...]:
    """Indexes of the CUDA devices that torch sees; none before the program has a context."""
    torch = bridge.loaded()
    if not initialised(torch):
        return ()
    return tuple(range(min(int(torch.cuda.device_count()), devices.MOST_DEVICES)))


def capturing() -> bool:
    """Whether the current stream captures a CUDA graph, which an action would break."""
    torch = bridge.loaded()
    return initialised(torch) and bool(torch.cuda.is_current_stream_capturing())


def synchronize() -> None:
    """Wait for the devices on which torch holds memory; others would get a context by it."""
    torch = bridge.loaded()
    for index in devices_in_use():
        if (devices.held((index,)) or (0, 0))[1]:
            torch.cuda.synchronize(index)


def change(before: Usage, after: Usage, kinds: tuple[str, ...], total: int | None) -> Change:
    """By the one of these `kinds` of bytes that fell most; nothing where none was read.

    On the host these are the pages and malloc's own count: what malloc keeps is free all the same.
    """
    most = None
    for kind in kinds:
        old, new = getattr(before, kind), getattr(after, kind)
        if None not in (old, new) and (most is None or old - new > most[0] - most[1]):
            most = old, new
    return Change() if most is None else Change(*most, max(total or 0, LEAST_TOTAL))


class Pools:
    """The pools that a policy trims, as long as they live."""

    __slots__ = ("_pools",)

    def __init__(self) -> None:
        self._pools: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, pool: Any) -> None:
        """Add a pool. Raises TypeError if it is not a KVPool, ValueError if it is closed."""
        if not isinstance(pool, _core.KVPool):
            raise TypeError(f"watch() takes a memtools.KVPool, got {type(pool).__name__}")
        if pool.closed:
            raise ValueError(f"watch(): {pool.name} is closed; pass a pool that is in use")
        self._pools.add(pool)

    def alive(self) -> list[Any]:
        return [pool for pool in self._pools if not pool.closed]

    def trim(self) -> int:
        """Trim all pools. Returns the bytes given back on devices, which torch does not count."""
        freed = 0
        for pool in self.alive():
            given = pool.trim()
            freed += given if pool.device.type == "cuda" else 0
        return freed


_HOST: Final = ("rss", "heap")
_DEVICE: Final = {GC: ("allocated",), GC_YOUNG: ("allocated",), EMPTY_CACHE: ("reserved",)}


def measured(action: int, work: Callable[[], Any], readings: Readings, last_ns: int = 0) -> Outcome:
    """Do the work of an action, which took `last_ns` last time, and measure it. An Exception that
    it raises is in the outcome; any other, such as KeyboardInterrupt, propagates."""
    heap = action not in LATER and readings.heap_is_cheap(last_ns)
    before = readings.read(heap)
    begin, result, error = time.perf_counter_ns(), None, None
    try:
        result = work()
    except Exception as failed:
        error = failed
    ns = time.perf_counter_ns() - begin
    after, collected, note = before, None, ""
    if isinstance(result, Collected):
        collected, note = result, f"{result.objects:,} objects"
        readings.found = collected.objects > 0
    elif action == WARM_UP and result:
        note = f"{result:,} objects"
    if collected is None or readings.found:  # else what fell meanwhile, others have freed
        after = readings.read(heap)
    host = change(before, after, _HOST, before.rss)
    device = change(before, after, _DEVICE.get(action, ("allocated", "reserved")), before.reserved)
    if action == POOL_TRIM and isinstance(result, int) and result:
        device = Change(result, 0, max(result, before.reserved or 0, LEAST_TOTAL))
    gain = max(host.freed / max(1, host.total), device.freed / max(1, device.total))
    return Outcome(ns, host, device, note, collected, error, gain, heap)


def work_of(action: int, pools: Pools, inspect: bool) -> Callable[[], Any]:
    """The work of a built-in action. To inspect a young collection takes a full one, which is then
    measured as what it is."""
    if action == GC or (action == GC_YOUNG and inspect):
        return partial(collect, 2, inspect)
    if action == GC_YOUNG:
        return partial(collect, 1)
    return {EMPTY_CACHE: reclaim.empty_cache, TRIM: reclaim.trim, POOL_TRIM: pools.trim}[action]


def trigger_words(triggers: int) -> str:
    """`pressure, idle heap`."""
    words = list(REASONS[triggers])
    if words[:2] == [_WORDS[HOST], _WORDS[DEVICE]]:
        words[:2] = ["pressure"]
    return ", ".join(words)
