"""The still picture of a record, which a notebook shows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memtools._base.size import format_bytes
from memtools._base.text import count, duration, tight
from memtools._record import drawing
from memtools._record.chart import LIMIT, Chart, Line, charts, lanes, marks
from memtools._record.figures import A_NOTEBOOK, Figures, figures_of, script_of
from memtools._record.overview import badge, headline, tiles
from memtools._record.record import UNKNOWN
from memtools._record.series import Timeline, timeline

if TYPE_CHECKING:
    from memtools._record.record import Record, RecordPhase

#: readings of a line by the number of charts: a notebook's cell is some 700 pixels wide
CELLS = {1: 160, 2: 110, 3: 80}
LINES, DEVICES, LANES, SPANS, GROWTH, PHASES = 7, 2, 4, 2_000, 4, 6
#: marks in the time line, and characters of the text of each
MARKS, MARK_TEXT = 12, 120
ENDINGS = {"clean": "good", "ended": "warn", "failed": "warn", "killed": "bad", "gone": "bad"}
#: what is marked in the time line, and its colour
MARKED = {
    "finding": "bad",
    "oom": "bad",
    "guard": "bad",
    "pressure": "warn",
    "mark": "accent",
}


def picture_of(record: Record) -> str:
    """The picture as HTML without a script: at most some 30 KiB, in some 50 ms. Also of a record
    that is being written."""
    figures = figures_of(record)
    colour = ENDINGS.get(figures.ending.kind, "accent")
    return drawing.card(
        drawing.heading(_name(record), badge(figures.ending), colour),
        drawing.line(headline(figures)),
        *_time_lines(record, figures),
        drawing.tiles((tile.name, tile.value, tile.remark) for tile in tiles(figures)),
        *_growth(figures),
        *_phases(figures.phases),
        drawing.line(_about(record, figures), soft=True),
    )


def _name(record: Record) -> str:
    """The script's name, or the notebook's; where nobody knows that, the record's."""
    script = script_of(record)
    return os.path.basename(record.path) if script in ("", A_NOTEBOOK) else script


def _about(record: Record, figures: Figures) -> str:
    """Where it lies, and what the lanes of phases leave out."""
    size = format_bytes(record.nbytes)
    text = f"{record.path}, {size}, {count(figures.samples, 'sample')}"
    if figures.phases:
        text += "; of each phase at most one passage a second is drawn"
    return tight(text)


def _growth(figures: Figures) -> list[str]:
    """What grows, in the words of every command, and what to do about it."""
    verdict = figures.verdict
    lines, colour = verdict.lines(quiet=True), "bad" if verdict.leaking else ""
    found = [drawing.line(tight(line), colour=colour) for line in lines[:GROWTH]]
    if len(lines) > GROWTH:
        found.append(drawing.line(f"and {len(lines) - GROWTH:,} more", soft=True))
    advice = list(dict.fromkeys(one.advice for one in verdict.findings if one.advice))
    return found + [drawing.line(f"to do: {tight(text)}", soft=True) for text in advice[:GROWTH]]


def _phases(phases: tuple[RecordPhase, ...]) -> list[str]:
    """The phases of the highest peaks, as a table with its title."""
    if not phases:
        return []
    rows = [
        (
            phase.name,
            "" if phase.peak_bytes is None else format_bytes(phase.peak_bytes),
            f"{phase.count:,}",
            duration(phase.seconds),
        )
        for phase in phases[:PHASES]
    ]
    more = len(phases) - PHASES
    left_out = [drawing.line(f"and {more:,} more", soft=True)] if more > 0 else []
    head = ("phase", "peak", "times", "in all")
    return [drawing.table(rows, head, right=(1, 2, 3)), *left_out]


# --- the time line --------------------------------------------------------------------------------


def _time_lines(record: Record, figures: Figures) -> list[str]:
    """Host memory with the phases below it, and the first devices."""
    found = [chart for chart in charts(record, figures) if chart.unit == "bytes"][: 1 + DEVICES]
    cells = CELLS.get(len(found), CELLS[1])
    line = figures.line if len(figures.line) <= cells else timeline(record, cells)
    if len(line) < 2:
        return []
    drawn = []
    for chart in found:
        if found[1:]:
            drawn.append(drawing.title(chart.title))
        drawn.append(_graph(record, figures, chart, line))
    return drawn


def _graph(record: Record, figures: Figures, chart: Chart, line: Timeline) -> str:
    # A control group that is not what counts may hold other programs, beside which all is flat.
    is_counted = figures.used is not None and figures.used.of == "control group"
    lines = [one for one in chart.lines if one.on and (is_counted or one.key != "cgroup_used")]
    level = next((one for one in lines if one.colour == "limit"), None)
    curves = [_curve(one, line) for one in lines if one is not level][:LINES]
    is_host = chart.place == "host"
    return drawing.graph(
        chart.title,
        [curve for curve in curves if curve.points],
        max(line.last_ns[-1] / 1e9, 1e-3),
        level=None if level is None else _level(level, figures, line),
        marks=_marks(record, figures) if is_host else (),
        lanes=_passages(record) if is_host else (),
    )


def _curve(one: Line, line: Timeline) -> drawing.Curve:
    least, most = line.least[one.key], line.most[one.key]
    cells = zip(line.first_ns, least, most, strict=True)
    points = [(ns / 1e9, low, high) for ns, low, high in cells if high != UNKNOWN]
    return drawing.Curve(one.label, one.colour, points)


def _level(one: Line, figures: Figures, line: Timeline) -> tuple[str, float] | None:
    """A limit as one level: where it changed meanwhile, the newest."""
    if one.key == LIMIT or one.key not in line.newest:
        used = figures.used
        return None if used is None or used.limit_bytes is None else (one.label, used.limit_bytes)
    return one.label, line.newest[one.key]


def _marks(record: Record, figures: Figures) -> list[tuple[float, str, str]]:
    found = [
        (ms / 1e3, MARKED[kind], drawing.cut(text, MARK_TEXT))
        for ms, kind, text in marks(record, figures, SPANS)
        if kind in MARKED
    ]
    return found[-MARKS:]


def _passages(record: Record) -> list[tuple[str, list[drawing.Span]]]:
    found, _ = lanes(record, SPANS)
    return [
        (lane.name, [drawing.Span(ms / 1e3, (ms + took) / 1e3) for ms, took in lane.spans])
        for lane in found[:LANES]
    ]
