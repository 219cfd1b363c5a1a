"""An accumulator's state, in the middle of a window too: what a run needs to go on bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from memtools._accsums import Sum
from memtools._probe_up import SizeControl
from memtools._window import Window

if TYPE_CHECKING:
    from memtools._accumulate import GradAccumulator

_VERSION: Final = 1
_NUMBERS: Final = ("count", "guess", "scale", "weighted")


def state_of(acc: GradAccumulator, gradients: bool, rng: bool) -> dict[str, Any]:
    """Numbers, texts and tensors: what torch.load(weights_only=True) reads."""
    window = acc.window
    if gradients:
        acc._owner.saved = (window, window.count)
    return {
        "version": _VERSION,
        "steps": acc.steps,
        "window": {
            **{name: getattr(window, name) for name in _NUMBERS},
            "weight": window.total(),
            "loss": window.loss.read(),
            "extras": {name: found.read() for name, found in window.extras.items()},
        },
        "scale": acc._scale.state(),
        "totals": acc._totals.state(),
        "micro_batch_size": acc.micro_batch_size,
        "sizes": None if acc._backoff is None else acc._backoff.control.state(),
        "gradients": _gradients(acc) if gradients else None,
        "rng": _rng(acc) if rng else None,
    }


def load(acc: GradAccumulator, state: Mapping[str, Any]) -> None:
    """Checks all of it before it changes anything. Raises ValueError and TypeError."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() takes a dict, got {type(state).__name__}")
    try:
        if state["version"] != _VERSION:
            raise ValueError(
                f"this state is of version {state['version']}, and version {_VERSION} is read here"
            )
        window = _window(acc, state)
        found = _match(acc, state["gradients"] or {})
        scale = acc._scale.checked(state["scale"])
        totals = acc._totals.checked(state["totals"])
        size, sizes, rng = state["micro_batch_size"], state["sizes"], state["rng"]
        if sizes is not None:
            SizeControl(None).load(sizes)
    except KeyError as error:
        raise ValueError(f"this is no state of a GradAccumulator: {error} is missing") from error
    if sizes is not None:
        acc._back_off().control.load(sizes)
    acc._drop_gradients()
    for parameter, gradient in found:
        parameter.grad = gradient.to(parameter.device, copy=True)
    acc._set_window(window)
    acc.micro_batch_size = size
    acc._watch.remember(acc.gradients)
    acc._scale.load(scale)
    acc._totals.load(totals)
    if rng is not None:
        _set_rng(acc, rng)


def _gradients(acc: GradAccumulator) -> dict[str, Any]:
    """Copies, by name; the fp32 sums where main_grads keeps them."""
    named = enumerate(acc.gradients.parameters)
    return {acc.gradients.name(i): p.grad.detach().clone() for i, p in named if p.grad is not None}


def _window(acc: GradAccumulator, state: Mapping[str, Any]) -> Window:
    saved = state["window"]
    window = Window(acc.scale)
    if not saved["guess"]:
        return window
    if saved["count"] and state["steps"] != acc.steps:
        raise ValueError(
            f"this state is in the middle of a window of {state['steps']} micro-batches, and "
            f"steps is {acc.steps} here: set steps to {state['steps']} until that window ends"
        )
    if state["gradients"] is None:
        raise ValueError(
            f"this state was saved after {saved['count']} of {state['steps']} micro-batches "
            "without their gradients: save it between windows, or with gradients=True"
        )
    for name in (*_NUMBERS, "weight"):
        setattr(window, name, saved[name])
    window.loss = Sum(float(saved.get("loss", math.nan)))  # unknown in states of before
    window.extras = {name: Sum(float(value)) for name, value in saved.get("extras", {}).items()}
    numbers = (window.weight, window.guess, window.scale)
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("this state's window has a weight or a scale that is negative, nan or inf")
    return window


def _match(acc: GradAccumulator, saved: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Each gradient with its parameter."""
    known = {acc.gradients.name(i): p for i, p in enumerate(acc.gradients.parameters)}
    missing = [name for name in saved if name not in known]
    if missing:
        raise ValueError(f"this state has a gradient of {missing[0]}, which is not trained here")
    for name, gradient in saved.items():
        if gradient.shape != known[name].shape or gradient.dtype != known[name].dtype:
            raise ValueError(
                f"this state's gradient of {name} is {gradient.dtype} {list(gradient.shape)}, and "
                f"the parameter {known[name].dtype} {list(known[name].shape)}"
            )
    return [(known[name], gradient) for name, gradient in saved.items()]


def _cuda_devices(acc: GradAccumulator) -> list[int]:
    return sorted({p.device.index for p in acc.parameters if p.device.type == "cuda"})


def _rng(acc: GradAccumulator) -> dict[str, Any]:
    torch = acc._torch
    devices = {str(index): torch.cuda.get_rng_state(index) for index in _cuda_devices(acc)}
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_rng(acc: GradAccumulator, saved: Mapping[str, Any]) -> None:
    torch = acc._torch
    torch.set_rng_state(saved["cpu"].cpu())
    for index in _cuda_devices(acc):
        if str(index) in saved["cuda"]:
            torch.cuda.set_rng_state(saved["cuda"][str(index)].cpu(), index)
