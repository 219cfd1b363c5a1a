"""Where the monitor's figures go: a file of JSON lines, Prometheus, TensorBoard, Weights & Biases.

    monitor.metrics() --.--> JsonlWriter          a line every n steps
    (or anything else   |--> PrometheusExporter   read when it is asked, over HTTP on this machine
     with metrics())    '--> write_scalars        add_scalar() of TensorBoard, log() of wandb

Nothing here starts a thread of its own but the exporter, and only that needs a package.
"""

from memtools.export._jsonl import JsonlWriter
from memtools.export._prometheus import PrometheusExporter
from memtools.export._scalars import write_scalars
from memtools.export._source import MetricsSource

__all__ = ["JsonlWriter", "MetricsSource", "PrometheusExporter", "write_scalars"]
