"""The leak test of a monitor: it looks, judges, and remembers what stands.

    step() ──► LeakWatch.look
                 │  Schedule: a look is due, at step 16, 24, 32, 48 ... or as growth is large
                 ├──────► Sensor: each signal at the same point of a step
                 ├──────► HeapWalks: who gains, as long as something grows
                 │              ▼
                 │        judge.findings_of(Evidence) ──► Ledger ──► what is new ──► Reporter
                 │  between looks, as often as a reading is cheap
                 ├──────► Sensor: even readings for the test that separates a leak from a warm-up
                 │  a finding stands, and its line is not known
                 └──────► Tracing, for some steps: the line that makes what stays

A look is taken inside step(), so that the loss, the batch and the graph of a step are alive in
each of them, and cancel.

    step  16  24  32  48  64  96  128  192 ...   a look: all signals, and the heap if they grow
               └ large growth ┘                  looks in between, at most half of the time
                                  │  │  │  │     while a finding stands: the signals alone
    Where all that grows is named, 192, 384, 768 ... are no looks: the signals alone are read

When it looks depends on steps and on bytes alone: what is reported about a loop does not depend on
how fast its steps are. Only where a walk of the heap takes long, it waits until the run has lasted
long enough for it, and until then growth is reported without its holder.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memtools._base import sentences
from memtools._base.place import source_at
from memtools._base.size import format_bytes
from memtools._base.torch import profiler_runs
from memtools._census.arrays import Owner, owners_of
from memtools._census.growth import GrowthCensus
from memtools._leak.advice import advice_for
from memtools._leak.detector import STEPS_NEEDED, LeakVerdict
from memtools._leak.finding import (
    RANK,
    LeakFinding,
    is_call,
    is_little,
    with_forecast,
)
from memtools._leak.forecast import Course, Joint, joint_of
from memtools._leak.judge import OF_CENSUS, THRESHOLDS, Block, findings_of, of_workers
from memtools._leak.ledger import Entry, Ledger, as_of_now, has_stopped, of_late
from memtools._leak.series import Points
from memtools._monitor.children import ChildProcesses
from memtools._monitor.firstwrites import LEAST_RISE, FirstWrites
from memtools._monitor.reporter import Reporter
from memtools._monitor.sensor import LOWS, Sensor
from memtools._monitor.signals import Limits, Signal, block_that_fills
from memtools._monitor.tracing import START_BY_TIME, Tracing
from memtools._monitor.walks import Budget, CensusLike, HeapWalks

FIRST_LOOK = 16  # The first look is at this step, ...
EARLIEST_LOOK = 4  # ... or from this one on, if growth is large.
CHECKS_APART = 8  # Findings that stand are checked at most every so many steps.
DENSE_STEPS = 128  # In so many steps counters that cost next to nothing are read at each step.
LONG_GAP = 64  # Of two looks so many steps apart one is omitted where everything is named.
MOST_THREADS = 64  # So many threads that make steps are known, the newest ones.
GOES_ON = 12  # Growth goes on, or has stopped, if the last so many ticks of time show it.


class Schedule:
    """At which steps to look: 16, 24, 32, 48, 64, 96, 128, 192 and so on. Where large growth begins
    late the looks are dense once more from there on.

    Args:
        origin: the step after which the run begins, 0 by default.
        of_phase: whether these are the steps of a phase, which may be few: then the first looks are
            at 2, 5, 8, 14, and none beside them. False by default.
    """

    def __init__(self, origin: int = 0, *, of_phase: bool = False) -> None:
        self.origin = origin
        #: the newest step at which signals were read; `origin` before the first
        self.newest = origin
        #: findings that stand are checked so many steps later at the earliest
        self.apart = CHECKS_APART
        #: the step of the next look
        self.next, self._gap, self._half = origin + FIRST_LOOK, 8, False
        self._of_phase = of_phase
        if of_phase:
            self.next, self._gap = origin + 2, 3
        self._first: tuple[int, int] | None = None  # the first step, and when that was

    def begin(self, step: int) -> bool:
        """Note that a step has ended. Returns whether it is the first."""
        if self._first is not None:
            return False
        self._first = step, time.monotonic_ns()
        return True

    def step_ns(self, step: int) -> float:
        """Nanoseconds that a step has taken from the first to this one."""
        first, begun = self._first or (step, time.monotonic_ns())
        return (time.monotonic_ns() - begun) / max(1, step - first)

    def passed(self, step: int) -> None:
        """Plan the next look after one at this step: each gap comes twice, then doubles."""
        while self.next <= step:
            self.next += self._gap
            if self._half:
                self._gap *= 2
            self._half = not self._half

    def again(self, step: int) -> None:
        """Look as densely as after the first look."""
        self.next, self._gap, self._half = step + 8, 8, True

    def by(self, step: int) -> None:
        """Look at this step at the latest."""
        self.next = min(self.next, max(step, self.newest + 8))

    def soon(self, step: int) -> None:
        """Look densely again, because something new grows: to name it in a long run takes some
        looks."""
        if not self.is_dense(step) and self.next > step + 8:
            self.again(step)

    def is_dense(self, step: int) -> bool:
        """Whether this is one of the first steps, in which looks and readings are dense."""
        return step - self.origin < DENSE_STEPS

    @property
    def may_omit(self) -> bool:
        """Whether the next look is one in the middle of a long gap, which a check may replace."""
        return self._half and self._gap >= LONG_GAP

    def may_look_early(self, step: int) -> bool:
        """Whether a look beside the schedule, at large growth, takes half of the time at most."""
        apart = max(EARLIEST_LOOK, (self.newest - self.origin) // 4)
        is_early = step - self.origin <= DENSE_STEPS and not self._of_phase
        return is_early and step >= self.newest + apart

    @property
    def next_check(self) -> int:
        """The step at which findings that stand are checked."""
        return self.newest + max(self.apart, self.newest // 40)

    def due_step(self, step: int, *, stands: bool, every: int) -> int:
        """The step after this one at which there is something to do.

        Args:
            step: that has ended.
            stands: whether a finding stands.
            every: in how many of the first steps something is read.
        """
        due = min(self.next, self.next_check) if stands else self.next
        return min(due, step + every) if self.is_dense(step) else due


class LeakWatch:
    """Looks, judges and remembers what stands.

    Call `look` at the end of a step, on its thread, and on one thread at a time. All other methods
    may be called at any time.

    Args:
        signals: the signals to read.
        limits: the limits of these signals.
        reporter: reports what is found.
        census: makes the census of the heap; None: the heap is not walked.
        children: the child processes; None, the default: they are not read.
        origin: the step after which the run begins, 0 by default.
        seconds: the length of a step if steps are ticks of time. Then looks are taken on another
            thread than the program's, at any point of it, and rates are reported by the second.
            None, the default: steps are the program's own.
        tracing: finds the line that makes what grows; None, the default: lines are not looked for.
        phase: the phase whose own steps these are; "", the default: they are the run's.
        budget: the processor time that looks may take; None, the default: 1.5 s and 1 %.
    """

    def __init__(
        self,
        signals: Sequence[Signal],
        limits: Limits,
        reporter: Reporter,
        census: Callable[[], CensusLike] | None,
        *,
        children: ChildProcesses | None = None,
        origin: int = 0,
        seconds: float | None = None,
        tracing: Tracing | None = None,
        phase: str = "",
        budget: Budget | None = None,
    ) -> None:
        #: the step of the next call of `look`; before it, `due_ns` alone may be due
        self.due_step = origin + 1
        #: whether nothing is reported yet, and nothing recorded
        self.is_quiet = False
        #: whether another thread has made a step while one looked
        self.is_met = False
        self._limits, self._reporter, self._seconds = limits, reporter, seconds
        self._phase = phase
        self._sources: dict[str, str] = {}  # the source text of each line that a finding names
        self._schedule, self.budget = Schedule(origin, of_phase=bool(phase)), budget or Budget()
        self._spent_before = self.budget.spent_ns  # in earlier passages of the phase
        self._sensor = Sensor(signals, limits, noisy=seconds is not None)
        self._walks = HeapWalks(
            census, self._sensor, self.budget, reporter.complain, collects=seconds is None
        )
        self._children = children or ChildProcesses()
        self._tracing = tracing
        self._ledger = Ledger()
        self._first_writes = FirstWrites()
        self._unused = 0  # resident bytes that were not in use at the newest look
        self._owners: dict[tuple[int, int], Owner] = {}  # of the blocks that fill, by their extent
        self._rooms: dict[str, int] = {}  # until each limit, as of the newest points
        self._step = origin
        self._threads: list[int] = []  # those that have looked so far, the newest last
        self._is_over = False

    @property
    def due_ns(self) -> int:
        """When to read what is cheap, on the monotonic clock; 0 before the first step."""
        return self._sensor.due_ns

    @property
    def is_traced(self) -> bool:
        """Whether the step that begins is traced."""
        return self._tracing is not None and self._tracing.is_open

    @property
    def _steps(self) -> int:
        """How many steps the run has made."""
        return self._step - self._schedule.origin

    # --- at the end of a step ---

    def look(self, step: int) -> None:
        """Do what is due at this step. Raises what a census or a reading raises."""
        if step <= self._step:
            return
        now = time.monotonic_ns()
        if self._schedule.begin(step):
            self._sensor.note_seen()
        self._step = step
        self._note_thread(threading.get_ident())
        tracing = self._tracing
        if tracing is None:
            self._act(step, now)
        else:
            self._act_and_trace(step, now, tracing)
        every, stands = self._sensor.every, bool(self._ledger)
        self.due_step = self._schedule.due_step(step, stands=stands, every=every)
        if self._sensor.is_shared:
            self.due_step = max(step + 1, self.due_step - LOWS)
        if tracing is not None and tracing.is_wanted:
            self.due_step = step + 1
            tracing.leave()

    def _note_thread(self, thread: int) -> None:
        """Note which thread has made the step. Where one comes back after another, or makes a step
        while another looks, they make steps by turns or at once; a program may also go on with
        another one for good."""
        is_shared = self.is_met or thread in self._threads[:-1]
        if is_shared and not self._sensor.is_shared:
            self._share()
        if thread in self._threads:
            self._threads.remove(thread)
        self._threads = [*self._threads[1 - MOST_THREADS :], thread]

    def _share(self) -> None:
        """Several threads make the steps from here on."""
        self._sensor.share()
        self._schedule.apart = 4 * LOWS
        if self._tracing is not None:
            self._tracing.share()

    def _act_and_trace(self, step: int, now: int, tracing: Tracing) -> None:
        """Do what is due at this step. Begin or end to trace the steps around it."""
        try:
            self._end_traced(step, now, tracing)
            if not tracing.slows:  # else looks and readings wait
                self._act(step, now)
            if not self._is_over:
                tracing.plan(step, self._sensor, self._ledger.findings())
        except BaseException:
            tracing.close()  # nothing of it may stay on
            raise

    def _end_traced(self, step: int, now: int, tracing: Tracing) -> None:
        """The end of a step that may be traced. At the last one, report what is known by then."""
        standing, collect = self._ledger.findings() if tracing.is_open else (), None
        if standing and all(one.holder for one in standing):
            collect = self._walks.collect()
        known = tracing.step_ended(step, now, self._sensor, standing, collect)
        if known:
            self._ledger.update(known)
            self._report(known)

    def _act(self, step: int, now: int) -> None:
        """Do the look, the check or the readings that are due."""
        is_due = step >= self._schedule.next
        if is_due and self._schedule.may_omit and self._is_named():
            self._schedule.passed(step)
            self._check(step)
        elif is_due or self._is_large(step):
            self._full(step)
        elif self._ledger and step >= self._schedule.next_check:
            self._check(step)
        else:
            if self._sensor.is_shared:
                self._sensor.read_lows(step)
            if self._schedule.is_dense(step):
                self._sensor.read_counted(step)
            if now >= self._sensor.due_ns:
                self._sensor.read_cheap(step, now)

    def _is_named(self) -> bool:
        """Whether all that grows is likely to be a leak and has a holder."""
        standing = self._ledger.findings()
        known = {one.part for one in standing}
        if "use" in known:
            known.add("resident")  # which grows with it
        is_sure = all(one.holder and RANK[one.grade] >= RANK["likely"] for one in standing)
        return is_sure and known.issuperset(self._sensor.suspects())

    def _is_large(self, step: int) -> bool:
        return self._schedule.may_look_early(step) and self._sensor.is_large()

    def _full(self, step: int) -> None:
        """Read everything, walk the heap if something grows, and report what is new."""
        is_first = not self._sensor.looks
        with self.budget.spending():
            if is_first:
                self._walks.begin(is_start=not self._phase)
            self._read(step)
            self._sensor.looks.append(step)
            self._schedule.passed(step)
            self._sensor.note_seen()
            is_walked = self._walk(step)
            if is_first:
                self._walks.begun()
            self._judge(step, is_walked=is_walked)
            if not self._schedule.is_dense(step) and self._sensor.has_jumped():
                self._schedule.again(step)  # where large growth has begun, look again soon
        if not self._schedule.is_dense(step):
            self._sensor.begin_units(step, self._schedule.step_ns(step))
        self._sensor.rest()

    def _check(self, step: int) -> None:
        """Read everything, for the findings that stand, and see whether one has ended."""
        self._read(step)
        stairs = self._sensor.points.stairs("use")
        has_jumped = stairs is not None and stairs.jumps[-1].step > self._sensor.looks[-1]
        if self._ledger.follow(self._sensor.paces(step), self._sensor.rising(step)) or has_jumped:
            self._schedule.soon(step)
        self._ledger.renew(self._ask_workers(step))
        self._forecast(step)
        self._report(self._ledger.end(self._sensor.points, step))

    def _look_last(self, last: int) -> None:
        """Look once more at the end of a run, if something has grown since the newest look that is
        not reported. The bytes are those of the newest step that was read, because what the program
        does after its loop is not growth of its steps. A walk finds the holders now."""
        if self._is_over or self._seconds is not None or not self._sensor.looks:
            return
        known = {one.part for one in self._ledger.findings()}
        is_early = self._sensor.newest_step() < self._schedule.newest + EARLIEST_LOOK
        unknown = set(self._sensor.suspects()) - known
        if is_early or not unknown:
            return
        with self.budget.spending():
            step = self._schedule.newest = self._sensor.read_newest()
            self._sensor.looks.append(step)
            # Who was named may be gone by now: nobody is looked for who is known.
            is_walked = not unknown.isdisjoint(OF_CENSUS) and self._walk(last)
            self._judge(step, is_walked=is_walked)

    def _read(self, step: int) -> None:
        """One reading of each signal, and of each child process."""
        are_looking = self._children.are_looking()
        if self._children.have_looked():
            self._limits.leave_out()
        known = self._sensor.read(step, skips="children" if are_looking else "")
        count = self._children.read(step)
        count_of = {} if count is None else {"count": count}
        self._sensor.points.add(step, {**known, **count_of, **self._children.of_workers()})
        if not are_looking:
            self._rooms = self._limits.rooms()
        self._schedule.newest = step

    def _walk(self, step: int) -> bool:
        if not self._limits.admit_look():
            return False
        return self._walks.walk(step, has_holders=self._ledger.has_holders())

    # --- judgement ---

    def _judge(self, step: int, *, is_walked: bool) -> None:
        # If a census has failed, for want of memory for example, the holders that it named stay.
        if not self._walks.are_on and not self._ledger.has_holders():
            is_walked = True  # the heap is not walked, and no holder is known
        seen = self._sensor.known(step)
        workers = self._ask_workers(step)
        held = 0.0 if is_walked else sum(map(self._each, self._present("use")))
        used, limit = self._limits.used(), self._limits.share(1.0)
        fills = self._fills(step)
        holders = seen.now(self._walks.holders)
        gained = sum(holder.rate_bytes for holder in holders)
        unheld = self._walks.unheld(seen, gained) if is_walked else ""
        least = THRESHOLDS.least_rate, THRESHOLDS.least_rate_of_phase
        unlooked = self._plan_walk(step)
        found = findings_of(
            seen.evidence(
                [*holders, *self._walks.longer],
                children=seen.children(
                    self._children.count,
                    self._children.growing(),
                    workers,
                    self._in_use_of_children(step),
                ),
                unheld=unheld,
                new_objects=self._walks.new_objects,
                walked=is_walked,
                unlooked=unlooked,
                is_collected=self._walks.is_collected,
                profiles=profiler_runs(),
                declared=self._sensor.declared(step),
                seconds=self._seconds,
                resident=seen.resident(held, (lambda _: None) if fills else self._block),
                fills=fills,
                used=None if used is None or limit is None else (used, limit),
                least_rate=least[bool(self._phase)],
            )
        )
        if unlooked and self._spent_before:
            # An earlier passage has looked, and has named who holds what this one gains.
            found = [one for one in found if one.holder]
        points, paces = self._sensor.points, self._sensor.paces(step)
        rising = self._sensor.rising(step)
        news, taken_back = self._ledger.look(
            step, found, paces, points, walked=is_walked, rising=rising
        )
        if any(one.first_step == step and not one.holder and not one.kind for one in news):
            self._schedule.soon(step)
        self._forecast(step)
        current = {one.key: one for one in self._ledger.findings()}
        news = [current.get(one.key, one) for one in news]
        named = {one.part for one in found if one.holder and RANK[one.grade] >= RANK["suspect"]}
        withdrawn, replaced = [], []
        for one in taken_back:
            if not is_call(one.grade):
                self._record(one)
            elif one.part in named:
                replaced.append(one)
            else:
                withdrawn.append(one)
        self._report([*withdrawn, *news, *self._ledger.end(points, step)], replaced=replaced)

    def _fills(self, step: int) -> list[Block]:
        """The arrays that are written for the first time. They are not looked for on another thread
        than the program's."""
        resident = self._sensor.points.newest("resident")
        if self._seconds is not None or resident is None:
            return []
        before, self._unused = self._unused, resident - (self._sensor.points.newest("use") or 0)
        is_begin, has_risen = len(self._sensor.looks) < 3, self._unused - before >= LEAST_RISE
        if not (is_begin or has_risen or self._first_writes.are_known):
            return []  # What is written for the first time is resident more than it is in use.
        cost = 2 * self._walks.cost_ns
        try:
            with self._sensor.left_out():
                found = self._first_writes.look(step)
                if self._first_writes.may_be_new(step, found) and self.budget.wait_ns(cost) == 0:
                    self._first_writes.find(step)
                return self._with_owners(found)
        except Exception as error:
            self._complain_of_owners(error)
            return []

    def _block(self, written: int) -> Block | None:
        """The block of memory that may be what grows, whoever has it."""
        found = block_that_fills(written)
        return None if found is None else self._with_owners([self._first_writes.part_of(found)])[0]

    def _with_owners(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks with the tensors or arrays that have them. They are looked for once, and not
        on another thread than the program's."""
        extents = {one: (one.begin, one.begin + one.size) for one in blocks}
        new = [extent for extent in extents.values() if extent not in self._owners]
        is_cheap = self.budget.wait_ns(3 * self._walks.cost_ns) == 0
        if new and is_cheap and self._seconds is None:
            try:
                with self._sensor.left_out():
                    self._owners |= zip(new, owners_of(new), strict=True)
            except Exception as error:
                self._complain_of_owners(error)
        return [one._replace(owner=self._owners.get(extent)) for one, extent in extents.items()]

    def _complain_of_owners(self, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        self._reporter.complain("owners", f"cannot tell which array fills: {why}")

    def _plan_walk(self, step: int) -> str:
        """Look again when a walk that has to wait can be afforded. Returns why it waits, in words;
        "" if none does."""
        if self._walks.wait_ns == 0:
            return ""
        spent_ns = self.budget.spent_ns - self._spent_before
        step_ns = self._schedule.step_ns(self._step) - spent_ns / self._steps
        due = step + math.ceil(self._walks.wait_ns / max(1.0, step_ns))
        self._schedule.by(due)
        steps = due if self._seconds is None else None
        return sentences.of_walk_that_waits(self._walks.cost_ns / 1e9, steps)

    def _in_use_of_children(self, step: int) -> float | None:
        """Bytes a step by which what child processes have in use has grown of late; None where
        workers do not report it."""
        points, names = self._sensor.points, self._children.reporting
        known = [points.recent(name, of_late(step)) for name in names]
        rates = [rate for rate in known if rate is not None]
        if not rates or len(rates) < len(known):
            return None
        return sum(rates) + self._children.growth_beside()

    def _ask_workers(self, step: int) -> Sequence[LeakFinding]:
        """Return what workers have found out that goes on."""
        points, since = self._sensor.points, self._sensor.since(step)
        found = self._children.ask(
            max(points.slope("children", since), points.pace("children", since).rate),
            step if self._seconds is None else 0,
            self._sensor.parts["children"].kind,
            stands=any(one.signal == "children" for one in self._ledger.findings()),
        )
        going = [one for one in found if not has_stopped(one, points, step)]
        return of_workers([as_of_now(one, points, step) for one in going])

    def expect_growth(self, name: str, **growth: Any) -> None:
        """As LeakDetector.expect_growth."""
        self._sensor.expect_growth(name, **growth)

    # --- forecasts ---

    def _forecast(self, step: int) -> None:
        """Write into findings how long is left: until the host's limit for all that grows there
        together, until the device's at its own rate."""
        grows = [one for one in self._ledger.findings() if self._is_towards_limit(one)]
        host = [one for one in grows if one.signal != "device"]
        joint, pace = self._joint(step, host), self._schedule.step_ns(self._step) / 1e9

        def seconds(left: tuple[float, float] | None) -> tuple[float, float] | None:
            return None if left is None else (left[0] * pace, left[1] * pace)

        changed = with_forecast(host, joint.left, seconds(joint.left), joint.rate)
        for one in grows:
            if one.signal == "device":
                left = self._device_left(one, step)
                if one.holder and joint.left is not None:  # tensors of the host that feed it
                    left = min(x for x in (left, joint.left) if x is not None)
                changed.append(replace(one, steps_left=left, seconds_left=seconds(left)))
        ends = [one for one in self._present("resident") if one not in grows]
        self._ledger.update([*changed, *(one.without_forecast() for one in ends)])

    def _is_towards_limit(self, one: LeakFinding) -> bool:
        """Whether it grows into a limit, as far as is known: what fills does so if all of it does
        not fit."""
        if one.grade == "fills" and one.left_bytes > 0:
            room = self._rooms.get("counted")
            return room is not None and self._filling()[1] > room
        return RANK[one.grade] >= RANK["suspect"] or one.part == "resident"

    def _joint(self, step: int, host: Sequence[LeakFinding]) -> Joint:
        """What is left until the first limit that all that grows on the host reaches. What fills
        ends by itself."""
        present = self._ledger.present()
        # Freed memory that malloc keeps is in what the limit counts.
        least = RANK["suspect"]
        leaks = [one for one in host if one.part != "resident" or RANK[one.grade] >= least]
        fills = [one for one in present if one.grade == "fills" and one.holder]
        filling = self._filling()
        found = filling[0] + sum(
            self._each(one) for one in leaks if one in present and one not in fills
        )
        full = sum(self._each(one) for one in fills if one.left_bytes == 0)
        points, since = self._sensor.points, self._sensor.since(step)
        begun = [one.since_step for one in host if one.since_step is not None]
        grown = step - min(begun, default=self._sensor.looks[0])
        certain = Course(0.0, 0.0)
        # Without steps, memory is read at any point of the work, which most of it may be of.
        if self._seconds is None:
            certain = points.certain("use", since).without(full)
        rates = max(found, certain.least), max(found, certain.most)
        sure, joint = Course(*rates, certain.rising, grown), Joint()
        for name, room in self._rooms.items() if host else ():
            seen = self._towards(name, since, room) if self._seconds is None else None
            seen = None if seen is None else seen.without(full)
            idle = points.newest("idle") or 0
            one = joint_of(room, sure, seen, idle=idle, filling=filling)
            joint = min(joint, one, key=lambda one: (one.fewest, one.most))
        return joint

    def _towards(self, name: str, since: int, room: int) -> Course | None:
        """How that goes on which a limit counts; None where it is not read. The limit is met at a
        peak, and the peaks of steps may rise faster than their ends."""
        points = self._sensor.points
        if name == "counted" and points.newest("resident") is None:
            return None
        ends = points.course(name, since, room)
        peaks = points.course("highest", since, room) if name == "counted" else None
        return peaks if ends and peaks and peaks.least > ends.most else ends

    def _filling(self) -> tuple[float, float]:
        """Bytes a step by which containers with a bound and blocks fill, and how many are still to
        come."""
        known = [one for one in self._ledger.present() if one.grade == "fills" and one.left_bytes]
        rate = sum(map(self._each, known))
        passed = self._schedule.newest - self._sensor.looks[-1] if known else 0
        return rate, max(0.0, sum(one.left_bytes for one in known) - rate * passed)

    def _device_left(self, one: LeakFinding, step: int) -> tuple[float, float] | None:
        full, points = self._limits.device(), self._sensor.points.series("device")
        room = None if full is None or not points else full - points[-1][1]
        since = self._sensor.looks[0] if one.since_step is None else one.since_step
        return joint_of(room, Course(one.rate_bytes, one.rate_bytes, steps=step - since)).left

    def _present(self, part: str) -> list[LeakFinding]:
        """The findings of a part of memory that the newest look has shown."""
        return [one for one in self._ledger.present() if one.part == part]

    def _each(self, finding: LeakFinding) -> float:
        """Bytes a step of a finding; 0 where only those of a second are known."""
        if finding.per == "step":
            return finding.rate_bytes
        return finding.rate_bytes * (self._seconds or 0.0)

    # --- what is reported ---

    def _report(self, news: Sequence[LeakFinding], replaced: Sequence[LeakFinding] = ()) -> None:
        """Report what is new. Findings that are `replaced`, because their holder is known now, are
        not printed: the holder is."""
        for finding in (*replaced, *news):
            if self._is_over or self.is_quiet:  # a callback has stopped the monitor
                return
            self._reporter.report(self._as_read(finding), printed=finding not in replaced)
        if not self._is_over and not self.is_quiet:
            self._reporter.renew(self.findings())

    def _record(self, finding: LeakFinding) -> None:
        if not self.is_quiet:
            self._reporter.record(self._as_read(finding))

    def _as_read(self, finding: LeakFinding) -> LeakFinding:
        """The finding as users read it: with advice and source text, and by the second if steps are
        ticks."""
        if self._seconds is not None:
            joint = finding.joint_bytes / self._seconds
            finding = replace(finding, first_step=None, since_step=None, steps_left=None,
                              joint_bytes=joint)  # fmt: skip
            if finding.per == "step":
                finding = replace(finding, per="s", rate_bytes=finding.rate_bytes / self._seconds)
        finding = replace(finding, phase=self._phase)
        place = finding.kept_at or finding.made_at
        if place not in self._sources:
            self._sources[place] = source_at(place)
        return replace(finding, advice=advice_for(finding), source=self._sources[place])

    def end_quiet(self) -> None:
        """Report what stands and goes on, and from then on what is new."""
        if self.is_quiet and any(map(self._goes_on, self._ledger.findings())):
            self.is_quiet = False
            self._report([one for one in self._ledger.findings() if self._goes_on(one)])

    def _goes_on(self, finding: LeakFinding) -> bool:
        """Whether its part of memory has gone on growing over the last looks."""
        recent = self._sensor.points.recent(finding.part, GOES_ON)
        return recent is not None and recent >= THRESHOLDS.goes_on * self._each(finding)

    # --- the end ---

    def interrupt(self) -> None:
        """Turn off what slows the program: there will be no looks for a while."""
        if self._tracing is not None:
            self._tracing.interrupt()

    def withdraw(self) -> None:
        """Look no more, and take back what was found: it was the program's start."""
        self.leave()
        for finding in self._ledger.findings() if not self.is_quiet else ():
            self._reporter.report(self._as_read(replace(finding, over=True)))

    def phase_ended(self) -> None:
        """The phase has ended: look once more if something has grown since the newest look, and
        read what is left. The next step may take as much as was freed."""
        self.interrupt()
        self._look_last(self._step)
        if self._ledger and not self._is_over:
            self._read(self._step + 1)

    def settle(self) -> None:
        """The program goes on after the phase: report what was freed with it, and look no more.
        What it has not freed stands."""
        if self._ledger and not self._is_over:
            self._read(self._step + 2)
            self._report(self._ledger.end_freed(self._sensor.points))
        self.leave()

    def leave(self) -> None:
        """Look no more."""
        self._is_over = True
        if self._tracing is not None:
            self._tracing.close()
        self._children.close()

    def close(self, step: int = 0) -> None:
        """End the run, after so many steps: look once more if something has grown since the newest
        look, and record what stands, with the newest figures."""
        try:
            self._look_last(max(step, self._step))
        finally:
            self.leave()
        if self.is_quiet and self._step >= START_BY_TIME:
            self.end_quiet()
        if self._sensor.looks and not self.is_quiet:
            self._forecast(self._step)
            for finding in self.findings():
                self._reporter.record(finding)

    # --- results ---

    def findings(self) -> tuple[LeakFinding, ...]:
        """The findings that stand, the worst first."""
        return tuple(map(self._as_read, self._ledger.findings()))

    def verdicts(self) -> list[LeakVerdict]:
        """The verdict of the leak test on each part of memory, by its signals alone: `fills` if
        containers with a bound take what grows."""
        filled = dict.fromkeys(self._sensor.parts, 0.0)
        for one in self._ledger.findings():
            if one.grade == "fills" and one.part in filled:
                filled[one.part] += one.rate_bytes
        verdicts = {name: detector.verdict() for name, detector in self._sensor.parts.items()}
        return [
            replace(verdict, kind="fills", confidence="none")
            if filled[name] >= THRESHOLDS.filled * verdict.rate_bytes_per_step > 0
            else verdict
            for name, verdict in verdicts.items()
        ]

    def lines(self, step: int) -> list[str]:
        """Lines of a summary at this step: how much grows, and what stands."""
        lines, made = [], step - self._schedule.origin
        standing = [one for one in self.findings() if not is_little(one)]
        if made <= 0:
            return []
        if len(self._sensor.points.steps) > 1:
            since, points = self._sensor.since(self._step), self._sensor.points
            rates = [
                f"{_signed(1000 * points.slope(name, since))} {words}"
                for name, words in _GROWTHS
                if points.series(name) and (name == "use" or points.slope(name, since))
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
    ("resident", "of its resident memory"),
)


def _signed(size: float) -> str:
    return ("-" if size < 0 else "+") + format_bytes(abs(size))


def growth_census() -> CensusLike:
    """The census of a run; memtools' own objects are never holders."""
    own = (LeakWatch, Sensor, Points, Signal, HeapWalks, ChildProcesses, Ledger, Entry, LeakFinding)
    return GrowthCensus(own, least_rate=THRESHOLDS.least_rate)
