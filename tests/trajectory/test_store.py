"""TrajectoryStore: what goes in comes out, without its graph, in the dtype and memory asked for."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memtools
from memtools import Budget, BudgetError, TrajectoryStore
from tests.trajectory.stores import SAMPLES, T, contents, filled, latents, log_probs

MIB = 1 << 20


def test_what_was_appended_is_there_by_name():
    store = filled()
    assert store.names == ("latents", "log_probs", "advantages")
    assert store["latents"].shape == (T + 1, SAMPLES, 3)
    assert torch.equal(store["latents"], torch.stack([latents(t) for t in range(T + 1)]))
    assert torch.equal(store["log_probs"], torch.stack([log_probs(t) for t in range(T)]))
    assert store["advantages"].tolist() == [0, 1, 2, 3]
    assert (len(store), store.is_complete, "latents" in store, "x" in store) == (
        T,
        True,
        True,
        False,
    )
    assert store.nbytes == 4 * ((T + 1) * SAMPLES * 3 + T * SAMPLES + SAMPLES)
    assert store.stats().entries == 2 * T + 2
    assert repr(store).startswith("TrajectoryStore(6 of 6 steps, latents, log_probs, advantages, ")


def test_an_entry_is_a_copy_of_the_values_at_that_time():
    store = TrajectoryStore(2)
    x = torch.zeros(3, 2)
    store.append(x=x)
    x += 1
    store.append(x=x.t().contiguous().t())
    assert store["x"].tolist() == [[[0, 0]] * 3, [[1, 1]] * 3]


def test_a_rollout_begins_anew_in_the_same_memory():
    store = filled()
    address = store["latents"].data_ptr()
    store.reset()
    assert (len(store), store.is_complete, len(store["latents"])) == (0, False, 0)
    with pytest.raises(KeyError, match="'advantages' was not put"):
        store["advantages"]
    filled(store)
    assert store["latents"].data_ptr() == address
    assert contents(store) == contents(filled())


def test_values_that_fp16_cannot_hold_are_refused_and_counted():
    store = TrajectoryStore(2, dtype="fp16")
    store.append(x=torch.tensor([[1.0, float("inf")]]))  # it was infinite before
    with pytest.raises(ValueError, match=r"2 values that fp16 cannot hold .* in x; keep"):
        store.append(x=torch.tensor([[1e6, -1e6]]))
    assert (store.stats().overflows, store["x"].shape) == (2, (1, 1, 2))
    store.append(x=torch.tensor([[65504.0, float("nan")]]))
    assert store["x"][1, 0, 0] == 65504.0


def test_only_fields_with_values_that_do_not_fit_are_named():
    store = TrajectoryStore(1, dtype={"x": "fp16", "y": "bf16", "z": "fp16"})
    with pytest.raises(ValueError, match=r"got 1 values .* in x; keep these fields"):
        store.append(x=torch.tensor([1e6]), y=torch.tensor([1e6]), z=torch.ones(1))


def test_what_was_put_stays_when_other_values_are_refused():
    store = TrajectoryStore(1, dtype="fp16")
    store.put(a=torch.zeros(2), b=torch.ones(2))
    with pytest.raises(ValueError, match="1 values that fp16 cannot hold .* in b"):
        store.put(a=torch.ones(2), b=torch.tensor([1e6, 0.0]))
    assert contents(store) == {"a": [0, 0], "b": [1, 1]}
    store.put(a=store["b"], b=store["a"])
    assert contents(store) == {"a": [1, 1], "b": [0, 0]}


def chained(store: TrajectoryStore, weight: torch.Tensor) -> None:
    """A rollout that keeps its graph: each state is computed from the one before."""
    x = torch.ones(SAMPLES, 1000)
    store.append(latents=x)
    for _ in range(T):
        x = torch.sin(x * weight)
        store.append(latents=x)


def test_graphs_are_left_behind_counted_and_said_once(caplog):
    store = TrajectoryStore(T, states=("latents",))
    weight = torch.ones(1000, requires_grad=True)
    for _ in range(2):
        chained(store, weight)
        assert not store["latents"].requires_grad
        store.reset()
    told = [record.message for record in caplog.records if record.name == "memtools"]
    assert len(told) == 1
    assert told[0].startswith("6 of 7 entries of latents carried a graph, which holds ")
    # each step saved its product for sin, and its state for the weight's gradient
    saved = 2 * T * SAMPLES * 1000 * 4
    stats = store.stats()
    assert (stats.with_graph, stats.graph_bytes) == (2 * T, saved)


def test_a_graph_that_would_have_to_be_computed_again_is_not_measured(caplog):
    calls: list[int] = []
    weight = torch.ones(8, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.sin(x * weight)

    store = TrajectoryStore(1)
    store.append(x=checkpoint(layer, torch.ones(4, 8), use_reentrant=False))
    (told,) = [record.message for record in caplog.records]
    assert told.startswith("1 of 1 entries of x carried a graph; the store keeps")
    assert store.stats().graph_bytes is None


def test_a_rollout_without_graphs_says_nothing(caplog):
    with torch.no_grad():
        filled()
    assert caplog.records == []
    assert filled().stats().graph_bytes is None


def test_a_graph_of_an_earlier_rollout_is_not_said_of_this_one(caplog):
    store = TrajectoryStore(2)
    store.append(x=torch.ones(4, requires_grad=True) * 2)
    store.reset()
    store.append(x=torch.ones(4))
    store.append(x=torch.ones(4))
    assert caplog.records == []
    assert store.stats().with_graph == 1


def test_what_was_put_does_not_hide_the_graphs_of_the_rollout(caplog):
    weight = torch.ones(4, requires_grad=True)
    store = TrajectoryStore(2)
    store.put(condition=weight * 2)
    store.put(condition=weight * 2)
    for _ in range(2):
        assert caplog.records == []
        store.append(x=weight * 3)
    (told,) = [record.message for record in caplog.records]
    assert told.startswith("1 of 1 entries of condition and 2 of 2 entries of x carried a graph")


def test_it_reads_what_is_no_plain_tensor():
    store = TrajectoryStore(4)
    store.append(x=torch.nn.Parameter(torch.ones(2, 2)))
    store.append(x=torch.ones(2, 2)[:, :1].expand(2, 2))
    with torch.inference_mode():
        store.append(x=torch.ones(2, 2) * 2)
    store.append(x=torch.conj(torch.ones(2, 2, dtype=torch.complex64)).imag * -1)
    assert store["x"][:, 0, 0].tolist() == [1, 1, 2, 0]


def test_a_store_that_was_filled_under_inference_mode_trains():
    with torch.inference_mode():
        store = filled()
    weight = torch.ones(3, requires_grad=True)
    (store["latents"] * weight).sum().backward()
    assert weight.grad is not None


# --- limits ---------------------------------------------------------------------------------------


def test_a_limit_is_kept_and_a_field_too_many_changes_nothing():
    store = TrajectoryStore(4, limit=4 * 2 * 4 + 8)
    store.append(x=torch.ones(2))
    with pytest.raises(
        BudgetError,
        match=r"TrajectoryStore.append\(\), y: asked 64 B, used 32 B of 40 B .* overflow=folder",
    ):
        store.append(x=torch.ones(2), y=torch.ones(2, 2))
    assert (store.names, store.nbytes, len(store)) == (("x",), 32, 1)
    store.append(x=torch.ones(2))
    assert len(store) == 2


def test_a_budget_has_what_the_store_holds():
    budget = Budget("1 MiB", name="training")
    history = memtools.GateHistory(max_bytes=budget)
    history.append(torch.rand(100, 8))
    store = filled(limit=budget)
    assert [line.reserved for line in budget.report() if line.name == "TrajectoryStore"] == [
        store.nbytes
    ]
    store.reset()
    assert budget.used > store.nbytes
    history.close()
    assert budget.used == store.nbytes
    store.close()
    assert budget.used == 0


def test_a_budget_of_another_device_is_refused():
    with pytest.raises(ValueError, match="TrajectoryStore lies on cpu"):
        TrajectoryStore(4, limit=Budget("1 MiB", device="cuda"))


def test_memory_that_cannot_be_had_is_released(monkeypatch):
    budget = Budget(None)
    store = TrajectoryStore(4, limit=budget)
    store.append(x=torch.ones(2))
    real, calls = torch.empty, []

    def fails_at_the_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", fails_at_the_second)
    with pytest.raises(RuntimeError, match="can't allocate"):
        store.append(x=torch.ones(2), y=torch.ones(2), z=torch.ones(2))
    assert (budget.used, store.names, len(store)) == (store.nbytes, ("x",), 1)


def test_a_closed_store_says_so():
    with filled() as store:
        view = store["latents"]
    assert view[0, 1, 0] == 1  # a view outlives it
    assert repr(store) == "TrajectoryStore(closed)"
    calls = store.reset, store.flush, store.as_tensordict, lambda: store.epochs(1)
    for call in (*calls, lambda: store["latents"]):
        with pytest.raises(ValueError, match="that is closed"):
            call()
    with pytest.raises(ValueError, match=r"append\(\) of a TrajectoryStore that is closed"):
        store.append(x=torch.ones(2))
    store.close()
