"""One micro-batch's passes: the forward one under autocast, the backward one outside of it.

Backward begins with the window's constant as the gradient of the loss: the same bits as those of
multiplying the loss, without the multiplication, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

_DONE = "_memtools_backward"  # on a loss that went backward


class Passes:
    """Autocast and the gradient of the loss, made once and used for all micro-batches."""

    __slots__ = ("_autocast", "_before", "_constant", "_device", "_seed", "_torch", "_version")

    def __init__(self, torch: Any, device: str, precision: str) -> None:
        self._torch, self._device = torch, device
        self._seed: Any = None
        self._constant, self._version = 0.0, 0
        self._autocast: Any = None
        self._before: Any = None  # of autocast, outside of a micro-batch; None there
        if precision != "fp32":
            dtype = torch.bfloat16 if precision == "bf16" else torch.float16
            self._autocast = torch.autocast(device, dtype)

    def enter(self) -> None:
        if self._autocast is None:
            return
        torch, device = self._torch, self._device
        self.recover()
        self._before = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        self._autocast.__enter__()

    def leave(self) -> None:
        if self._before is not None:
            self._autocast.__exit__(None, None, None)
            self._before = None

    def recover(self) -> None:
        """Autocast as it was before enter(), where an interrupt came anywhere between that and the
        end of leave()."""
        if self._before is None:
            return
        torch, device = self._torch, self._device
        enabled, dtype, cache = self._before
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if not enabled:  # nobody is inside of another one, whose depth would have to stay
            for _ in range(torch.autocast_increment_nesting()):
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        self._before = None

    def backward(self, loss: Any, constant: float, retain: bool) -> None:
        """Raises what autograd does."""
        setattr(loss, _DONE, True)
        seed = self._seed
        if (
            seed is None
            or constant != self._constant
            or seed.dtype is not loss.dtype
            or seed.device != loss.device
            or seed._version != self._version  # a function of the user's wrote into it
        ):
            seed = self._new_seed(loss, constant)
        if self._autocast is None:
            loss.backward(seed, retain)
        else:
            self._outside_autocast(loss, seed, retain)

    def _outside_autocast(self, loss: Any, seed: Any, retain: bool) -> None:
        """Under autocast it would compute in low precision what the forward pass kept out of it,
        and the low copies of weights would stay during the pass."""
        torch, device = self._torch, self._device
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()
        try:
            loss.backward(seed, retain)
        finally:
            torch.set_autocast_enabled(device, before)

    def _new_seed(self, loss: Any, constant: float) -> Any:
        seed = self._torch.full((), constant, dtype=loss.dtype, device=loss.device)
        self._seed, self._constant, self._version = seed, constant, seed._version
        return seed


def unfit(loss: Any) -> bool:
    """Whether a tensor is no loss to go backward from; `refuse_loss` says why."""
    return not loss.requires_grad or loss.dim() > 0 or hasattr(loss, _DONE)


def refuse_loss(loss: Any) -> NoReturn:
    """Raises ValueError and RuntimeError."""
    if loss.dim():
        raise ValueError(
            f"backward() takes a loss without dimensions, got shape {tuple(loss.shape)}: sum it"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss needs no gradient: it was detached, or computed without grad mode or from "
            "frozen parameters only"
        )
    raise RuntimeError("backward() twice for the same loss: its gradient is already counted")


def units(torch: Any, weight: Any) -> Any:
    """A weight as a float, or as a 0-d tensor where it lives on a device: that is not waited for.

    Raises TypeError and ValueError.
    """
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1 or weight.is_complex() or weight.dtype is torch.bool:
            raise TypeError(
                f"weight is a number or a tensor of one, got {weight.dtype} of shape "
                f"{tuple(weight.shape)}"
            )
        weight = weight.detach()
        if weight.device.type != "cpu":
            return weight.reshape(()).to(torch.float64)
        weight = weight.item()
    elif isinstance(weight, bool) or not hasattr(weight, "__float__"):
        raise TypeError(f"weight is a number or a tensor of one, got {type(weight).__name__}")
    try:
        weight = float(weight)
    except OverflowError:  # an int that is larger than any float
        weight = math.inf
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"weight counts units, so it is 0 or more and finite; got {weight:g}")
    return weight
