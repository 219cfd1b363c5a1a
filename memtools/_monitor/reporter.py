"""How a monitor reports what it has found: into the record, through the logger, to callbacks.

    LeakWatch ──► Reporter.report ──► event "finding" of the record      every time
                                 ├──► logger "memtools", or terminal     from `suspect` on, once for
                                 └──► Listeners: on_leak(callback)       each holder and grade, and
                                                                         where its line or how long
                                                                         is left becomes known

A finding is shown again when its line or its forecast becomes known.

Nothing here raises into training: what a callback raises is reported once and ends here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from memtools._base.decorate import name_of_callback
from memtools._base.every import Every
from memtools._base.handle import Handle
from memtools._base.redact import harmless
from memtools._leak.finding import Key, LeakFinding, is_reported
from memtools._monitor.log import Log

LeakCallback = Callable[[LeakFinding], object]
Says = Callable[[LeakFinding], None]
RENEWED = 0.1  # A rate that differs by a larger share from that in the record is written again.
FORECAST = "forecast"
MOST_REPORTS = 256  # A run logs at most so many findings, even if names always change.


class Listeners:
    """The callbacks of a monitor, each as often as it was added; they outlast a run."""

    __slots__ = ("_added",)

    def __init__(self) -> None:
        self._added: dict[object, LeakCallback] = {}

    def add(self, action: LeakCallback) -> Handle:
        key = object()
        self._added[key] = action
        text = f"<on_leak {harmless(name_of_callback(action))}>"
        return Handle(lambda: self._added.pop(key, None), text)

    def call(self, finding: LeakFinding, log: Log) -> None:
        """Call each of them that has not been removed meanwhile."""
        for key, action in tuple(self._added.items()):
            if key not in self._added:
                continue
            try:
                action(finding)
            except Exception as error:
                name = harmless(name_of_callback(action))
                log.complain(
                    f"on_leak {id(key)}",
                    f"{name}(), which waits for leaks, failed with "
                    f"{type(error).__name__}: {error}; training goes on, and this is said once",
                )


class Reporter:
    """Reports what a run has found.

    Args:
        log: the run's record and its complaints.
        listeners: the monitor's callbacks.
        says: shows a finding to people: by the logger, or on the terminal of `memtools run`.
    """

    def __init__(self, log: Log, listeners: Listeners, says: Says) -> None:
        self._log, self._listeners, self._says = log, listeners, says
        #: by process, name, grade and whether it is over: the details that were reported
        self._reported: dict[tuple[str, str, str, bool], set[str]] = {}
        self._rates: dict[Key, tuple[float, float]] = {}  # of each finding in the record: its own
        # and that of all that grows

    def report(self, finding: LeakFinding, *, printed: bool = True) -> None:
        """Report a finding that is new, has a higher grade or a line, or is over.

        Args:
            finding: as users read it.
            printed: whether it is shown to people; True by default. If the next finding names the
                holder of the same growth, `no longer` would read as if nothing grew: such a finding
                goes only into the record and to the callbacks.
        """
        self.record(finding)
        word, details = _word(finding), _details(finding)
        known = self._reported.get(word)
        if not is_reported(finding) or (known is not None and details <= known):
            return
        if finding.over and all(word[:2] != reported[:2] for reported in self._reported):
            return
        if known is not None or len(self._reported) < MOST_REPORTS:
            self._reported.setdefault(word, set()).update(details)
            try:
                if printed:
                    self._says(finding)
            except Exception as error:  # a handler of the logger's, for one
                self._log.complain("says", f"a finding could not be reported: {error}")
        self._listeners.call(finding, self._log)

    def complain(self, key: str, text: str) -> None:
        """Report a failure of the leak test, once for each key."""
        self._log.complain(key, text)

    def record(self, finding: LeakFinding) -> None:
        """Write a finding into the record alone."""
        self._rates[finding.key] = finding.rate_bytes, finding.joint_bytes
        self._log.event("finding", finding)

    def renew(self, findings: Iterable[LeakFinding]) -> None:
        """Report how long is left where that has become known. Record the findings whose rate has
        changed, so that the record of a run that is killed has the newest."""
        for finding in findings:
            known = self._reported.get(_word(finding), set())
            is_new = is_reported(finding) and FORECAST in _details(finding) - known
            if is_new and len(self._reported) < MOST_REPORTS:
                self.report(finding)
                continue
            now = finding.rate_bytes, finding.joint_bytes
            before = self._rates.get(finding.key, (0.0, 0.0))
            if any(abs(a - b) > RENEWED * b for a, b in zip(now, before, strict=True)):
                self.record(finding)


def _word(finding: LeakFinding) -> tuple[str, str, str, bool]:
    return *finding.key, finding.grade, finding.over


def _details(finding: LeakFinding) -> set[str]:
    """What becomes known later than a finding itself: its lines, and the forecast. Each forecast
    counts as the same."""
    if finding.over:
        return set()
    known = finding.lines(), FORECAST if finding.forecast() else ""
    return {*known} - {""}


class Printer:
    """When the next summary is due: so many steps or seconds after the last one."""

    def __init__(self, every: Every) -> None:
        self._every = every
        #: the step and the time on the monotonic clock; one of the two never comes
        self.due_step, self.due_ns = 1 << 62, 1 << 62
        self._next(0)

    def _next(self, step: int) -> None:
        if self._every.steps is not None:
            self.due_step = (step // self._every.steps + 1) * self._every.steps
        else:
            self.due_ns = time.monotonic_ns() + int(1e9 * (self._every.seconds or 0))

    def is_due(self, step: int) -> bool:
        """Whether a summary is due; then the next one is planned."""
        if step < self.due_step and time.monotonic_ns() < self.due_ns:
            return False
        self._next(step)
        return True
