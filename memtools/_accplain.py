"""Gradients by plain torch calls, and the ranks of one process."""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

from memtools import _bridge


class Measure(NamedTuple):
    sum_squares: float
    infs: int
    nans: int
    first_bad: str | None
    count: int

    @property
    def finite(self) -> bool:
        return not (self.infs or self.nans)


class PlainGradients:
    def __init__(self, parameters: list[Any], names: list[str]) -> None:
        self.parameters, self.names = parameters, names

    def tensors(self) -> list[Any]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def sparse(self) -> str | None:
        torch = _bridge.connect().torch
        for p, name in zip(self.parameters, self.names, strict=True):
            if p.grad is not None and p.grad.layout is not torch.strided:
                return name
        return None

    def empty(self) -> bool:
        return not self.tensors()

    def measure(self) -> Measure:
        total, infs, nans, first, count = 0.0, 0, 0, None, 0
        for p, name in zip(self.parameters, self.names, strict=True):
            if p.grad is None:
                continue
            values = p.grad.detach().double()
            bad = int(values.isinf().sum()), int(values.isnan().sum())
            if any(bad) and first is None:
                first = name
            infs, nans, count = infs + bad[0], nans + bad[1], count + 1
            total += float(values.square().sum())
        return Measure(total, infs, nans, first, count)

    def multiply(self, factor: float, limit: float = math.inf) -> None:
        for tensor in self.tensors():
            tensor.mul_(factor).clamp_(-limit, limit)


class Reduced(NamedTuple):
    """What ranks agree on at a window's end: sums over all of them."""

    weight: float
    micro_batches: int


class OneRank:
    """One process: nothing to agree on."""

    world = 1

    def forward(self, last: bool) -> Any:
        return contextlib.nullcontext()

    def reduce(self, gradients: Any, window: Any) -> Reduced:
        return Reduced(window.total(), window.count)

    def measure(self, measure: Any) -> Any:
        return measure

    def finish(self) -> bool:
        return True
