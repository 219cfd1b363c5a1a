"""The five methods of hand-written monitors: log_memory, format_memory_stats, get_peak_memory,
check_memory_leak and cleanup_memory.

They are methods of MemoryMonitor, so that it can take the place of such a class. `metrics()`,
`findings()` and CleanupPolicy do more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from memtools._base import devices as cuda_devices
from memtools._base import environment, reclaim
from memtools._base.notice import logger
from memtools._base.number import whole_number
from memtools._core import Probe
from memtools._monitor import readings
from memtools._monitor.readings import GB

if TYPE_CHECKING:
    from memtools._monitor.monitor import MemoryMonitor

LOG_EVERY = 10.0  # Lines of log_memory are so many seconds apart.


def log_memory(
    self: MemoryMonitor, step: int | None = None, force: bool = False
) -> dict[str, float | None]:
    """Return the memory in use now and the peaks, and log a line of it from time to time.

    The line goes to the logger "memtools" every `log_interval` steps, or every 10 s.

    Args:
        step: the number of the step, for the line. None: the monitor's count.
        force: log the line in any case.

    Returns `step`, `seconds`, `cpu_memory_process_gb`, `cpu_memory_percent`, `peak_cpu_memory_gb`,
    `cpu_used_gb`, `gpu_allocated_gb` and so on, in units of 2**30 bytes; None if unknown.
    """
    run = self._last
    step = self.step_count if step is None else whole_number("step", step, None)
    stats: dict[str, float | None] = {"step": step, "seconds": run.seconds if run else 0.0}
    stats |= readings.memory_stats(*self._in_use()) | self.get_peak_memory()
    if self.log_interval is None:
        is_due = time.monotonic() >= self._next_line
    else:
        last = self._line_step
        is_due = last is None or not last <= step < last + self.log_interval
    if (force or is_due) and not environment.is_off:
        self._next_line, self._line_step = time.monotonic() + LOG_EVERY, step
        logger.info("step %d: %s", step, " ".join(self.format_memory_stats(stats).split()))
    return stats


def format_memory_stats(self: MemoryMonitor, stats: Mapping[str, float | None]) -> str:
    """Return the first lines of `summary()`, made from `stats`, a result of `log_memory()`."""
    readable = isinstance(stats, Mapping) and all(
        isinstance(key, str) and (value is None or isinstance(value, (int, float)))
        for key, value in stats.items()
    )
    if not readable:
        raise TypeError(
            "format_memory_stats() takes what log_memory() returns, a dict of names and "
            f"numbers, got {type(stats).__name__}"
        )
    return readings.format_stats(stats)


def get_peak_memory(self: MemoryMonitor) -> dict[str, float | None]:
    """Return the peaks of this run, in units of 2**30 bytes; None if unknown.

    `cpu_peak_gb` (also `peak_cpu_memory_gb`) is exact where the kernel allows it (see `memtools
    doctor`), and before the first run the peak since the process began; devices have `gpu_peak_gb`
    (also `peak_gpu_memory_gb`), `gpu1_peak_gb` and so on.
    """
    run, peak = self._last, self._peak()[0]
    size = None if peak is None else peak / GB
    peaks: dict[str, float | None] = {"cpu_peak_gb": size, "peak_cpu_memory_gb": size}
    devices = {} if run is None else run.device_peaks()
    for n, (index, most) in enumerate(sorted(devices.items())):
        name = "gpu" if n == 0 else f"gpu{index}"
        peaks |= dict.fromkeys((f"{name}_peak_gb", f"peak_{name}_memory_gb"), most / GB)
    return peaks


def check_memory_leak(self: MemoryMonitor, threshold_increase_gb: float = 1.0) -> bool:
    """Return whether something leaks: grade `likely` or `leak`, and more than the threshold.

    Args:
        threshold_increase_gb: the least amount that has leaked, in units of 2**30 bytes.

    Raises RuntimeError with `leaks=False`.
    """
    leaked = 0.0
    for one in self.findings():
        if one.grade in ("likely", "leak") and one.per == "step":
            leaked += one.rate_bytes * (self.step_count - (one.since_step or 0))
    watch = self._watch()
    for verdict in [] if watch is None else watch.verdicts():
        if verdict.kind in ("likely", "leak"):
            steps = self.step_count - (verdict.since_step or 0)
            leaked = max(leaked, verdict.rate_bytes_per_step * steps)
    return leaked > 0 and leaked >= threshold_increase_gb * GB


def cleanup_memory(self: MemoryMonitor, aggressive: bool = False) -> dict[str, float]:
    """Collect Python's cycles, empty torch's device cache, and return malloc's idle pages.

    Takes 50 to 600 ms: too long for each step.

    Args:
        aggressive: collect cycles twice, and return malloc's pages even if less than 64 MiB are
            idle.

    Returns `freed_bytes` (also `host_...` and `device_...`), `collected_objects`, and `ms` for the
    whole and each part.
    """
    run = self._last
    devices = cuda_devices.find_devices("auto", self._root) if run is None else run.devices
    probe = Probe(self._root) if run is None else run.probe
    done = reclaim.cleanup(probe, devices, aggressive)
    if self._live is not None:
        self._live.log.event("cleanup", reclaim.event_of(done))
    return done
