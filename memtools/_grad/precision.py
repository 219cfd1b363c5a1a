"""The precision of an accumulator: autocast around forward passes, and the loss scale of fp16.

    micro-batch   enter -> forward under autocast -> backward outside of it -> leave
    window's end  LossScale.update: as large as gradients allow

Backward begins with the window's constant as the gradient of the loss: the same bits as those of
multiplying the loss, without the multiplication, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import torch as bridge

if TYPE_CHECKING:
    import torch

    from memtools._grad.settings import Settings

WENT_BACKWARD: Final = "_memtools_backward"  # on a loss that went backward
_LARGEST: Final = 3.0e38  # float32


class Precision:
    """Autocast, the gradient of the loss and the loss scale, for all windows of an accumulator.

    Attributes:
        lowers: whether forward passes run under autocast, between enter() and leave().
        scale: the loss scale.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], settings: Settings) -> None:
        torch = self._torch = bridge.connect().torch
        # Where parameters are on two kinds of devices, autocast does not work on the CPU.
        kinds = sorted({p.device.type for p in parameters})
        self._device = next((kind for kind in kinds if kind != "cpu"), "cpu")
        self._seed: Any = None
        self._constant, self._version = 0.0, 0
        self._autocast: Any = None
        self._before: Any = None  # of autocast, outside of a micro-batch; None there
        self.lowers = settings.precision != "fp32"
        if self.lowers:
            dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float16
            self._autocast = torch.autocast(self._device, dtype)
        self.scale = LossScale(settings.init_scale, settings.precision == "fp16")

    def enter(self) -> None:
        """Begin to compute in the lower precision."""
        torch, device = self._torch, self._device
        self.recover()
        self._before = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        self._autocast.__enter__()

    def leave(self) -> None:
        """Compute as before enter(). Without one nothing happens."""
        if self._before is not None:
            self._autocast.__exit__(None, None, None)
            self._before = None

    def recover(self) -> None:
        """Set autocast as it was before enter(), where an interrupt came anywhere between that and
        the end of leave()."""
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
        """Go backward with `constant` as the gradient of the loss. Raises what autograd does."""
        setattr(loss, WENT_BACKWARD, True)
        seed = self._seed
        if (
            seed is None
            or constant != self._constant
            or seed.dtype is not loss.dtype
            or seed.device != loss.device
            or seed._version != self._version  # a function of the user's wrote into it
        ):
            seed = self._torch.full((), constant, dtype=loss.dtype, device=loss.device)
            self._seed, self._constant, self._version = seed, constant, seed._version
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


class LossScale:
    """The factor of fp16's losses: as large as gradients allow, changed between windows only.

    It doubles after 2,000 updates in a row that were finite, and halves where one was not, like
    torch.amp.GradScaler's; but it never falls below 1, or the initial value where that is lower,
    while torch's goes on to 0. Without fp16 it is 1.0 and does not move.

    Attributes:
        value: the factor of the next window.
        least: the lowest value.
        growth_interval: updates in a row that were finite, before it doubles.
        good: updates in a row that were finite, since it last moved.
        moves: whether losses are scaled, which they are in fp16.
    """

    __slots__ = ("good", "growth_interval", "least", "moves", "value")

    def __init__(self, value: float, moves: bool) -> None:
        self.value = value if moves else 1.0
        self.least, self.growth_interval = min(value, 1.0), 2000
        self.moves, self.good = moves, 0

    def update(self, skipped: bool) -> None:
        """Move at a window's end; `skipped` says that its gradients were not finite."""
        if skipped:
            self.value, self.good = max(self.value / 2, self.least), 0
            return
        self.good += 1
        if self.good >= self.growth_interval:  # it may come from a state with a longer interval
            self.good = 0
            if self.value * 2 < _LARGEST:
                self.value *= 2

    def state(self) -> dict[str, Any]:
        """For a state_dict."""
        return {"value": self.value, "good": self.good}

    def load(self, state: Any) -> None:
        """Take over a state that was checked. Without fp16 the scale stays 1."""
        if self.moves:
            self.value, self.good = state["value"], state["good"]


def refuse_loss(loss: Any) -> NoReturn:
    """Raise ValueError or RuntimeError for a tensor that is not a loss to go backward from."""
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
