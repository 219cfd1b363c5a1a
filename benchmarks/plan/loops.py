"""The training loops whose plans are compared with the real step: each makes a model, its optimizer
and the step, for a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.blocks.loops.gpt import LENGTH, WORDS, Gpt

Optimizer = Callable[[Any], torch.optim.Optimizer]


class Loop(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def trained(
    model: nn.Module, optimizer: Optimizer, loss: Callable[[], torch.Tensor], dtype: Any = None
) -> Loop:
    made = optimizer(model.parameters())

    def step() -> None:
        made.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            found = loss()
        torch.autograd.backward(found)
        made.step()

    return Loop(model, made, step)


def mlp(optimizer: Optimizer, rows: int) -> Loop:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU()]
    model = nn.Sequential(*layers)

    def loss() -> torch.Tensor:
        x, y = torch.randn(rows, 1024), torch.randint(1024, (rows,))
        return functional.cross_entropy(model(x), y)

    return trained(model, optimizer, loss)


def gpt(optimizer: Optimizer, rows: int, dtype: Any = None, is_checkpointed: bool = False) -> Loop:
    model = Gpt()
    if is_checkpointed:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)

    def loss() -> torch.Tensor:
        x, y = torch.randint(WORDS, (rows, LENGTH)), torch.randint(WORDS, (rows, LENGTH))
        found: torch.Tensor = model(x, y)[1]
        return found

    return trained(model, optimizer, loss, dtype)


def gpt_checkpointed(optimizer: Optimizer, rows: int) -> Loop:
    return gpt(optimizer, rows, is_checkpointed=True)


def gpt_bf16(optimizer: Optimizer, rows: int) -> Loop:
    return gpt(optimizer, rows, dtype=torch.bfloat16)


class GraphLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(128, 64), nn.Linear(128, 64)

    def forward(self, nodes: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        messages = functional.relu(self.message(torch.cat([nodes[begin], nodes[end]], 1)))
        sums = torch.zeros_like(nodes).index_add(0, end, messages)
        found: torch.Tensor = nodes + self.update(torch.cat([nodes, sums], 1))
        return found


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GraphLayer() for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, nodes: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            nodes = layer(nodes, begin, end)
        found: torch.Tensor = self.head(nodes)
        return found


def graph_net(optimizer: Optimizer, rows: int) -> Loop:
    """Graphs of 256 nodes with 1,024 edges."""
    model = GraphNet()

    def loss() -> torch.Tensor:
        nodes, edges = torch.randn(rows * 256, 64), torch.randint(rows * 256, (2, rows * 1024))
        y = torch.randint(8, (rows * 256,))
        return functional.cross_entropy(model(nodes, edges[0], edges[1]), y)

    return trained(model, optimizer, loss)


class UNetBlock(nn.Module):
    """Down, attention over the places, and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(4, 64, 3, 1, 1), nn.Conv2d(64, 128, 3, 2, 1)
        self.norm, self.attention = nn.GroupNorm(8, 128), nn.Linear(128, 3 * 128)
        self.up = nn.ConvTranspose2d(128, 64, 2, 2)
        self.last = nn.Conv2d(128, 4, 3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = functional.silu(self.first(x))
        h = functional.silu(self.norm(self.down(skip)))
        q, k, v = self.attention(h.flatten(2).transpose(1, 2)).unsqueeze(1).chunk(3, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        h = h + mixed.squeeze(1).transpose(1, 2).reshape(h.shape)
        found: torch.Tensor = self.last(torch.cat([skip, functional.silu(self.up(h))], 1))
        return found


def unet_block(optimizer: Optimizer, rows: int) -> Loop:
    model = UNetBlock()

    def loss() -> torch.Tensor:
        x, noise = torch.randn(rows, 4, 32, 32), torch.randn(rows, 4, 32, 32)
        return functional.mse_loss(model(x + noise), noise)

    return trained(model, optimizer, loss)


def conv_net(optimizer: Optimizer, rows: int) -> Loop:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))

    def loss() -> torch.Tensor:
        x, y = torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
        return functional.cross_entropy(model(x), y)

    return trained(model, optimizer, loss)


LOOPS: dict[str, Callable[[Optimizer, int], Loop]] = {
    "mlp": mlp,
    "gpt": gpt,
    "gpt checkpointed": gpt_checkpointed,
    "gpt bf16": gpt_bf16,
    "graph net": graph_net,
    "unet block": unet_block,
    "conv net": conv_net,
}
CONVOLUTIONS = ("unet block", "conv net")  # What their kernels need for themselves is not planned.
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": lambda given: torch.optim.AdamW(given, foreach=False),
    "AdamW foreach": lambda given: torch.optim.AdamW(given, foreach=True),
    "AdamW fused": lambda given: torch.optim.AdamW(given, fused=True),
    "SGD": lambda given: torch.optim.SGD(given, momentum=0.9),
}
