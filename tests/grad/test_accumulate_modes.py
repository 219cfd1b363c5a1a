"""GradAccumulator with gradients in fp32 of 16-bit parameters, and with two optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from memtools import GradAccumulator
from tests.grad.accumulatecases import (
    Recorder,
    batches,
    loss_sum,
    net,
    same,
    summed_in_fp32,
)


def run(acc, data):
    dtype = next(acc.model.parameters()).dtype
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(acc.model, x.to(dtype)), weight=len(x))


def halves():
    return summed_in_fp32(nn.Linear(8, 1).bfloat16())


# --- gradients in fp32 ---


def test_sums_of_16_bit_gradients_are_kept_in_fp32():
    """256 small gradients beside a large one: in bf16 all of them vanish."""
    model, seen = halves(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in acc.model.parameters())
    )
    acc = GradAccumulator(model, optimizer, steps=257)
    data = [torch.full((1, 8), 16.0)] + [torch.full((1, 8), 0.25)] * 256
    for x in data:
        with acc.micro_batch():
            acc.backward(model(x.bfloat16()).sum(), weight=1)
    mean = (16.0 + 256 * 0.25) / 257
    weight, bias = seen
    assert torch.allclose(weight, torch.full((1, 8), mean), rtol=1e-6)
    assert bias.item() == pytest.approx(1.0)
    assert acc.report().last.norm == pytest.approx(math.sqrt(8 * mean**2 + 1), rel=1e-6)


def test_an_optimizer_that_needs_16_bits_gets_them_rounded_once():
    model, data = halves(), batches((4, 4))
    seen = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in acc.model.parameters())
    )
    acc = GradAccumulator(model, optimizer, steps=2, max_norm=0.1)
    run(acc, data)
    assert {g.dtype for g in seen} == {torch.bfloat16}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in seen))
    assert norm == pytest.approx(0.1, rel=2e-2)


def test_sums_are_averaged_before_they_are_rounded_to_fp16():
    """The sum is beyond fp16, the mean is not."""
    model = summed_in_fp32(nn.Linear(8, 1).half())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    acc = GradAccumulator(model, optimizer, steps=2)
    before = [p.detach().clone() for p in model.parameters()]
    for weight in (1, 255):
        with acc.micro_batch():
            acc.backward((model(torch.full((1, 8), 100.0).half()) * 1200).sum(), weight=weight)
    assert acc.report().updates == 1
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.allclose(p, old - 0.1, atol=2e-2)


def test_sums_in_fp32_are_part_of_the_state():
    data = batches((4, 3, 5))

    def fresh():
        torch.manual_seed(3)
        model = halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return GradAccumulator(model, optimizer, steps=3)

    straight, stopped, resumed = fresh(), fresh(), fresh()
    run(straight, data)
    run(stopped, data[:2])
    resumed.load_state_dict(stopped.state_dict())
    run(resumed, data[2:])
    assert same(list(resumed.model.parameters()), list(straight.model.parameters()))
    assert resumed.report().last.norm == straight.report().last.norm


def test_sums_in_fp32_of_step_are_those_of_a_loop():
    data, accs = batches((4, 4, 2)), []
    for _ in range(2):
        torch.manual_seed(3)
        model = halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accs.append(GradAccumulator(model, optimizer, 3, micro_batch_size=4))
    run(accs[0], data)
    report = accs[1].step(
        torch.cat(data), lambda x: (loss_sum(accs[1].model, x.bfloat16()), len(x))
    )
    assert report.norm == accs[0].report().last.norm
    assert same(list(accs[1].model.parameters()), list(accs[0].model.parameters()))


TAKE_FP32 = ["SGD", "Adagrad", "RMSprop", "Adadelta"]
SETTINGS = [
    *((kind, {"foreach": foreach}) for kind in TAKE_FP32 for foreach in (False, True)),
    ("SGD", {"weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"fused": True}),
    ("Adagrad", {"weight_decay": 0.1, "lr_decay": 0.1, "maximize": True}),
    ("Adadelta", {"weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    ("AdamW", {"fused": True}),
    ("AdamW", {}),
    ("Adafactor", {}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
def test_an_optimizer_gets_fp32_where_it_takes_that_and_the_rest_is_rounded_once(kind, settings):
    """Its state keeps the parameters' dtype, so that a saved one resumes the same."""
    model, seen = halves(), []
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **settings)
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in acc.model.parameters())
    )
    acc, before = GradAccumulator(model, optimizer), [p.clone() for p in model.parameters()]
    run(acc, batches((4, 3)))
    narrow = settings.keys() & {"fused", "centered", "nesterov"} or kind not in TAKE_FP32
    assert {grad.dtype for grad in seen} == {torch.bfloat16 if narrow else torch.float32}
    for p, was in zip(model.parameters(), before, strict=True):
        assert (p.grad, p.grad_dtype) == (None, torch.float32)
        assert not torch.equal(p, was)
        states = {k: v for k, v in optimizer.state[p].items() if k != "step" and v is not None}
        assert {value.dtype for value in states.values()} <= {torch.bfloat16}


def test_an_optimizer_derived_from_one_that_takes_fp32_gets_them_rounded():
    model = halves()
    optimizer = Recorder(model)
    run(GradAccumulator(model, optimizer), batches((4,)))
    assert {grad.dtype for grad in optimizer.seen[0]} == {torch.bfloat16}


class Both(torch.optim.Optimizer):
    """Two optimizers as one, as docs/guides/accumulation.md describes it."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self, closure=None):
        for one in self.optimizers:
            one.step()


@pytest.mark.parametrize("how", ["loop", "step"])
def test_two_optimizers_of_one_model_as_one(how):
    def made():
        torch.manual_seed(0)
        model = net()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return model, torch.optim.Muon(matrices), torch.optim.AdamW(others, fused=True)

    data = batches((4,) * 8)
    model, *optimizers = made()
    acc = GradAccumulator(model, Both(*optimizers), steps=4, micro_batch_size=4)
    twin, *others = made()
    for window in (data[:4], data[4:]):
        if how == "step":
            acc.step(torch.cat(window), lambda x: (loss_sum(model, x), len(x)))
        else:
            run(acc, window)
        for x in window:
            (loss_sum(twin, x) / 16).backward()
        for one in others:
            one.step()
            one.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
