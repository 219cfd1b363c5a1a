"""What a micro-batch changed is as before: random numbers, buffers, gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from memtools._grad import undo as grad_undo
from memtools._grad.undo import Buffers, RandomState, Scratch, choose


def test_a_devices_generator_goes_back(monkeypatch):
    class FakeDevice:
        state = 7

        def get_rng_state(self, device):
            return (str(device), self.state)

        def set_rng_state(self, state, device):
            assert state[0] == str(device)
            self.state = state[1]

    fake = FakeDevice()
    monkeypatch.setattr(torch, "xpu", fake)
    state = RandomState([torch.device("xpu:1")])
    fake.state = 8
    state.restore()
    assert fake.state == 7


MANY = grad_undo.LARGE  # elements: enough of any type


class Holding(nn.Module):
    """A large buffer that never changes, and a small one that always does."""

    def __init__(self, large: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", large)
        self.register_buffer("count", torch.zeros(4))

    def saved(self, times: int) -> Buffers:
        buffers = Buffers()
        for _ in range(times):
            buffers.save(self)
            self.count += 1
        return buffers


LARGE = {
    "bytes": torch.arange(MANY + 8, dtype=torch.uint8),
    "flags": torch.rand(MANY) > 0.5,
    "nan": torch.full((MANY,), float("nan")),
    "16-bit": torch.randn(2, MANY // 2).bfloat16(),
    "complex": torch.randn(MANY // 8 + 3, dtype=torch.complex128),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_buffer_that_does_not_change_is_copied_no_more(name):
    model = Holding(LARGE[name].clone())
    buffers = model.saved(grad_undo.QUIET)
    assert buffers.kept[0].copy is not None
    buffers = model.saved(grad_undo.QUIET + 1)
    assert [kept.copy is None for kept in buffers.kept] == [True, False]
    version = model.mask._version
    buffers.restore()
    assert model.count[0] == 2 * grad_undo.QUIET  # as at the last save
    assert model.mask._version == version


def exchange(values: np.ndarray) -> None:
    values[[3, 9]] = values[[9, 3]]


WAYS = {
    "in place": lambda mask: mask.add_(1),
    "by data": lambda mask: mask.data.mul_(3),
    "by numpy": lambda mask: mask.numpy().fill(7),
    "two values changed places": lambda mask: exchange(mask.numpy()),
    "rolled": lambda mask: mask.data.copy_(mask.roll(4096)),
    "resized": lambda mask: mask.resize_(9),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_large_buffer_that_changes_late_is_never_taken_for_restored(way):
    """Whoever has no copy says so; and from then on there is one."""
    model = Holding(torch.randn(MANY))
    buffers = model.saved(5)
    WAYS[way](model.mask)
    with pytest.raises(RuntimeError, match="the buffer 'mask' changed in a micro-batch that ran"):
        buffers.restore()
    assert model.count[0] == 4  # the others are restored
    buffers.save(model)
    kept = model.mask.clone()
    model.mask.data.mul_(2)
    buffers.restore()
    assert torch.equal(model.mask, kept)


@pytest.mark.parametrize("way", ["in place", "resized"])
@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_large_buffer_that_changed_in_a_micro_batch_that_went_well_is_copied(way, times):
    model = Holding(torch.randn(MANY))
    buffers = model.saved(times)
    WAYS[way](model.mask)
    buffers.save(model)
    kept = model.mask.clone()
    model.mask.data.mul_(2)
    buffers.restore()
    assert torch.equal(model.mask, kept)


@pytest.mark.parametrize("times", [1, 2])
def test_a_large_buffer_is_restored_while_it_is_not_known_to_be_still(times):
    model = Holding(torch.randn(MANY))
    buffers, kept = model.saved(times), model.mask.clone()
    model.mask.data.mul_(2)
    buffers.restore()
    assert torch.equal(model.mask, kept)
    for _ in range(3):
        buffers.save(model)
    model.mask.add_(1)
    buffers.save(model)
    kept = model.mask.clone()
    model.mask.data.mul_(2)
    buffers.restore()
    assert torch.equal(model.mask, kept)


@pytest.mark.parametrize(
    "odd",
    [
        torch.randn(2, MANY).t(),
        torch.ones(MANY + 1, dtype=torch.uint8),
        torch.ones(MANY + 9, dtype=torch.uint8)[1:],
    ],
    ids=["transposed", "odd length", "odd address"],
)
def test_what_cannot_be_summed_is_copied_each_time(odd):
    model = Holding(odd)
    buffers, kept = model.saved(5), odd.clone()
    model.mask.data.mul_(0)
    buffers.restore()
    assert torch.equal(model.mask, kept)


def parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize("first_sparse", [True, False])
def test_scratch_adds_sparse_gradients_as_autograd_does(first_sparse):
    table = nn.Parameter(torch.randn(6, 2))

    def part(sparse: bool) -> None:
        nn.functional.embedding(torch.tensor([1, 3]), table, sparse=sparse).sum().backward()

    ways = Scratch([table])
    part(first_sparse)
    ways.begin()
    part(not first_sparse)
    ways.keep()
    got, table.grad = table.grad, None
    part(False)
    part(False)
    assert torch.equal(got.to_dense(), table.grad)


@pytest.mark.parametrize(("memory", "name"), [(4000, "redo"), (4001, "scratch")])
def test_scratch_spends_less_than_a_tenth_of_the_memory(monkeypatch, memory, name):
    ps = [*parameters((100,)), nn.Parameter(torch.randn(10**6), requires_grad=False)]
    monkeypatch.setattr(grad_undo, "memory_of", lambda device: memory)
    assert choose(ps).name == name


def test_the_hosts_memory_is_the_lowest_of_its_limits(monkeypatch):
    for job, own, least in (
        (None, None, math.inf),
        (1 << 32, None, 1 << 32),
        (None, (1 << 30, "RLIMIT_AS"), 1 << 30),
        (1 << 32, (1 << 30, "RLIMIT_AS"), 1 << 30),
    ):
        monkeypatch.setattr(grad_undo, "job_limit", lambda job=job: job)
        monkeypatch.setattr(grad_undo, "lowest_limit_of_process", lambda own=own: own)
        assert grad_undo.memory_of(torch.device("cpu")) == least
