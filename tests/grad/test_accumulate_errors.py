"""GradAccumulator: what makes no sense is refused, and nothing changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from memtools import GradAccumulator
from tests.grad.accumulatecases import (
    Recorder,
    batches,
    error,
    everything,
    loss_sum,
    net,
    reference,
    same,
)

COUNTS = ["steps", "micro_batch_size"]
MEASURES = ["max_norm", "init_scale"]


@pytest.fixture
def model():
    return net()


@pytest.fixture
def acc(model):
    """One micro-batch of a window of three is done."""
    found = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    with found.micro_batch():
        found.backward(loss_sum(model, torch.ones(2, 8)), weight=2)
    return found


def one(acc, rows=2, weight=None):
    with acc.micro_batch():
        x = torch.ones(rows, 8)
        acc.backward(loss_sum(acc.model, x), weight=rows if weight is None else weight)


def unchanged(acc, call, kind, match):
    before = copy.deepcopy(everything(acc))
    with pytest.raises(kind, match=match):
        call()
    assert same(everything(acc), before)


# --- backward() ---


@pytest.mark.parametrize(
    ("weight", "kind", "match"),
    [
        (float("nan"), ValueError, "0 or more and finite, got nan"),
        (float("inf"), ValueError, "got inf"),
        (10**400, ValueError, "got inf"),
        (-1, ValueError, "got -1"),
        (torch.tensor(-2.0), ValueError, "got -2"),
        (torch.ones(2), TypeError, r"got torch.float32 of shape \(2,\)"),
        (torch.tensor(True), TypeError, "got torch.bool"),
        (True, TypeError, "got bool"),
        ("3", TypeError, "got str"),
        (None, ValueError, "came with weights and this one with none"),
    ],
)
def test_a_weight_that_is_none(acc, weight, kind, match):
    def call():
        x = torch.ones(2, 8)
        with acc.micro_batch():
            acc.backward(loss_sum(acc.model, x), weight=weight)

    unchanged(acc, call, kind, match)


def test_weights_after_losses_without(model):
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    with acc.micro_batch():
        acc.backward(loss_sum(model, torch.ones(2, 8)))
    unchanged(acc, lambda: one(acc), ValueError, "came with no weight and this one with one")


@pytest.mark.parametrize(
    ("loss", "kind", "match"),
    [
        (lambda model: 3.0, TypeError, "a loss as a tensor, got float"),
        (lambda model: model(torch.ones(2, 8)), ValueError, r"got shape \(2, 1\): sum it"),
        (lambda model: torch.tensor(1.0), RuntimeError, "needs no gradient"),
        (lambda model: model(torch.ones(2, 8)).sum().detach(), RuntimeError, "needs no gradient"),
    ],
)
def test_a_loss_that_is_none(acc, loss, kind, match):
    def call():
        with acc.micro_batch():
            acc.backward(loss(acc.model), weight=2)

    unchanged(acc, call, kind, match)


def test_the_same_loss_twice(acc):
    loss = loss_sum(acc.model, torch.ones(2, 8))
    with acc.micro_batch():
        acc.backward(loss, weight=2, retain=True)

    def call():
        with acc.micro_batch():
            acc.backward(loss, weight=2)

    unchanged(acc, call, RuntimeError, "twice for the same loss")


def test_backward_outside_of_a_micro_batch(acc):
    loss = loss_sum(acc.model, torch.ones(2, 8))
    unchanged(acc, lambda: acc.backward(loss, weight=2), RuntimeError, "outside of a micro-batch")


# --- micro_batch() ---


def test_a_micro_batch_without_a_backward(acc):
    def call():
        with acc.micro_batch():
            pass

    unchanged(acc, call, RuntimeError, "no backward.. in this micro-batch")


def test_a_micro_batch_in_another(acc):
    def call():
        with acc.micro_batch(), acc.micro_batch():
            pass

    unchanged(acc, call, RuntimeError, "inside a micro-batch")
    one(acc)


def test_a_micro_batch_that_has_ended(acc):
    block = acc.micro_batch()
    with block:
        acc.backward(loss_sum(acc.model, torch.ones(2, 8)), weight=2)

    def call():
        with block:
            pass

    unchanged(acc, call, RuntimeError, "has ended: call micro_batch")


def test_what_is_no_plain_function(acc):
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        unchanged(acc, lambda f=function: acc.accumulate(f), TypeError, "a plain function")


@pytest.mark.parametrize("name", ["flush", "state_dict", "report", "load_state_dict"])
def test_calls_inside_of_a_micro_batch(acc, name):
    if name == "report":
        with acc.micro_batch():
            assert acc.report().windows == 0
            acc.backward(loss_sum(acc.model, torch.ones(2, 8)), weight=2)
        return
    arguments = ({},) if name == "load_state_dict" else ()

    def call():
        with acc.micro_batch():
            getattr(acc, name)(*arguments)

    unchanged(acc, call, RuntimeError, rf"{name}\(\) inside a micro-batch")


def test_an_exception_before_the_backward_leaves_the_window(model):
    data = batches((3, 4))
    optimizer = Recorder(model)
    acc = GradAccumulator(model, optimizer, steps=2)
    for x in data:
        unchanged(acc, lambda: raising(acc), KeyError, "mine")
        with acc.micro_batch():
            acc.backward(loss_sum(model, x), weight=len(x))
    assert error(optimizer.seen[0], reference(model, data)) < 1e-6


def raising(acc):
    with acc.micro_batch():
        raise KeyError("mine")


@pytest.mark.parametrize("call", ["micro_batch", "flush", "state_dict", "backward"])
def test_an_exception_after_the_backward_tears_the_window(acc, call):
    with pytest.raises(KeyError), acc.micro_batch():  # noqa: PT012 - the block is what is tested
        acc.backward(loss_sum(acc.model, torch.ones(2, 8)), weight=2)
        raise KeyError

    def use():
        if call == "micro_batch":
            one(acc)
        elif call == "backward":
            acc.backward(loss_sum(acc.model, torch.ones(2, 8)), weight=2)
        else:
            getattr(acc, call)()

    unchanged(acc, use, RuntimeError, "KeyError came after a backward pass had begun.*reset")
    acc.reset()
    assert acc.report().dropped == 1
    assert all(p.grad is None for p in acc.model.parameters())
    for _ in range(3):
        one(acc)
    assert acc.report().updates == 1


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise OSError("in backward")


@pytest.mark.parametrize("caught", [False, True])
def test_an_exception_in_the_backward_tears_the_window(acc, caught):
    def use():
        with acc.micro_batch():
            out = acc.model[5](Failing.apply(acc.model[:5](torch.ones(2, 8))))
            if not caught:
                acc.backward(out.sum(), weight=2)
            with pytest.raises(OSError, match="in backward"):
                acc.backward(out.sum(), weight=2)

    with pytest.raises(RuntimeError if caught else OSError):
        use()
    with pytest.raises(RuntimeError, match="OSError came after"):
        one(acc)


def test_steps_do_not_change_in_a_window(acc):
    def call(value):
        acc.steps = value

    unchanged(acc, lambda: call(2), RuntimeError, "cannot become 2.*after 1 of 3")
    acc.flush()
    acc.steps = 2
    unchanged(acc, lambda: call(0), ValueError, "at least 1")
    unchanged(acc, lambda: call(2.0), TypeError, "an int")
    one(acc)
    one(acc)
    assert acc.report().updates == 2


# --- the end of a window ---


def test_a_window_of_no_weight(model):
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    one(acc, weight=0)
    before = acc.report()
    with pytest.raises(ValueError, match="weights of this window sum to 0"):
        one(acc, weight=0)
    assert acc._runner.window.count == 1
    assert acc.report() == before
    unchanged(acc, acc.flush, ValueError, "sum to 0")
    one(acc, weight=2)
    assert acc.report().last.weight == 2


def test_no_gradient_at_the_end_of_a_window(model):
    other = nn.Linear(8, 1)
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with acc.micro_batch():
        acc.backward(other(torch.ones(2, 8)).sum(), weight=2)
    unchanged(acc, acc.flush, RuntimeError, "no parameter of the optimizer has a gradient")
    one(acc)
    assert acc.report().updates == 1


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with acc.micro_batch():
        acc.backward(model(torch.tensor([1, 2])).sum(), weight=2)
    with pytest.raises(TypeError, match="gradient of 0.weight is sparse"):
        acc.flush()
    assert acc._runner.window.count == 1
    assert acc.report().windows == 0


@pytest.mark.parametrize("where", ["clip", "step", "scheduler"])
def test_an_exception_at_the_end_is_passed_on_and_tears_the_window(model, where):
    def fail(*_):
        raise OSError(where)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    clip = fail if where == "clip" else None
    acc = GradAccumulator(model, optimizer, clip=clip, scheduler=scheduler)
    if where != "clip":
        {"step": optimizer, "scheduler": scheduler}[where].step = fail
    with pytest.raises(OSError, match=where):
        one(acc)
    assert acc.report().windows == 0
    with pytest.raises(RuntimeError, match="OSError came after"):
        one(acc)


def test_parameters_that_come_inside_of_a_window(model):
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    acc = GradAccumulator(model, optimizer, steps=2)
    one(acc)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    unchanged(acc, acc.flush, RuntimeError, "got other parameters inside a window")
    acc.reset()
    one(acc)
    one(acc)
    assert acc.report().updates == 1


# --- the constructor ---


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"steps": 0}, ValueError, "steps .* at least 1, got 0"),
        ({"steps": 2.0}, TypeError, "steps must be an int, got float"),
        ({"steps": True}, TypeError, "steps must be an int, got bool"),
        ({"precision": "half"}, ValueError, "must be None or one of fp32, bf16, fp16; got 'half'"),
        (
            {"max_norm": 1.0, "clip": print},
            ValueError,
            "max_norm and clip are two ways to clip: pass one",
        ),
        ({"max_norm": 0}, ValueError, "max_norm must be above 0"),
        ({"max_norm": float("nan")}, ValueError, "max_norm must be above 0 and finite, got nan"),
        ({"max_norm": float("inf")}, ValueError, "got inf; leave it out to measure the norm"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number, got str"),
        ({"clip": 1.0}, TypeError, "clip must be a function of the parameters, got float"),
        ({"init_scale": 0.0}, ValueError, "init_scale must be above 0"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size must be at least 1"),
        *(
            ({name: 2**63}, ValueError, rf"{name} must be at most 2\*\*63 - 1, got 9,2")
            for name in COUNTS
        ),
        *(
            ({name: 10**400}, ValueError, rf"{name} must be at most .* about 2\*\*1329")
            for name in COUNTS
        ),
        *(
            ({name: 10**400}, ValueError, rf"{name} must be above 0 and finite")
            for name in MEASURES
        ),
        ({"overlap": 1}, TypeError, "overlap must be True or False"),
        ({"scheduler": 3}, TypeError, r"scheduler must have a step\(\) method, got int"),
    ],
)
def test_an_argument_that_makes_no_sense(model, settings, kind, match):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=match):
        GradAccumulator(model, optimizer, **settings)
    GradAccumulator(model, optimizer)  # it was not taken


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_accumulator_is_not_copied(model, how):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = GradAccumulator(model, optimizer)
    with pytest.raises(
        TypeError, match=r"save its state_dict\(\) .* a new one of the copied model"
    ):
        how(acc)
    twin, _ = how((model, optimizer)) if how is copy.deepcopy else (model, None)
    assert isinstance(twin, torch.nn.Module)


def test_parameters_that_the_model_has_no_more(model):
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)

    def micro():
        with acc.micro_batch():
            acc.backward(loss_sum(model, torch.ones(2, 8)), weight=2)

    with pytest.raises(RuntimeError, match=r"at the end of this window: .*assign=True"):
        micro()


def test_a_scheduler_that_wants_a_metric(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match=r"ReduceLROnPlateau.step\(\) needs 'metrics'"):
        GradAccumulator(model, optimizer, scheduler=scheduler)


def test_an_optimizer_that_wants_a_closure(model):
    with pytest.raises(TypeError, match=r"LBFGS.step\(\) evaluates the loss again"):
        GradAccumulator(model, torch.optim.LBFGS(model.parameters()))


def test_a_model_and_an_optimizer_that_are_none(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got list"):
        GradAccumulator([model], optimizer)
    with pytest.raises(TypeError, match="optimizer must be a torch.optim.Optimizer, got str"):
        GradAccumulator(model, "adam")
    with pytest.raises(
        ValueError, match="holds 6 parameters, and none of them belongs to the model"
    ):
        GradAccumulator(copy.deepcopy(model), optimizer)


def test_a_weight_beyond_measure_is_refused_at_the_windows_end(model):
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
    with acc.micro_batch():
        acc.backward(loss_sum(model, torch.ones(2, 8)), weight=1.7e308)

    def call():
        with acc.micro_batch():
            acc.backward(loss_sum(model, torch.ones(2, 8)), weight=1.7e308)

    with pytest.raises(ValueError, match="the weights of this window sum to inf"):
        call()
