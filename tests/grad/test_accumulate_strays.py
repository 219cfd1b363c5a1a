"""What a program does to the gradients or the optimizer in the middle of a window."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import memtools
from memtools import GradAccumulator
from tests.grad.accumulatecases import (
    Recorder,
    batches,
    error,
    loss_sum,
    net,
    reference,
    summed_in_fp32,
)
from tests.grad.backoffcases import undoing
from tests.grad.test_accumulate_owner import micro

pytestmark = pytest.mark.usefixtures("either_way")

STRAYS = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "zeros, one by one": lambda model, optimizer: [p.grad.zero_() for p in model.parameters()],
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "one layer": lambda model, optimizer: model[3].zero_grad(),
    "backward": lambda model, optimizer: loss_sum(model, torch.ones(2, 8)).backward(),
    "clip": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "replaced": lambda model, optimizer: setattr(
        model[0].weight, "grad", torch.ones_like(model[0].weight)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("where", ["between", "inside", "before flush"])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_that_were_changed_from_outside_are_refused(stray, where, foreach):
    model, data = net(), batches((3, 4, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    acc = GradAccumulator(model, optimizer, steps=4)
    before = [p.detach().clone() for p in model.parameters()]
    micro(acc, data[0])
    micro(acc, data[1])
    if where != "inside":
        STRAYS[stray](model, optimizer)

    def go_on():
        if where == "before flush":
            acc.flush()
        with acc.micro_batch():
            if where == "inside":
                STRAYS[stray](model, optimizer)
            acc.backward(loss_sum(model, data[2]), weight=5)

    with pytest.raises(RuntimeError, match=r"gradients of this window were .* after 2 of 4 micro"):
        go_on()
    for call in (acc.flush, lambda: micro(acc, data[2])):
        with pytest.raises(RuntimeError, match="a change from outside came after .* reset.. drops"):
            call()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    acc.reset()
    for x in data:
        micro(acc, x)
    wanted = reference(model, data)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in model.parameters()))
    acc.flush()
    assert error(seen, wanted) < 1e-6


def test_a_backward_of_the_programs_own_before_the_first_one_is_refused():
    model = net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)

    def call():
        with acc.micro_batch():
            loss_sum(model, torch.ones(2, 8)).backward()
            acc.backward(loss_sum(model, torch.ones(2, 8)), weight=2)

    with pytest.raises(RuntimeError, match="added to or replaced, after 0 of 2"):
        call()


@pytest.mark.parametrize("undo", ["scratch", "redo"])
def test_a_stray_zero_grad_in_a_loss_function_is_refused_or_does_no_harm(undo):
    model, x = net(), torch.randn(12, 8)
    wanted = reference(model, [x])
    optimizer = Recorder(model)
    acc = undoing(GradAccumulator(model, optimizer, micro_batch_size=4), undo)

    def loss_fn(rows):
        optimizer.zero_grad()
        return loss_sum(model, rows), len(rows)

    if undo == "scratch":  # which has put the gradients aside
        acc.step(x, loss_fn)
        assert error(optimizer.seen[0], wanted) < 1e-6
        return
    with pytest.raises(RuntimeError, match=r"set to None, as by zero_grad\(\), after 1 of"):
        acc.step(x, loss_fn)
    assert optimizer.seen == []
    assert acc.step(x, lambda rows: (loss_sum(model, rows), len(rows))).micro_batches == 3


@pytest.mark.parametrize("stray", ["zero_grad", "backward"])
def test_sums_in_fp32_are_watched_too(stray):
    model, data = net().bfloat16(), [x.bfloat16() for x in batches((3, 4))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = GradAccumulator(summed_in_fp32(model), optimizer, steps=2)
    micro(acc, data[0])
    if stray == "zero_grad":
        optimizer.zero_grad()
    else:
        loss_sum(model, data[0]).backward()
    with pytest.raises(RuntimeError, match="were (written to|set to None), .* after 1 of 2"):
        micro(acc, data[1])


def test_a_norm_is_measured_in_the_middle_of_a_window_without_writing():
    """torch's clip_grad_norm_ with max_norm=inf multiplies by 1: the same bits, but written."""
    model, data = net(), batches((3, 4))
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    acc, plain = GradAccumulator(model, optimizer, 2), GradAccumulator(twin, other, 2)
    micro(acc, data[0])
    told = nn.utils.clip_grad_norm_(model.parameters(), math.inf)
    with pytest.raises(RuntimeError, match=r"written to, .*memtools\.grad_norm\(\) .*inf"):
        micro(acc, data[1])
    acc.reset()
    micro(acc, data[0])
    assert math.isclose(memtools.grad_norm(model.parameters()), told, rel_tol=1e-6)
    memtools.clip_grad_norm_(model.parameters(), math.inf)
    micro(acc, data[1])
    for x in data:
        micro(plain, x)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def pair():
    """A generator and a discriminator."""
    torch.manual_seed(0)
    return nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


@pytest.mark.parametrize("first", [True, False])
def test_a_generators_backward_pass_in_a_window_of_its_discriminator(first):
    """It leaves gradients in the discriminator; the error's remedy keeps them out."""
    noise, real = batches((6, 6)), [x[:, :4] for x in batches((6, 6))]
    before = [one for model in pair() for one in model.parameters()]
    generator, discriminator = pair()
    accs = [
        GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        for model in (discriminator, generator)
    ]

    def go(i, model_is_kept_out):
        with accs[1].micro_batch():
            if model_is_kept_out:
                discriminator.requires_grad_(False)
            accs[1].backward(-discriminator(generator(noise[i][:, :3])).sum(), weight=6)
            discriminator.requires_grad_(True)

    def judge(i):
        with accs[0].micro_batch():
            fake = discriminator(generator(noise[i][:, :3]).detach()).sum()
            accs[0].backward(fake - 2 * discriminator(real[i]).sum(), weight=6)

    def stray():
        if first:  # before the first backward pass: there were no gradients
            with accs[0].micro_batch():
                go(0, False)
                accs[0].backward(discriminator(real[0]).sum(), weight=6)
        judge(0)
        go(0, False)
        judge(1)

    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\) on this model .*generator"):
        stray()
    for acc in accs:
        acc.reset()
    for i in range(2):
        judge(i)
        go(i, True)
    twin, critic = pair()
    fakes = [twin(x[:, :3]).detach() for x in noise]
    loss = sum(critic(f).sum() - 2 * critic(x).sum() for f, x in zip(fakes, real, strict=True))
    grads = torch.autograd.grad(loss / 12, list(critic.parameters()))
    moved = [p.detach() - 0.1 * g for p, g in zip(critic.parameters(), grads, strict=True)]
    assert error([p.detach() for p in discriminator.parameters()], moved) < 1e-6
    assert not any(map(torch.equal, [*generator.parameters(), *discriminator.parameters()], before))
    assert [acc.report().updates for acc in accs] == [1, 1]


def test_a_step_of_the_programs_own_in_the_middle_of_a_window_is_refused_before_it_steps():
    model, data = net(), batches((3, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    acc = GradAccumulator(model, optimizer, steps=2)
    micro(acc, data[0])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) after 1 of 2 micro-batches"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    micro(acc, data[1])  # the window is whole
    assert acc.report().updates == 1
    optimizer.step()  # between windows it is the program's


def test_another_optimizer_of_the_model_may_step():
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[3:].parameters(), lr=0.1)
    acc = GradAccumulator(model, first, steps=2)
    micro(acc, torch.ones(2, 8))
    second.step()
    second.zero_grad()
    micro(acc, torch.ones(2, 8))
    assert acc.report().updates == 1


# --- what programs may do ---


def test_hooks_may_rewrite_gradients_in_the_backward_pass():
    model, data = net(), batches((3, 4, 5))
    wanted = [2 * g for g in reference(model, data)]
    for p in model.parameters():
        p.register_hook(lambda grad: grad * 2)
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad.clone()))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=3)
    for x in data:
        micro(acc, x)
    assert error(optimizer.seen[0], wanted) < 1e-6


def test_a_program_may_clip_in_callbacks_and_drop_gradients_between_windows():
    model, data = net(), batches((3, 4, 5, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.1))

    def clip(parameters):
        return nn.utils.clip_grad_norm_(parameters, 1.0)

    acc = GradAccumulator(model, optimizer, steps=2, clip=clip)
    for at, x in enumerate(data):
        micro(acc, x)
        if at % 2:
            optimizer.zero_grad(set_to_none=at == 1)
    assert acc.report().updates == 2


def test_gradients_may_be_changed_inside_of_a_micro_batch_after_its_backward():
    """Clipping of each micro-batch by itself, as private training has it."""
    model, data = net(), batches((3, 4))
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x), weight=len(x))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert acc.report().updates == 1


def test_a_micro_batch_that_only_some_parameters_take_part_in():
    model, data = net(), batches((3, 4))
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with acc.micro_batch():
        acc.backward(model[0](data[0]).square().sum(), weight=3)
    micro(acc, data[1])
    assert acc.report().updates == 1


def test_the_gradients_are_freed_though_they_are_watched():
    model = net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    micro(acc, torch.ones(2, 8))
    held = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
    assert not any(one.expired() for one in held)
    micro(acc, torch.ones(2, 8))
    assert all(one.expired() for one in held)


def test_a_gradient_that_is_made_again_at_the_old_place_is_another_one():
    """torch's and malloc's memory of the one that was dropped is used for the next."""
    model, x = net(), torch.ones(2, 8)
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    for _ in range(50):
        micro(acc, x)
        model.zero_grad()
        loss_sum(model, x).backward()
        with pytest.raises(RuntimeError, match="added to or replaced"):
            micro(acc, x)
        acc.reset()


def test_a_state_that_was_loaded_in_the_middle_of_a_window_goes_on():
    model, data = net(), batches((3, 4))
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    micro(acc, data[0])
    acc.load_state_dict(acc.state_dict())
    micro(acc, data[1])
    assert acc.report().updates == 1


def test_a_window_that_weighs_nothing_can_still_go_on():
    model = net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    with pytest.raises(ValueError, match="go on with a micro-batch"), acc.micro_batch():
        acc.backward(loss_sum(model, torch.ones(2, 8)), weight=0)
    micro(acc, torch.ones(2, 8))
    assert acc.report().updates == 1
