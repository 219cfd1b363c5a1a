"""What every exporter takes: an object that can be asked for its figures."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricsSource(Protocol):
    """Anything with `metrics()`: a MemoryMonitor, the figures of all ranks, something of your own.

    Keys are like `memory/host_rss_bytes`, with the unit at the end; bytes, percent, steps.
    """

    def metrics(self, expert: bool = False) -> dict[str, float]: ...


def check_source(source: object, taker: str) -> None:
    """TypeError for what has no `metrics()`, such as a monitor's result or the class itself."""
    if isinstance(source, type) or not isinstance(source, MetricsSource):
        name = source.__name__ if isinstance(source, type) else type(source).__name__
        what = f"the class {name}" if isinstance(source, type) else f"a {name}"
        raise TypeError(f"{taker} takes an object with metrics(), got {what}; pass the monitor")


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """Without what is not a number or has no end, which plots cannot show."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}
