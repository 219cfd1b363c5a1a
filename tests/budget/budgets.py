"""What the tests of budgets share."""

from __future__ import annotations

from collections import Counter

import torch

from memtools import Budget

KIB, MIB = 2**10, 2**20
ROW = 8 * 4  # bytes of a row of 8 float32 gates


def gates(kib: int) -> torch.Tensor:
    """float32 gates of so many KiB."""
    return torch.rand(kib * KIB // ROW, 8)


def reserved(budget: Budget) -> dict[str, int]:
    """Name to bytes, of the parts at the first level."""
    sums: Counter[str] = Counter()
    for line in budget.report():
        if line.depth == 0:
            sums[line.name] += line.reserved
    return dict(sums)
