"""The child processes of a run: how many there are, which of them grow, and what workers report.

processes() ──► read(), at each look ──► grown(): count, who grows
the memory of children grows ──► WorkerReports: workers look for themselves (workers.py)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from memtools._leak.finding import LeakFinding
from memtools._leak.growth import pace_of
from memtools._leak.judge import THRESHOLDS
from memtools._monitor.workers import WorkerReports

Processes = Callable[[], Sequence[tuple[int, int | None, str]]]  # pid, private bytes, name
MOST_CHILDREN = 256  # At most so many are followed one by one.
_POINTS = 16  # So many of the newest points of each are kept.


class ChildProcesses:
    """The child processes of a run.

    Args:
        processes: returns the private bytes of each; None, the default: they are not known.
        workers: asks those that were given a queue or a connection; None, the default: none is.
    """

    def __init__(
        self, processes: Processes | None = None, workers: WorkerReports | None = None
    ) -> None:
        self._processes, self._workers = processes, workers
        #: by pid and name: (step, bytes) at looks
        self._known: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self.count = 0
        #: the names of the workers that report what they have in use
        self.reporting: tuple[str, ...] = ()

    def read(self, step: int) -> int | None:
        """Read what each process has at this step. Returns how many there are; None if that is not
        known."""
        if self._processes is None:
            return None
        helpers = _helpers()
        each = [one for one in self._processes() if one[0] not in helpers]
        self._known = {
            (pid, name): [*self._known.get((pid, name), ())[1 - _POINTS :], (step, size)]
            for pid, size, name in each[:MOST_CHILDREN]
            if size is not None
        }
        self.count = len(each)
        return self.count

    def growing(self) -> Sequence[tuple[str, float]]:
        """The names of those that grow, with their bytes a step, the fastest first."""
        rates = [(_rate_of(points), who) for who, points in self._known.items()]
        names = _names()
        return [
            (f"child process {pid} ({names.get(pid, name)})", rate)
            for rate, (pid, name) in sorted(rates, reverse=True)
            if rate >= THRESHOLDS.least_rate
        ]

    def of_workers(self) -> dict[str, int]:
        """What the workers that have reported have gained, by the name that findings have of them,
        such as `worker 0`; of several with one name the sum."""
        found = {} if self._workers is None else self._workers.in_use()
        self.reporting = tuple(found)
        return found

    def growth_beside(self) -> float:
        """Bytes a step by which those grow that do not report what they have in use."""
        known = {} if self._workers is None else self._workers.names
        rates = [_rate_of(one) for (pid, _), one in self._known.items() if pid not in known]
        return sum(rate for rate in rates if rate >= THRESHOLDS.least_rate)

    def are_looking(self) -> bool:
        """Whether a worker looks at its heap now, which takes memory of its own."""
        return self._workers is not None and self._workers.looking()

    def have_looked(self) -> bool:
        """Whether a worker has looked at its heap since the call before, or does so now."""
        return self._workers is not None and self._workers.have_looked()

    def ask(self, rate: float, step: int, grade: str, *, stands: bool) -> Sequence[LeakFinding]:
        """Return what workers have found out. They look as long as the memory of children grows.

        Args:
            rate: bytes a step by which that memory grows.
            step: the program's step; 0 if it makes none.
            grade: what the leak test says of that memory.
            stands: whether a finding about children stands.
        """
        if self._workers is None:
            return ()
        if rate >= THRESHOLDS.least_rate:
            self._workers.ask()
        elif not stands:
            self._workers.rest()
        return self._workers.findings(step, grade)

    def close(self) -> None:
        """Ask no more. May be called twice."""
        if self._workers is not None:
            self._workers.close()


def _rate_of(points: Sequence[tuple[int, int]]) -> float:
    """Bytes a step by which a process grows now. Its first point does not count: what a process
    loads when it starts does not grow with steps."""
    return pace_of(points[1:]).rate if len(points) > 1 else 0.0


def worker_reports() -> WorkerReports | None:
    """Return new WorkerReports; None if the kernel has no such memory."""
    try:
        return WorkerReports()
    except OSError:
        return None


def _helpers() -> set[object]:
    """The ids of multiprocessing's own processes. There is one of each, so they are not counted
    among processes whose number grows."""
    tracker = getattr(
        sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None
    )
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}


def _names() -> dict[int, str]:
    """The names of the processes that multiprocessing has started here, by pid."""
    module = sys.modules.get("multiprocessing.process")
    names: dict[int, str] = {}
    for child in list(getattr(module, "_children", ())):
        popen = getattr(child, "_popen", None)
        pid, name = getattr(popen, "pid", None), getattr(child, "_name", None)
        if isinstance(pid, int) and isinstance(name, str):
            names[pid] = name
    return names
