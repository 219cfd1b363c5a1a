"""Cadences as people write them, and the clocks that they name."""

from __future__ import annotations

import pytest

from memtools._cleanup.cadence import BUILT_IN, MOST_CLOCKS, MOST_EVERY, Clocks
from tests.cleanup.policycases import quiet


def every(cadence: object, **default: int) -> dict[int, int]:
    """By clock, those that are not never."""
    found = Clocks().every(cadence, "gc_every", **default)  # type: ignore[arg-type]
    assert len(found) == MOST_CLOCKS
    return {clock: count for clock, count in enumerate(found) if count}


@pytest.mark.parametrize(
    ("cadence", "clocks"),
    [
        (None, {}),
        ({}, {}),
        (1, {0: 1}),
        (100, {0: 100}),
        ({"update": 5, "rollout": 1, "validation": 50, "epoch": 1}, {0: 5, 4: 1, 2: 50, 3: 1}),
        ({"micro_batch": 8}, {1: 8}),
        ({"a": 2, "b": 3}, {4: 2, 5: 3}),
    ],
)  # fmt: skip
def test_a_cadence_by_clock(cadence, clocks):
    assert every(cadence) == clocks


@pytest.mark.parametrize(
    ("cadence", "error", "words"),
    [
        (0, ValueError, "gc_every must be 1 to 1,000,000,000, got 0; None means never"),
        (-5, ValueError, "gc_every must be 1 to 1,000,000,000, got -5"),
        (MOST_EVERY + 1, ValueError, "got 1,000,000,001"),
        (True, TypeError, "gc_every must be an int, a dict of ints or None, got bool"),
        (1.5, TypeError, "got float"),
        ("100", TypeError, "got str"),
        ([1], TypeError, "got list"),
        ({"update": 0}, ValueError, r"gc_every\['update'\] must be 1 to"),
        ({"update": None}, TypeError, r"gc_every\['update'\] must be an int, got NoneType"),
        ({"epoch": True}, TypeError, r"gc_every\['epoch'\] must be an int, got bool"),
        ({3: 1}, TypeError, 'gc_every: a key must be a name such as "update", got 3'),
        ({"": 1}, TypeError, "a key must be a name"),
        ({"updates": 5}, ValueError, "gc_every: a key must be 'update', got 'updates'"),
        ({"epochs": 1}, ValueError, "gc_every: a key must be 'epoch', got 'epochs'"),
    ],
)
def test_a_bad_cadence_is_named(cadence, error, words):
    with pytest.raises(error, match=words):
        every(cadence)


def test_phases_get_their_clocks_as_they_come_and_keep_them():
    clocks = Clocks()
    assert clocks.phase("rollout") == clocks.phase("rollout") == len(BUILT_IN)
    assert clocks.every({"rollout": 2}, "x")[4] == 2
    assert clocks.phase("eval") == 5
    assert clocks.names == (*BUILT_IN, "rollout", "eval")


def test_there_is_an_end_to_phases():
    clocks = Clocks()
    for i in range(MOST_CLOCKS - len(BUILT_IN)):
        clocks.phase(f"p{i}")
    with pytest.raises(ValueError, match="counts 12 phases at most, 'one more' is one more; give"):
        clocks.phase("one more")
    assert clocks.phase("p3") == 7, "the others are as they were"


def test_a_cadence_with_too_many_phases_changes_nothing():
    clocks = Clocks()
    with pytest.raises(ValueError, match="gc_every: a policy counts 12 phases at most"):
        clocks.every({f"p{i}": 1 for i in range(13)}, "gc_every")
    assert clocks.names == BUILT_IN


def test_words():
    clocks = Clocks()
    cadence = {"update": 1000, "epoch": 1, "validation": 50, "micro_batch": 4, "rollout": 1}
    text = "1,000 updates, 4 micro-batches, 50 validation micro-batches, 1 epoch, 1 rollout"
    assert clocks.words(clocks.every(cadence, "x")) == text
    assert clocks.words(clocks.every({"micro_batch": 1, "rollout": 3}, "x")) == (
        "1 micro-batch, 3 rollout"
    )
    assert clocks.words(clocks.every({"validation": 1, "warm_up": 2}, "x")) == (
        "1 validation micro-batch, 2 warm_up"
    )
    assert clocks.words(clocks.every(None, "x")) == ""


@pytest.mark.slow
def test_a_phase_that_never_comes_is_told():
    policy = quiet(gc_every={"generation": 1, "update": 50})
    assert policy.report().notes == ()
    policy.step()
    assert [note.split(" has")[0] for note in policy.report().notes] == ["no phase 'generation'"]
    assert "no phase 'generation' has ended yet" in str(policy.report())
    with policy.phase("generation"):
        pass
    assert policy.report().notes == ()
