"""The readings of a record as one table of cells, which becomes shorter without losing a peak.

    buckets   [ 512 samples | 512 samples | ...     ]      the whole run
    samples                           [ s s s s s s ]      the newest, one by one
    cells     [ bucket | bucket | ... | s s s s s s ]      minimum and maximum of every column

A cell is an interval of time with the minimum and the maximum of each column. Cells are merged by
the minimum of their minima and the maximum of their maxima, so no peak and no floor is lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from memtools._record.record import UNKNOWN

if TYPE_CHECKING:
    from memtools._record.record import Record

#: A record of the usual size, with 1,024 buckets and 8,192 samples, is not shortened.
CELLS = 10_240
#: The time of a step is the median of its mean time in so many intervals of the run.
INTERVALS = 31

Numbers = Sequence[int]


@dataclass(frozen=True)
class Timeline:
    """Cells in the order of time. `first_ns` and `last_ns` count from the start of the run. A value
    of `UNKNOWN` is not a reading."""

    first_ns: list[int]
    last_ns: list[int]
    counts: list[int]
    least: dict[str, list[int]]
    most: dict[str, list[int]]
    #: the newest reading of each column that has one: a cell has only its minimum and maximum
    newest: dict[str, int]

    def __len__(self) -> int:
        return len(self.counts)

    def known(self, name: str) -> bool:
        """True if the column exists and has a reading."""
        return any(value != UNKNOWN for value in self.least.get(name, ()))

    def peak(self, name: str) -> tuple[int, int] | None:
        """The largest reading of a column and the time of its cell in ns; None without a
        reading."""
        values = self.most.get(name, [])
        top = _most(values) if values else UNKNOWN
        return None if top == UNKNOWN else (top, self.first_ns[values.index(top)])

    def last(self, name: str) -> int | None:
        """The newest reading of a column; None without a reading."""
        return self.newest.get(name)

    def first(self, name: str) -> int | None:
        """The oldest reading of a column, which is the minimum of its cell."""
        return next((value for value in self.least[name] if value != UNKNOWN), None)


def timeline(record: Record, cells: int = CELLS) -> Timeline:
    """All readings of a record in at most `cells` cells, with the newest samples as fine as
    fits."""
    samples, buckets = record.samples, record.buckets
    used = whole_buckets(record)
    used += used < len(buckets) and sum(buckets.counts[:used]) < _first(record)
    room = max(cells // 2, cells - used)
    names = [column.name for column in record.columns]
    old = _reduce(
        buckets.first_ns[:used],
        buckets.last_ns[:used],
        buckets.counts[:used],
        {name: buckets.least[name][:used] for name in names},
        {name: buckets.most[name][:used] for name in names},
        cells - room,
    )
    new = _reduce(samples.time_ns, samples.time_ns, None, samples.values, samples.values, room)
    return _of_one_group(_from_start(_joined(old, new), record.clock_ns))


def _of_one_group(line: Timeline) -> Timeline:
    """Leave out what the control group used before it had the limit that it has now, or a lower
    one: a program that moves itself into a group of its own has left another one, with all that
    others used there."""
    limits, now = line.most.get("cgroup_limit", ()), line.last("cgroup_limit")
    begin = 0
    for i, limit in enumerate(reversed(limits) if now is not None else ()):
        if now is not None and now < limit != UNKNOWN:
            break
        begin = begin if limit == UNKNOWN else len(limits) - 1 - i
    for readings in (line.least, line.most) if begin else ():
        used = readings.get("cgroup_used", ())
        readings["cgroup_used"] = [UNKNOWN] * begin + list(used[begin:])
    return line


def median_step_seconds(line: Timeline) -> float | None:
    """The median time of a step in seconds, over intervals of the run with as many steps each, or
    over single steps if there are few. A first step that compiles, an evaluation or a pause does
    not move it, and samples that are further apart than steps do not round it. None below three
    steps.
    """
    made = _steps_made(line)
    if len(made) < 3:
        return None
    interval = max(1.0, (made[-1][0] - made[0][0]) / INTERVALS)
    seconds = []
    begin, begin_ns = made[0]
    for step, time_ns in made[1:]:
        if step - begin >= interval:
            seconds.append((time_ns - begin_ns) / 1e9 / (step - begin))
            begin, begin_ns = step, time_ns
    return median(seconds)


def _steps_made(line: Timeline) -> list[tuple[int, int]]:
    """Counts of steps with the time in ns at which each was seen first. What was before the first
    step, such as the imports of a program, is left out."""
    found: list[tuple[int, int]] = []
    for step, time_ns in zip(line.most.get("step", ()), line.last_ns, strict=False):
        if 0 < step < UNKNOWN and (not found or step > found[-1][0]):
            found.append((step, time_ns))
    return found


def own_column(line: Timeline) -> str:
    """The column of what the process itself uses: "process", which counts each page once (a KV pool
    maps pages several times), or "rss" if the record does not have that."""
    return "process" if line.known("process") else "rss"


def series(line: Timeline, values: Numbers, cells: int) -> list[int]:
    """The largest reading in each of at most `cells` intervals of equal length. Intervals without a
    reading are left out."""
    ends = cuts(line.first_ns, cells)
    spans = list(zip([0, *ends], ends, strict=False))
    return [most for most in _each(values, spans, _most) if most != UNKNOWN]


def whole_buckets(record: Record) -> int:
    """How many buckets end before the first single sample. The next one may overlap with
    samples."""
    end = used = 0
    for count in record.buckets.counts:
        end += count
        if end > _first(record):
            break
        used += 1
    return used


def _first(record: Record) -> int:
    """The number of the first single sample."""
    return record.samples.numbers[0] if len(record.samples) else record.total


def _reduce(
    first_ns: Numbers,
    last_ns: Numbers,
    counts: Numbers | None,
    least: dict[str, Numbers] | dict[str, memoryview] | dict[str, list[int]],
    most: dict[str, Numbers] | dict[str, memoryview] | dict[str, list[int]],
    cells: int,
) -> Timeline:
    ends = cuts(first_ns, cells)
    begins = [0, *ends][: len(ends)]
    spans = list(zip(begins, ends, strict=True))
    return Timeline(
        [first_ns[a] for a, _ in spans],
        [last_ns[b - 1] for _, b in spans],
        [b - a if counts is None else sum(counts[a:b]) for a, b in spans],
        {name: _each(values, spans, min) for name, values in least.items()},
        {name: _each(values, spans, _most) for name, values in most.items()},
        {name: value for name, values in most.items() if (value := _newest(values)) != UNKNOWN},
    )


def _newest(values: Numbers | memoryview) -> int:
    return next((value for value in reversed(values) if value != UNKNOWN), UNKNOWN)


def _each(
    values: Numbers, spans: list[tuple[int, int]], pick: Callable[[Iterable[int]], int]
) -> list[int]:
    """Apply `pick` to each span. Unpacking a memoryview's slice is twice as fast as its items."""
    if len(spans) == len(values):  # each span is a single reading
        return list(values)
    if isinstance(values, memoryview):
        return [pick(values[a:b].tolist()) for a, b in spans]
    return [pick(values[a:b]) for a, b in spans]


def _most(values: Iterable[int]) -> int:
    top = max(values)
    if top != UNKNOWN:
        return top
    return max((value for value in values if value != UNKNOWN), default=UNKNOWN)


def cuts(times: Numbers, cells: int) -> list[int]:
    """Return where each of at most `cells` ranges of indices ends. The ranges cover all indices,
    and take intervals of time that are as equal as possible. If times are out of order, the
    intervals are uneven, and nothing is lost.
    """
    count = len(times)
    if count <= cells:
        return list(range(1, count + 1))
    start, end = times[0], times[count - 1]
    found: list[int] = []
    at = 0
    for cell in range(1, cells):
        at = bisect_left(times, start + max(0, end - start) * cell // cells, at, count)
        if at > (found[-1] if found else 0):
            found.append(at)
    if not found or found[-1] < count:
        found.append(count)
    return found


def _joined(old: Timeline, new: Timeline) -> Timeline:
    if len(old) and len(new):  # the last bucket may reach into the samples: its time ends there
        old.last_ns[-1] = max(old.first_ns[-1], min(old.last_ns[-1], new.first_ns[0]))
    return Timeline(
        old.first_ns + new.first_ns,
        old.last_ns + new.last_ns,
        old.counts + new.counts,
        {name: old.least[name] + new.least[name] for name in new.least},
        {name: old.most[name] + new.most[name] for name in new.most},
        old.newest | new.newest,
    )


def _from_start(line: Timeline, clock_ns: int) -> Timeline:
    """Make times count from the start and never go back, also in a damaged record."""
    latest = 0
    for i, (first, last) in enumerate(zip(line.first_ns, line.last_ns, strict=True)):
        line.first_ns[i] = latest = max(latest, first - clock_ns)
        line.last_ns[i] = latest = max(latest, last - clock_ns)
    return line
