"""A schedule that costs too much says so, once; what the policy itself takes is in its report."""

from __future__ import annotations

import time
import warnings
from types import SimpleNamespace

import pytest
import torch

from memtools import CleanupPolicy
from memtools._cleanup import actions, engine
from tests.cleanup.policycases import gc_as_found, no_gc, quiet  # noqa: F401 - fixtures

COST = SimpleNamespace(ns=0)


@pytest.fixture(autouse=True)
def _told_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What work costs is what the test says, however often it has to wait for the processor."""

    def perf_counter_ns() -> int:
        COST.ns += 100  # so much a look at the clock takes
        return COST.ns

    told = SimpleNamespace(perf_counter_ns=perf_counter_ns, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(engine, "time", told)
    monkeypatch.setattr(actions, "time", told)


def busy(ms: float) -> None:
    COST.ns += round(ms * 1e6)
    end = time.perf_counter_ns() + ms * 1e6
    while time.perf_counter_ns() < end:
        pass


def dear(**changes: object) -> CleanupPolicy:
    policy = quiet(**changes)
    policy.add("tidy", lambda: busy(0.5), 1)
    policy.add("cheap", lambda: None, 1)
    return policy


def steps(policy: CleanupPolicy, count: int, ms: float = 0) -> None:
    for _ in range(count):
        busy(ms)
        policy.step()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said after 20 ms instead of 5 s."""
    monkeypatch.setattr(engine, "WARN_SECONDS", 0.02)


@pytest.mark.usefixtures("soon")
def test_a_schedule_that_costs_too_much_says_so_once():
    policy = dear()
    with pytest.warns(RuntimeWarning, match="cleanups have taken") as said:
        steps(policy, 150)
    assert len(said) == 1
    text = str(said[0].message)
    assert "% of the time so far, most of it for tidy: print(policy.report()) says" in text
    assert text.endswith("use a longer cadence or strict=False")
    assert said[0].filename == __file__
    assert policy.report()["tidy"].verdict.startswith("costs ")


@pytest.mark.usefixtures("soon")
def test_what_costs_little_is_not_worth_a_word():
    policy = quiet()
    policy.add("cheap", lambda: busy(0.01), 10)  # 0.5 % of the time
    steps(policy, 150, 0.2)
    assert policy.report()["cheap"].count == 15


@pytest.mark.usefixtures("soon")
def test_costs_of_an_earlier_run_are_not_held_against_this_one(no_gc: None):  # noqa: F811
    policy = dear()
    with policy:
        steps(policy, 50)
    before = policy.report()["tidy"].total_ms / 1000
    for added in list(policy._engine.callbacks.items()):
        policy._engine._remove(*added)
    with policy, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps(policy, 200, 0.2)
        policy.cleanup("gc_young")
        assert before > 0.01 * policy.report().seconds, "enough to be warned of, were it counted"
    assert said == []


@pytest.mark.slow
def test_without_strict_what_frees_nothing_costs_what_was_allowed(monkeypatch: pytest.MonkeyPatch):
    """20 ms at every update of 1 ms would be nearly all of the time. Before each but the first, all
    that came before is within the part that was allowed."""
    monkeypatch.setattr(engine, "MAX_COST", 0.05)
    policy = quiet(strict=False)
    took: list[float] = []

    def tidy() -> None:
        COST.ns += 20_000_000
        took.append(0.02)

    policy.add("tidy", tidy, 1)
    while len(took) < 3:
        steps(policy, 1, 1.0)
    assert sum(took[:-1]) <= 0.05 * policy.report().seconds
    assert policy.report()["tidy"].skipped > 0


def test_the_policys_own_time_is_told_apart():
    policy = dear()
    steps(policy, 20)
    found = policy.report()
    looks_ms = policy._core.look_ns / 1e6  # told by the core, by a clock of its own
    assert 0 < found.own_ms - looks_ms < found.total_ms / 2
    assert found["tidy"].total_ms >= 10
    assert found.share == pytest.approx((found.total_ms + found.own_ms) / 1e3 / found.seconds)


@pytest.mark.slow
def test_quiet_young_collects_do_not_keep_full_ones_from_being_looked_into(no_gc: None):  # noqa: F811
    """What dies old is found by full collects only."""
    policy = quiet(gc_every=20)
    with policy:
        policy.step(2)
        for _ in range(4):
            old = [SimpleNamespace(tensor=torch.ones(4)) for _ in range(600)]
            for holder in old:
                holder.me = holder
            policy.step(10), policy.step(9)  # past the young generations
            del old, holder
            policy.step()
        found = policy.report().cycles
    assert policy.report()["gc"].count == 4
    assert policy.report()["gc_young"].count >= 4
    assert found.tensors >= 600
    assert found.inspected >= 2
