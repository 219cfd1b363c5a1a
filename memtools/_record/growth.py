"""What grew in a record, and since when: memtools.LeakDetector over the record's own series. Only
records whose writer did not judge them itself are judged here.

Only steps are judged: what was loaded before the first step is not growth. If a signal has too few
readings for the detector, a line through its floor shows how much memory rose a step, over how many
steps. That is a suspicion.

    steps   0 0 0 0 0 | 1 2 3 4 ...           256 or more    detector: growing, likely, leak
              imports | the steps that count        fewer    line: the longest straight end of the
                                                             floor, above all that was before it
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from memtools._base.size import format_bytes
from memtools._base.text import count, duration
from memtools._leak.growth import Kept, kept_pace, line_of, slope_of
from memtools._leak.judge import THRESHOLDS
from memtools._record.record import UNKNOWN
from memtools._record.series import own_column

if TYPE_CHECKING:
    from memtools._record.series import Timeline

#: A series is divided into so many intervals of equal length to judge it, and for its slope.
CELLS, SLOPE_CELLS = 32, 16
#: Resident memory is counted in pages.
PAGE = 4096
_HOST = {"heap": "heap_used", "children": "children_private", "shm": "shm", "rss": "rss"}


@dataclass(frozen=True)
class Growth:
    """A signal that grows.

    Attributes:
        per: "step", or "s" if the record has too few steps.
        rate_bytes: bytes a step or a second.
        since: the step at which the growth began; `since_seconds` is when that was.
        rss_bytes: bytes of resident memory that the growth costs, a step or a second.
        over: for how many steps or seconds it has grown, if a line shows it; 0 if the test does.
        readings: of how many readings that line is made.
        unwritten: bytes that malloc has given out at the end and that are not resident yet, if it
            is resident memory alone that grows: it is written for the first time.
    """

    grade: str
    signal: str
    per: str
    rate_bytes: float
    since: int | None
    since_seconds: float | None
    rss_bytes: float | None = None
    #: the device, if the signal is "device"
    device: str = ""
    #: whether resident memory grows by pages of files or shared memory alone
    shared: bool = False
    over: float = 0.0
    readings: int = 0
    unwritten: int = 0


@dataclass(frozen=True)
class _Readings:
    """The floor and the top of each signal at each step or sample, and when each ended."""

    steps: list[int]
    seconds: list[float]
    values: dict[str, list[int]]
    tops: dict[str, list[int]]


class Judged(NamedTuple):
    """What the series of a record show.

    Attributes:
        growth: the signals of the host and of each device that grow: by the test, then by a line,
            for signals that have too few readings or were quiet until the end of the run.
        short: why signals cannot be judged; None if each has enough readings.
        tested: whether a signal of the host and one of each device have enough.
        late: memory of the process that rose at the end above all that it had before; None if it
            did not. It need not be growth.
    """

    growth: list[Growth]
    short: str | None
    tested: bool
    late: Late | None


def judge(line: Timeline, devices: Sequence[int]) -> Judged:
    """Judge a record's own series. Takes about 40 ms for the usual size."""
    made = _steps_made(line)
    counts = {step for step in line.most.get("step", ()) if step != UNKNOWN}
    by_step = made >= THRESHOLDS.record_readings or (
        made == 0 and len(counts) >= THRESHOLDS.record_readings
    )
    per = "step" if by_step or made else "s"
    columns_of = {**_HOST, "rss": own_column(line)}
    host = {signal: name for signal, name in columns_of.items() if line.known(name)}
    groups = [("", host)]
    for i in devices:
        column = f"cuda{i}_allocated"
        groups.append((f"cuda:{i}", {"device": column} if line.known(column) else {}))
    growth: list[Growth] = []
    lines: list[Growth] = []
    few: list[str] = []
    fewer: list[str] = []
    tested, most = True, 0
    late: Late | None = None
    for device, columns in groups:
        readings = _readings(line, columns, by_step=per == "step")
        most = max(most, len(readings.steps))
        fed = {s: even(readings.steps, v) for s, v in readings.values.items()}
        if made == 0 or made >= THRESHOLDS.record_readings:
            if columns and not any(fed.values()):
                tested = False
                fewer.append(_best_known(readings, device))
            if columns and any(fed.values()):
                judged = _judged(fed, readings, per, device)
                quiet = judged.grade in ("early", "quiet") or judged.rate_bytes <= 0
                growth += [] if quiet else [judged]
        else:
            tested = False
        few += [
            s
            for s, v in readings.values.items()
            if not fed[s] and _known(v) < CELLS and _is_used(line, columns[s])
        ]
        for signal in columns:
            found = _line_of(readings, signal, per)
            lines += [] if found is None else [replace(found, device=device)]
        if "rss" in columns:
            late = _late(readings, readings.values["rss"], per)
    growth = [_begun(_exact(one, lines), lines) for one in growth]
    unit = "steps" if per == "step" else "readings"
    short: str | None = f"too early to say: {most:,} of {THRESHOLDS.record_readings} {unit}"
    if tested and most:
        short = f"too few readings to judge: {' and '.join(few)}" if few else None
    elif most >= THRESHOLDS.record_readings and fewer:
        short = f"too few readings to judge: {' and '.join(fewer)}"
    growth += _beyond(lines, growth)
    growth = [replace(g, shared=g.signal == "rss" and _of_files(line, per)) for g in growth]
    growth = [replace(g, unwritten=_unwritten(line, g)) for g in growth]
    return Judged(growth, short, tested and most > 0, late)


def late_of(line: Timeline) -> Late | None:
    """Memory that rose at the end above all that was before; None if it did not."""
    per = "step" if _steps_made(line) else "s"
    column = own_column(line)
    if not line.known(column):
        return None
    readings = _readings(line, {"rss": column}, by_step=per == "step")
    return _late(readings, readings.values["rss"], per)


@dataclass(frozen=True)
class Slope:
    """How fast the floor of a column rises over the newer half of the steps, in bytes a step. The
    true rate differs by at most `within_bytes` (2.5 standard errors)."""

    rate_bytes: float
    within_bytes: float


def slope(line: Timeline, column: str) -> Slope | None:
    """The slope of a column's floor; None if the newer half of the steps has fewer than 8 readings
    of it, or no steps were made.

    The older half is left out, because it has the warm-up. A series of memory wanders: it keeps
    most of what it was. So the error is that of a sum of independent rises, and a few jumps alone
    are not growth.
    """
    if not _steps_made(line) or not line.known(column):
        return None
    readings = _readings(line, {"": column}, by_step=True)
    known = _known_of(readings.steps, readings.values[""], readings.tops[""])
    if not known:
        return None
    middle = known[0][0] + (known[-1][0] - known[0][0]) // 2
    known = [one for one in known if one[0] >= middle]
    if len(known) < THRESHOLDS.line_readings:
        return None
    points = [(x, floor) for x, floor, _ in _without_spikes(_cells(known, SLOPE_CELLS))]
    if len(points) < THRESHOLDS.line_readings:
        return None
    rate = slope_of(points)
    span = points[-1][0] - points[0][0]
    wander = [
        (after - before - rate * (x - w)) ** 2 / (x - w)
        for (w, before), (x, after) in pairwise(points)
    ]
    error = math.sqrt(1.2 * sum(wander) / len(wander) / span)
    return Slope(rate, max(2.5 * error, PAGE / span))


def kept(line: Timeline, column: str) -> Kept | None:
    """How fast rises what a column never gives back, over the newer three quarters of the steps;
    None where it does not, or has too few readings to say."""
    if not _steps_made(line) or not line.known(column):
        return None
    readings = _readings(line, {"": column}, by_step=True)
    known = _known_of(readings.steps, readings.values[""], readings.tops[""])
    quarter = known[0][0] + (known[-1][0] - known[0][0]) // 4 if known else 0
    points = [(step, floor) for step, floor, _ in known if step >= quarter]
    return kept_pace(points, THRESHOLDS.even)


def step_seconds(line: Timeline) -> float | None:
    """How long a step takes in the newer half of the run; None if that is not known."""
    if not _steps_made(line):
        return None
    readings = _readings(line, {}, by_step=True)
    return _pace(readings) if len(readings.steps) >= THRESHOLDS.line_readings else None


def _is_used(line: Timeline, column: str) -> bool:
    """Whether there was any such memory: without child processes theirs cannot grow."""
    peak = line.peak(column)
    return peak is not None and peak[0] > 0


def _known(values: list[int]) -> int:
    return sum(value != UNKNOWN for value in values)


def _best_known(readings: _Readings, device: str) -> str:
    """The signal with the most readings, and their number."""
    known = {signal: _known(values) for signal, values in readings.values.items()}
    signal = max(known, key=known.__getitem__)
    where = f" of {device}" if device else ""
    return f"{signal}{where} has {known[signal]:,} of {THRESHOLDS.record_readings}"


def _exact(growth: Growth, lines: list[Growth]) -> Growth:
    """Resident memory grows several times faster than what is in use, or does not grow while malloc
    fills holes. So if the heap was not read often enough for the test, its line has the better
    rate."""
    heap = next((one for one in lines if one.signal == "heap"), None)
    if growth.signal != "rss" or heap is None or heap.per != growth.per:
        return growth
    grade = "growing" if growth.grade == "fragmentation" else growth.grade
    return replace(
        growth, grade=grade, signal="heap", rate_bytes=heap.rate_bytes, rss_bytes=growth.rate_bytes
    )


def _of_files(line: Timeline, per: str) -> bool:
    """Whether resident memory has risen without its private part."""
    if not line.known("private"):
        return False
    columns = {"rss": own_column(line), "private": "private"}
    readings = _readings(line, columns, by_step=per == "step")
    gains = {}
    for name, values in readings.values.items():
        known = [value for value in values if value != UNKNOWN]
        gains[name] = known[-1] - known[0] if known else 0
    return gains["private"] < gains["rss"] / 4


def _unwritten(line: Timeline, growth: Growth) -> int:
    """What malloc has given out and the program has not written yet when most is resident, where
    resident memory grows alone; 0 if that is little, or not known."""
    if growth.signal != "rss" or growth.shared or not line.known("heap_used"):
        return 0
    own = [-1 if size == UNKNOWN else size for size in line.most[own_column(line)]]
    at = own.index(max(own))
    heap = [size for size in line.most["heap_used"][: at + 1] if size != UNKNOWN]
    rest = heap[-1] - own[at] if heap else 0
    gain = own[at] - next(size for size in own if size >= 0)
    least = max(THRESHOLDS.least_gain, THRESHOLDS.explained * gain)
    return rest if rest >= least else 0  # Little of it may lie anywhere.


def _begun(growth: Growth, lines: list[Growth]) -> Growth:
    """The test sees growth only after some hundred readings. If the floor is a line, the growth
    began with the line."""
    same = (one for one in lines if (one.signal, one.device) == (growth.signal, growth.device))
    line = next((one for one in same if one.per == growth.per), None)
    if line is None or line.since_seconds is None or growth.since_seconds is None:
        return growth
    if line.since_seconds > growth.since_seconds:
        return growth
    return replace(growth, since=line.since, since_seconds=line.since_seconds)


def _beyond(lines: list[Growth], growth: list[Growth]) -> list[Growth]:
    """The lines whose signals the test does not report. Of the process's own signals at most one:
    the heap, if it was read often enough and explains half of resident memory, or else that."""
    reported = {(one.signal, one.device) for one in growth}
    of = {one.signal: one for one in lines}
    heap, rss = of.get("heap"), of.get("rss")
    own = rss
    if heap and (
        not rss
        or (heap.readings >= 2 * THRESHOLDS.line_readings and heap.rate_bytes >= rss.rate_bytes / 2)
    ):
        own = heap
    if own is not None and rss is not None and rss.over > own.over:  # it is read more often
        own = replace(own, over=rss.over, since=rss.since, since_seconds=rss.since_seconds)
    rates = [one.rate_bytes for one in growth if one.signal in ("heap", "rss")]
    if own is not None and rates:
        own = own if own.rate_bytes > 4 * max(rates) else None
    costs = max((one.rss_bytes or 0.0 for one in growth), default=0.0)
    if own is not None and own.signal == "rss" and costs >= own.rate_bytes / 2:
        own = None  # It is what the growth of another signal costs.
    others = [one for one in lines if one.signal not in ("heap", "rss")]
    others = [one for one in others if (one.signal, one.device) not in reported]
    return ([own] if own else []) + others


def _steps_made(line: Timeline) -> int:
    """In how many different steps samples were taken, without what was before the first step."""
    return len({step for step in line.most.get("step", ()) if 0 < step < 2**62})


def _readings(line: Timeline, columns: dict[str, str], *, by_step: bool) -> _Readings:
    """The floor of each step, or of each sample. What a program loads before its first step is left
    out. So are samples with the count of the last step: they were taken when the next one had not
    ended, or while the program freed everything."""
    steps: list[int] = []
    seconds: list[float] = []
    values: dict[str, list[int]] = {signal: [] for signal in columns}
    tops: dict[str, list[int]] = {signal: [] for signal in columns}
    between = by_step and _steps_made(line) > THRESHOLDS.line_readings
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


# --- lines ----------------------------------------------------------------------------------------


def _line_of(readings: _Readings, signal: str, per: str) -> Growth | None:
    """The longest end of the series that is a straight line upwards, into memory that was not in
    use before: a sawtooth comes back to where it was, and a warm-up or a full buffer is flat at the
    end. None if there is no such end, or it gains less than 2 MiB or 1 % of what is in use. Ends
    shorter than the last quarter are divided into finer cells: the last half, the last quarter and
    so on."""
    where = _places(readings, per)
    known = _known_of(where, readings.values[signal], readings.tops[signal])
    before, closer = 0, False
    rough: _End | None = None
    while len(known) >= (2 * THRESHOLDS.line_readings if closer else THRESHOLDS.line_readings):
        cells = _without_spikes(_cells(known, CELLS))
        quarters = (len(cells) // 4, len(cells) // 2, len(cells) * 3 // 4)
        for begin in quarters if closer else (0, 1, *quarters):
            found = _end(cells, begin, before)
            if found is not None and (not closer or found.straight >= THRESHOLDS.straight_end):
                return _grown(readings, where, signal, per, found)
            rough = rough or found
        middle = known[0][0] + (known[-1][0] - known[0][0]) / 2
        at = bisect_left(known, middle, key=lambda one: one[0])
        if at == 0:
            break
        before = max(before, *(top for _, _, top in known[:at]))
        known, closer = known[at:], True
    return rough and _grown(readings, where, signal, per, rough)


def _places(readings: _Readings, per: str) -> list[int]:
    """The position of each reading: its step, or its time in microseconds."""
    return readings.steps if per == "step" else [int(s * 1e6) for s in readings.seconds]


def _known_of(
    where: Sequence[int], floors: list[int], tops: list[int]
) -> list[tuple[int, int, int]]:
    each = zip(where, floors, tops, strict=True)
    return [(x, floor, top) for x, floor, top in each if floor != UNKNOWN]


class _End(NamedTuple):
    """The end of a series that is a line: where it begins, its slope, and the share of the variance
    that it explains."""

    first: float
    slope: float
    straight: float


def _end(cells: list[tuple[float, int, int]], begin: int, before: int) -> _End | None:
    """The cells from `begin` on if they are such a line. Up to `before` was in use earlier."""
    part = cells[begin:]
    if len(part) < THRESHOLDS.line_readings:
        return None
    line = line_of([(x, floor) for x, floor, _ in part])
    slope, straight = line.slope, line.straight
    gain = slope * (part[-1][0] - part[0][0])
    newest = part[-max(THRESHOLDS.line_readings // 2, len(part) // 3) :]
    late = slope_of([(x, floor) for x, floor, _ in newest])
    is_line = (
        straight >= THRESHOLDS.straight
        and late >= slope / 2
        and gain >= max(THRESHOLDS.least_gain, THRESHOLDS.least_gain_share * part[-1][1])
        and part[-1][1] > max((top for _, _, top in cells[:begin]), default=before)
        and part[-1][1] > before
    )
    return _End(part[0][0], slope, straight) if is_line else None


def _grown(readings: _Readings, where: Sequence[int], signal: str, per: str, end: _End) -> Growth:
    start = int(end.first)
    at = min(bisect_left(where, start), len(where) - 1)
    unit = 1.0 if per == "step" else 1e-6
    floors = readings.values[signal]
    last = max(x for x, floor in zip(where, floors, strict=True) if floor != UNKNOWN)
    return Growth(
        "suspect",
        signal,
        per,
        end.slope / unit,
        start if per == "step" else None,
        readings.seconds[at],
        over=(last - end.first) * unit + (1 if per == "step" else 0),
        readings=sum(floor != UNKNOWN for floor in floors[at:]),
    )


@dataclass(frozen=True)
class Late:
    """Memory that ended above all that it was in the first three quarters of a run, by `gain_bytes`
    in the `last` steps or seconds. It came too suddenly for a line."""

    gain_bytes: int
    last: str

    def __str__(self) -> str:
        gain = format_bytes(self.gain_bytes)
        return f"memory rose {gain} in the last {self.last} and had not been so high before"


def _late(readings: _Readings, floors: list[int], per: str) -> Late | None:
    """Without steps the last sample alone does not count: a file may be being written."""
    where = _places(readings, per)
    known = _known_of(where, floors, readings.tops["rss"])
    if len(known) < THRESHOLDS.line_readings:
        return None
    quarter = known[0][0] + (known[-1][0] - known[0][0]) * 3 // 4
    before = max(top for x, _, top in known if x <= quarter)
    last = known[-1][1] if per == "step" else min(known[-1][1], known[-2][1])
    gain = last - before
    if gain < max(THRESHOLDS.least_gain, THRESHOLDS.least_gain_share * before):
        return None
    since = next(x for x, floor, _ in reversed(known) if floor <= before)
    over = (known[-1][0] - since) / (1 if per == "step" else 1e6)
    return Late(gain, count(int(over), "step") if per == "step" else duration(over))


def _cells(known: list[tuple[int, int, int]], most: int) -> list[tuple[float, int, int]]:
    """(middle, floor, top) of at most so many intervals of equal length. Those without a reading
    are left out."""
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


def _without_spikes(cells: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """Lower each floor to the next one: a cell may hold a single reading, of a moment in which two
    copies of something were alive."""
    after = [*(floor for _, floor, _ in cells[1:]), cells[-1][1]]
    return [(x, min(floor, n), top) for (x, floor, top), n in zip(cells, after, strict=True)]


# --- the test -------------------------------------------------------------------------------------


def even(steps: list[int], values: list[int]) -> list[tuple[int, int]]:
    """(step, floor) at equal distances, as the detector expects: a record has more readings where
    steps are slow, and many more at its end. As many points as leave few gaps, which are filled by
    a straight line; empty if there are too few readings."""
    known = [(s, v) for s, v in zip(steps, values, strict=True) if v != UNKNOWN]
    if len(known) < THRESHOLDS.record_readings:
        return []
    cells = min(len(known), known[-1][0] - known[0][0] + 1)
    floors = _floors(known, cells)
    while cells > THRESHOLDS.record_readings and sum(floor is None for floor in floors) > cells / 5:
        cells = max(THRESHOLDS.record_readings, cells * 3 // 4)
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
    """Fill gaps by straight lines. The first and the last floor are not None."""
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
    per: str,
    device: str,
) -> Growth:
    from memtools._leak.detector import LeakDetector

    detector = LeakDetector()
    for signal, points in fed.items():
        for step, floor in points:
            detector.update(step, **{signal: floor})
    verdict = detector.verdict()
    unit = 1.0 if per == "step" else _pace(readings)  # seconds of a sample
    since, cost = verdict.since_step, verdict.rss_bytes_per_step
    at = None if since is None else bisect_left(readings.steps, since)
    return Growth(
        verdict.kind,
        verdict.signal or "",
        per,
        verdict.rate_bytes_per_step / unit,
        since if per == "step" else None,
        None if at is None else readings.seconds[min(at, len(readings.steps) - 1)],
        None if cost is None else cost / unit,
        device,
    )


def _pace(readings: _Readings) -> float:
    """Seconds a step over the newer half of the run, because runs start slowly."""
    half = len(readings.steps) // 2
    steps = readings.steps[-1] - readings.steps[half]
    return max(1e-9, (readings.seconds[-1] - readings.seconds[half]) / max(1, steps))
