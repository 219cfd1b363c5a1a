"""What a store refuses, in one sentence, and is then as it was."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from memtools import TrajectoryStore
from tests.trajectory.stores import SAMPLES, T, contents, filled, latents, log_probs

ONE = torch.ones(SAMPLES)


def begun() -> TrajectoryStore:
    """A store after its first time step."""
    store = TrajectoryStore(T, states=("latents",))
    store.append(latents=latents(0))
    store.append(latents=latents(1), log_probs=log_probs(0))
    return store


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """Its storage is made smaller, as FSDP and others do."""
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize(
    ("entries", "error", "match"),
    [
        ({"log_probs": ONE[:3]}, ValueError, r"log_probs has 4 samples of \[\], got 3 of \[\]"),
        ({"log_probs": ONE.view(4, 1)}, ValueError, r"samples of \[\], got 4 of \[1\] in append"),
        ({"latents": latents(2)[:, :2]}, ValueError, r"samples of \[3\], got 4 of \[2\]"),
        ({"log_probs": ONE.double()}, ValueError, "kept in torch.float32, got torch.float64"),
        ({"log_probs": ONE.long()}, ValueError, "kept in torch.float32, got torch.int64"),
        ({"log_probs": [1.0] * 4}, TypeError, "takes tensors, got list for 'log_probs'"),
        ({"log_probs": (ONE, ONE)}, TypeError, "takes tensors, got tuple for 'log_probs'"),
        ({"log_probs": ()}, TypeError, "takes tensors, got tuple for 'log_probs'"),
        (
            {"log_probs": torch.ones(())},
            ValueError,
            r"takes log_probs as \[samples, ...\], got \[\]",
        ),
        ({"log_probs": torch.ones(4, device="meta")}, TypeError, "on the meta device"),
        ({"log_probs": ONE.to_sparse()}, TypeError, r"'log_probs' that is sparse"),
        ({"log_probs": freed(torch.ones(4))}, TypeError, r"its storage was freed .*; pass a copy"),
        ({"log_probs": freed(torch.ones(9, 4)[5])}, TypeError, r"its storage was freed"),
        ({"other": torch.ones(3)}, ValueError, r"other has 3 samples in append\(\), the store 4"),
        ({"other": torch.ones(0, 2)}, ValueError, "other has no samples"),
        ({"": ONE}, ValueError, "the name of a field must have at least one printable character"),
        ({}, ValueError, "was given no field"),
        (7, TypeError, "takes tensors by name, a dict or a TensorDict, got int"),
    ],
)
def test_another_entry_is_refused_and_nothing_is_appended(entries, error, match):
    store = begun()
    before = contents(store)
    with pytest.raises(error, match=match):
        store.append(entries)
    assert contents(store) == before
    assert store.stats().entries == 3


def test_one_bad_field_keeps_the_good_ones_out():
    store = begun()
    with pytest.raises(ValueError, match="log_probs has 4 samples"):
        store.append(latents=latents(2), log_probs=ONE[:2])
    assert (len(store), len(store["latents"])) == (1, 2)
    with pytest.raises(ValueError, match="different numbers of samples: a 2, b 3"):
        TrajectoryStore(2).append(a=torch.ones(2), b=torch.ones(3))


def test_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="was given 'log_probs' twice, by name and in the dict"):
        begun().append({"log_probs": ONE}, log_probs=ONE)


def test_nothing_goes_past_the_end():
    store = filled()
    with pytest.raises(IndexError, match=r"latents has 7 of 7 entries, got 1 more in append\(\)"):
        store.append(latents=latents(7))
    with pytest.raises(IndexError, match=r"name it in states=\('log_probs',\)"):
        store.append(log_probs=ONE)
    store.reset()
    with pytest.raises(IndexError, match="got 8 more"):
        store.extend(latents=torch.ones(T + 2, SAMPLES, 3))
    filled(store)
    assert contents(store) == contents(filled())


def test_a_field_may_not_be_left_behind():
    store = begun()
    store.append(latents=latents(2))
    with pytest.raises(
        ValueError, match="would give latents time step 3 of 6 while log_probs has 1"
    ):
        store.append(latents=latents(3))
    store.append(log_probs=log_probs(1))
    store.append(latents=latents(3))
    with pytest.raises(ValueError, match="time step 4 of 6 while late has 1"):
        store.append(latents=latents(4), log_probs=log_probs(2), late=ONE)
    assert store.names == ("latents", "log_probs")


def test_fields_are_known_after_the_first_rollout():
    store = filled()
    store.reset()
    with pytest.raises(KeyError, match="'latent' is not a field .* has latents, log_probs, adv"):
        store.append(latent=latents(0))
    with pytest.raises(KeyError, match="not a field"):
        store["latent"]


def test_fields_of_samples_and_of_steps_are_not_mixed():
    store = filled()
    with pytest.raises(ValueError, match=r"advantages is a field of put\(\), got it in append"):
        store.append(advantages=ONE)
    with pytest.raises(ValueError, match=r"log_probs is a field of append\(\) or extend\(\)"):
        store.put(log_probs=ONE)


def test_epochs_need_a_whole_rollout():
    store = begun()
    with pytest.raises(
        ValueError, match="latents has 2 of 7 entries, log_probs has 1 of 6 entries"
    ):
        store.epochs(1)
    with pytest.raises(ValueError, match="empty store"):
        TrajectoryStore(2).epochs(1)
    store = filled()
    store.reset()
    for t in range(T):
        store.append(latents=latents(t), log_probs=log_probs(t))
    with pytest.raises(
        ValueError, match="latents has 6 of 7 .* advantages was not put.*before the first step"
    ):
        store.epochs(1)


@pytest.mark.parametrize("named", [{"states": ("y",)}, {"dtype": {"y": "bf16", "x": "fp32"}}])
def test_a_field_that_was_named_must_come(named):
    store = TrajectoryStore(1, **named)
    store.append(x=ONE)
    assert not store.is_complete
    for call in (lambda: store.epochs(1), store.as_tensordict):
        with pytest.raises(
            ValueError, match="whole rollout: y is named in states or dtype and did"
        ):
            call()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_steps": 0}, ValueError, "num_steps must be at least 1"),
        ({"num_steps": 2.0}, TypeError, "num_steps must be an int"),
        ({"num_steps": 2, "num_samples": 0}, ValueError, "num_samples must be at least 1"),
        ({"num_steps": 2, "states": "latents"}, TypeError, r"pass states=\('latents',\)"),
        ({"num_steps": 2, "dtype": "int8"}, ValueError, "dtype must be one of .* got 'int8'"),
        ({"num_steps": 2, "dtype": {"x": "fp8"}}, ValueError, "dtype of 'x' must be one of"),
        ({"num_steps": 2, "dtype": 3}, TypeError, 'dtype must be like "bf16"'),
        ({"num_steps": 2, "limit": 0}, ValueError, "limit must be at least 1 byte"),
        ({"num_steps": 2, "limit": "much"}, ValueError, "like \"256 MiB\", got 'much'"),
        ({"num_steps": 2, "file": "a", "overflow": "."}, ValueError, "pass one of them"),
        ({"num_steps": 2, "file": "a", "device": "meta"}, ValueError, 'pass "cpu"'),
        ({"num_steps": 2, "overflow": "/nowhere"}, NotADirectoryError, "got '/nowhere'"),
    ],
)
def test_other_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        TrajectoryStore(**arguments)


def test_it_is_neither_copied_nor_pickled():
    store = filled()
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="pass on store.'name'., or the path of its file"):
            use(store)
    with pytest.raises(TypeError, match="save their state_dict"):
        pickle.dumps(store.epochs(1))
