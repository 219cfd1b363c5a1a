"""An optimizer belongs to the newest accumulator; one that has ended leaves no hook anywhere."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from memtools import GradAccumulator
from tests.grad.accumulatecases import Recorder, batches, error, loss_sum, net, reference


def micro(acc, x):
    with acc.micro_batch():
        acc.backward(loss_sum(acc.model, x).float(), weight=len(x))


def hooks(model, optimizer):
    """All that a program could find of an accumulator."""
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
        *[hook for p in model.parameters() for hook in (p._backward_hooks or {}).values()],
        *[
            hook
            for p in model.parameters()
            for hook in (p._post_accumulate_grad_hooks or {}).values()
        ],
        *[hook for module in model.modules() for hook in module._forward_hooks.values()],
        *[hook for module in model.modules() for hook in module._forward_pre_hooks.values()],
    ]


SETTINGS = ({}, {"precision": "bf16"})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("how", ["close", "close in a window", "gone"])
def test_an_accumulator_that_has_ended_leaves_no_hook(settings, how):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = GradAccumulator(model, optimizer, steps=2, **settings)
    for x in batches((3, 4, 2) if how == "close in a window" else (3, 4)):
        micro(acc, x)
    assert hooks(model, optimizer)
    if how == "gone":
        gone = weakref.ref(acc)
        del acc
        assert gone() is None
    else:
        acc.close()
        acc.close()
    assert hooks(model, optimizer) == []
    model.zero_grad()
    loss_sum(model, torch.ones(2, 8)).backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


def test_the_newest_accumulator_has_the_optimizer():
    model, data = net(), batches((3, 4))
    optimizer = Recorder(model)
    older = GradAccumulator(model, optimizer, steps=2)
    newer = GradAccumulator(model, optimizer, steps=2)
    for call in (
        lambda: micro(older, data[0]),
        lambda: older.step(data[0], lambda x: (loss_sum(model, x), len(x))),
        older.flush,
        older.reset,
        older.state_dict,
        lambda: older.load_state_dict(newer.state_dict()),
    ):
        with pytest.raises(RuntimeError, match="has ended .a newer GradAccumulator has its opt"):
            call()
    older.close()
    assert older.report().windows == 0
    for x in data:
        micro(newer, x)
    assert error(optimizer.seen[0], reference(model, data)) < 1e-6
    assert len(hooks(model, optimizer)) == 1


def test_a_newer_one_may_come_in_the_middle_of_a_window(caplog):
    model, data = net(), batches((3, 4, 5))
    optimizer = Recorder(model)
    older = GradAccumulator(model, optimizer, steps=2)
    micro(older, data[0])
    newer = GradAccumulator(model, optimizer, steps=2)
    assert "1 micro-batch of weight 3 got no update" in caplog.text
    for x in data[1:]:
        micro(newer, x)
    assert error(optimizer.seen[0], reference(model, data[1:])) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [{"overlap": True}, {"max_norm": 1.0}],
    ids=str,
)
def test_a_construction_that_failed_owns_nothing(settings, monkeypatch):
    model = net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = GradAccumulator(model, optimizer, steps=2)
    micro(first, torch.ones(2, 8).bfloat16())
    if "overlap" not in settings:
        monkeypatch.setattr("memtools._grad.accumulator.find_ranks", lambda *_: 1 / 0)
    before = hooks(model, optimizer)
    try:
        GradAccumulator(model, optimizer, **settings)
    except (ValueError, ZeroDivisionError):
        assert hooks(model, optimizer) == before
        micro(first, torch.ones(2, 8).bfloat16())  # the optimizer is still the first one's
        assert first.report().windows == 1
        monkeypatch.undo()
        micro(GradAccumulator(model, optimizer), torch.ones(2, 8).bfloat16())
    else:
        pytest.fail("nothing was refused")


def test_an_optimizer_that_wraps_another_and_that_one_have_one_owner():
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

        def step(self, closure=None):
            return self.optimizer.step(closure)

    outer = GradAccumulator(model, Wrapper(inner))
    micro(outer, torch.ones(2, 8))
    assert outer.report().updates == 1
    GradAccumulator(model, inner)
    with pytest.raises(RuntimeError, match="has ended .a newer"):
        micro(outer, torch.ones(2, 8))


def test_close_in_a_micro_batch_leaves_it():
    model = net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="bf16")
    with acc.micro_batch():
        acc.close()
        assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(RuntimeError, match="it was closed"):
        micro(acc, torch.ones(2, 8))


# --- a window that is left ---


LEFT = """
import gc, os, sys, warnings
import torch, memtools
torch.optim.SGD([torch.ones(1, requires_grad=True)])  # what torch imports late
gc.freeze()  # what was imported is not collected at each end
for number, end in enumerate(sys.argv[2:]):
    if os.fork():
        print(os.waitstatus_to_exitcode(os.wait()[1]))
        continue
    os.dup2(os.open(f"{sys.argv[1]}/{number}", os.O_WRONLY | os.O_CREAT), 2)
    model = torch.nn.Linear(4, 1)
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters()), steps=4)
    for _ in range(11):
        with acc.micro_batch():
            acc.backward(model(torch.ones(2, 4)).sum(), weight=2)
    exec(end)
    break  # and the interpreter of this process ends
"""


@pytest.mark.slow
def test_a_window_that_is_left_is_said_once_and_an_exception_says_enough(tmp_path):
    strict = "warnings.simplefilter('error'); acc = None"
    ends = ["acc.close()", "del acc", "pass", strict, "raise ValueError('of the loader')"]
    done = subprocess.run(
        [sys.executable, "-c", LEFT, str(tmp_path), *ends], capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (["0"] * 4 + ["1"], "")
    *left, raised = [(tmp_path / str(number)).read_text() for number in range(len(ends))]
    for text in left:
        assert text.count("3 micro-batches of weight 6 got no update") == 1
        assert "Traceback" not in text
    assert raised.endswith("ValueError: of the loader\n")
    assert "got no update" not in raised


@pytest.mark.parametrize("way", ["close", "newer"])
def test_a_window_that_is_left_is_said_at_the_programs_own_line(way, recwarn):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acc = GradAccumulator(model, optimizer, steps=4)
    micro(acc, torch.ones(2, 8))
    if way == "close":
        acc.close()
    else:
        GradAccumulator(model, optimizer, steps=4)
    (said,) = recwarn.list
    assert "got no update" in str(said.message)
    assert said.filename == __file__


def tear(acc):
    with acc.micro_batch():
        acc.backward(loss_sum(acc.model, torch.ones(2, 8)), weight=2)
        raise KeyError("mine")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["flush", "reset", "state_dict", "step", "torn"])
def test_a_window_that_is_not_left_is_not_said(end, caplog):
    model = net()
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    for x in batches((3, 4)):
        micro(acc, x)
    if end == "step":
        acc.reset()
        acc.step(torch.ones(2, 8), lambda x: (loss_sum(model, x), len(x)))
    elif end == "torn":
        with pytest.raises(KeyError):
            tear(acc)
    else:
        getattr(acc, end)()
    del acc
    gc.collect()
    assert caplog.text == ""
