"""The end of a window: measure the gradients, decide, and give them to the optimizer once.

measure     one read pass: sum of squares, inf, nan
decide      factor = 1 / (constant * weight) * clip coefficient; or skip, gradients untouched
apply       nothing, where the factor is 1
            folded into a fused optimizer's `grad_scale`: it divides while it reads
            one multiply, else
step        the optimizer
"""

from __future__ import annotations

import math
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools._base import torch as bridge
from memtools.grad.owner import Ownership

if TYPE_CHECKING:
    from memtools.grad.gradients import Gradients
    from memtools.grad.main_grads import MainGrads

_ONE = struct.pack("f", 1.0)
_FOLDABLE = (1e-37, 1e37)  # factors whose reciprocal is a normal float32


class Decided(NamedTuple):
    """What is to be done with the gradients."""

    factor: float
    norm: float
    coefficient: float


class Finish:
    """How one optimizer's gradients are clipped and handed over."""

    __slots__ = ("clip", "max_norm", "max_value", "optimizer")

    def __init__(self, optimizer: Any, max_norm: Any, max_value: Any, clip: Any) -> None:
        self.optimizer, self.clip = optimizer, clip
        self.max_norm = None if max_norm is None else float(max_norm)
        self.max_value = math.inf if max_value is None else float(max_value)

    def decide(self, sum_squares: float, average: float) -> Decided:
        """`average` times the gradients is what is wanted, before clipping."""
        norm = math.sqrt(sum_squares) * average
        coefficient = 1.0
        if self.max_norm is not None:
            coefficient = min(1.0, self.max_norm / (norm + 1e-6))  # as torch has it
        return Decided(average * coefficient, norm, coefficient)

    def apply(
        self, gradients: Gradients, parameters: list[Any], main: MainGrads | None, decided: Decided
    ) -> tuple[str, float]:
        """Bring the factor in and step. Returns how, and the norm to report."""
        norm, factor = decided.norm, decided.factor
        if main is None and self._folds(factor):  # sums are rounded last, so that none overflows
            self._step_folded(factor)
            return "folded", norm
        applied = "nothing"
        if _changes(factor) or self.max_value < math.inf:
            gradients.multiply(factor, self.max_value)
            applied = "multiplied"
        if main is not None:
            main.give(self.optimizer)
        if self.clip is not None:
            returned = self.clip(parameters)
            norm = norm if returned is None else float(returned)
        self.optimizer.step()
        return applied, norm

    def _folds(self, factor: float) -> bool:
        """Whether nobody but the optimizer sees the gradients, and it takes a divisor."""
        optimizer = self.optimizer
        if not _changes(factor) or self.clip is not None or self.max_value < math.inf:
            return False
        if not _FOLDABLE[0] < factor < _FOLDABLE[1]:
            return False
        return takes_grad_scale(optimizer) and not watched(optimizer)

    def _step_folded(self, factor: float) -> None:
        """As GradScaler hands it over: attributes that are there during the step."""
        torch, optimizer = bridge.connect().torch, self.optimizer
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        optimizer.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale


def takes_grad_scale(optimizer: Any) -> bool:
    """Whether every group is fused: only then the optimizer divides by `grad_scale`. Not one that
    wraps another, as trainers do: it has that one's attributes, but the other one steps."""
    if hasattr(getattr(optimizer, "optimizer", None), "param_groups"):
        return False
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    return all(group.get("fused") is True for group in optimizer.param_groups)


def watched(optimizer: Any) -> bool:
    """Whether hooks run before the step, which may look at the gradients."""
    module = sys.modules[bridge.connect().torch.optim.Optimizer.__module__]
    if getattr(module, "_global_optimizer_pre_hooks", None):
        return True
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or {}
    return any(not isinstance(hook, Ownership) for hook in hooks.values())


def _changes(factor: float) -> bool:
    """Whether a multiplication in float32 does anything."""
    return struct.pack("f", factor) != _ONE
