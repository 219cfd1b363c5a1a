"""The leak test of a monitor: what it reads at the end of a step, and how often."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from memtools._base import sentences
from memtools._census.holders import Holder
from memtools.leak.detector import LeakDetector, LeakVerdict, StepsLeft, matters
from memtools.monitor.log import Log
from memtools.monitor.signals import FIRST_LOOKS, FIRST_STEPS, Signal
from memtools.monitor.suspects import Suspicion, holds_growth, is_container

VERDICT_EVERY_NS = 100_000_000
HASTE = 4  # how much more of the time readings may take while something grows
_RANK = {"quiet": 0, "growing": 0, "fragmentation": 1, "likely": 2, "leak": 3}


@dataclasses.dataclass(frozen=True)
class FillVerdict(LeakVerdict):
    """Growth that a census has found to be a container with a bound that is filling up."""

    #: that container, and how far it is
    filling: str = ""

    def __str__(self) -> str:
        return sentences.of_verdict(self, self.filling)


class Limits(Protocol):
    """What is left for this process."""

    def host(self) -> int | None:
        """Bytes at which this process with its children reaches the limit; None when unknown."""

    def device(self) -> int | None:
        """Bytes at which all watched devices are full; None when unknown."""


class LeakWatch:
    """Feeds a LeakDetector, starts a census on suspicion, and writes what is found.

    `look` is for the main thread, at the end of a step. All else may be asked at any time.
    """

    __slots__ = (
        "_begun_ns",
        "_checked",
        "_first_step",
        "_last_ns",
        "_last_step",
        "_limits",
        "_log",
        "_looks",
        "_pressing",
        "_signals",
        "_timed",
        "_told",
        "declares",
        "detector",
        "kind",
        "suspicion",
    )

    def __init__(
        self,
        signals: list[Signal],
        limits: Limits,
        log: Log,
        suspicion: Suspicion | None,
        *,
        declares: bool = True,
    ) -> None:
        self.detector = LeakDetector()
        self.suspicion = suspicion
        #: whether the program has the monitor in its hands, and so may call expect_growth()
        self.declares = declares
        self.kind = "quiet"
        self._signals, self._limits, self._log = signals, limits, log
        self._first_step = self._last_step = self._begun_ns = self._last_ns = 0
        self._looks = -1  # taken while steps and readings are timed
        self._timed = False
        self._checked = 0
        self._told = "quiet"  # the highest kind of which an event was written
        self._pressing = False

    def look(self, step: int) -> int:
        """Reads what is due; when to look again, in ns of the monotonic clock."""
        now = time.monotonic_ns()
        if self._looks < 0:
            self._first_step, self._begun_ns, self._looks = step, now, 0
        elif step > self._last_step:
            self._last_step, self._last_ns = step, now
            read = self._read if self._timed else self._time
            now = read(step, now)
        kind = self.detector.kind
        if kind != self.kind or (kind != "quiet" and now >= self._checked):
            self._check(kind, step, now)
        if kind != "quiet" and self.suspicion is not None and self.suspicion.due(step, now):
            self._census(step)
        return min(signal.due for signal in self._signals)

    def _time(self, step: int, now: int) -> int:
        """The first steps: how long they are without readings, and what a reading costs."""
        begin = now
        for signal in self._signals:
            signal.read()
            then = time.monotonic_ns()
            signal.cost_ns, now = min(signal.cost_ns, then - now), then
        self._looks += 1
        self._begun_ns += now - begin
        steps = step - self._first_step
        if steps >= FIRST_STEPS and self._looks >= FIRST_LOOKS:
            for signal in self._signals:
                signal.begin(step, steps, self._looks, now - self._begun_ns)
            self._timed = True
        return now

    def _read(self, step: int, now: int) -> int:
        haste = 1 if self.kind == "quiet" else HASTE
        for signal in self._signals:
            if now >= signal.due:
                for at, size in signal.feed(step):
                    self.detector.update(at, **{signal.name: size})
                then = time.monotonic_ns()
                signal.due = then + signal.pause * (then - now) // haste
                now = then
        return now

    def _check(self, kind: str, step: int, now: int) -> None:
        """At each change of the grade, and ten times a second while something grows."""
        escalated, self.kind = kind != self.kind, kind
        self._checked = now + VERDICT_EVERY_NS
        if self.suspicion is not None:
            if kind == "quiet":
                self.suspicion.end()
            elif escalated:
                self.suspicion.hurry(step, urgent=_RANK[kind] > 0)
        verdict = self.verdict()
        self._tell(verdict)
        if verdict.pressure and not self._pressing:
            self._log.event("pressure", f"forecast: {verdict.steps_left} ({verdict.signal} grows)")
        self._pressing = verdict.pressure

    def _tell(self, verdict: LeakVerdict) -> None:
        """An event when the grade rises, and when nothing is left of it."""
        rank, told = _RANK[verdict.kind], _RANK[self._told]
        if rank > told and self.matters(verdict):
            self._log.event("leak", verdict)
            self._told = verdict.kind
        elif rank == 0 and told > 0:
            self._log.event("leak", verdict, over=True)
            self._told = "quiet"

    def matters(self, verdict: LeakVerdict) -> bool:
        """Whether growth is worth a word while the program runs: where it is a KiB a step or more,
        or much a second at the run's pace, or where a holder is known by its name in the program.
        """
        cost = max(verdict.rate_bytes_per_step, verdict.rss_bytes_per_step or 0.0)
        seconds = max(1, self._last_ns - self._begun_ns) / 1e9
        pace = (self._last_step - self._first_step) / seconds
        return matters(cost, pace) or any(map(holds_growth, self.holders()))

    def _census(self, step: int) -> None:
        """A look. What it takes and keeps itself is no growth of the program's."""
        assert self.suspicion is not None
        before = [signal.read() for signal in self._signals]
        fresh = self.suspicion.look(step, self._judged())
        for signal, size in zip(self._signals, before, strict=True):
            signal.leave_out(size, signal.read())
        if self.suspicion.tensor_bytes is not None:
            self.detector.update(step, tensors=self.suspicion.tensor_bytes)
        if not fresh:
            return
        verdict = self.verdict()
        if not self.matters(verdict):
            return
        if self._told == "quiet":
            self._log.event("leak", verdict)
            self._told = verdict.kind
        for holder in fresh:
            self._log.event("holder", holder)

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
        declarable = self.declares and any(map(is_container, self.holders()))
        verdict = dataclasses.replace(verdict, declarable=declarable)
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
