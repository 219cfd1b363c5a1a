"""The page's texts: what the template shows of one record, and of several side by side."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memtools._base.peak import PARTS
from memtools._base.size import format_bytes
from memtools._base.text import count, duration, percent, shown, tight
from memtools.leak.finding import is_call
from memtools.record.events import events_of
from memtools.record.figures import Use, Used, is_bytes, of, script_of, seconds_of
from memtools.record.kinds import Peak
from memtools.record.peaks import headline, peak_of
from memtools.report.advice import advise
from memtools.report.explain import sentence
from memtools.report.payload import part_colour, slug

if TYPE_CHECKING:
    from memtools.record.events import Ending
    from memtools.record.figures import Figures, Tier
    from memtools.record.record import Record, RecordEvent

ENDINGS = {
    "clean": "Finished",
    "ended": "Ended",
    "failed": "Failed",
    "gone": "No end mark",
    "killed": "Killed",
    "running": "Still running",
}
EVENTS = 400  # rows of a page's tables of events
BARS = 12  # recorded steps that are drawn


@dataclass(frozen=True)
class Kind:
    name: str
    slug: str
    letter: str


@dataclass(frozen=True)
class Tile:
    """One figure at the top; `share` is of a limit, in percent."""

    name: str
    value: str
    remark: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Stripe:
    """A part of a bar: from where, and how wide, in percent; `colour` is a class of the page."""

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
    #: where the highest is drawn over time, and its title; none in older records
    stack: tuple[str, str] | None
    #: class of the colour, what, bytes, share, blocks
    parts: list[list[str]]
    #: bytes, shape, what and where
    largest: list[list[str]]
    #: who saved for the backward pass, bytes, blocks
    saved: list[list[str]]


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
    no_leaks: str = ""
    more_events: str = ""
    advice: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    leaks: list[dict[str, Any]] = field(default_factory=list)
    phases: list[list[str]] = field(default_factory=list)
    cleanups: list[list[str]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    columns: list[list[str]] = field(default_factory=list)
    peak: PeakView | None = None


def view(number: int, name: str, record: Record, figures: Figures, data: dict[str, Any]) -> View:
    rows = max(20, EVENTS // len(data["records"]))
    events = [event for event in record.events if figures.ending.shows(event.kind)]
    events.sort(key=lambda event: event.time_ns)
    first, last = events[: rows // 4], events[rows // 4 :][-(rows - rows // 4) :]
    hidden = len(events) - len(first) - len(last)
    headline = figures.headline()
    if figures.ending.kind == "clean":  # which the badge beside it says already
        headline = figures.standing()
    headline = tight(sentence(headline)) if headline else ""
    places = [(c["place"], c["title"]) for c in data["charts"]]
    return View(
        number=number,
        name=name,
        figures=figures,
        charts=[pair for pair in places if pair[0].startswith(f"r{number}-")],
        ending=_ending(figures.ending),
        headline=headline,
        started=_started(figures.start),
        samples=count(figures.samples, "sample"),
        lanes_note=_lanes_note(data["records"][number]),
        no_leaks=sentence(figures.verdict.short or figures.verdict.nothing),
        more_events=f"{hidden:,} more events between these are not shown." if hidden > 0 else "",
        advice=[tight(line) for line in advise(figures)],
        tiles=_tiles(figures),
        leaks=_leaks(figures),
        phases=_phases(figures),
        cleanups=_cleanups(figures),
        events=[_event(record, event) for event in first + last],
        columns=[_column(tier) for tier in figures.tiers],
        peak=_peak(record, next((s for s in data["stacks"] if s["place"] == f"p{number}"), None)),
    )


def _ending(ending: Ending) -> str:
    """The badge: no mark is left by what the kernel killed, and its counters know of it."""
    if ending.kind == "gone" and ending.cause is not None and ending.cause.is_memory:
        return ENDINGS["killed"]
    return ENDINGS[ending.kind]


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
    note = "Bars below the time line are phases: the record keeps at most one passage per name and "
    note += "second for drawing, the table below counts all."
    return note + (f" {left:,} shorter phases are not drawn." if left else "")


def kind_of(name: str) -> Kind:
    letter = name[:1].upper()
    return Kind(shown(name), slug(name), letter if letter.isalnum() and letter.isascii() else "?")


# --- figures at the top ---------------------------------------------------------------------------


def _tiles(figures: Figures) -> list[Tile]:
    tiles = [*_used_tiles(figures), _growth_tile(figures)]
    for device in figures.devices:
        tiers = {tier.name: tier for tier in figures.tiers}
        allocated = tiers.get(f"cuda{device}_allocated")
        reserved = tiers.get(f"cuda{device}_reserved")
        if allocated is not None:
            remark = f"reserved {format_bytes(reserved.peak)}" if reserved else ""
            tiles.append(Tile(f"Peak of cuda:{device}", format_bytes(allocated.peak), remark))
    if figures.steps:
        each = duration(figures.seconds / figures.steps)
        tiles.append(Tile("Steps", f"{figures.steps:,}", f"{each} each"))
    tiles.append(Tile("Duration", duration(figures.seconds), count(figures.samples, "sample")))
    return tiles


def _used_tiles(figures: Figures) -> list[Tile]:
    """The process, the job and the machine: three figures under three names, and the one that
    counts against the limit with its share."""
    used, name = figures.used, "process tree" if figures.outside else "process"
    tiles = []
    if figures.process is not None:
        tiles.append(_peak_tile(f"Peak of the {name}", figures.process, figures, "process"))
    if figures.job is not None and (figures.workers or figures.shared):
        tiles.append(_peak_tile("Peak of the job", figures.job, figures, "job"))
    if figures.workers is not None:
        peak = format_bytes(figures.workers.peak_bytes)
        theirs = f"{figures.workers.most:,} at most, {peak} of their own"
        tiles.append(Tile("Workers", peak, theirs))
    if figures.shared is not None:
        now = f"{format_bytes(figures.shared.last_bytes)} at the end"
        tiles.append(Tile("Shared memory", format_bytes(figures.shared.peak_bytes), now))
    if used is not None and used.of == "control group":
        tiles.append(_peak_tile("Peak of the control group", used, figures, "control group"))
    if used is not None and used.limit_bytes is not None and used.source != "machine":
        remark = f"{percent(used.last_bytes, used.limit_bytes)} of the limit"
        share = _share(used.last_bytes, used.limit_bytes)
        tiles.append(Tile("At the end", format_bytes(used.last_bytes), remark, share))
    if figures.machine is not None and (used is None or used.source == "machine"):
        machine = figures.machine
        share = _share(machine.last_bytes, machine.total_bytes)
        remark = tight(f"{of(machine.last_bytes, machine.total_bytes)} in use at the end")
        tiles.append(Tile("Machine, all programs", format_bytes(machine.last_bytes), remark, share))
    return tiles


def _peak_tile(name: str, use: Use | Used, figures: Figures, counted: str) -> Tile:
    used = figures.used
    at = "" if use.peak_seconds is None else f"at {duration(use.peak_seconds)}"
    if used is None or used.limit_bytes is None:
        return Tile(
            name, format_bytes(use.peak_bytes), at + ("" if used is None else ", no limit recorded")
        )
    if used.of != counted or used.source == "machine":
        return Tile(name, format_bytes(use.peak_bytes), at)
    limit = f"of {format_bytes(used.limit_bytes)} ({used.source} limit)"
    remark = f"{percent(use.peak_bytes, used.limit_bytes)} {limit}" + (f", {at}" if at else "")
    return Tile(
        name, format_bytes(use.peak_bytes), tight(remark), _share(use.peak_bytes, used.limit_bytes)
    )


def _share(part: int, whole: int) -> float:
    return min(100.0, 100 * part / whole)


def _growth_tile(figures: Figures) -> Tile:
    verdict = figures.verdict
    if verdict.findings:
        worst = verdict.findings[0]
        rate = f"+{format_bytes(worst.rate_bytes)}/{worst.per}" if worst.rate_bytes else "yes"
        more = len(verdict.findings) - 1
        others = f", and {more:,} more" if more else ""
        return Tile("Growth at the end", rate, f"{worst.grade}: {worst.subject}{others}")
    if verdict.late is not None and verdict.short is None:
        gain, last = format_bytes(verdict.late.gain_bytes), verdict.late.last
        return Tile("Growth at the end", f"+{gain}", f"in the last {last}")
    return Tile("Growth at the end", "none" if verdict.short is None else "too early to say")


# --- tables ---------------------------------------------------------------------------------------


def _leaks(figures: Figures) -> list[dict[str, Any]]:
    """What grows, one row for each finding: when it was first said, and what to do."""
    verdict, found = figures.verdict, []
    for one, text in zip(verdict.findings, verdict.lines(), strict=True):
        found.append(
            {
                "grade": one.grade,
                "call": is_call(one.grade),
                "when": "" if one.first_step is None else f"step {one.first_step:,}",
                "text": tight(text.partition(": ")[2]),
                "advice": tight(one.advice),
            }
        )
    return found


def _peak(record: Record, stack: dict[str, Any] | None) -> PeakView | None:
    """What lived at the peaks of the steps that were recorded; None where none was. `stack` is what
    is drawn of the highest."""
    highest = peak_of(record)
    if highest is None:
        return None
    recorded = {one.step: one for one in events_of(record, Peak) if one.peak_bytes > 0}
    steps = sorted(recorded)
    if len(steps) > BARS:  # the highest is one of them
        newest = [step for step in steps if step != highest.step][-(BARS - 1) :]
        steps = sorted([highest.step, *newest])
    parts = [
        [part_colour(one.what), one.what, format_bytes(one.bytes),
         percent(one.bytes, highest.peak_bytes), f"{one.blocks:,}" if one.blocks else ""]
        for one in highest.parts
    ]  # fmt: skip
    largest = [
        [format_bytes(one.bytes), f"{one.dtype} {list(one.shape) if one.shape else ''}".strip(),
         one.what, one.name or ", ".join(part for part in (one.operator, one.line) if part)]
        for one in highest.largest
    ]  # fmt: skip
    saved = [[one.where, format_bytes(one.bytes), f"{one.blocks:,}"] for one in highest.saved]
    return PeakView(
        tight(sentence(headline(highest))),
        [_bar(recorded[step], highest.peak_bytes) for step in steps],
        None if stack is None else (stack["place"], f"Step {highest.step:,} from begin to end"),
        [[shown(cell) for cell in row] for row in parts],
        [[shown(cell) for cell in row] for row in largest],
        [[shown(cell) for cell in row] for row in saved],
    )


def _bar(peak: Peak, most: int) -> Bar:
    """Stripes in the order of PARTS, so that bars can be compared."""
    order = {what: number for number, what in enumerate(PARTS)}
    stripes, start = [], 0.0
    for part in sorted(peak.parts, key=lambda part: order.get(part.what, len(order))):
        width = min(100.0 - start, 100 * max(0, part.bytes) / most)
        text = f"{shown(part.what)} {format_bytes(part.bytes)}"
        stripes.append(Stripe(part_colour(part.what), start, width, text))
        start += width
    return Bar(f"{peak.step:,}", format_bytes(peak.peak_bytes), shown(peak.moment()), stripes)


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
    """The table and the charts that hold all records at once."""
    devices = sorted({device for view in views for device in view.figures.devices})
    names = ["Peak", "Of the limit", "Growth", "Steps", "Each step", "Duration"]
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
    used, growth = figures.used, _growth_tile(figures).value
    limit = used.limit_bytes if used and used.source != "machine" else None
    peak = figures.job or used
    peaks = {tier.name: format_bytes(tier.peak) for tier in figures.tiers}
    return [
        "" if peak is None else format_bytes(peak.peak_bytes),
        percent(used.peak_bytes, limit) if used and limit else "no limit",
        growth,
        f"{figures.steps:,}" if figures.steps else "",
        duration(figures.seconds / figures.steps) if figures.steps else "",
        duration(figures.seconds),
        *(peaks.get(f"cuda{device}_allocated", "") for device in devices),
    ]


def names(records: list[Record]) -> list[str]:
    """A short name of each record: the file's, or its path where two are alike."""
    short = [os.path.basename(record.path) for record in records]
    alike = len(set(short)) < len(short)
    return [
        shown(record.path if alike else name) for record, name in zip(records, short, strict=True)
    ]


def title(records: list[Record]) -> str:
    """Named after the script, which is what people look for."""
    if len(records) > 1:
        return f"Memory of {len(records)} runs"
    return shown(f"Memory of {script_of(records[0].command) or 'a run'}")
