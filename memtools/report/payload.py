"""What the page's script draws: the series of each record in few enough cells, spans and marks.

    {"records": [{"name", "ms": [...], "step": [...] | null, "lines": {key: LINE},
                  "lanes", "marks"}],
     "charts": [{"place", "unit", "lines": [{"record", "key", "label", "colour", "on"}]}],
     "stacks": [{"place", "step", "lines": [{"label", "colour", "bytes": [...]}],
                 "spans": [[phase, columns]], "highest"}]}

A LINE has `most` and `least` of each cell in bytes (or hundredths of a percent), null for no
reading; `least` is left out where it is the same. A level, such as a limit, has `level` alone.
A stack is the recorded step with the highest peak over time: of each part its bytes by columns.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from memtools._base.peak import BACKWARDS, OLDER, OTHERS, PARTS, UNSEEN
from memtools._base.text import shown
from memtools.record.figures import Figures, is_bytes, seconds_of, used_cells
from memtools.record.peaks import peak_of, stack_of
from memtools.record.series import UNKNOWN, Timeline, timeline

if TYPE_CHECKING:
    from memtools.record.record import Record

Json = dict[str, Any]

#: cells of one record: as many as a wide screen has columns of pixels
CELLS = 2_400
#: numbers in all series of a page: about 1.3 MB
NUMBERS = 120_000
LANES, SPANS, MARKS = 8, 4_000, 2_000
#: a limit is drawn from the start where memory comes near it; else it would press all the rest flat
NEAR_ENOUGH = 0.4

HOST = {
    "rss": ("Resident", "s0", True),
    "process": ("Process, each page once", "s4", True),
    "private": ("Private", "s1", True),
    "children_private": ("Workers", "s2", True),
    "shm": ("Shared memory", "s7", True),
    "cgroup_used": ("Control group", "s3", True),
    "heap_used": ("Heap in use", "s5", False),
    "swap": ("Swap", "s6", True),
    "available": ("Available on the machine", "s7", False),
}
DEVICE = {
    "allocated": ("Allocated", "s0", True),
    "reserved": ("Reserved", "s3", True),
    "free": ("Free", "s7", False),
}
KINDS = (
    "start",
    "end",
    "finding",
    "leak",
    "holder",
    "pressure",
    "guard",
    "oom",
    "cleanup",
    "mark",
    "fork",
    "peak",
)


def payload(records: list[Record], figures: list[Figures], names: list[str]) -> Json:
    """All of it; `figures[i]` and `names[i]` are of `records[i]`."""
    several = len(records) > 1
    found = [
        _record(record, own, len(records)) for record, own in zip(records, figures, strict=True)
    ]
    for drawn, name in zip(found, names, strict=True):
        drawn["name"] = name
    charts: list[Json] = _compared(found, figures) if several else []
    for i, (record, own) in enumerate(zip(records, figures, strict=True)):
        charts += _charts(i, record, own, found[i]["lines"])
    stacks = [_stack(i, record) for i, record in enumerate(records)]
    return {
        "records": found,
        "charts": [chart for chart in charts if chart["lines"]],
        "stacks": [stack for stack in stacks if stack is not None],
    }


def as_script(data: Json) -> str:
    """JSON that may stand in a script element whatever its texts hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _record(record: Record, figures: Figures, records: int) -> Json:
    columns = [c.name for c in record.columns if figures.line.known(c.name)]
    cells = max(64, min(CELLS, NUMBERS // ((2 * len(columns) + 2) * records)))
    line = figures.line if len(figures.line) <= cells else timeline(record, cells)
    units = {column.name: column.unit for column in record.columns}
    drawn = [name for name in columns if is_bytes(units[name]) or name == "pressure"]
    lines = {name: _line(line.least[name], line.most[name]) for name in drawn}
    if figures.used is not None:
        lines |= _use(line, figures)
    lanes, left_out = _lanes(record, SPANS // records)
    return {
        "ms": [ns // 10**6 for ns in line.first_ns],
        "end": line.last_ns[-1] // 10**6 if len(line) else 0,
        "step": _steps(line),
        "lines": lines,
        "lanes": lanes,
        "lanes_left_out": left_out,
        "marks": _marks(record, figures, MARKS // records),
    }


def _use(line: Timeline, figures: Figures) -> dict[str, Json]:
    """What counts against the limit, to compare records by, and a limit that has no column."""
    assert figures.used is not None
    found = {}
    counted = used_cells(line, figures.used.source)
    if counted is not None:
        found["= used"] = _line(counted[1], counted[1])
    if figures.used.limit_bytes is not None:
        found["= limit"] = {"level": figures.used.limit_bytes}
    return found


def _line(least: list[int], most: list[int]) -> Json:
    known = sum(value != UNKNOWN for value in most)
    line: Json = {"most": [None if value == UNKNOWN else value for value in most]}
    if least != most:
        line["least"] = [None if value == UNKNOWN else value for value in least]
    if 2 * known < len(most):
        line["seldom"] = True  # read now and then: what lies between is drawn through
    return line


def _steps(line: Timeline) -> list[int | None] | None:
    if not line.last("step"):
        return None
    return [None if step == UNKNOWN else step for step in line.most["step"]]


def _lanes(record: Record, room: int) -> tuple[list[Json], int]:
    """Spans of the phases that took longest, (names left out)."""
    spans: dict[str, list[list[int]]] = {}
    for event in record.events:
        if event.kind == "phase" and event.duration_ns > 0:
            start = round(seconds_of(record, event.time_ns) * 1000)
            spans.setdefault(event.text, []).append([start, max(1, event.duration_ns // 10**6)])
    longest = sorted(spans, key=lambda name: -sum(took for _, took in spans[name]))
    lanes = [{"name": shown(name), "spans": spans[name][-room:]} for name in longest[:LANES]]
    return lanes, max(0, len(longest) - LANES)


def _marks(record: Record, figures: Figures, room: int) -> list[list[Any]]:
    """[milliseconds, kind, text] of what a list tells; the newest where there are too many."""
    marks: list[list[Any]] = [
        [round(seconds_of(record, e.time_ns) * 1000), slug(e.kind), shown(e.text)]
        for e in record.events
        if figures.ending.shows(e.kind)
    ]
    return sorted(marks, key=lambda mark: mark[0])[-room:]


def _stack(i: int, record: Record) -> Json | None:
    """The recorded step that is told, from its begin to its end."""
    peak = peak_of(record)
    stack = None if peak is None else stack_of(peak)
    if peak is None or stack is None:
        return None
    lines = [
        {"label": shown(what), "colour": part_colour(what), "bytes": row}
        for what, row in stack.rows
        if any(row)
    ]
    spans = [[shown(span.phase), span.stretches] for span in stack.spans]
    return {"place": f"p{i}", "step": peak.step, "lines": lines, "spans": spans,
            "highest": stack.highest}  # fmt: skip


def part_colour(what: str) -> str:
    """The class of one of PARTS: one of the page's eight of series, or its own."""
    own = {BACKWARDS: "backwards", OTHERS: "others", OLDER: "older", UNSEEN: "unseen"}
    number = PARTS.index(what) if what in PARTS else len(PARTS)
    return own.get(what) or (f"s{number}" if number < 8 else "unseen")


def slug(kind: str) -> str:
    """The kind where it is one of ours, else "other"."""
    return kind if kind in KINDS else "other"


def _drawn(record: int, key: str, label: str, colour: str, on: bool) -> Json:
    return {"record": record, "key": key, "label": label, "colour": colour, "on": on}


def _charts(i: int, record: Record, figures: Figures, lines: dict[str, Json]) -> list[Json]:
    shown_keys = [key for key in HOST if key in lines and _any(lines[key])]
    if figures.shared is None and "shm" in shown_keys:  # but for a page of memtools' own
        shown_keys.remove("shm")
    if "rss" in lines and lines.get("process", {}).get("most") == lines["rss"]["most"]:
        shown_keys.remove("process")  # no page is mapped twice: one line for both
    host = [_drawn(i, key, *HOST[key]) for key in shown_keys]
    devices = {f"cuda{n}_": n for n in figures.devices}
    # Of the job a sample knows what was read with it: its parts are drawn.
    ours = {*HOST, "job", "pressure", "cgroup_limit", "= used", "= limit"}
    for column in record.columns:
        name = column.name
        if name in lines and name not in ours and not name.startswith(tuple(devices)):
            host.append(_drawn(i, name, shown(name), f"s{(len(host) + 4) % 8}", len(host) < 6))
    host += _limits(i, figures, lines)
    charts = [{"place": f"r{i}-host", "unit": "bytes", "title": "Host memory", "lines": host}]
    charts += [_device_chart(i, n, lines) for n in figures.devices]
    if "pressure" in lines and _any(lines["pressure"]):
        stalled = [_drawn(i, "pressure", "Time stalled for memory", "s3", True)]
        title = "Memory pressure (stalls, average of 10 s)"
        charts.append(
            {"place": f"r{i}-pressure", "unit": "percent", "title": title, "lines": stalled}
        )
    return charts


def _limits(i: int, figures: Figures, lines: dict[str, Json]) -> list[Json]:
    """The limit that counts, drawn where memory comes near it."""
    if figures.used is None or figures.used.limit_bytes is None:
        return []
    if figures.used.source == "machine":
        return []  # which other programs use as well: it would press the process's lines flat
    near = figures.used.peak_bytes >= NEAR_ENOUGH * figures.used.limit_bytes
    key = "cgroup_limit" if figures.used.source == "cgroup" else "= limit"
    return [_drawn(i, key, f"Limit ({figures.used.source})", "limit", near)]


def _device_chart(i: int, device: int, lines: dict[str, Json]) -> Json:
    prefix = f"cuda{device}_"
    found = [_drawn(i, prefix + k, *DEVICE[k]) for k in DEVICE if prefix + k in lines]
    total, reserved = lines.get(f"{prefix}total"), lines.get(f"{prefix}reserved")
    if total is not None:
        near = reserved is not None and _top(reserved) >= NEAR_ENOUGH * _top(total)
        found.append(_drawn(i, f"{prefix}total", "Total", "limit", near))
    title = f"Device memory, cuda:{device}"
    return {"place": f"r{i}-cuda{device}", "unit": "bytes", "title": title, "lines": found}


def _compared(records: list[Json], figures: list[Figures]) -> list[Json]:
    """One line per record: what counts against the limit, and allocated on each device."""
    titles = {"= used": "Host memory of all"}
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
    """The limit, where all that have one have the same."""
    ours = [own.used for own in figures if own.used and own.used.source != "machine"]
    limits = {used.limit_bytes for used in ours if used.limit_bytes}
    at = next((i for i, record in enumerate(records) if "= limit" in record["lines"]), None)
    if len(limits) == 1 and at is not None:
        peak = max(own.used.peak_bytes for own in figures if own.used)
        near = peak >= NEAR_ENOUGH * min(limits)
        chart["lines"].append(_drawn(at, "= limit", "Limit", "limit", near))


def _top(line: Json) -> int:
    if "level" in line:
        return int(line["level"])
    return max((value for value in line["most"] if value is not None), default=0)


def _any(line: Json) -> bool:
    return _top(line) > 0
