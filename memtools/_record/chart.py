"""What is drawn of a record: its charts and their lines, the passages of its phases, and its marks.
The page draws them with a script (report/_payload.py), a notebook without one (picture.py).

    Record, Figures ──► charts   host memory, the memory of each device, pressure
                    ├─► lanes    when each phase was passed
                    └─► marks    what happened
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memtools._base.text import shown
from memtools._record.figures import Figures, is_bytes, seconds_of
from memtools._record.kinds import Finding

if TYPE_CHECKING:
    from memtools._leak.finding import Key
    from memtools._record.record import Record, RecordEvent

#: A limit is drawn at first if memory reaches this share of it. Otherwise all lines would be flat.
NEAR_ENOUGH = 0.4
#: phases that are drawn, at most
LANES = 8
#: keys of lines without a column: what counts against the limit, and the limit as a level
USED, LIMIT = "= used", "= limit"

HOST = {
    "job": ("Job: process and workers", "s6", True),
    "rss": ("Resident", "s0", True),
    "process": ("Process, each page once", "s4", True),
    "private": ("Private", "s1", False),
    "children_private": ("Workers", "s2", True),
    "shm": ("Shared memory", "s7", True),
    "cgroup_used": ("Control group", "s3", True),
    "heap_used": ("Heap in use", "s5", True),
    "swap": ("Swap", "s7", True),
    "available": ("Available on the machine", "s7", False),
}
DEVICE = {
    "allocated": ("Allocated", "s0", True),
    "reserved": ("Reserved", "s3", True),
    "free": ("Free", "s7", False),
}


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        key: the record's column, or LIMIT.
        label: its name in the legend.
        colour: its class: "s0" to "s7", or "limit".
        on: whether it is drawn at first.
    """

    key: str
    label: str
    colour: str
    on: bool


@dataclass(frozen=True)
class Chart:
    """A chart: `place` is "host", "pressure" or "cuda0"; `unit` is "bytes" or "percent"."""

    place: str
    unit: str
    title: str
    lines: list[Line]


@dataclass(frozen=True)
class Lane:
    """The passages of a phase: when each began and how long it took, in milliseconds."""

    name: str
    spans: list[tuple[int, int]]


def drawn_columns(record: Record, figures: Figures) -> list[str]:
    """The columns that are drawn: sizes and memory pressure, if they have a reading."""
    known = [column for column in record.columns if figures.line.known(column.name)]
    return [c.name for c in known if is_bytes(c.unit) or c.name == "pressure"]


def charts(record: Record, figures: Figures) -> list[Chart]:
    """The charts of a record that have a line."""
    columns = drawn_columns(record, figures)
    found = [Chart("host", "bytes", "Host memory", _host_lines(figures, columns))]
    found += [_device_chart(n, figures, columns) for n in figures.devices]
    if "pressure" in columns and _top(figures, "pressure"):
        stalled = [Line("pressure", "Time stalled for memory", "s3", True)]
        title = "Memory pressure (stalls, average of 10 s)"
        found.append(Chart("pressure", "percent", title, stalled))
    return [chart for chart in found if chart.lines]


def _host_lines(figures: Figures, columns: list[str]) -> list[Line]:
    keys = [key for key in HOST if key in columns and _top(figures, key)]
    if figures.shared is None and "shm" in keys:  # There is only a page of memtools.
        keys.remove("shm")
    most = figures.line.most
    if "rss" in columns and "process" in keys and most["process"] == most["rss"]:
        keys.remove("process")  # No page is mapped twice: one line is enough.
    if figures.workers is None and figures.shared is None and "job" in keys:
        keys.remove("job")  # It is the process alone.
    lines = [Line(key, *HOST[key]) for key in keys]
    if figures.used is None or figures.used.of != "control group":
        # Without a limit the control group has other programs too, next to which all is flat.
        lines = [replace(one, on=one.on and one.key != "cgroup_used") for one in lines]
    ours = {*HOST, "pressure", "cgroup_limit", USED, LIMIT}
    devices = tuple(f"cuda{n}_" for n in figures.devices)
    for name in columns:
        if name not in ours and not name.startswith(devices):
            lines.append(Line(name, shown(name), f"s{(len(lines) + 4) % 8}", len(lines) < 6))
    return lines + _limits(figures)


def _limits(figures: Figures) -> list[Line]:
    """The limit that counts."""
    used = figures.used
    if used is None or used.limit_bytes is None:
        return []
    if used.source == "machine":
        return []  # Next to the machine's memory, the lines of a process would be flat.
    near = used.peak_bytes >= NEAR_ENOUGH * used.limit_bytes
    key = "cgroup_limit" if used.source == "cgroup" else LIMIT
    return [Line(key, f"Limit ({used.source})", "limit", near)]


def _device_chart(device: int, figures: Figures, columns: list[str]) -> Chart:
    prefix = f"cuda{device}_"
    lines = [Line(prefix + key, *DEVICE[key]) for key in DEVICE if prefix + key in columns]
    if f"{prefix}total" in columns:
        reserved = _top(figures, f"{prefix}reserved")
        near = reserved > 0 and reserved >= NEAR_ENOUGH * _top(figures, f"{prefix}total")
        lines.append(Line(f"{prefix}total", "Total", "limit", near))
    return Chart(f"cuda{device}", "bytes", f"Device memory, cuda:{device}", lines)


def _top(figures: Figures, name: str) -> int:
    """The largest reading of a column; 0 without a reading."""
    peak = figures.line.peak(name)
    return 0 if peak is None else peak[0]


def lanes(record: Record, room: int) -> tuple[list[Lane], int]:
    """The newest passages of the phases that took longest, at most `room` of each, and the number
    of phases that are left out."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for event in record.events:
        if event.kind == "phase" and event.duration_ns > 0:
            start = round(seconds_of(record, event.time_ns) * 1000)
            spans.setdefault(event.text, []).append((start, max(1, event.duration_ns // 10**6)))
    longest = sorted(spans, key=lambda name: -sum(took for _, took in spans[name]))
    found = [Lane(shown(name), spans[name][-room:]) for name in longest[:LANES]]
    return found, max(0, len(longest) - LANES)


def marks(record: Record, figures: Figures, room: int) -> list[tuple[int, str, str]]:
    """Milliseconds, kind and text of the newest events, at most `room`."""
    return [
        (round(seconds_of(record, event.time_ns) * 1000), event.kind, shown(event.text))
        for event in happened(record, figures)
    ][-room:]


def happened(record: Record, figures: Figures) -> list[RecordEvent]:
    """The events that are shown, the oldest first. Of a finding those that say something new: a
    grade, a line or its end, and not each rate on the way to the last."""
    found: list[RecordEvent] = []
    known: dict[Key, tuple[str, str, str, bool]] = {}
    for event in sorted(record.events, key=lambda event: event.time_ns):
        one = event.data
        if isinstance(one, Finding):
            news = one.grade, one.made_at, one.kept_at, one.over
            if known.get(one.key) == news:
                continue
            known[one.key] = news
        if figures.ending.shows(event.kind):
            found.append(event)
    return found
