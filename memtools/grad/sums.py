"""Sums over a window: of the losses, and of what a loss function counts besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memtools._base import torch as bridge


class Sum(NamedTuple):
    """A sum that never changes: adding gives a new one, so a window can go back to an old one.

    Attributes:
        known: the sum of the numbers.
        later: tensors without a graph, still to be added. They may lie on a device, which nobody
            waits for until the sum is read.
    """

    known: float = 0.0
    later: tuple[Any, ...] = ()

    def plus(self, value: Any) -> Sum:
        """This sum with one more number, as `taken` returned it."""
        if isinstance(value, float):
            return Sum(self.known + value, self.later)
        return Sum(self.known, (*self.later, value))

    def read(self) -> float:
        """The sum as a float, added up in double. Waits for the devices that parts lie on."""
        if not self.later:
            return self.known
        torch = bridge.connect().torch
        alike: dict[Any, list[Any]] = {}
        for value in self.later:
            alike.setdefault((value.device, value.dtype), []).append(value.reshape(()))
        return sum((sum(torch.stack(values).tolist()) for values in alike.values()), self.known)


def taken(torch: Any, value: Any) -> Any:
    """A tensor of one element as a float, or, where it is not a plain tensor of the CPU, as a
    copy without its graph."""
    if type(value) is torch.Tensor and value.is_cpu:
        return float(value.item())
    return value.detach().clone()


def checked(torch: Any, sums: Any) -> dict[str, Any]:
    """What a loss function returned besides loss and weight, each value as `taken` gives it.

    Raises TypeError for anything but a dict from names to numbers or tensors of one element.
    """
    if not isinstance(sums, Mapping):
        raise TypeError(
            "a loss function returns (loss_sum, weight) or (loss_sum, weight, sums), where sums is "
            f"a dict of numbers; got {type(sums).__name__} as sums"
        )
    found = {}
    for name, value in sums.items():
        if not isinstance(name, str):
            raise TypeError(f"sums of a loss function have names; got the key {name!r}")
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            found[name] = taken(torch, value)
        elif not isinstance(value, torch.Tensor) and hasattr(value, "__float__"):
            found[name] = float(value)
        else:
            kind = type(value).__name__
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
            raise TypeError(
                f"sums[{name!r}] of a loss function is a number or a tensor of one element, got "
                f"{kind}{shape}"
            )
    return found
