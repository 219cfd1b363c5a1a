"""The still picture of a record, which a notebook shows: HTML and SVG without a script.

    Record, Figures ──► chart.py: lines, lanes, marks ──► heading, growth, graphs, tiles, phases

The function that puts a text into a picture escapes it, because names and paths may come from
anywhere. A picture has no ids, style sheets or scripts: it does not disturb other cells, and stays
the same when the notebook is saved. Text has the notebook's own colour, and the colours of lines
are dark enough for white paper and light enough for black.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING
from urllib.parse import quote

from memtools._base.size import format_bytes
from memtools._base.text import count, duration, sentence, shown, tight
from memtools._record.chart import LIMIT, Chart, Line, charts, lanes, marks
from memtools._record.figures import A_NOTEBOOK, Figures, figures_of, script_of
from memtools._record.overview import Growth, Tile, badge, growth, headline, tiles
from memtools._record.record import UNKNOWN
from memtools._record.series import Timeline, timeline

if TYPE_CHECKING:
    from memtools._record.record import Record, RecordPhase

#: the colours of lines, with a contrast of 3 to 1 at least on white and on the black of notebooks
COLOURS = {
    "s0": "#2f7de1", "s1": "#0f9488", "s2": "#9a62e0", "s3": "#d9730d", "s4": "#c8489f",
    "s5": "#6b8f1a", "s6": "#a06c3a", "s7": "#7a8aa3", "limit": "#dc3f3f", "bad": "#dc3f3f",
    "warn": "#c77700", "good": "#2e9455", "accent": "#2f7de1",
}  # fmt: skip
ENDINGS = {"clean": "good", "ended": "warn", "failed": "warn", "killed": "bad", "gone": "bad"}
#: the kinds of events that are marked in the time line, and their colours
MARKED = {
    "finding": "bad",
    "oom": "bad",
    "guard": "bad",
    "pressure": "warn",
    "mark": "accent",
}
SOFT = "opacity:.7"
GREY = "rgba(127,127,127,.3)"
#: the coordinates of a graph, whose unit has no fixed size on the screen
WIDE, HIGH = 720, 200
#: the readings of a line, by the number of charts: a notebook's cell is some 700 pixels wide
CELLS = {1: 160, 2: 110, 3: 80}
LINES, DEVICES, LANES, SPANS, GROWTH, PHASES = 7, 2, 4, 2_000, 4, 6
MARKS, MARK_TEXT, TEXT = 12, 120, 400  # marks, and characters of the text of each and of any other
_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
_SAFE = " =:/;,.()-'"  # characters that an image in a URL may have as they are, within quotes
_SIDE = f"width:84px;flex:none;text-align:right;padding-right:6px;font-size:11px;{SOFT}"


def picture_of(record: Record) -> str:
    """The picture as HTML: at most some 30 KiB, in some 50 ms. Also of a record that is being
    written."""
    figures = figures_of(record)
    colour = ENDINGS.get(figures.ending.kind, "accent")
    return card(
        _heading(_name(record), badge(figures.ending), colour),
        line(headline(figures)),
        *_growth(figures),
        *_time_lines(record, figures),
        _tiles(tiles(figures)),
        *_phases(figures.phases),
        line(_about(record, figures), soft=True),
    )


def card(*parts: str) -> str:
    """A picture of these parts, which are HTML, from top to bottom. It is not searched for
    formulas: names may have `$`."""
    style = "font-size:13px;line-height:1.5;max-width:800px;overflow-wrap:anywhere"
    inside = "".join(parts)
    return f'<div class="tex2jax_ignore mathjax_ignore" style="{style}">{inside}</div>'


def line(text: str, *, soft: bool = False) -> str:
    """A line of text; "" without a text."""
    style = f"margin:2px 0;{SOFT}" if soft else "margin:2px 0"
    return _div(style, _escape(text)) if text else ""


def _div(style: str, html: str, title: str = "") -> str:
    title = f' title="{_escape(title)}"' if title else ""
    return f'<div{title} style="{style}">{html}</div>'


def _escape(text: str) -> str:
    """The text as HTML: control characters are shown as such, and a very long text is cut."""
    return shown(_cut(text, TEXT)).translate(_ESCAPES)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


# --- text -----------------------------------------------------------------------------------------


def _heading(name: str, badge: str, colour: str) -> str:
    """The name, and before it in a frame how the run ended."""
    style = (
        f"border:1.5px solid {COLOURS[colour]};border-radius:5px;padding:0 6px;"
        "margin-right:8px;white-space:nowrap"
    )
    frame = f'<span style="{style}">{_escape(badge)}</span> '
    return _div("font-weight:600;margin:2px 0", frame + _escape(name))


def _name(record: Record) -> str:
    """The script's name, or the notebook's; the record's if that is not known."""
    script = script_of(record)
    return os.path.basename(record.path) if script in ("", A_NOTEBOOK) else script


def _about(record: Record, figures: Figures) -> str:
    """Where it lies, and what the lanes of phases leave out."""
    size = format_bytes(record.nbytes)
    text = f"{record.path}, {size}, {count(figures.samples, 'sample')}"
    if figures.phases:
        text += "; at most one bar of each phase is drawn per second"
    return tight(text)


def _tiles(found: Iterable[Tile]) -> str:
    """Figures side by side: name, value, and a remark in small letters."""
    frame = f"border:1px solid {GREY};border-radius:6px;padding:3px 9px;flex:1 1 120px;min-width:0"
    cells = [
        _div(
            frame,
            _div(f"font-size:11px;{SOFT}", _escape(tile.name))
            + _div("font-weight:600;font-size:15px", _escape(tile.value))
            + _div(f"font-size:11px;{SOFT}", _escape(tile.remark)),
        )
        for tile in found
    ]
    return _div("display:flex;flex-wrap:wrap;gap:6px;margin:6px 0", "".join(cells))


def _growth(figures: Figures) -> list[str]:
    """The findings and what to do about each, and the notes of the verdict."""
    verdict, found = figures.verdict, growth(figures)
    parts = [_finding(one) for one in found[:GROWTH]]
    if len(found) > GROWTH:
        parts.append(line(f"and {len(found) - GROWTH:,} more", soft=True))
    return parts + [line(tight(sentence(text)), soft=bool(found)) for text in verdict.notes()]


def _finding(one: Growth) -> str:
    """The grade, who holds it, how fast it grows, what is left; its lines; what to do."""
    colour = COLOURS.get(one.colour, GREY)
    framed = f"border:1.5px solid {colour};border-radius:5px;padding:0 5px;font-weight:600"
    first = [
        f'<span style="{framed}">{_escape(one.grade)}</span>',
        f'<b style="margin:0 6px 0 4px">{_escape(one.subject)}</b>',
        f'<b style="margin-right:6px;white-space:nowrap">{_escape(one.rate)}</b>',
        _escape(one.left),
    ]
    lines = [_div("", " ".join(first))]
    for place, text in one.places:
        code = f' <code style="margin-left:6px;font-size:12px">{_escape(text)}</code>'
        lines.append(
            _div("", f'<span style="{SOFT}">{_escape(place)}</span>{code if text else ""}')
        )
    lines += [_div("", f"<b>fix:</b> {_escape(one.advice)}")] if one.advice else []
    lines += [_div(f"font-size:12px;{SOFT}", _escape(one.remark))] if one.remark else []
    return _div(f"margin:6px 0;border-left:3px solid {colour};padding-left:9px", "".join(lines))


def _phases(phases: tuple[RecordPhase, ...]) -> list[str]:
    """The phases of the highest peaks, as a table."""
    if not phases:
        return []
    rows = [("phase", "peak", "times", "total")]
    for phase in phases[:PHASES]:
        peak = "" if phase.peak_bytes is None else format_bytes(phase.peak_bytes)
        rows.append((phase.name, peak, f"{phase.count:,}", duration(phase.seconds)))
    cell = "padding:1px 14px 1px 0;border:0;vertical-align:top;white-space:pre-wrap"
    html = []
    for number, row in enumerate(rows):
        kind, more = ("td", "") if number else ("th", f";font-weight:400;{SOFT}")
        cells = "".join(
            f'<{kind} style="text-align:{"right" if i else "left"};{cell}{more}">'
            f"{_escape(text)}</{kind}>"
            for i, text in enumerate(row)
        )
        html.append(f'<tr style="background:none">{cells}</tr>')
    style = "border-collapse:collapse;border:0;color:inherit;margin:2px 0;font-size:12px"
    table = f'<table style="{style};table-layout:auto"><tbody>{"".join(html)}</tbody></table>'
    left_out = len(phases) - PHASES
    more_line = [line(f"and {left_out:,} more", soft=True)] if left_out > 0 else []
    return [_div("overflow-x:auto", table), *more_line]


# --- the time line --------------------------------------------------------------------------------


def _time_lines(record: Record, figures: Figures) -> list[str]:
    """Host memory with the phases below it, and the first devices."""
    found = [chart for chart in charts(record, figures) if chart.unit == "bytes"][: 1 + DEVICES]
    cells = CELLS.get(len(found), CELLS[1])
    readings = figures.line if len(figures.line) <= cells else timeline(record, cells)
    if len(readings) < 2:
        return []
    drawn = []
    for chart in found:
        if found[1:]:
            drawn.append(_div("font-weight:600;margin:8px 0 2px", _escape(chart.title)))
        drawn.append(_graph(record, figures, chart, readings))
    return drawn


def _graph(record: Record, figures: Figures, chart: Chart, readings: Timeline) -> str:
    """Bytes over time: each line with a band where its least and its most differ, the limit, marks
    of what happened, and lanes of the phases."""
    lines = [one for one in chart.lines if one.on]
    limit = next((one for one in lines if one.colour == "limit"), None)
    lines = [one for one in lines if one is not limit and readings.known(one.key)][:LINES]
    level = None if limit is None else _limit_bytes(limit, figures, readings)
    known = [v for one in lines for v in readings.least[one.key] if v != UNKNOWN]
    most = [v for one in lines for v in readings.most[one.key] if v != UNKNOWN]
    low, top = _scale(min(known, default=0), max([*most, level or 0], default=0))
    end = max(readings.last_ns[-1], 10**6)

    def height(value: float) -> str:
        return f"{min(HIGH, max(0, HIGH * (top - value) / (top - low))):.0f}"

    drawn = [_stroke(f"M0 {y}H{WIDE}", GREY, 1) for y in (0, HIGH // 2, HIGH)]
    tips = []
    is_host = chart.place == "host"
    happened = marks(record, figures, SPANS) if is_host else []
    for ms, kind, text in [mark for mark in happened if mark[1] in MARKED][-MARKS:]:
        part = min(1.0, max(0.0, ms * 1e6 / end))
        path = f"M{WIDE * part:.0f} 0V{HIGH}"
        drawn.append(_stroke(path, COLOURS[MARKED[kind]], 1.5, dash="3 3"))
        place = f"position:absolute;top:0;bottom:0;width:9px;left:calc({100 * part:.1f}% - 4px)"
        tips.append(_div(place, "", title=_cut(text, MARK_TEXT)))
    for one in lines:
        cells = [
            (f"{min(WIDE, max(0, WIDE * ns / end)):.0f}", height(least), height(highest))
            for ns, least, highest in zip(
                readings.first_ns, readings.least[one.key], readings.most[one.key], strict=True
            )
            if highest != UNKNOWN
        ]
        above = "L".join(f"{x} {y}" for x, _, y in cells)
        if any(bottom != y for _, bottom, y in cells):
            below = "L".join(f"{x} {bottom}" for x, bottom, _ in reversed(cells))
            colour = COLOURS[one.colour]
            drawn.append(f'<path d="M{above}L{below}z" fill="{colour}" fill-opacity=".25"/>')
        drawn.append(_stroke(f"M{above}", COLOURS[one.colour], 1.6))
    names = [(one.label, one.colour) for one in lines]
    if limit is not None and level is not None:
        drawn.append(_stroke(f"M0 {height(level)}H{WIDE}", COLOURS["limit"], 1.5, dash="7 4"))
        names.append((f"{limit.label} {format_bytes(level)}", "limit"))
    plot = _svg(chart.title, (WIDE, HIGH), 170, "".join(drawn)) + "".join(tips)
    ticks = "".join(_div("", _escape(format_bytes(v))) for v in (top, (top + low) / 2, low))
    column = (
        f"{_SIDE};display:flex;flex-direction:column;justify-content:space-between;"
        "height:188px;margin:-9px 0"
    )
    rows = [
        _div(
            "display:flex;margin:8px 0 0",
            _div(column, ticks)
            + _div("flex:1;min-width:0", _div("position:relative;overflow:hidden", plot)),
        )
    ]
    rows += _lanes(record, end) if is_host else []
    times = "".join(_div("", _escape(duration(end / 1e9 * part))) for part in (0, 0.5, 1))
    style = "display:flex;justify-content:space-between;margin:9px 0 4px 84px;font-size:11px"
    rows.append(_div(f"{style};{SOFT}", times))
    return "".join(rows) + _legend(names)


def _limit_bytes(one: Line, figures: Figures, readings: Timeline) -> float | None:
    """A limit as one level: the newest, if it changed meanwhile."""
    if one.key == LIMIT or one.key not in readings.newest:
        return None if figures.used is None else figures.used.limit_bytes
    return readings.newest[one.key]


def _lanes(record: Record, end: int) -> list[str]:
    """The passages of the phases that took longest, a row for each. Passages that one cell of the
    screen holds are drawn as one: so a lane is short, whatever it holds."""
    found, _ = lanes(record, SPANS)
    rows, width = [], WIDE // 240
    for lane in found[:LANES]:
        cells: set[int] = set()
        for ms, took in lane.spans:
            first, last = (min(239, int(240 * at * 1e6 / end)) for at in (ms, ms + took))
            cells.update(range(first, last + 1))
        path = ""
        for _, run in groupby(enumerate(sorted(cells)), lambda pair: pair[1] - pair[0]):
            passed = [cell for _, cell in run]
            x = passed[0] * width
            path += f"M{x} 0h{len(passed) * width}v10H{x}z"
        drawn = f'<path d="{path}" fill="{COLOURS["s7"]}"/>'
        name = f"{_SIDE};overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
        image = _svg(f"when {lane.name} ran", (WIDE, 10), 10, drawn)
        row = _div(name, _escape(lane.name), title=lane.name)
        row += _div("flex:1;min-width:0;align-self:center", image)
        rows.append(_div("display:flex;margin:9px 0 -6px", row))
    return rows


def _svg(label: str, size: tuple[int, int], height: int, parts: str) -> str:
    """SVG as an image, `height` pixels high and as wide as there is room: notebooks that are not
    trusted show images, and no other SVG."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'preserveAspectRatio="none">{parts}</svg>'
    )
    url = f"data:image/svg+xml,{quote(svg.replace(chr(34), chr(39)), safe=_SAFE)}"
    style = f"display:block;width:100%;max-width:none;margin:0;height:{height}px"
    return f'<img alt="{_escape(label)}" style="{style}" src="{url}"/>'


def _stroke(path: str, colour: str, width: float, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashes} '
        f'stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'
    )


def _legend(names: Sequence[tuple[str, str]]) -> str:
    key = "display:inline-block;width:14px;height:4px;border-radius:2px;vertical-align:middle"
    items = [
        f'<span style="margin-right:14px;white-space:nowrap"><span style="{key};margin-right:5px;'
        f'background:{COLOURS[colour]}"></span>{_escape(name)}</span>'
        for name, colour in names
    ]
    return _div("font-size:12px;display:flex;flex-wrap:wrap", "".join(items))


def _scale(least: float, most: float) -> tuple[float, float]:
    """From where to where the y axis goes: from 0, unless all that is drawn lies in the upper half
    and would be flat; but an eighth of it at least, or noise would look like much. In steps that
    are whole in binary units."""
    low = 0.0 if least < most / 2 else min(least, most - most / 8)
    spread = max(1.0, most - low)
    step = 1.0
    while step * 8 < spread:
        step *= 2
    low = step * (low // step)
    steps = max(2, -int(-(most - low) // step))
    return low, low + step * (steps + steps % 2)
