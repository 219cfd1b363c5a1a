"""memtools._core.Policy: its life, what it refuses, and what it does without memory."""

from __future__ import annotations

import _testcapi
import gc
import sys
import weakref
from typing import Any

import pytest

from memtools import _core
from tests.cleanup.policyleaks import core_policy
from tests.cleanup.test_core import GIB, Actor, ruled

# --- life -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_policy_in_a_cycle_is_collected() -> None:
    actor = Actor(((1,), 0, False))
    actor.tick(3)
    gone = weakref.ref(actor)
    del actor
    gc.collect()
    assert gone() is None


def test_what_act_returns_is_let_go() -> None:
    class Result:
        pass

    def act(mask: int, clock: int) -> Result:
        result = Result()
        gone.append(weakref.ref(result))
        return result

    gone: list[Any] = []
    ruled(act, ((1,), 0, False)).tick()
    assert gone[0]() is None


@pytest.mark.slow
def test_policies_keep_no_hold_of_their_type() -> None:
    gc.collect()
    before = sys.getrefcount(_core.Policy)
    for _ in range(20):
        core_policy(print)
    after = sys.getrefcount(_core.Policy)
    assert after == before


@pytest.mark.slow
def test_a_policy_that_act_drops_lives_until_its_end() -> None:
    def act(mask: int, clock: int) -> None:
        kept.clear()
        gc.collect()

    kept: list[Any] = []
    kept.append(ruled(act, ((1,), 0, False)))
    tick = kept[0].tick
    tick()
    assert kept == []


def test_rules_come_and_go() -> None:
    actor = Actor()
    actor.tick(3)
    actor.core.set_rule(15, (0, 2), 0, False)
    actor.core.tick(1, 2)
    actor.core.set_rule(15, (), 0, False)
    actor.core.tick(1, 2)
    assert actor.asked == [(1 << 15, 1, 2)]


@pytest.mark.parametrize("what", ["made", "ticked", "asked"])
def test_whatever_allocation_fails_it_is_a_memory_error_and_all_goes_on(what: str) -> None:
    """Each allocation of Python's; the native parts' failures are tested in C."""

    def act(mask: int, clock: int) -> None:
        pass

    core = core_policy(act)
    core.set_rule(15, (1,), 31, True)  # a mask that is no small int
    calls = {
        "made": lambda: ruled(act, ((1, 2), 31, True), limit=GIB),
        "ticked": lambda: core.tick(0, 1000),
        "asked": lambda: (core.figures(0), core.seconds, core.look_ns, core.ticks(0), core.look()),
    }
    calls[what]()
    count = sys.getrefcount(act)
    failed = at = 0
    while at < 1000:
        _testcapi.set_nomemory(at)
        try:
            calls[what]()
        except MemoryError:
            failed += 1
        else:
            break
        finally:
            _testcapi.remove_mem_hooks()
        at += 1
    assert failed > 0
    assert at < 1000
    assert sys.getrefcount(act) == count
    core.tick()
    assert core.look() == 1 << 15
