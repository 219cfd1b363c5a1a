"""The exchange with tensordict."""

from __future__ import annotations

import sys

import pytest
import torch
from tensordict import TensorDict

from memtools import TrajectoryStore
from tests.trajectory.stores import SAMPLES, T, contents, filled, latents, log_probs


def test_a_tensordict_has_everything_over_the_same_memory():
    store = filled()
    given = store.as_tensordict()
    assert given.batch_size == (T, SAMPLES)
    assert torch.equal(given["latents"], store["latents"][:-1])
    assert torch.equal(given["next", "latents"], store["latents"][1:])
    assert given["advantages"].tolist() == [[0, 1, 2, 3]] * T
    assert given["log_probs"].data_ptr() == store["log_probs"].data_ptr()


def test_a_tensordict_of_a_rollout_is_taken_back():
    given = filled().as_tensordict()
    store = TrajectoryStore(T, states=("latents",))
    store.extend(given.exclude("advantages"))
    store.put(advantages=given["advantages"][0])
    assert contents(store) == contents(filled())


def test_a_tensordict_is_one_time_step():
    store = TrajectoryStore(T, states=("latents",))
    store.append(latents=latents(0))
    for t in range(T):
        step = TensorDict({"latents": latents(t + 1), "log_probs": log_probs(t)}, [SAMPLES])
        store.append(step)
    store.put(TensorDict({"advantages": torch.arange(float(SAMPLES))}, [SAMPLES]))
    assert contents(store) == contents(filled())


def test_a_next_state_of_a_single_time_step_is_a_field_of_its_own():
    store = TrajectoryStore(1, states=("x",))
    store.append(TensorDict({"x": torch.zeros(2), "next": {"x": torch.ones(2)}}, [2]))
    assert contents(store) == {"x": [[0, 0]], "next.x": [[1, 1]]}


def test_nested_fields_are_named_by_their_path():
    store = TrajectoryStore(2)
    store.extend(TensorDict({"next": {"reward": torch.ones(2, 3)}}, [2, 3]))
    assert store.names == ("next.reward",)
    assert store.as_tensordict()["next", "reward"].shape == (2, 3)


def test_what_a_store_cannot_keep_is_refused():
    store = TrajectoryStore(2)
    with pytest.raises(ValueError, match=r"batch_size \[steps, samples\], got \[2\]"):
        store.extend(TensorDict({"x": torch.ones(2, 3)}, [2]))
    with pytest.raises(ValueError, match=r"batch_size \[samples\], got \[\]"):
        store.append(TensorDict({"x": torch.ones(2, 3)}, []))
    with pytest.raises(TypeError, match="takes tensors, got .* for 'words'"):
        store.append(TensorDict({"words": "a b"}, [3]))
    with pytest.raises(ValueError, match="as_tensordict.* of an empty store"):
        store.as_tensordict()
    store.append(x=torch.ones(3))
    with pytest.raises(ValueError, match="as_tensordict.* needs a whole rollout: x has 1 of 2"):
        store.as_tensordict()


def test_without_tensordict_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match="as_tensordict.* needs tensordict: pip install"):
        filled().as_tensordict()
