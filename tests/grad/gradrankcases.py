"""A small model, data and the float64 reference for jobs of several ranks that accumulate."""

from __future__ import annotations

import copy
from typing import Any

import torch

STEPS = 4


class Net(torch.nn.Module):
    """The same weights wherever it is made."""

    def __init__(self, norm: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.body = torch.nn.Linear(3, 5)
            self.out = torch.nn.Linear(5, 2)
        self.norm = torch.nn.BatchNorm1d(5) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.drop(self.norm(torch.tanh(self.body(x)))))
        return made


def data(rank: int, many: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of 2 to 9 rows."""
    made = torch.Generator().manual_seed(100 + rank)
    sizes = torch.randint(2, 10, (many,), generator=made).tolist()
    return [(torch.randn(n, 3, generator=made), torch.randn(n, 2, generator=made)) for n in sizes]


def counts(world: int) -> list[int]:
    """Micro-batches of each rank: none is like another, and the last is short of a window."""
    return [10, 7, 3][:world]


def flat(model: torch.nn.Module) -> list[float]:
    """All parameters; json keeps every bit of them."""
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def windows_of(batches: list[Any], steps: int = STEPS) -> list[list[Any]]:
    return [batches[i : i + steps] for i in range(0, len(batches), steps)]


def reference(model: Any, ranks: list[list[Any]], epochs: int = 1) -> list[float]:
    """One process in float64: window i is what all ranks have in their windows i."""
    model = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(epochs):
        own = [windows_of(batches) for batches in ranks]
        for i in range(max(map(len, own))):
            together = [batch for windows in own if i < len(windows) for batch in windows[i]]
            x, y = (torch.cat(parts).double() for parts in zip(*together, strict=True))
            ((model(x) - y).square().sum() / len(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return flat(model)
