"""What grew in a record, and since when: memtools.LeakDetector over the record's own series.

Only the steps that were made are judged: what was loaded before the first step is no growth of
theirs. Where a signal has too few readings for the detector, a line through its floor says what is
known all the same: memory rose so much a step over so many steps (a `Rise`), which may be a leak or
a warm-up.

    steps   0 0 0 0 0 | 1 2 3 4 ...          256 and more    detector: growing, likely, leak
              imports | the steps that count    fewer        rise: the longest straight end of the
                                                             floor, beyond all that was before it
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from memtools._base.size import format_bytes
from memtools._base.text import count, duration
from memtools.record.series import UNKNOWN, own_column

if TYPE_CHECKING:
    from memtools.leak.detector import LeakVerdict
    from memtools.record.series import Timeline

#: fewer readings than this are not judged
ENOUGH = 256
#: a line is laid through at most so many floors of the series' end, and at least so many
CELLS, LEAST = 32, 8
#: the share of the variance that such a line explains
STRAIGHT = 0.8
#: of one that is but a small part of the run: it is not to begin before the growth does
STRAIGHTER = 0.98
LEAST_GAIN = 2 * 2**20
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
    #: the container with a bound that is filling, where the run found that; else ""
    filling: str = ""
    #: resident memory grows by pages of files or shared memory, the process's own does not grow
    shared: bool = False

    def __str__(self) -> str:
        since = "" if self.since_seconds is None else f" since {duration(self.since_seconds)}"
        if self.per == "step" and self.since is not None:
            since = f" since step {self.since:,}"
        line = f"{self.kind}: +{format_bytes(self.rate_bytes)}/{self.per} in {self.signal}{since}"
        if self.shared:
            return f"{line}, by pages of files or shared memory: its own memory does not grow"
        if self.filling:
            return f"{line}, but no leak: a buffer fills, {self.filling}"
        return f"{line}{self.cost()}"

    def cost(self) -> str:
        """What it costs of resident memory, where that is clearly more; else ""."""
        if self.signal == "rss" or (self.rss_bytes or 0) < 1.5 * self.rate_bytes:
            return ""
        return f", costs {format_bytes(self.rss_bytes or 0)}/{self.per} of rss"

    def forecast(self) -> str | None:
        """When the limit is reached, as one clause; None where that is not known."""
        if self.left is None or self.seconds_left is None or math.isinf(self.left[0]):
            return None
        if self.left[1] < 1:
            return "the limit was reached"
        low, high = self.seconds_left
        most = "or more" if math.isinf(self.left[1]) else f"to {rounded(self.left[1])}"
        steps = f" ({rounded(self.left[0])} {most} steps)" if self.per == "step" else ""
        if math.isinf(high):
            return f"limit in {duration(low)} at the earliest{steps}"
        return f"limit in {duration(low)} to {duration(high)}{steps}"


def rounded(number: float) -> str:
    """Two digits, which is as much as a forecast knows."""
    if number < 100:
        return f"{number:,.0f}"
    unit: float = 10 ** (len(str(int(number))) - 2)
    return f"{math.floor(number / unit) * unit:,.0f}"


@dataclass(frozen=True)
class _Readings:
    """The floor of each step, or of each sample: what they count, and when each ended."""

    steps: list[int]
    seconds: list[float]
    values: dict[str, list[int]]
    tops: dict[str, list[int]]


class Judged(NamedTuple):
    """What a record's series say of growth.

    `growth`: of the host and of each device, without the quiet ones. `short`: why that, or a part
    of it, cannot be said; None where each signal had readings enough. `enough`: some signal of the
    host and of each device had. `rises`: what is known of signals that grow and were not judged, or
    were quiet until the last stretch of the run. `late`: how the process ended above all that it
    had before, which may be no growth; None where it did not. `step_seconds`: how long a step is in
    the newer half of the run; None where that is not known.
    """

    growth: list[Growth]
    short: str | None
    enough: bool
    rises: list[Rise]
    late: Late | None
    step_seconds: float | None


def judge(line: Timeline, limit_bytes: int | None, devices: list[int]) -> Judged:
    """Judge a record's own series. `limit_bytes`: what the process and its workers may take. Takes
    about 40 ms for the usual size."""
    made = _steps_made(line)
    counts = {step for step in line.most.get("step", ()) if step != UNKNOWN}
    by_step = made >= ENOUGH or (made == 0 and len(counts) >= ENOUGH)
    per = "step" if by_step or made else "s"
    columns_of = {**_HOST, "rss": own_column(line)}
    host = {signal: name for signal, name in columns_of.items() if line.known(name)}
    groups = [("", host, limit_bytes)]
    for i in devices:
        total = line.peak(f"cuda{i}_total")
        columns = {"device": f"cuda{i}_allocated"} if line.known(f"cuda{i}_allocated") else {}
        groups.append((f"cuda:{i}", columns, total[0] if total else None))
    growth: list[Growth] = []
    rises: list[Rise] = []
    few: list[str] = []
    enough, most = True, 0
    late = step_seconds = None
    for where, columns, limit in groups:
        readings = _readings(line, columns, by_step=per == "step")
        if per == "step" and len(readings.steps) >= LEAST:
            step_seconds = _pace(readings)
        most = max(most, len(readings.steps))
        quiet = True
        fed = {s: even(readings.steps, v) for s, v in readings.values.items()}
        if made == 0 or made >= ENOUGH:
            enough = enough and (not columns or any(fed.values()))
            if columns and any(fed.values()):
                judged = _judged(fed, readings, limit, per, where)
                quiet = judged.kind == "quiet"
                growth += [] if quiet or judged.rate_bytes <= 0 else [judged]
        else:
            enough = False
        few += [s for s, v in readings.values.items() if not fed[s] and _known(v) < CELLS]
        for signal, values in readings.values.items():
            rise = _rise(readings, values, where or signal, per)
            if rise is not None:
                rises.append(rise)
            if signal == "rss":
                late = _late(readings, values, per)
    growth = [_begun(_exact(one, rises), rises) for one in growth]
    growth = [replace(g, shared=g.signal == "rss" and _of_files(line, per)) for g in growth]
    rises = _beyond(rises, growth)
    short: str | None = f"too short to judge: {count(most, 'reading')}, {ENOUGH} are needed"
    if per == "step":
        short = f"too short to judge: {count(most, 'step')} with a reading, {ENOUGH} are needed"
    if enough and most:
        short = f"too few readings to judge: {' and '.join(few)}" if few else None
    return Judged(growth, short, enough and most > 0, rises, late, step_seconds)


def _known(values: list[int]) -> int:
    return sum(value != UNKNOWN for value in values)


def _exact(growth: Growth, rises: list[Rise]) -> Growth:
    """Resident memory grows several times faster than what is in use, or sleeps while it fills
    holes: where the heap was read too seldom for the test, its line has the better rate."""
    heap = next((rise for rise in rises if rise.signal == "heap"), None)
    if growth.signal != "rss" or heap is None or heap.per != growth.per:
        return growth
    kind = "growing" if growth.kind == "fragmentation" else growth.kind
    return replace(
        growth, kind=kind, signal="heap", rate_bytes=heap.rate_bytes, rss_bytes=growth.rate_bytes
    )


def _of_files(line: Timeline, per: str) -> bool:
    """Whether resident memory has risen and the private part of it has not."""
    if not line.known("private"):
        return False
    columns = {"rss": own_column(line), "private": "private"}
    readings = _readings(line, columns, by_step=per == "step")
    gains = {}
    for name, values in readings.values.items():
        known = [value for value in values if value != UNKNOWN]
        gains[name] = known[-1] - known[0] if known else 0
    return gains["private"] < gains["rss"] / 4


def _begun(growth: Growth, rises: list[Rise]) -> Growth:
    """The test says since when it has seen growth, which it could not before some hundred readings.
    Where the floor is a line, growth began with that."""
    line = next((r for r in rises if r.signal == growth.signal and r.per == growth.per), None)
    if line is None or growth.since_seconds is None or line.since_seconds > growth.since_seconds:
        return growth
    return replace(growth, since=line.since, since_seconds=line.since_seconds)


def _beyond(rises: list[Rise], growth: list[Growth]) -> list[Rise]:
    """Without those that the verdict tells already, and one of the process's own: the heap's where
    it was read often enough and explains half of what is resident, else that."""
    told = {one.signal for one in growth}
    of = {rise.signal: rise for rise in rises}
    heap, rss = of.get("heap"), of.get("rss")
    own = rss
    if heap and (not rss or (heap.readings >= 2 * LEAST and heap.rate_bytes >= rss.rate_bytes / 2)):
        own = heap
    if own is not None and rss is not None and rss.over > own.over:  # it is read more often
        own = replace(own, over=rss.over, since=rss.since, since_seconds=rss.since_seconds)
    if own is not None and told & {"heap", "rss"}:
        rate = max(one.rate_bytes for one in growth if one.signal in ("heap", "rss"))
        own = own if own.rate_bytes > 4 * rate else None
    costs = max((one.rss_bytes or 0.0 for one in growth), default=0.0)
    if own is not None and own.signal == "rss" and costs >= own.rate_bytes / 2:
        own = None  # it is what the growth of another signal costs
    others = [r for r in rises if r.signal not in ("heap", "rss") and r.signal not in told]
    return ([own] if own else []) + others


def _steps_made(line: Timeline) -> int:
    """How many different steps samples were taken in, without what was before the first."""
    return len({step for step in line.most.get("step", ()) if 0 < step < 2**62})


def _readings(line: Timeline, columns: dict[str, str], *, by_step: bool) -> _Readings:
    """The floor of each step, or of each sample. Where steps were made, they begin with the first:
    what a program loads before is none of theirs. Samples with the count of the last one were taken
    after it, when the next had not ended, or while the program let go of everything: left out."""
    steps: list[int] = []
    seconds: list[float] = []
    values: dict[str, list[int]] = {signal: [] for signal in columns}
    tops: dict[str, list[int]] = {signal: [] for signal in columns}
    between = by_step and _steps_made(line) > LEAST
    newest = max((s for s in line.most["step"] if s < 2**62), default=0) if between else 0
    taken = 0
    for i, samples in enumerate(line.counts):
        taken += samples
        step = line.most["step"][i] if by_step else taken
        if step == UNKNOWN or step >= 2**62 or (steps and step < steps[-1]):
            continue
        if between and step in (0, newest):
            continue
        if not steps or step > steps[-1]:
            steps.append(step)
            seconds.append(line.last_ns[i] / 1e9)
            for signal in values:
                values[signal].append(UNKNOWN)
                tops[signal].append(UNKNOWN)
        for signal, name in columns.items():
            values[signal][-1] = min(values[signal][-1], line.least[name][i])
            most = line.most[name][i]
            if most != UNKNOWN:
                top = tops[signal][-1]
                tops[signal][-1] = most if top == UNKNOWN else max(top, most)
    return _Readings(steps, seconds, values, tops)


# --- what is known without the test ---------------------------------------------------------------


@dataclass(frozen=True)
class Rise:
    """A signal that rose in a line to the end, too short for a verdict. `rate_bytes` per `per`
    ("step" or "s") over the last `over` of `of` of them, in so many `readings`, by `gain_bytes` in
    all."""

    signal: str
    per: str
    rate_bytes: float
    over: float
    gain_bytes: int
    since: int | None
    since_seconds: float
    readings: int
    of: float

    def __str__(self) -> str:
        whose = {"children": "the workers' memory", "heap": "memory", "rss": "memory"}
        name = whose.get(self.signal, f"memory of {self.signal}")
        rate = format_bytes(self.rate_bytes)
        if self.per == "step":
            return (
                f"{name} rose {rate} a step over the last {self.over:,.0f} steps"
                f"{self._why()} to tell a leak from a warm-up"
            )
        return (
            f"{name} rose {rate} a second over the last {duration(self.over)}: "
            "too short to tell a leak from a warm-up"
        )

    def _why(self) -> str:
        if self.over < ENOUGH:
            return ": too few"
        if self.readings < ENOUGH:
            return f", read {self.readings:,} times: too seldom"
        return (
            ", a small part of the run: too late" if self.over < self.of / 4 else ", too unevenly"
        )


def _rise(readings: _Readings, floors: list[int], signal: str, per: str) -> Rise | None:
    """The longest end of the series that is a straight line upwards, into memory that had not been
    in use before: a sawtooth comes back to where it was, a warm-up or a full buffer is flat at the
    end. None where there is none, and below 2 MiB or 1 % of what is in use. Ends of less than the
    last quarter are looked at more closely: of the last half, the last quarter and so on."""
    where = _places(readings, per)
    tops = readings.tops[signal if signal in readings.tops else "device"]
    known = _known_of(where, floors, tops)
    before, closer = 0, False
    rough: _End | None = None
    while len(known) >= (2 * LEAST if closer else LEAST):
        cells = _settled(_cells(known, CELLS))
        quarters = (len(cells) // 4, len(cells) // 2, len(cells) * 3 // 4)
        for begin in quarters if closer else (0, 1, *quarters):
            found = _end(cells, begin, before)
            if found is not None and (not closer or found.straight >= STRAIGHTER):
                return _rise_from(readings, where, signal, per, found)
            rough = rough or found
        middle = known[0][0] + (known[-1][0] - known[0][0]) / 2
        at = bisect_left(known, middle, key=lambda one: one[0])
        if at == 0:
            break
        before = max(before, *(top for _, _, top in known[:at]))
        known, closer = known[at:], True
    return rough and _rise_from(readings, where, signal, per, rough)


def _places(readings: _Readings, per: str) -> list[int]:
    """Where each reading lies: its step, or microseconds."""
    return readings.steps if per == "step" else [int(s * 1e6) for s in readings.seconds]


def _known_of(
    where: Sequence[int], floors: list[int], tops: list[int]
) -> list[tuple[int, int, int]]:
    each = zip(where, floors, tops, strict=True)
    return [(x, floor, top) for x, floor, top in each if floor != UNKNOWN]


class _End(NamedTuple):
    """An end of a series that is a line: where it begins, its slope, the share of the variance that
    it explains, and its gain."""

    first: float
    slope: float
    straight: float
    gain: float


def _end(cells: list[tuple[float, int, int]], begin: int, before: int) -> _End | None:
    """The cells from `begin` on, where they are such a line; up to `before` was in use earlier."""
    part = cells[begin:]
    if len(part) < LEAST:
        return None
    slope, straight = _line([(x, floor) for x, floor, _ in part])
    gain = slope * (part[-1][0] - part[0][0])
    late, _ = _line([(x, floor) for x, floor, _ in part[-max(LEAST // 2, len(part) // 3) :]])
    is_line = (
        straight >= STRAIGHT
        and late >= slope / 2
        and gain >= max(LEAST_GAIN, part[-1][1] / 100)
        and part[-1][1] > max((top for _, _, top in cells[:begin]), default=before)
        and part[-1][1] > before
    )
    return _End(part[0][0], slope, straight, gain) if is_line else None


def _rise_from(readings: _Readings, where: Sequence[int], signal: str, per: str, end: _End) -> Rise:
    start = int(end.first)
    at = min(bisect_left(where, start), len(where) - 1)
    unit = 1.0 if per == "step" else 1e-6
    floors = readings.values[signal if signal in readings.values else "device"]
    last = max(x for x, floor in zip(where, floors, strict=True) if floor != UNKNOWN)
    return Rise(
        signal,
        per,
        end.slope / unit,
        (last - end.first) * unit + (1 if per == "step" else 0),
        int(end.gain),
        start if per == "step" else None,
        readings.seconds[at],
        sum(floor != UNKNOWN for floor in floors[at:]),
        (last - where[0]) * unit,
    )


@dataclass(frozen=True)
class Late:
    """Memory that ended above all that it was in the first three quarters of a run, by `gain_bytes`
    in the `last` steps or seconds. It came too suddenly for a line, so that it may be anything."""

    gain_bytes: int
    last: str

    def __str__(self) -> str:
        gain = format_bytes(self.gain_bytes)
        return f"memory rose {gain} in the last {self.last} and had not been so high before"


def _late(readings: _Readings, floors: list[int], per: str) -> Late | None:
    """Without steps the last sample alone says nothing: it may be of a file that is written."""
    where = _places(readings, per)
    known = _known_of(where, floors, readings.tops["rss"])
    if len(known) < LEAST:
        return None
    quarter = known[0][0] + (known[-1][0] - known[0][0]) * 3 // 4
    before = max(top for x, _, top in known if x <= quarter)
    last = known[-1][1] if per == "step" else min(known[-1][1], known[-2][1])
    gain = last - before
    if gain < max(LEAST_GAIN, before / 100):
        return None
    since = next(x for x, floor, _ in reversed(known) if floor <= before)
    over = (known[-1][0] - since) / (1 if per == "step" else 1e6)
    return Late(gain, count(int(over), "step") if per == "step" else duration(over))


def _cells(known: list[tuple[int, int, int]], most: int) -> list[tuple[float, int, int]]:
    """(middle, floor, top) of at most so many spans of equal length; those without a reading are
    left out."""
    first, span = known[0][0], known[-1][0] - known[0][0] + 1
    found: dict[int, list[tuple[int, int, int]]] = {}
    for one in known:
        found.setdefault((one[0] - first) * most // span, []).append(one)
    return [
        (
            sum(x for x, _, _ in part) / len(part),
            min(f for _, f, _ in part),
            max(t for *_, t in part),
        )
        for _, part in sorted(found.items())
    ]


def _settled(cells: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Each floor with the next one, where that is lower: a cell may hold a single reading, and that
    be of a moment in which two copies of something were alive."""
    after = [*(floor for _, floor, _ in cells[1:]), cells[-1][1]]
    return [(x, min(floor, n), top) for (x, floor, top), n in zip(cells, after, strict=True)]


def _line(points: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """(slope, the share of the variance that the line explains), by least squares."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    if not xx or not yy:
        return 0.0, 0.0
    return xy / xx, xy * xy / (xx * yy)


# --- the test -------------------------------------------------------------------------------------


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


def _judged(
    fed: dict[str, list[tuple[int, int]]],
    readings: _Readings,
    limit: int | None,
    per: str,
    where: str,
) -> Growth:
    from memtools.leak.detector import LeakDetector

    detector = LeakDetector(limit or None)
    for signal, points in fed.items():
        for step, floor in points:
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
