"""One look at a record: what `memtools watch` shows, as figures and as plain text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from memtools._record import UNKNOWN, Record
from memtools._runsummary import event_texts, last, leak_lines, most
from memtools._size import format_bytes
from memtools.report._events import started_with
from memtools.report._facts import gather
from memtools.report._words import count

POINTS = 512  # of the series, at most
EVENTS = 8
STATES = {
    "running": "running",
    "ended": "the run has ended",
    "killed": "the writer is gone: the run ended without closing its record",
}


@dataclass(frozen=True)
class Device:
    """A CUDA device, in bytes; None where it is not known yet."""

    name: str
    allocated: int | None
    reserved: int | None
    free: int | None
    total: int | None


@dataclass(frozen=True)
class Happening:
    """An event, so many seconds after the start."""

    seconds: float
    kind: str
    text: str

    def line(self) -> str:
        return f"  {self.seconds:,.1f} s {self.kind}: {self.text}"


@dataclass(frozen=True)
class Passages:
    """All passages of a phase."""

    name: str
    count: int
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Frame:
    """The newest figures of a record; sizes in bytes, None where there is no reading."""

    record: str
    pid: int
    command: str
    state: str  # running, ended, killed
    seconds: float
    steps: int | None
    samples: int
    rss: int | None
    used: int | None
    limit: int | None
    limit_source: str  # given, cgroup, machine: what it uses and what the machine still has
    peak: int | None
    children: int | None
    children_private: int | None
    pressure_percent: float | None
    devices: list[Device]
    phases: list[Passages]
    leak: list[str]
    ended: str | None
    series: list[int]  # used, oldest first, each the most of a stretch of equal length
    events_total: int
    events: list[Happening]

    @property
    def share(self) -> float | None:
        """Of the limit, 0 to 1 or above."""
        return None if self.used is None or not self.limit else self.used / self.limit

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}

    def state_words(self) -> str:
        return STATES[self.state]

    def used_words(self) -> str:
        if self.limit is None or self.share is None:
            return f"{known(self.used)} used"
        share = f"{100 * self.share:.1f}%"
        return f"{known(self.used)} of {known(self.limit)} ({share}; {self.limit_source})"

    def line(self) -> str:
        """One line, as it goes into a log."""
        parts = [f"{self.seconds:,.1f} s"]
        parts += [f"step {self.steps:,}"] if self.steps else []
        parts += [self.used_words(), f"peak {known(self.peak)}"]
        if self.children:
            private = "" if self.children_private is None else f" {known(self.children_private)}"
            children = "1 child" if self.children == 1 else f"{self.children:,} children"
            parts.append(f"{children}{private}")
        for device in self.devices:
            parts.append(f"{device.name} {known(device.allocated)} in {known(device.reserved)}")
        return ", ".join(parts)

    def block(self) -> str:
        """All of it, on several lines."""
        lines = [f"{self.record}: {self.command} (process {self.pid}), {self.state_words()}"]
        lines.append(f"  {self.line()}")
        for phase in self.phases:
            lines.append(
                f"  phase {phase.name}: {count(phase.count, 'time')}, {phase.seconds:,.3f} s, "
                f"peak {known(phase.peak_bytes)}"
            )
        lines += [f"  {text}" for text in self.leak]
        lines += [event.line() for event in self.events]
        return "\n".join(lines)


def known(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


class Judge:
    """What grows, by the series of the record alone: for runs that count no steps and so test for
    no leak themselves. Judging takes up to 0.2 s, and is done for 2 % of the time at most."""

    def __init__(self) -> None:
        self._due = 0.0
        self._lines: list[str] = []

    def lines(self, record: Record) -> list[str]:
        now = time.monotonic()
        if now >= self._due:
            facts = gather(record)
            grown = [str(growth) for growth in facts.growth if growth.kind != "quiet"]
            forecast = [facts.forecast] if grown and facts.forecast else []
            self._lines = grown + forecast
            self._due = now + 50 * (time.monotonic() - now)
        return self._lines


def look(record: Record, judge: Judge | None = None) -> Frame:
    used, limit, source, series = _use(record)
    pressure = last(record, "pressure")
    columns = {column.name for column in record.columns}
    state = "ended" if record.complete else "running" if record.written else "killed"
    return Frame(
        record=record.path,
        pid=record.pid,
        command=" ".join(record.command),
        state=state,
        seconds=record.seconds,
        steps=last(record, "step"),
        samples=record.total,
        rss=last(record, "rss"),
        used=used,
        limit=limit,
        limit_source=source,
        peak=max(
            (p for p in (most(record, "rss"), *_peaks(record)) if p is not None), default=None
        ),
        children=last(record, "children"),
        children_private=last(record, "children_private"),
        pressure_percent=None if pressure is None else pressure / 100,
        devices=[_device(record, i) for i in range(8) if f"cuda{i}_allocated" in columns],
        phases=[Passages(p.name, p.count, p.seconds, p.peak_bytes) for p in record.phases],
        leak=leak_lines(record) or (judge.lines(record) if judge else []),
        ended=next(reversed(event_texts(record, "end")), None),
        series=series,
        events_total=record.events_total,
        events=_events(record),
    )


def _use(record: Record) -> tuple[int | None, int | None, str, list[int]]:
    """(used, limit, whose limit, series of used)."""
    rss, children = last(record, "rss"), last(record, "children_private") or 0
    tree = None if rss is None else rss + children
    group, group_limit = last(record, "cgroup_used"), last(record, "cgroup_limit")
    given, _ = started_with(next(iter(event_texts(record, "start")), ""))
    available = last(record, "available")
    if given is not None and (group_limit is None or given <= group_limit):
        return tree, given, "given", _series(record, tree=True)
    if group is not None and group_limit is not None:
        return group, group_limit, "cgroup", _series(record, tree=False)
    limit = None if tree is None or available is None else tree + available
    return tree, limit, "machine", _series(record, tree=True)


def _series(record: Record, tree: bool) -> list[int]:
    names = ["rss", "children_private"]
    found = record.buckets.most
    columns = [found[n] for n in (names if tree else ["cgroup_used"]) if n in found]
    points = [
        sum(value for value in row if value != UNKNOWN)
        for row in zip(*columns, strict=True)
        if row[0] != UNKNOWN
    ]
    width = -(-len(points) // POINTS) or 1
    return [max(points[i : i + width]) for i in range(0, len(points), width)]


def _peaks(record: Record) -> Iterator[int | None]:
    return (phase.peak_bytes for phase in record.phases)


def _device(record: Record, i: int) -> Device:
    tiers = (last(record, f"cuda{i}_{t}") for t in ("allocated", "reserved", "free", "total"))
    return Device(f"cuda{i}", *tiers)


def _events(record: Record) -> list[Happening]:
    shown = [event for event in record.events if event.kind != "phase"][-EVENTS:]
    return [Happening((e.time_ns - record.clock_ns) / 1e9, e.kind, e.text) for e in shown]
