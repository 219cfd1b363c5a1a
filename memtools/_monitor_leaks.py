"""The leak test of a monitor: what it reads at the end of a step, and how often."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence

from memtools import _core, _monitor_device
from memtools._holders import Holder
from memtools._leaks import LeakDetector, LeakVerdict, StepsLeft
from memtools._monitor_log import Log
from memtools._monitor_suspect import Suspicion
from memtools._size import format_bytes

READ_HEAP, READ_CHILDREN = 32, 64  # of _core.Probe.read
VERDICT_EVERY_NS = 1_000_000_000
_TOLD = ("likely", "leak", "fragmentation")  # kinds that are worth an event by themselves


@dataclasses.dataclass(frozen=True)
class FillVerdict(LeakVerdict):
    """Growth that a census has found to be a container with a bound that is filling up."""

    #: that container, and how far it is
    filling: str = ""

    def __str__(self) -> str:
        rate = format_bytes(self.rate_bytes_per_step)
        line = f"growing: +{rate}/step in {self.signal} since step {self.since_step:,}, but no leak"
        return f"{line}: a buffer fills, {self.filling}"


class Signal:
    """One series that the detector is fed with, read as often as it is cheap."""

    __slots__ = ("due", "name", "pause", "read")

    def __init__(self, name: str, read: Callable[[], int | None], pause: int) -> None:
        self.name, self.read = name, read
        #: after a reading it rests for so many times what the reading took
        self.pause = pause
        self.due = 0


def _heap(probe: _core.Probe) -> Callable[[], int | None]:
    return lambda: probe.read(READ_HEAP).heap_used


def _children(probe: _core.Probe) -> Callable[[], int | None]:
    return lambda: probe.read(READ_CHILDREN).children_private


def _python() -> int:
    """Bytes of the interpreter's own blocks, about; 20 to 60 us."""
    return 64 * sys.getallocatedblocks()


def signals_of(probe: _core.Probe, devices: Sequence[int]) -> list[Signal]:
    """Each takes at most 0.2 % of the time, the interpreter's blocks 0.5 %."""
    found = [
        Signal("rss", probe.rss, 500),
        Signal("heap", _heap(probe), 500),
        Signal("children", _children(probe), 500),
        Signal("python", _python, 200),
    ]
    if devices:
        found.append(Signal("device", lambda: _monitor_device.allocated(devices), 500))
    return found


class Limits:
    """What is left for this process: of the host's memory, and of the devices'."""

    __slots__ = ("device", "host")

    def __init__(
        self, host: Callable[[], int | None], device: Callable[[], int | None] = lambda: None
    ) -> None:
        #: bytes at which this process with its children reaches the limit; None when unknown
        self.host = host
        self.device = device


class LeakWatch:
    """Feeds a LeakDetector, starts a census on suspicion, and writes what is found.

    `look` is for the main thread, at the end of a step. All else may be asked at any time.
    """

    __slots__ = (
        "_checked",
        "_last_step",
        "_limits",
        "_log",
        "_pressing",
        "_signals",
        "_told",
        "detector",
        "kind",
        "suspicion",
    )

    def __init__(
        self, signals: list[Signal], limits: Limits, log: Log, suspicion: Suspicion | None
    ) -> None:
        self.detector = LeakDetector()
        self.suspicion = suspicion
        self.kind = "quiet"
        self._signals, self._limits, self._log = signals, limits, log
        self._last_step = -1
        self._checked = 0
        self._told = "quiet"  # the kind of the newest event
        self._pressing = False

    def look(self, step: int) -> int:
        """Reads what is due; when to look again, in ns of the monotonic clock."""
        now = time.monotonic_ns()
        if step > self._last_step:
            self._last_step = step
            readings: dict[str, int | None] = {}
            for signal in self._signals:
                if now >= signal.due:
                    readings[signal.name] = signal.read()
                    then = time.monotonic_ns()
                    signal.due = then + signal.pause * (then - now)
                    now = then
            self.detector.update(step, **readings)
        kind = self.detector.kind
        if kind != self.kind or (kind != "quiet" and now >= self._checked):
            self._check(kind, step, now)
        if kind != "quiet" and self.suspicion is not None and self.suspicion.due(step, now):
            self._census(step)
        return min(signal.due for signal in self._signals)

    def _check(self, kind: str, step: int, now: int) -> None:
        """At each change of the grade, and every second while something grows."""
        escalated, self.kind = kind != self.kind, kind
        self._checked = now + VERDICT_EVERY_NS
        if self.suspicion is not None:
            if kind == "quiet":
                self.suspicion.end()
            elif escalated:
                self.suspicion.hurry(step, urgent=kind in _TOLD)
        verdict = self.verdict()
        self._tell(verdict)
        if verdict.pressure and not self._pressing:
            self._log.event("pressure", f"forecast: {verdict.steps_left} ({verdict.signal} grows)")
        self._pressing = verdict.pressure

    def _tell(self, verdict: LeakVerdict) -> None:
        if verdict.kind in _TOLD and verdict.kind != self._told:
            self._log.event("leak", str(verdict))
            self._told = verdict.kind
        elif verdict.kind not in _TOLD and self._told in _TOLD:
            self._log.event("leak", f"no longer: {verdict}")
            self._told = verdict.kind

    def _census(self, step: int) -> None:
        assert self.suspicion is not None
        fresh = self.suspicion.look(step, self._judged())
        if self.suspicion.tensor_bytes is not None:
            self.detector.update(step, tensors=self.suspicion.tensor_bytes)
        if not fresh:
            return
        verdict = self.verdict()
        if self._told == "quiet":
            self._log.event("leak", str(verdict))
            self._told = verdict.kind
        for holder in fresh:
            self._log.event("holder", str(holder))

    def last_look(self, step: int) -> None:
        """At the end of a run that was too short for the second look of a census."""
        if self.suspicion is not None and self.kind != "quiet" and self.suspicion.pending(step):
            self._census(step)

    def _judged(self) -> LeakVerdict:
        self.detector._limit, self.detector._device_limit = self._limits.host(), None
        verdict = self.detector.verdict()
        if verdict.signal == "device":
            self.detector._device_limit = self._limits.device()
            verdict = self.detector.verdict()
        return verdict

    def verdict(self) -> LeakVerdict:
        """The detector's, or that a buffer fills where the census has found one."""
        verdict = self._judged()
        filling = None if self.suspicion is None else self.suspicion.fill(verdict)
        if filling is None:
            return verdict
        values = {f.name: getattr(verdict, f.name) for f in dataclasses.fields(verdict)}
        values |= {"kind": "growing", "confidence": "low", "filling": filling.text}
        left, rate = verdict.steps_left, max(verdict.rate_bytes_per_step, 1.0)
        if left is not None and filling.remaining_bytes < left.lo * rate:
            values |= {"steps_left": None, "pressure": False}  # it is full before the limit comes
        return FillVerdict(**values)

    def forecast(self) -> StepsLeft | None:
        """Until the host's or a device's limit, whichever may come first."""
        found = []
        for limit, signal in ((self._limits.host(), None), (self._limits.device(), "device")):
            if limit is not None and limit > 0:
                left = self.detector.forecast(limit, signal=signal)
                found += [] if left is None else [left]
        return min(found, default=None)

    def holders(self) -> tuple[Holder, ...]:
        return () if self.suspicion is None else self.suspicion.holders
