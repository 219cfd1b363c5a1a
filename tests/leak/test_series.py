"""What the looks of a run show: series, paces, and the evidence that the judge gets."""

from __future__ import annotations

import gc
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from memtools import LeakFinding, _core
from memtools._leak.drift import Recent
from memtools._leak.growth import kept_pace, rising_pace, slope_of
from memtools._leak.judge import findings_of
from memtools._leak.ledger import Ledger
from memtools._leak.series import Looks, Lows, Points, key_of
from tests.monitor.program import KIB, LOOKS, MIB, holder


def test_a_sum_keeps_a_part_that_is_not_known_at_a_point() -> None:
    points = Points()
    points.add(1, {"heap": 10, "python": 5})
    points.add(2, {"heap": 12})
    points.add(3, {"rss": 7, "python": 6})  # the heap cannot be read: the resident bytes
    assert points.series("use") == [(1, 15), (2, 17), (3, 13)]
    assert points.series("shm") == []


def test_points_are_bounded_and_keep_the_newest() -> None:
    points = Points()
    for step in range(2000):
        points.add(step, {"heap": 3 * step})
    assert len(points.steps) <= 256
    assert points.steps[0] == 0
    assert points.steps[-100:] == list(range(1900, 2000))
    assert points.slope("heap") == pytest.approx(3)
    assert slope_of([]) == slope_of([(1, 5)]) == 0


def paced(grow: Callable[[int], int], steps: Sequence[int], noise: int = 0, seed: int = 0) -> float:
    """What a series that grows so is said to grow by after the last of these steps."""
    points, size, chance = Points(), 100 * MIB, random.Random(seed)
    for step in range(1, steps[-1] + 1):
        size += grow(step)
        if step in steps:
            points.add(step, {"heap": size + (chance.randrange(noise) if noise else 0)})
    return points.pace("use", max(16, steps[-1] // 4)).rate


CHECKED = [*LOOKS[:4], *range(56, 400, 8)]


@pytest.mark.parametrize("steps", [LOOKS, CHECKED])
def test_a_pace_is_that_of_now(steps: list[int]) -> None:
    def until(step: int) -> list[int]:
        return [at for at in steps if at <= step]

    def warms_up(step: int) -> int:
        return 32 * KIB + (100 * KIB if step < 50 else 0)

    def jumps(step: int) -> int:
        return 32 * KIB + (50 * MIB if step == 150 else 0)

    assert paced(warms_up, until(128)) == pytest.approx(32 * KIB, rel=0.05)
    assert paced(jumps, until(384)) == pytest.approx(32 * KIB, rel=0.05)
    assert paced(lambda step: 32 * KIB, steps) == pytest.approx(32 * KIB)


def test_a_pace_follows_what_becomes_faster_or_begins_late() -> None:
    assert paced(
        lambda step: 64 * KIB if step >= 200 else 32 * KIB, CHECKED[: CHECKED.index(256) + 1]
    ) == pytest.approx(64 * KIB, rel=0.05)
    assert paced(
        lambda step: 32 * KIB if step >= 200 else 0, CHECKED[: CHECKED.index(256) + 1]
    ) == pytest.approx(32 * KIB, rel=0.05)


def test_a_pace_is_not_misled_by_noise_and_lumps() -> None:
    """By chance two lines fit some of so many series better than one, but hardly ever."""
    for steps in (LOOKS, CHECKED):
        wrong = 0
        for seed in range(200):
            rate = paced(lambda step: 32 * KIB, steps, 256 * KIB, seed)
            wrong += abs(rate / (32 * KIB) - 1) > 0.2
        assert wrong <= 2
        for every in (5, 20, 25, 40):
            lumps = paced(lambda step, n=every: 0 if step % n else n * 32 * KIB, steps)  # type: ignore[misc]
            assert lumps == pytest.approx(32 * KIB, rel=0.2), every


def seen_by(points: Points, step: int, **grades: str) -> Looks:
    return Looks(step, [n for n in LOOKS if n <= step], points, grades)


def table(**series: Callable[[int], int]) -> Points:
    points = Points()
    for step in LOOKS[:5]:
        points.add(step, {name: size(step) for name, size in series.items()})
    return points


def test_a_slope_that_holders_explain_is_preferred() -> None:
    """A warm-up that fades has no bend; growth in lumps has noise enough to hide one."""
    points = Points()
    for step in LOOKS[:7]:
        points.add(step, {"heap": 640 * KIB * (step // 20) + int(4e6 * (1 - 0.95**step))})
    seen = seen_by(points, 128, use="growing")
    assert seen.pace("use") > 1.2 * 32 * KIB
    (named, *_) = findings_of(seen.evidence([holder(32 * KIB)]))
    assert named.rate_bytes == pytest.approx(32 * KIB, rel=0.2)


@pytest.mark.parametrize("every", [1, 10])
def test_a_holder_gains_as_it_does_now_though_a_census_knows_the_average(every: int) -> None:
    """Episodes become longer, and each step keeps one. Half of what comes is of C code."""
    points, total, longer = Points(), 0, KIB // 8
    for step in range(1, 401):
        total += longer * step * every if step % every == 0 else 0
        if step in CHECKED:
            points.add(step, {"heap": 100 * MIB + 2 * total})
            kept = holder(0, since_step=1, steps=step - 1, new_bytes=total, new_objects=step)
            points.note(step, {key_of(kept): total})
    step = points.steps[-1]
    seen = Looks(step, points.steps, points, {})
    assert kept.rate_bytes == pytest.approx(longer * step / 2, rel=0.1)
    (now,) = seen.now([kept])
    assert now.rate_bytes == pytest.approx(longer * step, rel=0.1)
    assert seen.pace("use") == pytest.approx(2 * longer * step, rel=0.05)
    other = holder(KIB, since_step=1, steps=step - 1, path="list a.log")
    assert seen.now([other]) == [other], "of which no walk has shown the gain"
    assert Looks(step + 1, points.steps, points, {}).now([kept]) == [kept], "not at this look"


def test_what_is_even_beside_a_holder_may_be_that_of_the_c_heap() -> None:
    def size(step: int) -> int:
        return 64 * KIB * step + 2 * KIB * (step % 7)

    points = table(heap=size)
    seen = seen_by(points, 64)
    assert seen.is_even(held=40 * KIB)
    assert not seen.is_even(held=64 * KIB), "nothing is left but noise"


LATER = [192, 256, 384, 512, 768, 1024]


def shared(size: Callable[[float], float], noise: int, seed: int) -> Iterator[Looks]:
    """The looks of a program with several threads, whose work is noise, each as it is taken."""
    points, rng = Points(), random.Random(seed)
    points.is_noisy = points.is_shared = True
    for step in [*LOOKS[:7], *LATER]:
        low = min(sum(rng.random() for _ in range(3)) for _ in range(8))
        points.add(step, {"heap": int(100 * MIB + size(step) + noise * low)})
        yield Looks(step, list(points.steps), points, {})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [MIB // 16, MIB // 2])
def test_the_c_heap_grows_along_a_line_beside_the_work_of_other_threads(
    noise: int, seed: int
) -> None:
    def is_line(size: Callable[[float], float]) -> bool:
        return any(looks.of_c(0) for looks in shared(size, noise, seed) if looks.step in LATER)

    assert is_line(lambda step: 40e3 * step)
    assert not is_line(lambda step: 0)
    assert not is_line(lambda step: 12e6 * math.log(step)), "as caches fill"
    assert not is_line(lambda step: 12e6 * (1 - 0.99**step))
    assert not is_line(lambda step: 12e6 * min(1.0, step / 150))


def test_noise_does_not_end_growth_along_a_line_but_a_slower_one_does() -> None:
    for seed in range(8):
        *_, last = shared(lambda step: 40e3 * step, 2 * MIB, seed)
        assert last.of_c(0, goes_on=True)
        *_, last = shared(lambda step: 40e3 * min(step, 400), MIB // 16, seed)
        assert not last.of_c(0, goes_on=True)
    for looks in itertools.islice(shared(lambda step: 40e3 * step, 0, 0), 4):
        assert looks.of_c(0, goes_on=True)
        assert not looks.of_c(0), "these are too few"


def test_what_has_slowed_down_is_not_the_c_heap_though_it_is_even_now() -> None:
    """As the kernels of a library for each new shape: many at first, then a few now and then."""
    points, looks = Points(), list(range(80, 209, 16))
    for at, step in enumerate(looks):
        points.add(step, {"heap": 400 * KIB * min(at, 4) + 330 * KIB * max(0, at - 4)})
    assert not Looks(208, looks, points, {}).is_even("heap")
    later = [step for step in looks if step >= 144]
    assert Looks(208, later, points, {}).is_even("heap"), "without the steps before it is even"


def test_children_are_told_by_name() -> None:
    points = table(children=lambda n: 64 * KIB * n, count=lambda n: 2)
    grows = (2, [("child process 4711 (Actor)", 63 * KIB), ("child process 4712", 1 * KIB)])
    seen = seen_by(points, 64, children="suspect")
    (found,) = findings_of(seen.evidence(children=seen.children(*grows)))
    assert (found.kind, found.process, found.signal) == (
        "children", "child process 4711 (Actor)", "children"
    )  # fmt: skip
    assert found.rate_bytes == pytest.approx(64 * KIB)
    both = (2, [("child process 1", 32 * KIB), ("child process 2", 32 * KIB)])
    (found,) = findings_of(seen.evidence(children=seen.children(*both)))
    assert (found.process, found.what) == ("", "child process 1, child process 2")


def test_processes_that_become_more_are_counted() -> None:
    points = table(children=lambda n: 9 * MIB * (n // 8), count=lambda n: 2 + n // 8)
    seen = seen_by(points, 64)
    (found,) = findings_of(seen.evidence(children=seen.children(10)))
    assert (found.kind, found.what) == ("processes", "10 processes, one more every 8 steps")


def test_what_workers_have_found_is_passed_on() -> None:
    own = LeakFinding("suspect", holder="dict Frames.seen", process="worker 2", rate_bytes=54.0)
    points = table(children=lambda n: 64 * KIB * n)
    seen = seen_by(points, 64, children="suspect")
    assert findings_of(seen.evidence(children=seen.children(found=(own,)))) == [own]


def test_shared_memory_is_said() -> None:
    points = table(shm=lambda n: 108 * KIB * n)
    (found,) = findings_of(seen_by(points, 64, shm="growing").evidence())
    assert (found.kind, found.signal) == ("shared memory", "shm")
    assert found.rate_bytes == pytest.approx(108 * KIB)


def test_who_holds_what_lies_in_shared_memory_is_named_with_it() -> None:
    points = table(shm=lambda n: 108 * KIB * n, heap=lambda n: 100 * MIB + KIB * n)
    keeps = holder(110 * KIB, only_gained=True)
    seen = seen_by(points, 64, shm="suspect", use="quiet")
    (found,) = findings_of(seen.evidence([keeps]))
    assert (found.grade, found.signal, found.part) == ("growing", "shm", "shm")
    assert found.rate_bytes == pytest.approx(108 * KIB, rel=0.01)
    assert found.what == "2 new tensors a step, in shared memory"
    ledger = Ledger()
    ledger.look(48, findings_of(seen.evidence()), {}, points)
    (before,) = ledger.findings()
    assert ledger.look(64, [found], {}, points)[1] == [replace(before, over=True)]
    unseen = findings_of(seen.evidence([keeps], walked=False))
    assert [one.kind for one in unseen] == ["shared memory"]
    assert ledger.look(96, unseen, {}, points, walked=False) == ([], [])  # its holder is known
    assert [one.holder for one in ledger.findings()] == ["list Trainer.losses"]


def sizes(rate: Callable[[int], float], noise: int = 0) -> list[tuple[int, float]]:
    """A series that is read each 8 steps, and grows by so much at each step."""
    size, chance, found = 0.0, random.Random(1), []
    for step in range(401):
        size += rate(step)
        if step % 8 == 0:
            found.append((step, size + (chance.randrange(noise) if noise else 0)))
    return found


def test_a_pace_that_rises_evenly_is_followed() -> None:
    for noise in (0, 200 * KIB):
        rising = rising_pace(sizes(lambda step: KIB * step, noise))
        assert rising is not None
        assert rising.rate == pytest.approx(400 * KIB, rel=0.05)
        assert rising.rising == pytest.approx(KIB, rel=0.1)


@pytest.mark.parametrize(
    "rate",
    [
        lambda _: 64 * KIB,
        lambda step: 64 * KIB if step < 200 else 256 * KIB,
        lambda step: 0 if step < 150 else 256 * KIB,
        lambda step: 512 * KIB - KIB * step,
        lambda step: 8 * MIB if step % 100 == 0 else 0,
    ],
    ids=["straight", "bends", "begins", "slows down", "jumps"],
)
def test_no_other_pace_is_taken_for_one_that_rises(rate: Callable[[int], float]) -> None:
    for noise in (0, 200 * KIB):
        assert rising_pace(sizes(rate, noise)) is None


def teeth(step: int) -> int:
    """A buffer that is made twice as large when it is full, beside the one before for a while."""
    full = 2 ** (step.bit_length())
    return 40 * step + (30 * full if step > 0.9 * full else 0)


@pytest.mark.parametrize(
    ("grow", "rate"),
    [
        (lambda step: 40 * step, 40),
        (teeth, 40),
        (lambda step: 40 * (step // 16 * 16), 40),
        (lambda step: 40 * min(step, 300), None),  # a warm-up
        (lambda step: 900 * (step % 90), None),  # garbage
        (lambda step: 9_000 * (step > 350), None),  # once
        (lambda step: -40 * step, None),
    ],
    ids=["line", "doubling", "stairs", "warm-up", "sawtooth", "once", "falls"],
)
def test_what_is_never_given_back_rises_whatever_comes_and_goes(
    grow: Callable[[int], int], rate: float | None
) -> None:
    noise = random.Random(5)
    points = [(step, KIB * (grow(step) + noise.randrange(9))) for step in range(120, 480)]
    kept = kept_pace(points, 0.6)
    if rate is None:
        assert kept is None
        return
    assert kept is not None
    assert kept.is_even
    assert kept.rate == pytest.approx(rate * KIB, rel=0.15)


def test_what_slows_down_is_kept_and_is_not_even() -> None:
    kept = kept_pace([(step, MIB * math.log(step)) for step in range(120, 480)], 0.6)
    assert kept is not None
    assert not kept.is_even
    assert kept_pace([(step, step) for step in range(7)], 0.6) is None  # too few


def test_lows_stay_few_and_keep_the_lowest_reading() -> None:
    lows = Lows()
    for step in range(10_000):
        lows.add(step, step - 7 * (step % 64 == 40))
    assert len(lows.points) < 256
    steps = [step for step, _ in lows.points]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert all(size in (step, step + 33) for step, size in lows.points if step % 64 == 0)
    assert steps[-1] >= 10_000 - 64


def test_readings_take_no_memory_that_looks_like_growth():
    """On a slow machine there is one at each step."""
    size, names = 10**9, [f"signal {i}" for i in range(12)]
    points, lows, recent = Points(), Lows(), [Recent() for _ in range(5)]
    taken = []
    gc.collect()
    gc.disable()
    try:
        for step in range(1000, 1064):
            lows.add(step, size + step)
            for one in recent:
                one.add(step, float(size + step))
            if step % 8 == 0:
                points.add(step, {name: size + step for name in names})
            taken.append(_core._python_bytes() or 64 * sys.getallocatedblocks())
    finally:
        gc.enable()
    assert taken[-1] - taken[16] < 64 * (len(taken) - 16), "bytes a step"
