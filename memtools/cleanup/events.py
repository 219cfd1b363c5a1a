"""What a cleanup policy did, as events of every running MemoryMonitor.

A record keeps its last 1,024 events, and a policy may act ten times a second for days. So each kind
of action gets an event at most once a second, later every 5 % of the time so far: what it did in
between is added up in the next one. A week of a busy action is some 250 events.
"""

from __future__ import annotations

import re
import time

from memtools._base.reclaim import freed
from memtools.cleanup.actions import Outcome
from memtools.monitor import run as monitor_run

FIRST_NS = 1_000_000_000
PART = 20  # of the time since the first event


class _Sum:
    """Of one kind of action, since its last event."""

    __slots__ = ("count", "device", "due", "host", "note", "ns", "why")

    def __init__(self) -> None:
        self.due = 0
        self.empty()

    def empty(self) -> None:
        self.count = self.ns = self.host = self.device = 0
        self.note = self.why = ""


class Events:
    """Of one policy."""

    __slots__ = ("_begin", "_sums")

    def __init__(self) -> None:
        self._begin = 0
        self._sums: dict[str, _Sum] = {}

    def add(self, name: str, outcome: Outcome, why: str) -> None:
        """An action was done just now."""
        now = time.monotonic_ns()
        self._begin = self._begin or now
        one = self._sums.setdefault(name, _Sum())
        one.count += 1
        one.ns += outcome.ns
        one.host += outcome.host.freed
        one.device += outcome.device.freed
        one.note, one.why = outcome.note, why
        if now >= one.due:
            one.due = now + max(FIRST_NS, (now - self._begin) // PART)
            self._tell(name, one, now - outcome.ns)

    def flush(self) -> None:
        """Tells what was not told yet."""
        now = time.monotonic_ns()
        for name, one in list(self._sums.items()):
            if one.count:
                self._tell(name, one, now)

    def forget(self) -> None:
        """In a forked child: it is the parent's to tell."""
        self._begin = 0
        self._sums.clear()

    def _tell(self, name: str, one: _Sum, begin_ns: int) -> None:
        text, ns = _words(name, one), one.ns
        one.empty()
        for owner in list(monitor_run._owners):
            run = owner._live
            if run is not None:
                run.log.event("cleanup", text, time_ns=begin_ns, duration_ns=ns)


def _words(name: str, one: _Sum) -> str:
    """As `memtools report` reads it: names, what is in brackets aside, times, then bytes."""
    notes = [one.note] * bool(one.note and one.count == 1) + [one.why] * bool(one.why)
    notes += [f"{one.count:,} times"] * (one.count > 1)
    brackets = f" ({', '.join(notes)})" if notes else ""
    plain = re.sub(r"[:()]", " ", name)
    return f"{plain}{brackets} {one.ns / 1e6:.1f} ms: {freed(one.host, one.device)}"
