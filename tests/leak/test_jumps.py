"""Growth in few large jumps: a buffer that is filled and made larger, and what only looks so."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memtools._leak.jumps import Stairs, jumps_of, without
from memtools._leak.series import Points
from tests.leak.test_judge import by_assert_flat, by_monitor
from tests.monitor.program import KIB, LOOKS, MIB, Clock, clock, holder

__all__ = ["clock"]
RATE = 96 * KIB


def vector(factor: float, first: int = RATE) -> Callable[[int], int]:
    """The heap with a buffer of so many bytes at first, and so many times as many when full."""

    def size(step: int) -> int:
        capacity = first
        while capacity < RATE * step:
            capacity = int(factor * capacity)
        return 100 * MIB + capacity

    return size


def seen(size: Callable[[int], int], until: int, every: int = 1) -> Stairs | None:
    return jumps_of((step, size(step)) for step in range(1, until, every)).stairs()


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("factor", [1.5, 2.0, 2.5])
@pytest.mark.parametrize("noise", [0, 40 * KIB])
def test_a_buffer_that_is_made_larger_grows_by_what_is_added(
    factor: float, every: int, noise: int
) -> None:
    size, chance = vector(factor), random.Random(0)
    for until in (120, 300, 700, 1500):
        found = seen(lambda step: size(step) + chance.randrange(noise + 1), until, every)
        assert found is not None, until
        assert found.rate == pytest.approx(RATE, rel=0.15)
        before = size(until)
        at = next(step for step in range(until, 99 * until) if size(step) > before)
        assert found.next_step == pytest.approx(at, rel=0.1)
        assert found.next_bytes == pytest.approx(size(at) - before, rel=0.1)


def test_a_leak_beside_it_stays_and_is_no_jump() -> None:
    size = vector(2.0)
    points = Points()
    for step in range(1, 513):
        grown = size(step) + 32 * KIB * step
        points.jumps.add(step, grown)
        if step in LOOKS:
            points.add(step, {"heap": grown})
    assert points.pace("use", 128).rate == pytest.approx(RATE + 32 * KIB, rel=0.05)
    found = points.stairs("use")
    assert found is not None
    assert points.stairs("python") is points.stairs("rss") is None
    beside = without(points.series("use"), found.jumps)
    (since, first), (until, last) = beside[-4], beside[-1]
    assert (last - first) / (until - since) == pytest.approx(32 * KIB, rel=0.1)


def given_back(step: int) -> int:
    """A larger batch now and then."""
    return 100 * MIB + (2 * MIB if step % 40 == 0 else 4 * MIB if step % 90 == 0 else 0)


def one_by_one(step: int) -> int:
    """A thing of one size each 64 steps, which other tests see."""
    return 100 * MIB + 2 * MIB * (step // 64)


def less_and_less(step: int) -> int:
    """A cache for each new shape: many at first."""
    return 100 * MIB + sum(3 * MIB for at in (16, 24, 48, 112, 240) if step >= at)


def more_at_once(step: int) -> int:
    """Larger jumps that come sooner than what was added would fill them."""
    return 100 * MIB + sum(
        n * MIB for n, at in ((1, 20), (2, 150), (4, 180), (8, 500)) if step >= at
    )


def warms_up(step: int) -> int:
    return 100 * MIB + (40 * MIB if step >= 2 else 0) + (60 * MIB if step >= 3 else 0)


def steady(step: int) -> int:
    return 100 * MIB + 2 * MIB * step


@pytest.mark.parametrize(
    "size", [given_back, one_by_one, less_and_less, more_at_once, warms_up, steady]
)
def test_what_only_looks_so_is_none(size: Callable[[int], int]) -> None:
    assert [until for until in range(20, 600) if seen(size, until) is not None] == []


@pytest.mark.parametrize("leaps", [(4, 8, 16), (6, 12, 24), (10, 20, 29)])
def test_readings_that_come_ever_more_seldom_see_no_jumps_in_what_grows_evenly(
    leaps: tuple[int, ...],
) -> None:
    """A reading rests for as long as the one before took, which is long on a busy machine."""
    steps = [*range(4, 69, 4)]
    for leap in leaps:
        steps.append(steps[-1] + leap)
    points = Points()
    for step in steps:
        points.jumps.add(step, steady(step))
        points.add(step, {"heap": steady(step)})
    assert points.stairs("use") is None
    assert points.pace("use", 24).rate == pytest.approx(2 * MIB)


def test_a_buffer_that_is_large_enough_has_ended_to_grow() -> None:
    size = vector(2.0)

    def full(step: int) -> int:
        return size(min(step, 200))

    assert seen(full, 250) is not None  # the next jump is expected at step 257
    assert seen(full, 400) is None


@pytest.mark.parametrize(("written", "is_known"), [(RATE, True), (0, False), (3 * RATE, False)])
def test_two_jumps_are_enough_where_what_is_added_becomes_resident(
    written: int, is_known: bool
) -> None:
    size, points = vector(2.0, 64 * RATE), Points()
    for step in range(1, 193):
        points.jumps.add(step, size(step))
        if step in LOOKS or step % 16 == 0:
            points.add(step, {"heap": size(step), "rss": 200 * MIB + written * step})
    assert points.jumps.stairs() is None
    assert (points.stairs("use") is not None) is is_known


def test_a_container_of_the_program_that_is_made_larger_gets_what_is_added(clock: Clock) -> None:
    """A census sees what it has got, which is up to twice as much."""
    (found,) = by_monitor(clock, vector(2.0), [holder(2 * RATE, path="Store.data")])
    assert found.holder == "Store.data"
    assert found.rate_bytes == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("every_step", [0, 100, 232])
def test_what_little_comes_between_jumps_is_not_the_rate(clock: Clock, every_step: int) -> None:
    size = vector(2.0)
    (found,) = by_monitor(clock, lambda step: size(step) + every_step * step, [])
    assert found.rate_bytes == pytest.approx(RATE, rel=0.05)


def test_a_run_says_when_the_next_jump_comes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without growth in between do not end it, and assert_flat() does not call it flat."""
    (found,) = by_monitor(clock, vector(2.0), [])
    assert (found.grade, found.kind) == ("growing", "C heap")
    assert found.rate_bytes == pytest.approx(RATE, rel=0.05)
    assert found.what.startswith("in jumps, the next of 48.0 MiB at about step 51")
    assert "larger each time it is full" in found.advice
    text = by_assert_flat(monkeypatch, vector(2.0), [])
    assert "memory grows by 96.0 KiB a step" in text
    assert found.advice in text
    assert by_assert_flat(monkeypatch, less_and_less, []) == ""
