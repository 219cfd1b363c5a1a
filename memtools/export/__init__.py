"""Where the monitor's figures go: a file of JSON lines, Prometheus, TensorBoard, Weights & Biases.

    monitor.metrics() --.--> JsonlWriter          a line every n steps
    (or anything else   |--> PrometheusExporter   read when it is asked, over HTTP on this machine
     with metrics())    '--> write_scalars        add_scalar() of TensorBoard, log() of wandb

Nothing here starts a thread of its own but the exporter, and only that needs a package.
"""

from __future__ import annotations

from memtools._base.metrics import MetricsSource
from memtools.export.jsonl import JsonlWriter
from memtools.export.prometheus import PrometheusExporter
from memtools.export.scalars import write_scalars

__all__ = ["JsonlWriter", "MetricsSource", "PrometheusExporter", "write_scalars"]
