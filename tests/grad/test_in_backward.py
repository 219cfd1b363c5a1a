"""memtools.grad.in_backward: stepped in backward, the same parameters bit for bit."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memtools.grad.in_backward import InBackward, refuse_settings

Make = Callable[..., torch.optim.Optimizer]
MAKERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"foreach": False}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "Adafactor": (torch.optim.Adafactor, {}),
}
NUMEL = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4


def model_of() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    )  # fmt: skip


def optimizer_of(name: str, model: nn.Sequential) -> torch.optim.Optimizer:
    """With two groups."""
    make, options = MAKERS[name]
    groups = [
        {"params": list(model[:2].parameters()), "lr": 0.02},
        {"params": list(model[2:].parameters()), "lr": 0.05},
    ]
    return make(groups, **options)


def inside_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> InBackward:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return InBackward(parameters, optimizer, names)


def backwards(model: nn.Module, micro: int, last: Callable[[], object] = lambda: None) -> None:
    data = torch.Generator().manual_seed(4)
    for i in range(micro):
        if i == micro - 1:
            last()
        model(torch.randn(16, 6, generator=data)).square().sum().backward()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


# --- the same steps -------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_same_parameters_as_the_usual_step(name: str, micro: int) -> None:
    usual, ours = model_of(), model_of()
    before, after = optimizer_of(name, usual), optimizer_of(name, ours)
    inside = inside_of(ours, after)
    for _ in range(3):
        backwards(usual, micro)
        for p in usual.parameters():
            assert p.grad is not None
            p.grad.mul_(0.25)
        before.step()
        before.zero_grad()
        backwards(ours, micro, lambda: inside.arm(0.25))
        assert inside.stepped == 6
        assert all(p.grad is None for p in ours.parameters())
        inside.finish()
    assert equal(usual, ours)
    states = [optimizer.state_dict() for optimizer in (before, after)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert repr(sorted(states[0]["state"].items())) == repr(sorted(states[1]["state"].items()))


def test_clip_by_value_is_by_element() -> None:
    usual, ours = model_of(), model_of()
    before, after = optimizer_of("SGD", usual), optimizer_of("SGD", ours)
    inside = inside_of(ours, after)
    backwards(usual, 1)
    nn.utils.clip_grad_value_(usual.parameters(), 0.5)
    before.step()
    backwards(ours, 1, lambda: inside.arm(1.0, limit=0.5))
    inside.finish()
    assert equal(usual, ours)


def test_schedulers_hooks_and_loaded_state_are_those_of_the_optimizer() -> None:
    usual, ours = model_of(), model_of()
    pair = [(usual, optimizer_of("AdamW", usual)), (ours, optimizer_of("AdamW", ours))]
    inside = inside_of(*pair[1])
    calls: list[object] = []
    pair[1][1].register_step_post_hook(lambda *_: calls.append(1))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for _, optimizer in pair]
    for turn in range(4):
        backwards(usual, 1)
        pair[0][1].step()
        backwards(ours, 1, inside.arm)
        inside.finish()
        for scheduler, (model, optimizer) in zip(schedulers, pair, strict=True):
            scheduler.step()  # which warns if it did not see a step
            model.zero_grad()
            if turn == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert equal(usual, ours)
    assert calls == [1] * 4


def test_parameters_that_the_last_backward_does_not_reach_are_stepped_by_finish() -> None:
    used, unused, idle = (nn.Parameter(torch.ones(2)) for _ in range(3))
    inside = InBackward([used, unused, idle], torch.optim.SGD([used, unused, idle], lr=1.0))
    (used * 2 + unused * 3).sum().backward()
    inside.arm(0.5)
    (used * 2).sum().backward()
    assert (used.tolist(), unused.tolist(), inside.stepped) == ([-1.0, -1.0], [1.0, 1.0], 1)
    inside.finish()
    assert (unused.tolist(), idle.tolist()) == ([-0.5, -0.5], [1.0, 1.0])


def test_until_it_is_armed_gradients_accumulate() -> None:
    model = model_of()
    inside = inside_of(model, optimizer_of("SGD", model))
    backwards(model, 2)
    assert equal(model, model_of())
    assert all(p.grad is not None for p in model.parameters())
    assert (inside.armed, inside.stepped) == (False, 0)


def test_frozen_parameters_are_left_out() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    inside = inside_of(model, torch.optim.SGD(model[2:].parameters(), lr=0.1))
    backwards(model, 1, inside.arm)
    assert inside.stepped == 4
    inside.finish()


# --- bytes ----------------------------------------------------------------------------------------


def test_saved_bytes_are_those_never_there_together() -> None:
    model = model_of()
    inside = inside_of(model, optimizer_of("SGD", model))
    largest = 4 * 8 * 8
    backwards(model, 1, inside.arm)
    saved = inside.finish()
    assert 4 * NUMEL - largest - 4 * 8 <= saved <= 4 * NUMEL - largest
    backwards(model, 2, inside.arm)  # the first of which has made them all
    assert inside.finish() == 0


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp16"}, "precision='fp16' skips an update"),
        ({"max_norm": 1.0}, "max_norm needs the norm of all gradients"),
        ({"clip": print}, "clip= gets all gradients"),
        ({"main_grads": True}, "main_grads=True keeps them all"),
    ],
)
def test_what_needs_all_gradients_is_refused(settings: dict[str, Any], words: str) -> None:
    plain: dict[str, Any] = {"precision": "bf16", "max_norm": None, "clip": None}
    refuse_settings(**plain)
    with pytest.raises(ValueError, match=f"as soon as it has its gradient, and {words}"):
        refuse_settings(**{**plain, **settings})


def test_bad_optimizers_are_refused() -> None:
    model = model_of()
    with pytest.raises(TypeError, match="LBFGS steps all parameters together"):
        inside_of(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"the optimizer does not have 2\.weight"):
        inside_of(model, torch.optim.SGD(model[:2].parameters(), lr=0.1))
    backwards(model, 1)  # and no hook is left
    assert equal(model, model_of())


def test_calls_out_of_order_are_refused() -> None:
    model = model_of()
    inside = inside_of(model, optimizer_of("SGD", model))
    with pytest.raises(RuntimeError, match=r"finish\(\) comes after arm\(\)"):
        inside.finish()
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="limit is a positive number"):
            inside.arm(1.0, limit)
    assert not inside.armed
    inside.arm()
    with pytest.raises(RuntimeError, match="armed already"):
        inside.arm()
    inside.disarm()
    backwards(model, 1)
    assert equal(model, model_of())


def test_a_second_gradient_after_the_step_is_told() -> None:
    weight = nn.Parameter(torch.ones(2))
    inside = InBackward([weight], torch.optim.SGD([weight], lr=1.0), ["layer.weight"])
    inside.arm()
    weight.sum().backward()
    with pytest.raises(RuntimeError, match=r"layer\.weight got a second gradient"):
        weight.sum().backward()
    assert inside.stepped == 1


# --- life -----------------------------------------------------------------------------------------


def test_hooks_keep_nothing_alive_and_go_with_close() -> None:
    model = model_of()
    inside = inside_of(model, optimizer_of("SGD", model))
    inside.arm()
    inside.close()
    inside.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    backwards(model, 1)
    assert equal(model, model_of())
    again = inside_of(model, optimizer_of("SGD", model))
    weight, gone = weakref.ref(next(model.parameters())), weakref.ref(again)
    del inside, again
    assert gone() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backwards(model, 1)  # whose hooks find nobody
    del model
    gc.collect()
    assert weight() is None
