"""The loss scale of fp16: as large as gradients allow, changed between windows only.

Grows twofold after `growth_interval` updates in a row that were finite, halves where one was not,
like torch.amp.GradScaler; but never below `least`, where torch's goes on to 0.
"""

from __future__ import annotations

import math
from typing import Any

_LARGEST = 3.0e38  # float32


class LossScale:
    """One number and how long it has been fine. Without fp16 it is 1 and stays."""

    __slots__ = ("good", "growth_interval", "least", "moving", "value")

    def __init__(self, value: float, growth_interval: int, least: float, moving: bool) -> None:
        self.value = value if moving else 1.0
        self.growth_interval, self.least, self.moving = growth_interval, least, moving
        self.good = 0

    def update(self, skipped: bool) -> None:
        """At a window's end: whether its gradients were not finite."""
        if not self.moving:
            return
        if skipped:
            self.value, self.good = max(self.value / 2, self.least), 0
            return
        self.good += 1
        if self.good >= self.growth_interval:  # it may come from a state with a longer interval
            self.good = 0
            if self.value * 2 < _LARGEST:
                self.value *= 2

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good}

    @staticmethod
    def checked(state: Any) -> dict[str, Any]:
        """The state, of the right types. Raises ValueError for what cannot be a scale, KeyError
        where something is missing."""
        value, good = float(state["value"]), int(state["good"])
        if not (math.isfinite(value) and value > 0 and good >= 0):
            raise ValueError(f"a loss scale is above 0 and finite; this state's is {value}")
        return {"value": value, "good": good}

    def load(self, state: dict[str, Any]) -> None:
        """What `checked` returned. Without fp16 the scale stays 1."""
        if self.moving:
            self.value, self.good = state["value"], state["good"]
