"""generation() says once that samples carry the graph that made them."""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import memtools
from memtools._cleanup.generation import LOOKS
from memtools._cleanup.sampled import MOST_ITEMS, graph_of_result

WIDTH = 256  # a step saves 256 x 256 floats for exp: 256 KiB


def walk(many: int, width: int = WIDTH) -> list[torch.Tensor]:
    x = torch.zeros(width, width, requires_grad=True)
    steps = [x]
    for _ in range(many):
        steps.append((steps[-1] * 0.5).exp())
    return steps[1:]


@dataclasses.dataclass
class Rollout:
    latents: Any
    reward: float = 1.0


SHAPES = {
    "list": lambda found: found,
    "tuple": tuple,
    "dict": lambda found: {"latents": found, "rewards": [1.0]},
    "nested": lambda found: [{"a": (found[0], None)}, deque(found[1:]), "text"],
    "dataclass": Rollout,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_samples_with_a_graph_are_said_once_with_its_size(shape, recwarn):
    warnings.simplefilter("always")

    @memtools.generation()
    def rollout():
        return SHAPES[shape](walk(8))

    for _ in range(3):
        rollout()
    (said,) = recwarn.list
    assert said.filename == __file__
    text = str(said.message)
    assert "8 sampled tensors, which rollout() returned, carry a graph of 2.0 MiB" in text
    assert "sample within torch.no_grad(), or detach() what is kept" in text
    assert "if a loss needs the graph, as that of REINFORCE does, drop them after" in text


@pytest.mark.parametrize("way", ["no_grad", "detach", "leaf", "freed", "none"])
def test_samples_without_a_graph_are_not_said(way, recwarn):
    def rollout():
        if way == "no_grad":
            with torch.no_grad():
                return walk(8)
        found = walk(8)
        if way == "freed":
            found[-1].sum().backward()
        return {
            "detach": [one.detach() for one in found],
            "leaf": torch.zeros(512, 512, requires_grad=True),
            "freed": found[-1],
            "none": None,
        }[way]

    memtools.generation()(rollout)()
    assert not recwarn.list


def test_a_small_graph_is_no_matter_and_not_looked_at_for_ever(recwarn, monkeypatch):
    generates = memtools.generation()
    rollout = generates(lambda: walk(3, width=2))
    for _ in range(LOOKS):
        rollout()
    monkeypatch.setattr("memtools._cleanup.generation.graph_of_result", lambda *_: 1 / 0)
    rollout()
    assert not recwarn.list


def test_parameters_are_no_part_of_it():
    """A linear layer saves its weight."""
    layer = nn.Linear(1024, 1024)
    assert graph_of_result(layer(torch.ones(1, 1024)), "f") == ""


def test_what_a_checkpoint_packed_is_not_computed_again():
    calls = []

    def layer(x):
        calls.append(1)
        return x.exp().exp()

    x = torch.zeros(512, 512, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert graph_of_result(y, "f") == ""
    assert calls == [1]


def test_cycles_and_long_results_are_looked_at_in_bounded_time():
    cycle: list[Any] = [walk(8)]
    cycle.append(cycle)
    assert "8 sampled tensors" in str(graph_of_result(cycle, "f"))
    assert graph_of_result([*range(2 * MOST_ITEMS), *walk(8)], "f") is None
    assert graph_of_result(range(10**9), "f") is None


def test_a_function_of_an_autograd_class_counts_what_it_saved():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            made = x * 2
            ctx.save_for_backward(made)
            return made.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = torch.zeros(512, 512, requires_grad=True)
    assert "1 sampled tensor, which f() returned, carries a graph of 1.0 MiB" in str(
        graph_of_result(Double.apply(x), "f")
    )
