"""In how many steps a growing series reaches a limit, as an interval.

      limit ------------------------------------------+----------+-----------------+----
                                                    lo/       mid/              hi/
      highs   ^ ^ ^ ^ ^  the sawtooth rides on it    /        .'             .-'
      lows  ._._._._._.  the floor's line, and s + u, s, s - u from its end

The error of the slope s alone makes an interval far too narrow (59 % instead of 90), so u is 2.5
standard errors and a tenth of the slope, of few readings more. lo also expects the highest
excursion above the line and its largest jump once more. It holds if the program goes on as it is:
no series shows what will be loaded later.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from memtools._leak.drift import Drift
from memtools._leak.floor import Floor, Windows, straight

ERRORS = 2.5  # The error of a forecast is so many standard errors of the slope,
OF_SLOPE = 0.10  # and this share of the slope,
OF_FEW, FEW_STEPS = 0.30, 256  # or up to this share if the line covers fewer than so many steps,
MOST_ERROR = 0.45  # but at most this share in all.


class Trend(NamedTuple):
    """The line that stands for a series at its end."""

    #: bytes a step; it is from slope - error to slope + error
    slope: float
    error: float
    #: bytes where the line ends, `past` steps before the newest reading
    end: float
    past: float = 0.0
    #: the highest end that any window makes likely, in bytes
    highest: float = 0.0
    #: bytes that the floor rose at once at most
    jump: float = 0.0
    #: bytes above the line: at most, 1 time in 10, 1 time in 2
    most: float = 0.0
    often: float = 0.0
    middle: float = 0.0


def trend_of_floor(floor: Floor, windows: Windows, stride: float) -> Trend:
    """The trend of a floor whose samples lie `stride` steps apart."""
    window, above, block = straight(windows), floor.excursions(), floor.length * stride
    return Trend(
        window.slope / block,
        (ERRORS * window.error + OF_SLOPE * abs(window.slope)) / block,
        window.end,
        floor.count * stride,
        max(one.end for one in windows),
        floor.largest_jump(window.slope),
        above[-1],
        _quantile(above, 0.9),
        _quantile(above, 0.5),
    )


def trend_of_drift(drift: Drift) -> Trend:
    """The trend of the newest readings. A line through few steps is less certain than its own
    scatter shows, so its error is larger, and becomes smaller with each step."""
    few = (OF_FEW - OF_SLOPE) * max(0.0, 1 - (drift.until - drift.since) / FEW_STEPS)
    error = ERRORS * drift.error + (OF_SLOPE + few) * drift.slope
    error = min(error, MOST_ERROR * drift.slope)
    return Trend(
        drift.slope, error, drift.end, highest=drift.end, jump=drift.jump, most=drift.above
    )


class Outlook(NamedTuple):
    """The limit of a series as it was judged, and what was declared to grow beside it."""

    limit: float
    #: bytes that will be added at any moment: lo and mid expect them
    coming: float = 0.0
    #: bytes a step that grow beside the series, until they are so many
    rate: float = 0.0
    rated: float = 0.0


def steps_left(trend: Trend, outlook: Outlook) -> tuple[float, float, float]:
    """(lo, mid, hi) in steps from the newest reading on, each 0 or more; infinite where the series
    does not grow."""
    limit, coming, rate, rated = outlook
    soon = _steps_left(trend, limit, coming, rate)
    if rate <= 0 or rated == math.inf:
        return soon
    ends = rated / rate  # then all of it is there
    later = _steps_left(trend, limit - rated, coming, 0.0)
    lo, mid, hi = (a if a <= ends else b for a, b in zip(soon, later, strict=True))
    return lo, mid, hi


def _steps_left(
    trend: Trend, limit: float, coming: float, rate: float
) -> tuple[float, float, float]:
    slope, room = trend.slope + rate, limit - coming

    def until(room: float, slope: float) -> float:
        if room <= 0:
            return 0.0
        return math.inf if slope <= 0 else max(0.0, room / slope - trend.past)

    return (
        until(room - trend.highest - trend.most - trend.jump, slope + trend.error),
        until(room - trend.end - trend.often, slope),
        until(limit - trend.end - trend.middle / 2, slope - trend.error),
    )


def _quantile(ordered: list[float], share: float) -> float:
    """As NumPy does it: on the line between the two nearest."""
    at = share * (len(ordered) - 1)
    i = int(at)
    if i + 1 == len(ordered):
        return ordered[-1]
    return ordered[i] + (at - i) * (ordered[i + 1] - ordered[i])
