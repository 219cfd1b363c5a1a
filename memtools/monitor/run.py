"""One run of a monitor, from start to stop: its parts, how it ends, and what a fork does to it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from memtools import _core
from memtools._base import devices as monitor_device
from memtools._base.devices import DevicePeaks
from memtools._base.size import exact_bytes
from memtools.monitor import ending
from memtools.monitor.guards import Watermarks
from memtools.monitor.host import limit_source, process_limits
from memtools.monitor.leakwatch import LeakWatch
from memtools.monitor.log import Log, open_record, warned
from memtools.monitor.phases import PhaseBook
from memtools.monitor.signals import signals_of
from memtools.monitor.suspects import Suspicion
from memtools.monitor.text import DeviceTiers, HostTiers

FORK_EVENT_NS = 1_000_000_000
_HOST_COLUMNS = (
    ("step", ""),
    *((name, "B") for name in ("rss", "private", "swap", "cgroup_used", "cgroup_limit")),
    ("available", "B"),
    ("pressure", "0.01%"),
    ("heap_used", "B"),
    ("children", ""),
    ("children_private", "B"),
    ("process", "B"),  # rss, each page counted once
)


def columns(devices: int) -> list[tuple[str, str]]:
    """Of a record whose sampler watches so many devices: names and units."""
    found = list(_HOST_COLUMNS)
    for i in range(devices):
        found += [(f"cuda{i}_{tier}", "B") for tier in ("allocated", "reserved", "free", "total")]
    return found


@dataclass(frozen=True)
class Settings:
    """What a monitor was asked for."""

    log: str | os.PathLike[str] | None
    interval_ns: int
    device: object
    limit: int | None
    leaks: bool
    census: bool
    name: str | None
    announce: Callable[[str], None] = warned
    sums_up: bool = False  # whether a summary of the record is said at the end


class Limits:
    """How much there is, and how much of it is left for this process."""

    __slots__ = ("_devices", "_probe", "_sampler")

    def __init__(
        self, sampler: _core.Sampler, probe: _core.Probe, devices: tuple[int, ...]
    ) -> None:
        self._sampler, self._probe, self._devices = sampler, probe, devices

    def tiers(self) -> HostTiers:
        sample, limit = self._sampler.latest() or self._probe.read(), self._sampler.limit()
        return HostTiers(
            sample.rss,
            self._sampler.used(),
            None if limit is None else limit[0],
            sample.available,
            sample.children_private,
            None if sample.pressure is None else sample.pressure / 100,
            sample.process,
            "" if limit is None else limit[1],
        )

    def device_tiers(self) -> list[DeviceTiers]:
        """By torch, now; unknown as long as there is no context."""
        return [monitor_device.tiers(index) for index in self._devices]

    def host(self) -> int | None:
        """Bytes at which this process with its children reaches the limit, by the last sample."""
        host = self.tiers()
        if host.process is None or host.used is None or host.limit is None:
            return None
        return host.process + (host.children or 0) + max(0, host.limit - host.used)

    def device(self) -> int | None:
        """Bytes at which all watched devices are full."""
        found = [(t.reserved, t.free) for t in self.device_tiers()]
        if not found or any(a is None or b is None for a, b in found):
            return None
        return sum((a or 0) + (b or 0) for a, b in found)


class Run:
    """What lives from start to stop; figures can be read from it afterwards."""

    __slots__ = (
        "_forks",
        "_next_fork",
        "_noted",
        "_open",
        "_untold",
        "book",
        "busy",
        "clock_ns",
        "devices",
        "due",
        "ended_ns",
        "limits",
        "log",
        "looks",
        "main",
        "over",
        "peak",
        "probe",
        "safe_ns",
        "sampler",
        "source",
        "waiting",
        "watch",
    )

    def __init__(self, settings: Settings, root: str) -> None:
        self.devices = monitor_device.find_devices(settings.device, root)
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
        self.limits = Limits(sampler, self.probe, self.devices)
        self.log = Log(writer, lambda: sampler.step_count)
        peaks = DevicePeaks(self.devices) if self.devices else None
        self.book = PhaseBook(self.probe, self.log, peaks)
        self.source = self._limit_words()
        self.watch: LeakWatch | None = None
        if settings.leaks:
            suspicion = Suspicion() if settings.census else None
            signals = signals_of(self.probe, self.devices)
            self.watch = LeakWatch(signals, self.limits, self.log, suspicion)
        #: False once the leak test has failed, and without one
        self.looks = settings.leaks
        self.main = threading.main_thread().ident
        self.clock_ns = time.monotonic_ns()
        self.ended_ns: int | None = None
        self.peak: tuple[int | None, bool] = (None, False)
        #: when step() is to do more than to count, on the monotonic clock
        self.due = 0
        #: watermarks that were passed, until the main thread comes
        self.waiting = 0
        self.busy = False
        #: of the last safe point, on the monotonic clock; 0 before the first
        self.safe_ns = 0
        #: its thread and its record have ended
        self.over = False
        self._forks = self._next_fork = 0
        self._noted: dict[str, int | None] = {}
        self._untold = [True]  # popped by the one who writes the end event
        self._open = [True]  # popped by the one who ends the run

    def go(self, settings: Settings) -> None:
        """Starts the thread. What fails leaves a record that was closed."""
        self.probe.reset_peak()
        try:
            self.sampler.start()
        except BaseException:
            self.log.close()
            raise
        self.log.event("start", self._start_words(settings))
        self._note_limits()

    def _note_limits(self) -> None:
        """The limits of the process, at the start and where they have changed since: what refuses
        an allocation is not the limit of memory alone."""
        for name, limit in process_limits().items():
            if limit != self._noted.get(name):
                self._noted[name] = limit
                self.log.event("limit", {"name": name, "limit_bytes": limit})

    def _note_idle_heap(self) -> None:
        """What malloc kept of freed memory when the program could not have any more."""
        if ending.ending.idle_heap is not None:
            self.log.event("heap", {"kept_bytes": ending.ending.idle_heap})

    def _start_words(self, settings: Settings) -> str:
        watched = ", ".join(["host", *(f"cuda{i}" for i in self.devices)])
        name = "" if settings.name is None else f"{settings.name}: "
        return f"{name}{watched} every {settings.interval_ns / 1e6:g} ms; {self.source}"

    def end(self, how: str | None, *, last_look: bool) -> bool:
        """Stops the thread and closes the record; False where that was done already. Raises
        nothing: the program goes on or ends as it would. After what a signal handler raises
        meanwhile, close() is to be called. Without `how`, the process is about to end, and its
        exit code, which nobody knows yet, is to be recorded."""
        try:
            self._open.pop()
        except IndexError:
            return False
        self._last_look(last_look)
        self._halt()
        self._finish(how)
        self.over = True
        return True

    def close(self, how: str | None) -> None:
        """After an interrupt within start() or end(): what matters, in any state."""
        self.over = True
        self.sampler.stop()
        self._finish(how)

    def _last_look(self, wanted: bool) -> None:
        try:
            if wanted and self.watch is not None and threading.get_ident() == self.main:
                self.watch.last_look(self.sampler.step_count)
        except Exception as error:
            self.log.complain("leaks", f"the last census failed: {error}")

    def _halt(self) -> None:
        try:
            self.sampler.stop()  # first: its last sample must not lie above the peak
            self.peak = self._peak()
            if self.book.devices is not None:
                self.book.devices.look()
            self.ended_ns = time.monotonic_ns()
            self._note_limits()
            self._note_idle_heap()
        except Exception as error:
            self.log.complain("stop", f"stop() failed: {error}")

    def _finish(self, how: str | None) -> None:
        self.ended_ns = self.ended_ns or time.monotonic_ns()
        if how is None:
            self.log.close_at_exit(ending.ending.failed, self.ended_ns)
        else:
            while self._untold:  # once, also when this is interrupted and done again
                self._untold.pop()
                self.log.event("end", f"exit: {how}", time_ns=self.ended_ns)
            self.log.close()

    def look(self) -> int:
        """The leak test at a safe point; when it wants the next, on the monotonic clock."""
        assert self.watch is not None
        try:
            return self.watch.look(self.sampler.step_count)
        except Exception as error:
            self.looks = False
            self.log.complain(
                "leaks", f"the leak test is off from here on: {type(error).__name__}: {error}"
            )
            return self.due

    # --- figures ---

    @property
    def seconds(self) -> float:
        return ((self.ended_ns or time.monotonic_ns()) - self.clock_ns) / 1e9

    def host(self) -> HostTiers:
        """By the sampler's last sample; before the first by a reading of its own."""
        return self.limits.tiers()

    def tiers(self) -> list[DeviceTiers]:
        return self.limits.device_tiers()

    def peak_now(self) -> tuple[int | None, bool]:
        """The most that the process itself filled since the start, and whether that is exact."""
        return self.peak if self.ended_ns is not None else self._peak()

    def _peak(self) -> tuple[int | None, bool]:
        """The kernel's mark and the resident size are two counters, some pages apart."""
        peak, exact = self.probe.peak()
        now = self.limits.tiers().process
        return max((n for n in (peak, now) if n is not None), default=None), exact

    def device_peaks(self) -> dict[int, int]:
        if self.book.devices is None:
            return {}
        if self.ended_ns is None:
            self.book.devices.look()
        return self.book.devices.run

    def _limit_words(self) -> str:
        limit = self.sampler.limit()
        if limit is not None and limit[1] == "given":
            return f"limit given, {exact_bytes(limit[0])}"
        return limit_source(self.probe, self.probe.read().total)

    # --- forks ---

    def forked(self) -> None:
        """In the parent, after a fork: an event, at most one a second."""
        self._forks += 1
        now = time.monotonic_ns()
        if now >= self._next_fork:
            many = "a child process" if self._forks == 1 else f"{self._forks:,} child processes"
            self.log.event("fork", f"{many} forked")
            self._forks, self._next_fork = 0, now + FORK_EVENT_NS


class Owner(Protocol):
    """A monitor, as far as the end of a process and a fork go."""

    _live: Run | None
    _book: PhaseBook | None
    _marks: Watermarks

    def _end(self, how: str | None, *, last_look: bool = False) -> None: ...


_owners: set[Owner] = set()  # those that run: a program may lose sight of one, as of a thread
_hooked: list[bool] = []
_workers: list[int] = []  # the process that _hook_worker has served


def follow(owner: Owner) -> None:
    """Ends the monitor's run when the interpreter ends, and keeps it out of forked children."""
    if not _hooked:
        _hooked.append(True)
        atexit.register(_at_exit)
        os.register_at_fork(after_in_parent=_in_parent, after_in_child=_in_child)
    _hook_worker()
    ending.watch()
    _owners.add(owner)


def _hook_worker() -> None:
    """Workers of multiprocessing end by os._exit, past all of atexit."""
    process = sys.modules.get("multiprocessing.process")
    if process is None or process.parent_process() is None or os.getpid() in _workers:
        return
    from multiprocessing import util

    _workers[:] = [os.getpid()]
    util.Finalize(None, _at_end_of_worker, exitpriority=100)


def leave(owner: Owner) -> None:
    """It has ended."""
    _owners.discard(owner)
    if not _owners:
        ending.unwatch()


def _at_exit() -> None:
    """The exit code is told by exit() itself; Python ends by SIGINT instead where Ctrl-C did it."""
    how = ending.interrupt()
    for owner in list(_owners):
        owner._end(how)
    ending.keep_interrupt()


def _at_end_of_worker() -> None:
    for owner in list(_owners):
        owner._end("the worker ended without stop()")


def _in_parent() -> None:
    for owner in list(_owners):
        if owner._live is not None:
            owner._live.forked()


def _in_child() -> None:
    for owner in list(_owners):
        run, owner._live, owner._book = owner._live, None, None
        owner._marks.end()
        if run is not None:
            run.log.abandon()
    _owners.clear()


def read_once(settings: Settings, root: str) -> tuple[HostTiers, list[DeviceTiers]]:
    """Memory in use now, where nothing runs. Imports no torch and makes no file."""
    devices = () if str(settings.device) == "cpu" else monitor_device.seen_devices(root)
    sampler = _core.Sampler(settings.interval_ns, None, root, limit=settings.limit)  # not started
    limits = Limits(sampler, _core.Probe(root), devices)
    return limits.tiers(), limits.device_tiers()


def begin(settings: Settings, root: str) -> Run:
    """A run that goes. Raises OSError where the record cannot be made, DeviceError."""
    run = Run(settings, root)
    run.go(settings)
    return run
