"""The leak test of a monitor: when it looks, what a look reads, and what is known after it.

    step() ──► LeakWatch.look
                 │  a look is due: at step 16, 24, 32, 48, 64, 96, 128 ... or as growth is large
                 ├──────► Points: each signal at the same point of a step (signals.py)
                 ├──────► GrowthCensus.look, as long as something grows
                 │              ▼
                 │        judge.findings_of(Evidence) ──► Ledger ──► what is new ──► Voice
                 │  between looks, as often as a reading is cheap
                 ├──────► LeakDetector: even readings for the test that tells a leak from a warm-up
                 │  a finding stands, and where it was made is not known
                 └──────► Tracing, for some steps: the line that makes what stays (tracing.py)

A look is taken inside step(), so that the loss, the batch and the graph of a step are alive in
each of them, and cancel. When it comes is a matter of steps and of bytes alone: what is said about
a loop does not depend on how fast its steps are. All looks together take at most 1.5 s of the
processor and 1 % of the run beyond that; where that is used up, looks read the signals alone.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from memtools._base import sentences
from memtools._base.size import format_bytes
from memtools._base.torch import profiler_runs
from memtools._census.growth import GrowthCensus
from memtools._census.holders import Holder
from memtools.leak.detector import STEPS_NEEDED, LeakDetector, LeakVerdict, StepsLeft
from memtools.leak.finding import (
    RANK,
    LeakFinding,
    advice_for,
    is_call,
    steps_left,
)
from memtools.leak.judge import C_HEAP, CYCLES, THRESHOLDS, findings_of, keeps_graphs
from memtools.leak.ledger import Entry, Ledger
from memtools.monitor.evidence import Looks
from memtools.monitor.signals import COUNTED, Limits, Points, Signal, slope_of
from memtools.monitor.tracing import Tracing
from memtools.monitor.workers import WorkerReports

if TYPE_CHECKING:
    from memtools.monitor.voice import Voice

Children = Sequence[tuple[int, int | None, str]]  # pid, private bytes, name

FIRST_LOOK = 16
EARLIEST_LOOK = 4  # where growth is large
LARGE_SHARE, LARGE = 0.01, 1 << 20  # of the limit, and bytes: growth that is looked at at once
DENSE_STEPS = 128  # in which counters that cost next to nothing are read at each step
GRACE_NS = 1_500_000_000  # that looks may take in any run
SHARE = 0.01  # of a run that they may take beyond that
MOST_CHILDREN = 256  # that are followed each by itself
GOES_ON = 12  # steps of time over which growth goes on, or has stopped
RECORDED = 45  # steps of time after which what stands is recorded at the end
DEAR_NS = 1_000_000  # a reading of what is in use that takes more is not taken at each step
#: bytes that traced steps may leave: lines of torch's blocks, which are kept for the next ones, and
#: 48 to 250 of each stack that tracemalloc has seen, which it never frees before Python 3.13
MOST_LEFT = 128 << 10


class CensusLike(Protocol):
    """What a LeakWatch needs of a GrowthCensus."""

    looks: int
    cut: bool
    reached_bytes: int

    def look(self, step: int) -> None: ...
    def holders(self) -> tuple[Holder, ...]: ...


class Schedule:
    """At which steps to look: 16, 24, 32, 48, 64, 96, 128, 192 and so on. Where large growth begins
    late the looks are dense once more from there on."""

    def __init__(self, origin: int = 0) -> None:
        self.next, self._gap, self._half = origin + FIRST_LOOK, 8, False

    def passed(self, step: int) -> None:
        """A look was taken. The next one is where the gaps, each of them twice, lead to."""
        while self.next <= step:
            self.next += self._gap
            if self._half:
                self._gap *= 2
            self._half = not self._half

    def again(self, step: int) -> None:
        """Begin anew, as after the first look."""
        self.next, self._gap, self._half = step + 8, 8, True


class LeakWatch:
    """Looks, judges and remembers what stands.

    `look` is for the main thread, at the end of a step. All else may be asked at any time.
    """

    def __init__(
        self,
        signals: Sequence[Signal],
        limits: Limits,
        voice: Voice,
        census: Callable[[], CensusLike] | None,
        *,
        workers: WorkerReports | None = None,
        processes: Callable[[], Children] | None = None,
        origin: int = 0,
        seconds: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.detector = LeakDetector()
        #: the same for each part that may grow by itself: of `detector` the worst is known alone
        self._parts = {name: LeakDetector() for name in ("use", "children", "shm", "device")}
        #: when to look again, in steps: reads nothing before, but as `due_ns` says
        self.due_step = origin + 1
        #: when to read what is cheap, on the monotonic clock
        self.due_ns = 0
        #: the newest step at which it looked; `origin` before the first
        self.newest = origin
        #: of a step, where steps are nothing but time: then looks are taken on another thread than
        #: the program's, at any point of it, and what they find is told by the second
        self._seconds = seconds
        #: whether nothing is said yet, and nothing recorded
        self.is_quiet = False
        self._signals, self._limits, self._voice = list(signals), limits, voice
        self._make_census = census
        self._census: CensusLike | None = None
        self._workers, self._processes = workers, processes
        self._tracing = tracing  # None: where it was made is not asked
        self._is_traced = False  # something is to be done for it at the end of each step
        #: before a window was opened: the step, and (signal, bytes) of those that it changes
        self._untraced: tuple[int, list[tuple[Signal, int | None]]] | None = None
        self._left = 0, 0  # when the newest look was left, and this thread's time, while that is so
        self._points, self._ledger = Points(noisy=seconds is not None), Ledger()
        self._schedule = Schedule(origin)
        self._looks: list[int] = []  # steps of the looks, without those of standing findings alone
        self._holders: tuple[Holder, ...] = ()
        self._reached: list[tuple[int, int]] = []  # (step, bytes) of all that walks have reached
        self._collected: tuple[int, int] | None = None  # (step, use) at the newest collection
        self._unheld = ""  # what the newest search for it has found
        self._collections = 0  # at the first look, and those made here since
        #: by pid and name: (step, bytes) at looks
        self._children: dict[tuple[int, str], list[tuple[int, int]]] = {}
        self._count = 0
        self._counted = {s.name: s for s in self._signals if s.name in COUNTED}
        self._seen: dict[str, int] = {}  # signals that are watched between looks, at the last look
        self._spent_ns = self._walk_ns = 0
        self._begun_ns = time.monotonic_ns()
        self._first_ns = self._dense_step = 0
        self._origin = self._step = origin
        self._declared: dict[str, dict[str, Any]] = {}
        self._is_over = False

    # --- at the end of a step ---

    def look(self, step: int) -> None:
        """Do what is due at this step. Raises what a census or a reading raises."""
        if step <= self._step:
            return
        now = time.monotonic_ns()
        if self._first_ns == 0:
            self._first_ns, self._first_step = now, step
            self._seen = self._glance()
        self._step = step
        try:
            if self._tracing is not None and self._is_traced:
                self._tell_progress(now, self._tracing)
            if self._tracing is not None and self._tracing.is_open:
                self._turn(step, self._tracing)
            if self._tracing is not None and not self._tracing.is_open:
                self._leave_out_traced(step)
            if self._tracing is None or not self._tracing.slows:
                self._act(step, now)
            if self._tracing is not None and not self._is_over:
                self._trace(step, self._tracing)
        except BaseException:
            if self._tracing is not None:  # nothing of it may stay on
                self._tracing.close()
            raise
        self._plan(step)
        if self._is_traced:
            self._left = time.monotonic_ns(), time.thread_time_ns()

    def _act(self, step: int, now: int) -> None:
        """The look, the check or the readings that are due. While tracemalloc is on, they wait."""
        if step >= self._schedule.next or self._is_large(step):
            self._full(step)
        elif self._ledger and step >= self._next_check:
            self._check(step)
        else:
            if step - self._origin < DENSE_STEPS:
                for signal in self._counted.values():
                    self._feed(signal, step, signal.read())
            if now >= self.due_ns:
                self._between(step, now)

    def _plan(self, step: int) -> None:
        """When to come back. What costs next to nothing is read at each of the first steps."""
        self.due_step = self._schedule.next
        if self._ledger:
            self.due_step = min(self.due_step, self._next_check)
        if step - self._origin < DENSE_STEPS:
            apart = 1 if "device" in self._counted else EARLIEST_LOOK
            self.due_step = min(self.due_step, step + apart)
        if self._is_traced:
            self.due_step = step + 1

    @property
    def _next_check(self) -> int:
        return self.newest + max(8, self.newest // 40)

    # --- where it was made ---

    @property
    def is_traced(self) -> bool:
        """Whether the step that begins is one that is traced."""
        return self._tracing is not None and self._tracing.is_open

    def _tell_progress(self, now: int, tracing: Tracing) -> None:
        """How the program has gone on since the look before: by steps, or by time."""
        if tracing.is_by_time:
            (heap,) = [signal for signal in self._signals if signal.name == "heap"]
            tracing.ticked(heap.read() or 0, heap.cost_ns)
        else:
            left, had = self._left
            tracing.step_took(now - left, time.thread_time_ns() - had)

    def _turn(self, step: int, tracing: Tracing) -> None:
        """The end of a traced step. At the last one, say what is known by then."""
        standing = self._ledger.findings()
        collects = all(one.holder for one in standing) and self._walk_ns > 0
        collects = collects and self._seconds is None  # finalizers are not for another thread
        collect = self._collect if collects and self._can_afford(self._walk_ns) else None
        made = tracing.turn(step, standing, collect)
        known = [replace(one, made_at=made[one.key]) for one in standing if one.key in made]
        self._ledger.update(known)
        self._say(known)

    def _collect(self) -> None:
        """Collect garbage: it is not what stays. The books keep it, as the program goes on to."""
        begun = time.thread_time_ns()
        before = [signal.read() for signal in self._signals]
        self._collect_garbage()
        self._leave_out(before)
        self._collected = self._step, self._use()
        self._spent_ns += time.thread_time_ns() - begun

    def _collect_garbage(self) -> None:
        gc.collect()
        self._collections += 1

    @property
    def _is_collected(self) -> bool:
        """Whether garbage goes without us: Python's collector is on, or the program has collected
        since the first look."""
        return gc.isenabled() or _collections() > self._collections

    def _trace(self, step: int, tracing: Tracing) -> None:
        """Trace some steps where a finding stands whose line is not known."""
        standing = self._ledger.findings()
        self._is_traced = tracing.wants(step, standing)
        if not self._is_traced:
            return
        if tracing.reads:
            of_use = [signal for signal in self._signals if signal.name in ("heap", "python")]
            if sum(signal.cost_ns for signal in of_use) > DEAR_NS:
                self._is_traced = False
                return
            tracing.read(sum(signal.read() or 0 for signal in of_use))
        if self._seconds is not None and step < RECORDED:
            return  # it may be the program's start
        if tracing.is_due(step):
            before = [signal.read() for signal in self._signals]
            tracing.prepare()
            self._leave_out(before)
            own = [signal for signal in self._signals if signal.name in ("heap", "python")]
            self._untraced = step, [(signal, signal.read()) for signal in own]
            tracing.begin(step)  # from here on Python does not tell how large its blocks are

    def _leave_out_traced(self, step: int) -> None:
        """A window is over: memory has grown by what the program has kept in these steps, and by
        what tracing has left. The first is taken to be what each step has kept before."""
        if self._untraced is None:
            return
        (begun, known), self._untraced = self._untraced, None
        for signal, before in known:
            after = signal.read()
            if before is None or after is None:
                continue
            pace = self._points.pace(signal.name, max(self._looks[0], begun // 4)).rate
            left = after - before - int(max(0.0, pace) * (step - begun))
            signal.leave_out(0, min(max(0, left), MOST_LEFT))

    # --- growth that does not wait ---

    def _glance(self) -> dict[str, int]:
        """What the sampler and torch count anyhow: it costs some 0.3 us to read."""
        found = {"used": self._limits.used()}
        if "device" in self._counted:
            found["device"] = self._counted["device"].read()
        return {name: size for name, size in found.items() if size is not None}

    def _is_large(self, step: int) -> bool:
        """Whether memory has grown by 1 % of the limit since the last look, and by 1 MiB."""
        if step - self._origin > DENSE_STEPS:
            return False
        if step < self.newest + EARLIEST_LOOK:
            return False
        now, part = self._glance(), self._limits.share(LARGE_SHARE)
        for name, size in now.items():
            before = self._seen.setdefault(name, size)
            least = part if name == "used" else None
            if size - before >= max(LARGE, LARGE if least is None else least):
                return self._has_room(step)
        return False

    def _has_room(self, step: int) -> bool:
        """Looks beside the schedule lie so far apart that they take half of the time at most."""
        return step >= self.newest + max(EARLIEST_LOOK, (self.newest - self._origin) // 4)

    # --- looks ---

    def _full(self, step: int) -> None:
        """Read everything, walk the heap if something grows, and say what is new."""
        begun = time.thread_time_ns()
        is_first = not self._looks
        try:
            if is_first:
                self._begin(step)
                self._collections = _collections()
            values = self._read(step)
            self._looks.append(step)
            self._schedule.passed(step)
            self._seen = self._glance()
            is_walked = self._walk(step)
            if is_first:
                self._collected = step, self._use()
            self._judge(step, is_walked=is_walked)
            self._redouble(step, values)
        finally:
            self._spent_ns += time.thread_time_ns() - begun
        self._begin_units(step)
        now = time.monotonic_ns()
        for signal in self._signals:  # they rest after the look, not beside it
            signal.due = now + self._pause * signal.cost_ns

    def _look_last(self, last: int) -> None:
        """The run ends between two looks, and by its readings something has grown that nobody has
        spoken of: look once more. The bytes are those of the newest step that was read, as what the
        program does after its loop is no growth of its steps; who holds them, a walk tells now."""
        if self._is_over or self._seconds is not None or not self._looks:
            return
        own = [signal for signal in self._signals if signal.name in ("heap", "python")]
        step = min(signal.newest[0] for signal in own or self._signals)
        said = {one.part for one in self._ledger.findings()}
        grown = [name for name, part in self._parts.items() if RANK[part.kind] >= RANK["suspect"]]
        if step < self.newest + EARLIEST_LOOK or said.issuperset(grown):
            return
        read = (signal for signal in self._signals if signal.newest[0] >= step)
        known = {one.name: one.newest[1] for one in read}
        values = {name: size for name, size in known.items() if size is not None}
        begun = time.thread_time_ns()
        self._points.add(step, values)
        self._looks.append(step)
        self.newest = step
        self._judge(step, is_walked=self._walk(last))
        self._spent_ns += time.thread_time_ns() - begun

    def _check(self, step: int) -> None:
        """Read everything, for the findings that stand, and see whether one has ended."""
        self._read(step)
        if self._ledger.follow(self._paces(step)):
            self._look_soon(step)
        self._forecast(step)
        self._say(self._ledger.end(self._points, step))

    def _begin(self, step: int) -> None:
        """Collect garbage before the first look: that of a program's start goes at some time, and
        may hide the growth of a hundred steps. What it frees is given back to the books. On
        another thread than the program's its finalizers are not for us to run."""
        if self._seconds is not None:
            return
        before = [signal.read() for signal in self._signals]
        gc.collect()
        self._leave_out(before)

    def _leave_out(self, before: Sequence[int | None]) -> None:
        for signal, size in zip(self._signals, before, strict=True):
            signal.leave_out(size, signal.read())

    def _read(self, step: int) -> dict[str, int]:
        """One reading of each signal, into the points and the test."""
        known: dict[str, int] = {}
        now = time.monotonic_ns()
        for signal in self._signals:
            size = signal.read()
            then = time.monotonic_ns()
            signal.cost_ns, now = min(signal.cost_ns, then - now), then
            if signal.name == "children" and self._workers is not None and self._workers.looking():
                size = None
            self._feed(signal, step, size)
            if size is not None:
                known[signal.name] = size
        if self._processes is not None:
            self._read_children(step, known)
        self._points.add(step, known)
        self.newest = step
        return known

    def _read_children(self, step: int, known: dict[str, int]) -> None:
        """How many processes there are, and what each of them has for itself."""
        assert self._processes is not None
        helpers = _helpers()
        each = [one for one in self._processes() if one[0] not in helpers]
        known["count"] = len(each)
        self._children = {
            (pid, name): [*self._children.get((pid, name), ())[-15:], (step, size)]
            for pid, size, name in each[:MOST_CHILDREN]
            if size is not None
        }
        self._count = len(each)

    def _feed(self, signal: Signal, step: int, size: int | None) -> None:
        part = self._parts.get(signal.name, self._parts["use"])
        for at, value in signal.feed(step, size):
            self.detector.update(at, **{signal.name: value})
            part.update(at, **{signal.name: value})

    def _begin_units(self, step: int) -> None:
        """From step 128 on readings are even in steps, whatever one costs."""
        if self._dense_step == 0 and step - self._origin >= DENSE_STEPS:
            self._dense_step = step
            ns = (time.monotonic_ns() - self._first_ns) / max(1, step - self._first_step)
            for signal in self._signals:
                signal.begin(step, ns)

    @property
    def _pause(self) -> int:
        """Readings of the first steps are denser, as there are few."""
        return Signal.PAUSE if self._dense_step else Signal.PAUSE // 8

    def _between(self, step: int, now: int) -> None:
        """Read the signals that have rested long enough. In the first steps more often."""
        for signal in self._signals:
            if signal.name in self._counted and self._dense_step == 0:
                continue
            if now >= signal.due and signal.cost_ns < 1 << 62:
                self._feed(signal, step, signal.read())
                then = time.monotonic_ns()
                signal.rest(then, then - now, self._pause)
                now = then
        self.due_ns = min(signal.due for signal in self._signals)

    # --- the heap ---

    def _use(self) -> int:
        points = self._points.series("use")
        return points[-1][1] if points else 0

    def _growth(self) -> float:
        """Bytes a step by which anything that counts grows: since the first look, or lately."""
        rates = [self._points.slope("all")]
        rates += [self._points.slope("all", since) for since in self._looks[-3:-1]]
        return max(rates)

    def _can_afford(self, ns: int) -> bool:
        allowed = GRACE_NS
        if self._step - self._origin > 512:
            allowed += int(SHARE * (time.monotonic_ns() - self._begun_ns))
        return self._spent_ns + ns <= allowed

    def _walk(self, step: int) -> bool:
        """A look of the census, the first in any case; what it keeps itself is no growth."""
        if self._make_census is None:
            return False
        is_first = self._census is None
        grows = is_first or self._growth() >= THRESHOLDS.least_rate or self._ledger.has_holders()
        if not grows or not (is_first or self._can_afford(self._walk_ns)):
            return False
        begun = time.thread_time_ns()
        before = [signal.read() for signal in self._signals]
        try:
            if self._census is None:
                self._census = self._make_census()
            self._census.look(step)
            self._holders = self._census.holders()
            if not self._census.cut:
                self._reached = [*self._reached[-63:], (step, self._census.reached_bytes)]
            if self._census.cut:
                self._voice.complain("cut", "the heap is too large for a whole look: parts of it "
                                     "were left out, and who is in them is not known")  # fmt: skip
        except Exception as error:
            self._make_census, self._census, self._holders = None, None, ()
            if isinstance(error, MemoryError) and self._ledger.has_holders():
                return False  # memory is nearly out, and who takes it is known
            why = f"{type(error).__name__}: {error}".removesuffix(": ")
            self._voice.complain("census", f"holders are not looked for from here on: {why}")
            return False
        finally:
            self._leave_out(before)
            self._walk_ns = time.thread_time_ns() - begun
        return True

    # --- judgement ---

    def _judge(self, step: int, *, is_walked: bool) -> None:
        # Where a census has failed, for want of memory for example, those whom it named stay named.
        if self._make_census is None and not self._ledger.has_holders():
            is_walked = True  # nobody looks, and nobody is known
        seen = self._known(step)
        workers = self._ask_workers(step, seen.grades["children"])
        found = findings_of(
            seen.evidence(
                self._holders,
                children=seen.children(*self._growing_children(), workers),
                unheld=self._search(seen) if is_walked else "",
                walked=is_walked,
                is_collected=self._is_collected,
                profiles=profiler_runs(),
                declared=self._declared_at(step),
                seconds=self._seconds,
            )
        )
        paces = self._paces(step)
        news, replaced = self._ledger.look(step, found, paces, self._points, walked=is_walked)
        if any(one.first_step == step and not one.holder and not one.kind for one in news):
            self._look_soon(step)
        withdrawn = [one for one in replaced if is_call(one.grade)]
        for finding in replaced if not self.is_quiet else ():
            if finding not in withdrawn:
                self._voice.write(self._told(finding))
        self._forecast(step)
        current = {one.key: one for one in self._ledger.findings()}
        news = [current.get(one.key, one) for one in news]
        named = {one.part for one in found if one.holder and RANK[one.grade] >= RANK["suspect"]}
        known = [one for one in withdrawn if one.part in named]
        news = [*(one for one in withdrawn if one not in known), *news]
        self._say([*news, *self._ledger.end(self._points, step)], ended=known)

    def _paces(self, step: int) -> dict[str, float]:
        """How fast each part of memory grows now."""
        since = max(self._looks[0], step // 4)
        return {part: self._points.pace(part, since).rate for part in self._parts}

    def _look_soon(self, step: int) -> None:
        """Somebody new grows in a run that has gone on for long: who it is takes some looks."""
        if step - self._origin >= DENSE_STEPS and self._schedule.next > step + 8:
            self._schedule.again(step)

    def _known(self, step: int) -> Looks:
        grades = {name: detector.kind for name, detector in self._parts.items()}
        return Looks(step, self._looks, self._points, grades, self._tested())

    def _tested(self) -> dict[str, tuple[int, float]]:
        """By part: since when the leak test sees it grow, and how fast."""
        verdicts = {name: detector.verdict() for name, detector in self._parts.items()}
        return {
            name: (verdict.since_step, verdict.rate_bytes_per_step)
            for name, verdict in verdicts.items()
            if verdict.since_step is not None and RANK[verdict.kind] >= RANK["suspect"]
        }

    def _search(self, seen: Looks) -> str:
        """Whose the growth is that no container explains. Before a word of the C heap the garbage
        is collected: if half of the growth goes with it, it was the garbage's."""
        if self._census is None or self._census.cut:
            return ""  # nobody has looked for a holder, or not everywhere
        if self._census.looks < THRESHOLDS.named_looks:
            return ""
        use, held = seen.pace("use"), sum(holder.rate_bytes for holder in self._holders)
        if use < THRESHOLDS.least_rate or held >= THRESHOLDS.unexplained * use:
            return ""
        if keeps_graphs(self._holders):
            return ""  # which keep what nobody can measure
        whole = [point for point in self._reached if point[0] >= seen.since]
        if len(whole) < 2 or slope_of(whole) >= THRESHOLDS.explained * use:
            return ""  # objects hold it, and no container is longer for it; or nobody knows
        if not seen.is_even():
            return CYCLES if self._unheld == CYCLES else ""
        if self._unheld == C_HEAP:
            return C_HEAP  # found before, and it goes on
        if self._seconds is not None or not self._can_afford(self._walk_ns):
            return ""
        before, first = self._use(), self._collected
        values = [signal.read() for signal in self._signals]
        self._collect_garbage()
        after = sum(s.read() or 0 for s in self._signals if s.name in ("heap", "python"))
        self._leave_out(values)  # the program would have it still, and goes on to make more
        grown = before - (first[1] if first is not None else 0)
        self._collected = self._step, before
        self._unheld = CYCLES if before - after >= THRESHOLDS.garbage * grown else C_HEAP
        return self._unheld

    def _redouble(self, step: int, values: dict[str, int]) -> None:
        """Where large growth has begun since the last look, look again soon."""
        points = self._points.series("all")
        if len(points) < 4 or step - self._origin < DENSE_STEPS:
            return
        (a, first), (b, before), (c, last) = points[-3:]
        lately, earlier = (last - before) / (c - b), (before - first) / (b - a)
        part = self._limits.share(LARGE_SHARE) or LARGE
        if last - before >= max(LARGE, min(part, 64 * LARGE)) and lately > 4 * max(
            THRESHOLDS.least_rate, earlier
        ):
            self._schedule.again(step)

    # --- what is declared ---

    def expect_growth(self, name: str, **growth: Any) -> None:
        """As LeakDetector.expect_growth."""
        for detector in (self.detector, *self._parts.values()):
            detector.expect_growth(name, **growth)
        use = self._use() if self._points.steps else None
        self._declared[name] = {**growth, "use": use}

    def _declared_at(self, step: int) -> tuple[float, str]:
        """(bytes a step that are declared now, the names)."""
        rate, names = 0.0, []
        for name, growth in self._declared.items():
            until, size, given = growth.get("until"), growth.get("bytes"), growth.get("rate")
            if growth["use"] is None:
                growth["use"] = self._use()
            grown = self._use() - growth["use"]
            if (until is not None and step > until) or (isinstance(size, int) and grown > size):
                continue
            rate += math.inf if given is None else float(given)
            names.append(name)
        return rate, " and ".join(names)

    # --- children ---

    def _ask_workers(self, step: int, grade: str) -> tuple[LeakFinding, ...]:
        """What workers have found out; they look as long as the memory of children grows."""
        if self._workers is None:
            return ()
        if self._points.slope("children", max(self._looks[0], step // 4)) >= THRESHOLDS.least_rate:
            self._workers.ask()
        elif all(one.signal != "children" for one in self._ledger.findings()):
            self._workers.rest()
        return self._workers.findings(step if self._seconds is None else 0, grade)

    def _growing_children(self) -> tuple[int, Sequence[tuple[str, float]]]:
        """How many there are, and who of them grows: not by its first point, as what a process
        loads when it starts is no growth of steps."""
        rates = [(slope_of(points[1:]), who) for who, points in self._children.items()]
        names = _names_of_children()
        growing = [
            (f"child process {pid} ({names.get(pid, name)})", rate)
            for rate, (pid, name) in sorted(rates, reverse=True)
            if rate >= THRESHOLDS.least_rate
        ]
        return self._count, growing

    # --- forecasts ---

    def _forecast(self, step: int) -> None:
        """Write into each finding how long is left: until the host's limit at the rate of all that
        grows there, until the device's at its own."""
        standing = self._ledger.findings()
        calls = [one for one in standing if RANK[one.grade] >= RANK["suspect"]]
        present = [one for one in self._ledger.present() if one in calls]
        host = sum(self._each(one) for one in present if one.signal != "device")
        room, device = self._limits.room(), None
        changed: list[LeakFinding] = []
        for one in calls:
            steps = step - (one.since_step if one.since_step is not None else self._looks[0])
            left = None
            if one.signal == "device":
                if device is None:
                    full, points = self._limits.device(), self._points.series("device")
                    device = None if full is None or not points else full - points[-1][1]
                left = steps_left(one.rate_bytes, device, steps)
                if one.holder and host > 0:  # tensors of the host that feed it
                    other = steps_left(host, room, steps)
                    left = min((x for x in (left, other) if x is not None), default=None)
            elif self._each(one) > 0:
                left = steps_left(host, room, steps)
            if left is None:
                continue
            ns = (time.monotonic_ns() - self._first_ns) / max(1, self._step - self._first_step)
            seconds = left[0] * ns / 1e9, left[1] * ns / 1e9
            changed.append(replace(one, steps_left=left, seconds_left=seconds))
        self._ledger.update(changed)

    def _each(self, finding: LeakFinding) -> float:
        """Bytes a step of a finding; 0 where only those of a second are known."""
        if finding.per == "step":
            return finding.rate_bytes
        return finding.rate_bytes * (self._seconds or 0.0)

    # --- what is said ---

    def _say(self, news: Sequence[LeakFinding], ended: Sequence[LeakFinding] = ()) -> None:
        """Say what is new. Those that have `ended` because their holder is known now are not said
        to people, who are told the holder."""
        for finding in (*ended, *news):
            if self._is_over or self.is_quiet:  # a callback has stopped the monitor
                return
            self._voice.say(self._told(finding), aloud=finding not in ended)
        if not self._is_over and not self.is_quiet:
            self._voice.renew(self.findings())

    def speak(self) -> None:
        """Say what stands and goes on, and from then on what is new."""
        if self.is_quiet and any(map(self._goes_on, self._ledger.findings())):
            self.is_quiet = False
            self._say([one for one in self._ledger.findings() if self._goes_on(one)])

    def _goes_on(self, finding: LeakFinding) -> bool:
        """Whether its part of memory has gone on growing over the last looks."""
        recent = self._points.recent(finding.part, GOES_ON)
        return recent is not None and recent >= THRESHOLDS.goes_on * self._each(finding)

    def interrupt(self) -> None:
        """Do not look for a while: nothing that slows the program is to be on."""
        if self._tracing is not None:
            self._tracing.interrupt()

    def withdraw(self) -> None:
        """Look no more: what was found has been a part of something else."""
        self.leave()
        for finding in self._ledger.findings() if not self.is_quiet else ():
            self._voice.say(self._told(replace(finding, over=True)))

    def _told(self, finding: LeakFinding) -> LeakFinding:
        """As it is told: with what to do, and by the second where steps are nothing but time."""
        if self._seconds is not None:
            finding = replace(finding, first_step=None, since_step=None, steps_left=None)
            if finding.per == "step":
                finding = replace(finding, per="s", rate_bytes=finding.rate_bytes / self._seconds)
        return replace(finding, advice=advice_for(finding))

    def leave(self) -> None:
        """Look no more."""
        self._is_over = True
        if self._tracing is not None:
            self._tracing.close()
        if self._workers is not None:
            self._workers.close()

    def close(self, step: int = 0) -> None:
        """The run ends, after so many steps: a last look where something has grown since the newest
        one, and the record gets what stands, with the newest figures."""
        try:
            self._look_last(max(step, self._step))
        finally:
            self.leave()
        if self.is_quiet and self._step >= RECORDED:
            self.speak()
        if self._looks and not self.is_quiet:
            self._forecast(self._step)
            for finding in self.findings():
                self._voice.write(finding)

    # --- what is asked ---

    def findings(self) -> tuple[LeakFinding, ...]:
        return tuple(map(self._told, self._ledger.findings()))

    def holders(self) -> tuple[Holder, ...]:
        return self._holders

    def verdict(self, step: int) -> LeakVerdict:
        """The detector's verdict at this step, or `fills` where containers with a bound take what
        grows."""
        detector, made = self.detector, step - self._origin
        detector.limit_bytes, detector.device_limit_bytes = self._limits.host(), None
        verdict = detector.verdict()
        if verdict.signal == "device":  # only then is a device asked
            detector.device_limit_bytes = self._limits.device()
            verdict = detector.verdict()
        filled = sum(one.rate_bytes for one in self._ledger.findings() if one.grade == "fills")
        if verdict.signal is not None and filled >= 0.7 * verdict.rate_bytes_per_step > 0:
            return replace(
                verdict, kind="fills", confidence="none", steps_left=None, pressure=False
            )
        if verdict.kind in ("early", "quiet"):  # its steps are those of the run, everywhere
            verdict = replace(verdict, steps_known=made)
            found = next(iter(self._ledger.findings()), None)
            if found is not None and RANK[found.grade] >= RANK["suspect"]:
                return self._suspected(verdict, found)
            kind = "early" if made < STEPS_NEEDED else "quiet"
            return replace(verdict, kind=kind)
        return verdict

    def _suspected(self, verdict: LeakVerdict, found: LeakFinding) -> LeakVerdict:
        """Where the signals alone do not show yet what a census or a worker has found."""
        left = None
        if found.steps_left is not None:
            lo, hi = found.steps_left
            left = StepsLeft(lo, math.sqrt(lo * hi), hi)
        since = found.since_step if found.since_step is not None else self._looks[0]
        return replace(
            verdict, kind="suspect", rate_bytes_per_step=self._each(found), confidence="low",
            signal=found.signal or "heap", since_step=since, steps_left=left,
        )  # fmt: skip

    def forecast(self) -> StepsLeft | None:
        """Steps until the host's or a device's limit: of the worst finding, else by the test."""
        for finding in self._ledger.findings():
            if finding.steps_left is not None and finding.per == "step":
                lo, hi = finding.steps_left
                return StepsLeft(lo, math.sqrt(lo * hi), hi)
        forecasts = [
            self.detector.forecast(limit, signal=signal)
            for limit, signal in ((self._limits.host(), None), (self._limits.device(), "device"))
            if limit is not None and limit > 0
        ]
        return min((left for left in forecasts if left is not None), default=None)

    def lines(self, step: int) -> list[str]:
        """Lines of a summary at this step: how much grows, and what stands."""
        lines, standing, made = [], self.findings(), step - self._origin
        if made <= 0:
            return []
        if len(self._points.steps) > 1:
            since = max(self._looks[0], self._step // 4)
            rates = [
                f"{_signed(1000 * self._points.slope(name, since))} {words}"
                for name, words in _GROWTHS
                if self._points.series(name) and (name == "use" or self._points.slope(name, since))
            ]
            lines += [f"Growth per 1,000 steps: {', '.join(rates)}"] if rates else []
        if not standing:
            if made < STEPS_NEEDED:
                return [*lines, f"Leak test: {sentences.of_early(made)}"]
            return [*lines, "Leak test: quiet"] if lines else []
        return [*lines, f"Leak test: {standing[0]}", *(f"  {one}" for one in standing[1:])]


_GROWTHS = (
    ("use", "in use in this process"),
    ("children", "in child processes"),
    ("shm", "in shared memory"),
    ("device", "on the device"),
)


def _signed(size: float) -> str:
    return ("-" if size < 0 else "+") + format_bytes(abs(size))


def growth_census() -> CensusLike:
    """The census of a run; memtools' own objects are never holders."""
    own = (LeakWatch, Points, Ledger, Entry, Signal, LeakFinding)
    return GrowthCensus(own, least_rate=THRESHOLDS.least_rate)


def worker_reports() -> WorkerReports | None:
    """What workers answer by; None where the kernel has no such memory."""
    try:
        return WorkerReports()
    except OSError:
        return None


def _collections() -> int:
    """How many times garbage has been collected in this process, of any age."""
    return sum(generation["collections"] for generation in gc.get_stats())


def _helpers() -> set[object]:
    """The ids of multiprocessing's own processes, of which there is one each: they are no part of
    a number of processes that grows."""
    tracker = getattr(
        sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None
    )
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    return {getattr(tracker, "_pid", None), getattr(server, "_forkserver_pid", None)}


def _names_of_children() -> dict[int, str]:
    """The names of the processes that multiprocessing has started here, by their id."""
    module = sys.modules.get("multiprocessing.process")
    names: dict[int, str] = {}
    for child in list(getattr(module, "_children", ())):
        popen = getattr(child, "_popen", None)
        pid, name = getattr(popen, "pid", None), getattr(child, "_name", None)
        if isinstance(pid, int) and isinstance(name, str):
            names[pid] = name
    return names
