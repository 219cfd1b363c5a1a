"""Data sets and loaders that the tests of bounded() and loader_report() share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

KIB = 1024


class Rows(Dataset[Any]):
    """`length` rows of `size` bytes; row i begins with i and has random numbers of the worker."""

    def __init__(self, length: int = 24, size: int = 4 * KIB) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.full((self.size // 8,), float(i), dtype=torch.float64)
        return {"row": row, "random": torch.rand(3), "numpy": torch.tensor(np.random.rand())}


class Stream(IterableDataset[Any]):
    """Worker w gives 2 + 3 w numbers; without workers one stream of nine."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker, length = (0, 9) if info is None else (info.id, 2 + 3 * info.id)
        for n in range(length):
            yield torch.tensor([100 * worker + n])


class Lazy(Sampler[int]):
    """Draws from torch's global generator at each index, as some samplers of programs do."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))

    def __len__(self) -> int:
        return self.length


class Failing(Rows):
    """Row 9 cannot be read."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == 9:
            raise KeyError("row 9 is broken")
        return super().__getitem__(i)


class Killed(Rows):
    """The worker that reads row 9 is killed."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


class Unreachable(Rows):
    """Row 9 lies on a server that does not answer."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i == 9:
            raise ConnectionResetError("the server is gone")
        return super().__getitem__(i)


def loader_of(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    """A loader with two workers."""
    return DataLoader(Rows() if dataset is None else dataset, **{"num_workers": 2, **options})


def drawn(loader: Any, epochs: int = 1, seed: int = 3) -> list[Any]:
    """All batches of some epochs, while the loop itself draws random numbers, too."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    found: list[Any] = []
    for _ in range(epochs):
        for batch in loader:
            found.append(batch)
            found.append(torch.rand(2))
    return found


def alive() -> list[int]:
    """The child processes of this one that have not ended."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return len(one) == len(other) and all(map(same, one, other))
