"""The ranks of one process: nothing to agree on."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple


class Reduced(NamedTuple):
    """What ranks agree on at a window's end: sums over all of them."""

    weight: float
    micro_batches: int


class OneRank:
    """One process: nothing to agree on."""

    world = 1
    no_retry = ""

    def agree(self, failed: str) -> str:
        return failed

    def fail(self, error: BaseException) -> None:
        """Nobody else has to hear of it."""

    def forward(self, last: bool) -> Any:
        return contextlib.nullcontext()

    def reduce(self, gradients: Any, window: Any) -> Reduced:
        return Reduced(window.total(), window.count)

    def measure(self, measure: Any) -> Any:
        return measure

    def finish(self) -> bool:
        return True
