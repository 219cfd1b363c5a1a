"""The texts of the page: what the template shows of a record, and of several side by side."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memtools._base.peak import PARTS
from memtools._base.place import line_of
from memtools._base.size import format_bytes
from memtools._base.text import count, duration, percent, sentence, shown, tight
from memtools._record.chart import happened
from memtools._record.figures import is_bytes, script_of, seconds_of
from memtools._record.kinds import Peak
from memtools._record.overview import Growth, Tile, badge, growth, growth_tile, headline, tiles
from memtools._record.peaks import changes, in_vain, meanings, peak_of, recorded_steps, smaller
from memtools._record.peaks import headline as headline_of_peak
from memtools._record.source import source_of
from memtools.report._advice import advise
from memtools.report._payload import LETTERS, OTHER, part_colour, slug

if TYPE_CHECKING:
    from memtools._record.figures import Figures, Tier
    from memtools._record.record import Record, RecordEvent

EVENTS = 400  # rows in all tables of events of a page, at most
BARS = 12  # recorded steps that are drawn, at most
#: explanations of kinds of events
MEANINGS = {
    "finding": "memory grows",
    "holder": "what fills the device",
    "pressure": "memory is running low",
    "guard": "a guard acted",
    "guard_set": "a guard was set",
    "oom": "out of memory",
    "mark": "set by the program",
    "fork": "a process was started",
    "peak": "the peak of a step was recorded",
    "trace": "allocations were traced to lines",
    "limit": "a limit of the process",
    "counters": "kernel counters",
    "shm_room": "free space in /dev/shm",
}


@dataclass(frozen=True)
class Kind:
    name: str
    slug: str
    letter: str


@dataclass(frozen=True)
class Stripe:
    """A part of a bar: its start and its width in percent. `colour` is a class of the page."""

    colour: str
    start: float
    width: float
    text: str


@dataclass(frozen=True)
class Bar:
    """What lived at the peak of one recorded step."""

    step: str
    size: str
    moment: str
    stripes: list[Stripe]


@dataclass(frozen=True)
class PeakView:
    """The recorded steps of a run, and the highest peak of them in tables."""

    headline: str
    bars: list[Bar]
    #: the place and the title of the drawing of the highest over time; None if there is none
    stack: tuple[str, str] | None
    #: the same of the traced step, and of it after each change; empty if there is no trace
    traced_stacks: list[tuple[str, str]]
    #: class of the colour, what, bytes, share, blocks
    parts: list[list[str]]
    #: how many, bytes of each, shape, what, where, and the text of that line
    largest: list[list[str]]
    #: who saved for the backward pass, the text of that line, bytes, blocks
    saved: list[list[str]]
    #: explanations of parts, and the parts whose blocks are too small for the list
    meanings: list[str]
    smaller: list[str]
    #: the peak of the traced step, and with one change each: bytes, and the change
    traced: str
    changes: list[list[str]]


@dataclass(frozen=True)
class View:
    """One record as the template shows it."""

    number: int
    name: str
    figures: Figures
    charts: list[tuple[str, str]]
    ending: str = ""
    headline: str = ""
    started: str = ""
    samples: str = ""
    lanes_note: str = ""
    marks: list[tuple[Kind, str]] = field(default_factory=list)
    more_events: str = ""
    advice: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    phases: list[list[str]] = field(default_factory=list)
    cleanups: list[list[str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    columns: list[list[str]] = field(default_factory=list)
    peak: PeakView | None = None


def view(number: int, name: str, record: Record, figures: Figures, data: dict[str, Any]) -> View:
    rows = max(20, EVENTS // len(data["records"]))
    events = happened(record, figures)
    first, last = events[: rows // 4], events[rows // 4 :][-(rows - rows // 4) :]
    hidden = len(events) - len(first) - len(last)
    places = [(c["place"], c["title"]) for c in data["charts"]]
    return View(
        number=number,
        name=name,
        figures=figures,
        charts=[pair for pair in places if pair[0].startswith(f"r{number}-")],
        ending=badge(figures.ending),
        headline=headline(figures),
        started=_started(figures.start),
        samples=count(figures.samples, "sample"),
        lanes_note=_lanes_note(data["records"][number]),
        marks=_marks(data["records"][number]),
        more_events=f"{hidden:,} events in between are not shown." if hidden > 0 else "",
        advice=[tight(sentence(line)) for line in advise(figures)],
        tiles=tiles(figures),
        growth=growth(figures),
        notes=[tight(sentence(line)) for line in figures.verdict.notes()],
        phases=_phases(figures),
        cleanups=_cleanups(figures),
        events=[_event(record, event) for event in first + last],
        columns=[_column(tier) for tier in figures.tiers],
        peak=_peak(figures, number, [(one["place"], one["title"]) for one in data["stacks"]]),
    )


def _started(seconds: float) -> str:
    try:
        when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return "at no known time"
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def _lanes_note(data: dict[str, Any]) -> str:
    if not data["lanes"]:
        return ""
    left = data["lanes_left_out"]
    note = "The bars below the time line are phases: at most one of each name is drawn per second, "
    note += "and the table below counts all."
    return note + (f" {left:,} shorter phases are not drawn." if left else "")


def kind_of(name: str) -> Kind:
    return Kind(shown(name), slug(name), LETTERS.get(name, OTHER))


def _marks(data: dict[str, Any]) -> list[tuple[Kind, str]]:
    """The legend of the letters on the time line: kinds of events with explanations."""
    there = {kind for _, kind, _ in data["marks"]}
    found = [(kind_of(kind), MEANINGS.get(kind, "")) for kind in LETTERS if kind in there]
    return found + ([(kind_of("other"), "")] if "other" in there else [])


# --- tables ---------------------------------------------------------------------------------------


def _peak(figures: Figures, number: int, stacks: list[tuple[str, str]]) -> PeakView | None:
    """What lived at the peaks of the recorded steps; None if no step was recorded. `stacks` are the
    places and titles of all drawings of the page."""
    highest = peak_of(figures.record)
    if highest is None:
        return None
    recorded = recorded_steps(figures.record)
    if len(recorded) > BARS:  # the highest is one of them
        newest = [one for one in recorded if one is not highest][-(BARS - 1) :]
        recorded = [one for one in recorded if one is highest or one in newest]
    parts = [
        [part_colour(one.what), one.what, format_bytes(one.bytes),
         percent(one.bytes, highest.peak_bytes), f"{one.blocks:,}" if one.blocks else ""]
        for one in highest.parts
    ]  # fmt: skip
    saved = [
        [one.where, source_of(figures.record, _name_of_saver(one.where)),
         format_bytes(one.bytes), f"{one.blocks:,}"]
        for one in highest.saved
    ]  # fmt: skip
    return PeakView(
        tight(sentence(headline_of_peak(figures, highest))),
        [_bar(one, highest.peak_bytes) for one in recorded],
        next((one for one in stacks if one[0] == f"p{number}"), None),
        [one for one in stacks if one[0].partition("-")[0] == f"t{number}"],
        [[shown(cell) for cell in row] for row in parts],
        _largest(figures.record, highest),
        [[shown(cell) for cell in row] for row in saved],
        [sentence(text) for text in meanings(highest)],
        [tight(sentence(text)) for text in (*smaller(highest), *in_vain(highest))],
        "" if highest.traced is None else format_bytes(highest.traced.peak_bytes),
        [[size, where, change] for size, _, where, change in changes(highest)],
    )


def _largest(record: Record, peak: Peak) -> list[list[str]]:
    """The largest blocks: rows that are equal are one, with their number."""
    rows = []
    for one in peak.largest:
        shape = f"{one.dtype} {list(one.shape) if one.shape else ''}".strip()
        text = "" if one.name else source_of(record, one.line)
        line = line_of(one.line) if text else one.line
        where = one.name or ", ".join(part for part in (one.operator, line) if part)
        row = (format_bytes(one.bytes), shape, one.what, where, text)
        rows.append(tuple(shown(cell) for cell in row))
    return [[f"{alike:,}" if alike > 1 else "", *row] for row, alike in Counter(rows).items()]


def _name_of_saver(where: str) -> str:
    """`net.py:3 in forward` of `Net.forward (net.py:3)`, as source_of() reads it."""
    function, _, line = where.removesuffix(")").rpartition(" (")
    name = function.rpartition(".")[2]
    return f"{line} in {name}" if name.isidentifier() else line


def _bar(peak: Peak, most: int) -> Bar:
    """A bar with stripes in the order of PARTS, so that bars can be compared."""
    order = {what: number for number, what in enumerate(PARTS)}
    stripes, start = [], 0.0
    for part in sorted(peak.parts, key=lambda part: order.get(part.what, len(order))):
        width = min(100.0 - start, 100 * max(0, part.bytes) / most)
        text = f"{shown(part.what)} {format_bytes(part.bytes)}"
        stripes.append(Stripe(part_colour(part.what), start, width, text))
        start += width
    name = shown(peak.name().removeprefix("step "))
    return Bar(name, format_bytes(peak.peak_bytes), shown(peak.moment()), stripes)


def _phases(figures: Figures) -> list[list[str]]:
    return [
        [
            shown(phase.name),
            "" if phase.peak_bytes is None else format_bytes(phase.peak_bytes),
            f"{phase.count:,}",
            duration(phase.seconds),
            duration(phase.seconds / phase.count) if phase.count else "",
            percent(phase.seconds, figures.seconds),
        ]
        for phase in figures.phases
    ]


def _cleanups(figures: Figures) -> list[list[str]]:
    rows = []
    for cleanup in figures.cleanups:
        freed = cleanup.freed_bytes
        rows.append(
            [
                cleanup.what,
                f"{cleanup.count:,}",
                duration(cleanup.seconds),
                percent(cleanup.seconds, figures.seconds),
                "unknown" if freed is None else format_bytes(freed),
                ""
                if freed is None or not cleanup.seconds
                else format_bytes(freed / cleanup.seconds / 1e3),
            ]
        )
    return rows


def _event(record: Record, event: RecordEvent) -> dict[str, Any]:
    seconds = seconds_of(record, event.time_ns)
    took = event.duration_ns / 1e9
    return {
        "at": round(seconds * 1000),
        "when": duration(seconds),
        "step": "" if event.step is None else f"{event.step:,}",
        "kind": kind_of(event.kind),
        "text": shown(event.text),
        "took": duration(took) if took else "",
    }


def _column(tier: Tier) -> list[str]:
    sizes = (tier.first, tier.least, tier.peak, tier.last)
    if is_bytes(tier.unit):
        return [tier.name, *map(format_bytes, sizes)]
    if tier.unit in ("0.01%", "1/100 percent"):
        return [tier.name, *(f"{value / 100:,.2f} %" for value in sizes)]
    unit = "" if tier.unit == "count" else f" {tier.unit}".rstrip()
    return [tier.name, *(f"{value:,}{unit}" for value in sizes)]


# --- side by side ---------------------------------------------------------------------------------


def compare(views: list[View], data: dict[str, Any]) -> dict[str, Any]:
    """The table and the charts that show all records together."""
    devices = sorted({device for view in views for device in view.figures.devices})
    names = ["Peak", "Of the limit", "Growth", "Steps", "Each step (median)", "Duration"]
    names += [f"Peak of cuda:{device}" for device in devices]
    return {
        "names": names,
        "rows": [{"view": view, "cells": _cells(view.figures, devices)} for view in views],
        "charts": [
            (chart["place"], chart["title"])
            for chart in data["charts"]
            if chart["place"].startswith("all-")
        ],
    }


def _cells(figures: Figures, devices: list[int]) -> list[str]:
    used, growth = figures.used, growth_tile(figures).value
    limit = used.limit_bytes if used and used.source != "machine" else None
    peak = figures.job or used
    peaks = {tier.name: format_bytes(tier.peak) for tier in figures.tiers}
    return [
        "" if peak is None else format_bytes(peak.peak_bytes),
        percent(used.peak_bytes, limit) if used and limit else "no limit",
        growth,
        f"{figures.steps:,}" if figures.steps else "",
        "" if figures.step_seconds is None else duration(figures.step_seconds),
        duration(figures.seconds),
        *(peaks.get(f"cuda{device}_allocated", "") for device in devices),
    ]


def names(records: list[Record]) -> list[str]:
    """A short name of each record: its file name, or its path if two names are the same."""
    short = [os.path.basename(record.path) for record in records]
    alike = len(set(short)) < len(short)
    return [
        shown(record.path if alike else name) for record, name in zip(records, short, strict=True)
    ]


def title(records: list[Record]) -> str:
    """The title of the page, with the name of the script."""
    if len(records) > 1:
        return f"Memory of {len(records)} runs"
    return shown(f"Memory of {script_of(records[0]) or 'a run'}")
