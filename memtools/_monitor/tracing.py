"""When a run traces a few steps, to find the line that makes what stays.

    LeakWatch.look ── a finding stands, and its line is not known ──► Tracing.plan ──► TraceWindow
          │ at the end of each step                                                        │
          └──► Tracing.step_ended ──► TraceWindow.turn ──► places_of(findings, sites) ◄────┘
                                                                 │
                                                                 ▼ made_at of each finding

The lines of a window explain a finding if they make 0.5 to 1.5 times its rate together. Otherwise
no line is reported for it. What tracing leaves behind in memory is left out of the books:

    before the window ──► what is in use is noted ─┐
    after it ───────────► what tracing has left ◄──┘

Where a program makes no steps, a tick of time is one, on a thread of ours, and Progress
(progress.py) estimates how long a window has to be and how much slower the program gets.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol

from memtools._base.limits import too_little
from memtools._leak.finding import RANK, Key, LeakFinding
from memtools._leak.judge import C_HEAP
from memtools._monitor.heaplines import SLOWEST, HeapLines
from memtools._monitor.places import LEAST, MOST, Site, name_of, places_of
from memtools._monitor.progress import MOST_TABLES, Progress
from memtools._monitor.sensor import Sensor
from memtools._monitor.signals import Signal
from memtools._monitor.tracewindow import (
    LONGEST_S,
    PARTS,
    PARTS_BY_TIME,
    PROBE,
    SLOWEST_PROBE,
    TRACEMALLOC,
    BlocksLike,
    TraceWindow,
    is_any_open,
)

START_BY_TIME = 45  # In so many ticks of time growth may be the program's start.
MOST_READING_SHARE = 0.05  # What is in use is read at each tick, which may take this share of it.
SLOW_NS = 1_000_000  # A reading of what is in use that takes longer is not taken at each step.
SHORT_NS = 1_000_000  # A step that is shorter counts as that: its time is mostly noise.
#: A plain step takes as long as the shortest of so many newest ones: one may collect garbage.
PLAIN = 3
#: Where several threads make the steps, their ends come in bursts: the mean of so many counts.
OF_BURSTS = 16
TRACED = 2  # The first window for a finding has so many steps, ...
LONGER = 8  # ... the next one so many, ...
ONE_LUMP = 60  # ... or so many if the growth came at once, and may come again at any time.
OF_THREADS = 60  # It has at least so many steps where several threads make them.
LEAST_OF_LUMPS, MOST_OF_LUMPS = 7, 60  # If growth comes in lumps, a window has so many steps, ...
PERIODS = 2.2  # ... and so many lumps in it.
READ_STEPS = 40  # Growth is read at each of so many steps, to see whether it comes in lumps.
TWICE = 2.0  # A lump is at most taken to be so many times as large as the one before.
#: A rise of at least this share of the largest, and this many times the mean of all, is a lump.
LUMP_SHARE, LUMP_TIMES = 0.5, 2.5
ATTEMPTS = 4  # Windows for one finding.
#: Those of its windows, counted from 0, that trace the lines of the C heap. Where no object holds
#: what grows that comes soon, as tracemalloc sees the blocks of objects.
OF_C_HEAP, OF_OTHERS = (1, 3), (3,)
MOST_WINDOWS = 8  # Windows of a run.
#: Steps between two windows, and before growth without a holder is traced: it may get a name.
APART = 16
FIRST_COST_NS = 30_000_000  # The first window is taken to cost so much of the processor.
MOST_NS = 500_000_000  # All windows of a run may take so much of it at their boundaries.
#: No window is opened where fewer bytes are left: of three models, one took 10 to 37 MiB.
NEEDS = 32 << 20
#: Bytes that traced steps may leave: lines of torch's blocks, which are kept for the next ones, and
#: 48 to 250 of each stack that tracemalloc has seen, which it never frees before Python 3.13.
MOST_LEFT = 128 << 10

SLOWS = f"tracemalloc would make the program more than {SLOWEST:.0f} times as slow"
TOO_MANY = "the program makes more blocks than can be listed without a long pause"
UNKNOWN = "it is not known how much slower tracemalloc makes the program"
TOO_SLOW_TO_READ = "it takes too long to read memory in use five times a second"
CUT = "the window was closed before its end"


def steps_for(readings: Sequence[int]) -> int:
    """How many steps to trace, by memory in use at the ends of the steps before: if growth comes in
    lumps, 2.2 times their distance, the usual or the newest one. Lumps that get larger are of a
    buffer that grows by a share of itself: they come farther apart, too."""
    rises = [b - a for a, b in pairwise(readings)]
    grown = sum(rises)
    if grown <= 0:
        return LONGER
    least = max(LUMP_SHARE * max(rises), LUMP_TIMES * grown / len(rises))
    lumps = [i for i, rise in enumerate(rises) if rise >= least]
    if sum(rises[i] for i in lumps) < LEAST * grown:
        return LONGER
    if len(lumps) < 2:
        return ONE_LUMP
    distances = [b - a for a, b in pairwise(lumps)]
    apart = max(distances[-1], sorted(distances)[len(distances) // 2])
    larger = (rises[lumps[-1]] / rises[lumps[0]]) ** (1 / (len(lumps) - 1))
    steps = PERIODS * apart * max(1.0, min(larger, TWICE)) ** 2
    return int(min(MOST_OF_LUMPS, max(LEAST_OF_LUMPS, steps)))


class ReportsLike(Protocol):
    """The methods of memtools._blocks.reports.HostBlocks that are used here."""

    @property
    def blocks(self) -> BlocksLike: ...
    @property
    def reason(self) -> str: ...
    def join(self) -> bool: ...
    def in_use(self) -> int | None: ...
    def dispatched(self) -> BlocksLike | None: ...


class Tracing:
    """When a run traces, what that has found, and what it has cost.

    Call the methods at the end of a step, on its thread, or on the one thread that waits for ticks
    of time; `close` on any thread.

    Args:
        reports: torch's reports, which begin when torch is imported. None, the default: tracemalloc
            alone.
        why_not: why nothing must be traced, for the record; "", the default: trace.
        progress: the progress of a program without steps; None, the default: it makes steps.
        write: called with the fields of each event for the record.
    """

    def __init__(
        self,
        reports: ReportsLike | None = None,
        *,
        why_not: str = "",
        progress: Progress | None = None,
        write: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._reports, self._why_not, self._write = reports, why_not, write
        self._progress = progress
        self._window: TraceWindow | None = None
        self._wanted: tuple[LeakFinding, ...] = ()
        self._attempts: dict[Key, int] = {}
        self._known: set[tuple[str, int]] = set()  # files and lines that a finding has already
        self._of_heap: set[Key] = set()  # findings whose lines of the C heap are traced
        #: whether the lines of the C heap cannot be traced: by time they never are, as they are
        #: those of the thread that makes the steps
        self._no_heap = progress is not None
        self._readings: deque[int] = deque(maxlen=READ_STEPS + 1)
        #: nanoseconds that the newest plain steps have taken, and the program's thread in them
        self._plain: deque[tuple[int, int]] = deque(maxlen=PLAIN)
        self._cpu_ns = time.thread_time_ns  # the clock of what works on a step
        self._is_shared = False  # whether several threads make the steps
        self._took_cpu_ns = list[int]()  # the steps that were traced
        self._next = 0  # the step from which on the next window may be opened
        self._windows = 0
        # nanoseconds of the processor at boundaries: of the newest window, and left for others
        self._cost_ns, self._left_ns = FIRST_COST_NS, MOST_NS
        self._spent_ns = 0  # of the one that is open
        self._opened = 0.0  # when, on the monotonic clock
        #: whether something is to be done at the end of each step
        self.is_wanted = False
        #: before a window was opened: the step, and (signal, bytes) of those that it changes
        self._before: tuple[int, list[tuple[Signal, int | None]]] | None = None
        self._left = 0, 0  # when the end of the newest step was left, and this thread's time then

    # --- at the end of a step ---

    def step_ended(
        self,
        step: int,
        now: int,
        sensor: Sensor,
        standing: Sequence[LeakFinding],
        collect: Callable[[], None] | None,
    ) -> list[LeakFinding]:
        """Note that a step has ended. Returns the findings whose line is known by it.

        Args:
            step: its number.
            now: when it ended, on the monotonic clock.
            sensor: reads what is in use, and leaves out what tracing takes.
            standing: the findings.
            collect: collects garbage, before lines are read; None where there is no time for that.
        """
        if self.is_wanted and self._progress is not None:
            heap = next(signal for signal in sensor.signals if signal.name == "heap")
            self.ticked(heap.read() or 0, heap.cost_ns)
        elif self.is_wanted:
            left, had = self._left
            self.step_took(now - left, self._cpu_ns() - had)
        known: list[LeakFinding] = []
        if self.is_open:
            made = self.turn(step, standing, collect)
            known = [replace(one, made_at=made[one.key]) for one in standing if one.key in made]
        if not self.is_open:
            self._leave_out(step, sensor)
        return known

    def plan(self, step: int, sensor: Sensor, standing: Sequence[LeakFinding]) -> None:
        """Open a window where a finding stands whose line is not known. The arguments are those of
        `step_ended`."""
        self.is_wanted = self.wants(step, standing)
        if not self.is_wanted:
            return
        in_use = sensor.in_use()
        if self.reads:
            if sum(signal.cost_ns for signal in in_use) > SLOW_NS:
                self.is_wanted = False
                return
            self.read(sum(signal.read() or 0 for signal in in_use))
        if self._progress is not None and step < START_BY_TIME:
            return
        if self.is_due(step):
            left = sensor.room()
            if left is not None and left < NEEDS:
                self._refuse(too_little(left, NEEDS))
                self.is_wanted = False
                return
            with sensor.left_out():
                self.prepare()
            self._before = step, [(signal, signal.read()) for signal in in_use]
            self.begin(step)  # from here on the size of Python's blocks is not known

    def _leave_out(self, step: int, sensor: Sensor) -> None:
        """A window is over: memory has grown by what the program has kept in these steps, and by
        what tracing has left. The first is taken to be what each step has kept before."""
        if self._before is None:
            return
        (begun, known), self._before = self._before, None
        for signal, before in () if sensor.is_shared else known:
            after = signal.read()
            if before is None or after is None:
                continue
            pace = sensor.points.pace(signal.name, sensor.since(begun)).rate
            left = after - before - int(max(0.0, pace) * (step - begun))
            signal.leave_out(0, min(max(0, left), MOST_LEFT))

    def leave(self) -> None:
        """Note when the next step of the program begins."""
        if self.is_wanted:
            self._left = time.monotonic_ns(), self._cpu_ns()

    def share(self) -> None:
        """From here on several threads make the steps. A window has blocks in it of the others'
        steps, which are freed, so it is longer and has more parts. The lines of the C heap are not
        traced, because those of one thread alone could be."""
        self._is_shared = self._no_heap = True
        self._cpu_ns = time.process_time_ns
        self.interrupt()
        self._plain = deque(maxlen=OF_BURSTS)
        self.is_wanted = False  # the step that ends now was measured by another clock

    # --- when a window is opened ---

    @property
    def is_open(self) -> bool:
        return self._window is not None

    @property
    def slows(self) -> bool:
        """Whether what is in use has in it what the tracing takes: it is not to be read now."""
        return self._window is not None and self._window.slows

    def wants(self, step: int, findings: Sequence[LeakFinding]) -> bool:
        """Whether something must be done at the end of each step: a window is open, or about to
        be, or growth is read to see how it comes."""
        if self._window is not None:
            return True
        self._wanted = tuple(one for one in findings if self._is_wanted(step, one))
        if not self._wanted or self._windows >= MOST_WINDOWS or self._cost_ns > self._left_ns:
            if self._progress is not None:
                self._progress.forget()
            return False
        if self._why_not:
            self._refuse(self._why_not)
            return False
        return True

    def _is_wanted(self, step: int, finding: LeakFinding) -> bool:
        """Whether it is a suspect of this process whose line is not known. Growth without a holder
        may get one, and waits for that."""
        if finding.made_at or finding.process or finding.over or finding.part != "use":
            return False
        if RANK[finding.grade] < RANK["suspect"] or finding.kind == "mapped files":
            return False
        if self._attempts.get(finding.key, 0) >= self._most_attempts:
            return False
        is_named = bool(finding.holder or finding.kind)
        return is_named or step >= (finding.first_step or 0) + APART

    @property
    def _most_attempts(self) -> int:
        return ATTEMPTS - self._no_heap

    def _asks_heap(self, finding: LeakFinding) -> bool:
        """Whether the next window for it is one of the C heap's lines."""
        attempts = OF_C_HEAP if finding.kind == C_HEAP else OF_OTHERS
        return not self._no_heap and self._attempts.get(finding.key, 0) in attempts

    def ticked(self, heap: int, cost_ns: int) -> None:
        """Note that a tick has ended, and so many bytes of the heap are in use, which took so many
        nanoseconds to read."""
        assert self._progress is not None
        if self._window is None and cost_ns > MOST_READING_SHARE * 1e9 * self._progress.seconds:
            self._refuse(TOO_SLOW_TO_READ)
        else:
            self._progress.read(heap)

    @property
    def reads(self) -> bool:
        """Whether `read` must be called with what is in use."""
        is_open = self._window is not None
        reads = not (self._is_first or self._is_soon or self._progress is not None)
        return not is_open and reads and bool(self._wanted)

    @property
    def _is_first(self) -> bool:
        """Whether one of the wanted has not been traced yet: two steps may do."""
        return any(one.key not in self._attempts for one in self._wanted)

    @property
    def _is_soon(self) -> bool:
        """Whether the lines of the C heap are traced before it is known how growth comes: the C
        heap's has come evenly."""
        return any(
            one.kind == C_HEAP and self._asks_heap(one) and self._attempts[one.key] == OF_C_HEAP[0]
            for one in self._wanted
        )

    def step_took(self, ns: int, cpu_ns: int) -> None:
        """Note how long the newest step has taken, without what is done at its end, and how long
        the program's thread has run in it: that shows what tracing costs, and does not show the
        work of other programs."""
        if self._window is None:
            self._plain.append((ns, cpu_ns))
        else:
            self._took_cpu_ns.append(cpu_ns)

    def _usual(self, took: Sequence[int]) -> int:
        """The shortest of the newest steps, as the shortest of many may be one in which less was
        done; the mean where several threads make them."""
        if not self._is_shared:
            return min(took, default=0)
        return sum(took) // max(1, len(took))

    @property
    def _plain_ns(self) -> int:
        """Nanoseconds that a plain step takes, at least SHORT_NS."""
        return max(SHORT_NS, self._usual([ns for ns, _ in self._plain]))

    @property
    def _slower(self) -> float:
        """How many times as long as a plain step a traced one would take without other work."""
        plain = self._usual([cpu_ns for _, cpu_ns in self._plain])
        traced = self._usual(self._took_cpu_ns[-OF_BURSTS if self._is_shared else -1 :])
        return 1 + max(0, traced - plain) / self._plain_ns

    def read(self, in_use: int) -> None:
        """Note what is in use at the end of this step."""
        self._readings.append(in_use)

    def is_due(self, step: int) -> bool:
        """Whether to open a window at the end of this step."""
        if self._window is not None or not self._wanted:
            return False
        if is_any_open():  # another monitor's: one after the other
            return False
        if self._progress is not None:
            return step >= self._next and self._stands_out(self._progress)
        if len(self._plain) < (self._plain.maxlen or 0):
            return False
        if self._is_first:
            return True
        return step >= self._next and (self._is_soon or len(self._readings) > READ_STEPS)

    def _stands_out(self, progress: Progress) -> bool:
        """Whether the newest ticks show enough growth to open a window. If growth is lost in noise,
        that counts as an attempt."""
        if progress.is_full and progress.least_ticks is None:
            self._attempt(self._wanted)
            progress.forget()
            if all(self._attempts[one.key] >= self._most_attempts for one in self._wanted):
                self._write({"why": UNKNOWN})
        return progress.is_known and progress.least_ticks is not None

    def _attempt(self, findings: Sequence[LeakFinding]) -> None:
        for one in findings:
            self._attempts[one.key] = self._attempts.get(one.key, 0) + 1

    def prepare(self) -> None:
        """Allocate what the first window needs and keeps, by importing and using tracemalloc, so
        that it can be separated from the growth of the program."""
        importlib.import_module("tracemalloc")
        if self._windows == 0:
            window = TraceWindow(1, None)
            if window.begin(0):
                window.look()
            window.end()

    def begin(self, step: int) -> None:
        """Open a window at the end of this step."""
        begun = time.thread_time_ns()
        is_first, progress = self._is_first, self._progress
        steps, probe, parts = TRACED if is_first else steps_for(self._readings), PROBE, PARTS
        probe_s = SLOWEST_PROBE * self._plain_ns / 1e9
        if progress is not None:
            steps = progress.ticks(longest=not is_first)
            probe, probe_s, parts = progress.probe, LONGEST_S, PARTS_BY_TIME
            progress.begin()
        elif self._is_shared:
            steps, parts, probe = max(steps, OF_THREADS), PARTS_BY_TIME, OF_BURSTS
            probe_s *= OF_BURSTS
        elif self._is_soon and not is_first:
            steps = LONGER
        of_heap = [one for one in self._wanted if self._asks_heap(one)]
        others = [one for one in self._wanted if one not in of_heap]
        heap = None if is_first or not of_heap else self._heap_lines()
        self._of_heap = {one.key for one in of_heap}
        self._attempt(others if heap is None else of_heap)
        self._windows += 1
        self._readings.clear()
        self._took_cpu_ns.clear()
        blocks, why = None, ""
        if self._reports is not None and heap is None:
            blocks = self._reports.blocks if self._reports.join() else None
            why = self._reports.reason
            # The other half is tracemalloc's. A mode sees only the thread that enters it.
            is_seen = progress is None and not self._is_shared
            if blocks is None and why and self._windows % 2 == 1 and is_seen:
                blocks = self._reports.dispatched()
        # Untracked storages take a pass over all objects, and a reference to each tensor, whose
        # finalizers must not run on another thread.
        is_later = not is_first and progress is None
        window = TraceWindow(
            steps,
            blocks,
            why,
            untracked=is_later,
            probe_s=probe_s,
            heap=heap,
            probe=probe,
            parts=parts,
        )
        self._opened = time.monotonic()
        try:
            started = window.begin(step)
        except BaseException:
            window.end()
            raise
        if started:
            self._window = window
        elif heap is not None:  # the other sources may still find something
            self._no_heap = True
            self._write({"why": window.why})
        else:
            self._refuse(window.why)
        self._spent_ns = time.thread_time_ns() - begun

    def _heap_lines(self) -> HeapLines:
        reports = self._reports
        is_on = reports is not None and reports.join() and reports.in_use() is not None
        return HeapLines(self._plain_ns, reports.in_use if reports and is_on else None)

    def _refuse(self, why: str) -> None:
        """Trace nothing in this run, and record why."""
        self._windows = MOST_WINDOWS
        self._write({"why": why})

    def turn(
        self,
        step: int,
        findings: Sequence[LeakFinding],
        collect: Callable[[], None] | None = None,
    ) -> dict[Key, str]:
        """Note that a step has ended while a window is open. Returns, at its last step, `made_at`
        of the findings that it explains; before that nothing.

        Args:
            step: its number.
            findings: the findings that stand.
            collect: collects garbage; None, the default, if there is no time for that.
        """
        window = self._window
        if window is None:
            return {}
        begun, found = time.thread_time_ns(), dict[Key, str]()

        def collected() -> None:
            nonlocal begun
            before = time.thread_time_ns()
            assert collect is not None
            collect()
            begun += time.thread_time_ns() - before  # collecting is paid for by the walks

        try:
            if self._progress is not None:
                is_over = self._turn_by_time(step, window, self._progress)
            else:
                is_over = window.turn(step, None if collect is None else collected, self._slower)
        except BaseException:
            self.close()
            raise
        if is_over:
            self._window, self._next = None, step + APART
            found = self._explained(findings, window)
            if self._progress is not None:
                self._progress.forget()
        self._spent_ns += time.thread_time_ns() - begun
        if is_over:
            self._cost_ns = self._spent_ns
            self._left_ns -= self._spent_ns
            self._write_window(window, len(found))
        return found

    def _turn_by_time(self, step: int, window: TraceWindow, progress: Progress) -> bool:
        """Note the end of a tick: tracemalloc goes on if the program bears it. Once that is known
        by one frame, the window gets as long as tracemalloc's memory allows."""
        tables, was_probed = progress.tables, window.is_probed
        was_on = TRACEMALLOC in window.sources
        if was_on:
            slowest = SLOWEST if was_probed or step < window.begun + window.probe else SLOWEST_PROBE
            slower, is_end = progress.slower, step >= window.begun + window.probe
            if tables > MOST_TABLES:
                window.drop(TRACEMALLOC, TOO_MANY)
            elif slower is not None and progress.is_certain and slower > slowest:
                window.drop(TRACEMALLOC, SLOWS)
            elif slower is None and not was_probed and is_end:
                window.drop(TRACEMALLOC, UNKNOWN)
        probed = step - window.begun
        is_over = window.turn(step, None, progress.slower or 1.0)
        if window.is_probed and not was_probed and TRACEMALLOC in window.sources:
            progress.begin()  # with as many frames as it bears
            steps = progress.affordable(window.steps, probed, tables)
            if steps is None:
                window.drop(TRACEMALLOC, TOO_MANY)
            else:
                window.steps = steps
        if was_on and not was_probed and TRACEMALLOC not in window.sources:
            self._windows = MOST_WINDOWS  # the program would not bear it later, either
        return is_over or not window.is_open

    def _lines(self, findings: Sequence[LeakFinding], window: TraceWindow) -> list[list[Site]]:
        """What grew in a window, the most certain list first.

        By time it is only what grew in both halves, at the rate of a program that is not slowed. If
        these lines make more together than memory in use grows by, some of it is freed later than a
        window is long, and it is not known which.
        """
        if self._progress is None:
            return list(window.sites())
        slowed = self._progress.slowed or 1.0
        even = [Site(place, rate * slowed) for place, rate in window.sites()[0]]
        grows = max(self._progress.rate, sum(one.rate_bytes for one in findings))
        is_known = window.is_divided and sum(site.rate for site in even) <= MOST * grows
        return [even] if is_known else []

    def _explained(self, findings: Sequence[LeakFinding], window: TraceWindow) -> dict[Key, str]:
        """`made_at` of the findings that the growth in a window explains."""
        unknown = [
            one for one in findings if one.part == "use" and not one.process and not one.made_at
        ]
        ways = self._lines(unknown, window)
        if window.net is not None:
            unknown = [
                one
                for one in unknown
                if one.key in self._of_heap
                and LEAST * one.rate_bytes <= window.net <= MOST * one.rate_bytes
            ]
        for sites in ways:
            others = [site for site in sites if site.place[:2] not in self._known]
            places = places_of(unknown, others)
            named = {key: found for key, found in places.items() if key in self._attempts}
            if named:
                self._known |= {place[:2] for found in named.values() for place in found}
                return {key: " and ".join(map(name_of, found)) for key, found in named.items()}
        return {}

    def _write_window(self, window: TraceWindow, found: int) -> None:
        ms = round(self._spent_ns / 1e6, 3)
        seconds = None
        if self._progress is not None:
            seconds = round(time.monotonic() - self._opened, 3)
        self._write({"steps": window.traced, "ms": ms, "sources": window.sources,
                     "why": window.why, "found": found, "seconds": seconds})  # fmt: skip

    def close(self) -> None:
        """Turn everything off, for good. May be called twice."""
        self._windows = MOST_WINDOWS
        self.interrupt()

    def interrupt(self) -> None:
        """Turn everything off. A window may be opened again later."""
        window, self._window = self._window, None
        if self._progress is not None:
            self._progress.forget()
        if window is not None:
            window.end()
            window.why = window.why or CUT
            self._write_window(window, 0)
