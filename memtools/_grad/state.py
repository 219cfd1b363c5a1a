"""The state_dict() of an accumulator, from which a run goes on bit for bit, also in a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from memtools._base import torch as bridge
from memtools._base.number import as_float, shown
from memtools._grad.backoff import BackOff
from memtools._grad.window import COUNTS, MEASURES, Sum, Window, WindowRunner

_VERSION: Final = 1
_NUMBERS: Final = ("count", "guess", "scale", "weighted")


def state_of(
    runner: WindowRunner, back_off: BackOff | None, gradients: bool, rng: bool
) -> dict[str, Any]:
    """Return numbers, str and tensors, which torch.load(weights_only=True) can read."""
    window = runner.window
    if gradients:
        runner.ownership.saved = (window, window.count)
    return {
        "version": _VERSION,
        "steps": runner.steps,
        "window": {
            **{name: getattr(window, name) for name in _NUMBERS},
            "weight": window.total(),
            "loss": window.loss.read(),
            "extras": {name: found.read() for name, found in window.extras.items()},
        },
        "scale": runner.precision.scale.state(),
        "totals": runner.totals.state(),
        "micro_batch_size": runner.micro_batch_size,
        "sizes": None if back_off is None else back_off.control.state(),
        "gradients": _gradients(runner) if gradients else None,
        "rng": _rng(runner) if rng else None,
    }


def load(
    runner: WindowRunner, state: Mapping[str, Any], make_back_off: Callable[[], BackOff]
) -> None:
    """Check all of the state, then load it. Raises ValueError or TypeError, and changes nothing
    then."""
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() takes a dict, got {type(state).__name__}")
    try:
        _check_number("version", state["version"], _WHOLE)
        if state["version"] != _VERSION:
            raise ValueError(
                f"this state has version {state['version']}, and this memtools reads {_VERSION}"
            )
        _check(state)
        window = _window(runner, state)
        found = _match(runner, state["gradients"] or {})
    except KeyError as error:
        raise ValueError(f"this is not a GradAccumulator state: {error} is missing") from error
    if state["sizes"] is not None:
        make_back_off().control.load(state["sizes"])
    runner.gradients.drop()
    for parameter, gradient in found:
        parameter.grad = gradient.to(parameter.device, copy=True)
    runner.set_window(window)
    runner.micro_batch_size = state["micro_batch_size"]
    runner.gradients.remember()
    runner.precision.scale.load(state["scale"])
    runner.totals.load(state["totals"])
    if state["rng"] is not None:
        _set_rng(runner, state["rng"])


# --- checks ---

_WHOLE: Final = "a whole number"
_NUMBER: Final = "a number"
_PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "window": {"count": _WHOLE, "guess": _NUMBER, "scale": _NUMBER, "weight": _NUMBER},
    "scale": {"value": _NUMBER, "good": _WHOLE},
    "totals": {**dict.fromkeys(COUNTS, _WHOLE), **dict.fromkeys(MEASURES, _NUMBER)},
    "sizes": {"good": _WHOLE, "wait": _WHOLE, "before": _NUMBER},
}


def _check(state: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for a value that no state has, KeyError for one that is
    missing."""
    for part, names in _PARTS.items():
        values = state[part]
        if part == "sizes" and values is None:
            continue
        _require(part, values, Mapping, "a dict")
        for name, kind in names.items():
            _check_number(f"{part}[{name!r}]", values[name], kind)
    _check_number("steps", state["steps"], _WHOLE)
    window, sizes = state["window"], state["sizes"]
    if state["scale"]["value"] == 0:
        raise ValueError("this state's scale['value'] must be above 0 and finite, got 0")
    name_or_none = (str, type(None))
    _require("totals['first_bad']", state["totals"]["first_bad"], name_or_none, "a name or None")
    if window["weighted"] is not None and not isinstance(window["weighted"], bool):
        raise TypeError("this state's window['weighted'] must be True, False or None")
    _require("window['extras']", window["extras"], Mapping, "a dict")
    for name, value in [("loss", window["loss"]), *window["extras"].items()]:
        _require(f"sum {name!r}", value, (int, float), _NUMBER)
    for name, size, kind in (
        ("micro_batch_size", state["micro_batch_size"], _WHOLE),
        ("sizes['size']", None if sizes is None else sizes["size"], _NUMBER),
    ):
        if size is not None:
            _check_number(name, size, kind)
            if size < 1:
                raise ValueError(f"this state's {name} must be at least 1 row, got {size}")
    _check_tensors(state["gradients"], state["rng"])


def _require(name: str, value: Any, types: Any, kind: str) -> None:
    if isinstance(value, bool) or not isinstance(value, types):
        raise TypeError(f"this state's {name} must be {kind}, got {type(value).__name__}")


def _check_number(name: str, value: Any, kind: str) -> None:
    _require(name, value, int if kind is _WHOLE else (int, float), kind)
    if not (math.isfinite(as_float(value)) and value >= 0):
        raise ValueError(f"this state's {name} must be 0 or more and finite, got {shown(value)}")


def _check_tensors(gradients: Any, rng: Any) -> None:
    torch = bridge.connect().torch
    if gradients is not None:
        _require("gradients", gradients, Mapping, "a dict")
        for name, gradient in gradients.items():
            _require(f"gradient of {name}", gradient, torch.Tensor, "a tensor")
    if rng is None:
        return
    _require("rng", rng, Mapping, "a dict of random states, as state_dict() returns it")
    _require("rng['cuda']", rng["cuda"], Mapping, "a dict of random states")
    for saved in (rng["cpu"], *rng["cuda"].values()):
        if not isinstance(saved, torch.Tensor) or saved.dtype is not torch.uint8:
            raise TypeError("this state's rng must have random states of torch only")
    if rng["cpu"].shape != torch.get_rng_state().shape:
        raise ValueError("this state's rng is not a random state of this torch's CPU generator")


def _gradients(runner: WindowRunner) -> dict[str, Any]:
    """Return copies of the gradients, by name."""
    named = enumerate(runner.gradients.parameters)
    return {
        runner.gradients.name(i): p.grad.detach().clone() for i, p in named if p.grad is not None
    }


def _window(runner: WindowRunner, state: Mapping[str, Any]) -> Window:
    """Return the window of the state. Raises ValueError if it cannot go on here."""
    saved = state["window"]
    window = Window(runner.precision.scale.value)
    if not saved["guess"]:
        return window
    if saved["count"] and state["steps"] != runner.steps:
        raise ValueError(
            f"this state is in the middle of a window of {state['steps']} micro-batches, and "
            f"steps is {runner.steps} here: set steps to {state['steps']} until that window ends"
        )
    if saved["count"] >= runner.steps:
        raise ValueError(
            f"this state was saved after {saved['count']} of {runner.steps} micro-batches, where a "
            "window has ended: it is damaged"
        )
    if state["gradients"] is None:
        raise ValueError(
            f"this state was saved after {saved['count']} of {state['steps']} micro-batches "
            "without their gradients: save it between windows, or with gradients=True"
        )
    for name in (*_NUMBERS, "weight"):
        setattr(window, name, saved[name])
    window.loss = Sum(float(saved["loss"]))
    window.extras = {name: Sum(float(value)) for name, value in saved["extras"].items()}
    return window


def _match(runner: WindowRunner, saved: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return (parameter, gradient) pairs. Raises ValueError for gradients of other parameters."""
    known = {runner.gradients.name(i): p for i, p in enumerate(runner.gradients.parameters)}
    missing = [name for name in saved if name not in known]
    if missing:
        raise ValueError(f"this state has a gradient of {missing[0]}, which is not trained here")
    for name, gradient in saved.items():
        dtype = known[name].grad_dtype or gradient.dtype
        if gradient.shape != known[name].shape or gradient.dtype != dtype:
            raise ValueError(
                f"this state's gradient of {name} is {gradient.dtype} {list(gradient.shape)}, and "
                f"the parameter takes {dtype} {list(known[name].shape)}"
            )
    return [(known[name], gradient) for name, gradient in saved.items()]


def _cuda_devices(runner: WindowRunner) -> list[int]:
    return sorted({p.device.index for p in runner.gradients.parameters if p.device.type == "cuda"})


def _rng(runner: WindowRunner) -> dict[str, Any]:
    torch = bridge.connect().torch
    devices = {str(index): torch.cuda.get_rng_state(index) for index in _cuda_devices(runner)}
    return {"cpu": torch.get_rng_state(), "cuda": devices}


def _set_rng(runner: WindowRunner, saved: Mapping[str, Any]) -> None:
    torch = bridge.connect().torch
    torch.set_rng_state(saved["cpu"].cpu())
    for index in _cuda_devices(runner):
        if str(index) in saved["cuda"]:
            torch.cuda.set_rng_state(saved["cuda"][str(index)].cpu(), index)
