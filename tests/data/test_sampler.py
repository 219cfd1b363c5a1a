"""BudgetSampler: what batches hold, in which order, on how many ranks, and where a stopped run goes
on."""

from __future__ import annotations

import random
import sys
from array import array

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from memtools.data import BudgetSampler

DRAW = random.Random(5)
LENGTHS = [DRAW.randrange(1, 100) for _ in range(500)]


def used(batch: list[int], padded: bool) -> int:
    lengths = [LENGTHS[i] for i in batch]
    return max(lengths) * len(lengths) if padded else sum(lengths)


def test_batches_are_cut_in_order_where_the_next_sample_does_not_fit():
    assert list(BudgetSampler([3, 4, 2, 9, 1, 0, 8], 9)) == [[0, 1, 2], [3], [4, 5, 6]]
    assert list(BudgetSampler([3, 4, 2, 9, 1, 0, 8], 9, padded=True)) == [
        [0, 1],
        [2],
        [3],
        [4, 5],
        [6],
    ]
    assert list(BudgetSampler([1, 1, 1, 1, 1], 100, max_count=2)) == [[0, 1], [2, 3], [4]]
    assert list(BudgetSampler([], 9)) == []
    assert list(BudgetSampler([0, 0], 1)) == [[0, 1]]


def test_each_epoch_has_its_own_order_and_the_same_again():
    sampler = BudgetSampler(LENGTHS, 300, shuffle=True, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(BudgetSampler(LENGTHS, 300, shuffle=True, seed=2)) != first
    assert list(BudgetSampler(LENGTHS, 300, shuffle=True, seed=2)) != second  # epoch 1 of seed 1
    assert next(iter(BudgetSampler(LENGTHS, 300, shuffle=False, seed=2)))[0] == 0


def test_padded_batches_bring_similar_lengths_together():
    def padding(sampler: BudgetSampler) -> float:
        batches = list(sampler)
        return sum(used(batch, True) for batch in batches) / sum(LENGTHS)

    assert padding(BudgetSampler(LENGTHS, 300, padded=True, shuffle=True)) < 1.1
    assert padding(BudgetSampler(LENGTHS, 300, padded=True)) > 1.3
    first = [LENGTHS[batch[0]] for batch in BudgetSampler(LENGTHS, 300, padded=True, shuffle=True)]
    assert first != sorted(first)  # and batches do not come by length


def test_the_ranks_of_torch_distributed_are_taken(monkeypatch):
    class Group:
        @staticmethod
        def is_available() -> bool:
            return True

        is_initialized = is_available

        @staticmethod
        def get_world_size() -> int:
            return 4

        @staticmethod
        def get_rank() -> int:
            return 3

    monkeypatch.setitem(sys.modules, "torch.distributed", Group)
    sampler = BudgetSampler(LENGTHS, 300)
    assert (sampler.num_replicas, sampler.rank) == (4, 3)
    assert BudgetSampler(LENGTHS, 300, num_replicas=1, rank=0).num_replicas == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_data_loader_takes_it(workers):
    sampler = BudgetSampler(LENGTHS, 300, shuffle=True)
    loader = DataLoader(
        torch.arange(500),
        batch_sampler=sampler,
        num_workers=workers,  # type: ignore[arg-type]
    )
    assert [batch.tolist() for batch in loader] == list(sampler)
    assert len(loader) == len(sampler)


def test_a_stopped_epoch_goes_on():
    sampler = BudgetSampler(LENGTHS, 300, shuffle=True)
    sampler.set_epoch(4)
    all_of_it = list(sampler)
    batches = iter(sampler)
    assert [next(batches) for _ in range(7)] == all_of_it[:7]
    for state, left in ((sampler.state_dict(), 7), (sampler.state_dict(done=5), 5)):
        other = BudgetSampler(LENGTHS, 300, shuffle=True)
        other.load_state_dict(state)
        assert other.epoch == 4
        other.set_epoch(4)  # as a loop does that begins with the epoch of the checkpoint
        assert list(other) == all_of_it[left:]
        assert list(other) == all_of_it
        other.load_state_dict(state)
        other.set_epoch(5)
        assert len(list(other)) == len(other)
    finished = BudgetSampler(LENGTHS, 300, shuffle=True)
    finished.load_state_dict(sampler.state_dict(done=len(sampler)))
    assert list(finished) == []
    assert len(list(finished)) == len(finished)


@pytest.mark.parametrize(("changed", "said"), [
    ({"budget": 200}, "budget 300, and this one has 200"),
    ({"seed": 1}, "seed 0, and this one has 1"),
    ({"lengths": LENGTHS[:-1]}, "samples 500, and this one has 499"),
    ({"lengths": LENGTHS[::-1]}, "samples of other lengths, or in another order"),
    ({"padded": True}, "padded False"),
])  # fmt: skip
def test_a_state_of_another_sampler_is_refused(changed, said):
    state = BudgetSampler(LENGTHS, 300).state_dict(done=3)
    other = BudgetSampler(**({"lengths": LENGTHS, "budget": 300} | changed))
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(state)
    assert len(list(other)) == len(other)


def test_states_that_are_none_are_refused():
    sampler = BudgetSampler(LENGTHS, 300)
    with pytest.raises(TypeError, match="the dict of a state_dict"):
        sampler.load_state_dict(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no 'epoch'"):
        sampler.load_state_dict({})
    with pytest.raises(TypeError, match="done must be an int, got str"):
        sampler.load_state_dict(sampler.state_dict(done=2) | {"done": "2", "epoch": 8})
    with pytest.raises(ValueError, match="after batch 999"):
        sampler.load_state_dict(sampler.state_dict() | {"done": 999, "epoch": 8})
    assert (sampler.epoch, sampler.state_dict()["done"]) == (0, 0)
    assert len(list(sampler)) == len(sampler)
    with pytest.raises(ValueError, match="done must be at most .*, got 999"):
        sampler.state_dict(done=999)


@pytest.mark.parametrize("lengths", [
    np.array([3, 4, 5]), torch.tensor([3, 4, 5]), array("i", [3, 4, 5]), (n for n in (3, 4, 5)),
    [np.int64(3), 4, torch.tensor(5)], range(3, 6),
])  # fmt: skip
def test_lengths_may_be_of_any_kind(lengths):
    assert list(BudgetSampler(lengths, 9)) == [[0, 1], [2]]


@pytest.mark.parametrize(("arguments", "error", "said"), [
    (([3, 12, 20], 10), ValueError, "sample 1 has a length of 12, above the budget of 10"),
    (([3, -1], 10), ValueError, r"lengths\[1\] must be at least 0, got -1"),
    (([3, 2.5], 10), TypeError, r"lengths\[1\] must be an int, got float"),
    ((np.zeros((2, 2), int), 10), TypeError, r"lengths\[0\] must be an int, got list"),
    ((5, 10), TypeError, "lengths must be an iterable of int, got int"),
    (("55", 10), TypeError, "lengths must be an iterable of int, got str"),
    (([1], 0), ValueError, "budget must be at least 1, got 0"),
    (([1], "2 MiB"), TypeError, "budget must be an int, got str"),
])  # fmt: skip
def test_bad_lengths_and_budgets_are_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        BudgetSampler(*arguments)


@pytest.mark.parametrize(("settings", "error", "said"), [
    ({"max_count": 0}, ValueError, "max_count must be at least 1"),
    ({"seed": -1}, ValueError, "seed must be at least 0"),
    ({"num_replicas": 2}, ValueError, "both num_replicas and rank"),
    ({"num_replicas": 2, "rank": 2}, ValueError, "rank 2 of 2"),
    ({"num_replicas": 0, "rank": 0}, ValueError, "num_replicas must be at least 1"),
])  # fmt: skip
def test_bad_settings_are_refused(settings, error, said):
    with pytest.raises(error, match=said):
        BudgetSampler([1, 2], 3, **settings)


def test_a_bad_epoch_is_refused():
    sampler = BudgetSampler([1, 2], 3)
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        sampler.set_epoch(-1)
    assert repr(sampler) == "BudgetSampler(2 samples, budget 3, epoch 0)"
