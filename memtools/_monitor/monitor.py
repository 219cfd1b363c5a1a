"""MemoryMonitor: what memory does, what leaks, who holds it, and when it ends.

A monitor has, from start to stop, a Run: the sampling thread, the record, Readings of what memory
is in use, the LeakWatch and the PhaseBook. Its Watermarks (guards and callbacks) outlast a run.

    step() ──► sampler.step: counts, and returns which watermarks were passed
      │ something is due, and no other thread is at it
      └──────► _safe_point ──► LeakWatch.look: the leak test
                          └──► watermarks: callbacks, then guards
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from memtools._base import environment
from memtools._base.decorate import as_callback
from memtools._base.devices import DeviceMemory, parse_device
from memtools._base.every import parse_every
from memtools._base.file import as_path
from memtools._base.handle import Handle
from memtools._base.libraries import is_own
from memtools._base.notice import logger
from memtools._base.number import number, whole_number
from memtools._base.size import parse_bytes
from memtools._base.text import shown
from memtools._leak.detector import LeakDetector
from memtools._leak.finding import LeakFinding, is_call
from memtools._monitor import ending, handmade, host, oom, readings
from memtools._monitor import run as monitor_run
from memtools._monitor.guards import Callback, Watermark, Watermarks
from memtools._monitor.leakwatch import LeakWatch
from memtools._monitor.log import ranked
from memtools._monitor.phases import Phase, PhaseBook, PhaseTotals, phase_lines
from memtools._monitor.readings import Headroom, HostTiers
from memtools._monitor.reporter import LeakCallback, Listeners, Printer
from memtools._monitor.run import MonitorSettings, Run
from memtools._record import kinds
from memtools._record.kinds import End

IDLE_NS = 1_000_000_000  # A safe point comes after so long at the latest, ...
STALL_NS = 100_000_000  # ... or after so long while a guard waits for stalls.
LOST_NS = 10_000_000_000  # So long, or two steps, without a safe point is not unusual.
ACTS = "; it acts in step()"  # a guard or a callback


def _is_raised_here(error: BaseException) -> bool:
    """Whether the function that was running is memtools' own, and not a callback's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and is_own(frame.tb_frame.f_code.co_filename)


class MemoryMonitor:
    """Watches the memory of a training loop, on the host and on CUDA devices.

        monitor = memtools.MemoryMonitor(log="run.mem")
        with monitor, monitor.phase("train"):
            for batch in loader:
                ...
                monitor.step()
        print(monitor.summary())

    A native thread takes samples without Python's lock. The leak test, callbacks and guards run in
    `step()`. In training the monitor raises nothing but MemoryPressure from a guard or a callback.
    A forked child is not watched.

    Args:
        log: the path of the record, such as `run.mem`, which survives SIGKILL. With several ranks
            it becomes `run.rank3.mem`, and `run-2.mem` while another process writes the file. An
            earlier record is kept as `run.previous.mem`, or `run.1.mem` if that run was killed.
        interval_ms: milliseconds between samples, 0.1 to 3,600,000; shorter near the limit.
        device: "auto" (the CUDA devices that torch sees), "cpu" (none), "cuda" (all), or "cuda:0"
            to "cuda:7". Makes no CUDA context.
        limit: bytes that this process and its children may use, or like `"12 GiB"`. Lower limits of
            the container and the machine count too.
        leaks: test for leaks.
        census: look for the holders of what grows.
        name: the name of the run.
        log_interval: steps between lines of `log_memory()`. None: a line every 10 s.
        print_every: a number of steps, or a time like `"30 s"` (0.1 s at least), between summaries.
        trace: trace a few steps to find the line of a leak, and record the peak of step 3 and of
            every 1,000th step.

    Variables such as MEMTOOLS_LIMIT set what no argument sets (docs/reference/settings.md).
    """

    _root = "/"  # proc and sys are read in this folder

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
        print_every: int | str | None = None,
        trace: bool = True,
    ) -> None:
        interval_ms = number("interval_ms", interval_ms)
        if not 0.1 <= interval_ms <= 3_600_000:
            raise ValueError(
                f"interval_ms must be between 0.1 and 3,600,000 (1 hour), got {interval_ms}"
            )
        if log_interval is not None:
            log_interval = whole_number("log_interval", log_interval)
        parse_device(device)
        keys = environment.for_monitor()
        log = keys.log if log is None else as_path("log", log)
        path = None if log is None else os.path.abspath(ranked(log))
        bound = keys.limit if limit is None else parse_bytes(limit, "limit")
        every = keys.print_every if print_every is None else parse_every(print_every)
        interval_ns = round(interval_ms * 1e6)
        self._settings = MonitorSettings(
            path, interval_ns, device, bound, leaks, census, name, print_every=every,
            traces=trace and keys.trace is not False,
        )  # fmt: skip
        self.log_interval = log_interval
        self._watermarks = Watermarks()
        self._listeners = Listeners()
        self._growths: dict[str, dict[str, Any]] = {}  # arguments of expect_growth(), by name
        self._live: Run | None = None  # while it runs
        self._book: PhaseBook | None = None  # of _live
        self._last: Run | None = None  # stays readable after the end
        self._starts = threading.RLock()  # a signal handler may start it within start()
        self._pid = os.getpid()  # the process of _starts: another thread may hold it during a fork
        self._is_starting = False
        self._has_warned = False  # whether it has warned that it was not started
        self._next_line = 0.0  # when log_memory writes its next line, on the monotonic clock
        self._line_step: int | None = None  # the step of the newest line of log_memory
        #: the guard of MEMTOOLS_GUARD, until the program makes one
        self._key_guard: Watermark | None = None
        if keys.guard is not None:
            self._key_guard = self._watermarks.add(keys.guard, "raise", safe=True)

    def _configure(self, **changes: Any) -> None:
        """Change settings that are not arguments of the class, before start(): fields of
        MonitorSettings. Raises TypeError for other names."""
        self._settings = replace(self._settings, **changes)

    # --- life ---

    def start(self) -> None:
        """Start watching. After `stop()` it starts a new run; the earlier record is kept as
        `run.previous.mem`.

        Raises RuntimeError if the monitor is running or no thread can start; OSError if the record
        cannot be made; DeviceError if there is no such device.
        """
        if environment.is_off:
            self._has_warned = True  # so that step() does not
            return
        run: Run | None = None
        if self._pid != os.getpid():
            self._starts, self._pid, self._is_starting = threading.RLock(), os.getpid(), False
        try:
            with self._starts:  # one thread at a time
                if self._live is not None:
                    raise RuntimeError("this MemoryMonitor is running already; stop() it first")
                if self._is_starting:
                    raise RuntimeError("this MemoryMonitor is being started already")
                try:
                    self._is_starting = True
                    run = Run(self._settings, self._root, self._listeners)
                    run.restart_leak_test(self._growths)
                    self._watermarks.begin(run.sampler, run.devices)
                    self._report_inert(run)
                    self._last, self._book, self._live = run, run.book, run
                    monitor_run.follow(self)
                    if run.devices:
                        oom.observer.follow(self)
                finally:
                    self._is_starting = False
        except BaseException:
            # After an exception out of start(), an interrupt too, no monitor runs.
            if run is not None:
                self._live = self._book = None
                self._watermarks.end()
                monitor_run.leave(self)
                run.close(End("start() was interrupted"))
            raise

    def stop(self) -> None:
        """Stop watching, and complete the record. May be called twice, and in a signal handler."""
        try:
            self._end(End("stop()"))
        finally:
            if self._live is not None:  # an interrupt came before all was done
                self._end(End("stop()"))

    def _end(self, how: End | None) -> None:
        run = self._live
        if run is None:
            return
        try:
            self._report_waiting(run)
            run.end(how)
        except BaseException:
            run.close(how)
            raise
        finally:
            if run.over:  # else another thread ends it
                self._watermarks.end()
                monitor_run.leave(self)
                self._live = self._book = None  # last: an interrupt before it is known by that

    def __enter__(self) -> MemoryMonitor:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._end(End("normal"))
            else:
                ending.ending.note_limits(error)
                self._end(ending.end_by(error))
        finally:
            if self._live is not None:  # as in stop()
                by = "" if error is None else type(error).__name__
                self._end(End(exception=by) if by else End("normal"))

    @property
    def running(self) -> bool:
        """Whether it runs, in the process that started it."""
        return self._live is not None

    def __reduce__(self) -> str:
        raise TypeError(
            "a MemoryMonitor watches its own process and cannot be pickled; make one there"
        )

    def __repr__(self) -> str:
        name = "" if self._settings.name is None else f"{shown(self._settings.name)}, "
        state = "running" if self.running else "stopped" if self._last else "not started"
        steps = 0 if self._last is None else self._last.sampler.step_count
        return f"MemoryMonitor({name}{state}, {steps:,} steps)"

    # --- in the loop ---

    def phase(self, name: str, *, own_steps: bool = False) -> Phase:
        """Measure a part of the program: its time and its exact peaks on the host and on devices.

        A context manager or a decorator. Phases may be nested, and may overlap on several threads.
        Phases of one name add up.

        Args:
            name: the name of the phase; ValueError if empty or with NUL.
            own_steps: whether `step()` counts the phase's own steps while it is open, such as the
                batches of an evaluation, with their own leak test. Not in a nested phase.
        """
        if type(name) is not str:
            raise TypeError(f"a phase's name must be a str, got {type(name).__name__}")
        if not name or "\0" in name:
            raise ValueError(
                f"a phase's name must have characters, none of them zero, got {name!r}"
            )
        if not name.isascii():  # a file's name, for one, may not be text
            name = name.encode("utf-8", "replace").decode()
        return Phase(self, name, own_steps=own_steps)

    def _event(self, kind: str, body: object, **details: Any) -> None:
        """Record what another part of memtools did: see memtools/_base/running.py."""
        run = self._live
        if run is not None:
            run.log.event(kind, body, **details)

    def step(self, n: int = 1) -> None:
        """Report that one or more steps have ended. Takes about 0.3 us if nothing is due.

        Args:
            n: the number of steps, 0 to 2**48; 0 counts no step.

        Raises HostMemoryPressure or DeviceMemoryPressure if a guard or a callback asks for it.
        """
        run = self._live
        if run is None:
            if self._last is None and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "step() of a MemoryMonitor that was not started does nothing; start() it"
                )
            return
        inner, sampler = run.inner, run.sampler
        if inner is None:
            fired = sampler.step(n)
            is_due = sampler.step_count >= run.due_step
        else:
            fired = sampler.step(0)
            inner.count += n
            is_due = inner.count >= run.due_step
        if fired or is_due or time.monotonic_ns() >= run.due:
            try:
                self._safe_point(run, fired)
            except KeyboardInterrupt as interrupt:
                if not _is_raised_here(interrupt):
                    raise
                # After Ctrl-C during a look the traceback shows where the program was, and not how
                # memtools walks through the heap.
                raise interrupt.with_traceback(None)  # noqa: B904

    def _count(self, steps: int) -> None:
        """Count steps without a safe point."""
        if self._live is not None:
            self._live.waiting |= self._live.sampler.step(steps)

    def _restart_leak_test(self) -> None:
        """Test for leaks as if the run began now: steps are something else from here on. If another
        thread looks now, the next safe point does it."""
        run = self._live
        if run is not None:
            run.restarts_at, run.due_step = run.sampler.step_count, 0
            self._safe_point(run, 0)

    def _safe_point(self, run: Run, fired: int) -> None:
        """Do what is due, unless another thread is at it, or this one: a callback may call step().
        That one, or the next step, does what has become due meanwhile."""
        run.waiting |= fired
        is_mine = False
        try:
            is_mine = run.looks.acquire(blocking=False)
            if is_mine and not run.busy and not run.over:
                run.busy = True
                self._serve(run)
            elif fired:
                run.due = 0
            if not is_mine and (watch := run.current_watch) is not None:
                watch.is_met = True
        finally:
            if is_mine:
                run.looks.release()

    def _serve(self, run: Run) -> None:
        try:
            at, run.restarts_at = run.restarts_at, None
            if at is not None:
                run.restart_leak_test(self._growths, at)
            if run.inner is None:
                run.settle()
            step = run.step_count
            if run.peaks is not None:
                run.peaks.step_ended(step)
            is_due = run.waiting or step >= run.others_due_step or time.monotonic_ns() >= run.due
            if is_due or at is not None:
                self._do_what_is_due(run)
            if run.peaks is not None:
                watch = run.current_watch
                is_free = watch is None or not watch.is_traced
                run.peaks.step_begins(step, is_free=is_free)
        finally:
            run.due_step = run.others_due_step
            if run.peaks is not None:
                run.due_step = min(run.due_step, run.peaks.due_step)
            if run.restarts_at is not None:
                run.due_step = 0
            if run.waiting:
                run.due = 0
            run.busy = False
            if run.over:  # its end has not waited for this
                run.leave()

    def _do_what_is_due(self, run: Run) -> None:
        """Do all that waits for a safe point, but for the recording of a step's peak."""
        fired, run.waiting = run.waiting, 0
        run.safe_ns = time.monotonic_ns()
        run.due = run.safe_ns + (STALL_NS if self._watermarks.near else IDLE_NS)
        run.others_due_step = 1 << 62
        watch = run.current_watch
        if watch is not None and run.tests_leaks:
            try:
                watch.look(run.step_count)
                run.due = min(run.due, watch.due_ns or run.due)
                run.others_due_step = watch.due_step
            except Exception as error:
                run.tests_leaks, why = False, f"{type(error).__name__}: {error}"
                run.log.complain("leaks", f"the leak test is off from now on: {why}")
                run.note_untested(
                    f"the leak test is off since step {run.sampler.step_count:,}: {why}"
                )
        run.note_counters()
        if run.devices:
            oom.observer.attach()  # once the program has a context
        if fired or self._watermarks.near:
            self._act(run, fired)
        if run.printer is not None and self._live is run:
            self._print(run, run.printer)

    def _print(self, run: Run, printer: Printer) -> None:
        """Print the summary if its time has come, and set the time of the next one."""
        if printer.is_due(run.sampler.step_count):
            try:
                run.settings.prints(self.summary())
            except Exception as error:
                run.log.complain("print", f"a summary could not be printed: {error}")
        run.due = min(run.due, printer.due_ns)
        run.others_due_step = min(run.others_due_step, printer.due_step)

    def _act(self, run: Run, fired: int) -> None:
        """Run all callbacks and guards that are due, then raise what they ask for."""
        wanted, marks, host = None, self._watermarks, run.readings.host
        for passed in marks.due(fired, host):
            pressure = marks.pressure(passed, host, run.limit_source, run.sampler.step_count)
            wanted = marks.act(passed.watermark, pressure, run.log) or wanted
        if wanted is not None:
            raise wanted

    def _report_waiting(self, run: Run) -> None:
        """At the end, warn of watermarks that were passed after the last safe point, or whose
        memory could not be read."""
        run.waiting |= run.sampler.step(0)
        waiting = [passed.watermark for passed in self._watermarks.waiting(run.waiting)]
        for watermark, why in self._watermarks.unreadable():
            self._cannot_act(run, [watermark], why)
        if run.safe_ns == 0:
            self._cannot_act(run, waiting, f"no step() was called{ACTS}")
            return
        # How long a step takes, with the time before the first one.
        step_ns = (run.safe_ns - run.clock_ns) // max(1, run.sampler.step_count)
        if time.monotonic_ns() - run.safe_ns >= max(LOST_NS, 2 * step_ns):
            self._cannot_act(run, waiting, f"step() was no longer called{ACTS}")

    def _report_inert(self, run: Run) -> None:
        for watermark, why in self._watermarks.inert():
            self._cannot_act(run, [watermark], why)

    def _cannot_act(self, run: Run, waiting: Sequence[Watermark], why: str) -> None:
        for watermark in waiting:
            event = kinds.Pressure("cannot act", handle=repr(watermark), why=why)
            printed = not self._settings.sums_up  # else the summary says it
            run.log.warn(f"{watermark!r} {id(watermark)}", event, printed=printed)

    def on_pressure(self, fraction: float, callback: Callback, *, device: object = None) -> Handle:
        """Call a function when memory in use rises above a share of the limit.

        It is called in the next `step()`, and again only after memory in use has fallen by 5 % of
        the limit and risen again.

        Args:
            fraction: the share of the limit, above 0 and at most 1.
            callback: called with a `Pressure`, or without arguments. MemoryPressure that it raises
                propagates; another exception is reported once.
            device: None or `"cpu"`: the host. `"cuda"`: each watched device. `"cuda:0"` to
                `"cuda:7"`, a number or a torch.device: one device, where allocated memory and that
                of other programs counts, also peaks within a step.

        Raises ValueError beyond 32 callbacks and guards (a host guard above 0.5 counts twice, one
        of "cuda" once per device).
        """
        called = as_callback(callback, "on_pressure()", "a Pressure")
        return self._wait(fraction, called, False, device)

    def guard(
        self, fraction: float, action: str | Callback = "raise", *, device: object = None
    ) -> Handle:
        """Stop the program, or act otherwise, before memory runs out.

        Acts as `on_pressure` does. A host guard above 0.5 acts earlier, from `2 * fraction - 1` on,
        if tasks of the control group wait for memory 40 % of the time.

        Args:
            fraction, device: as for `on_pressure`.
            action: `"raise"` raises HostMemoryPressure or DeviceMemoryPressure out of `step()`;
                `"record"` writes an event into the record; a function is called.
        """
        if not isinstance(action, str):
            action = as_callback(action, "guard()", "a Pressure")
        elif action not in ("raise", "record"):
            raise ValueError(
                f'guard(): action must be "raise", "record" or a function, got {action!r}'
            )
        return self._wait(fraction, action, True, device)

    def _wait(self, fraction: float, action: Callback | str, safe: bool, device: object) -> Handle:
        watermark, run = self._watermarks.add(fraction, action, safe, device), self._live
        if run is not None:
            self._report_inert(run)
        if safe and watermark.device is None and self._key_guard is not None:
            self._watermarks.drop(self._key_guard)
            self._key_guard = None
        return Handle(partial(self._watermarks.drop, watermark), repr(watermark))

    def expect_growth(
        self,
        name: str,
        *,
        bytes: int | str | None = None,
        rate: float | None = None,
        until: int | None = None,
        signal: str | None = None,
    ) -> None:
        """Declare a buffer that is meant to fill, so that the leak test ignores its growth, also in
        later runs. `name`, `bytes`, `rate`, `until` and `signal` are as for
        `LeakDetector.expect_growth`."""
        growth = {"bytes": bytes, "rate": rate, "until": until, "signal": signal}
        run = self._live
        declares = LeakDetector() if run is None or run.watch is None else run.watch
        declares.expect_growth(name, **growth)  # type: ignore[arg-type]
        self._growths[name] = growth

    def mark(self, text: str) -> None:
        """Write a line of `text` into the record, as an event."""
        if not isinstance(text, str):
            raise TypeError(f"mark() takes a str, got {type(text).__name__}")
        if self._live is not None:
            self._live.log.event("mark", text)

    # --- leaks ---

    def findings(self) -> tuple[LeakFinding, ...]:
        """Return what grows now, the worst first. Takes 20 us.

        Empty in the first steps. Raises RuntimeError with `leaks=False`.
        """
        watch = self._watch()
        return () if watch is None else watch.findings()

    def on_leak(self, callback: LeakCallback | Callable[[], object]) -> Handle:
        """Call a function in `step()` when something grows.

        It is called for findings of grade `suspect` and above: once per holder, again for each
        higher grade and when `made_at` becomes known, and once with `over` set when the growth
        ends.

        Args:
            callback: called with the `LeakFinding`, or without arguments. It may call the monitor.
                Exceptions are reported once.

        Raises RuntimeError with `leaks=False`.
        """
        called = as_callback(callback, "on_leak()", "a LeakFinding")
        self._watch()
        return self._listeners.add(called)

    def _watch(self) -> LeakWatch | None:
        if not self._settings.leaks:
            raise RuntimeError("this MemoryMonitor was made with leaks=False; leave that out")
        return None if self._last is None else self._last.watch

    # --- figures ---

    def phases(self) -> list[PhaseTotals]:
        """Return the totals of each ended phase, in order of first use."""
        return [] if self._last is None else self._last.book.totals()

    @property
    def record_path(self) -> str | None:
        """The absolute path of the record."""
        run, path = self._last, self._settings.log
        written = None if run is None else run.log.path
        return written if path is None or written is not None else str(path)

    @property
    def step_count(self) -> int:
        """Steps counted in this run, or the last one."""
        return 0 if self._last is None else self._last.sampler.step_count

    @property
    def samples_taken(self) -> int:
        """Samples of that run."""
        return 0 if self._last is None else self._last.sampler.samples

    @property
    def overhead(self) -> tuple[float, float]:
        """Processor time of the sampling thread in seconds, and its share of a core, 0 to 1."""
        run = self._last
        if run is None:
            return 0.0, 0.0
        used = run.sampler.cpu_ns / 1e9
        return used, used / run.seconds if run.seconds > 0 else 0.0

    def headroom(self) -> tuple[Headroom, ...]:
        """Return the use and the limit of each memory: the host, the limits of this process
        (`ulimit -d`, `ulimit -v`), then each watched device; without unknown ones. Takes about 10
        us for each.
        """
        return self._readings().headroom()

    def metrics(self, expert: bool = False) -> dict[str, float]:
        """Return known figures for a logger, with names such as `memory/host_rss_bytes`.

        Args:
            expert: return all figures, also of other devices and of phases. False: at most 12, of
                the host and the first device.
        """
        run = self._last
        if run is None:
            return {}
        host, devices = run.readings.host(), run.readings.devices()
        values = readings.host_metrics(host, run.peak()[0])
        if run.watch is not None:
            found = run.watch.findings()
            calls = [one for one in found if is_call(one.grade) and one.per == "step"]
            left = found[0].steps_left if found else None
            values["memory/leak_bytes_per_step"] = calls[0].rate_bytes if calls else 0.0
            values["memory/steps_left"] = None if left is None else left[0]
        for device in devices[: None if expert else 1]:
            values |= readings.device_metrics(device)
        if expert:
            values |= self._all_metrics(run, host, devices)
        return readings.known(values)

    def _all_metrics(
        self, run: Run, host: HostTiers, devices: Sequence[DeviceMemory]
    ) -> dict[str, float | None]:
        sample = run.sampler.latest()
        values: dict[str, float | None] = {"memory/steps": run.sampler.step_count}
        if sample is not None:
            names = ("private", "swap", "heap_used", "heap_free", "cgroup_used", "total")
            values |= {f"memory/host_{name}_bytes": getattr(sample, name) for name in names}
            values["memory/host_process_bytes"] = host.process
            values["memory/host_used_bytes"] = host.used
            values["memory/host_used_peak_bytes"] = run.sampler.peak()
            values["memory/children"] = sample.children
        values |= readings.job_metrics(host)
        for device in devices:
            values[f"memory/cuda{device.index}_total_bytes"] = device.total
            values[f"memory/cuda{device.index}_inactive_bytes"] = device.inactive
        for index, peak in run.device_peaks().items():
            values[f"memory/cuda{index}_peak_bytes"] = peak
        for phase in self.phases():
            values[f"memory/phase/{shown(phase.name)}/peak_bytes"] = phase.peak_bytes
            values[f"memory/phase/{shown(phase.name)}/seconds"] = phase.seconds
        values["memory/samples"] = run.sampler.samples
        values["memory/sampler_cpu_seconds"], values["memory/sampler_share"] = self.overhead
        return values

    # --- texts, and what monitors have that people write themselves: see handmade.py ---

    log_memory = handmade.log_memory
    format_memory_stats = handmade.format_memory_stats
    get_peak_memory = handmade.get_peak_memory
    check_memory_leak = handmade.check_memory_leak
    cleanup_memory = handmade.cleanup_memory

    def summary(self) -> str:
        """Return a text: memory in use, phases, growth per 1,000 steps, and leaks.

        `System:` is in percent of the limit. The next lines show the process, its workers, shared
        memory, swap, the job (all of these) and its limit.
        """
        run, (host, devices) = self._last, self._in_use()
        lines = [readings.format_stats(readings.memory_stats(host, devices))]
        highest = None if run is None else run.sampler.peak()
        lines += readings.host_lines(host, self._peak(), highest)
        lines += phase_lines(self.phases())
        if run is not None and run.watch is not None:
            lines += run.watch.lines(run.sampler.step_count)
        if run is not None and run.untested:
            lines.append(run.untested[:1].upper() + run.untested[1:])
        return "\n".join(lines)

    def _in_use(self) -> tuple[HostTiers, list[DeviceMemory]]:
        now = self._readings()
        return now.host(), now.devices()

    def _readings(self) -> readings.Readings:
        """Those of the run that goes on, or of the last one; before the first, of this moment."""
        run = self._last
        return monitor_run.readings_now(self._settings, self._root) if run is None else run.readings

    def _peak(self) -> tuple[int | None, bool]:
        if self._last is None:
            return host.high_water(self._root), False
        return self._last.peak()
