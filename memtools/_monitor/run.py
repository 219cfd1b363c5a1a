"""One run of a monitor, from start to stop: its parts, how it ends, and what a fork does to it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memtools import _core
from memtools._base import devices as cuda_devices
from memtools._base import notebook, process, running
from memtools._base.devices import DevicePeaks
from memtools._base.every import Every
from memtools._base.limits import process_limits
from memtools._base.notice import logger, notice
from memtools._base.terminal import rank_prefix
from memtools._blocks.peak import Spot
from memtools._blocks.recorder import PeakRecorder
from memtools._blocks.reports import HostBlocks
from memtools._leak.finding import LeakFinding
from memtools._leak.shown import log_line
from memtools._monitor import ending, sharing
from memtools._monitor.bytime import ByTime
from memtools._monitor.children import ChildProcesses, worker_reports
from memtools._monitor.leakwatch import LeakWatch, growth_census
from memtools._monitor.log import Log, open_record
from memtools._monitor.phases import PhaseBook
from memtools._monitor.places import Place, name_of, place_of
from memtools._monitor.progress import Progress
from memtools._monitor.readings import Readings
from memtools._monitor.reporter import Listeners, Printer, Reporter, Says
from memtools._monitor.signals import Limits, signals_of
from memtools._monitor.tracing import Tracing
from memtools._monitor.walks import Budget
from memtools._record.counters import changed, counters_to_write, read_counters, room_of_shm
from memtools._record.kinds import Counters, End, Start

if TYPE_CHECKING:
    from memtools._monitor.monitor import MemoryMonitor

FORK_EVENT_NS = 1_000_000_000
LOOK_S = 2.0  # The end of a run waits so long for a look on another thread.


def log_finding(finding: LeakFinding) -> None:
    """Log a finding to the logger "memtools": one line, with the rank before it."""
    level = logging.INFO if finding.over else logging.WARNING
    logger.log(level, "%s%s", rank_prefix(), log_line(finding))


def log_summary(text: str) -> None:
    """Print a summary: to the logger "memtools" if a handler takes such lines, else to the standard
    error, because the program has asked for it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", text)
    elif sys.stderr is not None:
        print(text, file=sys.stderr)


def spot_of(frames: Iterable[tuple[str, int, str]]) -> Spot:
    """The user's line among the frames of a block, of which the innermost comes first."""
    place = place_of(Place(*frame) for frame in frames)
    return Spot("", "") if place is None else Spot(name_of(place), place.function or "")


_HOST_COLUMNS = (
    ("step", ""),
    *((name, "B") for name in ("rss", "private", "swap", "cgroup_used", "cgroup_limit")),
    ("available", "B"),
    ("pressure", "0.01%"),
    ("heap_used", "B"),
    ("children", ""),
    ("children_private", "B"),
    ("process", "B"),  # rss, each page counted once
    ("job", "B"),  # that of the process, its descendants and their shared memory
    ("shm", "B"),  # the job's shared memory
)


def columns(devices: int) -> list[tuple[str, str]]:
    """Column names and units of a record with so many CUDA devices."""
    tiers = ("allocated", "reserved", "free", "total")
    return [*_HOST_COLUMNS, *((f"cuda{i}_{tier}", "B") for i in range(devices) for tier in tiers)]


@dataclass(frozen=True)
class MonitorSettings:
    """What a MemoryMonitor was asked for."""

    log: str | os.PathLike[str] | None
    interval_ns: int
    device: object
    limit: int | None
    leaks: bool
    census: bool
    name: str | None
    #: how often summary() is printed; None: never
    print_every: Every | None = None
    #: what is called with a text about the record's name
    announce: Callable[[str], None] = notice
    #: what is called with each finding, once for each grade and holder, as soon as it is made
    says: Says = log_finding
    #: what is called with each summary of `print_every`
    prints: Callable[[str], None] = log_summary
    #: whether a summary of the record is printed at the end
    sums_up: bool = False
    #: whether the program holds the monitor, and so may call its expect_growth()
    declares: bool = True
    #: whether growth is judged by time, on a thread, as long as no steps are made
    by_time: bool = False
    #: whether torch's host allocator is followed, and some steps are traced if a leak is suspected,
    #: to find the line that makes it
    traces: bool = True


@dataclass
class PhaseSteps:
    """The steps of a phase that has its own, such as the batches of an evaluation.

    Attributes:
        name: that of the phase.
        watch: tests them for leaks; None if that is not wanted.
        count: how many there were.
    """

    name: str
    watch: LeakWatch | None
    count: int = 0


class Run:
    """What lives from start to stop; figures can be read from it afterwards.

    `end` may be called by any thread, at any time, and twice: the first call ends the run. If a
    signal handler raises out of it, `close` does what matters, in any state.
    """

    def __init__(
        self, settings: MonitorSettings, root: str, listeners: Listeners | None = None
    ) -> None:
        """Make the parts and the record, and start the thread. A failure leaves a closed record.
        Raises OSError if the record cannot be made, and DeviceError."""
        self.devices = cuda_devices.find_devices(settings.device, root)
        self.probe = _core.Probe(root)
        count = max(self.devices, default=-1) + 1
        writer = None
        if settings.log is not None:
            writer = open_record(settings.log, columns(count), announce=settings.announce)
            writer._mark_signals()
        try:
            self.sampler = _core.Sampler(
                settings.interval_ns, writer, root, devices=count, limit=settings.limit
            )
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        sampler = self.sampler
        self.readings = Readings(sampler, self.probe, self.devices)
        #: the reports of torch's host allocator; None if nothing needs them
        self.blocks = HostBlocks() if settings.leaks and settings.traces else None
        self.log = log = Log(writer, lambda: sampler.step_count)
        #: records some steps, to find what lived at their peak; None if that is not wanted
        self.peaks = (
            None
            if self.blocks is None or writer is None
            else PeakRecorder(
                self.blocks,
                lambda found: log.event("peak", found),
                spot_of,
                lambda why: log.complain("peak", why),
                room=Limits(sampler, self.probe, self.devices).room_at_peak,
            )
        )
        self.book = PhaseBook(
            self.probe, self.log, DevicePeaks(self.devices) if self.devices else None
        )
        limit = sampler.limit()
        now = self.probe.read()
        self._given = limit[0] if limit is not None and limit[1] == "given" else None
        #: the machine's memory, if nothing else is the limit
        self._machine = now.total if self._given is None and now.cgroup_limit == -1 else None
        #: where the limit comes from, in words
        self.limit_source = self.readings.limit_source()
        self.settings = settings
        every = settings.print_every
        self.printer = None if every is None else Printer(every)
        #: reports the findings
        self.reporter = Reporter(self.log, listeners or Listeners(), settings.says)
        self.watch: LeakWatch | None = None
        #: the phase that is open and has steps of its own; None: steps are those of the run
        self.inner: PhaseSteps | None = None
        #: the leak test of the last such phase, until a step shows what was freed with it
        self._ended: LeakWatch | None = None
        #: what the looks of all passages of such a phase may take, by its name
        self._budgets: dict[str, Budget] = {}
        #: whether the leak test goes on; it ends at its first failure
        self.tests_leaks = settings.leaks
        #: the peak of the process, once the run has ended
        self._peak_at_end: tuple[int | None, bool] = None, False
        self.clock_ns = time.monotonic_ns()
        self.ended_ns: int | None = None
        #: when step() is to do more than to count, on the monotonic clock
        self.due = 0
        #: and at which step
        self.due_step = 1 if settings.leaks else 1 << 62
        #: the same, without the steps at which nothing but `peaks` is due
        self.others_due_step = self.due_step
        #: watermarks that were passed, until the next safe point
        self.waiting = 0
        #: held by the thread that serves a safe point, and for good by the one that ends the run
        self.looks = threading.RLock()
        #: a safe point is being served: step() of a callback does no more than count
        self.busy = False
        #: the step from which on the next safe point tests for leaks anew; None: it does not
        self.restarts_at: int | None = None
        #: when the last safe point was, on the monotonic clock; 0 before the first
        self.safe_ns = 0
        #: its thread and its record have ended
        self.over = False
        self._forks = self._next_fork = 0
        self._noted: dict[str, int | None] = {}  # limits of the process, as the record has them
        self._ends = threading.Lock()  # taken for good by the one who ends the run
        self._writes_end = threading.Lock()  # taken for good by the one who writes the end event
        self.probe.reset_peak()
        try:
            sampler.start()
        except BaseException:
            self.log.close()
            raise
        self._start = Start(
            name=settings.name or "",
            devices=tuple(self.devices),
            interval_ms=settings.interval_ns / 1e6,
            limit=self.limit_source,
            given_bytes=self._given,
            machine_bytes=self._machine,
            tests_leaks=settings.leaks,
            notebook=notebook.file_name(),
        )
        self.log.event("start", self._start)
        this = weakref.ref(self)  # or the log would keep the run, which keeps the log
        self.log.pinned_events = lambda: () if (run := this()) is None else run._pinned_events()
        self._note_limits()
        #: what the kernel had counted in the control groups when the run began
        self._counters = read_counters(self.probe, root) if writer is not None else []
        self._root = root
        for counters in self._counters:
            self.log.event("counters", counters)
        self._counted = self._counters
        self._note_room()
        self.by_time: ByTime | None = None
        if settings.by_time and settings.leaks:
            self.by_time = ByTime(
                lambda: sampler.step_count, self._watch_by_time, self.reporter.complain
            )
            self.by_time.start()

    def _watch_by_time(self, seconds: float, only_children: bool) -> LeakWatch:
        """Make a LeakWatch for a thread of its own, which calls no callback of the program."""
        log, probe = self.log, _core.Probe(self._root)
        signals = signals_of(probe, self.devices)
        if only_children:
            signals = [signal for signal in signals if signal.name == "children"]
        may_trace = self.settings.traces and not (self.watch is not None and self.watch.is_traced)
        return LeakWatch(
            signals,
            Limits(self.sampler, probe, self.devices),
            Reporter(self.log, Listeners(), self.settings.says),
            growth_census if self.settings.census and not only_children else None,
            children=self._children_of(probe),
            seconds=seconds,
            tracing=None
            if only_children
            else Tracing(
                self.blocks,
                why_not="" if may_trace else "it is turned off",
                progress=Progress(seconds),
                write=lambda fields: log.event("trace", fields),
            ),
        )

    def restart_leak_test(self, expected: Mapping[str, Mapping[str, Any]], origin: int = 0) -> None:
        """Test for leaks from a step on; what an earlier test has seen does not count any more.

        Args:
            expected: the arguments of expect_growth(), by name.
            origin: the step, 0 by default.
        """
        if not self.settings.leaks:
            return
        if self.watch is not None:
            self.watch.withdraw()
            if self.peaks is not None:
                self.peaks.begin_anew(origin)
            self._start = replace(self._start, origin=origin)
            self.log.event("start", self._start)
        self.watch = self._watch(origin)
        for name, growth in expected.items():
            self.watch.expect_growth(name, **growth)

    def _watch(self, origin: int = 0, phase: str = "", budget: Budget | None = None) -> LeakWatch:
        """Make a LeakWatch for the steps of the run after `origin`, or for those of a phase."""
        log = self.log
        return LeakWatch(
            signals_of(self.probe, self.devices, self.blocks),
            Limits(self.sampler, self.probe, self.devices),
            self.reporter,
            growth_census if self.settings.census else None,
            children=self._children_of(self.probe),
            origin=origin,
            tracing=Tracing(
                self.blocks,
                why_not="" if self.settings.traces else "it is turned off",
                write=lambda fields: log.event("trace", fields),
            ),
            phase=phase,
            budget=budget,
        )

    # --- phases that have steps of their own ---

    @property
    def step_count(self) -> int:
        """The steps of the phase that has its own, else of the run."""
        return self.sampler.step_count if self.inner is None else self.inner.count

    @property
    def current_watch(self) -> LeakWatch | None:
        """The leak test of these steps."""
        return self.watch if self.inner is None else self.inner.watch

    def begin_steps(self, phase: str) -> PhaseSteps | None:
        """From here on steps are those of this phase; None if they are those of another one."""
        with self.looks:
            if self.inner is not None or self.over:
                return None
            self.settle()
            if self.watch is not None:
                self.watch.interrupt()
            if self.peaks is not None:
                self.peaks.enter(phase)
            watch = None
            if self.settings.leaks and self.tests_leaks:
                budget = self._budgets.setdefault(phase, Budget())
                watch = self._watch(phase=phase, budget=budget)
            self.inner = PhaseSteps(phase, watch)
            self.due_step = self.others_due_step = 0  # which counted other steps
            return self.inner

    def end_steps(self, of: PhaseSteps) -> None:
        """From here on steps are those of the run again."""
        with self.looks:
            if self.inner is not of:
                return
            if of.watch is not None and not self.over:
                self._ended = of.watch
                self._guarded(of.watch.phase_ended)
            self.inner = None
            if self.peaks is not None:
                self.peaks.leave()
            self.due_step = self.others_due_step = 0  # which counted other steps

    def settle(self) -> None:
        """End the leak test of the last phase that had steps of its own."""
        watch, self._ended = self._ended, None
        if watch is not None:
            self._guarded(watch.settle)

    def _guarded(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            self.log.complain("leaks", f"a look for leaks failed: {type(error).__name__}: {error}")

    def note_untested(self, why: str) -> None:
        """Note why leaks are not tested, or by "" that they are, also in the record: then its
        reader judges its series."""
        if self._start.untested != why:
            self._start = replace(
                self._start, tests_leaks=self.settings.leaks and not why, untested=why
            )
            self.log.event("start", self._start)

    @property
    def untested(self) -> str:
        """Why leaks are not tested although they should be; "" if they are, or need not be."""
        return self._start.untested

    def _pinned_events(self) -> Iterator[tuple[str, object]]:
        """The events that a record must keep wherever it is cut off: who writes it, what stands."""
        yield Start.KIND, self._start
        for counters in self._counters:
            yield Counters.KIND, counters
        inner = None if self.inner is None else self.inner.watch
        for watch in (self.watch, self._ended, inner, self.by_time):
            for finding in () if watch is None else watch.findings():
                yield "finding", finding
        if self.peaks is not None and self.peaks.highest is not None:
            yield "peak", self.peaks.highest

    def _note_limits(self) -> None:
        """Record the limits of the process, at the start and if they have changed: an allocation
        may be refused by them, too."""
        for name, limit in process_limits().items():
            if limit != self._noted.get(name):
                self._noted[name] = limit
                self.log.event("limit", {"name": name, "limit_bytes": limit})

    def note_counters(self) -> None:
        """Record if the kernel has killed a process of the control group, or was about to, or if a
        limit has changed. Takes 30 us for each group."""
        if not self._counters:
            return
        now = read_counters(self.probe, self._root)
        for counters in changed(self._counted, now):
            self.log.event("counters", counters)
        self._counted = now

    def _note_room(self) -> None:
        room = room_of_shm(self._root)
        if room is not None:
            self.log.event("shm_room", room)

    def _note_counters(self, how: End | None) -> None:
        """Record what the kernel has counted since the start and, if the run did not end well,
        which limits had acted."""
        if self._counters:
            now = read_counters(self.probe, self._root)
            for counters in counters_to_write(self._counters, now):
                self.log.event("counters", counters)
        if how.exception if how is not None else ending.ending.uncaught:
            for limit in ending.ending.acted:
                self.log.event("limit", limit)
            self._note_room()

    def end(self, how: End | None) -> bool:
        """Stop the thread and close the record; False if another call does so or has done so.

        Raises nothing: the program goes on or ends as it would. Without `how`, the process is about
        to end, and its exit code, which is not known yet, is to be recorded.
        """
        if not self._ends.acquire(blocking=False):
            return False
        try:
            if self.by_time is not None:
                self.by_time.close()
            # Wait for a look on another thread, but not for one whose callback waits for this call.
            if self.watch is not None and self.looks.acquire(timeout=LOOK_S):
                if self.inner is not None and self.inner.watch is not None:
                    self.inner.watch.close(self.inner.count)
                self.settle()
                self.watch.close(self.sampler.step_count)
            self.leave()
        except Exception as error:
            self.log.complain("leaks", f"the last look for leaks failed: {error}")
        try:
            self.sampler.stop()  # first: its last sample must not lie above the peak
            self._peak_at_end = self.peak()
            if self.book.devices is not None:
                self.book.devices.look()
            self.ended_ns = time.monotonic_ns()
            self._note_limits()
            self._note_counters(how)
            if ending.ending.idle_heap is not None:
                self.log.event("heap", {"kept_bytes": ending.ending.idle_heap})
        except Exception as error:
            self.log.complain("stop", f"stop() failed: {error}")
        self._finish(how)
        self.over = True
        return True

    def close(self, how: End | None) -> None:
        """After an interrupt within start() or end(): stop the thread and close the record."""
        self.over = True
        if self.by_time is not None:
            self.by_time.close()
        self.leave()
        self.sampler.stop()
        self._finish(how)

    def leave(self) -> None:
        """Look no more, and trace and record nothing more. May be called twice."""
        for watch in (self.watch, self._ended, None if self.inner is None else self.inner.watch):
            if watch is not None:
                watch.leave()
        if self.peaks is not None:
            self.peaks.close()
        if self.blocks is not None:
            self.blocks.leave()

    def _finish(self, how: End | None) -> None:
        self.ended_ns = self.ended_ns or time.monotonic_ns()
        if how is None:
            self.log.close_at_exit(ending.ending.uncaught, self.ended_ns)
        else:
            if self._writes_end.acquire(blocking=False):
                self.log.event("end", how, time_ns=self.ended_ns)
            self.log.close()

    # --- figures ---

    @property
    def seconds(self) -> float:
        return ((self.ended_ns or time.monotonic_ns()) - self.clock_ns) / 1e9

    def peak(self) -> tuple[int | None, bool]:
        """The most that the process itself has had resident since the start, and whether that is
        exact."""
        if self.ended_ns is not None:
            return self._peak_at_end
        # The kernel's mark and the resident size are two counters, some pages apart.
        peak, exact = self.probe.peak()
        now = self.readings.host().process
        return max((n for n in (peak, now) if n is not None), default=None), exact

    def device_peaks(self) -> dict[int, int]:
        """The peak of the bytes in tensors on each device for which it is known."""
        if self.book.devices is None:
            return {}
        if self.ended_ns is None:
            self.book.devices.look()
        return self.book.devices.run

    # --- child processes ---

    def _children_of(self, probe: _core.Probe) -> ChildProcesses:
        def processes() -> list[tuple[int, int | None, str]]:
            found = probe.children()
            if found:
                process.before_children_end(_read_children_last)
            return found

        return ChildProcesses(processes, worker_reports())

    def read_children_last(self) -> None:
        """Have the thread take a sample with all figures of the children, which are about to end.
        The last one of a thread has them."""
        with contextlib.suppress(RuntimeError):  # no new thread: the run ends next anyway
            self.sampler.stop()
            self.sampler.start()

    def forked(self) -> None:
        """Write an event of a fork, in the parent, at most once a second."""
        process.before_children_end(_read_children_last)
        self._forks += 1
        now = time.monotonic_ns()
        if now >= self._next_fork:
            self.log.event("fork", {"count": self._forks})
            self._forks, self._next_fork = 0, now + FORK_EVENT_NS


_owners: set[MemoryMonitor] = running.monitors  # those that run
_workers: list[int] = []  # the pid for which _hook_worker has registered


def follow(monitor: MemoryMonitor) -> None:
    """End the monitor's run when the interpreter ends, and keep it out of forked children."""
    process.at_exit(_at_exit)
    process.at_fork(_in_child, _in_parent)
    _hook_worker()
    ending.watch()
    sharing.watch(load="torch" in sys.modules)
    _owners.add(monitor)


def _hook_worker() -> None:
    """End the runs at the end of a worker of multiprocessing, which skips atexit: it calls
    os._exit."""
    workers = sys.modules.get("multiprocessing.process")
    if workers is None or workers.parent_process() is None or os.getpid() in _workers:
        return
    from multiprocessing import util

    _workers[:] = [os.getpid()]
    util.Finalize(None, _at_end_of_worker, exitpriority=100)


def leave(monitor: MemoryMonitor) -> None:
    """Forget a monitor whose run has ended."""
    _owners.discard(monitor)
    if not _owners:
        ending.unwatch()
        sharing.rest()


def _at_exit() -> None:
    """End the runs. The record gets the exit code from exit() itself; after Ctrl-C Python ends by
    SIGINT instead."""
    how = ending.interrupt()
    for monitor in list(_owners):
        monitor._end(how)
    ending.keep_interrupt()


def _at_end_of_worker() -> None:
    for monitor in list(_owners):
        monitor._end(End("the worker ended without stop()"))


def _read_children_last() -> None:
    for monitor in list(_owners):
        if monitor._live is not None and not monitor._live.over:
            monitor._live.read_children_last()


def _in_parent() -> None:
    for monitor in list(_owners):
        if monitor._live is not None:
            monitor._live.forked()


def _in_child() -> None:
    for monitor in list(_owners):
        run, monitor._live, monitor._book = monitor._live, None, None
        monitor._watermarks.end()
        if run is not None:
            run.log.abandon()
    _owners.clear()


def readings_now(settings: MonitorSettings, root: str) -> Readings:
    """Memory in use now, without a run. Imports no torch and makes no file."""
    devices = () if str(settings.device) == "cpu" else cuda_devices.seen_devices(root)
    sampler = _core.Sampler(settings.interval_ns, None, root, limit=settings.limit)  # not started
    return Readings(sampler, _core.Probe(root), devices)
