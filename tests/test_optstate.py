"""An optimizer's state that does not fit: all is made before a parameter moves, or nothing is."""

from __future__ import annotations

import copy

import pytest
import torch

import memtools
from memtools._optstate import make_state

pytestmark = pytest.mark.usefixtures("frozen")

TEXT = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
KINDS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "fused AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.9, centered=True),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups),
    "Adamax": lambda groups: torch.optim.Adamax(groups),
    "NAdam": lambda groups: torch.optim.NAdam(groups),
    "RAdam": lambda groups: torch.optim.RAdam(groups),
    "Rprop": lambda groups: torch.optim.Rprop(groups),
    "ASGD": lambda groups: torch.optim.ASGD(groups),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


def made(kind: str):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}]
    return model, KINDS[kind](groups)


def batches() -> list[torch.Tensor]:
    make = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=make) for _ in range(3)]


class Failing:
    """Functions of torch that make tensors, of which the calls in `fails` run out of memory."""

    NAMES = ("zeros_like", "empty_like", "full_like", "zeros", "ones", "tensor")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.fails = 0, set[int]()
        for name in self.NAMES:
            monkeypatch.setattr(torch, name, self.wrapped(getattr(torch, name)))

    def wrapped(self, function):
        def call(*args, **kwargs):
            at, self.calls = self.calls, self.calls + 1
            if at in self.fails:
                raise RuntimeError(TEXT)
            return function(*args, **kwargs)

        return call


def flat(tree):
    if isinstance(tree, dict):
        return [one for key in sorted(tree, key=str) for one in flat(tree[key])]
    if isinstance(tree, torch.Tensor):
        return [tree.tolist()]
    return [tree]


def trained(kind: str) -> list:
    """Three windows of an accumulator."""
    model, optimizer = made(kind)
    acc = memtools.GradAccumulator(model, optimizer)
    for x in batches():
        acc.step(x, lambda micro: (model(micro).square().sum(), len(micro)))
    return [flat(model.state_dict()), flat(optimizer.state_dict()["state"])]


@pytest.mark.parametrize("kind", KINDS)
def test_state_made_before_has_the_bits_of_state_made_in_the_step(kind):
    model, optimizer = made(kind)
    twin, other = made(kind)
    for x in batches():
        for one in (model, twin):
            one.zero_grad()
            one(x).square().mean().backward()
        assert make_state(optimizer, 0, 0) == []
        optimizer.step()
        other.step()
    assert flat(model.state_dict()) == flat(twin.state_dict())
    assert flat(optimizer.state_dict()["state"]) == flat(other.state_dict()["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_runs_out_at_any_call_is_tried_once_more(kind, monkeypatch):
    want = trained(kind)
    model, optimizer = made(kind)
    model(batches()[0]).square().mean().backward()
    before = copy.deepcopy(model.state_dict())
    failing = Failing(monkeypatch)
    make_state(optimizer, 0, 0)
    count = failing.calls
    assert count >= 4
    for at in range(count):
        optimizer.state.clear()
        failing.calls, failing.fails = 0, {at}
        (retry,) = make_state(optimizer, 2, 4)
        line = str(retry)
        assert line.startswith("window 2, after 4 micro-batches, optimizer: RuntimeError: [enforce")
        assert "restored its state; tried once more" in line
    failing.calls, failing.fails = 0, set()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    monkeypatch.undo()
    assert trained(kind) == want


@pytest.mark.parametrize("kind", ["AdamW", "fused AdamW", "SGD with momentum"])
def test_what_never_fits_leaves_no_half_made_state(kind, monkeypatch):
    model, optimizer = made(kind)
    acc = memtools.GradAccumulator(model, optimizer)
    failing = Failing(monkeypatch)
    values = copy.deepcopy(model.state_dict())

    def loss_fn(micro):
        return model(micro).square().sum(), len(micro)

    failing.fails = set(range(3, 10**6))
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        acc.step(batches()[0], loss_fn)
    assert "no parameter moved and no state was made" in caught.value.__notes__[0]
    assert len(optimizer.state) == 0
    assert flat(values) == flat(model.state_dict())
    monkeypatch.undo()
    acc.step(batches()[0], loss_fn)  # the window was dropped, and training goes on
    twin, other = made(kind)
    memtools.GradAccumulator(twin, other).step(
        batches()[0], lambda micro: (twin(micro).square().sum(), len(micro))
    )
    assert flat(model.state_dict()) == flat(twin.state_dict())


def test_an_optimizer_of_somebody_elses_makes_its_state_itself(monkeypatch):
    class Mine(torch.optim.AdamW):
        def _init_group(self, *args):
            raise AssertionError

    model, _ = made("AdamW")
    model(batches()[0]).sum().backward()
    assert make_state(Mine(model.parameters()), 0, 0) == []
    assert make_state(torch.optim.SGD(model.parameters(), lr=0.1), 0, 0) == []
