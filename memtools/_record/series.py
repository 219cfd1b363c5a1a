"""A record's readings as one table of cells, and how it becomes shorter without losing a peak.

    buckets   [ 512 samples | 512 samples | ...     ]      the whole run
    samples                           [ s s s s s s ]      the newest, one by one
    cells     [ bucket | bucket | ... | s s s s s s ]      least and most of every column

A cell is a span of time with the least and the most of each column. Making cells of cells takes the
least of the least and the most of the most: whatever the length, no peak and no floor is lost.
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

#: a record of the usual size, 1,024 buckets and 8,192 samples, is taken as it is
CELLS = 10_240
#: of the steps of a run: the time of a step is the median of theirs
STRETCHES = 31

Numbers = Sequence[int]


@dataclass(frozen=True)
class Timeline:
    """Cells in the order of time. `first_ns` and `last_ns` count from the start of the run; a value
    of `UNKNOWN` is no reading."""

    first_ns: list[int]
    last_ns: list[int]
    counts: list[int]
    least: dict[str, list[int]]
    most: dict[str, list[int]]
    #: the newest reading of each column that has one: a cell only knows its least and most
    newest: dict[str, int]

    def __len__(self) -> int:
        return len(self.counts)

    def known(self, name: str) -> bool:
        """True when the column exists and has a reading."""
        return any(value != UNKNOWN for value in self.least.get(name, ()))

    def peak(self, name: str) -> tuple[int, int] | None:
        """The largest reading of a column and the time of its cell in ns; None without one."""
        values = self.most.get(name, [])
        top = _most(values) if values else UNKNOWN
        return None if top == UNKNOWN else (top, self.first_ns[values.index(top)])

    def last(self, name: str) -> int | None:
        """The newest reading of a column; None without one."""
        return self.newest.get(name)

    def first(self, name: str) -> int | None:
        """The oldest reading of a column: the least of its cell."""
        return next((value for value in self.least[name] if value != UNKNOWN), None)


def timeline(record: Record, cells: int = CELLS) -> Timeline:
    """All readings of a record in at most `cells` cells, the newest samples as finely as fits."""
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
    return _from_start(_joined(old, new), record.clock_ns)


def median_step_seconds(line: Timeline) -> float | None:
    """The median time of a step in seconds: of stretches of the run with as many steps each, and of
    single steps where there are few. A first step that compiles, an evaluation or a pause does not
    move it, and samples that are further apart than steps do not round it. None below three steps.
    """
    made = _steps_made(line)
    if len(made) < 3:
        return None
    stretch = max(1.0, (made[-1][0] - made[0][0]) / STRETCHES)
    seconds = []
    begin, begin_ns = made[0]
    for step, time_ns in made[1:]:
        if step - begin >= stretch:
            seconds.append((time_ns - begin_ns) / 1e9 / (step - begin))
            begin, begin_ns = step, time_ns
    return median(seconds)


def _steps_made(line: Timeline) -> list[tuple[int, int]]:
    """Counts of steps with the time at which each was seen first, in ns; without what was before
    the first step, such as the imports of a program."""
    found: list[tuple[int, int]] = []
    for step, time_ns in zip(line.most.get("step", ()), line.last_ns, strict=False):
        if 0 < step < UNKNOWN and (not found or step > found[-1][0]):
            found.append((step, time_ns))
    return found


def own_column(line: Timeline) -> str:
    """What the process itself uses: each page counted once where the record has that (a KV pool
    maps pages several times), else resident memory."""
    return "process" if line.known("process") else "rss"


def series(line: Timeline, values: Numbers, cells: int) -> list[int]:
    """The largest reading in each of at most `cells` spans of equal time; spans without one are
    left out."""
    ends = cuts(line.first_ns, cells)
    spans = list(zip([0, *ends], ends, strict=False))
    return [most for most in _each(values, spans, _most) if most != UNKNOWN]


def whole_buckets(record: Record) -> int:
    """How many buckets end before the first single sample; the next may overlap with them."""
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
    """`pick` of each span. A memoryview's slice is unpacked at once: twice as fast as its items."""
    if len(spans) == len(values):  # each is a single reading
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
    """Where each of at most `cells` runs of indices ends; runs cover all indices and take spans of
    time as equal as can be. Also for times out of order: then the spans are odd, nothing is lost.
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
    """Times since the start that never go back, also where a damaged record says otherwise."""
    latest = 0
    for i, (first, last) in enumerate(zip(line.first_ns, line.last_ns, strict=True)):
        line.first_ns[i] = latest = max(latest, first - clock_ns)
        line.last_ns[i] = latest = max(latest, last - clock_ns)
    return line
