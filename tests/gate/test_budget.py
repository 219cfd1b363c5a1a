"""A gate history in a budget: it reserves before it grows, trims when refused, and gives back."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from memtools import Budget, BudgetError, GateHistory, _core
from tests.budget.budgets import KIB, MIB, ROW, gates, reserved
from tests.kit.fakecuda import FakeRuntime, as_cuda


def test_a_history_reserves_as_it_grows_and_releases_everything():
    budget = Budget("1 MiB")
    history = GateHistory(max_bytes=budget)
    assert (history.max_bytes, budget.used) == (MIB, 0)
    history.append(gates(1))
    assert budget.used == 64 * KIB  # a step
    for _ in range(100):
        history.append(gates(1))
        assert history.arena_bytes <= budget.used == reserved(budget)["GateHistory"]
    assert budget.used == 128 * KIB
    history.clear()
    assert (budget.used, budget.peak, history.arena_bytes) == (0, 128 * KIB, 0)
    history.append(gates(65))
    assert budget.used == 65 * KIB
    history.close()
    assert (budget.used, len(budget.report())) == (0, 0)
    history = GateHistory(max_bytes=budget)
    history.append(gates(1))
    del history
    assert (budget.used, len(budget.report())) == (0, 0)


def test_clear_gives_the_memory_itself_back(rss: Callable[[], int]):
    budget = Budget("64 MiB")
    history = GateHistory(max_bytes=budget)
    for _ in range(48):
        history.append(gates(1024))
    full = rss()
    history.clear()
    assert full - rss() > 40 * MIB
    assert history.stats().entries == 48


def test_a_refusing_budget_trims_the_history_to_what_it_holds():
    budget = Budget("1 MiB")
    other = GateHistory(max_bytes=budget)
    other.append(gates(768))
    history = GateHistory(max_bytes=budget, trim="oldest")
    tensors = [gates(60) for _ in range(20)]
    for tensor in tensors:
        history.append(tensor)
        assert budget.used <= budget.limit
    assert budget.used == MIB
    assert (len(history), history.nbytes) == (4, 240 * KIB)  # of the 256 KiB that are left
    assert all(torch.equal(a, b) for a, b in zip(history, tensors[-4:], strict=True))
    assert history.stats().entries == 20
    other.clear()
    for tensor in tensors:
        history.append(tensor)
    assert len(history) == 17  # now all of the MiB is its own


def test_a_record_that_fits_nowhere_is_refused_whole_and_the_holders_are_named():
    budget = Budget("1 MiB", name="training")
    holders = [GateHistory(max_bytes=budget) for _ in range(3)]
    for holder in holders:
        holder.append(gates(256))
    rollouts = budget.suballocate("rollouts")
    kept = GateHistory(max_bytes=rollouts)
    kept.append(gates(128))
    history = GateHistory(max_bytes=budget)
    with pytest.raises(BudgetError) as caught:
        history.append(gates(200))
    assert str(caught.value) == (
        "GateHistory.append(): asked 200.0 KiB, used 896.0 KiB of 1.0 MiB (GateHistory x3 768.0 KiB"
        ", rollouts 128.0 KiB); clear() or close() what holds it, raise the budget's limit, or "
        'record less (dtype="float16", keep="topk")'
    )
    assert isinstance(caught.value, MemoryError)
    assert (len(history), history.appended, history.nbytes) == (0, 0, 0)
    assert reserved(budget) == {"GateHistory": 768 * KIB, "rollouts": 128 * KIB}
    holders.pop().close()
    history.append(gates(200))
    assert len(history) == 1


def test_of_many_holders_the_sentence_names_six():
    budget = Budget("1 MiB")
    parts = [GateHistory(max_bytes=budget.suballocate(f"part {i}")) for i in range(9)]
    for i, part in enumerate(parts):
        part.append(gates(64 + i))
    with pytest.raises(
        BudgetError, match=r"part 5 69.0 KiB, others x3 213.0 KiB\); clear"
    ) as caught:
        parts[0].append(gates(900))
    assert "part 6" not in str(caught.value)


def test_more_than_the_limit_of_the_budget_is_the_records_own_fault():
    history = GateHistory(max_bytes=Budget("1 MiB"))
    with pytest.raises(BudgetError, match="one record takes 2097152 bytes, max_bytes is 1048576"):
        history.append(gates(2048))


def test_a_history_needs_a_limit_and_memory_of_the_host():
    with pytest.raises(ValueError, match=r'without a limit.*suballocate\("gates", "64 MiB"\)'):
        GateHistory(max_bytes=Budget(None))
    with pytest.raises(
        ValueError, match="GateHistory lies on cpu, this budget counts memory of cu"
    ):
        GateHistory(max_bytes=Budget("1 MiB", device="cuda"))
    assert GateHistory(max_bytes=Budget("1 MiB", device="cpu")).max_bytes == MIB
    with pytest.raises(TypeError, match="a Budget is needed, got str"):
        _core.GateHistory(1, 1, budget="1 MiB")  # type: ignore[arg-type]


def test_slices_and_copies_count_and_what_was_pickled_does_not():
    budget = Budget("1 MiB")
    history = GateHistory(max_bytes=budget)
    for _ in range(4):
        history.append(gates(100))
    used = budget.used
    part = history[-2:]
    assert reserved(budget) == {"GateHistory": used, "GateHistory slice": 200 * KIB}
    with pytest.raises(BudgetError, match=r"GateHistory\[slice\]: asked 400.0 KiB"):
        _ = history[:], history[:]
    del part
    gc.collect()
    twin = copy.deepcopy(history)
    assert budget.used == used + 400 * KIB
    assert twin.stats() == history.stats()
    with pytest.raises(BudgetError, match="copying a GateHistory: asked 400.0 KiB"):
        copy.copy(history)
    twin.close()
    clone = pickle.loads(pickle.dumps(history))
    assert (budget.used, clone.max_bytes, len(clone)) == (used, MIB, 4)
    with pytest.raises(ValueError, match="closed"):
        copy.copy(twin)


def test_a_copied_model_counts_in_the_same_budget():
    model = torch.nn.Module()
    model.budget = Budget("1 MiB")  # type: ignore[assignment]
    model.history = GateHistory(max_bytes=model.budget)  # type: ignore[assignment, arg-type]
    model.history.append(gates(100))  # type: ignore[operator]
    twin = copy.deepcopy(model)
    assert twin.budget is model.budget
    assert model.budget.used == 200 * KIB  # type: ignore[union-attr]


@pytest.mark.parametrize("action", ["clear", "close", "trim"])
def test_copies_on_their_way_from_a_device_may_outlive_their_records(
    fake_cuda: FakeRuntime, action: str
):
    budget = Budget("200 KiB")
    history = GateHistory(max_bytes=budget)
    for _ in range(5):
        history.append(as_cuda(gates(60)))
    assert history.pending == 5
    if action == "close":
        history.close()
        assert budget.used == 0
        return
    if action == "clear":
        history.clear()
        assert budget.used == 0
    assert history.stats().tokens == 5 * 60 * KIB // ROW
    assert fake_cuda.host_syncs() > 0


def test_clearing_while_another_thread_waits_for_the_device(fake_cuda: FakeRuntime):
    """A record that was admitted keeps its room until it has its place; the sanitised build checks
    that at every step."""
    budget = Budget("1 MiB")
    history = GateHistory(max_bytes=budget)
    tensor, done, interval = as_cuda(gates(1)), threading.Event(), sys.getswitchinterval()

    def clear() -> None:
        while not done.is_set():
            history.clear()

    thread = threading.Thread(target=clear)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(3000):
            history.append(tensor)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert history.device_waits > 0
    assert history.stats().entries == 3000
    assert history.nbytes <= budget.used


@pytest.mark.parametrize(
    ("limits", "entries", "says"),
    [
        ({}, 996, "996 of 1000 entries"),
        ({"max_bytes": "64 MiB"}, 3000, "(3000 entries"),
        ({"max_entries": 2000}, 1999, "1999 of 2000 entries"),
        ({"max_bytes": 4096 * 1000}, 1000, "(1000 entries"),
        ({"max_bytes": Budget("64 MiB")}, 3000, "(3000 entries"),
    ],
)
def test_what_is_not_given_does_not_limit(limits, entries, says):
    """Without any limit of its own a history has both; by bytes alone, it is bytes alone."""
    history = GateHistory(**limits, trim="oldest" if entries == 1000 else "half")
    for _ in range(3000):
        history.append(torch.zeros(128, 8))
    assert len(history) == entries
    assert says in repr(history)
