"""What can be read from a monitor: figures, texts, verdicts, and the surface of hand-made ones."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping
from typing import SupportsIndex

from memtools._base import devices as monitor_device
from memtools._base import reclaim
from memtools._census.holders import Holder
from memtools._core import Probe
from memtools.leak.detector import LeakVerdict, StepsLeft
from memtools.monitor import host as hostmem
from memtools.monitor import run as monitor_run
from memtools.monitor import text
from memtools.monitor.leakwatch import FillVerdict, LeakWatch
from memtools.monitor.log import logger
from memtools.monitor.run import Run, Settings
from memtools.monitor.text import GB, DeviceTiers, HostTiers, PhaseTotals, known

LOG_EVERY = 10.0  # seconds between two lines of log_memory


def whole(name: str, value: object) -> int:
    """An argument that is an int, of numpy's or torch's as well."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} is an int or None, got {type(value).__name__}")
    return operator.index(value)


class Readings:
    """The reading half of MemoryMonitor. Figures are of the running run, or of the last one; before
    the first, memory in use and its peak are read at once, and all else is unknown."""

    _root: str
    _settings: Settings
    _live: Run | None
    _last: Run | None
    log_interval: int | None
    _next_line = 0.0  # on the monotonic clock
    _line_step: int | None = None  # of the last line of log_memory

    # --- leaks ---

    def leaks(self) -> LeakVerdict:
        """What the leak test says so far; docs/guides/leaks.md explains it. Growth that a census
        has found to be a container with a bound is `growing`, and its text says what fills. Takes
        20 us.

        Raises RuntimeError where the monitor was made with leaks=False.
        """
        watch = self._watch()
        return LeakVerdict("quiet", 0.0, "none") if watch is None else watch.verdict()

    def holders(self) -> tuple[Holder, ...]:
        """Who holds what grows, those that hold most first; found by a census on suspicion, and so
        empty as long as nothing grows or nobody was found."""
        watch = self._watch()
        return () if watch is None else watch.holders()

    def forecast(self) -> StepsLeft | None:
        """Steps until the limit of the host or of a device is reached, the sooner of the two, as an
        interval. None before 256 readings and without a limit. Takes 20 us.

        Raises RuntimeError where the monitor was made with leaks=False.
        """
        watch = self._watch()
        return None if watch is None else watch.forecast()

    def _watch(self) -> LeakWatch | None:
        if not self._settings.leaks:
            raise RuntimeError("this MemoryMonitor was made with leaks=False; leave that out")
        return None if self._last is None else self._last.watch

    # --- figures ---

    def phases(self) -> list[PhaseTotals]:
        """Totals of each phase that was left, in the order in which their names came."""
        return [] if self._last is None else self._last.book.totals()

    @property
    def record_path(self) -> str | None:
        """Where the record is, or will be; None without one."""
        run, path = self._last, self._settings.log
        written = None if run is None else run.log.path
        return written if path is None or written is not None else str(path)

    @property
    def step_count(self) -> int:
        """Steps of this run."""
        return 0 if self._last is None else self._last.sampler.step_count

    @property
    def samples_taken(self) -> int:
        """By the thread, in this run."""
        return 0 if self._last is None else self._last.sampler.samples

    @property
    def overhead(self) -> tuple[float, float]:
        """Seconds of a processor that the sampling thread has used, and their share of a core."""
        run = self._last
        if run is None:
            return 0.0, 0.0
        used = run.sampler.cpu_ns / 1e9
        return used, used / run.seconds if run.seconds > 0 else 0.0

    def metrics(self, expert: bool = False) -> dict[str, float]:
        """Figures for a logger, `memory/...` with the unit in the name: 12 at most, of the host and
        of the first device; `expert` for all there are. What is not known is left out."""
        run = self._last
        if run is None:
            return {}
        host, tiers = run.host(), run.tiers()
        values = text.host_metrics(host, run.peak_now()[0])
        values |= self._leak_metrics(run)
        for device in tiers[: None if expert else 1]:
            values |= text.device_metrics(device)
        if expert:
            values |= self._all_metrics(run)
        return known(values)

    def _leak_metrics(self, run: Run) -> dict[str, float | None]:
        if run.watch is None:
            return {}
        verdict, left = run.watch.verdict(), run.watch.forecast()
        leaks = verdict.kind in ("likely", "leak")
        ends = left is not None and not math.isinf(left.lo) and verdict.kind != "quiet"
        return {
            "memory/leak_bytes_per_step": verdict.rate_bytes_per_step if leaks else 0.0,
            "memory/steps_left": left.lo if left is not None and ends else None,
        }

    def _all_metrics(self, run: Run) -> dict[str, float | None]:
        sample = run.sampler.latest()
        values: dict[str, float | None] = {"memory/steps": run.sampler.step_count}
        if sample is not None:
            names = ("private", "swap", "heap_used", "heap_free", "cgroup_used", "total")
            values |= {f"memory/host_{name}_bytes": getattr(sample, name) for name in names}
            host = run.host()
            values["memory/host_process_bytes"] = host.process
            values["memory/host_used_bytes"] = host.used
            values["memory/host_used_peak_bytes"] = run.sampler.peak()
            values["memory/children"] = sample.children
        for tiers in run.tiers():
            values[f"memory/cuda{tiers.index}_total_bytes"] = tiers.total
            values[f"memory/cuda{tiers.index}_inactive_bytes"] = tiers.inactive
        for index, peak in run.device_peaks().items():
            values[f"memory/cuda{index}_peak_bytes"] = peak
        for phase in self.phases():
            values[f"memory/phase/{phase.name}/peak_bytes"] = phase.peak_bytes
            values[f"memory/phase/{phase.name}/seconds"] = phase.seconds
        values["memory/samples"] = run.sampler.samples
        values["memory/sampler_cpu_seconds"], values["memory/sampler_share"] = self.overhead
        return values

    # --- texts, and what hand-made monitors have ---

    def summary(self) -> str:
        """Memory in use, phases, leaks with their holders, and the forecast, as text. The percent
        behind `System:` is of the limit: the container's, when there is one. The process, its
        workers and what limits them follow, each on a line of its own with its peak."""
        host, tiers = self._in_use()
        run = self._last
        lines = [text.format_stats(text.memory_stats(host, tiers))]
        highest = None if run is None else run.sampler.peak()
        lines += text.host_lines(host, self._peak(), highest)
        lines += text.phase_lines(self.phases())
        if self._last is not None and self._last.watch is not None:
            lines += _leak_lines(self._last.watch)
        return "\n".join(lines)

    def log_memory(self, step: int | None = None, force: bool = False) -> dict[str, float | None]:
        """Return the memory in use now and the peaks, as a dict: `step`, `seconds`,
        `cpu_memory_process_gb`, `cpu_memory_percent`, `peak_cpu_memory_gb`, `cpu_used_gb`,
        `gpu_allocated_gb` and so on, in units of 2**30 bytes; None for what is not known.

        A line of it goes to the logger "memtools" too: every `log_interval` steps, every 10 s where
        there is none, or with `force`.

        Args:
            step: None for the steps that `step()` has counted.
            force: write the line in any case.

        Raises:
            TypeError: `step` is not an int; nothing has changed.
        """
        run = self._last
        step = self.step_count if step is None else whole("step", step)
        stats: dict[str, float | None] = {"step": step, "seconds": run.seconds if run else 0.0}
        stats |= text.memory_stats(*self._in_use()) | self.get_peak_memory()
        if force or self._is_line_due(step):
            self._next_line, self._line_step = time.monotonic() + LOG_EVERY, step
            logger.info("step %d: %s", step, " ".join(self.format_memory_stats(stats).split()))
        return stats

    def _is_line_due(self, step: int) -> bool:
        if self.log_interval is None:
            return time.monotonic() >= self._next_line
        last = self._line_step
        return last is None or not last <= step < last + self.log_interval

    def format_memory_stats(self, stats: Mapping[str, float | None]) -> str:
        """The lines that summary() begins with, from what log_memory() returned."""
        return text.format_stats(stats)

    def _in_use(self) -> tuple[HostTiers, list[DeviceTiers]]:
        run = self._last
        if run is None:
            return monitor_run.read_once(self._settings, self._root)
        return run.host(), run.tiers()

    def _peak(self) -> tuple[int | None, bool]:
        run = self._last
        return hostmem.high_water(self._root) if run is None else run.peak_now()

    def get_peak_memory(self) -> dict[str, float | None]:
        """The highest of this run, in units of 2**30 bytes: `cpu_peak_gb`, exact where the kernel
        allows (`memtools doctor` says), and `gpu_peak_gb` or `gpu1_peak_gb` of each device; the
        same as `peak_cpu_memory_gb`, `peak_gpu_memory_gb` and so on, as other monitors name them.
        Before the first run the host's peak since the process began."""
        run, peak = self._last, self._peak()[0]
        size = None if peak is None else peak / GB
        peaks: dict[str, float | None] = {"cpu_peak_gb": size, "peak_cpu_memory_gb": size}
        devices = {} if run is None else run.device_peaks()
        for n, (index, most) in enumerate(sorted(devices.items())):
            name = "gpu" if n == 0 else f"gpu{index}"
            peaks |= dict.fromkeys((f"{name}_peak_gb", f"peak_{name}_memory_gb"), most / GB)
        return peaks

    def check_memory_leak(self, threshold_increase_gb: float = 1.0) -> bool:
        """Whether the leak test says `likely` or `leak`, and so much was leaked since then. Unlike
        two readings that are compared, a warm-up or a buffer that fills does not count.

        Raises RuntimeError where the monitor was made with leaks=False.
        """
        verdict = self.leaks()
        if verdict.kind not in ("likely", "leak"):
            return False
        steps = self.step_count - (verdict.since_step or 0)
        return verdict.rate_bytes_per_step * steps >= threshold_increase_gb * GB

    def cleanup_memory(self, aggressive: bool = False) -> dict[str, float]:
        """Collect Python's cycles, empty torch's cache of free device blocks, and give malloc's
        idle pages back where there are 64 MiB of them; with `aggressive` in any case, and cycles
        twice.

        Returns `freed_bytes` (`host_...` and `device_...` too), `collected_objects`, and `ms` (also
        of each part). Takes 50 to 600 ms, most of it for the cycles: no habit for each step.
        """
        run = self._last
        devices = monitor_device.find_devices("auto", self._root) if run is None else run.devices
        probe = Probe(self._root) if run is None else run.probe
        done = reclaim.cleanup(probe, devices, aggressive)
        if self._live is not None:
            self._live.log.event("cleanup", reclaim.in_words(done))
        return done


def _leak_lines(watch: LeakWatch) -> list[str]:
    verdict = watch.verdict()
    if verdict.kind == "quiet" or not watch.matters(verdict):
        return []
    lines = [f"Leak test: {verdict}"]
    lines += [f"  {holder}" for holder in watch.holders()]
    left = watch.forecast()
    fills = isinstance(verdict, FillVerdict) and verdict.steps_left is None
    if left is not None and not math.isinf(left.lo) and not fills:
        lines.append(f"Forecast: {left}, if nothing else is loaded")
    return lines
