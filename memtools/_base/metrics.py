"""What exporters read: an object that can be asked for its figures."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricsSource(Protocol):
    """An object with `metrics()`, such as a MemoryMonitor.

    Keys are like `memory/host_rss_bytes`, with the unit (bytes, percent, steps) last.
    """

    def metrics(self, expert: bool = False) -> dict[str, float]:
        """Return the present figures by key.

        Args:
            expert: return all figures, not only the usual ones.
        """
        ...


def check_source(source: object, taker: str) -> None:
    """Raise TypeError if `source` has no `metrics()`, or is a class. `taker` is the call that was
    given the source, for the error."""
    if isinstance(source, type) or not isinstance(source, MetricsSource):
        name = source.__name__ if isinstance(source, type) else type(source).__name__
        what = f"the class {name}" if isinstance(source, type) else f"a {name}"
        raise TypeError(f"{taker} takes an object with metrics(), got {what}; pass the monitor")


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """The figures that a plot can show: those that are neither NaN nor infinite."""
    return {key: value for key, value in metrics.items() if math.isfinite(value)}
