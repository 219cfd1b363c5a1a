"""Chunked backward with GradAccumulator: the gradient of the whole rollout, whatever the chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import memtools
from memtools import TrajectoryStore

T, SAMPLES, WIDTH = 7, 6, 5
LENGTHS = [4, 1, 3, 5, 2, 6]


def rollout(model: torch.nn.Module) -> TrajectoryStore:
    torch.manual_seed(1)
    store = TrajectoryStore(T, states=("x",))
    x = torch.randn(SAMPLES, WIDTH)
    store.append(x=x)
    with torch.no_grad():
        for _ in range(T):
            mean = model(x)
            x = mean + 0.3 * torch.randn_like(x)
            store.append(x=x, log_probs=-(x - mean).square().sum(-1))
    store.put(advantages=torch.randn(SAMPLES), nodes=torch.tensor(LENGTHS))
    return store


def loss_of(model: torch.nn.Module, before: Any, after: Any, old: Any, advantages: Any) -> Any:
    """The clipped loss of PPO, summed over steps and samples."""
    log_probs = -(after - model(before)).square().sum(-1)
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, WIDTH)
    )


@pytest.mark.parametrize(
    "way",
    [
        {"time_steps": 3},
        {"samples": 4},
        {"time_steps": 2, "samples": 1, "shuffle": True},
        {"max_tokens": 9, "lengths": "nodes", "shuffle": True},
    ],
)
def test_the_gradient_of_chunks_is_that_of_the_whole_rollout(way):
    model = make_model()
    store = rollout(model)
    with torch.no_grad():  # so that the ratio is not 1
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    whole = copy.deepcopy(model)
    x = store["x"]
    total = loss_of(whole, x[:-1], x[1:], store["log_probs"], store["advantages"])
    units = T * (sum(LENGTHS) if "max_tokens" in way else SAMPLES)
    (total / units).backward()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    epochs = store.epochs(1, **way)
    seen: list[torch.Tensor] = []

    def keep(parameters: list[torch.nn.Parameter]) -> None:
        seen.extend(
            parameter.grad.clone() for parameter in parameters if parameter.grad is not None
        )

    acc = memtools.GradAccumulator(model, optimizer, epochs.chunks_per_epoch, clip=keep)
    for epoch in epochs:
        for chunk in epoch:
            with acc.micro_batch():
                x = chunk["x"]
                loss = loss_of(model, x[:-1], x[1:], chunk["log_probs"], chunk["advantages"])
                acc.backward(loss, weight=chunk.weight)
    assert acc.report().updates == 1
    for mine, parameter in zip(seen, whole.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)


def test_chunks_may_be_parts_of_one_micro_batch():
    model = make_model()
    store = rollout(model)
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in store.epochs(2, time_steps=2):
        with acc.micro_batch():
            for chunk in epoch:
                x = chunk["x"]
                loss = loss_of(model, x[:-1], x[1:], chunk["log_probs"], chunk["advantages"])
                acc.backward(loss, chunk.weight)
    assert acc.report().updates == 2
    assert acc.report().last.weight == T * SAMPLES
