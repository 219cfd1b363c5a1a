"""What grew in a record, and since when: memtools.LeakDetector over the record's own series."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memtools.report._timeline import UNKNOWN
from memtools.report._words import count, duration, size

if TYPE_CHECKING:
    from memtools._leaks import LeakVerdict
    from memtools.report._timeline import Timeline

#: fewer readings than this are not judged
ENOUGH = 256
_HOST = {"heap": "heap_used", "children": "children_private", "rss": "rss"}


@dataclass(frozen=True)
class Growth:
    """What one detector says of a record. Rates are bytes per `per`: "step", or "s" where the
    record has too few steps; `left` is in the same. `rss_bytes`: what the growth costs of resident
    memory. `seconds_left` is at the run's own pace.
    """

    kind: str
    signal: str
    per: str
    rate_bytes: float
    rss_bytes: float | None
    confidence: str
    since: int | None
    since_seconds: float | None
    left: tuple[float, float] | None
    seconds_left: tuple[float, float] | None

    def __str__(self) -> str:
        if self.kind == "quiet":
            return "quiet: nothing grows"
        since = "" if self.since_seconds is None else f" since {duration(self.since_seconds)}"
        if self.per == "step" and self.since is not None:
            since = f" since step {self.since:,}"
        line = f"{self.kind}: +{size(self.rate_bytes)}/{self.per} in {self.signal}{since}"
        return f"{line}{self.cost()}, confidence {self.confidence}"

    def cost(self) -> str:
        """What it costs of resident memory, where that is clearly more; else ""."""
        if self.signal == "rss" or (self.rss_bytes or 0) < 1.5 * self.rate_bytes:
            return ""
        return f", costs {size(self.rss_bytes or 0)}/{self.per} of rss"

    def forecast(self) -> str | None:
        """When the limit is reached, as one clause; None where that is not known."""
        if self.left is None or self.seconds_left is None or math.isinf(self.left[0]):
            return None
        if self.left[1] < 1:
            return "the limit was reached"
        low, high = self.seconds_left
        steps = f" ({_range(*self.left)} steps)" if self.per == "step" else ""
        if math.isinf(high):
            return f"limit in {duration(low)} at the earliest{steps}"
        return f"limit in {duration(low)} to {duration(high)}{steps}"


def _range(low: float, high: float) -> str:
    if math.isinf(high):
        return f"{low:,.0f} or more"
    return f"{low:,.0f} to {high:,.0f}"


@dataclass(frozen=True)
class _Readings:
    """The floor of each step, or of each sample: what they count, and when each ended."""

    steps: list[int]
    seconds: list[float]
    values: dict[str, list[int]]


def judge(
    line: Timeline, limit_bytes: int | None, devices: list[int]
) -> tuple[list[Growth], str | None]:
    """(what grows on the host and on each device, or why that cannot be said). The quiet ones are
    left out. Takes about 30 ms for the usual size."""
    per = "step" if _distinct(line.most.get("step", [])) >= ENOUGH else "s"
    host = {signal: name for signal, name in _HOST.items() if line.known(name)}
    groups = [("", host, limit_bytes)]
    for i in devices:
        total = line.peak(f"cuda{i}_total") if f"cuda{i}_total" in line.most else None
        columns = {"device": f"cuda{i}_allocated"} if line.known(f"cuda{i}_allocated") else {}
        groups.append((f"cuda:{i}", columns, total[0] if total else None))
    found, most = [], 0
    for where, columns, limit in groups:
        readings = _readings(line, columns, by_step=per == "step")
        most = max(most, len(readings.steps))
        if len(readings.steps) >= ENOUGH and columns:
            found.append(_judged(readings, limit, per, where))
    if not found:
        return [], f"too short to judge: {count(most, 'reading')}, {ENOUGH} are needed"
    return [growth for growth in found if growth.kind != "quiet"], None


def _distinct(steps: list[int]) -> int:
    return len({step for step in steps if step != UNKNOWN})


def _readings(line: Timeline, columns: dict[str, str], *, by_step: bool) -> _Readings:
    steps: list[int] = []
    seconds: list[float] = []
    values: dict[str, list[int]] = {signal: [] for signal in columns}
    taken = 0
    for i, samples in enumerate(line.counts):
        taken += samples
        step = line.most["step"][i] if by_step else taken
        if step == UNKNOWN or step >= 2**62 or (steps and step < steps[-1]):
            continue
        if not steps or step > steps[-1]:
            steps.append(step)
            seconds.append(line.last_ns[i] / 1e9)
            for signal in values:
                values[signal].append(UNKNOWN)
        for signal, name in columns.items():
            values[signal][-1] = min(values[signal][-1], line.least[name][i])
    return _Readings(steps, seconds, values)


def even(steps: list[int], values: list[int]) -> list[tuple[int, int]]:
    """(step, floor) at equal distances: the detector counts on that, and a record has more readings
    where steps are slow, and many more of its end. As many as leave few gaps, which are filled by
    a straight line; none where there are too few readings."""
    known = [(s, v) for s, v in zip(steps, values, strict=True) if v != UNKNOWN]
    if len(known) < ENOUGH or known[-1][0] - known[0][0] < ENOUGH:
        return []
    cells = min(len(known), known[-1][0] - known[0][0] + 1)
    floors = _floors(known, cells)
    while cells > ENOUGH and sum(floor is None for floor in floors) > cells / 5:
        cells = max(ENOUGH, cells * 3 // 4)
        floors = _floors(known, cells)
    first, span = known[0][0], known[-1][0] - known[0][0] + 1
    ends = [first + span * (i + 1) // cells - 1 for i in range(cells)]
    return list(zip(ends, _filled(floors), strict=True))


def _floors(known: list[tuple[int, int]], cells: int) -> list[int | None]:
    floors: list[int | None] = [None] * cells
    first, span = known[0][0], known[-1][0] - known[0][0] + 1
    for step, value in known:
        i = (step - first) * cells // span
        floor = floors[i]
        floors[i] = value if floor is None else min(floor, value)
    return floors


def _filled(floors: list[int | None]) -> list[int]:
    """pre: the first and the last are there, which hold the first and the last reading."""
    found: list[int] = []
    gap = 0
    for floor in floors:
        if floor is None:
            gap += 1
            continue
        before = found[-1] if found else floor
        found += [before + (floor - before) * k // (gap + 1) for k in range(1, gap + 1)]
        found.append(floor)
        gap = 0
    return found


def _judged(readings: _Readings, limit: int | None, per: str, where: str) -> Growth:
    from memtools._leaks import LeakDetector

    detector = LeakDetector(limit)
    for signal, values in readings.values.items():
        for step, floor in even(readings.steps, values):
            detector.update(step, **{signal: floor})
    return _growth(detector.verdict(), readings, per, where)


def _growth(verdict: LeakVerdict, readings: _Readings, per: str, where: str) -> Growth:
    pace = _pace(readings)  # seconds a step, or a sample
    unit = 1.0 if per == "step" else pace
    since, cost = verdict.since_step, verdict.rss_bytes_per_step
    at = None if since is None else bisect_left(readings.steps, since)
    left = verdict.steps_left
    rough = None if left is None else (left.lo, left.hi)
    return Growth(
        kind=verdict.kind,
        signal=where or verdict.signal or "none",
        per=per,
        rate_bytes=verdict.rate_bytes_per_step / unit,
        rss_bytes=None if cost is None else cost / unit,
        confidence=verdict.confidence,
        since=since if per == "step" else None,
        since_seconds=None if at is None else readings.seconds[min(at, len(readings.steps) - 1)],
        left=None if rough is None else (rough[0] * unit, rough[1] * unit),
        seconds_left=None if rough is None else (rough[0] * pace, rough[1] * pace),
    )


def _pace(readings: _Readings) -> float:
    """Seconds a step over the newer half of the run: it starts slowly."""
    half = len(readings.steps) // 2
    steps = readings.steps[-1] - readings.steps[half]
    return max(1e-9, (readings.seconds[-1] - readings.seconds[half]) / max(1, steps))
