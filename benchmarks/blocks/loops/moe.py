"""A mixture of experts: each token goes to two of them; the router's logits have a loss too."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, EXPERTS, TOKENS = 128, 4, 4096


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed = self.router(x)
        weights, chosen = routed.softmax(-1).topk(2)
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = (chosen == number).nonzero(as_tuple=True)
            found = found.index_add(0, rows, expert(x[rows]) * weights[rows, slot, None])
        return x + found, routed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        routed = []
        for mixture in self.mixtures:
            x, logits = mixture(x)
            routed.append(logits)
        return x, routed


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(TOKENS, WIDTH)
        wanted = torch.tanh(x.flip(-1))
        made, routed = model(x)
        balance = sum(one.softmax(-1).mean(0).square().sum() for one in routed)
        error = (made - wanted).square()
        loss = functional.relu(error).mean() + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ended()
    return losses
