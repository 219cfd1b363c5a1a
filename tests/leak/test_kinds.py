"""What is quiet, what grows and what leaks, of series whose truth is known; and when it is said."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from memtools import LeakDetector
from memtools._leak.detector import SIGNALS
from memtools._leak.finding import RANK
from memtools._leak.floor import Floor
from tests.leak import reference

KIB, MIB, BASE = 2**10, 2**20, 10**9
Array = np.ndarray
Series = Callable[[Array, np.random.Generator], Array]


def noise(rng: np.random.Generator, t: Array, size: float) -> Array:
    return size * (rng.random((3, len(t))).sum(0) - 1.5)


SERIES: dict[str, Series] = {
    "flat": lambda t, rng: noise(rng, t, MIB),
    "ramp": lambda t, rng: 16 * KIB * t + noise(rng, t, 64 * KIB),
    "clean ramp": lambda t, rng: 10_000 * t,
    "steep": lambda t, rng: 64 * KIB * t + noise(rng, t, 64 * KIB),
    "warm": lambda t, rng: 300 * MIB * (1 - np.exp(-t / 900)) + noise(rng, t, MIB),
    "saw": lambda t, rng: 100 * MIB * (t % 90) / 90 + noise(rng, t, MIB),
    "step up": lambda t, rng: (t > 3000) * 200 * MIB + noise(rng, t, MIB),
    "filled": lambda t, rng: 64 * KIB * np.minimum(t, 1500) + noise(rng, t, 64 * KIB),
    "late": lambda t, rng: 32 * KIB * np.maximum(0, t - 3000) + noise(rng, t, 256 * KIB),
    # on a device whose batches differ in length
    "batches": lambda t, rng: 6 * MIB * t + 12 * MIB * rng.random(len(t)),
    "trickle": lambda t, rng: KIB * t + noise(rng, t, 2 * KIB),
    # garbage that is collected every 200 steps
    "collected": lambda t, rng: 64 * KIB * (t % 200) + noise(rng, t, 16 * KIB),
    "one jump": lambda t, rng: (t > 40) * 64 * MIB + noise(rng, t, MIB),
    "warms up": lambda t, rng: MIB * np.minimum(t, 300) + noise(rng, t, 256 * KIB),
    "sinks, then fills": lambda t, rng: (
        400 * MIB - 100 * MIB * (t > 500) + SERIES["ramp"](np.maximum(0, t - 500), rng)
    ),
    "logarithm": lambda t, rng: 50 * MIB * np.log1p(t / 100) + noise(rng, t, 64 * KIB),
}


def made(name: str, steps: int | Sequence[int], seed: int = 3) -> Array:
    t = np.arange(steps) if isinstance(steps, int) else np.array(steps)
    return np.round(BASE + SERIES[name](t, np.random.default_rng(seed))).astype(np.int64)


def changes(name: str, steps: int, signal: str = "heap") -> list[tuple[int, str]]:
    return [(0, "early"), *LeakDetector().update_many(0, **{signal: made(name, steps)})]


def highest(changes: list[tuple[int, str]], begin: int = 0, end: int = 2**53) -> str:
    """The highest kind at any of the steps begin..end."""
    before = [kind for step, kind in changes if step <= begin][-1]
    within = [kind for step, kind in changes if begin < step <= end]
    return max([before, *within], key=RANK.__getitem__)


# --- one signal -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "below"),
    [("flat", "fills"), ("warm", "leak"), ("saw", "likely"), ("step up", "likely"),
     ("filled", "leak"), ("one jump", "fills")],
)  # fmt: skip
def test_what_does_not_leak_is_not_called_a_leak(name: str, below: str) -> None:
    found = changes(name, 8000)
    assert RANK[highest(found)] < RANK[below]
    assert found[-1][1] == "quiet"


def test_what_slows_down_for_ever_is_likely_a_leak_and_never_called_one() -> None:
    found = changes("logarithm", 8000)
    assert highest(found) == "likely"
    assert RANK[found[-1][1]] >= RANK["growing"]


@pytest.mark.parametrize(
    ("name", "signal", "kind", "least", "most"),
    [
        ("ramp", "tensors", "likely", 1535, 1535),  # the second evaluation after 1000 / .75
        ("ramp", "tensors", "leak", 2559, 2559),  # the third after 1500 / .75
        ("late", "tensors", "leak", 3500, 7999),
        ("batches", "device", "suspect", 16, 24),
        ("trickle", "heap", "suspect", 16, 64),
        ("steep", "shm", "suspect", 16, 24),
        ("ramp", "heap", "suspect", 16, 32),
        ("ramp", "heap", "growing", 64, 72),
        ("clean ramp", "rss", "growing", 255, 255),  # it is not exact
    ],
)
def test_a_kind_comes_in_time(name: str, signal: str, kind: str, least: int, most: int) -> None:
    first = next(step for step, found in changes(name, most + 1, signal) if found == kind)
    assert least <= first <= most


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [("flat", 0, "early"), ("steep", 16, "early"), ("steep", 17, "suspect"),
     ("flat", 32, "early"), ("flat", 33, "quiet")],
)  # fmt: skip
def test_growth_takes_16_steps_and_quiet_32(name: str, count: int, kind: str) -> None:
    detector = LeakDetector()
    detector.update_many(1000, heap=made(name, count))
    assert detector.kind == kind


@pytest.mark.parametrize("signal", SIGNALS)
def test_a_few_looks_are_enough_for_exact_growth(signal: str) -> None:
    def after(name: str, looks: int) -> str:
        steps = [16, 24, 32, 48, 64, 96, 128, 192][:looks]
        detector = LeakDetector()
        for step, size in zip(steps, made(name, steps), strict=True):
            detector.update(step, **{signal: size})
        return detector.kind

    exact = ["early", "early", "suspect", "growing"]  # three points prove nothing
    found = [after("clean ramp", looks) for looks in (2, 3, 5, 6)]
    assert found == (exact if signal != "rss" else ["early", "early", "quiet", "quiet"])
    assert after("flat", 8) == "quiet"


@pytest.mark.parametrize(
    ("name", "rises_until", "over_at"), [("collected", 199, 216), ("warms up", 299, 364)]
)
def test_growth_that_is_over_or_taken_back_is_quiet_soon(
    name: str, rises_until: int, over_at: int
) -> None:
    found = changes(name, 4000)
    assert highest(found, 0, rises_until) == "growing"  # nobody knows better yet
    assert highest(found, over_at) == "quiet"


def test_a_late_leak_has_its_own_rate_start_and_forecast() -> None:
    detector = LeakDetector()  # 32 KiB a step since step 3,000, under 256 KiB of noise
    detector.update_many(0, heap=made("late", 3064))
    verdict = detector.verdict()
    assert (verdict.kind, verdict.confidence) == ("suspect", "low")
    assert verdict.rate_bytes_per_step == pytest.approx(32 * KIB, rel=0.2)
    assert verdict.rate_error < 0.6 * verdict.rate_bytes_per_step
    assert verdict.since_step is not None
    assert 2984 <= verdict.since_step <= 3016
    left = detector.forecast(BASE + 64 * MIB, signal="heap")
    assert left is not None
    assert left.lo < 1984 < left.hi < 4 * left.lo  # it is full at step 5,048


def test_span_counts_steps_and_the_rate_is_per_step() -> None:
    detector = LeakDetector()
    for step in range(0, 4000, 10):  # 400 readings of 10 steps each
        detector.update(step, heap=step * 5000)
    verdict = detector.verdict()
    assert (verdict.kind, verdict.confidence, verdict.since_step) == ("leak", "high", 0)
    assert verdict.rate_bytes_per_step == pytest.approx(5000)
    assert verdict.rss_bytes_per_step is None


def test_a_reset_forgets_how_often_in_a_row_growth_lasted() -> None:
    detector = LeakDetector(span_steps=100)
    detector.update_many(0, rss=made("ramp", 4000))
    assert detector.kind == "leak"
    detector.reset()
    detector.update_many(0, rss=made("ramp", 256))  # one evaluation
    assert detector.kind == "growing"


def test_the_floor_is_the_minimum_and_maximum_of_each_block() -> None:
    series, floor, due = np.random.default_rng(5).random(9000), Floor(), 0
    for count, y in enumerate(series.tolist(), 1):
        due += floor.add(y) and floor.is_due
        if count % 501 == 0:
            lows, highs, length = reference.blocks(series[:count])
            assert (floor.length, floor.count) == (length, count - len(lows) * length)
            assert (list(floor.lows), list(floor.highs)) == (list(lows), list(highs))
    assert due == 41  # evaluations, at 6 to 12 % of the series each


@pytest.mark.slow
def test_a_detector_takes_as_much_memory_after_any_number_of_readings() -> None:
    detector, sizes = LeakDetector(), []
    for begin in (0, 20_000):
        ramp = BASE + 5000 * np.arange(begin, begin + 20_000)
        detector.update_many(begin, **dict.fromkeys(SIGNALS, ramp))
        sizes.append(len(pickle.dumps(detector)))
    assert sizes[1] <= sizes[0] + 100
    assert sizes[1] <= 6 * KIB * len(SIGNALS)


# --- several signals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "given", "kind", "signal", "confidence"),
    [
        # exact signals decide
        (4000, {"heap": "ramp", "rss": "steep"}, "leak", "heap", "high"),
        (4000, {"heap": "flat", "rss": "steep"}, "fragmentation", "rss", "none"),
        (1000, {"heap": "flat", "rss": "steep"}, "fragmentation", "rss", "none"),
        (4000, {"heap": "flat", "tensors": "ramp", "rss": "flat"}, "leak", "tensors", "high"),
        (4000, {"heap": "ramp", "tensors": "steep"}, "leak", "tensors", "high"),  # the faster one
        (4000, {"heap": "flat", "tensors": "flat", "rss": "flat"}, "quiet", None, "none"),
        # where nobody reads the heap, rss does, and tensors do not stand for the heap
        (4000, {"rss": "steep"}, "leak", "rss", "high"),
        (4000, {"tensors": "flat", "rss": "steep"}, "leak", "rss", "high"),
        (1200, {"tensors": "logarithm", "rss": "steep"}, "growing", "tensors", "low"),
        (2500, {"tensors": "warm"}, "growing", "tensors", "low"),
        (4000, {"tensors": "warm"}, "quiet", None, "none"),  # it dies away
        (4000, {"tensors": "warm", "rss": "steep"}, "leak", "rss", "high"),
    ],
)
def test_which_signal_decides(
    steps: int, given: dict[str, str], kind: str, signal: str | None, confidence: str
) -> None:
    detector = LeakDetector()
    detector.update_many(
        0, **{s: made(name, steps, seed) for seed, (s, name) in enumerate(given.items())}
    )
    verdict = detector.verdict()
    assert (verdict.kind, verdict.signal, verdict.confidence) == (kind, signal, confidence)
    rates = {"ramp": 16 * KIB, "steep": 64 * KIB}
    if signal is not None and given[signal] in rates:
        assert verdict.rate_bytes_per_step == pytest.approx(rates[given[signal]], rel=0.02)


# --- declared growth ------------------------------------------------------------------------------

ANY = 10**12  # bytes


@pytest.mark.parametrize(
    ("name", "declared", "quiet_until", "end"),
    [
        ("ramp", {"bytes": 64 * MIB}, 4000, 8000),  # 62.5 MiB, and 125 MiB
        # from its lowest level on: 54.7 MiB, and 117 MiB
        ("sinks, then fills", {"bytes": 64 * MIB}, 4000, 8000),
        ("steep", {"rate": 48 * KIB, "signal": "heap"}, 0, 4000),
        ("ramp", {"rate": 48 * KIB}, 4000, 0),  # less than declared: it does not seem to sink
        ("ramp", {"rate": 20 * KIB, "until": 2000}, 2000, 6000),
        ("ramp", {"bytes": ANY, "until": 2000}, 2000, 6000),
        ("ramp", {"bytes": ANY, "signal": "rss"}, 0, 4000),
    ],
)
def test_declared_growth_is_quiet_and_what_is_beyond_it_is_a_leak(
    name: str, declared: dict[str, object], quiet_until: int, end: int
) -> None:
    detector, series = LeakDetector(), made(name, max(quiet_until, end))
    detector.expect_growth("buffer", **declared)  # type: ignore[arg-type]
    found = detector.update_many(0, heap=series[:quiet_until])
    assert {kind for _, kind in found} <= {"quiet"}
    if end:
        detector.update_many(quiet_until, heap=series[quiet_until:])
    assert detector.kind == ("leak" if end else "quiet")
    if name == "steep":
        assert detector.verdict().rate_bytes_per_step == pytest.approx(16 * KIB, rel=0.02)


def test_eight_declared_buffers_add_up() -> None:
    detector = LeakDetector()
    for name in range(8):
        for _ in range(2):  # the same name is the same buffer
            detector.expect_growth(f"buffer {name}", bytes=8 * MIB)
    assert detector.update_many(0, heap=made("ramp", 4000)) == [(32, "quiet")]  # 62.5 MiB of 64


# --- forecasts ------------------------------------------------------------------------------------


def test_a_clean_ramp_is_foretold_to_the_step() -> None:
    detector = LeakDetector()
    detector.update_many(0, rss=made("clean ramp", 5000))
    left = detector.forecast(BASE + 10**8, signal="rss")
    assert left is not None
    assert 4990 < left.mid < 5070  # within a block of 64
    assert 4450 < left.lo < 4600
    assert 5500 < left.hi < 5650
    assert detector.forecast(BASE, signal="rss") == (0, 0, 0)


def test_what_does_not_grow_reaches_no_limit() -> None:
    detector = LeakDetector()
    detector.update_many(0, rss=np.full(1000, MIB))
    assert detector.forecast(2 * MIB, signal="rss") == (math.inf, math.inf, math.inf)
    assert detector.forecast(MIB, signal="rss") == (0, 0, 0)


@pytest.mark.parametrize(
    ("declared", "mid"),
    [
        ({"rate": 10_000}, 16_000),  # it goes on and on
        ({"bytes": 10**8, "rate": 10_000}, math.inf),  # it ends below the limit
        ({"bytes": 10**9}, 0),  # more than there is room for
        ({"rate": 10_000, "until": 9000}, math.inf),
        ({"rate": 10_000, "until": 30_000}, 16_000),  # the limit comes before the end
        ({"bytes": 10**9, "rate": 10_000}, 16_000),
    ],
)
def test_a_forecast_counts_what_was_declared(declared: dict[str, float], mid: float) -> None:
    detector = LeakDetector()  # 40 MB have come, the limit is 160 MB further
    detector.expect_growth("buffer", **declared)  # type: ignore[arg-type]
    assert detector.update_many(0, rss=made("clean ramp", 4000)) == [(32, "quiet")]
    left = detector.forecast(BASE + 2 * 10**8, signal="rss")
    assert left is not None
    assert left.mid == pytest.approx(mid, rel=0.01)
