"""A frame of `memtools watch`: a record at one moment, as figures and as plain text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from memtools._base.size import format_bytes
from memtools._base.text import count, shown
from memtools._record.figures import Figures, figures_of, of, plain, used_cells
from memtools._record.record import Record
from memtools._record.series import series

POINTS = 512  # points of the series, at most
EVENTS = 8


@dataclass(frozen=True)
class Device:
    """A CUDA device, in bytes; None if it is not known yet."""

    name: str
    allocated: int | None
    reserved: int | None
    free: int | None
    total: int | None


@dataclass(frozen=True)
class ShownEvent:
    """An event of the record: seconds after the start, and its text, which is made harmless."""

    seconds: float
    kind: str
    text: str

    def line(self) -> str:
        return f"  {self.seconds:,.1f} s {self.kind}: {self.text}"


@dataclass(frozen=True)
class Frame:
    """The figures of a record at one moment, and what only a live view shows."""

    figures: Figures
    state: str  # running, ended, killed
    pressure_percent: float | None
    devices: list[Device]
    leak: list[str]
    leaks: list[dict[str, Any]]  # the same for programs
    leaking: bool
    series: list[int]  # the highest use in intervals of equal length, the oldest first
    events_total: int
    events: list[ShownEvent]

    @property
    def share(self) -> float | None:
        """The use as a share of the limit, or of the machine without one: from 0 to 1, or above."""
        used, machine = self.figures.used, self.figures.machine
        if used is None or not used.limit_bytes:
            return None
        if used.source == "machine" and machine is not None:
            return machine.last_bytes / machine.total_bytes
        return used.last_bytes / used.limit_bytes

    @property
    def limit(self) -> int | None:
        """The limit for a chart of the use. The machine's memory is not one."""
        used = self.figures.used
        return None if used is None or used.source == "machine" else used.limit_bytes

    def as_json(self) -> dict[str, Any]:
        figures, used = self.figures, self.figures.used
        return {
            "record": figures.path,
            "pid": figures.pid,
            "command": figures.command,
            "state": self.state,
            "seconds": figures.seconds,
            "steps": figures.steps,
            "samples": figures.samples,
            "rss": None if figures.process is None else figures.process.last_bytes,
            "children": figures.line.last("children"),
            "children_private": None if figures.workers is None else figures.workers.last_bytes,
            "process": plain(figures.process),
            "workers": plain(figures.workers),
            "machine": plain(figures.machine),
            "used": None if used is None else used.last_bytes,
            "used_peak": figures.used_peak_bytes,
            "limit": figures.limit_bytes,
            "limit_source": figures.limit_source,
            "peak": figures.peak_bytes,
            "job_peak": figures.job_peak_bytes,
            "share": self.share,
            "pressure_percent": self.pressure_percent,
            "devices": [plain(device) for device in self.devices],
            "phases": [plain(phase) for phase in figures.phases],
            "leaks": self.leaks,
            "ended": None if self.state == "running" else figures.ending.text,
            "series": self.series,
            "events_total": self.events_total,
            "events": [plain(event) for event in self.events],
        }

    def bar_words(self) -> str:
        """The text beside the bar: the use of the limit, or of the machine without one."""
        used, machine = self.figures.used, self.figures.machine
        if used is None:
            return "memory unknown"
        if machine is not None and used.source == "machine":
            return f"the machine {of(machine.last_bytes, machine.total_bytes)}"
        if used.limit_bytes is None:
            return f"the {used.of} {format_bytes(used.last_bytes)}"
        return f"{of(used.last_bytes, used.limit_bytes)}, {used.source} limit"

    def state_words(self) -> str:
        return "running" if self.state == "running" else self.figures.ending.text

    def line(self) -> str:
        """The frame as one line, for a log."""
        figures = self.figures
        parts = [f"{figures.seconds:,.1f} s"]
        parts += [f"step {figures.steps:,}"] if figures.steps else []
        parts += [figures.now(), figures.peaks()]
        if figures.workers is not None:
            parts.append(count(figures.workers.last_count, "worker"))
        for device in self.devices:
            parts.append(f"{device.name} {known(device.allocated)} in {known(device.reserved)}")
        return ", ".join(parts)

    def block(self) -> str:
        """The frame on several lines."""
        figures = self.figures
        lines = [f"{figures.path}: {figures.command} (process {figures.pid}), {self.state_words()}"]
        lines.append(f"  {self.line()}")
        for phase in figures.phases:
            lines.append(
                f"  phase {shown(phase.name)}: {count(phase.count, 'time')}, "
                f"{phase.seconds:,.3f} s, peak {known(phase.peak_bytes)}"
            )
        guard = figures.guard_words()
        lines += [f"  {text}" for text in [*self.leak, *([guard] if guard else [])]]
        lines += [event.line() for event in self.events]
        return "\n".join(lines)


def known(count: int | None) -> str:
    return "unknown" if count is None else format_bytes(count)


class GrowthLines:
    """What grows, in lines that are kept between two looks at the same record. Judging growth takes
    up to 0.2 s. It is done for at most 2 % of the time, or when the run has recorded a finding."""

    def __init__(self) -> None:
        self._due = 0.0
        self._seen: tuple[int, bool] = (-1, False)
        self._lines: list[str] = []
        self.leaks: list[dict[str, Any]] = []
        self.leaking = False  # whether one of them is called a leak

    def lines(self, figures: Figures) -> list[str]:
        now = time.monotonic()
        events = figures.record.events
        seen = sum(e.kind == "finding" for e in events), figures.ending.kind == "running"
        if now >= self._due or seen != self._seen:
            self._lines, self._seen = figures.verdict.lines(), seen
            self.leaks = figures.verdict.as_json()["leaks"]
            self.leaking = figures.verdict.leaking
            self._due = now + 50 * (time.monotonic() - now)
        return self._lines


def frame_of(record: Record, growth: GrowthLines | None = None) -> Frame:
    """The frame of a record as it is now. Pass the same `growth` at each look at a run."""
    figures = figures_of(record)
    line = figures.line
    pressure = line.last("pressure")
    columns = {column.name for column in record.columns}
    state = "ended" if record.complete else "running" if record.written else "killed"
    counted = None if figures.used is None else used_cells(line, figures.used.source)
    growth = growth or GrowthLines()
    shown_events = [event for event in record.events if figures.ending.shows(event.kind)][-EVENTS:]
    return Frame(
        figures=figures,
        state=state,
        pressure_percent=None if pressure is None else pressure / 100,
        devices=[_device(figures, i) for i in range(8) if f"cuda{i}_allocated" in columns],
        leak=growth.lines(figures),
        leaks=growth.leaks,
        leaking=growth.leaking,
        series=[] if counted is None else series(line, counted[1], POINTS),
        events_total=record.events_total,
        events=[
            ShownEvent((e.time_ns - record.clock_ns) / 1e9, shown(e.kind), shown(e.text))
            for e in shown_events
        ],
    )


def _device(figures: Figures, i: int) -> Device:
    tiers = (figures.line.last(f"cuda{i}_{t}") for t in ("allocated", "reserved", "free", "total"))
    return Device(f"cuda{i}", *tiers)
