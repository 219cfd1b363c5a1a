"""The precision of an accumulator: autocast around forward passes, and the loss scale of fp16.

    micro-batch   enter -> forward under autocast -> backward outside autocast -> leave
    window's end  LossScale.update: as large as the gradients allow

The backward pass begins with the window's constant as the gradient of the loss. That gives the same
bits as multiplying the loss, without the two multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from memtools._base import torch as bridge

if TYPE_CHECKING:
    import torch

    from memtools._grad.settings import Settings

#: An attribute of losses that went backward.
WENT_BACKWARD: Final = "_memtools_backward"
#: The loss scale stays below this, so that it is a float32.
_LARGEST: Final = 3.0e38


class Precision:
    """Autocast, backward passes and the loss scale of an accumulator.

    Attributes:
        lowers: whether forward passes run under autocast, between enter() and leave().
        scale: the loss scale.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], settings: Settings) -> None:
        torch = self._torch = bridge.connect().torch
        # If the parameters are on the CPU and on a device, autocast works on the device.
        kinds = sorted({p.device.type for p in parameters})
        self._device = next((kind for kind in kinds if kind != "cpu"), "cpu")
        self._seed: Any = None
        self._constant, self._version = 0.0, 0
        self._autocast: Any = None
        # The settings of autocast from before enter(), and None after leave().
        self._before: Any = None
        self.lowers = settings.precision != "fp32"
        if self.lowers:
            dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float16
            self._autocast = torch.autocast(self._device, dtype)
        self.scale = LossScale(settings.init_scale, settings.precision == "fp16")

    def enter(self) -> None:
        """Enter autocast."""
        torch, device = self._torch, self._device
        self.recover()
        self._before = (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            torch.is_autocast_cache_enabled(),
        )
        self._autocast.__enter__()

    def leave(self) -> None:
        """Leave autocast. Does nothing without enter()."""
        if self._before is not None:
            self._autocast.__exit__(None, None, None)
            self._before = None

    def recover(self) -> None:
        """Restore autocast from before enter(), after an interrupt anywhere between that call and
        the end of leave()."""
        if self._before is None:
            return
        torch, device = self._torch, self._device
        enabled, dtype, cache = self._before
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        if not enabled:  # The program has no autocast of its own, whose depth would have to stay.
            for _ in range(torch.autocast_increment_nesting()):
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
        self._before = None

    def backward(self, loss: Any, constant: float, retain: bool) -> None:
        """Go backward with `constant` as the gradient of the loss. Raises what autograd raises."""
        setattr(loss, WENT_BACKWARD, True)
        seed = self._seed
        if (
            seed is None
            or constant != self._constant
            or seed.dtype is not loss.dtype
            or seed.device != loss.device
            or seed._version != self._version  # a function of the program wrote into it
        ):
            seed = self._torch.full((), constant, dtype=loss.dtype, device=loss.device)
            self._seed, self._constant, self._version = seed, constant, seed._version
        if self._autocast is None:
            loss.backward(seed, retain)
        else:
            self._outside_autocast(loss, seed, retain)

    def _outside_autocast(self, loss: Any, seed: Any, retain: bool) -> None:
        """Go backward without autocast, which would compute in 16 bits what the forward pass
        computed in 32, and would keep the 16-bit copies of weights during the pass."""
        torch, device = self._torch, self._device
        before = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()
        try:
            loss.backward(seed, retain)
        finally:
            torch.set_autocast_enabled(device, before)


class LossScale:
    """The loss scale of fp16, which changes between windows only.

    It doubles after 2,000 finite updates in a row and halves after one that is not finite, like
    that of torch.amp.GradScaler. But it never falls below 1, or below a lower initial value, while
    torch's can fall to 0. Without fp16 it stays 1.0.

    Attributes:
        value: the scale of the next window.
        least: the lowest value.
        growth_interval: finite updates in a row before it doubles.
        good: finite updates in a row since it last changed.
        moves: whether it changes, which it does in fp16.
    """

    __slots__ = ("good", "growth_interval", "least", "moves", "value")

    def __init__(self, value: float, moves: bool) -> None:
        self.value = value if moves else 1.0
        self.least, self.growth_interval = min(value, 1.0), 2000
        self.moves, self.good = moves, 0

    def update(self, skipped: bool) -> None:
        """Count a window. `skipped`: its gradients were not finite."""
        if skipped:
            self.value, self.good = max(self.value / 2, self.least), 0
            return
        self.good += 1
        if self.good >= self.growth_interval:  # It is larger in a state with a longer interval.
            self.good = 0
            if self.value * 2 < _LARGEST:
                self.value *= 2

    def state(self) -> dict[str, Any]:
        """Return its part of a state_dict."""
        return {"value": self.value, "good": self.good}

    def load(self, state: Any) -> None:
        """Load a state that was checked. Without fp16 the scale stays 1."""
        if self.moves:
            self.value, self.good = state["value"], state["good"]


def refuse_loss(loss: Any) -> NoReturn:
    """Raise ValueError or RuntimeError for a tensor from which backward() cannot start."""
    if loss.dim():
        raise ValueError(
            f"backward() takes a loss without dimensions, got shape {tuple(loss.shape)}: sum it"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            "the loss needs no gradient: it was detached, computed without grad mode, or computed "
            "from frozen parameters only"
        )
    raise RuntimeError("backward() twice for the same loss: its gradient was already added")
