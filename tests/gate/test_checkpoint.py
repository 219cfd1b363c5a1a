"""Activation checkpointing runs a forward twice; it is recorded once."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import memtools
from memtools._base import torch as bridge


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(6, 4)
        self.mix = torch.nn.Linear(4, 6)
        self.gate_history = memtools.GateHistory()
        self.aux_loss = memtools.AuxLoss()
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        gates = torch.softmax(self.gate(x), -1)
        self.gate_history.append(gates)
        self.aux_loss.add((gates.mean(0) ** 2).sum())
        return x + torch.tanh(self.mix(gates))


def gradients(layer: Layer, run: object) -> tuple[torch.Tensor, ...]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = run(layer, x)  # type: ignore[operator]
    (out.square().mean() + 0.1 * layer.aux_loss.total()).backward()
    layer.aux_loss.reset()
    return tuple(p.grad.clone() for p in layer.parameters())


def plain(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def non_reentrant(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def reentrant(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)


@pytest.mark.parametrize("shim", ["with", "without"])
@pytest.mark.parametrize("run", [non_reentrant, reentrant])
def test_a_recomputed_forward_is_recorded_once(run, shim, monkeypatch, without_shim):
    layer = Layer()
    with without_shim() if shim == "without" else warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the reentrant one loses the graph
        gradients(layer, run)
    assert layer.forwards == 2
    assert len(layer.gate_history) == 1
    assert layer.gate_history.recomputed == 1
    assert layer.gate_history.stats().tokens == 5


def test_non_reentrant_checkpointing_keeps_the_aux_loss_gradient():
    layer = Layer()
    wanted = gradients(layer, plain)
    layer.zero_grad()
    got = gradients(layer, non_reentrant)
    assert layer.forwards == 3
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_reentrant_checkpointing_of_an_aux_loss_warns_that_its_gradient_is_lost():
    with pytest.warns(RuntimeWarning, match="use_reentrant=False"):
        gradients(Layer(), reentrant)


def test_checkpoint_sequential_and_nested_checkpoints_record_each_layer_once():
    layers = [Layer() for _ in range(4)]
    x = torch.randn(5, 6, requires_grad=True)
    checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()
    assert [len(layer.gate_history) for layer in layers] == [1, 1, 1, 1]

    inner = Layer()
    checkpoint(lambda y: non_reentrant(inner, y), x, use_reentrant=False).sum().backward()
    assert len(inner.gate_history) == 1


def test_evaluation_without_gradients_is_recorded():
    layer = Layer()
    with torch.no_grad():
        layer(torch.randn(3, 6))
    assert len(layer.gate_history) == 1


def test_several_updates_record_every_forward(gates):
    layer = Layer()
    for _ in range(5):
        gradients(layer, non_reentrant)
    assert len(layer.gate_history) == 5
    assert layer.gate_history.recomputed == 5


def test_in_backward_is_only_true_inside(gates):
    seen = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(bridge.in_backward()))
    assert not bridge.in_backward()
    y.backward()
    assert seen == [True]
    assert not bridge.in_backward()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute:UserWarning"
)  # torch's own, while it traces
def test_a_compiled_model_records_once(gates):
    layer = Layer()
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(3, 6)
    for update in range(1, 4):
        compiled(x).sum().backward()
        assert len(layer.gate_history) == update
        assert len(layer.aux_loss) == 1
        layer.aux_loss.reset()
    assert layer.gate_history.stats().tokens == 9
