"""MemoryMonitor: what memory does, what leaks, who holds it, and when it ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from memtools._base.decorate import as_callback
from memtools._base.devices import parse_device
from memtools._base.size import parse_bytes
from memtools.leak.detector import LeakDetector
from memtools.monitor import ending, oom
from memtools.monitor import run as monitor_run
from memtools.monitor.guards import Callback, Handle, Pressure, Watermarks
from memtools.monitor.log import logger, ranked
from memtools.monitor.phases import Phase, PhaseBook
from memtools.monitor.readings import Readings, whole
from memtools.monitor.run import Run, Settings

IDLE_NS = 1_000_000_000  # between safe points where nothing is due
STALL_NS = 100_000_000  # and while a guard waits for stalls
LOST_NS = 10_000_000_000  # or two steps: so long without a safe point is nothing unusual


class MemoryMonitor(Readings):
    """Watches the memory of a training loop, on the host and on CUDA devices.

        monitor = memtools.MemoryMonitor(log="run.mem")
        with monitor, monitor.phase("train"):
            for batch in loader:
                ...
                monitor.step()
        print(monitor.summary())

    A native thread samples without the GIL. `step()` at the end of each step feeds the leak test;
    on suspicion a census finds who holds what grows. It is the safe point as well: callbacks and
    guards act in it, on the main thread. Steps that another thread ends are counted, and no more.

    After `start()` nothing of this raises out of training but `HostMemoryPressure`, where a guard
    asked for it. In a forked child the monitor is not running; its record stays the parent's.

    Args:
        log: path of the record, `run.mem`, which survives SIGKILL. On a rank of several (`RANK` is
            set) it is `run.rank3.mem`; while another process writes it, `run-2.mem`. A record that
            is there is replaced if it is complete; one of a killed run is kept as `run.1.mem`.
            None: no record.
        interval_ms: between two samples, 0.1 to 3,600,000; shorter by itself near the limit.
        device: "auto" (CUDA devices that torch sees), "cpu" (none), "cuda" (all) or like "cuda:1".
            No CUDA context is made: a device's figures begin when the program makes one.
        limit: what this process and its children may use, as an int or like `"12 GiB"`; the
            container's and the machine's limits count where they are lower.
        leaks: whether to test for leaks.
        census: whether to look for the holders of what grows.
        name: for the record and for texts.
        log_interval: steps, at least 1, from one line of `log_memory()` to the next. None: a line
            every 10 s.

    Raises:
        ValueError, TypeError: an argument that makes no sense.
    """

    _root = "/"  # under which proc and sys are read; tests have their own
    _declares = True  # whether the program knows this monitor, and may call its expect_growth()

    def __init__(
        self,
        log: str | os.PathLike[str] | None = None,
        interval_ms: float = 10,
        *,
        device: object = "auto",
        limit: int | str | None = None,
        leaks: bool = True,
        census: bool = True,
        name: str | None = None,
        log_interval: int | None = None,
    ) -> None:
        if isinstance(interval_ms, bool) or not isinstance(interval_ms, (int, float)):
            raise TypeError(f"interval_ms is a number, got {type(interval_ms).__name__}")
        if not 0.1 <= interval_ms <= 3_600_000:
            raise ValueError(f"interval_ms is 0.1 to 3,600,000 (1 hour), got {interval_ms}")
        if log_interval is not None:
            log_interval = whole("log_interval", log_interval)
            if log_interval < 1:
                raise ValueError(f"log_interval is at least 1 step, got {log_interval}")
        parse_device(device)
        path = None if log is None else ranked(os.fspath(log))
        bound = None if limit is None else parse_bytes(limit, "limit")
        interval_ns = round(interval_ms * 1e6)
        self._settings = Settings(path, interval_ns, device, bound, leaks, census, name)
        self.log_interval = log_interval
        self._marks = Watermarks()
        self._claims: dict[str, list[int]] = {}  # of the thread that is in start()
        self._growths: dict[str, dict[str, Any]] = {}
        self._live: Run | None = None  # while it runs
        self._book: PhaseBook | None = None  # of _live
        self._last: Run | None = None  # stays readable after the end
        self._told_start = False  # that it was not started

    # --- life ---

    def start(self) -> None:
        """Start watching. After `stop()` it may be started again: a new run, whose record takes the
        place of the one before, if that is complete.

        Raises:
            RuntimeError: it is running, or the system gives no thread.
            OSError: the record cannot be made; says why and what to do.
            DeviceError: the device asked for is not there.
        """
        begun: list[Run] = []
        try:
            self._start_alone(begun)
        except BaseException:
            self._undo_start(begun)
            raise

    def _undo_start(self, begun: list[Run]) -> None:
        """After an interrupt: who gets an exception out of start() has no monitor that runs."""
        if begun and self._live is begun[0]:
            self._end("start() was interrupted")

    def _start_alone(self, begun: list[Run]) -> None:
        """Of several threads that start it, one does."""
        claim = [os.getpid()]
        try:
            # One call, within the try: an interrupt leaves no claim behind that nobody takes back.
            found = self._claims.setdefault("start", claim)
            if found is not claim and found == claim:  # else it was left over by a fork
                raise RuntimeError("this MemoryMonitor is being started already, by another thread")
            self._claims["start"] = claim
            self._start(begun)
        finally:
            if "start" in self._claims and self._claims["start"] is claim:
                del self._claims["start"]

    def _start(self, begun: list[Run]) -> None:
        if self._live is not None:
            raise RuntimeError("this MemoryMonitor is running already; stop() it first")
        run = monitor_run.begin(self._settings, self._root)
        try:
            begun.append(run)
            if run.watch is not None:
                run.watch.declares = self._declares
                for name, growth in self._growths.items():
                    run.watch.detector.expect_growth(name, **growth)
            self._marks.begin(run.sampler)
            if run.sampler.limit() is None:
                self._cannot_act(run, self._marks.handles, "no limit of memory is known here")
            self._last, self._book, self._live = run, run.book, run
            monitor_run.follow(self)
        except BaseException:
            self._live = self._book = None
            monitor_run.leave(self)
            run.close("start() was interrupted")
            raise
        if run.devices:
            oom.observer.follow(self)

    def stop(self) -> None:
        """Stop, and complete the record. Twice is fine, in a signal handler too."""
        try:
            self._end("stop()", last_look=True)
        finally:
            if self._live is not None:  # an interrupt came before all was done
                self._end("stop()")

    def _end(self, how: str | None, *, last_look: bool = False) -> None:
        run = self._live
        if run is None:
            return
        try:
            self._say_who_waits(run)
            run.end(how, last_look=last_look)
        except BaseException:
            run.close(how)
            raise
        finally:
            if run.over:  # else another thread is at it
                self._marks.end()
                monitor_run.leave(self)
                self._live = self._book = None  # last: an interrupt before it is known by that

    def __enter__(self) -> MemoryMonitor:
        begun: list[Run] = []
        try:
            self._start_alone(begun)
            return self
        except BaseException:
            self._undo_start(begun)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._end("normal", last_look=True)
            else:
                self._end(ending.exception_words(error))
        finally:
            if self._live is not None:  # as in stop()
                self._end("normal" if error is None else f"exception {type(error).__name__}")

    @property
    def running(self) -> bool:
        """Between start and stop, in the process that started it."""
        return self._live is not None

    def __reduce__(self) -> str:
        raise TypeError(
            "a MemoryMonitor watches its own process and cannot be pickled; make one there"
        )

    def __repr__(self) -> str:
        name = "" if self._settings.name is None else f"{self._settings.name}, "
        state = "running" if self.running else "stopped" if self._last else "not started"
        steps = 0 if self._last is None else self._last.sampler.step_count
        return f"MemoryMonitor({name}{state}, {steps:,} steps)"

    # --- in the loop ---

    def phase(self, name: str) -> Phase:
        """A part of the program, as a context manager or decorator; may nest and overlap. Keeps the
        time and the exact peaks of host and devices under the name. See docs/guides/monitor.md for
        costs.

        Raises TypeError and ValueError for a name that is none.
        """
        if type(name) is not str:
            raise TypeError(f"a phase's name is a str, got {type(name).__name__}")
        if not name or "\0" in name:
            raise ValueError(f"a phase's name has characters, none of them zero, got {name!r}")
        if not name.isascii():  # a file's name, for one, may have what is no text
            name = name.encode("utf-8", "replace").decode()
        return Phase(self, name)

    def _event(self, kind: str, text: str, **details: Any) -> None:
        """What another part of memtools did, for the record: see memtools/_base/running.py."""
        run = self._live
        if run is not None:
            run.log.event(kind, text, **details)

    def step(self, n: int = 1) -> None:
        """The end of a step, or of n. On the main thread this is the safe point: callbacks and
        guards act in it, and the leak test reads memory. `step(0)` is a safe point without a step.

        Takes some 0.3 us where nothing is due. Does nothing while the monitor is not running.

        Raises HostMemoryPressure where a guard or a callback wants it; ValueError for n below 0.
        """
        run = self._live
        if run is None:
            if self._last is None:
                self._say_not_started()
            return
        fired = run.sampler.step(n)
        if fired or time.monotonic_ns() >= run.due:
            self._pause(run, fired)

    def _count(self, steps: int) -> bool:
        """The end of steps that is no safe point; whether there should be one at once."""
        run = self._live
        if run is None:
            return False
        run.waiting |= run.sampler.step(steps)
        return run.waiting != 0

    def _pause(self, run: Run, fired: int) -> None:
        """What is due at a safe point. Not entered anew by a callback that calls step()."""
        run.waiting |= fired
        if run.busy or threading.get_ident() != run.main:
            if fired:
                run.due = 0
                if run.safe_ns == 0:
                    thread = threading.current_thread().name
                    why = f"so far steps end on the thread {thread!r}, none on the main one"
                    self._cannot_act(run, self._marks.waiting(fired), why)
            return
        run.busy = True
        try:
            fired, run.waiting = run.waiting, 0
            run.safe_ns = time.monotonic_ns()
            run.due = run.safe_ns + (STALL_NS if self._marks.watchful else IDLE_NS)
            if run.looks:
                run.due = min(run.due, run.look())
            if run.devices:
                oom.observer.attach()  # once the program has a context
            if fired or self._marks.watchful:
                self._act(run, fired)
        finally:
            run.busy = False

    def _say_not_started(self) -> None:
        if not self._told_start:
            self._told_start = True
            logger.warning(
                "step() of a MemoryMonitor that was not started does nothing; start() it"
            )

    def _say_who_waits(self, run: Run) -> None:
        """At the end: of a watermark that was passed when no safe point came any more."""
        run.waiting |= run.sampler.step(0)
        waiting = self._marks.waiting(run.waiting)
        if run.safe_ns == 0:
            self._cannot_act(run, waiting, "the main thread called no step()")
        elif time.monotonic_ns() - run.safe_ns >= max(LOST_NS, 2 * self._step_ns(run)):
            self._cannot_act(run, waiting, "the main thread had stopped calling step()")

    @staticmethod
    def _step_ns(run: Run) -> int:
        """How long a step takes, with the time before the first one."""
        return (run.safe_ns - run.clock_ns) // max(1, run.sampler.step_count)

    def _cannot_act(self, run: Run, waiting: Sequence[Handle], why: str) -> None:
        for handle in waiting:
            text = f"{handle!r} cannot act: {why}; it acts in a step() of the main thread"
            aloud = not self._settings.sums_up  # which says it
            run.log.warn(f"{handle!r} {id(handle)}", "pressure", text, aloud=aloud)

    def _act(self, run: Run, fired: int) -> None:
        wanted = None
        for handle in self._marks.due(fired, run.host):
            found = self._marks.act(handle, self._pressure(run, handle.fraction), run.log)
            wanted = found or wanted
        if wanted is not None:
            raise wanted

    def _pressure(self, run: Run, fraction: float) -> Pressure:
        host = run.host()
        step = run.sampler.step_count
        return Pressure(fraction, host.used or 0, host.limit or 0, run.source, step, host.pressure)

    def on_pressure(self, fraction: float, callback: Callback) -> Handle:
        """Call `callback` once each time that memory in use rises above this part of the limit, at
        the next safe point; again after it has fallen by 5 %. It gets a Pressure, or nothing if it
        takes no argument. What it raises is reported once and ends there, but HostMemoryPressure.

        Returns a handle with `cancel()`. Raises ValueError and TypeError.
        """
        return self._marks.add(
            fraction, as_callback(callback, "on_pressure()", "a Pressure"), safe=False
        )

    def guard(self, fraction: float, action: str | Callback = "raise") -> Handle:
        """At this part of the limit, act at the next safe point on the main thread: "raise" raises
        HostMemoryPressure out of step(), "record" writes an event, a function is called as by
        `on_pressure`. Halfway between here and that point it acts too, if the control group stalls
        for memory 40 % of the time. Once for each crossing.

        Returns a handle with `cancel()`. Raises ValueError and TypeError.
        """
        if isinstance(action, str):
            if action not in ("raise", "record"):
                raise ValueError(f'guard(): action is "raise", "record" or a function, {action!r}')
            return self._marks.add(fraction, action, safe=True)
        return self._marks.add(fraction, as_callback(action, "guard()", "a Pressure"), safe=True)

    def expect_growth(
        self,
        name: str,
        *,
        bytes: int | str | None = None,
        rate: float | None = None,
        until: int | None = None,
        signal: str | None = None,
    ) -> None:
        """Declare a buffer that is meant to fill: see LeakDetector.expect_growth."""
        growth = {"bytes": bytes, "rate": rate, "until": until, "signal": signal}
        run = self._live
        detector = LeakDetector() if run is None or run.watch is None else run.watch.detector
        detector.expect_growth(name, **growth)  # type: ignore[arg-type]
        self._growths[name] = growth

    def mark(self, text: str) -> None:
        """Write a line of your own into the record."""
        if not isinstance(text, str):
            raise TypeError(f"mark() takes a str, got {type(text).__name__}")
        if self._live is not None:
            self._live.log.event("mark", text)
