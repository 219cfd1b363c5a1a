"""Whether a short series grows: leaks of several kinds, and what only looks like one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from memtools.testing._trend import growth_of, growth_of_levels
from tests.traces import record, synthetic

STEPS, WARMUP = 200, 25
MIB = 1 << 20
Array = NDArray[np.float64]


def rate(sizes: Array) -> float:
    return growth_of(list(sizes[WARMUP:]))


def rising(each: float, every: int = 1, phase: int = 0, steps: int = STEPS) -> Array:
    """Some bytes a step, that come every so many steps."""
    lumps = ((np.arange(steps) + phase) % every == 0) * each * every
    grown: Array = 50.0 * MIB + np.cumsum(lumps)
    return grown


@pytest.mark.parametrize("every", [1, 3, 7, 20, 25, 50])
def test_a_leak_is_found_however_seldom_it_comes(every: int) -> None:
    for phase in range(every):
        assert rate(rising(2048, every, phase)) > 1024
        assert rate(rising(1024, every, phase)) > 512


def test_the_rate_of_a_steady_leak_is_exact() -> None:
    assert rate(rising(2048)) == pytest.approx(2048, rel=0.01)
    assert growth_of(list(rising(2048)), range(0, 2 * STEPS, 2)) == pytest.approx(1024, rel=0.01)


def test_a_leak_is_found_below_noise_lumps_and_a_warm_up() -> None:
    rng, step = np.random.default_rng(0), np.arange(STEPS)
    for _ in range(100):
        assert rate(rising(2048) + rng.normal(0, 8192, STEPS)) > 1024
    imported = rising(2048) + 5 * MIB * (step >= 37) + MIB * (step >= 130)
    assert rate(imported) == pytest.approx(2048, rel=0.1)
    assert rate(rising(2048) + 8 * MIB * (1 - np.exp(-step / 6))) > 1024


def test_what_is_taken_once_is_no_growth() -> None:
    step = np.arange(STEPS)
    assert rate(5.0 * MIB * (step >= 37)) == 0
    assert rate(5.0 * MIB * (step >= 37) + MIB * (step >= 90) + 3 * MIB * (step >= 150)) == 0
    doubling = 8.0 * 2 ** np.ceil(np.log2(step + 1))  # a table that doubles
    assert rate(1000 * doubling) == 0


@pytest.mark.parametrize("full", [30, 60, 100, 150, 170])
def test_what_is_full_by_the_end_is_no_growth(full: int) -> None:
    assert rate(np.minimum(np.arange(STEPS), full) * 4096.0) == 0


def test_what_slows_down_is_no_growth() -> None:
    step = np.arange(STEPS)
    assert rate(MIB * np.log1p(step)) == 0
    for tau in (5, 20, 60):
        assert rate(8 * MIB * (1 - np.exp(-step / tau))) == 0


def test_noise_and_what_is_given_back_is_no_growth() -> None:
    rng, step = np.random.default_rng(1), np.arange(STEPS)
    for _ in range(100):
        assert rate(rng.normal(0, 10 * MIB, STEPS)) <= 1024
        assert rate(rng.exponential(MIB, STEPS)) <= 1024
    for period in (3, 10, 40, 90):
        assert rate(100_000.0 * (step % period)) == 0


def test_too_few_readings_say_nothing() -> None:
    assert growth_of([1e6 * n for n in range(15)]) == 0
    assert growth_of([1e6 * n for n in range(16)]) == pytest.approx(1e6, rel=0.01)


def test_levels_after_collections() -> None:
    assert growth_of_levels([(0, 0), (50, 100), (100, 210), (150, 300)]) == 2
    assert growth_of_levels([(0, 0), (50, 100), (100, 90), (150, 300)]) == 0
    assert growth_of_levels([(0, 0), (50, 100), (100, 110), (150, 300)]) == 0
    assert growth_of_levels([(0, 0), (50, 100)]) == 0


def windows(sizes: Array, apart: int) -> list[Array]:
    return [sizes[at : at + STEPS] for at in range(0, len(sizes) - STEPS, apart)]


@pytest.mark.parametrize(
    ("loop", "signals", "since"),
    [
        ("plain", ("heap", "python"), 0),
        ("varlen", ("heap", "python"), 0),
        ("workers", ("heap", "python"), 0),
        ("workers", ("children",), 0),
        ("replay_buffer", ("heap", "python"), 1500),  # full by then
    ],
)
def test_recorded_loops_without_a_leak_are_flat(
    loop: str, signals: tuple[str, ...], since: int
) -> None:
    trace = record.load(loop)
    sizes = np.sum([trace[name] for name in signals], axis=0)[since:]
    cut = windows(sizes.astype(float), 40)
    assert len(cut) >= 70
    assert [rate(one) for one in cut if rate(one) > 1024] == []


@pytest.mark.parametrize("loop", ["gates_list", "graph"])
def test_recorded_loops_with_a_leak_are_not(loop: str) -> None:
    trace = record.load(loop)
    cut = windows((trace["heap"] + trace["python"]).astype(float), 200)
    assert min(map(rate, cut)) > 1024


@pytest.mark.parametrize("family", ["flat", "spikes", "steps", "hiwater"])
def test_families_of_made_up_series_are_flat(family: str) -> None:
    found = 0
    for number in range(8):
        sizes = synthetic.leak_free(family, 7, number).bytes
        found += sum(rate(one) > 1024 for one in windows(sizes, 780))
    assert found == 0
