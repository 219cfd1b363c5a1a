"""Lines of the C heap: how many bytes of it each line of the user's code takes, for a few steps.

What C code allocates has no Python object and no stack. So malloc's count of bytes in use is read
whenever a line of the user's code begins, and what has been added belongs to the line before:

    train.py:30   x = batch()           in use: 100 KiB
    train.py:31   raw = decode(x)       in use: 100 KiB
    train.py:32   loss = model(raw)     in use: 164 KiB  ──► 64 KiB for train.py:31

The interpreter calls a trace function (sys.settrace) at each of these lines, on the one thread
that makes the steps. Code that is not the user's has no lines: what it takes belongs to the
innermost line of the user's code that has called it. torch's tensors are left out, because torch
reports them itself.

A line that allocates has a number above 0, and a line that frees has one below. It is not known
which of the lines above 0 have allocated what those below have freed: nodes of a graph are made at
each line of a model, and freed at one. So a line is named only where the numbers leave no choice:
see `staying`.
"""

from __future__ import annotations

import _thread
import math
import sys
import time
from collections.abc import Callable, Container, Sequence
from itertools import pairwise
from statistics import stdev
from types import FrameType
from typing import Any

from memtools import _core
from memtools._base import torch as bridge
from memtools._base.libraries import USER, owner_of
from memtools._monitor.places import Living, Place, Site

HEAP_LINES = "heap lines"
SLOWEST = 10.0  # A traced step may take at most so many times as long as a plain one.
BUSY = 5.0  # It is too slow if the processor has worked so many times as long as for a plain one.
EVENT_NS = 2_000  # Each line takes so long, beside the reading.
LEAST_EVENTS = 4  # If a step may have fewer lines than this, they are not traced.
READINGS = 3  # A reading costs what the shortest of so many first ones takes.
#: The numbers of two lines are taken for equal if they differ by at most this share, or so many
#: bytes.
EXACT, EXACT_BYTES = 0.02, 512.0
ERRORS = 3.0  # A line's number may differ from what stays by at most so many standard errors.
WORST = 0.5  # If the error of what stays is more than this share of it, no line is named.
SMALL = 0.2  # If at most this share of what stays is freed elsewhere, it is ignored.

TRACED = "the program has set a trace function (a debugger, coverage)"
MONITORED = "the program uses sys.monitoring (a debugger, coverage)"
TAKEN = "the program has set its own trace function, or removed memtools'"
PROFILED = "a torch profiler runs, whose events take memory at every line"
UNKNOWN = "malloc does not report how much of the C heap is in use"
OTHER_THREAD = "steps end on several threads"
TOO_SLOW = (
    f"reading the C heap at each line would make a step take more than {SLOWEST:.0f} times as long"
)

_TOOLS = 6  # sys.monitoring has room for so many tools.

_Trace = Callable[[FrameType, str, Any], Any]


class HeapLines:
    """How much the C heap has grown at each line, from `begin` to `end`.

    Call the methods on the thread that makes the steps. `give_up` and `end` may be called on
    another one: then the trace function removes itself when it is called next.

    Args:
        step_ns: nanoseconds that a plain step takes.
        tensors: returns how many bytes of the heap are torch's, or None if that is not known. None,
            the default: torch is not used, or does not report it.
        read: returns how many bytes malloc has in use, or None if it does not report that. None,
            the default: a probe's `heap_used`.
    """

    name = HEAP_LINES

    def __init__(
        self,
        step_ns: float,
        tensors: Callable[[], int | None] | None = None,
        read: Callable[[], int | None] | None = None,
    ) -> None:
        self._step_ns, self._tensors = step_ns, tensors
        self._heap = _reader() if read is None else read
        self._is_on = False
        #: why it has stopped; "" while it has not
        self.stopped = ""
        self._thread = self._clock = self._begun_ns = 0
        self._lines: dict[tuple[str, int], int] = {}  # bytes by file and line
        self._seen: dict[tuple[str, int], int] = {}  # the same at the end of the newest step
        self._line = "", 0  # the line that runs now
        self._in_use = self._of_torch = 0  # what malloc has in use, and torch's part of it
        self._totals: list[int] = []  # of all lines, at the end of each step
        self._tensors_at: set[tuple[str, int]] = set()  # lines that make or free tensors
        self._is_users: dict[str, bool] = {}  # by file
        self._events = self._most_events = 0  # lines of this step so far, and at most
        self._on_call: _Trace = self._called
        self._on_line: _Trace = self._happened

    # --- as a source of a window ---

    def begin(self) -> str:
        """Trace lines from now on, also in frames that run already. Returns "", or why not."""
        if sys.gettrace() is not None:
            return TRACED
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is not None and any(map(monitoring.get_tool, range(_TOOLS))):
            return MONITORED
        if bridge.profiler_runs():
            return PROFILED
        costs = list[int]()
        for _ in range(READINGS):
            begun = time.perf_counter_ns()
            if self._read() is None:
                return UNKNOWN
            costs.append(time.perf_counter_ns() - begun)
        self._most_events = int((SLOWEST - 1) * self._step_ns / (min(costs) + EVENT_NS))
        if self._most_events < LEAST_EVENTS:
            return f"{TOO_SLOW}: one reading takes {min(costs) / 1e6:.1f} ms"
        self._begin()
        return ""

    def _begin(self) -> None:
        self._thread, self._is_on = _thread.get_ident(), True
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._begun_ns = time.clock_gettime_ns(self._clock)
        frame: FrameType | None = sys._getframe(2)
        self._line = self._users_line(frame)
        while frame is not None:
            if self._is_traced(frame) and frame.f_trace is None:
                frame.f_trace = self._on_line
            frame = frame.f_back
        self._skip()
        sys.settrace(self._on_call)

    def go_on(self, slower: float) -> str:
        """Forget what has grown so far. Returns "", or why it does not go on."""
        if slower > SLOWEST and not self.stopped:
            self.stopped = TOO_SLOW
        if not self.is_ours:
            return self.stopped or TAKEN
        self._lines.clear()
        self._totals = [0]
        self._skip()
        return ""

    @property
    def is_ours(self) -> bool:
        """Whether it traces lines, and the program has not set a trace function of its own."""
        return self._is_on and not self.stopped and sys.gettrace() is self._on_call

    def turn(self) -> None:
        """A step has ended."""
        if self._is_on and _thread.get_ident() != self._thread:
            self.stopped = self.stopped or OTHER_THREAD
        elif self.is_ours:
            self._note(self._line)
            self._seen = dict(self._lines)
            self._totals.append(sum(self._seen.values()))
            self._events = 0

    def living(self, is_last: bool) -> Living | None:
        """Return how much had grown, or shrunk, at each line when the step ended; None if it does
        not trace. What memtools and a collection of garbage do after that belongs to no line."""
        if not self.is_ours:
            self.stopped = self.stopped or TAKEN
            return None
        self._skip()
        return {Place(*line): float(size) for line, size in self._seen.items()}

    def give_up(self) -> None:
        """Stop, called on another thread, within a first step that takes long. Goes on if the
        program only waits, or other programs run: the number of lines of a step is bounded, too."""
        try:
            worked = time.clock_gettime_ns(self._clock) - self._begun_ns
        except OSError:
            self.stopped = self.stopped or OTHER_THREAD  # The thread has ended.
            return
        if worked > BUSY * self._step_ns:
            self.stopped = self.stopped or TOO_SLOW

    def end(self) -> None:
        """Trace nothing more. May be called twice."""
        was_on, self._is_on = self._is_on, False
        if was_on and _thread.get_ident() == self._thread:
            self._remove()

    # --- what the interpreter calls ---

    def _called(self, frame: FrameType, event: str, arg: object) -> _Trace | None:
        """Called when a function begins: one of the user's has lines."""
        if not self._is_on or self.stopped:
            self._remove()
        elif self._is_traced(frame):
            self._note((frame.f_code.co_filename, frame.f_lineno))
            return self._on_line
        return None

    def _happened(self, frame: FrameType, event: str, arg: object) -> _Trace | None:
        """Called when a line of the user's code begins, or its function returns."""
        if not self._is_on or self.stopped or sys.gettrace() is not self._on_call:
            self._remove()
            return None
        if event == "line":
            self._note((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return":
            self._note(self._users_line(frame.f_back))
        return self._on_line

    def _remove(self) -> None:
        """Remove our trace functions from this thread, and from the frames that run on it."""
        if sys.gettrace() is self._on_call:
            sys.settrace(None)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_trace is self._on_line:
                frame.f_trace = None
            frame = frame.f_back

    # --- what is counted ---

    def _is_traced(self, frame: FrameType) -> bool:
        file = frame.f_code.co_filename
        is_users = self._is_users.get(file)
        if is_users is None:
            is_users = self._is_users[file] = owner_of(file) == USER
        return is_users

    def _users_line(self, frame: FrameType | None) -> tuple[str, int]:
        """The innermost line of the user's code that runs; ("", 0) if there is none."""
        while frame is not None:
            if self._is_traced(frame):
                return frame.f_code.co_filename, frame.f_lineno or 0
            frame = frame.f_back
        return "", 0

    def _read(self) -> tuple[int, int] | None:
        """Bytes of the C heap, and how many of them are torch's; None if that is not known. Raises
        nothing: an exception would be raised in the program."""
        try:
            heap = self._heap()
            tensors = 0 if self._tensors is None else self._tensors()
        except Exception:
            return None
        return None if heap is None or tensors is None else (heap, tensors)

    def _note(self, line: tuple[str, int]) -> None:
        """Count what has grown since the last call for the line that ran; `line` begins."""
        read = self._read()
        if read is None:
            self.stopped = UNKNOWN
            return
        heap, tensors = read
        grown, of_torch = heap - self._in_use, tensors - self._of_torch
        if of_torch:
            self._tensors_at.add(self._line)
        if grown != of_torch:
            self._lines[self._line] = self._lines.get(self._line, 0) + grown - of_torch
        self._in_use, self._of_torch = read
        self._line = line
        self._events += 1
        if self._events > self._most_events:
            self.stopped = TOO_SLOW

    def _skip(self) -> None:
        """Count what has grown since the last call for no line."""
        self._in_use, self._of_torch = self._read() or (0, 0)
        self._events = 0

    def staying(self, sites: Sequence[Site]) -> list[Site]:
        """`staying`, with the error and the lines of tensors that were traced."""
        is_known = self._tensors is not None or bridge.loaded() is None
        steps = [b - a for a, b in pairwise(self._totals)]
        error = stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else math.inf
        return staying(sites, error, self._tensors_at if is_known else None)


def _reader() -> Callable[[], int | None]:
    probe = _core.Probe()

    def heap_used() -> int | None:
        return probe.read(_core.READ_HEAP).heap_used

    return heap_used


def staying(
    sites: Sequence[Site], error: float = 0.0, tensors_at: Container[tuple[str, int]] | None = ()
) -> list[Site]:
    """Return the lines that make what stays, the most first; none if the numbers leave a choice.

    What stays is the sum of all numbers. If next to nothing is freed elsewhere, the lines that
    allocate make it, each with what is not freed in any case; a line whose number is that of one
    that frees is left out together with it. Otherwise the line makes it whose number is that sum,
    as all other numbers cancel. It must be the only such line, and make no tensors: with tensors
    come nodes of a graph, of any number of bytes, which are freed with it.

    Args:
        sites: bytes a step by which the heap has grown at each place, or shrunk.
        error: the standard error of their sum, in bytes a step; 0 by default.
        tensors_at: files and lines that make or free tensors, none by default; None if there are
            such lines and they are not known.
    """
    stays = sum(site.rate for site in sites)
    if stays <= 0 or ERRORS * error > WORST * stays:
        return []
    gains = sorted((site for site in sites if site.rate > 0), key=lambda site: -site.rate)
    left, lost = list(gains), 0.0
    for loss in sorted((-site.rate for site in sites if site.rate < 0), reverse=True):
        alike = [site for site in left if abs(site.rate - loss) <= max(EXACT_BYTES, EXACT * loss)]
        if len(alike) == 1:
            left.remove(alike[0])
        else:
            lost += loss
    if lost <= SMALL * stays:
        # What is freed may be of any of them.
        sure = [Site(site.place, site.rate - lost) for site in left if site.place.file]
        return [site for site in sure if site.rate > ERRORS * error]
    if tensors_at is None:
        return []
    near = ERRORS * error + EXACT * stays
    alike = [site for site in gains if site.place.file and abs(site.rate - stays) <= near]
    alike = [site for site in alike if site.place[:2] not in tensors_at]
    return alike if len(alike) == 1 else []
