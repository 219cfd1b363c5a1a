"""Write the monitor's figures to TensorBoard, Weights & Biases, or anything of their shape.

docs/guides/exporters.md has recipes for a file of JSON lines and for Prometheus.
"""

from __future__ import annotations

import logging
from typing import Any

from memtools._base.metrics import MetricsSource, check_source, finite

__all__ = ["MetricsSource", "write_scalars"]


def write_scalars(
    target: Any, source: MetricsSource, step: int | None = None, *, expert: bool = False
) -> None:
    """Write what `source.metrics()` says now as scalars of step `step`.

    Values that are not finite (no end in sight: `memory/steps_left`) are left out. Costs one
    `metrics()` and one call of the target for each key (`add_scalar`) or for all (`log`).

    Args:
        target: something with `add_scalar(tag, value, global_step)`, like a SummaryWriter of
            TensorBoard, or with `log(dict, step=)`, like a run of wandb or the module `wandb`.
        source: the monitor, or anything with `metrics()`.
        step: for `add_scalar` and `log`; None leaves the count to them.
        expert: all figures there are, in place of the dozen that most people want.

    Raises:
        TypeError: the target has neither method, or the source no `metrics()`.
    """
    check_source(source, "write_scalars()")
    add_scalar, log = getattr(target, "add_scalar", None), getattr(target, "log", None)
    if callable(add_scalar):
        for key, value in finite(source.metrics(expert)).items():
            add_scalar(key, value, step)
    elif callable(log) and not _is_no_run(target):
        log(finite(source.metrics(expert)), step=step)
    else:
        raise TypeError(
            f"write_scalars() needs add_scalar() as TensorBoard's SummaryWriter has it or log() as "
            f"a wandb run has it, got {_name(target)}; pass the writer or the run"
        )


def _is_no_run(target: Any) -> bool:
    """What has a log() that is something else: loggers of text, and the modules of mathematics."""
    if isinstance(target, (logging.Logger, logging.LoggerAdapter)):
        return True
    return isinstance(target, type) or getattr(target, "__name__", "") in ("math", "numpy", "torch")


def _name(target: Any) -> str:
    name = getattr(target, "__name__", None)
    return f"{name}" if isinstance(name, str) else f"a {type(target).__name__}"
