"""Epochs over a store: which chunks come, in which order, what they hold, and when they end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools
from memtools import Budget, BudgetError, TrajectoryStore, _core
from memtools._trajectory.plan import balanced
from tests.trajectory.stores import SAMPLES, T, filled, log_probs, walked

WAYS = [
    {"time_steps": 2},
    {"time_steps": 4},
    {"samples": 1},
    {"samples": 3},
    {"time_steps": 4, "samples": 3},
    {"max_tokens": 9, "lengths": [5, 3, 4, 6]},
    {"max_tokens": 9, "lengths": [5, 3, 4, 6], "time_steps": 5},
    {},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_value_comes_once_in_each_epoch(way, shuffle):
    store = filled()
    epochs = store.epochs(2, **way, shuffle=shuffle, seed=3)
    for number, epoch in enumerate(epochs):
        seen = torch.zeros(T, SAMPLES)
        assert (epoch.index, len(epoch)) == (number, epochs.chunks_per_epoch)
        for chunk in epoch:
            for i, sample in enumerate(chunk.samples):
                seen[chunk.steps.start : chunk.steps.stop, sample] += 1
                assert chunk["advantages"][i] == sample
                for j, t in enumerate(chunk.steps):
                    assert chunk["log_probs"][j, i] == log_probs(t)[sample]
                    assert chunk["latents"][j, i, 0] == 100 * t + sample
                    assert chunk["latents"][j + 1, i, 0] == 100 * (t + 1) + sample
            lengths = way.get("lengths", [1] * SAMPLES)
            units = sum(lengths[sample] for sample in chunk.samples)
            assert chunk.weight == len(chunk.steps) * units
            assert units <= way.get("max_tokens", units)
            assert chunk.nbytes == sum(t.nbytes for t in chunk.values())
        assert torch.equal(seen, torch.ones(T, SAMPLES))
        assert len(epoch) == 0
    assert (number, list(epochs)) == (1, [])


def test_a_seed_gives_one_order_and_each_epoch_its_own():
    def order(seed: int, epochs: int = 2) -> list[object]:
        options = {"samples": 1, "time_steps": 1, "shuffle": True, "seed": seed}
        return [entry[:4] for entry in walked(filled().epochs(epochs, **options))]

    assert order(0) == order(0)
    assert order(0) != order(1)
    first, second = order(0)[:24], order(0)[24:]
    assert [entry[2:] for entry in first] != [entry[2:] for entry in second]
    assert order(0, 1) == first  # it does not depend on how many epochs there are
    assert [e[3] for e in order(0)][:4] != [(0,), (1,), (2,), (3,)]
    steps = [entry[2].start for entry in walked(filled().epochs(1, time_steps=1, shuffle=True))]
    assert steps != sorted(steps) == list(range(T))


@pytest.mark.parametrize("way", WAYS)
def test_epochs_go_on_where_they_were(way):
    options = {**way, "shuffle": True, "seed": 5}
    whole = walked(filled().epochs(3, **options))
    for done in range(len(whole) + 1):
        epochs = filled().epochs(3, **options)
        before = walked(epochs, done) if done else []
        state = json.loads(json.dumps(epochs.state_dict()))
        after = filled().epochs(3, **options)
        after.load_state_dict(state)
        assert before + walked(after) == whole


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_epochs_that_are_over_may_begin_again(way, device):
    budget = Budget(None)
    store = filled(limit=budget)
    epochs = store.epochs(2, **way, shuffle=True, device=device)
    begin = epochs.state_dict()

    def shapes() -> list[object]:
        return [
            (chunk.samples, chunk["latents"].shape, chunk["latents"].device)
            for epoch in epochs
            for chunk in epoch
        ]

    first = shapes()
    assert budget.used == store.nbytes
    epochs.load_state_dict(begin)
    assert shapes() == first
    assert budget.used == store.nbytes


def test_a_state_may_be_loaded_in_the_middle_of_an_epoch():
    options = {"samples": 2, "shuffle": True}
    epochs = filled().epochs(2, **options)
    begin = epochs.state_dict()
    epoch = next(epochs)
    chunk = next(epoch)
    epochs.load_state_dict(begin)
    assert list(epoch) == []
    with pytest.raises(RuntimeError, match="is over"):
        chunk["latents"]
    assert walked(epochs) == walked(filled().epochs(2, **options))


def fail_at_the_fourth(monkeypatch):
    """Let torch have no memory for the fourth tensor; returns the list of the calls so far."""
    real, calls = torch.empty, []

    def fails_at_the_fourth(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise RuntimeError("can't allocate memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", fails_at_the_fourth)
    return calls


def test_buffers_that_cannot_be_had_again_are_released(monkeypatch):
    budget = Budget(None)
    store = filled(limit=budget)
    epochs = store.epochs(1, samples=2, shuffle=True)
    begin = epochs.state_dict()
    walked(epochs)
    calls = fail_at_the_fourth(monkeypatch)
    for _ in range(2):
        calls.clear()
        with pytest.raises(RuntimeError, match="can't allocate"):
            epochs.load_state_dict(begin)
        assert budget.used == store.nbytes


def test_epochs_that_do_not_fit_again_stay_over():
    budget = Budget(1000)
    store = filled(limit=budget)
    epochs = store.epochs(1, samples=2, shuffle=True)
    begin = epochs.state_dict()
    walked(epochs)
    over = epochs.state_dict()
    history = memtools.GateHistory(max_bytes=budget)
    history.append(torch.rand(16, 8))
    with pytest.raises(BudgetError, match="epochs"):
        epochs.load_state_dict(begin)
    assert epochs.state_dict() == over
    history.close()
    epochs.load_state_dict(begin)
    assert len(walked(epochs)) == 2


def test_a_state_of_other_epochs_is_refused():
    epochs = filled().epochs(2, time_steps=2, seed=1)
    state = epochs.state_dict()
    for other, match in [
        (filled().epochs(3, time_steps=2, seed=1), "num_epochs=2 instead of 3"),
        (filled().epochs(2, time_steps=3, seed=1), "time_steps=2 instead of 3"),
        (filled().epochs(2, time_steps=2), "seed=1 instead of 0"),
    ]:
        with pytest.raises(ValueError, match=match):
            other.load_state_dict(state)
    for wrong, error in [
        (3, TypeError),
        ({}, ValueError),
        ({**state, "format": 2}, ValueError),
        ({**state, "done": 4}, ValueError),
        ({**state, "epoch": -1}, ValueError),
        ({**state, "done": "x"}, TypeError),
    ]:
        with pytest.raises(error):
            epochs.load_state_dict(wrong)
    assert epochs.state_dict() == state


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reports", "threshold", "ran", "kl", "early"),
    [
        ([[0.01, 0.02], [0.01, 0.04], [0.0, 0.0]], 0.02, 2, (0.015, 0.025), True),
        ([[0.0, 0.0], [0.5, 0.5]], 0.02, 2, (0.0, 0.5), False),  # the last epoch
        ([[0.03, 0.01], [0.02, 0.02]], 0.02, 2, (0.02, 0.02), False),
        ([[9.0, 9.0], [9.0, 9.0]], None, 2, (9.0, 9.0), False),
        ([[math.nan, 0.0], [0.0, 0.0]], 0.02, 1, (math.nan,), True),
        ([[math.nan, 0.0], [0.0, 0.0]], None, 2, (math.nan, 0.0), False),
    ],
)
def test_a_mean_above_the_threshold_ends_the_epochs(reports, threshold, ran, kl, early):
    epochs = filled().epochs(len(reports), time_steps=3, kl_threshold=threshold)
    found = 0
    for epoch, values in zip(epochs, reports, strict=False):
        found += 1
        for chunk, value in zip(epoch, values, strict=True):
            epochs.report_kl(torch.tensor(value), chunk.weight)
    list(epochs)
    assert (found, epochs.ended_early) == (ran, early)
    assert epochs.kl == pytest.approx(kl, nan_ok=True)


def test_a_threshold_that_nobody_reports_to_is_an_error():
    epochs = filled().epochs(2, time_steps=3, kl_threshold=0.1)
    with pytest.raises(RuntimeError, match="no KL divergence was reported in epoch 0"):
        walked(epochs)
    with pytest.raises(RuntimeError, match="outside of an epoch"):
        filled().epochs(1).report_kl(0.1)


def test_the_weights_count_and_a_resumed_epoch_has_its_sum():
    epochs = filled().epochs(2, time_steps=4, kl_threshold=0.1)
    for chunk in next(epochs):
        epochs.report_kl(0.3 if chunk.index == 0 else 0.0, chunk.weight)
        state = epochs.state_dict()
        break
    again = filled().epochs(2, time_steps=4, kl_threshold=0.1)
    again.load_state_dict(state)
    for chunk in next(again):
        assert chunk.index == 1
        again.report_kl(0.0, chunk.weight)
    assert list(again) == []
    assert again.kl == pytest.approx((0.2,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_is_exact_in_few_bits_too(dtype):
    store = TrajectoryStore(300)
    store.extend(x=torch.zeros(300, 1))
    epochs = store.epochs(1, time_steps=1)
    for _ in next(epochs):
        epochs.report_kl(torch.tensor(0.5, dtype=dtype), 1000)
    assert list(epochs) == []
    assert epochs.kl == (0.5,)


@pytest.mark.parametrize(
    ("report", "error", "match"),
    [
        (("0.1",), TypeError, "a number or a tensor as kl, got str"),
        ((None,), TypeError, "as kl, got NoneType"),
        ((torch.ones(2),), ValueError, r"one number as kl, got a tensor \[2\]"),
        ((0.1, None), TypeError, "as weight, got NoneType"),
        ((0.1, torch.ones(2)), ValueError, r"one number as weight, got a tensor \[2\]"),
    ],
)
def test_a_report_that_is_not_a_number_is_refused(report, error, match):
    epochs = filled().epochs(1)
    next(epochs)
    before = epochs.state_dict()
    with pytest.raises(error, match=match):
        epochs.report_kl(*report)
    assert epochs.state_dict() == before


def test_stop_and_break():
    epochs = filled().epochs(3, time_steps=2)
    found = []
    for epoch in epochs:
        for chunk in epoch:
            found.append((chunk.epoch, chunk.index))
            if epoch.index == 0:
                break  # leaves out the rest of this epoch
            if chunk.index == 1:
                epochs.stop()
    assert found == [(0, 0), (1, 0), (1, 1)]
    assert epochs.ended_early


# --- memory ---------------------------------------------------------------------------------------


def test_neighbours_are_views_and_others_share_one_buffer():
    store = filled()
    for way in ({"time_steps": 2}, {"samples": 2}, {}, {"time_steps": 2, "shuffle": True}):
        for chunk in next(store.epochs(1, **way)):
            mine = store["latents"].untyped_storage().data_ptr()
            assert chunk["latents"].untyped_storage().data_ptr() == mine
    addresses = set()
    for chunk in next(store.epochs(1, samples=2, shuffle=True)):
        addresses.add(chunk["latents"].untyped_storage().data_ptr())
    assert len(addresses) == 1
    assert store["latents"].untyped_storage().data_ptr() not in addresses


def test_the_buffer_is_one_chunk_and_counts_in_the_limit():
    budget = Budget("1 MiB")
    store = filled(limit=budget)
    epochs = store.epochs(2, samples=2, time_steps=2, shuffle=True)
    assert budget.used - store.nbytes == max(chunk.nbytes for chunk in next(epochs))
    list(epochs)
    assert budget.used == store.nbytes
    small = filled(limit=store.nbytes + 10)
    with pytest.raises(BudgetError, match=r"TrajectoryStore.epochs\(\): asked .* time_steps alone"):
        small.epochs(1, samples=2, shuffle=True)
    assert walked(small.epochs(1, time_steps=2)) == walked(store.epochs(1, time_steps=2))


@pytest.fixture
def blocks() -> Iterator[_core.Blocks]:
    made = _core.Blocks()
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("way", "chunks_at_once"),
    [
        ({"samples": 2, "shuffle": True}, 1),
        ({"samples": 1, "time_steps": 5, "shuffle": True}, 1),
        ({"time_steps": 5}, 0),  # views take no memory
        ({"samples": 2}, 0),
    ],
)
def test_one_chunk_is_in_memory_at_any_moment(blocks, way, chunks_at_once):
    store = TrajectoryStore(20)
    store.extend(x=torch.ones(20, 8, 1000))
    kept, largest = [], 0
    blocks.start(())
    for epoch in store.epochs(3, **way):
        for chunk in epoch:
            kept += [chunk, chunk["x"], chunk["x"][0]]  # a loop may keep what it likes
            largest = max(largest, chunk.nbytes)
    indexes = 8 * 8 * chunks_at_once
    assert blocks.peak <= chunks_at_once * largest + indexes
    assert blocks.peak >= chunks_at_once * largest


@pytest.mark.parametrize("way", WAYS)
def test_on_another_device_there_is_one_chunk(way):
    """The meta device stands for another one: it has shapes, and no values."""
    budget = Budget("1 MiB", device="cpu")
    store = filled(limit=budget)
    epochs = store.epochs(2, **way, shuffle=True, device="meta")
    buffers = {name: buffer.nbytes for name, buffer in epochs._buffers.items()}
    largest = dict.fromkeys(buffers, 0)
    for epoch in epochs:
        for chunk in epoch:
            for name, tensor in chunk.items():
                assert tensor.device.type == "meta"
                largest[name] = max(largest[name], tensor.nbytes)
            assert chunk["latents"].shape == (len(chunk.steps) + 1, len(chunk.samples), 3)
            assert budget.used == store.nbytes
    assert largest == buffers or "max_tokens" in way  # groups of few long samples are smaller
    assert sum(largest.values()) <= sum(buffers.values())


def test_a_buffer_that_cannot_be_had_is_released(monkeypatch):
    budget = Budget(None)
    store = filled(limit=budget)
    fail_at_the_fourth(monkeypatch)
    with pytest.raises(RuntimeError, match="can't allocate"):
        store.epochs(1, samples=2, shuffle=True)
    assert budget.used == store.nbytes


def test_a_chunk_is_over_when_the_next_one_comes():
    epoch = next(filled().epochs(1, samples=2, shuffle=True))
    first = next(epoch)
    kept = first["latents"]
    loss = (kept * torch.ones(3, requires_grad=True)).square().sum()
    second = next(epoch)
    with pytest.raises(RuntimeError, match="chunk 0 of epoch 0 is over"):
        first["latents"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert repr(second) == "TrajectoryChunk(1 of epoch 0: steps 0 to 5, 2 samples)"
    assert set(second) == {"latents", "log_probs", "advantages"}


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.reset(),
        lambda store: store.close(),
        lambda store: (store.reset(), filled(store)),
        lambda store: store.put(more=torch.ones(SAMPLES)),
    ],
)
def test_a_store_that_changes_meanwhile_ends_the_epochs(change):
    store = filled()
    epoch = next(store.epochs(2, time_steps=2))
    next(epoch)
    change(store)
    with pytest.raises(RuntimeError, match="the store was changed in epoch 0 of 2"):
        next(epoch)


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1"),
        ({"time_steps": 0}, ValueError, "time_steps must be at least 1"),
        ({"samples": 1.5}, TypeError, "samples must be an int"),
        ({"samples": 2, "max_tokens": 4, "lengths": [1] * 4}, ValueError, "by number or by tokens"),
        ({"max_tokens": 4}, ValueError, "needs the lengths"),
        ({"lengths": [1] * 4}, ValueError, "needs the lengths"),
        ({"max_tokens": 4, "lengths": [1] * 3}, ValueError, "has 3 numbers for 4 samples"),
        (
            {"max_tokens": 4, "lengths": [1, 1, 9, 1]},
            ValueError,
            "sample 2 has 9 tokens, more than",
        ),
        (
            {"max_tokens": 4, "lengths": [1, 1, -1, 1]},
            ValueError,
            r"lengths\[2\] must be at least 0",
        ),
        ({"max_tokens": 4, "lengths": 7}, TypeError, "lengths are whole numbers"),
        (
            {"max_tokens": 4, "lengths": [0.5] * 4},
            TypeError,
            r"lengths\[0\] must be an int, got float",
        ),
        ({"max_tokens": 4, "lengths": "latents"}, ValueError, "lengths names a field"),
        ({"shuffle": 1}, TypeError, "shuffle must be True or False"),
        ({"seed": "x"}, TypeError, "seed must be an int"),
        ({"kl_threshold": -1.0}, ValueError, "kl_threshold must be above 0"),
    ],
)
def test_other_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        filled().epochs(**{"num_epochs": 1, **arguments})


def test_lengths_may_be_a_field_that_was_put_or_whole_numbers_of_any_type():
    store = filled()
    store.put(nodes=torch.tensor([5, 3, 4, 6]))
    given = {"max_tokens": 9, "lengths": [5, 3, 4, 6]}
    expected = walked(filled().epochs(1, **given))
    for lengths in ("nodes", torch.tensor([5, 3, 4, 6]), np.array([5, 3, 4, 6]), [5.0, 3, 4, 6]):
        assert walked(store.epochs(1, max_tokens=9, lengths=lengths)) == expected


def test_epochs_that_were_made_under_inference_mode_train():
    store = filled()
    with torch.inference_mode():
        epochs = store.epochs(1, samples=2, shuffle=True)
    weight = torch.ones(3, requires_grad=True)
    for chunk in next(epochs):
        (chunk["latents"] * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(50, 120), st.randoms())
def test_groups_are_within_the_tokens_and_balanced(lengths, most, order):
    plain = balanced(tuple(lengths), most, None)
    for groups in (plain, balanced(tuple(lengths), most, order)):
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        sums = [sum(lengths[i] for i in group) for group in groups]
        assert max(sums) <= most
        assert len(groups) == len(plain)
        assert max(sums) - min(sums) <= max(lengths)
