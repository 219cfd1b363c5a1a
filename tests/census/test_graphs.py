"""Memory that no Python object holds: autograd graphs, and references of C code."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memtools
from tests.census.test_growth import named

N = 300
WEIGHT = torch.nn.Parameter(torch.randn(16, 16))


class Trainer:
    def __init__(self) -> None:
        self.total: torch.Tensor = torch.zeros(())
        self.losses: list[torch.Tensor] = []


def loss() -> torch.Tensor:
    hidden = (torch.randn(4, 16) @ WEIGHT).relu()
    return (hidden * hidden).sum()


@pytest.fixture(autouse=True)
def _without_garbage():
    gc.collect()  # graphs that another test left in a cycle are found as well


def odd() -> Iterator[torch.Tensor]:
    """Tensors that have no graph, or no memory, or no implementation."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Wrapper:
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2))  # type: ignore[attr-defined]

        @classmethod
        def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
            raise AssertionError("a look has run code of the program")

    yield Wrapper()
    with torch.inference_mode():
        yield WEIGHT * 2.0
    yield torch.empty(3, device="meta")
    yield torch.eye(3).to_sparse()
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


class Doubled(torch.autograd.Function):
    contexts: list[weakref.ref[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Doubled.contexts.append(weakref.ref(ctx))
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def test_looks_at_a_deep_graph_run_no_hook_and_keep_nothing_alive():
    global TRAINER

    def unpack(packed: object) -> torch.Tensor:
        raise AssertionError("a look has unpacked a saved tensor")

    TRAINER = trainer = Trainer()
    trainer.losses = list(odd())
    trainer.total = torch.ones((), requires_grad=True)
    for _ in range(50_000):
        trainer.total = trainer.total + 1.0

    def step(i: int) -> None:
        for _ in range(4):
            trainer.total = Doubled.apply(trainer.total).cos()

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        (holder,) = named(step).values()
    assert holder.kind == "autograd graph"
    assert holder.path.endswith("in Trainer.total")
    trainer.total = torch.zeros(())
    assert Doubled.contexts[0]() is None
    del TRAINER


@pytest.mark.slow
def test_a_total_without_detach_is_a_kept_graph():
    trainer = Trainer()
    trainer.total = trainer.total + loss()
    before = memtools.census()
    for _ in range(N):
        trainer.total = trainer.total + loss()
    growth = memtools.census().diff(before)
    (holder,) = growth.holders(steps=N)
    assert holder.kind == "autograd graph"
    assert holder.path.endswith("graph in Trainer.total")
    assert holder.length is not None
    assert 4 * N <= holder.length <= 8 * N
    assert holder.new_objects > N
    assert "of the autograd graph in Trainer.total" in str(holder)


@pytest.mark.slow
def test_what_lies_deep_in_a_graph_is_of_it():
    trainer, one = Trainer(), torch.ones((), requires_grad=True)
    before = memtools.census()
    for _ in range(N):
        trainer.total = trainer.total + (WEIGHT * torch.randn(16, 16)).sum()
    growth = memtools.census().diff(before)
    for _ in range(5000):
        trainer.total = trainer.total + one
    (holder,) = growth.holders(growth.groups[0], steps=N)
    assert holder.kind == "autograd graph"
    assert holder.path.endswith("graph in Trainer.total")


@pytest.mark.slow
def test_a_graph_that_saved_no_python_tensor_is_found_when_large():
    """Sums save nothing: only nodes grow, and no group of tensors does."""
    trainer, one = Trainer(), torch.ones((), requires_grad=True)
    trainer.total = one + one
    before = memtools.census()
    for _ in range(N):
        trainer.total = trainer.total + 1.0
    growth = memtools.census().diff(before)
    assert growth.groups == ()
    holder = growth.holders(steps=N)[-1]
    assert (holder.kind, holder.new_objects) == ("autograd graph", 0)
    assert str(holder) == f"autograd graph in Trainer.total ({N + 2} nodes)"


@pytest.mark.slow
def test_a_small_graph_is_no_news():
    trainer = Trainer()
    look = memtools.census()
    trainer.total = loss()
    kinds = [holder.kind for holder in look.diff(look).holders()]
    assert kinds == []


@pytest.mark.slow
def test_losses_in_a_list_keep_a_graph_each():
    trainer = Trainer()
    before = memtools.census()
    for _ in range(N):
        trainer.losses.append(loss())
    growth = memtools.census().diff(before)
    saved, scalars = growth.groups
    assert (saved.kind.shape, scalars.kind.shape) == ((4, 16), ())
    assert growth.holders(scalars)[0].path == "list Trainer.losses"
    assert growth.holders(saved)[0].path == "autograd graphs in Trainer.losses"


@pytest.mark.slow
def test_references_of_c_code_are_said_as_such():
    before = memtools.census()
    tensors = [torch.empty(3, 7) for _ in range(N)]
    for tensor in tensors:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
    addresses = [id(t) for t in tensors]
    del tensors, tensor
    growth = memtools.census().diff(before)
    (group,) = [g for g in growth.groups if g.kind.shape == (3, 7)]
    (holder,) = growth.holders(group)
    assert holder.kind == "C code"
    assert holder.path == "C code (64 references that no Python object holds)"
    assert holder.new_objects == N
    for address in addresses:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))
    assert [g for g in memtools.census().diff(before).groups if g.kind.shape == (3, 7)] == []


@pytest.mark.slow
def test_what_only_the_caller_holds_is_held_by_nobody():
    holders = memtools.holder_of([torch.empty(3, 8) for _ in range(5)])
    assert [holder.kind for holder in holders] == ["nobody"]


@pytest.mark.slow
@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_that_backward_freed_does_no_harm(backward):
    trainer = Trainer()
    before = memtools.census()
    for _ in range(N):
        trainer.losses.append(loss())
        if backward:
            trainer.losses[-1].backward()
    growth = memtools.census().diff(before)
    shapes = {group.kind.shape for group in growth.groups if group.count >= N}
    assert ((4, 16) in shapes) is not backward
    paths = [holder.path for group in growth.groups for holder in growth.holders(group)]
    assert "list Trainer.losses" in paths
    WEIGHT.grad = None
