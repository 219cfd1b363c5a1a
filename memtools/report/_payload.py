"""The data that the page's script draws: the series, the lanes and the marks of each record.

    {"records": [{"name", "ms": [...], "step": [...] | null, "lines": {key: LINE},
                  "lanes", "marks"}],
     "letters": {kind: letter},
     "charts": [{"place", "unit", "lines": [{"record", "key", "label", "colour", "on"}]}],
     "stacks": [{"place", "title", "lines": [{"label", "colour", "bytes": [...]}],
                 "spans": [[phase, columns]], "highest", "top"}]}

A LINE has `most` and `least` of each cell in bytes (or hundredths of a percent), and null without a
reading. `least` is left out if it is the same. A level, such as a limit, has only `level`. A stack
is a step over time, the bytes of each part in each column: "p0" is the recorded step with the
highest peak, "t0" the traced one as it is, and "t0-1", "t0-2" what it would be after a change,
drawn to the same scale up to `top`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memtools._base.peak import BACKWARDS, OLDER, OTHERS, PARTS, UNSEEN
from memtools._base.text import shown
from memtools._record import chart as drawn
from memtools._record.chart import Chart
from memtools._record.figures import Figures, used_cells
from memtools._record.peaks import Stack, peak_of, stack_of
from memtools._record.record import UNKNOWN
from memtools._record.series import Timeline, timeline
from memtools.report._changes import drawings

if TYPE_CHECKING:
    from memtools._record.record import Record

Json = dict[str, Any]

#: cells of one record, at most: a wide screen has as many columns of pixels
CELLS = 2_400
#: numbers in all series of a page, at most: about 1.3 MB
NUMBERS = 120_000
SPANS, MARKS = 4_000, 2_000
#: the letter of each kind of event on the time line
LETTERS = {
    "start": "S",
    "end": "E",
    "finding": "F",
    "holder": "H",
    "pressure": "P",
    "guard": "G",
    "guard_set": "A",
    "oom": "O",
    "cleanup": "C",
    "mark": "M",
    "fork": "Y",
    "peak": "▲",
    "trace": "T",
    "limit": "R",
    "counters": "N",
    "shm_room": "D",
    "heap": "B",
}
#: the letter of all other kinds
OTHER = "?"


def payload(records: list[Record], figures: list[Figures], names: list[str]) -> Json:
    """Return the data of the page; `figures[i]` and `names[i]` belong to `records[i]`."""
    several = len(records) > 1
    found = [
        _record(record, own, len(records)) for record, own in zip(records, figures, strict=True)
    ]
    for part, name in zip(found, names, strict=True):
        part["name"] = name
    charts: list[Json] = _compared(found, figures) if several else []
    for i, (record, own) in enumerate(zip(records, figures, strict=True)):
        charts += [_chart(i, chart) for chart in drawn.charts(record, own)]
    stacks = [stack for i, record in enumerate(records) for stack in _stacks(i, record)]
    return {
        "records": found,
        "letters": LETTERS,
        "charts": [chart for chart in charts if chart["lines"]],
        "stacks": stacks,
    }


def as_script(data: Json) -> str:
    """Return JSON that is safe in a script element, whatever its texts are."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _record(record: Record, figures: Figures, records: int) -> Json:
    columns = [c.name for c in record.columns if figures.line.known(c.name)]
    cells = max(64, min(CELLS, NUMBERS // ((2 * len(columns) + 2) * records)))
    line = figures.line if len(figures.line) <= cells else timeline(record, cells)
    names = drawn.drawn_columns(record, figures)
    lines = {name: _line(line.least[name], line.most[name]) for name in names}
    if figures.used is not None:
        lines |= _use(line, figures)
    lanes, left_out = drawn.lanes(record, SPANS // records)
    room = MARKS // records
    return {
        "ms": [ns // 10**6 for ns in line.first_ns],
        "end": line.last_ns[-1] // 10**6 if len(line) else 0,
        "step": _steps(line),
        "lines": lines,
        "lanes": [{"name": lane.name, "spans": lane.spans} for lane in lanes],
        "lanes_left_out": left_out,
        "marks": [[ms, slug(kind), text] for ms, kind, text in drawn.marks(record, figures, room)],
    }


def _use(line: Timeline, figures: Figures) -> dict[str, Json]:
    """The line of what counts against the limit, to compare records, and a limit without a
    column."""
    assert figures.used is not None
    found = {}
    counted = used_cells(line, figures.used.source)
    if counted is not None:
        found[drawn.USED] = _line(counted[1], counted[1])
    if figures.used.limit_bytes is not None:
        found[drawn.LIMIT] = {"level": figures.used.limit_bytes}
    return found


def _line(least: list[int], most: list[int]) -> Json:
    known = sum(value != UNKNOWN for value in most)
    line: Json = {"most": [None if value == UNKNOWN else value for value in most]}
    if least != most:
        line["least"] = [None if value == UNKNOWN else value for value in least]
    if 2 * known < len(most):
        line["sparse"] = True  # The script connects its readings across gaps.
    return line


def _steps(line: Timeline) -> list[int | None] | None:
    if not line.last("step"):
        return None
    return [None if step == UNKNOWN else step for step in line.most["step"]]


def _stacks(i: int, record: Record) -> list[Json]:
    """The recorded step with the highest peak, from its beginning to its end, and the traced one
    with and without changes."""
    peak = peak_of(record)
    if peak is None:
        return []
    recorded = stack_of(peak)
    found = []
    if recorded is not None:
        found.append(
            _stack(f"p{i}", f"S{shown(peak.name())[1:]} from beginning to end", recorded, 0)
        )
    before, after = drawings(peak)
    if after:
        top = max(sum(row[before.stack.highest] for _, row in before.stack.rows), 1)
        found.append(_stack(f"t{i}", before.title, before.stack, top))
        found += (
            _stack(f"t{i}-{number}", one.title, one.stack, top)
            for number, one in enumerate(after, 1)
        )
    return found


def _stack(place: str, title: str, stack: Stack, top: int) -> Json:
    lines = [
        {"label": shown(what), "colour": part_colour(what), "bytes": row}
        for what, row in stack.rows
        if any(row)
    ]
    spans = [[shown(span.phase), span.intervals] for span in stack.spans]
    return {"place": place, "title": title, "lines": lines, "spans": spans,
            "highest": stack.highest, "top": top}  # fmt: skip


def part_colour(what: str) -> str:
    """The class of one of PARTS: one of the eight classes of series, or one of its own."""
    own = {BACKWARDS: "backwards", OTHERS: "others", OLDER: "older", UNSEEN: "unseen"}
    number = PARTS.index(what) if what in PARTS else len(PARTS)
    return own.get(what) or (f"s{number}" if number < 8 else "unseen")


def slug(kind: str) -> str:
    """The kind if it is one of LETTERS, else "other"."""
    return kind if kind in LETTERS else "other"


def _drawn(record: int, key: str, label: str, colour: str, on: bool) -> Json:
    return {"record": record, "key": key, "label": label, "colour": colour, "on": on}


def _chart(i: int, chart: Chart) -> Json:
    lines = [_drawn(i, line.key, line.label, line.colour, line.on) for line in chart.lines]
    return {"place": f"r{i}-{chart.place}", "unit": chart.unit, "title": chart.title,
            "lines": lines}  # fmt: skip


def _compared(records: list[Json], figures: list[Figures]) -> list[Json]:
    """Charts with one line for each record: what counts against the limit, and what is allocated on
    each device."""
    titles = {drawn.USED: "Host memory of all"}
    for n in sorted({n for own in figures for n in own.devices}):
        titles[f"cuda{n}_allocated"] = f"Allocated on cuda:{n} of all"
    charts = []
    for number, (key, title) in enumerate(titles.items()):
        lines = [
            _drawn(i, key, record["name"], f"s{i % 8}", True)
            for i, record in enumerate(records)
            if key in record["lines"]
        ]
        place = f"all-{number}"
        charts.append({"place": place, "unit": "bytes", "title": title, "lines": lines})
    _one_limit(charts[0], records, figures)
    return charts


def _one_limit(chart: Json, records: list[Json], figures: list[Figures]) -> None:
    """Add the limit if all records that have one have the same."""
    ours = [own.used for own in figures if own.used and own.used.source != "machine"]
    limits = {used.limit_bytes for used in ours if used.limit_bytes}
    at = next((i for i, record in enumerate(records) if drawn.LIMIT in record["lines"]), None)
    if len(limits) == 1 and at is not None:
        peak = max(own.used.peak_bytes for own in figures if own.used)
        near = peak >= drawn.NEAR_ENOUGH * min(limits)
        chart["lines"].append(_drawn(at, drawn.LIMIT, "Limit", "limit", near))
