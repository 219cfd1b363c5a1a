"""The page's texts: what the template shows of one record, and of several side by side."""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memtools.report._advice import advise, leaking, newest_leak
from memtools.report._explain import sentence
from memtools.report._facts import headline, is_bytes, seconds_of, standing
from memtools.report._payload import slug
from memtools.report._words import count, duration, percent, shown, size, tight

if TYPE_CHECKING:
    from memtools._record import Record, RecordEvent
    from memtools.report._facts import Facts, Said, Tier

ENDINGS = {
    "clean": "Ended properly",
    "failed": "Failed",
    "killed": "Killed",
    "running": "Still running",
}
EVENTS = 400  # rows of a page's tables of events


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
class View:
    """One record as the template shows it."""

    number: int
    name: str
    facts: Facts
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


def view(number: int, name: str, record: Record, facts: Facts, data: dict[str, Any]) -> View:
    rows = max(20, EVENTS // len(data["records"]))
    events = [event for event in record.events if event.kind != "phase"]
    events.sort(key=lambda event: event.time_ns)
    first, last = events[: rows // 4], events[rows // 4 :][-(rows - rows // 4) :]
    hidden = len(events) - len(first) - len(last)
    places = [(c["place"], c["title"]) for c in data["charts"]]
    return View(
        number=number,
        name=name,
        facts=facts,
        charts=[pair for pair in places if pair[0].startswith(f"r{number}-")],
        ending=ENDINGS[facts.ending.kind],
        headline=_headline(facts),
        started=_started(facts.start),
        samples=count(facts.samples, "sample"),
        lanes_note=_lanes_note(data["records"][number]),
        no_leaks=sentence(facts.not_judged or "nothing grows"),
        more_events=f"{hidden:,} more events between these are not shown." if hidden > 0 else "",
        advice=[tight(sentence(line)) for line in advise(facts)],
        tiles=_tiles(facts),
        leaks=_leaks(facts),
        phases=_phases(facts),
        cleanups=_cleanups(facts),
        events=[_event(record, event) for event in first + last],
        columns=[_column(tier) for tier in facts.tiers],
    )


def _headline(facts: Facts) -> str:
    """Without what the badge beside it says already."""
    if facts.ending.kind == "clean":
        return tight(sentence(standing(facts))) if facts.used else ""
    return tight(sentence(headline(facts)))


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


def _tiles(facts: Facts) -> list[Tile]:
    tiles = _used_tiles(facts) + _growth_tiles(facts)
    for device in facts.devices:
        tiers = {tier.name: tier for tier in facts.tiers}
        allocated = tiers.get(f"cuda{device}_allocated")
        reserved = tiers.get(f"cuda{device}_reserved")
        if allocated is not None:
            remark = f"reserved {size(reserved.peak)}" if reserved else ""
            tiles.append(Tile(f"Peak of cuda:{device}", size(allocated.peak), remark))
    if facts.steps:
        each = duration(facts.seconds / facts.steps)
        tiles.append(Tile("Steps", f"{facts.steps:,}", f"{each} each"))
    tiles.append(Tile("Duration", duration(facts.seconds), count(facts.samples, "sample")))
    return tiles


def _used_tiles(facts: Facts) -> list[Tile]:
    used = facts.used
    if used is None:
        return []
    at = f"at {duration(used.peak_seconds)}"
    shares: list[float | None] = [None, None]
    if used.limit_bytes is None:
        remarks = [f"{at}, no limit recorded", used.of]
    else:
        limit = f"of {size(used.limit_bytes)} ({used.source} limit)"
        parts = [percent(n, used.limit_bytes) for n in (used.peak_bytes, used.last_bytes)]
        remarks = [tight(f"{parts[0]} {limit}, {at}"), f"{parts[1]} of the limit"]
        shares = [_share(n, used.limit_bytes) for n in (used.peak_bytes, used.last_bytes)]
    machine = used.of == "machine"
    own = _own_peak(facts) if machine else []
    return own + [
        Tile(
            "Peak of the machine" if machine else "Peak",
            size(used.peak_bytes),
            remarks[0],
            shares[0],
        ),
        Tile(
            "Machine at the end" if machine else "At the end",
            size(used.last_bytes),
            remarks[1],
            shares[1],
        ),
    ]


def _own_peak(facts: Facts) -> list[Tile]:
    """Of the process, beside a machine that it shares with others."""
    peaks = {tier.name: tier for tier in facts.tiers}
    own = peaks.get("rss")
    return [Tile("Peak", size(own.peak), f"at {duration(own.peak_seconds)}")] if own else []


def _share(part: int, whole: int) -> float:
    return min(100.0, 100 * part / whole)


def _growth_tiles(facts: Facts) -> list[Tile]:
    tiles = []
    said = re.match(r"(\w+): (\+\S+ \S+/step) in (\w+)", newest_leak(facts))
    if said and leaking(facts) and not any(g.kind in ("leak", "likely") for g in facts.growth):
        tiles.append(Tile("Growth at the end", said[2], f"{said[1]}, in {said[3]}"))
    elif facts.growth:
        growth = max(facts.growth, key=lambda g: (g.kind in ("leak", "likely"), g.rate_bytes))
        rate = f"+{size(growth.rate_bytes)}/{growth.per}"
        tiles.append(
            Tile("Growth at the end", rate, f"{growth.kind}, in {growth.signal}{growth.cost()}")
        )
    else:
        tiles.append(Tile("Growth at the end", "none" if facts.not_judged is None else "unknown"))
    return tiles


# --- tables ---------------------------------------------------------------------------------------


def _leaks(facts: Facts) -> list[dict[str, Any]]:
    said = sorted(
        [(one, "leak") for one in facts.leaks] + [(one, "holder") for one in facts.holders],
        key=lambda pair: pair[0].seconds,
    )
    rows = [_leak(one, kind) for one, kind in said]
    if not facts.leaks:
        rows += [
            {"when": "at the end", "kind": kind_of("leak"), "text": f"{growth}, judged afterwards"}
            for growth in facts.growth
        ]
    return rows


def _leak(one: Said, kind: str) -> dict[str, Any]:
    times = "" if one.count == 1 else f" (said {one.count:,} times)"
    return {"when": duration(one.seconds), "kind": kind_of(kind), "text": one.text + times}


def _phases(facts: Facts) -> list[list[str]]:
    return [
        [
            shown(phase.name),
            "" if phase.peak_bytes is None else size(phase.peak_bytes),
            f"{phase.count:,}",
            duration(phase.seconds),
            duration(phase.seconds / phase.count) if phase.count else "",
            percent(phase.seconds, facts.seconds),
        ]
        for phase in facts.phases
    ]


def _cleanups(facts: Facts) -> list[list[str]]:
    rows = []
    for one in facts.cleanups:
        freed = one.freed_bytes
        rows.append(
            [
                one.what,
                f"{one.count:,}",
                duration(one.seconds),
                percent(one.seconds, facts.seconds),
                "unknown" if freed is None else size(freed),
                "" if freed is None or not one.seconds else size(freed / one.seconds / 1e3),
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
        return [tier.name, *map(size, sizes)]
    if tier.unit in ("0.01%", "1/100 percent"):
        return [tier.name, *(f"{value / 100:,.2f} %" for value in sizes)]
    unit = "" if tier.unit == "count" else f" {tier.unit}".rstrip()
    return [tier.name, *(f"{value:,}{unit}" for value in sizes)]


# --- side by side ---------------------------------------------------------------------------------


def compare(views: list[View], data: dict[str, Any]) -> dict[str, Any]:
    """The table and the charts that hold all records at once."""
    devices = sorted({device for view in views for device in view.facts.devices})
    names = ["Peak", "Of the limit", "Growth", "Steps", "Each step", "Duration"]
    names += [f"Peak of cuda:{device}" for device in devices]
    return {
        "names": names,
        "rows": [{"view": view, "cells": _cells(view.facts, devices)} for view in views],
        "charts": [
            (chart["place"], chart["title"])
            for chart in data["charts"]
            if chart["place"].startswith("all-")
        ],
    }


def _cells(facts: Facts, devices: list[int]) -> list[str]:
    used, growth = facts.used, _growth_tiles(facts)[0].value
    limit = used.limit_bytes if used and used.source != "machine" else None
    peaks = {tier.name: size(tier.peak) for tier in facts.tiers}
    return [
        next((tile.value for tile in _used_tiles(facts)), ""),
        percent(used.peak_bytes, limit) if used and limit else "no limit",
        growth,
        f"{facts.steps:,}" if facts.steps else "",
        duration(facts.seconds / facts.steps) if facts.steps else "",
        duration(facts.seconds),
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
    command = list(records[0].command)
    script = next((part for part in command if part.endswith(".py")), "")
    if not script and "-m" in command[:-1]:
        script = command[command.index("-m") + 1]
    script = os.path.basename(script or (command[0] if command else "")) or "a run"
    return shown(f"Memory of {script}")
