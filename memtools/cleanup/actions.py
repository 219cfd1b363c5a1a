"""The actions of a cleanup policy: each does its work, and says what that cost and freed.

held before ──► the work, timed ──► held after ──► Outcome
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from memtools import _core
from memtools._base import devices as monitor_device
from memtools._base import reclaim
from memtools._base import torch as bridge
from memtools._base.devices import initialised
from memtools._base.reclaim import READ_HEAP, READ_RSS
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
#: Callbacks let go of objects, a collect of more, pools of pages; caches and heaps come last.
ORDER: Final = (
    WARM_UP,
    *range(FIRST_CALLBACK, WARM_UP),
    GC_YOUNG,
    GC,
    POOL_TRIM,
    EMPTY_CACHE,
    TRIM,
)
LATER: Final = frozenset((EMPTY_CACHE, TRIM, POOL_TRIM))  # what they free may soon be back
HOST, DEVICE, FRAGMENTED, IDLE_CACHE, IDLE_HEAP, CADENCE = 1, 2, 4, 8, 16, 32
REASONS: Final = {
    CADENCE: "cadence",
    HOST: "host pressure",
    DEVICE: "device pressure",
    FRAGMENTED: "fragmented",
    IDLE_CACHE: "idle cache",
    IDLE_HEAP: "idle heap",
}
TRIGGERS: Final = {
    GC: HOST | DEVICE,
    GC_YOUNG: 0,
    EMPTY_CACHE: DEVICE | FRAGMENTED | IDLE_CACHE,
    TRIM: IDLE_HEAP | HOST,
    POOL_TRIM: HOST | DEVICE,
}
LEAST_TOTAL: Final = 256 << 20  # a smaller process counts as one of this size: 1 % is no noise
PAYS: Final = 0.01
#: After readings of malloc's bytes they rest so many times what one took: where the last collect
#: found nothing, and where it found something, whose size is to be known.
HEAP_REST, HEAP_REST_FOUND = 4000, 500


class Change(NamedTuple):
    """Bytes before and after an action, and those of which it may have freed a share."""

    before: int = 0
    after: int = 0
    total: int = 0

    @property
    def freed(self) -> int:
        return max(0, self.before - self.after)

    @property
    def known(self) -> tuple[int | None, ...]:
        """As _core.Policy.done takes it."""
        return tuple(self) if self.total else (None, None, None)


class Outcome(NamedTuple):
    """What an action did."""

    action: int
    ns: int
    host: Change
    device: Change
    note: str  #: "12 objects", or ""
    collected: Collected | None
    error: BaseException | None

    @property
    def gain(self) -> float:
        """The larger of the shares that it freed of the host and of the devices."""
        return max(side.freed / side.total if side.total else 0.0 for side in self[2:4])


class Held(NamedTuple):
    """What this process holds, in bytes; None where that was not read."""

    rss: int | None
    heap: int | None  #: in use, as malloc counts
    allocated: int | None  #: on devices, in tensors
    reserved: int | None  #: on devices, by torch


class Meter:
    """Reads what an action may change."""

    __slots__ = ("_heap_ended", "_heap_ns", "found", "probe")

    def __init__(self, root: str) -> None:
        self.probe = _core.Probe(root)
        self._heap_ns = self._heap_ended = 0
        #: whether the last collect found anything
        self.found = False

    def read(self, heap: bool) -> Held:
        devices = monitor_device.held(devices_in_use())
        used = self._heap() if heap else None
        host = self.probe.read(READ_RSS).process
        return Held(host, used, *(devices or (None, None)))

    def heap_is_cheap(self, beside_ns: int = 0) -> bool:
        """Whether malloc's bytes may be read again, or take little beside so many ns: with many
        free chunks that is 0.2 ms, on a busy machine 10."""
        rest = self._heap_ns * (HEAP_REST_FOUND if self.found else HEAP_REST)
        over = time.perf_counter_ns() >= self._heap_ended + rest
        return over or 10 * self._heap_ns <= beside_ns

    def _heap(self) -> int | None:
        begin = time.perf_counter_ns()
        used = self.probe.read(READ_HEAP).heap_used
        end = time.perf_counter_ns()
        # the second reading of two finds all in the cache, the next one will not
        self._heap_ns = max(end - begin, self._heap_ns // 2)
        self._heap_ended = end
        return used


def devices_in_use() -> tuple[int, ...]:
    """Indexes of the CUDA devices that torch sees; none before the program has a context."""
    torch = bridge.loaded()
    if not initialised(torch):
        return ()
    return tuple(range(min(int(torch.cuda.device_count()), monitor_device.MOST_DEVICES)))


def capturing() -> bool:
    """Whether the current stream captures a CUDA graph: an action would spoil it."""
    torch = bridge.loaded()
    return initialised(torch) and bool(torch.cuda.is_current_stream_capturing())


def synchronize() -> None:
    """Waits for the devices on which torch holds memory; others would get a context by it."""
    torch = bridge.loaded()
    for index in devices_in_use():
        if (monitor_device.held((index,)) or (0, 0))[1]:
            torch.cuda.synchronize(index)


def host_change(before: Held, after: Held) -> Change:
    """By the pages or by malloc, whichever fell more: what malloc keeps is free all the same."""
    pairs = [
        (old, new)
        for old, new in ((before.rss, after.rss), (before.heap, after.heap))
        if old is not None and new is not None
    ]
    if not pairs:
        return Change()
    most = max(pairs, key=lambda pair: pair[0] - pair[1])
    return Change(*most, max(before.rss or 0, LEAST_TOTAL))


def device_change(before: Held, after: Held, *kinds: str) -> Change:
    """By what is allocated or reserved, whichever fell more of the `kinds` that count."""
    pairs = [(getattr(before, kind), getattr(after, kind)) for kind in kinds]
    known = [pair for pair in pairs if None not in pair]
    if not known:
        return Change()
    most = max(known, key=lambda pair: pair[0] - pair[1])
    return Change(*most, max(before.reserved or 0, LEAST_TOTAL))


class Pools:
    """The pools that a policy trims, as long as they live."""

    __slots__ = ("_pools",)

    def __init__(self, pools: Iterable[Any]) -> None:
        self._pools: list[weakref.ref[Any]] = []
        for pool in pools:
            self.add(pool, "pools=")

    def add(self, pool: Any, what: str = "watch()") -> None:
        """Add a pool; `what` is the call or argument that gave it, for errors.

        Raises TypeError for what is not a KVPool, ValueError for a closed one.
        """
        if not isinstance(pool, _core.KVPool):
            raise TypeError(f"{what} takes a memtools.KVPool, got {type(pool).__name__}")
        if pool.closed:
            raise ValueError(f"{what}: {pool.name} is closed; pass a pool that is in use")
        if all(known() is not pool for known in self._pools):
            self._pools = [known for known in self._pools if known() is not None]
            self._pools.append(weakref.ref(pool))

    def alive(self) -> list[Any]:
        found = [known() for known in self._pools]
        return [pool for pool in found if pool is not None and not pool.closed]

    def trim(self) -> int:
        """Bytes given back on devices, where torch does not count what pools hold."""
        freed = 0
        for pool in self.alive():
            given = pool.trim()
            freed += given if pool.device.type == "cuda" else 0
        return freed


def _note(action: int, result: Any) -> str:
    if isinstance(result, Collected):
        return f"{result.objects:,} objects"
    return f"{result[0]:,} objects" if action == WARM_UP and result else ""


Work = Callable[[], Any]
_KINDS = {GC: ("allocated",), GC_YOUNG: ("allocated",), EMPTY_CACHE: ("reserved",)}


def measured(action: int, work: Work, meter: Meter, last_ns: int = 0) -> Outcome:
    """Does it; last time it took so long. What it raises is in the outcome; what is no Exception
    passes."""
    heap = action not in LATER and meter.heap_is_cheap(last_ns)
    before = meter.read(heap)
    begin, result, error = time.perf_counter_ns(), None, None
    try:
        result = work()
    except Exception as failed:
        error = failed
    ns = time.perf_counter_ns() - begin
    collected = result if isinstance(result, Collected) else None
    if collected is not None:
        meter.found = collected.objects > 0
    nothing = collected is not None and not meter.found  # then what fell, others freed
    after = before if nothing else meter.read(heap)
    device = device_change(before, after, *_KINDS.get(action, ("allocated", "reserved")))
    if action == POOL_TRIM and isinstance(result, int) and result:
        device = Change(result, 0, max(result, before.reserved or 0, LEAST_TOTAL))
    note = _note(action, result)
    return Outcome(action, ns, host_change(before, after), device, note, collected, error)


def built_in(action: int, pools: Pools, inspect: bool) -> Work:
    """The work of an action that needs nothing of the policy but its pools."""
    return {
        GC: lambda: collect(2, inspect),
        # to inspect takes a full collect, which is then to count for what it is
        GC_YOUNG: lambda: collect(2 if inspect else 1, inspect),
        EMPTY_CACHE: reclaim.empty_cache,
        TRIM: reclaim.trim,
        POOL_TRIM: pools.trim,
    }[action]


def trigger_words(triggers: int) -> str:
    """`pressure, idle heap`."""
    words = [text for bit, text in REASONS.items() if triggers & bit]
    both = [REASONS[HOST], REASONS[DEVICE]]
    if words[:2] == both:
        words[:2] = ["pressure"]
    return ", ".join(words)
