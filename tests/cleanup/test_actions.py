"""The actions by themselves: what they do, what they measure, and on which side it is freed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import memtools
from memtools._cleanup.actions import (
    GC,
    GC_YOUNG,
    LEAST_TOTAL,
    POOL_TRIM,
    Change,
    Pools,
    Readings,
    Usage,
    change,
    measured,
    work_of,
)
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
    assert found.examples == ("[256] float32 tensor, with SimpleNamespace, dict",)


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


def test_a_closed_pool_is_refused():
    pool = memtools.KVPool(1, 1, 8, max_tokens=64, max_sequences=1, dtype="float32", name="old")
    pool.close()
    with pytest.raises(ValueError, match="old is closed"):
        watching(pool)


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
