"""What a GradAccumulator may be told: one clear sentence for what makes no sense."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

UNDO: Final = ("auto", "scratch", "copy", "redo")
PRECISIONS: Final = ("fp32", "bf16", "fp16")
NAMES: Final = (
    "steps",
    "precision",
    "max_norm",
    "max_value",
    "clip",
    "scheduler",
    "init_scale",
    "growth_interval",
    "min_scale",
    "max_skips",
    "main_grads",
    "undo",
    "micro_batch_size",
    "overlap",
)


def check(settings: Mapping[str, Any]) -> None:
    """All but the model and the optimizer. Raises TypeError and ValueError."""
    count("steps", settings["steps"])
    if settings["precision"] not in (None, *PRECISIONS):
        raise ValueError(
            f"precision is None or one of {', '.join(PRECISIONS)}; got {settings['precision']!r}"
        )
    clips = [name for name in ("max_norm", "max_value", "clip") if settings[name] is not None]
    if len(clips) > 1:
        raise ValueError(f"gradients are clipped in one way; got {' and '.join(clips)}: pick one")
    for name in ("max_norm", "max_value"):
        if settings[name] is not None:
            _positive(name, settings[name], "; leave it out where the norm is only to be measured")
    if settings["clip"] is not None and not callable(settings["clip"]):
        raise TypeError(f"clip is called with the parameters; got {_kind(settings['clip'])}")
    for name in ("init_scale", "min_scale"):
        _positive(name, settings[name])
    if settings["min_scale"] > settings["init_scale"]:
        raise ValueError(
            f"min_scale is at most init_scale, {settings['init_scale']}; "
            f"got {settings['min_scale']}"
        )
    for name in ("growth_interval", "max_skips"):
        count(name, settings[name])
    if settings["undo"] not in UNDO:
        raise ValueError(f"undo is one of {', '.join(UNDO)}; got {settings['undo']!r}")
    if settings["micro_batch_size"] is not None:
        count("micro_batch_size", settings["micro_batch_size"])
    for name in ("main_grads", "overlap"):
        if not isinstance(settings[name], bool):
            raise TypeError(f"{name} is True or False, got {_kind(settings[name])}")
    _check_scheduler(settings["scheduler"])


def count(name: str, value: object) -> int:
    """At least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is an int, got {_kind(value)}")
    if value < 1:
        raise ValueError(f"{name} is at least 1, got {value}")
    return value


def _positive(name: str, value: object, without: str = "") -> None:
    """`without`: what to do in place of an infinite value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a number, got {_kind(value)}")
    if not (math.isfinite(value) and value > 0):
        hint = without if value == math.inf else ""
        raise ValueError(f"{name} is above 0 and finite, got {value}{hint}")


def _check_scheduler(scheduler: Any) -> None:
    if scheduler is None:
        return
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise TypeError(f"scheduler has a step(); got {_kind(scheduler)}")
    missing = _required(step)[:1]
    if missing:
        raise TypeError(
            f"{_kind(scheduler)}.step() wants {missing[0]!r}, which only the loop knows: leave "
            "scheduler out and call it yourself, where the report says that an update was made"
        )


def check_model(torch: Any, model: Any, optimizer: Any, main_grads: bool) -> None:
    """Raises TypeError and ValueError for a pair that cannot be trained."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a torch.nn.Module, got {_kind(model)}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a torch.optim.Optimizer, got {_kind(optimizer)}")
    if _required(type(optimizer).step)[1:]:  # schedulers patch the object's own
        raise TypeError(
            f"{_kind(optimizer)} evaluates the loss again in its step, by a closure; gradients "
            "that were accumulated cannot give it that: use another optimizer"
        )
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    if main_grads and dtypes.isdisjoint((torch.bfloat16, torch.float16)):
        raise ValueError(
            "main_grads=True sums the gradients of bf16 and fp16 parameters in fp32, and the "
            f"optimizer has only {', '.join(sorted(map(str, dtypes)))}: leave it out"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.isdisjoint(id(p) for p in model.parameters()):
        raise ValueError(
            f"the optimizer holds {len(held):,} parameters and none of them is the model's; was "
            "the model copied or wrapped after the optimizer was made?"
        )


def _required(function: Any) -> list[str]:
    """Arguments that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in positional]


def fused_advice(optimizer: Any) -> str | None:
    """One sentence where `fused=True` would make the optimizer much faster, else None. Small
    models are left alone: there a step takes microseconds either way."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return None
    parameters = [p for group in groups for p in group["params"]]
    devices = {p.device.type for p in parameters}
    known = {"cpu": ("Adam", "AdamW", "SGD", "Adagrad"), "cuda": ("Adam", "AdamW", "SGD")}
    if any(kind not in known.get(device, ()) for device in devices):
        return None
    if any(group.get("fused") or group.get("differentiable") for group in groups):
        return None
    elements = sum(p.numel() for p in parameters)
    if elements < 1_000_000 or not all(p.is_floating_point() for p in parameters):
        return None
    return (
        f"torch.optim.{kind}(..., fused=True) steps about 3 times faster over these "
        f"{elements:,} elements, and takes the averaging of the gradients along at no cost"
    )


def _kind(value: object) -> str:
    return type(value).__name__
