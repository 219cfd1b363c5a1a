"""Phases of a monitor: `with monitor.phase("train"):` and `@monitor.phase("train")`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from memtools import _core
from memtools._base.decorate import decorated, in_scope
from memtools._base.devices import DevicePeaks
from memtools._base.redact import harmless
from memtools._base.size import format_bytes

if TYPE_CHECKING:
    from memtools._monitor.log import Log
    from memtools._monitor.monitor import MemoryMonitor

EVENT_EVERY_NS = 1_000_000_000  # Events of one name are so far apart.
MOST_NAMES = 256  # Events of so many names are written; totals keep fewer, see _core.Probe.
NO_PHASE = 0  # A phase that is not counted has this token.
SHOWN_PHASES = 8  # A summary has at most so many.

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """All passages through a phase so far."""

    #: of the phase
    name: str
    #: passages
    count: int
    #: of all passages
    seconds: float
    #: of the longest passage
    longest_seconds: float
    #: the largest of resident memory
    peak_bytes: int | None
    #: False if a peak was at least that, because the kernel's mark could not be set back
    exact: bool
    #: the largest of allocated bytes, by device
    device_peak_bytes: dict[int, int]

    def __str__(self) -> str:
        parts = [f"{self.count:,} time{'' if self.count == 1 else 's'}, {self.seconds:,.3f} s"]
        if self.peak_bytes is not None:
            least = "" if self.exact else "at least "
            parts.append(f"peak {least}{format_bytes(self.peak_bytes)}")
        parts += [f"cuda{i} {format_bytes(n)}" for i, n in sorted(self.device_peak_bytes.items())]
        return f"{harmless(self.name)}: {', '.join(parts)}"


def phase_lines(phases: list[PhaseTotals]) -> list[str]:
    """Lines of a summary: the phases that took the most memory."""
    if not phases:
        return []
    most = sorted(phases, key=lambda p: -(p.peak_bytes or 0))[:SHOWN_PHASES]
    lines = ["Phases:"] + [f"  {p}" for p in phases if p in most]
    if len(phases) > SHOWN_PHASES:
        lines.append(f"  and {len(phases) - SHOWN_PHASES} of lower peaks")
    return lines


class PhaseBook:
    """The phases of one run: exact host peaks by the probe, device peaks, and the record's rows."""

    __slots__ = ("_log", "_next_event", "_probe", "_tops", "begin", "devices", "finish")

    def __init__(self, probe: _core.Probe, log: Log, devices: DevicePeaks | None) -> None:
        self._probe, self._log, self.devices = probe, log, devices
        #: the probe's own methods if there is nothing else to do: no record and no devices
        self.begin: Callable[[str], int] = probe.enter if devices is None else self.enter
        self.finish = None if log.writes or devices is not None else probe.leave
        self._next_event: dict[str, int] = {}
        self._tops: dict[str, dict[int, int]] = {}  # largest device peaks by name

    def enter(self, name: str) -> int:
        """Begin a phase. Returns its token. Raises RuntimeError if no more phases can be open."""
        token = self._probe.enter(name)
        if self.devices is not None:
            self.devices.enter(token)
        return token

    def refused(self, name: str, error: RuntimeError) -> int:
        """Report that a phase is not measured. Returns its token."""
        self._log.complain("phase", f"phase {name!r} is not measured: {error}")
        return NO_PHASE

    def leave(self, token: int, name: str) -> tuple[int | None, dict[int, int]]:
        """End a phase: keep its peaks, and write at most one event a second for each name. Returns
        the peaks of this passage, on the host and by device."""
        log, (peak, ns, _) = self._log, self._probe.leave(token)
        of_devices: dict[int, int] = {}
        if self.devices is not None:
            has_room = name in self._tops or len(self._tops) < MOST_NAMES
            row = name if has_room else "(others)"
            tops = self._tops.setdefault(row, {})
            of_devices = self.devices.leave(token)
            for index, most in of_devices.items():
                tops[index] = max(tops.get(index, 0), most)
                log.phase(f"{row} (cuda{index})", ns, most)
        if log.writes:
            log.phase(name, ns, peak)
            now = time.monotonic_ns()
            has_room = name in self._next_event or len(self._next_event) < MOST_NAMES
            if has_room and now >= self._next_event.get(name, 0):
                self._next_event[name] = now + EVENT_EVERY_NS
                log.event("phase", name, time_ns=now - ns, duration_ns=ns)
        return peak, of_devices

    def totals(self) -> list[PhaseTotals]:
        """The totals of each name that was left once, in the order in which the names came."""
        return [
            PhaseTotals(
                name, count, ns / 1e9, most_ns / 1e9, peak, inexact == 0, self._tops.get(name, {})
            )
            for name, count, ns, most_ns, peak, inexact in self._probe.phases()
            if count
        ]


class Phase:
    """A part of a program whose time and exact peaks are measured under a name.

    As a context manager it may be entered again, also inside itself, by one thread at a time. As a
    decorator it serves functions, methods, coroutines and generators, on any thread. It does
    nothing while the monitor is not running.
    """

    __slots__ = ("_entered", "_monitor", "_name", "_own_steps", "device_peak_bytes", "peak_bytes")

    def __init__(self, monitor: MemoryMonitor, name: str, *, own_steps: bool = False) -> None:
        self._monitor, self._name, self._own_steps = monitor, name, own_steps
        #: the book, its token, and what ends its own steps, of each passage that is open
        self._entered: list[tuple[PhaseBook | None, int, Callable[[], None] | None]] = []
        #: the most resident bytes in the last passage, if measured
        self.peak_bytes: int | None = None
        #: the most allocated bytes in that passage, by device
        self.device_peak_bytes: dict[int, int] = {}

    def __enter__(self) -> Phase:
        book, token = self._monitor._book, NO_PHASE
        if book is not None:
            try:
                token = book.begin(self._name)
            except RuntimeError as error:
                token = book.refused(self._name, error)
        run, end = self._monitor._live, None
        if self._own_steps and run is not None:
            steps = run.begin_steps(self._name)
            end = None if steps is None else partial(run.end_steps, steps)
        self._entered.append((book, token, end))
        return self

    def __exit__(self, *exception: object) -> None:
        book, token, end = self._entered.pop()
        if end is not None:
            end()
        if token and book is not None:
            if book.finish is not None:
                self.peak_bytes = book.finish(token)[0]
            else:
                self.peak_bytes, self.device_peak_bytes = book.leave(token, self._name)

    def __call__(self, function: _F) -> _F:
        """`function` as a phase; keeps its name, signature and documentation."""
        monitor, name, own_steps = self._monitor, self._name, self._own_steps
        return decorated(
            function,
            f"phase({name!r})",
            lambda plain: in_scope(
                plain, lambda args, kwargs: Phase(monitor, name, own_steps=own_steps)
            ),
        )
