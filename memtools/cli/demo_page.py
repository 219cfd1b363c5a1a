"""The page of the demo: a report whose first part says and draws what happened in each rescue."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memtools._base.file import replace_file
from memtools._base.size import format_bytes
from memtools._base.text import duration, tight
from memtools.cli.demo_words import Outcome, sentences
from memtools.record.figures import figures_of, job_cells
from memtools.record.record import Record
from memtools.record.series import UNKNOWN, own_column

#: of the picture, in the units of its drawing; the page stretches it to its own width
WIDTH, HEIGHT = 1000, 180
#: room above the highest line
HEADROOM = 1.15
#: points of a line
POINTS = 400


@dataclass(frozen=True)
class Line:
    """One run: its points, and dashed how it goes on at its rate. Its number is the record's."""

    number: int
    points: str
    dashed: str = ""


@dataclass(frozen=True)
class Mark:
    """Where a run ends by memory: a share of the width in percent, and a height."""

    x: float
    y: float


@dataclass(frozen=True)
class Picture:
    """Memory over time of the runs of one rescue."""

    label: str
    width: int
    height: int
    lines: list[Line]
    marks: list[Mark]
    limit_y: float | None
    limit: str
    top: str
    end: str

    @property
    def dashed(self) -> bool:
        """Whether a line goes on where nothing was measured."""
        return any(line.dashed for line in self.lines)


@dataclass(frozen=True)
class Row:
    """One run in words. Its number is the record's; None where the run left no record."""

    number: int | None
    label: str
    text: str


@dataclass(frozen=True)
class Rescue:
    """What the page begins with, once for each rescue."""

    title: str
    intro: str
    rows: list[Row]
    picture: Picture


def rescue(
    title: str,
    intro: str,
    first: int,
    records: Sequence[Record | None],
    outcomes: Sequence[Outcome],
) -> Rescue:
    """One rescue in words and as a picture; `first` is the number of its first record. A run that
    left no record has a row, and no line in the picture."""
    numbers = itertools.count(first)
    rows = [
        Row(None if record is None else next(numbers), outcome.label, tight(sentences(outcome)))
        for record, outcome in zip(records, outcomes, strict=True)
    ]
    drawn = [
        (record, outcome)
        for record, outcome in zip(records, outcomes, strict=True)
        if record is not None
    ]
    picture_of = picture(title, first, [r for r, _ in drawn], [o for _, o in drawn])
    return Rescue(title, tight(intro), rows, picture_of)


def picture(
    title: str, first: int, records: Sequence[Record], outcomes: Sequence[Outcome]
) -> Picture:
    """Draw memory over time. What is extrapolated is dashed; a mark is where memory ends a run."""
    series = [
        _series(record, job=outcome.workers)
        for record, outcome in zip(records, outcomes, strict=True)
    ]
    enforced = any(outcome.enforced for outcome in outcomes)
    limit = None if enforced or not outcomes else outcomes[0].limit_bytes
    longest = max((points[-1][0] for points in series if points), default=0.0)
    ends = [o.reaches_after for o in outcomes if o.reaches_after is not None]
    seconds = max([longest, *ends]) or 1.0
    peaks = [outcome.peak_bytes for outcome in outcomes]
    most = max([*peaks, limit or 0])
    top = HEADROOM * most or 1.0

    def at(x: float, y: float) -> str:
        return f"{WIDTH * x / seconds:.1f},{HEIGHT * (1 - y / top):.1f}"

    def mark(x: float, y: float) -> Mark:
        return Mark(round(100 * x / seconds, 2), round(HEIGHT * (1 - y / top), 1))

    lines, marks = [], []
    for i, (points, outcome) in enumerate(zip(series, outcomes, strict=True)):
        if not points:
            continue
        dashed, after = "", outcome.reaches_after
        if after is not None and limit is not None and outcome.passed_after is None:
            highest = max(points, key=lambda point: (point[1], point[0]))  # what ends is freed
            dashed = f"{at(*highest)} {at(max(after, points[-1][0]), limit)}"
            marks.append(mark(max(after, points[-1][0]), limit))
        elif outcome.passed_after is not None and limit is not None:
            marks.append(mark(outcome.passed_after, limit))
        elif outcome.ended != "finished" and not outcome.failed:
            marks.append(mark(*points[-1]))
        lines.append(Line(first + i, " ".join(at(*point) for point in points), dashed))
    return Picture(
        label=f"{title}: memory over time",
        width=WIDTH,
        height=HEIGHT,
        lines=lines,
        marks=marks,
        limit_y=None if limit is None else round(HEIGHT * (1 - limit / top), 1),
        limit="" if limit is None else f"limit {format_bytes(limit)}",
        top=tight(format_bytes(most)),
        end=tight(duration(seconds)),
    )


def passed_after(record: Record, limit: int) -> float | None:
    """Seconds from the record's start until its use passed the limit; None if it never did."""
    return next((seconds for seconds, used in _series(record, points=0) if used > limit), None)


def generation_peak(record: Record) -> int | None:
    """The peak of the phase `generation`; None if the run had none."""
    found = [phase.peak_bytes for phase in record.phases if phase.name == "generation"]
    return found[0] if found else None


def check_target(path: Path) -> None:
    """Refuse what the page could not be written to, before anything runs.

    Raises FileExistsError if `path` is a file that is no report, and FileNotFoundError if its
    directory is not there.
    """
    from memtools.report.page import GENERATOR

    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(path.parent))
    if path.exists() and path.stat().st_size and GENERATOR not in path.read_bytes()[:4096]:
        raise FileExistsError(
            f"{path} is no report of memtools and is left as it is; name another file"
        )


def write_page(path: Path, records: list[Record], rescues: list[Rescue]) -> int:
    """Write the page, and return its size in bytes. Raises as `check_target`, and OSError."""
    from memtools.report.page import page

    check_target(path)
    text = page(records, "What memtools rescued", rescues).encode()
    replace_file(path, lambda file: file.write(text), mode=0o600)
    return len(text)


def _series(record: Record, points: int = POINTS, *, job: bool = False) -> list[tuple[float, int]]:
    """(seconds, bytes) of the process that trains, or of the job with its workers; of several
    neighbours the largest. What a child needs that only reads the input, and ends before training,
    is no part of the process."""
    line = figures_of(record).line
    cells = job_cells(line) if job else line.most.get(own_column(line), [])
    known = [
        (ns / 1e9, used)
        for ns, used in zip(line.first_ns, cells, strict=bool(cells))
        if used != UNKNOWN
    ]
    each = max(1, -(-len(known) // points)) if points else 1
    return [
        max(known[i : i + each], key=lambda point: point[1]) for i in range(0, len(known), each)
    ]
