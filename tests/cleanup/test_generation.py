"""generation: a phase in monitors that run, a tick of the policy's clock, at the outermost."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import memtools
from memtools import CleanupPolicy, HostMemoryPressure, KVPool, MemoryMonitor


def new_pool() -> KVPool:
    return KVPool(1, 1, 64, max_tokens=64, max_sequences=2, dtype="float32")


def new_policy(calls: list[int]) -> CleanupPolicy:
    """One that calls back at the end of each generation."""
    policy = CleanupPolicy(None, at_epoch=False, strict=True)
    policy.add("note", lambda: calls.append(1), {"generation": 1})
    return policy


CALLS: list[int] = []
POLICY = new_policy(CALLS)
generates = memtools.generation(policy=POLICY)


@generates
def rollout(n: int = 1, error: BaseException | None = None) -> int:
    """Generates."""
    if error is not None:
        raise error
    return n


@generates
def stream(n: int) -> Iterator[int]:
    yield from range(n)


@generates
async def serve(n: int = 1) -> int:
    await asyncio.sleep(0)
    return n


@generates
async def astream(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


class Agent:
    @memtools.generation(policy=POLICY)
    @classmethod
    def sample(cls, x: int) -> int:
        return x

    @memtools.generation(policy=POLICY)
    def generate(self, x: int) -> int:
        return rollout(x)


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


def generations(monitor: MemoryMonitor, call: Callable[[], object]) -> int:
    """How many phases of the name a monitor that runs has more afterwards."""

    def seen() -> int:
        phases = monitor._last.book.totals()  # type: ignore[union-attr]
        return sum(phase.count for phase in phases if phase.name == "generation")

    before = seen()
    call()
    return seen() - before


# --- phase and tick -------------------------------------------------------------------------------


def test_the_end_of_a_generation_is_where_the_policy_acts():
    assert rollout(3) == 3
    assert CALLS == [1]
    with generates:
        assert CALLS == [1]
    assert CALLS == [1, 1]
    assert Agent.sample(4) == 4 == Agent().generate(4)
    assert CALLS == [1] * 4


def test_it_is_a_phase_in_every_monitor_that_runs():
    first, second = MemoryMonitor(), MemoryMonitor()
    with first, second:
        assert generations(first, rollout) == 1
        assert generations(second, memtools.generation()(lambda: None)) == 1
        assert generations(first, lambda: list(stream(3))) == 1
    rollout()


def test_what_the_policy_does_is_no_part_of_the_phase():
    with MemoryMonitor() as monitor:
        policy = new_policy([])
        closed: list[int] = []
        policy.add(
            "count",
            lambda: closed.append(monitor._last.book.totals()[0].count),  # type: ignore[union-attr]
            {"generation": 1},
        )
        memtools.generation(policy=policy)(lambda: None)()
    assert closed == [1], "it is over when the policy acts"


def test_only_the_outermost_counts():
    def nested() -> None:
        with generates, memtools.generation(policy=POLICY):
            rollout()
            list(stream(2))
            Agent().generate(1)

    with MemoryMonitor() as monitor:
        assert generations(monitor, nested) == 1
    assert CALLS == [1]
    rollout()
    assert CALLS == [1, 1]


def test_the_policy_learns_of_the_pool_and_holds_it_weakly():
    pool, policy = new_pool(), CleanupPolicy()
    with pool.acquire(1) as lease:
        lease.reserve(64)
    assert pool.stats().idle_bytes > 0
    made = memtools.generation(pool=pool, policy=policy)(lambda: 1)
    assert made() == 1
    policy.cleanup("pool_trim")
    assert pool.stats().idle_bytes == 0
    gone = weakref.ref(pool)
    del pool, lease
    assert gone() is None
    assert made() == 1


def test_without_a_policy_a_pool_is_left_alone():
    pool = new_pool()
    with memtools.generation(pool), pool.acquire(1) as lease:
        lease.reserve(64)
    assert pool.stats().idle_bytes > 0


# --- exceptions -----------------------------------------------------------------------------------


def test_exceptions_pass_and_end_the_phase():
    error = LookupError("x")
    with MemoryMonitor() as monitor:

        def raising() -> None:
            with pytest.raises(LookupError) as caught:
                rollout(error=error)
            assert caught.value is error
            with pytest.raises(LookupError), generates:
                raise error

        assert generations(monitor, raising) == 2
        assert generations(monitor, rollout) == 1, "nothing is left open"


def test_what_an_action_raises_passes():
    def full() -> None:
        raise HostMemoryPressure("full")

    policy = CleanupPolicy(strict=True)
    policy.add("full", full, {"generation": 1})
    for _ in range(2):
        with pytest.raises(HostMemoryPressure, match="full"):
            memtools.generation(policy=policy)(lambda: None)()


def test_a_policy_that_has_no_room_for_the_phase_leaves_nothing_open():
    policy = CleanupPolicy()
    for i in range(12):
        policy.phase(f"phase {i}")
    with pytest.raises(ValueError, match="at most"):
        memtools.generation(policy=policy)(lambda: None)()
    rollout()
    assert CALLS == [1]


# --- kinds ----------------------------------------------------------------------------------------


def test_a_stream_lasts_to_its_end_or_until_it_is_closed():
    assert inspect.isgeneratorfunction(stream)
    values = stream(3)
    assert next(values) == 0
    rollout()  # its reader's, not its own
    assert CALLS == [1]
    assert list(values) == [1, 2]
    assert CALLS == [1, 1]
    early = stream(3)
    next(early)
    early.close()
    assert CALLS == [1] * 3
    stream(3)
    assert CALLS == [1] * 3, "never begun"


def test_coroutines_and_asynchronous_streams():
    assert inspect.iscoroutinefunction(serve)
    assert inspect.isasyncgenfunction(astream)

    async def main() -> None:
        assert await asyncio.gather(*(serve(i) for i in range(4))) == [0, 1, 2, 3]
        assert len(CALLS) == 4
        assert [value async for value in astream(3)] == [0, 1, 2]
        assert len(CALLS) == 5
        values = astream(3)
        await anext(values)
        await values.aclose()
        assert len(CALLS) == 6

    asyncio.run(main())


# --- bad input, and cost --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((lambda: None,), r"takes a KVPool as pool, got <lambda>; write @memtools.generation\("),
        ((3,), r"takes a KVPool as pool, got int"),
        ((None, 3), r"takes a CleanupPolicy, got int"),
        ((None, MemoryMonitor()), r"takes a CleanupPolicy, got MemoryMonitor"),
    ],
)
def test_other_pools_and_policies_are_refused(arguments: Any, sentence):
    with pytest.raises(TypeError, match=sentence):
        memtools.generation(*arguments)


def test_it_loads_no_monitor_and_no_torch():
    code = (
        "import sys, memtools\n"
        "memtools.generation()(lambda: None)()\n"
        "assert 'torch' not in sys.modules and 'memtools._monitor.run' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
