"""What a monitor reads, memory in use and its limits, and how that is written: as text for people,
and as dicts of numbers for loggers and for programs that had a hand-written monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memtools import _core
from memtools._base import devices as cuda_devices
from memtools._base.devices import DeviceMemory
from memtools._base.limits import limits_of_process
from memtools._base.size import format_bytes
from memtools._monitor.host import LEAST_SAID, job_lines, limit_source, percent

GB = 2**30  # as people print it: a card of 24 GiB shows 23.63 GB


@dataclass(frozen=True, slots=True)
class HostTiers:
    """The host's memory in bytes; None where it is not known."""

    #: resident in this process
    rss: int | None
    #: what counts against the limit, and the limit
    used: int | None
    limit: int | None
    available: int | None
    #: private memory of the descendants
    children: int | None
    #: share of the last 10 s, 0 to 100, in which some task of the control group waited for memory
    pressure: float | None
    #: what the process itself fills: `rss`, with pages that it maps several times counted once
    process: int | None = None
    #: whose limit that is: "given", "cgroup", "machine", or "" where nothing is known to limit it
    limited_by: str = ""
    #: what the job fills, the process with its descendants and their shared memory: each page once,
    #: and what of it is swapped out as well
    job: int | None = None
    #: shared memory of the job
    shm: int | None = None
    #: of the job, swapped out
    job_swap: int | None = None
    #: by how many bytes that rose in the last half minute, in how many nanoseconds and steps; None
    #: where it does not rise for certain
    swap_rise: tuple[int, int, int] | None = None
    #: of the process, pinned by torch's allocator of host memory
    pinned: int | None = None


class Headroom(NamedTuple):
    """How much of one memory is in use, and its limit. `str()` is a line."""

    #: "host" (what counts against the limit of the job), "RLIMIT_DATA" or "RLIMIT_AS" (what the
    #: kernel counts of this process), or a device such as "cuda:0"
    memory: str
    #: bytes that count against the limit; on a device with those of other programs
    used_bytes: int
    #: the limit, or the device's size
    limit_bytes: int
    #: bytes of this process, resident on the host, or allocated by torch on a device
    own_bytes: int
    #: where the limit comes from
    limit_source: str

    @property
    def left_bytes(self) -> int:
        """Bytes left; 0 beyond the limit."""
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        used, limit = format_bytes(self.used_bytes), format_bytes(self.limit_bytes)
        share = _percent(percent(self.used_bytes, self.limit_bytes))
        return f"{self.memory}: {used} of {limit} used ({share}; {self.limit_source})"


class Readings:
    """Memory as a run reads it now: what is in use, and how much there is."""

    __slots__ = ("_indexes", "_limit", "_probe", "_sampler", "_words")

    def __init__(self, sampler: _core.Sampler, probe: _core.Probe, indexes: Sequence[int]) -> None:
        self._sampler, self._probe, self._indexes = sampler, probe, indexes
        self._limit: tuple[int, str] | None = None  # the limit that `_words` describe
        self._words = ""

    def host(self) -> HostTiers:
        """The sampler's newest sample; before the first one, a reading of the probe."""
        sampler = self._sampler
        sample, used, limit = sampler.latest(), sampler.used(), sampler.limit()
        for _ in range(3):  # until no new sample has come in between: all three are of one moment
            newest = sampler.latest()
            if sample is None or newest is None or newest.time_ns == sample.time_ns:
                break
            sample, used, limit = newest, sampler.used(), sampler.limit()
        sample = sample or self._probe.read()
        return HostTiers(
            sample.rss,
            used,
            None if limit is None else limit[0],
            sample.available,
            sample.children_private,
            None if sample.pressure is None else sample.pressure / 100,
            sample.process,
            "" if limit is None else limit[1],
            job=sample.job,
            shm=sample.shm,
            job_swap=sample.job_swap,
            swap_rise=self._sampler.swap_rise(),
            pinned=cuda_devices.pinned(),
        )

    def limit_source(self) -> str:
        """Where the host's limit comes from, in words."""
        limit = self._sampler.limit()
        if not self._words or limit != self._limit:
            if limit is not None and limit[1] == "given":
                self._words = f"limit given, {format_bytes(limit[0])}"
            else:
                self._words = limit_source(self._probe, self._probe.read().total)
            self._limit = limit
        return self._words

    def devices(self) -> list[DeviceMemory]:
        """What torch counts now on each watched device; unknown before there is a context."""
        return [cuda_devices.tiers(index) for index in self._indexes]

    def headroom(self) -> tuple[Headroom, ...]:
        """Each memory that has a limit. The host's use is that of the newest sample, but the part
        of this process is read again: a sample may be as old as the interval of the thread, and the
        tensors of a pass are gone by then."""
        found = []
        host, resident = self.host(), self._probe.rss()
        if resident is not None:
            if host.used is not None and host.limit is not None and host.rss is not None:
                used = max(0, host.used - host.rss + resident)
                found.append(Headroom("host", used, host.limit, resident, self.limit_source()))
            for name, (counted, limit) in limits_of_process().items():
                found.append(Headroom(name, counted, limit, resident, f"{name} of this process"))
        for tiers in self.devices():
            if tiers.used is not None and tiers.allocated is not None and tiers.total:
                name = f"cuda:{tiers.index}"
                found.append(Headroom(name, tiers.used, tiers.total, tiers.allocated, "its size"))
        return tuple(found)


def _gb(size: int | None) -> float | None:
    return None if size is None else size / GB


def memory_stats(host: HostTiers, devices: list[DeviceMemory]) -> dict[str, float | None]:
    """`cpu_...` and `gpu_...`, as in hand-written monitors, in units of 2**30 bytes.

    The first device is `gpu_`, each other one `gpu` and its index.
    """
    stats = {
        "cpu_rss_gb": _gb(host.rss),
        "cpu_memory_process_gb": _gb(host.process),
        "cpu_used_gb": _gb(host.used),
        "cpu_limit_gb": _gb(host.limit),
        "cpu_available_gb": _gb(host.available),
        "cpu_percent": percent(host.used, host.limit),
        "cpu_memory_percent": percent(host.used, host.limit),
    }
    for n, tiers in enumerate(devices):
        name = "gpu" if n == 0 else f"gpu{tiers.index}"
        stats |= {
            f"{name}_allocated_gb": _gb(tiers.allocated),
            f"{name}_reserved_gb": _gb(tiers.reserved),
            f"{name}_free_gb": _gb(tiers.free),
            f"{name}_total_gb": _gb(tiers.total),
            f"{name}_percent": percent(tiers.allocated, tiers.total),
        }
    return stats


def format_stats(stats: Mapping[str, float | None]) -> str:
    """`Memory Usage:`, a line for each device and one for the host, of what `memory_stats` made."""
    lines = ["Memory Usage:"]
    for key in stats:
        name = key.removesuffix("_allocated_gb")
        if name != key and stats[key] is not None:
            lines.append(f"  {name.upper()}: {_usage(stats, name)}")
    process = stats.get("cpu_memory_process_gb")
    if process is None:
        process = stats.get("cpu_rss_gb")
    text = "unknown" if process is None else f"{process:.2f} GB"
    lines.append(f"  CPU: {text} (System: {_percent(stats.get('cpu_percent'))})")
    return "\n".join(lines)


def _usage(stats: Mapping[str, float | None], name: str) -> str:
    allocated, total = stats[f"{name}_allocated_gb"], stats.get(f"{name}_total_gb")
    reserved = stats.get(f"{name}_reserved_gb")
    more = "" if reserved is None else f", reserved {reserved:.2f} GB"
    if total is None:
        return f"{allocated:.2f} GB{more}"
    return f"{allocated:.2f}/{total:.2f} GB ({_percent(stats.get(f'{name}_percent'))}){more}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}%"


def host_lines(host: HostTiers, peak: tuple[int | None, bool], highest: int | None) -> list[str]:
    """The process, its workers, the whole job and what limits them, each on a line of its own.

    `peak` is that of the process and whether it is exact, `highest` the most that ever counted
    against the limit.
    """
    lines = []
    if host.process is not None:
        lines.append(f"  Process: {format_bytes(host.process)}{_peak_words(*peak)}")
    if host.pinned:
        lines.append(f"  Pinned for devices: {format_bytes(host.pinned)} of it")
    if host.children:
        lines.append(f"  Workers: {format_bytes(host.children)}")
    if host.shm is not None and host.shm >= LEAST_SAID:
        lines.append(f"  Shared memory: {format_bytes(host.shm)}")
    lines += job_lines(host.process, host.job)
    if host.job_swap:
        swapped = f"{format_bytes(host.job_swap)} of it{_rise_words(host.swap_rise)}"
        lines.append(f"  Swapped out: {swapped}")
    if host.used is not None and host.limit:
        name = {"given": "Limit", "cgroup": "Container"}.get(host.limited_by, "Machine")
        used = f"{format_bytes(host.used)} of {format_bytes(host.limit)} used"
        share = _percent(percent(host.used, host.limit))
        lines.append(f"  {name}: {used} ({share}){_peak_words(highest, True)}")
    return lines


def _rise_words(rise: tuple[int, int, int] | None) -> str:
    if rise is None:
        return ""
    size, ns, steps = rise
    rate = f"{format_bytes(size / steps)}/step" if steps else f"{format_bytes(size / ns * 1e9)}/s"
    return f", +{rate} in the last {ns / 1e9:.0f} s"


def _peak_words(peak: int | None, exact: bool) -> str:
    if peak is None:
        return ""
    return f", peak {'' if exact else 'at least '}{format_bytes(peak)}"


def host_metrics(host: HostTiers, peak: int | None) -> dict[str, float | None]:
    return {
        "memory/host_rss_bytes": host.rss,
        "memory/host_limit_bytes": host.limit,
        "memory/host_percent": percent(host.used, host.limit),
        "memory/host_peak_bytes": peak,
        "memory/host_available_bytes": host.available,
        "memory/children_bytes": host.children,
        "memory/pressure_percent": host.pressure,
    }


def job_metrics(host: HostTiers) -> dict[str, float | None]:
    """Figures of the job, and of its parts."""
    return {
        "memory/job_bytes": host.job,
        "memory/job_swap_bytes": host.job_swap,
        "memory/shm_bytes": host.shm,
        "memory/pinned_bytes": host.pinned,
    }


def device_metrics(tiers: DeviceMemory) -> dict[str, float | None]:
    name = f"memory/cuda{tiers.index}"
    return {
        f"{name}_allocated_bytes": tiers.allocated,
        f"{name}_reserved_bytes": tiers.reserved,
        f"{name}_free_bytes": tiers.free,
    }


def known(values: Mapping[str, float | None]) -> dict[str, float]:
    """The values that are known: a logger has no use for the others."""
    return {key: float(value) for key, value in values.items() if value is not None}
