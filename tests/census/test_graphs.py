"""Memory that no Python object holds: autograd graphs, and references of C code."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import memtools
from memtools import _core
from memtools._base import torch as bridge

N = 300
MOST = 1_000_000  # nodes
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


# --- which tensor keeps which nodes ---------------------------------------------------------------


class Share(NamedTuple):
    """A root's share of the nodes."""

    nodes: int
    old: int
    oldest: int
    of_grad: bool


def shares(
    *tensors: torch.Tensor, most: int = MOST, then: int = 0
) -> tuple[dict[int, Share], int, bool]:
    """What `_graphs` says, by the tensors' ids, and in its order."""
    bridge.connect()
    found = _core._graphs(list(tensors), most, then)
    assert found is not None
    rows, now, cut = found
    return {id(root): Share(*row) for root, *row in rows}, now, cut


def carried(steps: int, begun: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A hidden state that is carried on without detach(), two nodes a step, and what the last step
    made of it in five more."""
    hidden = begun
    for _ in range(steps):
        hidden = torch.tanh(hidden @ WEIGHT)
    made = hidden
    for _ in range(5):
        made = made * 1.0
    return hidden, made


def test_the_chain_is_its_oldest_roots_and_what_was_made_from_it_has_its_own():
    hidden, made = carried(10, torch.zeros(4, 16))
    found, then, cut = shares(made, hidden, WEIGHT)
    assert list(found) == [id(hidden), id(made)]  # the oldest first; a parameter is no root
    assert [(share.nodes, share.old) for share in found.values()] == [(20, 0), (5, 0)]
    oldest = found[id(hidden)].oldest
    hidden, made = carried(8, hidden)
    later, now, _ = shares(made, hidden, then=then)
    assert [(share.nodes, share.old) for share in later.values()] == [(36, 20), (5, 0)]
    assert later[id(hidden)].oldest == oldest < then
    assert later[id(made)].oldest >= then
    assert now >= then + 16
    assert not cut


def test_a_sentence_that_is_longer_keeps_nothing_old():
    _, made = carried(10, torch.zeros(4, 16))
    _, then, _ = shares(made)
    _, made = carried(30, torch.zeros(4, 16))
    found, _, _ = shares(made, then=then)
    assert (found[id(made)].nodes, found[id(made)].old) == (65, 0)


def test_of_two_tensors_of_one_node_the_first_has_its_graph():
    left, right = (WEIGHT * 2.0).unbind()[:2]
    found, _, _ = shares(right, left)
    assert [(root, share.nodes) for root, share in found.items()] == [(id(right), 2), (id(left), 0)]


def test_a_leaf_whose_gradient_has_a_graph_is_a_root():
    """backward(create_graph=True) makes a cycle that no collector sees."""
    leaf = torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning, match="create_graph"):
        (leaf**3).sum().backward(create_graph=True)
    found, _, _ = shares(leaf)
    assert found[id(leaf)].of_grad
    assert found[id(leaf)].nodes >= 2
    leaf.grad = None
    assert shares(leaf)[0] == {}


def test_depth_does_not_matter_and_a_walk_that_is_too_long_is_cut():
    total = torch.ones((), requires_grad=True)
    for _ in range(50_000):
        total = total + 1.0
    found, _, cut = shares(total)
    assert (found[id(total)].nodes, cut) == (50_000, False)
    found, _, cut = shares(total, WEIGHT * 1.0, most=1000)
    assert (found[id(total)].nodes, cut) == (1000, True)
    assert sum(share.nodes for share in found.values()) == 1000


def test_a_walk_leaves_nothing_behind_and_runs_no_hook_of_what_was_saved():
    def unpack(packed: object) -> torch.Tensor:
        raise AssertionError("a saved tensor was touched")

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
        hidden, made = carried(200, torch.zeros(4, 16))
    leaf = torch.randn(3, requires_grad=True)
    leaf.sum().backward()
    shares(made, hidden, leaf)
    blocks, objects = sys.getallocatedblocks(), len(gc.get_objects())
    for _ in range(10):
        shares(made, hidden, leaf)
    assert sys.getallocatedblocks() - blocks < 20
    assert len(gc.get_objects()) - objects < 5


def test_a_walk_keeps_no_graph_alive():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            contexts.append(weakref.ref(ctx))
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return 2 * grads[0]

    contexts: list[weakref.ref[Any]] = []
    made = Doubled.apply(WEIGHT).sum()
    assert shares(made)[0][id(made)].nodes == 2
    del made
    assert contexts[0]() is None


def odd() -> Iterator[torch.Tensor]:
    """Tensors of which nothing is said: they have no graph, or no memory, or no implementation."""

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Wrapper:
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2))  # type: ignore[attr-defined]

        @classmethod
        def __torch_dispatch__(cls, *args: object, **kwargs: object) -> object:
            raise AssertionError("a wrapper was asked")

    yield Wrapper()
    with torch.inference_mode():
        yield WEIGHT * 2.0
    yield torch.empty(3, device="meta")
    yield torch.eye(3).to_sparse()
    yield torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def test_tensors_without_a_graph_are_no_roots():
    assert shares(*odd())[0] == {}
    made = (WEIGHT.detach().to_sparse().requires_grad_() * 2.0).coalesce()
    assert shares(made)[0][id(made)].nodes >= 1


def test_what_backward_freed_is_counted_as_it_stands():
    made = loss()
    nodes = shares(made)[0][id(made)].nodes
    made.backward()
    assert shares(made)[0][id(made)].nodes == nodes
    WEIGHT.grad = None


def test_graphs_refuses_what_is_no_tensor():
    bridge.connect()
    with pytest.raises(TypeError, match=r"torch\.Tensor, not str"):
        _core._graphs(["a"], MOST, 0)
    with pytest.raises(ValueError, match="most is 0 or more"):
        _core._graphs([], -1, 0)


# --- who holds a graph, by the holders of a growth ------------------------------------------------


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
    assert holder.path.endswith("nodes kept by Trainer.total")
    assert holder.length is not None
    assert 4 * N <= holder.length <= 8 * N
    assert holder.new_objects > N
    assert f"kept by autograd graph of {holder.length:,} nodes" in str(holder)


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
    assert holder.path.endswith("nodes kept by Trainer.total")


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
    assert str(holder) == f"autograd graph of {N + 2} nodes kept by Trainer.total"


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
    path = growth.holders(saved)[0].path
    assert path.startswith("autograd graphs of some ")
    assert path.endswith("nodes each kept by list Trainer.losses")


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
    assert holder.path == "C code (64 references nobody on the Python heap holds)"
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
