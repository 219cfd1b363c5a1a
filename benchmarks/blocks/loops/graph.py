"""A graph network on a batch of graphs: messages along edges are summed at nodes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GRAPHS, NODES, EDGES, WIDTH = 8, 250, 2500, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(
            nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)
        )
        self.update = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU())

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> Any:
        senders, receivers = edges
        messages = self.message(torch.cat((x[senders], x[receivers]), -1))
        summed = torch.zeros_like(x).index_add(0, receivers, messages)
        return x + self.update(torch.cat((x, summed), -1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> dict[str, Any]:
        every = [x]
        for layer in self.layers:
            every.append(layer(every[-1], edges))
        return {"energy": self.head(every[-1]).sum(), "nodes": every[1:]}


def train(steps: int, ended: Callable[[], object]) -> list[float]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(GRAPHS, NODES, WIDTH)
        edges = torch.randint(0, NODES, (GRAPHS, 2, EDGES))
        joined = edges + NODES * torch.arange(GRAPHS)[:, None, None]
        out = model(x.flatten(0, 1), joined.transpose(0, 1).flatten(1))
        loss = (out["energy"] / NODES - 1.0).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ended()
    return losses
