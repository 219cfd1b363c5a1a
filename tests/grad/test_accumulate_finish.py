"""GradAccumulator: clipping, folding into fused optimizers, skipped updates, the loss scale."""

from __future__ import annotations

import copy
import functools
import math
import re

import pytest
import torch
from torch import nn

from memtools import GradAccumulator
from memtools._grad.precision import LossScale
from tests.grad.accumulatecases import Recorder, batches, error, loss_sum, net, reference, same

FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]


def run(acc, data):
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(acc.model, x), weight=len(x))


# --- clipping ---


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_by_norm_is_that_of_the_averaged_gradient(max_norm):
    model, data = net(), batches()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=6, max_norm=max_norm)
    run(acc, data)
    right = reference(model, data)
    norm = math.sqrt(sum(float(g.square().sum()) for g in right))
    coefficient = min(1.0, max_norm / (norm + 1e-6))
    assert error(optimizer.seen[0], [g * coefficient for g in right]) < 1e-6
    report = acc.report().last
    assert report.norm == pytest.approx(norm, rel=1e-6)
    assert report.coefficient == pytest.approx(coefficient, rel=1e-6)


def test_clipping_by_value_is_of_the_averaged_gradient():
    model, data = net(), batches()
    optimizer = Recorder(model)
    clip = functools.partial(nn.utils.clip_grad_value_, clip_value=0.05)
    run(GradAccumulator(model, optimizer, steps=6, clip=clip), data)
    assert error(optimizer.seen[0], [g.clamp(-0.05, 0.05) for g in reference(model, data)]) < 1e-6
    assert max(g.abs().max().item() for g in optimizer.seen[0]) == pytest.approx(0.05)


@pytest.mark.parametrize("returns", [True, False])
def test_a_callback_clips_averaged_gradients(returns):
    model, data, seen = net(), batches(), []

    def clip(parameters):
        seen.append([p.grad.clone() for p in parameters])
        return torch.tensor(7.0) if returns else None

    acc = GradAccumulator(model, Recorder(model), steps=6, clip=clip)
    run(acc, data)
    right = reference(model, data)
    assert error(seen[0], right) < 1e-6
    norm = math.sqrt(sum(float(g.square().sum()) for g in right))
    assert acc.report().last.norm == pytest.approx(7.0 if returns else norm, rel=1e-6)


# --- folding ---


@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_a_fused_optimizer_that_averages_gives_what_averaged_gradients_do(kind):
    model, data = net(), batches((3, 4) * 3)
    twin = copy.deepcopy(model)
    acc = GradAccumulator(model, kind(model.parameters(), lr=0.01, fused=True), 2, max_norm=0.5)
    usual = kind(twin.parameters(), lr=0.01, fused=True)
    run(acc, data)
    assert acc.report().last.applied == "folded"
    assert not hasattr(acc.optimizer, "grad_scale")
    for pair in (data[i : i + 2] for i in (0, 2, 4)):
        (loss_sum(twin, torch.cat(pair)) / 7).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        usual.step()
        usual.zero_grad()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_hooks_before_the_step_see_averaged_gradients():
    model, data, seen = net(), batches((3, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in model.parameters()])
    )
    acc = GradAccumulator(model, optimizer, steps=2)
    run(acc, data)
    assert acc.report().last.applied == "multiplied"
    assert error(seen[0], reference(model, data)) < 1e-6


def test_an_optimizer_with_one_group_that_is_not_fused_does_not_fold():
    model, data = net(), batches((3, 4))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3:].parameters())}]
    optimizer = torch.optim.SGD(groups, lr=0.01, fused=True)
    optimizer.param_groups[1]["fused"] = False
    acc = GradAccumulator(model, optimizer, steps=2)
    run(acc, data)
    assert acc.report().last.applied == "multiplied"


def test_a_slow_optimizer_of_a_large_model_is_noted_in_the_report():
    """And nowhere else: these tests run with warnings as errors."""
    model, small = nn.Linear(1000, 1000), net()
    (note,) = GradAccumulator(model, torch.optim.AdamW(model.parameters())).report().notes
    assert re.search("fused=True.*about 3 times faster.*1,001,000 elements", note)
    for trained, optimizer in (
        (model, torch.optim.AdamW(model.parameters(), fused=True)),
        (small, torch.optim.AdamW(small.parameters())),
        (model, torch.optim.Adamax(model.parameters())),
    ):
        assert GradAccumulator(trained, optimizer).report().notes == ()


def test_an_empty_group_of_parameters_is_folded_like_the_others():
    model, data = net(), batches((3, 4))
    groups = [{"params": []}, {"params": list(model.parameters())}]
    acc = GradAccumulator(model, torch.optim.AdamW(groups, fused=True), steps=2, max_norm=1e-3)
    run(acc, data)
    assert acc.report().last.applied == "folded"


# --- updates that are left out ---


def spoil(model, value):
    """A loss whose gradient has one `value`, in the last bias."""
    return model[5].bias.sum() * value + sum(p.sum() * 0 for p in model.parameters())


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_is_not_finite_is_left_out(value, fused):
    model, data = net(), batches((2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    acc = GradAccumulator(model, optimizer, steps=2, max_norm=1.0, scheduler=scheduler)
    run(acc, data)
    before = copy.deepcopy((list(model.parameters()), optimizer.state_dict(), scheduler.last_epoch))
    for loss in (loss_sum(model, data[0]), spoil(model, value)):
        with acc.micro_batch():
            acc.backward(loss, weight=2)
    assert same((list(model.parameters()), optimizer.state_dict(), scheduler.last_epoch), before)
    assert all(p.grad is None for p in model.parameters())
    report = acc.report()
    assert (report.windows, report.updates, report.skipped, report.skipped_in_a_row) == (2, 1, 1, 1)
    assert (report.inf_windows, report.nan_windows) == ((1, 0) if value == math.inf else (0, 1))
    assert report.first_bad == "5.bias"
    assert report.last.skipped
    assert (report.last.infs, report.last.nans) == ((1, 0) if value == math.inf else (0, 1))
    assert report.last.applied == "skipped"
    assert math.isnan(report.last.norm) == (value is math.nan)
    assert "first in 5.bias" in str(report)
    run(acc, data)
    assert acc.report().skipped_in_a_row == 0


def test_too_many_in_a_row_raise(monkeypatch):
    monkeypatch.setattr("memtools._grad.window.MOST_SKIPS", 3)
    model = net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def bad():
        with acc.micro_batch():
            acc.backward(spoil(model, math.nan), weight=1)

    bad()
    bad()
    run(acc, batches((2,)))
    bad()
    bad()
    with pytest.raises(RuntimeError, match="3 updates in a row.*first in 5.bias.*learning rate"):
        bad()
    assert acc.report().skipped == 5
    assert acc._runner.window.empty
    assert all(p.grad is None for p in model.parameters())


# --- fp16 ---


def test_a_loss_scale_that_was_good_for_longer_than_the_interval_grows():
    """As in a state of a run with a longer growth_interval."""
    settings = {"precision": "fp16", "init_scale": 8.0}
    model, twin = net(), net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters()), **settings)
    for _ in range(3):
        run(acc, batches((2,)))
    shorter = GradAccumulator(twin, torch.optim.SGD(twin.parameters()), **settings)
    shorter._runner.precision.scale.growth_interval = 2
    shorter.load_state_dict(acc.state_dict())
    run(shorter, batches((2,)))
    assert shorter.scale == 16.0


def test_fp16_is_what_torchs_grad_scaler_gives():
    """Over 40 windows with infs now and then: the same scales, the same skips, the same weights."""
    model = net()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    acc = GradAccumulator(model, optimizer, steps=2, precision="fp16", init_scale=2.0**14)
    acc._runner.precision.scale.growth_interval = 3
    usual = torch.optim.SGD(twin.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)
    scales, skips = [], 0
    for i in range(40):
        data = batches((4, 4))
        bad = 1e30 if i % 7 == 3 else 1.0
        for x in data:
            with acc.micro_batch():
                acc.backward(loss_sum(model, x).float() / 4 * bad)
            with torch.autocast("cpu", torch.float16):
                loss = loss_sum(twin, x).float() / 4 * bad
            scaler.scale(loss / 2).backward()
        before = scaler.get_scale()
        scaler.step(usual)
        scaler.update()
        usual.zero_grad()
        skips += scaler.get_scale() < before
        scales.append(scaler.get_scale())
        assert acc.scale == scales[-1]
    assert len(set(scales)) > 2
    assert acc.report().skipped == skips > 3
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize(("init_scale", "least"), [(4.0, 1.0), (0.5, 0.5)])
def test_the_loss_scale_has_a_floor(init_scale, least):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = GradAccumulator(model, optimizer, precision="fp16", init_scale=init_scale)
    for _ in range(4):
        with acc.micro_batch():
            acc.backward(spoil(model, math.inf), weight=1)
    assert acc.scale == acc.report().least_scale == least
    assert acc.report().last.scale == least


def test_the_loss_scale_stays_within_a_window_and_within_float32():
    model, data = net(), batches((2,) * 4)
    acc = GradAccumulator(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        steps=2,
        precision="fp16",
        init_scale=2.0**4,
    )
    acc._runner.precision.scale.growth_interval = 1
    for i, x in enumerate(data):
        assert acc.scale == 2.0 ** (4 + i // 2)
        with acc.micro_batch():
            acc.backward(loss_sum(model, x).float(), weight=2)
    scale = LossScale(2.0**127, True)
    scale.growth_interval = 1
    scale.update(False)
    assert scale.value == 2.0**127


def test_fp16_keeps_gradients_that_would_be_lost_without_a_scale():
    model, data = net(), batches((4, 4))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=2, precision="fp16")
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x).float() * 1e-7, weight=len(x))
    assert error(optimizer.seen[0], [g * 1e-7 for g in reference(model, data)]) < 5e-3


def test_a_factor_of_one_is_not_handed_to_a_fused_optimizer():
    model, data = net(), batches((2, 2))
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), steps=2)
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x))
    assert acc.report().last.applied == "nothing"
