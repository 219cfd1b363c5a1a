"""Record: the contents of a run.mem, which reader.py reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import IO

from memtools._base.size import format_bytes
from memtools._base.text import shown
from memtools._record import kinds

#: This value of a column means that there is no reading, or no step.
UNKNOWN = 2**64 - 1


@dataclass(frozen=True)
class Column:
    """A column of a record."""

    #: such as "rss"
    name: str
    #: "B" for bytes, "" for none
    unit: str


@dataclass(frozen=True)
class Samples:
    """The newest samples, as memoryviews of format "Q" and of one length."""

    #: indices in the run
    numbers: memoryview
    #: on the run's monotonic clock
    time_ns: memoryview
    #: readings by column; 2**64 - 1 for none
    values: dict[str, memoryview]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Buckets:
    """The whole run in buckets of `width` samples, oldest first.

    All but `width` are memoryviews of format "Q" and of one length. 2**64 - 1 means no reading.
    """

    #: samples in a bucket; the last may hold fewer
    width: int
    #: of each first sample
    first_ns: memoryview
    #: of each last sample
    last_ns: memoryview
    #: samples in each bucket
    counts: memoryview
    #: the smallest readings, by column
    least: dict[str, memoryview]
    #: the largest
    most: dict[str, memoryview]
    #: the last
    last: dict[str, memoryview]

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True)
class RecordEvent:
    """An event; one with a duration began at `time_ns`."""

    #: its index in the run
    number: int
    #: on the run's monotonic clock
    time_ns: int
    #: 0 if unknown
    duration_ns: int
    #: the step
    step: int | None
    #: such as "leak" or "end"
    kind: str
    #: a sentence or a name
    text: str
    #: the event's fields
    data: kinds.Event | None = None


@dataclass(frozen=True)
class RecordPhase:
    """All passages through one phase."""

    #: of the phase
    name: str
    #: passages
    count: int
    #: of all passages
    seconds: float
    #: the largest of resident memory
    peak_bytes: int | None


@dataclass(frozen=True)
class Record:
    """The contents of a `run.mem`.

    A record that is not `complete` is still being `written`, or its process was killed.
    """

    #: the file
    path: str
    #: its size
    nbytes: int
    #: the start of the run, since 1970
    start_ns: int
    #: the same on the run's monotonic clock, to which other times refer
    clock_ns: int
    #: when it was closed
    closed_ns: int | None
    #: whether a living process writes it
    written: bool
    #: the process that wrote it
    pid: int
    #: the size of a page
    page_bytes: int
    #: the command line
    command: tuple[str, ...]
    #: those of the samples
    columns: tuple[Column, ...]
    #: samples taken
    total: int
    #: damaged or half-written rows and events
    unreadable: int
    #: the newest, one by one
    samples: Samples = field(repr=False)
    #: the whole run
    buckets: Buckets = field(repr=False)
    #: the newest, oldest first
    events: tuple[RecordEvent, ...] = field(repr=False)
    #: events in the run
    events_total: int
    #: those of the run
    phases: tuple[RecordPhase, ...]
    #: newest events whose fields were overwritten
    events_gone: int = 0

    @property
    def complete(self) -> bool:
        """Whether the writer closed it."""
        return self.closed_ns is not None

    @property
    def seconds(self) -> float:
        """The duration of the run, up to the program's end, or the last sample or event without an
        end mark. What the interpreter does after the program's exit handlers does not count."""
        ended = [event.time_ns for event in self.events if event.kind == "end"]
        if ended:
            return max(0, ended[-1] - self.clock_ns) / 1e9
        ends = [self.clock_ns, self.closed_ns or 0]
        ends += [self.buckets.last_ns[-1]] if len(self.buckets) else []
        ends += [event.time_ns + event.duration_ns for event in self.events]
        return (max(ends) - self.clock_ns) / 1e9

    def to_jsonl(self, file: IO[str]) -> None:
        """Write JSON lines: a header, then each bucket, sample, event and phase.

        Args:
            file: a text file, open for writing.
        """
        from memtools._record import export

        export.to_jsonl(self, file)

    def to_chrome_trace(self, file: IO[str]) -> None:
        """Write a trace for Perfetto and chrome://tracing.

        Args:
            file: a text file, open for writing.
        """
        from memtools._record import export

        export.to_chrome_trace(self, file)

    def _repr_html_(self) -> str:
        """Return the picture of the record that a notebook shows. Takes some 50 ms."""
        from memtools._record.picture import picture_of

        return picture_of(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {format_bytes(self.nbytes)}, process {self.pid}, {_ending(self)}",
            f"  command  {' '.join(self.command)}",
            f"  {self.total:,} samples in {self.seconds:,.1f} s: the newest {len(self.samples):,} "
            f"one by one, all in {len(self.buckets):,} buckets of {self.buckets.width:,}",
        ]
        lines += [f"  {_column_line(self, column)}" for column in self.columns]
        lines += [f"  phase {_phase_line(phase)}" for phase in self.phases]
        if self.events_total:
            event = self.events[-1].text if self.events else "unreadable"
            lines.append(f"  {self.events_total:,} events, the last: {event}")
        return "\n".join(map(shown, lines))


def _ending(record: Record) -> str:
    if record.complete:
        return "complete"
    last = record.events[-1].data if record.events else None
    if isinstance(last, kinds.End):
        return f"cut off: {last.clause()}"
    return "being written" if record.written else "cut off: the process ended without closing it"


def _shown(value: int | None, unit: str) -> str:
    if value is None or value == UNKNOWN:
        return "no reading"
    if unit == "0.01%":
        return f"{value / 100:g} %"
    return format_bytes(value) if unit == "B" else f"{value:,} {unit}".rstrip()


def _column_line(record: Record, column: Column) -> str:
    most = [v for v in record.buckets.most[column.name] if v != UNKNOWN]
    last = [v for v in record.buckets.last[column.name] if v != UNKNOWN]
    if not most:
        return f"{column.name}: no reading"
    least = min(record.buckets.least[column.name])
    return (
        f"{column.name}: {_shown(least, column.unit)} to {_shown(max(most), column.unit)}, "
        f"last {_shown(last[-1], column.unit)}"
    )


def _phase_line(phase: RecordPhase) -> str:
    peak = f", peak {format_bytes(phase.peak_bytes)}" if phase.peak_bytes is not None else ""
    times = "1 time" if phase.count == 1 else f"{phase.count:,} times"
    return f"{phase.name}: {times}, {phase.seconds:,.3f} s{peak}"
