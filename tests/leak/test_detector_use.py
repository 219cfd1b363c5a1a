"""LeakDetector as it is used: signals, wording, declared growth, forecasts, bad input."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest

from memtools import LeakDetector
from memtools.types import LeakVerdict, StepsLeft
from tests.traces import record

T = np.arange(8000)
NOISE = np.random.default_rng(5).normal(0, 2**16, 8000)


def ramp(rate: float, start: float = 2**30) -> np.ndarray:
    return np.round(start + rate * T + NOISE).astype(np.int64)


FLAT, LEAKS, FASTER = ramp(0), ramp(16384), ramp(65536)


def after(limit: int | str | None = None, steps: int = 8000, **series: np.ndarray) -> LeakDetector:
    detector = LeakDetector(limit)
    detector.update_many(0, **{name: y[:steps] for name, y in series.items()})
    return detector


# --- verdicts -------------------------------------------------------------------------------------


def test_a_leak_is_told_with_its_signal_rate_and_time_left():
    verdict = after("16 GiB", heap=LEAKS, rss=FASTER).verdict()
    assert verdict.kind == "leak"
    assert verdict.signal == "heap"
    assert verdict.confidence in ("good", "high")
    assert verdict.rate_bytes_per_step == pytest.approx(16384, rel=0.02)
    assert verdict.rss_bytes_per_step == pytest.approx(65536, rel=0.02)
    assert verdict.steps_left is not None
    true = (2**34 - FASTER[-1]) / 65536  # it is rss that runs into the limit
    assert verdict.steps_left.lo < true < verdict.steps_left.hi
    assert verdict.steps_left.mid == pytest.approx(true, rel=0.05)
    assert str(verdict) == (
        "leak: +16.0 KiB/step in heap since step 0, takes 64.0 KiB/step of rss, "
        f"{verdict.steps_left}"
    )
    assert not verdict.pressure


def test_growth_is_told_as_growth_and_how_to_declare_it():
    verdict = after("16 GiB", 600, heap=FASTER).verdict()
    assert (verdict.kind, verdict.confidence) == ("growing", "low")
    assert str(verdict).startswith("growing: +6")
    for part in ("straight line", "if it continues", "expect_growth("):
        assert part in str(verdict)


def test_growth_that_is_over_is_told_so():
    later = LeakVerdict("growing", -3.0, "low", signal="rss", since_step=9)
    assert str(later) == "growing: in rss since step 9, but no longer at the end"


def test_resident_growth_beside_a_quiet_heap_is_fragmentation():
    verdict = after("8 GiB", heap=FLAT, python=FLAT, rss=FASTER).verdict()
    assert verdict.kind == "fragmentation"
    assert "memory in use does not grow, limit in" in str(verdict)
    assert verdict.confidence == "none"


def test_rss_alone_decides_alone():
    assert after(rss=FASTER).verdict().kind == "leak"
    assert after(tensors=FLAT, rss=FASTER).verdict().signal == "rss"


def test_quiet_says_so():
    verdict = after("8 GiB", heap=FLAT, rss=FLAT).verdict()
    assert str(verdict) == "quiet: no signal grows"
    assert (verdict.kind, verdict.signal, verdict.steps_left) == ("quiet", None, None)
    assert str(LeakDetector().verdict()) == "too early to say: 0 of 16 steps"
    assert after(None, 13, heap=FLAT).verdict().steps_known == 12
    assert str(after(None, 13, heap=FLAT).verdict()) == "too early to say: 12 of 16 steps"


def test_verdicts_are_values():
    verdict = after("8 GiB", heap=LEAKS).verdict()
    assert pickle.loads(pickle.dumps(verdict)) == verdict == copy.deepcopy(verdict)
    with pytest.raises(AttributeError):
        verdict.kind = "quiet"  # type: ignore[misc]


def test_pressure_is_told_when_the_limit_is_near():
    near = int(LEAKS[-1]) + 16384 * 300
    assert after(near, heap=LEAKS).verdict().pressure
    assert not after(near + 2**30, heap=LEAKS).verdict().pressure


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 10, 32])
def test_pressure_counts_steps_whatever_the_readings_stand_for(every: int) -> None:
    near = 5 * 10**8 + 8192 * 63_000
    detector = LeakDetector(near)
    told = []
    for step in range(10_000, 70_001, every):  # resumed at step 10,000
        size = 5 * 10**8 + (step - 10_000) * 8192
        detector.update(step, heap=size, rss=size)
        if (step - 10_000) % (50 * every) == 0 and detector.verdict().pressure:
            told.append(step)
    # Of 63,000 steps 57,300 are done when a tenth of them is left; lo is a tenth below mid.
    assert told
    assert 66_000 <= told[0] <= 67_400 + 50 * every


@pytest.mark.parametrize(
    ("series", "least", "most"),
    [
        (LEAKS, 0, 0),
        (np.maximum(ramp(0), ramp(32768) - 32768 * 3000), 2700, 3100),
        (ramp(0) + (300 * 2**20 * (1 - np.exp(-T / 100))).astype(np.int64) + 8192 * T, 200, 900),
    ],
    ids=["from the start", "late", "after a warm-up"],
)
def test_since_is_where_the_growth_began(series: np.ndarray, least: int, most: int) -> None:
    verdict = after(heap=series).verdict()
    assert verdict.kind == "leak"
    assert verdict.since_step is not None
    assert least <= verdict.since_step <= most


# --- steps, gaps, resets --------------------------------------------------------------------------


def test_none_and_nan_are_not_known():
    one, two, three = LeakDetector(), LeakDetector(), LeakDetector()
    gaps = LEAKS.astype(float)
    gaps[::3] = math.nan
    unsigned = LEAKS.astype(np.uint64)
    unsigned[::3] = 2**64 - 1
    one.update_many(0, heap=gaps)
    two.update_many(0, heap=unsigned)
    for step, size in enumerate(gaps):
        three.update(step, heap=None if math.isnan(size) else int(size))
    assert one.verdict() == two.verdict() == three.verdict()
    assert one.verdict().kind == "leak"
    assert one.verdict().rate_bytes_per_step == pytest.approx(16384, rel=0.02)


def test_a_reset_begins_anew():
    detector = after(heap=LEAKS)
    detector.reset()
    assert detector.kind == "early"
    assert detector.forecast("1 TiB") is None
    assert detector.update_many(0, heap=FLAT) == [(32, "quiet")]


def test_signals_may_come_in_turns():
    detector = LeakDetector()
    for step in range(4000):
        detector.update(step, rss=int(FASTER[step]))
        if step % 10 == 0:
            detector.update(step=step, heap=int(LEAKS[step]))
    verdict = detector.verdict()
    assert (verdict.kind, verdict.signal) == ("leak", "heap")
    assert verdict.rate_bytes_per_step == pytest.approx(16384, rel=0.02)


# --- forecasts ------------------------------------------------------------------------------------


def test_children_run_into_the_limit_beside_the_process():
    detector = after(2**33, rss=FLAT, heap=FLAT, children=LEAKS)
    verdict = detector.verdict()
    assert verdict.signal == "children"
    assert verdict.steps_left is not None
    assert verdict.steps_left.mid == pytest.approx((2**33 - FLAT[-1] - LEAKS[-1]) / 16384, rel=0.05)


def test_shared_memory_runs_into_the_limit_beside_the_process():
    detector = after(2**33, rss=FLAT, heap=FLAT, shm=LEAKS)
    left = detector.verdict().steps_left
    assert detector.verdict().signal == "shm"
    assert left is not None
    assert left.mid == pytest.approx((2**33 - FLAT[-1] - LEAKS[-1]) / 16384, rel=0.05)
    both = after(2**33, rss=FLAT, heap=FLAT, shm=LEAKS, children=FASTER).verdict().steps_left
    assert both is not None
    room = 2**33 - FLAT[-1] - LEAKS[-1] - FASTER[-1]
    assert both.lo < room / (16384 + 65536) < both.hi


@pytest.mark.parametrize("at", [24, 32, 64, 128, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_forecast_is_there_from_the_first_word_on_and_contains_the_truth(at):
    held = 0
    for seed in range(40):
        rng = np.random.default_rng([seed, at])
        rate, noise = 2 ** rng.uniform(14, 23), rng.uniform(0, 1)
        series = 2**30 + rate * (T + noise * rng.standard_normal(len(T)))
        when = at + int(at * rng.uniform(1, 4))
        limit = int(series[:when].max())
        left = after(limit, at + 1, heap=series, rss=series + 2**28).forecast(signal="heap")
        assert left is not None
        assert left.hi <= (4 if at < 256 else 2) * max(left.lo, at / 4)
        held += left.lo <= int(np.argmax(series >= limit)) - at <= left.hi
    assert held >= 36


def test_a_forecast_is_not_there_before():
    assert after(2**33, 16, heap=FASTER).forecast(signal="heap") is None
    assert after(2**33, 17, heap=FASTER).forecast(signal="heap") is not None


def test_a_device_has_its_own_limit():
    detector = LeakDetector("1 TiB", device_limit_bytes=2**31)
    detector.update_many(0, device=LEAKS, rss=FLAT)
    left = detector.verdict().steps_left
    assert left is not None
    assert left.mid == pytest.approx((2**31 - LEAKS[-1]) / 16384, rel=0.05)
    assert detector.forecast(signal="device") == left


def test_where_rss_does_not_follow_the_heap_will_reach_the_limit():
    steady = np.full(8000, 3 * 2**30)
    detector = after(2**32, heap=LEAKS, rss=steady)
    left = detector.verdict().steps_left
    assert left is not None
    assert left.mid == pytest.approx((2**32 - 3 * 2**30) / 16384, rel=0.05)


def test_a_sleeping_rss_makes_no_forecast_later_than_the_heap_allows():
    """malloc fills holes: rss creeps while what is in use grows."""
    sleeping = ramp(300, 3 * 2**30)
    detector = after(2**36, heap=LEAKS, rss=sleeping)
    left, true = detector.verdict().steps_left, (2**36 - sleeping[-1]) / 16384
    assert left is not None
    assert left.lo < true < left.hi < 1.5 * true
    assert left.mid == pytest.approx(true, rel=0.05)
    assert detector.forecast() == left


def test_memory_in_use_that_is_not_written_yet_does_not_count_against_the_limit():
    """2 GiB that were allocated at once, and are written 64 KiB a step: 12,288 from 1 GiB to the
    limit of 1.75 GiB."""
    heap = np.full(8000, 2 * 2**30)
    left = after("1.75 GiB", heap=heap, rss=ramp(65536, 2**29)).forecast()
    assert left is not None
    assert left.lo < 12288 < left.hi, "7,999 steps have brought it to 1 GiB"


def test_what_grows_beside_each_other_reaches_the_limit_together():
    limit = 2**34
    used = int(LEAKS[-1] + LEAKS[-1])
    for series in (
        {"heap": LEAKS, "rss": LEAKS, "children": LEAKS},
        {"python": LEAKS, "heap": LEAKS, "rss": 2 * LEAKS - 2**30},
    ):
        detector = after(limit, **series)
        room = limit - used if "children" in series else limit - int(series["rss"][-1])
        left = detector.verdict().steps_left
        assert left is not None
        assert left.lo < room / 32768 < left.hi
        assert left.mid == pytest.approx(room / 32768, rel=0.05)


def test_a_device_that_grows_is_not_forecast_into_the_hosts_limit():
    detector = LeakDetector(2**35, device_limit_bytes=2**40)
    detector.update_many(0, device=64 * LEAKS, heap=FLAT, rss=FLAT)
    assert detector.verdict().signal == "device"
    left = detector.forecast()
    assert left is None or left.mid > 10**6


def test_an_interval_reads_like_one():
    assert str(StepsLeft(41234.0, 47000.0, 52345.0)) == "limit in 41,000 to 52,000 steps"
    assert str(StepsLeft(math.inf, math.inf, math.inf)) == "no limit in sight"
    assert str(StepsLeft(120.0, 400.0, math.inf)) == "limit in 120 steps at the earliest"
    assert str(StepsLeft(0.0, 0.0, 0.0)) == "limit reached"


# --- declared growth ------------------------------------------------------------------------------


def test_a_declared_buffer_is_quiet_and_a_leak_beside_it_is_not():
    buffer = np.minimum(65536 * T, 2**28)
    alone, beside = LeakDetector("16 GiB"), LeakDetector("16 GiB")
    for detector in (alone, beside):
        detector.expect_growth("replay", bytes="256 MiB", rate=65536)
    assert alone.update_many(0, heap=FLAT + buffer) == [(32, "quiet")]
    beside.update_many(0, heap=LEAKS + buffer)
    assert beside.verdict().kind == "leak"
    assert beside.verdict().rate_bytes_per_step == pytest.approx(16384, rel=0.1)


def test_growth_beyond_the_declared_bytes_is_a_leak():
    detector = LeakDetector()
    detector.expect_growth("replay", bytes=2**26, signal="heap")
    detector.update_many(0, heap=LEAKS[:4000], rss=FLAT[:4000])
    assert detector.kind == "quiet"
    detector.update_many(4000, heap=LEAKS[4000:], rss=FLAT[4000:])
    assert detector.kind == "leak"


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda d: d.update(9, hep=1), ValueError, "no signal 'hep'.*heap, python, tensors"),
        (lambda d: d.update(9, heap=-1), ValueError, "heap must be from 0 .* not -1"),
        (lambda d: d.update(9, heap=2**64), ValueError, "pass None"),
        (lambda d: d.update(9, rss=5, heap=1.5), TypeError, "heap must be an int of bytes"),
        (lambda d: d.update(5, heap=1), ValueError, "step 5 of heap comes after step 5"),
        (lambda d: d.update(2**60, heap=1), ValueError, "2\\*\\*53"),
        (lambda d: d.update("x", heap=1), TypeError, "step must be an int, got str"),
        (lambda d: d.update(heap=1), TypeError, "'step'"),
        (lambda d: d.update(6, 7, heap=1), TypeError, "takes 2 positional"),
        (lambda d: d.update(6, step=7), TypeError, "'step'"),
        (lambda d: d.update_many(9, hep=FLAT), ValueError, "no signal 'hep'"),
        (lambda d: d.update_many(9, heap=[1, 2]), TypeError, "not an array of int64"),
        (lambda d: d.update_many(9, heap=FLAT[::2]), TypeError, "in one piece"),
        (lambda d: d.update_many(9, heap=FLAT.astype(np.int32)), TypeError, "int64"),
        (
            lambda d: d.update_many(9, heap=FLAT, rss=FLAT[:5]),
            ValueError,
            "8000 .* rss has 5;",
        ),
        (lambda d: d.update_many(9, rss=FLAT, heap=-FLAT), ValueError, r"heap\[0\]"),
        (lambda d: d.update_many(9, heap=np.array([1.0, np.inf])), ValueError, r"heap\[1\]"),
        (lambda d: d.update_many(3, heap=FLAT), ValueError, "comes after"),
        (lambda d: d.forecast(), ValueError, "knows no limit"),
        (lambda d: d.forecast(0), ValueError, "at least 1"),
        (lambda d: d.forecast(5, signal="hep"), ValueError, "no signal"),
        (lambda d: d.expect_growth("x"), ValueError, "declares nothing"),
        (lambda d: d.expect_growth("x", rate=0), ValueError, "above 0"),
        (lambda d: d.expect_growth("x", rate=math.nan), ValueError, "above 0"),
        (lambda d: d.expect_growth("x", bytes=0), ValueError, "at least 1"),
        (lambda d: d.expect_growth("x", bytes=1, signal="y"), ValueError, "no signal 'y'"),
        (
            lambda d: d.expect_growth("x", bytes=1, until="z"),
            TypeError,
            "until must be an int, got str",
        ),
    ],
)
def test_bad_input_is_told_and_changes_nothing(call, error, says):
    detector = LeakDetector()
    detector.update(5, heap=100, rss=200)
    before = pickle.dumps(detector)
    with pytest.raises(error, match=says):
        call(detector)
    assert pickle.dumps(detector) == before
    detector.update(6, heap=1, rss=1)


def test_a_ninth_declared_growth_is_refused():
    detector = LeakDetector()
    for i in range(8):
        detector.expect_growth(f"buffer {i}", bytes=1)
    detector.expect_growth("buffer 7", bytes=2)
    with pytest.raises(ValueError, match="8 growths are declared"):
        detector.expect_growth("another", bytes=1)


@pytest.mark.parametrize("wrong", [{"span_steps": 0}, {"bar_bytes": 0}, {"bar_bytes": {"x": 1}}])
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="at least 1|no signal 'x'"):
        LeakDetector(**wrong)


def test_options_do_what_they_say():
    quiet = [(32, "quiet")]
    assert LeakDetector(span_steps=6000).update_many(0, heap=LEAKS)[-1][1] != "leak"
    assert LeakDetector(bar_bytes={"heap": "1 GiB"}).update_many(0, heap=LEAKS) == quiet
    assert LeakDetector(bar_bytes={"rss": "1 GiB"}).update_many(0, heap=LEAKS) != quiet


# --- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", record.LEAK_FREE)
def test_a_recorded_loop_that_does_not_leak_is_never_called_a_leak(name):
    changes = LeakDetector().update_many(0, **record.load(name))
    assert "leak" not in {kind for _, kind in changes}


@pytest.mark.parametrize("name", record.LEAKS)
def test_a_recorded_leak_is_found_in_its_signal_at_its_rate(name):
    detector = LeakDetector()
    detector.update_many(0, **record.load(name))
    verdict = detector.verdict()
    leaked, signals = record.LEAKS[name]
    assert verdict.kind == "leak"
    assert verdict.signal in signals
    if leaked:
        assert verdict.rate_bytes_per_step == pytest.approx(leaked, rel=0.1)
