"""In how many steps a growing series reaches a limit, as an interval.

    a LeakDetector: one series, the line of its floor or of its newest readings ──► steps_left
    a run: what is in use, and what the limit counts, at its looks ───────────────► joint_of

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
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from memtools._leak.drift import Drift
from memtools._leak.floor import Floor, Windows, straight
from memtools._leak.growth import slope_of
from memtools._leak.judge import THRESHOLDS

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


# --- a run ----------------------------------------------------------------------------------------

#: The width of the interval about a rate, after at least so many steps of growth.
_WIDTHS = ((192, 1.35), (64, 1.6), (0, 1.9))
WIDEST = 4.0  # When the limit comes is not known yet if the most steps are more times the fewest.
SEEN = 20.0  # What is not in use goes on for at most so many times as many steps as it was seen to.


class Course(NamedTuple):
    """How a series may go on to grow."""

    #: bytes a step, the fewest and the most
    least: float
    most: float
    #: by how many bytes these rise with each step, 0 by default
    rising: float = 0.0
    #: in how many steps that was seen, 0 by default
    steps: float = 0
    #: bytes that come at once at most, 0 by default
    jump: float = 0.0

    def without(self, ends: float) -> Course:
        """The same without so many bytes a step, which end by themselves."""
        return self._replace(least=self.least - ends, most=self.most - ends)


class Joint(NamedTuple):
    """Bytes a step by which all that a limit counts grows, and the fewest and the most steps until
    that limit; infinite where it is not reached."""

    rate: float = 0.0
    fewest: float = math.inf
    most: float = math.inf

    @property
    def left(self) -> tuple[float, float] | None:
        """The fewest and the most steps; None without a limit, and where they are not known yet."""
        is_known = math.isfinite(self.fewest) and self.most <= WIDEST * self.fewest
        return (self.fewest, self.most) if is_known else None


def course_of(
    points: Sequence[tuple[int, float]],
    room: float,
    earlier: Sequence[tuple[int, float]] = (),
) -> Course:
    """How a series goes on: as in its newer half, or by as much faster or slower once more as that
    half was than the older one; in a shorter time than both halves took it changes by less. The
    number of jumps that came meanwhile may be one more or one less.

    Args:
        points: steps and bytes, at least two.
        room: bytes that are left.
        earlier: those before, when it grew at another rate, none by default. Unless the points
            cover as many steps as are left, it may return to the rate of all of them.
    """
    steps = points[-1][0] - points[0][0]
    middle = max(1, sum(1 for step, _ in points if step - points[0][0] <= steps / 2) - 1)
    then, now = slope_of(points[: middle + 1]), slope_of(points[middle:])
    if now <= 0:
        course = Course(0.0, 0.0, steps=steps)
    elif then <= 0:
        course = Course(0.0, math.inf, steps=steps)
    else:
        changed = (now / then) ** min(1.0, room / now / steps + 0.5)
        jump = max((b - a) - now * (t - s) for (s, a), (t, b) in pairwise(points))
        least, most = now * min(1.0, changed) - jump / steps, now * max(1.0, changed) + jump / steps
        course = Course(max(0.0, least), most, steps=steps, jump=jump)
    if not earlier or room <= steps * course.least:
        return course
    whole = max(0.0, slope_of([*earlier, *points]))
    return course._replace(
        least=min(course.least, whole),
        most=max(course.most, whole),
        steps=points[-1][0] - earlier[0][0],
    )


def joint_of(
    room: int | None,
    sure: Course,
    seen: Course | None = None,
    *,
    idle: int = 0,
    filling: tuple[float, float] = (0.0, math.inf),
) -> Joint:
    """In how many steps a limit is reached.

    What is in use becomes resident, at the latest when it has taken what malloc keeps: the limit
    is not farther away than that. What the limit counts besides, such as freed memory and what
    libraries allocate as they warm up, may end. So the fewest steps expect it to go on as soon as
    it is seen, and the most only where the limit is not much farther away than it went on before.
    Where memory comes in jumps, the limit is met one jump earlier or later.

    Args:
        room: bytes that are left; None if that is not known.
        sure: how what is in use grows.
        seen: how what the limit counts grows; None, the default, where that is not read.
        idle: freed bytes that malloc keeps, 0 by default.
        filling: bytes a step, out of these rates, that end by themselves, and after how many bytes.
    """
    if room is None:
        return Joint(sure.least)
    room = max(0, room)
    fast, slow, most_room = [sure], sure, room
    if seen is not None and seen.least < THRESHOLDS.slows * sure.least:
        most_room += idle
    if seen is not None and (seen.most - sure.least) * seen.steps >= 2 * THRESHOLDS.least_gain:
        fast = [sure, seen]
        if room <= SEEN * (seen.least - sure.least) * seen.steps:
            slow, most_room = seen, room
    width, (ends, fills) = width_of(max(sure.steps, slow.steps)), filling
    jump = 0.0 if seen is None else min(seen.jump, room)
    fewest = min(
        _until(room - jump, width * one.most, width * ends, fills, width * one.rising)
        for one in fast
    )
    most = _until(most_room + jump, slow.least / width, ends / width, fills, slow.rising / width)
    return Joint(slow.least, fewest, most)


def _until(room: float, rate: float, ends: float, fills: float, rising: float) -> float:
    """Steps until the room is gone. Of the rate, `ends` bytes a step come until they are `fills`
    bytes."""
    if rate <= 0:
        return math.inf
    if math.isinf(rate):
        return 0.0
    soon = 2 * room / (rate + math.sqrt(rate**2 + 2 * rising * room))
    if ends <= 0 or soon * ends <= fills:
        return soon
    return (room - fills) / (rate - ends) if rate > ends else math.inf


def width_of(steps: float) -> float:
    """The width of the interval about a rate after so many steps: the true rate lies between the
    rate divided by the width and the rate times the width."""
    return next((width for least, width in _WIDTHS if steps >= least), _WIDTHS[-1][1])
