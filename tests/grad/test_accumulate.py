"""GradAccumulator: the gradient is the full batch's, against float64."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memtools import GradAccumulator
from tests.grad.accumulatecases import (
    LENGTHS,
    Recorder,
    batches,
    error,
    loss_sum,
    net,
    reference,
    same,
)

EXACT = 1e-6  # relative, to the float64 gradient


def train(acc, model, data):
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x), weight=len(x))


# --- the gradient ---


def test_a_partial_window_is_averaged_over_what_there_is():
    model, data = net(), batches()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=4)
    train(acc, model, data)
    assert len(optimizer.seen) == 1
    report = acc.flush()
    assert report is not None
    assert (report.micro_batches, report.weight) == (2, 8)
    assert error(optimizer.seen[0], reference(model, data[:4])) < EXACT
    assert error(optimizer.seen[1], reference(model, data[4:])) < EXACT


def test_flush_of_an_empty_window_does_nothing():
    model = net()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=2)
    assert acc.flush() is None
    train(acc, model, batches((2, 3)))
    assert acc.flush() is None
    assert len(optimizer.seen) == 1


def test_parts_may_share_a_graph():
    model, (x,) = net(), batches((6,))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer)
    with acc.micro_batch():
        each = (model(x) - x.sum(1, keepdim=True)).square()
        acc.backward(each[:2].sum(), weight=2, retain=True)
        acc.backward(each[2:].sum(), weight=4)
    assert error(optimizer.seen[0], reference(model, [x])) < EXACT


def test_without_weights_it_is_the_mean_over_the_micro_batches_there_were():
    model, data = net(), batches((3, 3, 3))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=2)
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x) / len(x))
    acc.flush()
    assert error(optimizer.seen[0], reference(model, data[:2])) < EXACT
    assert error(optimizer.seen[1], reference(model, data[2:])) < EXACT


def test_without_weights_losses_of_one_micro_batch_are_added():
    model, (x,) = net(), batches((4,))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer)
    with acc.micro_batch():
        for _ in range(2):
            acc.backward(loss_sum(model, x) / len(x))
    assert acc.report().last.weight == 1
    assert error(optimizer.seen[0], reference(model, [x, x], weight=4)) < EXACT


def test_a_micro_batch_of_padding_weighs_nothing():
    model, data = net(), batches((4, 4))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=3)
    with acc.micro_batch():
        acc.backward(loss_sum(model, data[0]) * 0, weight=0)
    train(acc, model, data)
    assert error(optimizer.seen[0], reference(model, data)) < EXACT


@pytest.mark.parametrize("as_weight", [float, torch.tensor, lambda n: torch.tensor([n]), np.int64])
def test_weights_are_numbers_or_tensors_of_one(as_weight):
    model, data = net(), batches()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=6)
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x), weight=as_weight(len(x)))
    assert error(optimizer.seen[0], reference(model, data)) < EXACT


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_weights_of_any_size_keep_the_gradient(size):
    model, data = net(), batches()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=6)
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(model, x) * size, weight=len(x) * size)
    assert error(optimizer.seen[0], reference(model, data)) < EXACT


def test_equal_micro_batches_are_bit_for_bit_what_the_usual_loop_gives():
    model, data = net(), batches((4,) * 8)
    twin = copy.deepcopy(model)
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    usual = torch.optim.SGD(twin.parameters(), lr=0.1)
    for i, x in enumerate(data):
        with acc.micro_batch():
            acc.backward(loss_sum(model, x) / 4)
        (loss_sum(twin, x) / 4 / 4).backward()
        if i % 4 == 3:
            usual.step()
            usual.zero_grad()
    assert acc.report().last.applied == "nothing"
    assert same(list(model.parameters()), list(twin.parameters()))


@pytest.mark.slow
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=7),
    st.integers(1, 4),
    st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_any_windows_of_any_parts_give_the_full_batchs_gradient(parts, steps, seed):
    torch.manual_seed(seed)
    model = net()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=steps)
    data = [batches(lengths) for lengths in parts]
    for part in data:
        with acc.micro_batch():
            for x in part:
                acc.backward(loss_sum(model, x), weight=len(x))
    acc.flush()
    windows = [data[i : i + steps] for i in range(0, len(data), steps)]
    assert len(optimizer.seen) == len(windows)
    for got, window in zip(optimizer.seen, windows, strict=True):
        assert error(got, reference(model, [x for part in window for x in part])) < EXACT


# --- the loop around it ---


def test_what_was_in_the_gradients_before_a_window_is_dropped():
    model, data = net(), batches((3, 4))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=2)
    loss_sum(model, data[0]).backward()
    train(acc, model, data)
    assert error(optimizer.seen[0], reference(model, data)) < EXACT
    assert all(p.grad is None for p in model.parameters())


def test_the_scheduler_steps_once_an_update():
    model, data = net(), batches((2,) * 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    acc = GradAccumulator(model, optimizer, steps=2, scheduler=scheduler)
    train(acc, model, data)
    acc.flush()
    assert scheduler.last_epoch == 3


def test_a_decorated_function_is_a_micro_batch_a_call():
    model, data = net(), batches()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=6)

    @acc.accumulate
    def micro(x, *, scale=1.0):
        """Losses of x."""
        return loss_sum(model, x) * scale, len(x)

    assert micro.__doc__ == "Losses of x."
    loss, weight = micro(data[0], scale=1.0)
    assert weight == LENGTHS[0]
    assert loss.item() > 0
    for x in data[1:]:
        micro(x)
    assert error(optimizer.seen[0], reference(model, data)) < EXACT


def test_a_decorated_method_may_return_a_mean_or_go_backward_itself():
    model, (x,) = net(), batches((4,))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer)

    class Trainer:
        @acc.accumulate
        def mean(self, x):
            return loss_sum(model, x) / len(x)

        @acc.accumulate
        def own(self, x):
            acc.backward(loss_sum(model, x), len(x))

    Trainer().mean(x)
    assert Trainer().own(x) is None
    for seen in optimizer.seen:
        assert error(seen, reference(model, [x])) < EXACT


def test_parameters_that_come_later_are_averaged_too():
    model, data = net(), batches((4, 5))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    acc = GradAccumulator(model, optimizer, steps=2)
    train(acc, model, data)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    seen = []
    held = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in held))
    train(acc, model, data)
    right = dict(zip(model.parameters(), reference(model, data), strict=True))
    assert error(seen, [right[p] for p in held]) < EXACT


def test_an_accumulator_dies_with_its_last_reference():
    model = net()
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer)
    train(acc, model, batches((2,)))
    dead = weakref.ref(acc)
    gc.disable()
    try:
        del acc
        assert dead() is None
    finally:
        gc.enable()
    GradAccumulator(model, optimizer)


# --- autocast ---


def test_bf16_runs_the_forward_under_autocast_and_the_backward_outside():
    model, seen = net(), []
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, precision="bf16")
    with acc.micro_batch():
        out = model(torch.ones(2, 8))
        seen.append((out.dtype, torch.is_autocast_enabled("cpu")))
        out.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
        acc.backward(out.float().sum(), weight=2)
        seen.append(torch.is_autocast_enabled("cpu"))
    assert seen == [(torch.bfloat16, True), False, True]
    assert not torch.is_autocast_enabled("cpu")
    assert all(g.dtype is torch.float32 for g in optimizer.seen[0])


def test_autocast_of_the_program_comes_back_after_an_exception():
    model = net()
    acc = GradAccumulator(model, Recorder(model), precision="bf16")
    with torch.autocast("cpu", torch.float16):
        with pytest.raises(KeyError), acc.micro_batch():
            raise KeyError(torch.get_autocast_dtype("cpu"))
        assert torch.get_autocast_dtype("cpu") is torch.float16
        assert torch.is_autocast_enabled("cpu")


def test_bf16_gradients_equal_the_hand_written_loops_bit_for_bit():
    model, data = net(), batches((4,) * 4)
    twin = copy.deepcopy(model)
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=4, precision="bf16")
    for x in data:
        with acc.micro_batch():
            loss = loss_sum(model, x)
            acc.backward(loss, weight=len(x))
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_sum(twin, x)
        (loss / 16).backward()
    assert same(optimizer.seen[0], [p.grad for p in twin.parameters()])


@pytest.mark.parametrize(
    ("steps", "sizes", "said"),
    [
        (2, [4, 4, 4, 4], "2 windows of 2 micro-batches, 2 updates"),
        (4, [4, 4, 4, 4], "1 window of 4 micro-batches, 1 update"),
        (3, [4, 4, 4, 4], "2 windows, 4 micro-batches in all, 2 updates"),
    ],
)
def test_a_report_says_how_many_micro_batches_the_windows_had(steps, sizes, said):
    model = torch.nn.Linear(3, 1)
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=steps)
    for size in sizes:
        with acc.micro_batch():
            acc.backward(model(torch.ones(size, 3)).sum(), weight=size)
    if acc.report().micro_batches < len(sizes):
        acc.flush()
    assert str(acc.report()).startswith(f"Accumulation: {said}, precision fp32")


def test_a_report_counts_the_micro_batches_that_step_cuts():
    model = torch.nn.Linear(3, 1)
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch_size=4)
    for _ in range(5):
        acc.step(torch.ones(16, 3), lambda micro: (model(micro).sum(), len(micro)))
    assert str(acc.report()).startswith(
        "Accumulation: 5 windows, 20 micro-batches in all, 5 updates, precision fp32"
    )
