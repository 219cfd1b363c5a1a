"""memtools._core.Policy: counts, calls act, and takes what it did. The rules are tested in C."""

from __future__ import annotations

import gc
import weakref

import pytest

from memtools import _core

NEVER = (0,)
GIB = 1 << 30
DID = {"paid": (GIB, 0, GIB, None, None, None), "nothing": (GIB, GIB, GIB, 0, 0, GIB)}


class Actor:
    """Does what is asked for, and remembers it."""

    def __init__(self, *rules: tuple[tuple[int, ...], int, bool], **settings: object) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.frees = "paid"
        self.core = _core.Policy(self.act, rules, **settings)  # type: ignore[arg-type]

    def act(self, mask: int, clock: int) -> None:
        self.asked.append((mask, clock, self.core.ticks(clock)))
        for action in range(16):
            if mask >> action & 1:
                self.core.done(action, 1000, *DID[self.frees])


def test_acts_at_the_multiples_of_its_cadences():
    actor = Actor(((100,), 0, False), ((50, 0, 0, 1), 0, True))
    for _ in range(200):
        actor.core.tick()
    actor.core.tick(3)
    assert actor.asked == [(2, 0, 50), (3, 0, 100), (2, 0, 150), (3, 0, 200), (2, 3, 1)]
    assert actor.core.why(0) == actor.core.why(1) == 32
    assert [actor.core.ticks(clock) for clock in range(5)] == [200, 0, 0, 1, 0]
    assert actor.core.figures(0) == (2, 2000, 2 * GIB, 0, 2, 0, 1, 0, 1000)


def test_several_ticks_at_once_are_due_once():
    actor = Actor(((10,), 0, False))
    actor.core.tick(0, 35)
    actor.core.tick(0, 4)
    actor.core.tick(0, 0)
    actor.core.tick()
    assert actor.asked == [(1, 0, 35), (1, 0, 40)]


def test_what_act_raises_leaves_tick_and_is_asked_again():
    def act(mask: int, clock: int) -> None:
        if core.ticks(0) == 1:
            raise LookupError("no")
        asked.append(mask)
        core.done(0, 1, *DID["paid"])

    asked: list[int] = []
    core = _core.Policy(act, [((1,), 0, False)])
    with pytest.raises(LookupError, match="no"):
        core.tick()
    core.tick()
    assert asked == [1]


def test_a_tick_from_within_act_only_counts():
    def act(mask: int, clock: int) -> None:
        asked.append((mask, core.ticks(0)))
        core.tick()
        core.done(0, 1, *DID["paid"])

    asked: list[tuple[int, int]] = []
    core = _core.Policy(act, [((2,), 0, False)])
    for _ in range(3):
        core.tick()
    assert asked == [(1, 2), (1, 4)]
    assert core.ticks(0) == 5


def test_a_policy_in_a_cycle_is_collected():
    actor = Actor(((1,), 0, False))
    gone = weakref.ref(actor)
    del actor
    gc.collect()
    assert gone() is None
