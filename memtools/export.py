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
    """Write the values of `source.metrics()` as scalars, except those that are not finite.

    Args:
        target: an object with `add_scalar(tag, value, global_step)`, such as TensorBoard's
            SummaryWriter, or with `log(dict, step=)`, such as a wandb run.
        source: the monitor, or any object with `metrics()`.
        step: the step to write. None: the target counts.
        expert: write all values, not only the usual dozen.
    """
    check_source(source, "write_scalars()")
    add_scalar, log = getattr(target, "add_scalar", None), getattr(target, "log", None)
    if callable(add_scalar):
        for key, value in finite(source.metrics(expert)).items():
            add_scalar(key, value, step)
    elif callable(log) and not _has_another_log(target):
        log(finite(source.metrics(expert)), step=step)
    else:
        raise TypeError(
            f"write_scalars() needs add_scalar() as TensorBoard's SummaryWriter has it or log() as "
            f"a wandb run has it, got {_name(target)}; pass the writer or the run"
        )


def _has_another_log(target: Any) -> bool:
    """Whether log() does something else: that of loggers of text, and of mathematical modules."""
    if isinstance(target, (logging.Logger, logging.LoggerAdapter)):
        return True
    return isinstance(target, type) or getattr(target, "__name__", "") in ("math", "numpy", "torch")


def _name(target: Any) -> str:
    name = getattr(target, "__name__", None)
    return f"{name}" if isinstance(name, str) else f"a {type(target).__name__}"
