"""CleanupPolicy: what is due when, what it is due for, and what rests."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import memtools
from memtools import CleanupPolicy
from memtools._cleanup import engine
from memtools.types import CleanupCall
from tests.cleanup.policycases import (  # noqa: F401 - fixtures
    aged,
    calls,
    gc_as_found,
    memory,
    no_gc,
    quiet,
    times,
)
from tests.monitor.root import MIB, Root


def cycle() -> weakref.ref[torch.Tensor]:
    holder = SimpleNamespace(tensor=torch.ones(4))
    holder.me = holder
    return weakref.ref(holder.tensor)


# --- cadences ---


def test_a_cadence_is_kept_at_its_multiples():
    policy = quiet()
    seen = calls(policy, 3)
    for _ in range(10):
        policy.step()
    assert seen == [3, 6, 9]


@pytest.mark.slow
def test_gc_collects():
    policy = quiet(gc_every=2)
    gc.collect()
    kept = cycle()
    policy.step()
    assert kept() is not None
    policy.step()
    assert kept() is None
    assert times(policy, "gc") == 1


def test_training_and_validation_are_counted_apart():
    policy = quiet()
    train, check = calls(policy, {"micro_batch": 2}), []
    policy.add("check", lambda: check.append(1), {"validation": 3})
    for _ in range(5):
        policy.micro_batch()
    assert (len(train), len(check)) == (2, 0)
    for _ in range(6):
        policy.micro_batch(validation=True)
    assert (len(train), len(check)) == (2, 2)


def test_an_epoch_counts_where_it_begins_and_where_it_ends():
    policy = quiet()
    said: list[CleanupCall] = []
    policy.add("note", said.append, {"epoch": 1})
    with policy.epoch():
        assert [call.ticks for call in said] == [1]
    assert said == [CleanupCall("epoch", 1, ("cadence",)), CleanupCall("epoch", 2, ("cadence",))]


def test_a_phase_counts_where_it_ends():
    policy = quiet()
    said: list[CleanupCall] = []
    policy.add("note", said.append, {"rollout": 2})
    for _ in range(4):
        with policy.phase("rollout"), policy.phase("other"):
            pass
    assert [(call.clock, call.ticks) for call in said] == [("rollout", 2), ("rollout", 4)]


@pytest.mark.slow
def test_at_epoch_asks_for_gc_and_trim_and_a_cadence_of_ones_own_comes_first():
    policy = CleanupPolicy(None, strict=True)
    with policy.epoch():
        assert (times(policy, "gc"), times(policy, "trim")) == (1, 1)
    assert (times(policy, "gc"), times(policy, "trim")) == (2, 2)
    seldom = CleanupPolicy({"epoch": 2}, strict=True)
    with seldom.epoch():
        assert (times(seldom, "gc"), times(seldom, "trim")) == (0, 1)
    assert (times(seldom, "gc"), times(seldom, "trim")) == (1, 2)


def test_without_at_epoch_an_epoch_does_nothing():
    policy = CleanupPolicy(None, at_epoch=False)
    with policy.epoch():
        pass
    assert all(action.count == 0 for action in policy.report().actions)


def test_what_raised_is_not_counted_and_passes():
    policy = quiet()
    seen = calls(policy, {"epoch": 1, "rollout": 1})
    with pytest.raises(ZeroDivisionError), policy.epoch(), policy.phase("rollout"):
        raise ZeroDivisionError(len(seen))
    assert len(seen) == 1, "the epoch's begin"


@pytest.mark.parametrize("kind", ["epoch", "phase"])
def test_as_decorators(kind):
    policy = quiet()
    clock = {"epoch": "epoch", "phase": "rollout"}[kind]
    span = policy.epoch() if kind == "epoch" else policy.phase("rollout")
    seen = calls(policy, {clock: 1})
    each = 2 if kind == "epoch" else 1

    class Agent:
        @span
        def play(self, n: int = 1) -> int:
            """Plays."""
            return n if n == 0 else self.play(n - 1)

        @classmethod
        @span
        def make(cls) -> type:
            return cls

    assert Agent().play(0) == 0
    assert len(seen) == each
    assert Agent().play(2) == 0  # inside itself: three in all
    assert len(seen) == 4 * each
    assert Agent.make() is Agent
    assert (Agent.play.__name__, Agent.play.__doc__) == ("play", "Plays.")

    @span
    async def sleep() -> int:
        await asyncio.sleep(0)
        return len(seen)

    @span
    def count():
        yield len(seen)

    before = len(seen)
    inside = asyncio.run(sleep())
    assert (inside - before, len(seen) - before) == (each - 1, each)
    assert list(count()) == [before + each + each - 1]
    assert len(seen) == before + 2 * each
    with pytest.raises(TypeError, match=r"decorates functions and methods, got class Agent"):
        span(Agent)


# --- what frees nothing rests ---


@pytest.fixture
def unbounded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], CleanupPolicy]:
    """A policy that backs off, and whose actions may take all the time."""
    monkeypatch.setattr(engine, "MAX_COST", 1.0)
    return lambda: quiet(strict=False)


@pytest.mark.slow
def test_what_frees_nothing_rests_longer_and_longer(
    memory: Root,  # noqa: F811
    unbounded: Callable[[], CleanupPolicy],
):
    policy = unbounded()
    seen = calls(policy, 1)
    aged(policy)
    for _ in range(200):
        policy.step()
    assert seen[:2] == [1, 2]
    gaps = [after - before for before, after in itertools.pairwise(seen)]
    assert gaps == sorted(gaps)
    assert max(gaps) == 64
    assert policy.report()["seen"].backoff == 64
    assert policy.report()["seen"].verdict == "frees nothing: runs 64 times less often"


def test_what_does_not_pay_has_its_part_of_the_time_and_the_rest_is_skipped(
    memory: Root,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(engine, "MAX_COST", 0.0)
    policy = quiet(strict=False)
    seen = calls(policy, 1)
    for _ in range(10):
        policy.step()
    assert seen == [1], "the first one is free"
    found = policy.report()["seen"]
    assert found.skipped == 9
    assert found.verdict.endswith("9 skipped, over the limit of 0.3 %")


# --- pressure ---


def looked(policy: CleanupPolicy) -> None:
    """As if a look were due: decides now, acts at the tick."""
    policy._core.look()
    policy.step()


@pytest.mark.slow
def test_pressure_asks_for_gc_pools_and_callbacks_that_want_it(memory: Root):  # noqa: F811
    pool = memtools.KVPool(1, 1, 64, max_tokens=4096, max_sequences=1, dtype="float32")
    policy = quiet()
    policy.watch(pool)
    said: list[CleanupCall] = []
    policy.add("note", said.append, pressure=True)
    never = calls(policy)
    looked(policy)
    assert times(policy, "gc") == times(policy, "pool_trim") == 0
    memory.use(0.9)
    looked(policy)
    assert times(policy, "gc") == times(policy, "pool_trim") == 1
    assert [call.reasons for call in said] == [("host pressure",)]
    assert never == []
    looked(policy)
    assert times(policy, "gc") == 1, "it rests"


@pytest.mark.slow
def test_pressure_is_a_part_of_the_limit_that_was_given(memory: Root):  # noqa: F811
    policy = quiet(limit="2000 MiB", pressure=0.5)
    memory.use(0.45)
    looked(policy)
    assert times(policy, "gc") == 0
    memory.use(0.6)
    looked(policy)
    assert times(policy, "gc") == 1


#: files of a made-up machine, and the zeros that they end with: each is 300 MiB of a job
BESIDE_ITSELF: dict[str, dict[str, tuple[str, int]]] = {
    "nothing": {},
    "what is swapped out": {
        "proc/meminfo": (
            "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 8388608 kB\n",
            0,
        ),
        "proc/self/status": (f"VmSize: {1 << 22} kB\nVmSwap: {300 << 10} kB\n", 0),
    },
    "a child": {
        "proc/self/task/1/children": ("77", 0),
        "proc/77/task/77/children": ("", 0),
        "proc/77/statm": (f"{300 << 8} {300 << 8} 0 0 0 0 0\n", 0),
    },
    "shared memory": {
        "proc/self/task/1/children": ("", 0),
        "proc/self/fd/.keep": ("", 0),
        "proc/self/status": ("Name:\tx\nRssShmem:\t 0 kB\n", 0),
        f"dev/shm/torch_{os.getpid()}_1": ("", 300 * MIB),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BESIDE_ITSELF)
def test_a_limit_that_was_given_is_for_the_whole_job(what: str, memory: Root):  # noqa: F811
    """As a monitor counts it."""
    memory.use(0.3)
    for name, (text, zeros) in BESIDE_ITSELF[what].items():
        path = memory.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(text)
            file.flush()
            if zeros:
                os.posix_fallocate(file.fileno(), 0, zeros)
    policy = quiet(limit="900 MiB", pressure=0.5)
    looked(policy)
    assert times(policy, "gc") == (what != "nothing")


# --- what else ---


def test_without_pools_pool_trim_is_no_action():
    policy = quiet(pool_trim_every=1)
    policy.step(), policy.step()
    found = policy.report()["pool_trim"]
    assert (found.count, found.verdict, found.backoff) == (0, "no pool is watched", 1)


def test_empty_cache_without_cuda_is_no_action_and_says_so():
    policy = quiet(empty_cache_every=1)
    policy.step(), policy.step()
    found = policy.report()["empty_cache"]
    assert (found.count, found.verdict, found.backoff) == (0, "no CUDA in this process", 1)


def test_a_callback_that_was_removed_is_not_called():
    policy = quiet()
    seen: list[int] = []
    handle = policy.add("seen", lambda: (seen.append(1), handle.remove()), 1)
    for _ in range(3):
        policy.step()
    handle.remove()
    assert seen == [1]
    assert repr(handle) == "<cleanup callback 'seen'>"
    assert times(policy, "seen") == 1
    again = calls(policy, 1)
    policy.step()
    assert again == [4]
    assert times(policy, "seen") == 2, "the name keeps its figures"


@pytest.mark.slow
def test_cleanup_by_hand():
    policy = quiet()
    gc.collect()
    kept = cycle()
    assert [done.name for done in policy.cleanup()] == ["gc", "trim"]
    assert kept() is None
    policy.add("note", lambda: None)
    done = policy.cleanup("note", "gc_young")
    assert [(one.name, one.error, one.ms > 0) for one in done] == [
        ("note", "", True),
        ("gc_young", "", True),
    ]
    assert policy.cleanup("empty_cache") == ()
    assert times(policy, "gc") == 1
    policy.cleanup("note")
    assert policy.report()["note"].when == "by hand"


@pytest.mark.slow
def test_cycles_that_held_tensors_are_shown(no_gc: None):  # noqa: F811
    policy = quiet(gc_every=1)
    for _ in range(6):
        for _ in range(600):
            cycle()
        policy.step()
    found = policy.report().cycles
    assert found.objects >= 6 * 1200
    assert found.tensors >= 600
    assert any("SimpleNamespace" in example for example in found.examples)
    assert "Cycles held" in str(policy.report())


@pytest.mark.slow
def test_repr():
    policy = CleanupPolicy()
    policy.step(1500)
    assert repr(policy) == "CleanupPolicy(not running, 1,500 updates)"
    with CleanupPolicy() as running:
        assert repr(running) == "CleanupPolicy(running, 0 updates)"


def test_an_epoch_that_was_not_entered_is_said_once_for_each_policy(recwarn):
    warnings.simplefilter("always")
    policy = quiet()
    for _ in range(3):
        policy.epoch()
    policy.phase("rollout")
    first, second = recwarn.list
    assert "policy.epoch() was called and not entered, so nothing was counted" in str(first.message)
    assert first.filename == __file__
    assert "write `with policy.phase('rollout'):`" in str(second.message)
    with policy.epoch():
        pass
    policy.epoch()(lambda: None)()
    quiet().epoch()
    assert len(recwarn.list) == 3
