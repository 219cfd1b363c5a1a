"""The arguments of a GradAccumulator, checked: each refusal is one sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from memtools._base import torch as bridge
from memtools._base.number import positive, whole_number

PRECISIONS: Final = ("fp32", "bf16", "fp16")


@dataclass(slots=True)
class Settings:
    """The arguments of a GradAccumulator, but for the model, the optimizer and the ranks.

    Raises TypeError or ValueError if an argument has a wrong type or value.
    """

    steps: int = 1
    precision: str | None = None
    max_norm: float | None = None
    clip: Callable[..., Any] | None = None
    scheduler: Any = None
    init_scale: float = 2.0**16
    micro_batch_size: int | None = None
    overlap: bool = False
    monitor: Any = None

    def __post_init__(self) -> None:
        self.steps = whole_number("steps", self.steps)
        if self.precision not in (None, *PRECISIONS):
            raise ValueError(
                f"precision must be None or one of {', '.join(PRECISIONS)}; got {self.precision!r}"
            )
        self.precision = self.precision or "fp32"
        if self.max_norm is not None and self.clip is not None:
            raise ValueError("max_norm and clip are two ways to clip: pass one of them")
        if self.max_norm is not None:
            what = "; leave it out to measure the norm without clipping"
            positive("max_norm", self.max_norm, what)
        if self.clip is not None and not callable(self.clip):
            raise TypeError(f"clip must be a function of the parameters, got {_kind(self.clip)}")
        positive("init_scale", self.init_scale)
        if self.micro_batch_size is not None:
            self.micro_batch_size = whole_number("micro_batch_size", self.micro_batch_size)
        if not isinstance(self.overlap, bool):
            raise TypeError(f"overlap must be True or False, got {_kind(self.overlap)}")
        _check_scheduler(self.scheduler)
        _check_monitor(self.monitor)


def _check_scheduler(scheduler: Any) -> None:
    if scheduler is None:
        return
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise TypeError(f"scheduler must have a step() method, got {_kind(scheduler)}")
    missing = _required(step)[:1]
    if missing:
        raise TypeError(
            f"{_kind(scheduler)}.step() needs {missing[0]!r}, which only your loop knows: leave "
            "scheduler out, and call it yourself when the report says that an update was made"
        )


def _check_monitor(monitor: Any) -> None:
    """Raise TypeError for an object that cannot say how much memory is left."""
    if monitor is None:
        return
    calls = ("headroom", "phase", "cleanup_memory")
    missing = [name for name in calls if not callable(getattr(monitor, name, None))]
    if isinstance(monitor, type) or missing or not hasattr(monitor, "running"):
        got = f"the class {monitor.__name__}" if isinstance(monitor, type) else _kind(monitor)
        raise TypeError(f"monitor must be a MemoryMonitor that you start before step(), got {got}")


def check_model(model: Any, optimizer: Any) -> None:
    """Raise TypeError or ValueError if the optimizer cannot train the model in windows."""
    torch = bridge.connect().torch
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_kind(model)}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {_kind(optimizer)}")
    if _required(type(optimizer).step)[1:]:  # Schedulers patch the object's own.
        raise TypeError(
            f"{_kind(optimizer)}.step() evaluates the loss again through a closure, which "
            "accumulated gradients cannot replace: use another optimizer"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.isdisjoint(id(p) for p in model.parameters()):
        raise ValueError(
            f"the optimizer holds {len(held):,} parameters, and none of them belongs to the model: "
            "make the optimizer after the model is copied or wrapped"
        )


def _required(function: Any) -> list[str]:
    """Return the names of the arguments that a call must pass."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind in positional]


def fused_advice(optimizer: Any) -> str | None:
    """Return a sentence if `fused=True` would make the optimizer much faster, else None. In small
    models a step takes microseconds either way."""
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
        f"{elements:,} elements, and averages the gradients in the same pass"
    )


def _kind(value: object) -> str:
    return type(value).__name__
