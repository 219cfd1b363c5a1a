"""Forecasts of a run: in how many steps what a limit counts is full, by made series."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from memtools._leak.forecast import Course, course_of, joint_of
from memtools._leak.series import Points
from tests.monitor.program import KIB, MIB

LOOKS = (*range(16, 128, 8), 128, 144, 160, 176, 192, 224, 256)


def steady(rate: float, steps: float = 256) -> Course:
    return Course(rate, rate, steps=steps)


def points_of(until: int, **curves: Callable[[int], float]) -> Points:
    """What a run has read by then: each series as a function of the step."""
    points = Points()
    for step in LOOKS:
        if step <= until:
            points.add(step, {name: int(curve(step)) for name, curve in curves.items()})
    return points


def seen_by(until: int, room: int, curve: Callable[[int], float]) -> Course | None:
    points = points_of(until, resident=curve)
    return points.course("counted", max(16, until // 4), room)


def test_a_forecast_is_an_interval() -> None:
    assert joint_of(5, steady(0)).left is None
    assert joint_of(None, steady(5)).left is None
    for steps, most in ((-3, 4.0), (16, 4.0), (64, 4.0), (200, 2.0)):
        left = joint_of(1000, steady(10.0, steps)).left
        assert left is not None
        assert left[0] < 100 < left[1] <= most * left[0]
    assert joint_of(-5, steady(10.0)).left == (0, 0)


def test_growth_that_ends_by_itself_is_left_out_of_the_forecast_once_it_has() -> None:
    """500 bytes at 10 a step, of which 8 end after 400 bytes: 50 steps, then 2 a step."""
    left = joint_of(500, steady(10.0), filling=(8.0, 400.0)).left
    assert left is not None
    assert left[0] < 50 < left[1]
    assert joint_of(500, steady(8.0), filling=(8.0, 400.0)).left is None, "it fits"
    short = joint_of(300, steady(8.0), filling=(8.0, 400.0)).left
    assert short is not None
    assert short[0] < 300 / 8 < short[1]


def test_a_rate_that_rises_is_followed() -> None:
    """10 bytes a step that become 1 more in each step: 1,000 are there after 35.8 steps."""
    left = joint_of(1000, Course(10.0, 10.0, 1.0, 256)).left
    assert left is not None
    assert left[0] < 35.8 < left[1] < 50


def test_a_series_goes_on_as_fast_as_its_newer_half() -> None:
    even = course_of([(step, 10.0 * step) for step in LOOKS], 1000)
    assert even == pytest.approx((10.0, 10.0, 0.0, 240, 0.0))
    slower = course_of([(step, 100 * math.sqrt(step)) for step in LOOKS], 10_000)
    now = 100 / 2 / math.sqrt(200)
    assert slower.least < 0.6 * now < now < 1.1 * slower.most
    flat = course_of([(step, min(step, 100)) for step in LOOKS], 1000)
    assert (flat.least, flat.most) == pytest.approx((0, 0))
    late = course_of([(step, 10.0 * max(0, step - 140)) for step in LOOKS], 1000)
    assert (late.least, late.most) == (0.0, math.inf), "it has just begun"
    soon = course_of([(step, step**2) for step in LOOKS], 10)
    far = course_of([(step, step**2) for step in LOOKS], 10**9)
    assert soon.least == far.least == pytest.approx(390, rel=0.1)
    assert soon.most < far.most, "in a short time it does not change by as much"


def test_the_fewest_steps_are_not_more_than_the_most_where_only_one_of_two_courses_rises() -> None:
    rising = Course(360 * KIB, 360 * KIB, 1.5 * KIB, 160)
    joint = joint_of(760 * MIB, rising, Course(280 * KIB, 430 * KIB, steps=130))
    assert joint.fewest < 760 < joint.most


# --- kinds of programs ----------------------------------------------------------------------------


def test_a_leak_beside_a_warm_up_has_no_forecast_until_the_warm_up_has_ended() -> None:
    """32 KiB a step leak, while libraries allocate 16 MiB in the first steps."""
    leak = steady(32 * KIB, 16)
    curve = lambda step: 32 * KIB * step + 16 * MIB * (1 - math.exp(-step / 30))  # noqa: E731
    room = 60 * MIB
    early = joint_of(room, leak, seen_by(48, room, curve))
    assert (early.rate, early.left) == (32 * KIB, None), "the warm-up may go on, or end"
    late = joint_of(room, steady(32 * KIB), seen_by(256, room, curve)).left
    assert late is not None
    assert late[0] < room / (32 * KIB) < late[1]


def test_freed_memory_that_malloc_keeps_counts_once_it_has_come_for_a_while() -> None:
    """440 KiB a step beside 70 KiB that are in use: as much as a warm-up takes, at first."""
    in_use, whole, room = 70 * KIB, 510 * KIB, 700 * MIB
    curve = lambda step: whole * step  # noqa: E731
    assert joint_of(room, steady(in_use, 32), seen_by(48, room, curve)).left is None
    joint = joint_of(room, steady(in_use), seen_by(192, room, curve))
    assert joint.rate == pytest.approx(whole, rel=0.01)
    left = joint.left
    assert left is not None
    assert left[0] < room / whole < left[1] <= 2 * left[0]
    near = joint_of(40 * MIB, steady(in_use, 32), seen_by(48, 40 * MIB, curve)).left
    assert near is not None, "a limit as near as that is met even so"
    assert near[0] < 40 * MIB / whole < near[1]


def test_what_grows_within_freed_memory_takes_that_first() -> None:
    """Resident memory stays as it is while a leak takes the 30 MiB that malloc keeps."""
    leak, room, idle = steady(100 * KIB), 70 * MIB, 30 * MIB
    seen = seen_by(192, room, lambda _: 300 * MIB)
    left = joint_of(room, leak, seen, idle=idle).left
    assert left is not None
    assert left[0] < room / (100 * KIB) < (room + idle) / (100 * KIB) < left[1]


def test_a_buffer_that_jumps_does_not_promise_a_day() -> None:
    """8 MiB every 60 steps: the forecast is of the pace of several jumps, or there is none."""
    jumps = lambda step: 8 * MIB * (step // 60)  # noqa: E731
    rate, room = 8 * MIB / 60, 100 * MIB
    for until in LOOKS[2:]:
        left = joint_of(room, steady(0), seen_by(until, room, jumps)).left
        assert left is None or left[0] < room / rate < left[1]


def test_jumps_may_meet_the_limit_one_earlier_or_later() -> None:
    """1.2 MiB of every 25 steps is in use and seen: the limit is met at one of them."""
    jumps = lambda step: 1.2 * MIB * (step // 25)  # noqa: E731
    rate, room = 1.2 * MIB / 25, 5 * MIB
    for until in LOOKS[-4:]:
        used = jumps(until)
        true = next(step for step in range(until, 9999) if jumps(step) - used >= room) - until
        left = joint_of(room, steady(rate), seen_by(until, room, jumps)).left
        assert left is None or left[0] < true < left[1]
    assert joint_of(0, steady(rate), seen_by(256, 0, jumps)).left == (0, 0), "it is reached"


def test_a_resident_plateau_is_no_forecast() -> None:
    """What a library allocated at once does not come again, and nothing else grows."""
    plateau = lambda step: 300 * MIB + 24 * MIB * (step > 40)  # noqa: E731
    for until in LOOKS[4:]:
        seen = seen_by(until, 200 * MIB, plateau)
        assert joint_of(200 * MIB, steady(0), seen).left is None


@pytest.mark.parametrize(("grown", "period"), [(40, 80), (80, 160), (120, 240)])
def test_growth_that_comes_and_goes_may_come_and_go_again(grown: int, period: int) -> None:
    """Freed memory that malloc keeps comes in bursts: 1 MiB a step in some steps of each period,
    beside 100 KiB that are in use."""
    points, left = Points(), dict[int, tuple[float, float] | None]()

    def size(step: int) -> float:
        bursts, rest = divmod(step, period)
        return MIB * (grown * bursts + min(grown, rest))

    room, end = 600 * MIB, next(step for step in range(10**4) if size(step) >= 600 * MIB)
    for step in range(16, end - 100, 8):
        points.add(step, {"resident": int(size(step)), "heap": 100 * KIB * step})
        if step >= 160:
            since, now = step // 4, int(room - size(step))
            sure = points.certain("use", since)._replace(steps=step - 16)
            left[step] = joint_of(now, sure, points.course("counted", since, now)).left
    wrong = [step for step, one in left.items() if one and not one[0] <= end - step <= one[1] + 1]
    assert len(wrong) <= 0.1 * len(left)


def test_noise_of_less_than_two_mib_does_not_change_a_forecast() -> None:
    noisy = lambda step: 50 * KIB * step + MIB * (step % 3)  # noqa: E731
    room, leak = 100 * MIB, steady(50 * KIB)
    left, quiet = joint_of(room, leak, seen_by(256, room, noisy)).left, joint_of(room, leak).left
    assert left == pytest.approx(quiet, rel=0.05)
