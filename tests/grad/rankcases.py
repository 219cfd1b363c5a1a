"""A small model, data and the float64 reference for jobs of several ranks that accumulate."""

from __future__ import annotations

import copy
from typing import Any

import torch

from memtools import GradAccumulator

STEPS = 4
#: what the other ranks raise where one cannot end its window
FAILED = (
    "rank {} failed in this window, its own error says how; rank {} has not stepped: "
    "reset() drops the window of a GradAccumulator"
)


class Net(torch.nn.Module):
    """The same weights wherever it is made."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.body = torch.nn.Linear(3, 5)
            self.out = torch.nn.Linear(5, 2)
        self.norm = torch.nn.BatchNorm1d(5) if norm else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.out(self.norm(torch.tanh(self.body(x))))
        return made


def data(rank: int, many: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of 2 to 9 rows."""
    made = torch.Generator().manual_seed(100 + rank)
    sizes = torch.randint(2, 10, (many,), generator=made).tolist()
    return [(torch.randn(n, 3, generator=made), torch.randn(n, 2, generator=made)) for n in sizes]


def counts(world: int) -> list[int]:
    """Micro-batches of each rank: none is like another, and the last is short of a window."""
    return [10, 7, 3][:world]


def made(model: torch.nn.Module, lr: float = 0.5, **options: Any) -> GradAccumulator:
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return GradAccumulator(model, optimizer, STEPS, **options)


def micro(acc: GradAccumulator, batch: Any, factor: float = 1.0) -> None:
    """One micro-batch of the squares of Net's errors."""
    x, y = batch
    with acc.micro_batch():
        acc.backward((acc.model(x) - y).float().square().sum() * factor, weight=len(x))


def train(acc: GradAccumulator, batches: list[Any]) -> Any:
    for batch in batches:
        micro(acc, batch)
    return acc.flush()


def flat(model: torch.nn.Module) -> list[float]:
    """All parameters, whole ones where they are sharded."""
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [value for p in whole for value in p.detach().flatten().tolist()]


def close(found: list[float], wanted: list[float]) -> bool:
    a, b = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    return bool((a - b).norm() <= 1e-6 * b.norm())


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
