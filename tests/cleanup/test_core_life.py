"""memtools._core.Policy: its life, what it refuses, and what it does without memory."""

from __future__ import annotations

import _testcapi
import gc
import sys
import weakref
from typing import Any

import pytest

from memtools import _core
from tests.cleanup.test_core import GIB, NOTHING, Actor

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
    _core.Policy(act, [((1,), 0, False)]).tick()
    assert gone[0]() is None


@pytest.mark.slow
def test_policies_keep_no_hold_of_their_type() -> None:
    gc.collect()
    before = sys.getrefcount(_core.Policy)
    for _ in range(20):
        _core.Policy(print, [])
    after = sys.getrefcount(_core.Policy)
    assert after == before


@pytest.mark.slow
def test_a_policy_that_act_drops_lives_until_its_end() -> None:
    def act(mask: int, clock: int) -> None:
        kept.clear()
        gc.collect()

    kept: list[Any] = []
    kept.append(_core.Policy(act, [((1,), 0, False)]))
    tick = kept[0].tick
    tick()
    assert kept == []


def test_a_rule_that_empties_the_list_of_rules_is_read_whole() -> None:
    rules: list[Any] = []
    kept: list[Any] = []

    class Emptying:
        def __index__(self) -> int:
            rules.clear()
            kept.extend((tuple([1 + n % 2]), 1, True) for n in range(200))
            return 15

    asked: list[int] = []
    rules.append((tuple([7]), Emptying(), False))
    core = _core.Policy(lambda mask, clock: asked.append(core.ticks(clock)), rules)
    for _ in range(7):
        core.tick()
    assert rules == []
    assert asked == [7]


def test_rules_come_and_go() -> None:
    actor = Actor()
    actor.tick(3)
    actor.core.set_rule(15, ((0, 2), 0, False))
    actor.core.tick(1, 2)
    actor.core.set_rule(15, ((), 0, False))
    actor.core.tick(1, 2)
    assert actor.asked == [(1 << 15, 1, 2)]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pressure": 0}, "pressure is above 0 and at most 1"),
        ({"pressure": float("nan")}, "pressure is above 0 and at most 1"),
        ({"pressure": 1.1}, "pressure is above 0 and at most 1"),
        ({"max_cost": -1}, "max_cost is 0 to 1"),
        ({"max_cost": float("nan")}, "max_cost is 0 to 1"),
        ({"sync_every": -1}, r"sync_every is 0 to 2\*\*48 updates, got -1"),
        ({"limit": 0}, "limit is a number of bytes above 0, got 0"),
        ({"limit": -5}, "limit is a number of bytes above 0, got -5"),
        ({"devices": 9}, "devices is 0 to 8, got 9"),
        ({"root": "/" + "x" * 9000}, "root has 9001 bytes"),
        ({"rules": [((),) * 3] * 17}, "17 rules, at most 16 are possible"),
        ({"rules": [((0,) * 17, 0, False)]}, "rule 0: every is a tuple of at most 16 numbers"),
        ({"rules": [((), 0, False), ((1, -1), 0, False)]}, "rule 1: a cadence is 0 .*, got -1"),
        ({"rules": [((2**48 + 1,), 0, False)]}, "rule 0: a cadence"),
        ({"rules": [((1.5,), 0, False)]}, r"rule 0: a cadence is .*, got 1\.5"),
        ({"rules": [((), 32, False)]}, "rule 0: triggers are bits 1 to 16, got 32"),
        ({"rules": [((), -1, False)]}, "rule 0: triggers are bits 1 to 16, got -1"),
        ({"rules": [((), 1)]}, r"rule 0: a rule is \(every, triggers, later\), got \(\(\), 1\)"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.Policy(print, settings.pop("rules", []), **settings)


def test_act_is_callable() -> None:
    with pytest.raises(TypeError, match="act is to be callable, got 5"):
        _core.Policy(5, [])  # type: ignore[arg-type]


def test_bad_calls_change_nothing() -> None:
    actor = Actor(((1,), 0, False))
    core = actor.core
    for call, message in [
        (lambda: core.tick(16), r"tick\(\): a clock is 0 to 15, got 16"),
        (lambda: core.tick(-1), "a clock is 0 to 15, got -1"),
        (lambda: core.tick(2**70), "a clock is 0 to 15, got 1180"),
        (lambda: core.tick(0, -1), "n is from 0 to 281474976710656, got -1"),
        (lambda: core.tick(0, 2**48 + 1), "n is from 0 to .*, got 28147"),
        (lambda: core.ticks(16), r"ticks\(\): a clock is 0 to 15"),
        (lambda: core.why(16), r"why\(\): an action is 0 to 15, got 16"),
        (lambda: core.figures(-1), r"figures\(\): an action is 0 to 15, got -1"),
        (lambda: core.set_rule(16, ((), 0, False)), r"set_rule\(\): an action is 0 to 15"),
        (lambda: core.set_rule(0, ((-2,), 0, False)), "rule 0: a cadence"),
        (lambda: core.done(16, 1, *NOTHING), r"done\(\): an action is 0 to 15"),
        (lambda: core.done(0, -1, *NOTHING), "ns is 0 or more, or None, got -1"),
        (lambda: core.done(0, None, *NOTHING), "ns is how long the action took, got None"),  # type: ignore[arg-type]
        (lambda: core.done(0, 1, 1, 1, 1, 1, -7, 1), "device_after is 0 or more, or None, got -7"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert core.ticks(0) == core.figures(0)[0] == 0
    core.tick()
    assert actor.asked == [(1, 0, 1)]


@pytest.mark.parametrize("what", ["made", "ticked", "asked"])
def test_whatever_allocation_fails_it_is_a_memory_error_and_all_goes_on(what: str) -> None:
    """Each allocation of Python's; the native parts' failures are tested in C."""

    def act(mask: int, clock: int) -> None:
        pass

    core = _core.Policy(act, [])
    core.set_rule(15, ((1,), 31, True))  # a mask that is no small int
    calls = {
        "made": lambda: _core.Policy(act, [((1, 2), 31, True)], limit=GIB),
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
