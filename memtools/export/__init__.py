"""Where the monitor's figures go: a file of JSON lines, Prometheus, TensorBoard, Weights & Biases.

    monitor.metrics() --.--> JsonlWriter          a line every n steps
    (or anything else   |--> PrometheusExporter   read when it is asked, over HTTP on this machine
     with metrics())    '--> write_scalars        add_scalar() of TensorBoard, log() of wandb

Nothing here starts a thread of its own but the exporter, and only that needs a package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools.export.jsonl import JsonlWriter
    from memtools.export.prometheus import PrometheusExporter
    from memtools.export.scalars import write_scalars
    from memtools.export.source import MetricsSource

__all__ = ["JsonlWriter", "MetricsSource", "PrometheusExporter", "write_scalars"]

# Loaded at first use: other parts need what a source of figures is, and no exporter.
_LATER = {
    "JsonlWriter": "jsonl",
    "MetricsSource": "source",
    "PrometheusExporter": "prometheus",
    "write_scalars": "scalars",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'memtools.export' has no attribute {name!r}")
    value = getattr(import_module(f"memtools.export.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - {"TYPE_CHECKING", "import_module"})
