"""The actions by themselves: what they do, what they measure, and on which side it is freed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import memtools
from memtools._base import reclaim
from memtools._census.cycles import Collected
from memtools._cleanup.actions import (
    DEVICE,
    EMPTY_CACHE,
    FIRST_CALLBACK,
    GC,
    GC_YOUNG,
    HOST,
    IDLE_HEAP,
    LEAST_TOTAL,
    POOL_TRIM,
    Change,
    Outcome,
    Pools,
    Readings,
    Usage,
    capturing,
    change,
    devices_in_use,
    measured,
    synchronize,
    trigger_words,
    work_of,
)
from memtools._cleanup.engine import Done
from tests.cleanup.policycases import no_gc  # noqa: F401 - a fixture
from tests.kit.fakedevice import FakeCuda, cuda  # noqa: F401 - a fixture
from tests.kit.ownprocess import in_own_process

MIB = 2**20


def run(
    action: int, readings: Readings | None = None, pools: Pools | None = None, inspect: bool = False
):
    return measured(action, work_of(action, pools or Pools(), inspect), readings or Readings("/"))


def cycle(elements: int) -> weakref.ref[torch.Tensor]:
    """A tensor of so many floats that only a cycle keeps."""
    holder = SimpleNamespace(tensor=torch.ones(elements))
    holder.me = holder
    return weakref.ref(holder.tensor)


@pytest.mark.slow
@pytest.mark.parametrize("action", [GC, GC_YOUNG])
def test_a_collect_frees_what_hangs_on_cycles(no_gc: None, action):  # noqa: F811
    kept = cycle(16 * MIB)
    outcome = run(action)
    assert kept() is None
    assert 63 * MIB <= outcome.host.freed <= 80 * MIB
    assert outcome.host.total >= LEAST_TOTAL
    assert outcome.gain == pytest.approx(outcome.host.freed / outcome.host.total)
    assert outcome.collected.objects >= 2
    assert outcome.note == f"{outcome.collected.objects:,} objects"
    assert outcome.ns > 0
    assert outcome.error is None
    assert not any(outcome.device)


@pytest.mark.slow
def test_a_young_collect_leaves_the_old_alone(no_gc: None):  # noqa: F811
    holder = SimpleNamespace(tensor=torch.ones(10))
    kept = weakref.ref(holder.tensor)
    gc.collect()  # it is old now
    holder.me = holder
    del holder
    run(GC_YOUNG)
    assert kept() is not None
    run(GC)
    assert kept() is None


@pytest.mark.slow
def test_small_blocks_count_as_freed_where_malloc_keeps_their_pages(no_gc: None):  # noqa: F811
    """They stay resident: a block above them holds the top of the heap."""
    holder = SimpleNamespace(tensors=[torch.ones(4096) for _ in range(3000)])
    top = [torch.ones(2048) for _ in range(400)]
    holder.me = holder
    del holder
    outcome = run(GC)
    assert outcome.host.freed >= 45 * MIB
    assert len(top) == 400


@pytest.mark.slow
def test_tensors_in_cycles_are_shown_when_asked_for(no_gc: None):  # noqa: F811
    cycle(256)
    found = run(GC, inspect=True).collected
    assert (found.tensors, found.tensor_bytes) == (1, 1024)
    assert found.examples == ("[256] float32 tensor, beside SimpleNamespace, dict",)


def test_the_heap_rests_after_a_reading():
    readings = Readings("/")
    assert readings.heap_is_cheap()
    assert readings.read(heap=True).heap > 0
    assert not readings.heap_is_cheap()
    assert readings.read(heap=False).heap is None
    assert readings.heap_is_cheap(10 * readings._heap_ns), "little beside what the action takes"
    assert not readings.heap_is_cheap(10 * readings._heap_ns - 1)


@pytest.mark.parametrize("action", [GC, GC_YOUNG])
def test_a_cheap_collect_does_without_the_heap_while_that_rests(action: int):
    readings, read = Readings("/"), []
    plain = readings.read
    watched = SimpleNamespace(
        read=lambda heap: (read.append(heap), plain(heap))[1], heap_is_cheap=readings.heap_is_cheap
    )
    none, some = (Collected(objects, None, None, (), 0.0) for objects in (0, 3))
    measured(action, lambda: some, watched)
    measured(action, lambda: some, watched)
    assert read == [True, True, False, False]
    measured(action, lambda: none, watched)
    assert read[4:] == [False], "what falls while nothing is found, others have freed"
    measured(action, lambda: some, watched, last_ns=10**12)
    assert read[5:] == [True, True]


def test_where_collects_find_something_the_heap_is_read_sooner():
    readings = Readings("/")
    readings.read(heap=True)
    readings._heap_ended -= 1000 * readings._heap_ns
    assert not readings.heap_is_cheap()
    measured(GC, lambda: Collected(3, None, None, (), 0.0), readings)
    assert readings.heap_is_cheap()
    measured(GC, lambda: Collected(0, None, None, (), 0.0), readings)
    readings._heap_ended -= 1000 * readings._heap_ns
    assert not readings.heap_is_cheap()


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (Usage(900, 500, None, None), Usage(890, 400, None, None), (500, 400, LEAST_TOTAL)),
        (Usage(900, 500, None, None), Usage(700, 400, None, None), (900, 700, LEAST_TOTAL)),
        (Usage(900, None, None, None), Usage(950, 1, None, None), (900, 950, LEAST_TOTAL)),
        (Usage(2**30, 5, None, None), Usage(2**30, 6, None, None), (2**30, 2**30, 2**30)),
        (Usage(None, None, 1, 1), Usage(None, None, 1, 1), (0, 0, 0)),
    ],
)
def test_the_host_by_what_fell_more(before, after, found):
    assert change(before, after, ("rss", "heap"), before.rss) == Change(*found)


@pytest.mark.parametrize(
    ("after", "kinds", "found"),
    [
        ((600, 1000), ("allocated",), (800, 600, LEAST_TOTAL)),
        ((600, 1000), ("reserved",), (1000, 1000, LEAST_TOTAL)),
        ((600, 500), ("allocated", "reserved"), (1000, 500, LEAST_TOTAL)),
        ((None, None), ("allocated",), (0, 0, 0)),
    ],
)
def test_the_devices_by_what_the_action_is_about(after, kinds, found):
    before = Usage(None, None, 800, 1000)
    assert change(before, Usage(None, None, *after), kinds, before.reserved) == Change(*found)


def test_what_grew_has_freed_nothing():
    assert Change(5, 9, 100).freed == 0


@pytest.mark.slow
def test_trim_gives_the_heap_back():
    """In a process in which nobody has set glibc's thresholds, as step() does under a limit."""
    in_own_process("""
        import torch
        from memtools._cleanup.actions import TRIM
        from tests.cleanup.test_actions import MIB, run
        blocks = [torch.ones(4096) for _ in range(3000)]
        top = torch.ones(2048)
        del blocks
        outcome = run(TRIM)
        assert outcome.host.freed >= 40 * MIB, outcome
        assert outcome.collected is None
        assert outcome.note == ""
        assert top[0] == 1
    """)


def watching(*pools: memtools.KVPool) -> Pools:
    made = Pools()
    for pool in pools:
        made.add(pool)
    return made


def test_pool_trim_gives_idle_pages_back_and_leaves_what_is_in_use():
    pool = memtools.KVPool(2, 4, 64, max_tokens=4096, max_sequences=8, dtype="float32")
    k = torch.ones(4, 4, 4096, 64)
    with pool.acquire(1) as lease:
        lease.update(0, k[:1], k[:1])
        with pool.acquire(4) as other:
            other.update(0, k, k)
        del other
        outcome = run(POOL_TRIM, pools=watching(pool))
        assert outcome.host.freed >= 30 * MIB
        assert pool.stats().idle_bytes == 0
        assert torch.equal(lease.layer(0)[0], k[:1])
    assert outcome.error is None


def test_pools_are_held_weakly_and_closed_ones_are_passed_over():
    made = [
        memtools.KVPool(1, 1, 8, max_tokens=64, max_sequences=1, dtype="float32") for _ in range(3)
    ]
    pools = watching(*made)
    pools.add(made[0])
    assert set(pools.alive()) == set(made)
    made[1].close()
    del made[2]
    assert pools.alive() == made[:1]
    assert run(POOL_TRIM, pools=pools).error is None
    made.clear()
    assert pools.alive() == []


@pytest.mark.parametrize("pool", [None, 3, "pool", torch.ones(1)])
def test_only_pools_are_pools(pool):
    with pytest.raises(TypeError, match=r"takes a memtools.KVPool, got \w+"):
        watching(pool)


def test_a_closed_pool_is_refused():
    pool = memtools.KVPool(1, 1, 8, max_tokens=64, max_sequences=1, dtype="float32", name="old")
    pool.close()
    with pytest.raises(ValueError, match="old is closed"):
        watching(pool)


def test_what_work_raises_is_told_and_what_is_no_exception_passes():
    error = OSError("no")

    def fail() -> None:
        raise error

    def interrupt() -> None:
        raise KeyboardInterrupt

    outcome = measured(FIRST_CALLBACK, fail, Readings("/"))
    assert outcome.error is error
    assert outcome.ns > 0
    with pytest.raises(KeyboardInterrupt):
        measured(FIRST_CALLBACK, interrupt, Readings("/"))


def test_a_device_by_what_is_reserved(cuda: FakeCuda):  # noqa: F811
    cuda.allocate(0, 3 << 30)
    cuda.cached = [1 << 30, 2 << 30]
    outcome = run(EMPTY_CACHE)
    assert outcome.device == Change(6 << 30, 3 << 30, 6 << 30)
    assert cuda.order == ["empty_cache"]


@pytest.mark.slow
def test_a_collect_by_what_is_allocated(cuda: FakeCuda):  # noqa: F811
    class Freed:
        def __del__(self) -> None:
            cuda.now[1] -= 1 << 30

    cuda.allocate(1, 4 << 30)
    cuda.cached = [5, 5]
    holder = SimpleNamespace(freed=Freed())
    holder.me = holder
    del holder
    assert run(GC).device == Change(4 << 30, 3 << 30, (4 << 30) + 10)


@pytest.mark.slow
def test_without_a_context_nothing_asks_a_device(cuda: FakeCuda):  # noqa: F811
    cuda.ready = False
    assert devices_in_use() == ()
    assert not capturing()
    synchronize()
    assert run(GC).device == Change()
    assert not reclaim.empty_cache()


def test_only_devices_in_use_are_waited_for(cuda: FakeCuda):  # noqa: F811
    cuda.allocate(1, 100)
    synchronize()
    assert cuda.order == ["synchronize 1"]


def test_trigger_words():
    assert trigger_words(HOST | DEVICE) == "pressure"
    assert trigger_words(HOST | IDLE_HEAP) == "host pressure, idle heap"
    assert trigger_words(DEVICE) == "device pressure"
    assert trigger_words(0) == ""


def test_a_young_collection_that_was_not_measured_counts_as_the_last_one_that_was() -> None:
    engine = memtools.CleanupPolicy()._engine
    engine._manages_gc = True  # as in `with policy:`
    engine._done[GC_YOUNG] = Done(times=1, ns=10**15)  # young collections are dear
    found = Collected(10, None, None, (), 0.1)
    nothing = Outcome(1, Change(), Change(), "", found, None)

    def measured_as(share: float) -> Outcome:
        return nothing._replace(gain=share)

    unknown = nothing._replace(knows_heap=False)
    assert engine._is_insurance(measured_as(0.005))
    assert engine._is_insurance(unknown)
    assert not engine._is_insurance(measured_as(0.0))
    assert not engine._is_insurance(unknown)
