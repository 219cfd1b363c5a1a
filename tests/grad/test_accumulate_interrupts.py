"""Ctrl-C at any place of a micro-batch or a window's end: reset() makes the accumulator go on."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import memtools._grad.accumulator
import memtools._grad.gradients
import memtools._grad.optimizer
import memtools._grad.precision
import memtools._grad.window
from memtools import GradAccumulator
from tests.grad.accumulatecases import batches, loss_sum, net, summed_in_fp32
from tests.kit.interrupts import interrupted

MODULES = (
    memtools._grad.accumulator,
    memtools._grad.window,
    memtools._grad.precision,
    memtools._grad.gradients,
    memtools._grad.optimizer,
)
SETTINGS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "max_norm": {"max_norm": 0.1},
    "fp32 sums": {},
}


def made(settings):
    torch.manual_seed(0)
    model = summed_in_fp32(net().bfloat16()) if settings == "fp32 sums" else net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, GradAccumulator(model, optimizer, steps=2, **SETTINGS[settings])


def window(model, acc):
    for x in DATA:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x.to(model[0].weight.dtype)).float(), weight=len(x))


DATA = batches((3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_an_interrupt_anywhere_leaves_an_accumulator_that_goes_on(module, settings):
    model, acc = made(settings)
    begin = copy.deepcopy(model.state_dict())
    window(model, acc)
    wanted, n = copy.deepcopy(model.state_dict()), 0
    where = SimpleNamespace(__file__=module.__file__)
    while interrupted(where, n, lambda: (model.load_state_dict(begin), window(model, acc))):
        acc.reset()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 1
        assert torch.autocast_decrement_nesting() == 0
        assert all(p.grad is None for p in model.parameters())
        model.load_state_dict(begin)
        window(model, acc)
        now = model.state_dict()
        assert all(torch.equal(now[name], wanted[name]) for name in wanted), (module, n)
        n += 1
    assert n > 0


def test_reset_in_a_micro_batch_drops_it():
    model, acc = made("bf16")
    before = copy.deepcopy(model.state_dict())
    with acc.micro_batch():
        acc.backward(loss_sum(model, DATA[0]), weight=3)
        acc.reset()
        assert not torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError, match="outside of a micro-batch"):
            acc.backward(loss_sum(model, DATA[0]), weight=3)
    assert acc._runner.window.empty
    assert acc.report().dropped == 1
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    window(model, acc)
    assert acc.report().updates == 1


def test_autocast_of_the_programs_own_stays_on():
    model, acc = made("bf16")
    with torch.autocast("cpu", torch.bfloat16):
        block = acc.micro_batch()
        block.__enter__()
        acc.reset()
        assert torch.is_autocast_enabled("cpu")
        window(model, acc)
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_a_micro_batch_that_was_left_open_says_what_to_do():
    model, acc = made("fp32")
    acc.micro_batch().__enter__()
    with pytest.raises(RuntimeError, match=r"end it first; reset\(\) drops one"):
        window(model, acc)
    acc.reset()
    window(model, acc)
