"""A small model with all that a retry must put back, and runs of it to compare bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

import memtools
from memtools._grad.accumulator import GradAccumulator
from memtools._grad.report import Retry
from memtools._grad.undo import Redo, Scratch, Undo
from tests.kit.oominject import Inject

ROWS = 16
WAYS = {"scratch": Scratch, "redo": Redo}


def undoing(acc: GradAccumulator, way: str) -> GradAccumulator:
    """The accumulator, which keeps gradients in one of the two ways, however large they are."""
    back_off = acc._get_back_off()
    back_off._undo = Undo(back_off._tensors(), WAYS[way])
    return acc


class Model(nn.Module):
    """Two dropouts, BatchNorm, tied weights; memory runs out between its first and last layer, so
    that a failed pass has drawn random numbers, moved buffers and made a part of the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.tied, self.last = nn.Linear(12, 12), nn.Linear(12, 1)
        self.inject = Inject()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).relu(), 0.3)
        x = x + 0.01 * random.random() + 0.01 * float(np.random.random())
        x = nn.functional.dropout(self.tied(self.tied(x)).relu(), 0.3)
        return self.last(self.inject(x))


def batch(index: int = 0, rows: int = ROWS) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(100 + index)
    return {
        "x": torch.randn(rows, 6, generator=make),
        "y": torch.randn(rows, 1, generator=make),
        "n": torch.randint(1, 9, (rows,), generator=make),
    }


def made(
    *, undo: str = "scratch", size: int | None = None, **settings: Any
) -> tuple[GradAccumulator, Model]:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = memtools.GradAccumulator(model, optimizer, 4, micro_batch_size=size, **settings)
    return undoing(acc, undo), model


def loss_of(model: nn.Module):
    """Sum of losses over units that differ from row to row, and their number."""

    def loss_fn(micro: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        error = (model(micro["x"]) - micro["y"]).square().squeeze(1)
        return (error * micro["n"]).sum(), int(micro["n"].sum())

    return loss_fn


def sizes_of(retries: Sequence[Retry], rows: int, size: int) -> tuple[list[int], int]:
    """The sizes of a window's micro-batches, and the size that it ended with, by its retries.

    A window that runs again from its start (redo) may fail at an earlier micro-batch than before,
    since how much of the heap is free differs from pass to pass. Its plan ends there.
    """
    sizes: list[int] = []
    for retry in retries:
        at = retry.micro_batch
        sizes += [size] * (at - len(sizes))
        planned = sizes[at] if at < len(sizes) else size
        assert retry.rows == min(planned, rows - sum(sizes[:at])), (retry, sizes)
        assert retry.next_rows is not None
        del sizes[at:]
        size = retry.next_rows
    return sizes + [size] * -(-(rows - sum(sizes)) // size), size
