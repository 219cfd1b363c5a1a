"""Lines of the C heap: how much of it each line of the program's own code takes, for a few steps.

What C code allocates has no object of Python's and no stack. So malloc itself is asked how much is
in use at each line that the user's code begins, and what has been added belongs to the line before:

    train.py:30   x = batch()           in use: 100 KiB
    train.py:31   raw = decode(x)       in use: 100 KiB
    train.py:32   loss = model(raw)     in use: 164 KiB  ──► 64 KiB for train.py:31

A trace function (sys.settrace) hears of these lines on the thread that makes the steps. Code that
is not the user's has no lines; what it takes belongs to the line that has called it, and of user
code that calls user code to the innermost line. torch's tensors are left out, as its own reports
tell them.

A line that allocates and one that frees are both seen, as a number above 0 and one below. Which of
the lines above 0 have made what those below have freed is not known: nodes of a graph are made at
each line of a model, and freed at one. So a line is named only where the numbers leave no choice:
see `staying`.
"""

from __future__ import annotations

import _thread
import math
import sys
import threading
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
SLOWEST = 10.0  # times as long as a plain step may a traced one take
BUSY = 5.0  # times as long as a plain one has the processor worked for one that is too slow
EVENT_NS = 2_000  # that one line takes beside the reading
LEAST_EVENTS = 4  # of a step: where it may have fewer nothing can be told
READINGS = 3  # before it begins, whose shortest tells what one costs
EXACT, EXACT_BYTES = 0.02, 512.0  # so close are the numbers of two lines that are taken for equal
ERRORS = 3.0  # standard errors of what stays, by which a line that makes it may be beside it
WORST = 0.5  # of what stays: where its error is more nothing is told
SMALL = 0.2  # of what stays: less than that freed elsewhere changes no line's share

TRACED = "a trace function of the program's own is set (a debugger, coverage)"
MONITORED = "a tool of the program's own uses sys.monitoring (a debugger, coverage)"
TAKEN = "the program has set a trace function of its own, or ours was removed"
PROFILED = "a torch profiler runs, whose events take memory at every line"
UNKNOWN = "malloc does not tell how much of the C heap is in use"
OTHER_THREAD = "steps end on another thread than the main one"
TOO_SLOW = (
    f"to read the C heap at each line would make a step take more than {SLOWEST:.0f} times as long"
)

_TOOLS = 6  # that sys.monitoring has room for

_Trace = Callable[[FrameType, str, Any], Any]


class HeapLines:
    """How much the C heap has grown at each line, from `begin` to `end`.

    All of it is for the thread that makes the steps; `give_up` and `end` for any. Where these are
    called on another one, the trace function removes itself at the next thing that it hears.

    Args:
        step_ns: nanoseconds that a plain step takes.
        tensors: how many bytes of the heap are torch's, None where that is not known. None, the
            default: torch is not used, or does not tell.
        read: how many bytes malloc has in use, None where it does not tell. None, the default: a
            probe's `heap_used`.
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
        #: why nothing more is known
        self.stopped = ""
        self._thread = self._begun_ns = 0
        self._lines: dict[tuple[str, int], int] = {}  # bytes by file and line
        self._seen: dict[tuple[str, int], int] = {}  # the same at the end of the newest step
        self._line = "", 0  # that runs now
        self._in_use = self._of_torch = 0  # by malloc, and of that
        self._totals: list[int] = []  # of all lines, at the end of each step
        self._tensors_at: set[tuple[str, int]] = set()  # lines
        self._is_users: dict[str, bool] = {}  # by file
        self._events = self._most_events = 0  # of this step
        self._on_call: _Trace = self._called
        self._on_line: _Trace = self._happened

    # --- as a source of a window ---

    def begin(self) -> str:
        """Hear of lines from now on, also of those frames that run already; "" or why not."""
        if _thread.get_ident() != threading.main_thread().ident:
            return OTHER_THREAD
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
        self._begun_ns = time.clock_gettime_ns(time.CLOCK_THREAD_CPUTIME_ID)
        frame: FrameType | None = sys._getframe(2)
        self._line = self._users_line(frame)
        while frame is not None:
            if self._is_traced(frame) and frame.f_trace is None:
                frame.f_trace = self._on_line
            frame = frame.f_back
        self._again()
        sys.settrace(self._on_call)

    def go_on(self, slower: float) -> str:
        """What has grown so far does not count."""
        if slower > SLOWEST and not self.stopped:
            self.stopped = TOO_SLOW
        if not self.is_ours:
            return self.stopped or TAKEN
        self._lines.clear()
        self._totals = [0]
        self._again()
        return ""

    @property
    def is_ours(self) -> bool:
        """Whether it hears of lines."""
        return self._is_on and not self.stopped and sys.gettrace() is self._on_call

    def turn(self) -> None:
        """A step has ended."""
        if self.is_ours:
            self._note(self._line)
            self._seen = dict(self._lines)
            self._totals.append(sum(self._seen.values()))
            self._events = 0

    def living(self, is_last: bool) -> Living | None:
        """How much had grown, or shrunk, at each line when the step ended; None where nothing was
        heard. What memtools and a collection of garbage do then is no line's."""
        if not self.is_ours:
            self.stopped = self.stopped or TAKEN
            return None
        self._again()
        return {Place(*line): float(size) for line, size in self._seen.items()}

    def give_up(self) -> None:
        """On another thread, inside of a first step that takes long: it is too slow, unless the
        program waits or other programs run; how many lines a step may have is counted anyhow."""
        clock = time.pthread_getcpuclockid(self._thread)
        if time.clock_gettime_ns(clock) - self._begun_ns > BUSY * self._step_ns:
            self.stopped = self.stopped or TOO_SLOW

    def end(self) -> None:
        """Hear of nothing more. May be called twice."""
        was_on, self._is_on = self._is_on, False
        if was_on and _thread.get_ident() == self._thread:
            self._remove()

    # --- what the interpreter calls ---

    def _called(self, frame: FrameType, event: str, arg: object) -> _Trace | None:
        """A function begins: one of the user's has lines."""
        if not self._is_on or self.stopped:
            self._remove()
        elif self._is_traced(frame):
            self._note((frame.f_code.co_filename, frame.f_lineno))
            return self._on_line
        return None

    def _happened(self, frame: FrameType, event: str, arg: object) -> _Trace | None:
        """A line of the user's begins, or its function returns."""
        if not self._is_on or self.stopped or sys.gettrace() is not self._on_call:
            self._remove()
            return None
        if event == "line":
            self._note((frame.f_code.co_filename, frame.f_lineno))
        elif event == "return":
            self._note(self._users_line(frame.f_back))
        return self._on_line

    def _remove(self) -> None:
        """Take away what is ours of this thread, and of the frames that run on it."""
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
        """The innermost line of the user's code that runs; no file where there is none."""
        while frame is not None:
            if self._is_traced(frame):
                return frame.f_code.co_filename, frame.f_lineno or 0
            frame = frame.f_back
        return "", 0

    def _read(self) -> tuple[int, int] | None:
        """Bytes of the C heap, and how many of them are torch's; None where that is not known. What
        is raised here would be raised in the program."""
        try:
            heap = self._heap()
            tensors = 0 if self._tensors is None else self._tensors()
        except Exception:
            return None
        return None if heap is None or tensors is None else (heap, tensors)

    def _note(self, line: tuple[str, int]) -> None:
        """What has grown since the last time is of the line that ran; this one begins."""
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

    def _again(self) -> None:
        """What has grown since the last time is nobody's."""
        self._in_use, self._of_torch = self._read() or (0, 0)
        self._events = 0

    def staying(self, sites: Sequence[Site]) -> list[Site]:
        """The same, of what was traced."""
        is_told = self._tensors is not None or bridge.loaded() is None
        steps = [b - a for a, b in pairwise(self._totals)]
        error = stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else math.inf
        return staying(sites, error, self._tensors_at if is_told else None)


def _reader() -> Callable[[], int | None]:
    probe = _core.Probe()

    def heap_used() -> int | None:
        return probe.read(_core.READ_HEAP).heap_used

    return heap_used


def staying(
    sites: Sequence[Site], error: float = 0.0, tensors_at: Container[tuple[str, int]] | None = ()
) -> list[Site]:
    """The lines that make what stays, the most first; empty where the numbers do not tell.

    What stays is the sum of all. Where next to nothing is freed elsewhere, the lines that allocate
    make it, each with what is not freed in any case; a line whose number is that of one that frees
    is left out together with it. Else the line makes it whose number is that sum, whatever others
    allocate and free, as the rest comes to nothing. It has to be the only one, and to make no
    tensors: these come with nodes of a graph, of any number of bytes, which are freed with it.

    Args:
        sites: bytes a step by which the heap has grown at each place, or shrunk.
        error: of their sum, in bytes a step. Default: 0.
        tensors_at: files and lines that make or free tensors; None where there are such lines and
            nobody knows which. Default: none.
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
