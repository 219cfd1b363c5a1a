"""The leak test and what people use instead, on one series at the same moments.

Each rule decides at each of the moments whether the series is a leak. The moments are those at
which LeakDetector evaluates a series: 40 in 8,000 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memtools import LeakDetector

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

MB = 1e6
BAR = 2**19  # what counts as a rise, for ours
TWO_POINT, SIGNS, LINE = "two points > 100 MB", "stormlog's sign rule", "line, R^2 > .6"
GRADES = ("growing", "likely", "leak")
SHOWN = ("growing", "leak")


def moments(n: int) -> NDArray[np.int64]:
    """Indices of the samples after which LeakDetector evaluates a series of n."""
    found, length, end = list[int](), 4, 256
    while end <= n:
        found.append(end - 1)
        if end == 128 * length:
            length *= 2
        end += 8 * length
    return np.array(found)


def grades(y: Array) -> NDArray[np.int64]:
    """Ours: 0 quiet, 1 growing, 2 likely, 3 leak, at each moment; y alone, as rss."""
    at = moments(len(y))
    changes = LeakDetector(bar_bytes=BAR).update_many(0, rss=y)
    known = np.zeros(len(at), np.int64)
    for step, kind in changes:
        known[at >= step] = 1 + GRADES.index(kind) if kind in GRADES else 0
    return known


def two_points(y: Array) -> Flags:
    """The usual hand-written rule."""
    result: Flags = y[moments(len(y))] - y[0] > 100 * MB
    return result


def signs(y: Array) -> Flags:
    """Mean difference above 0, a tenth of the differences positive, 100 MB in all."""
    at = moments(len(y))
    up = np.cumsum(np.diff(y, prepend=y[0]) > 0)[at]
    result: Flags = (y[at] - y[0] > 100 * MB) & (up > 0.1 * at)
    return result


def line(y: Array) -> Flags:
    """Least squares over everything so far: rising, and R^2 above .6."""
    at = moments(len(y))
    n, t = at + 1.0, np.arange(len(y), dtype=float)
    z = y - y[0]
    sum_t, sum_y = np.cumsum(t)[at], np.cumsum(z)[at]
    sxx = np.cumsum(t * t)[at] - sum_t**2 / n
    sxy = np.cumsum(t * z)[at] - sum_t * sum_y / n
    syy = np.cumsum(z * z)[at] - sum_y**2 / n
    result: Flags = (sxy > 0) & (sxy**2 > 0.6 * sxx * np.maximum(syy, 1e-9))
    return result


PEERS: dict[str, Callable[[Array], Flags]] = {TWO_POINT: two_points, SIGNS: signs, LINE: line}


def all_rules(y: Array) -> dict[str, Flags]:
    """Ours by grade, then the peers."""
    ours = grades(y)
    found: dict[str, Any] = {name: ours >= 1 + GRADES.index(name) for name in SHOWN}
    return {**found, **{name: rule(y) for name, rule in PEERS.items()}}
