"""What a monitor says, as text and as dicts of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memtools._base.devices import DeviceTiers as DeviceTiers
from memtools._base.size import format_bytes

GB = 2**30  # as people print it: a card of 24 GiB shows 23.63 GB
SHOWN_PHASES = 8


@dataclass(frozen=True, slots=True)
class HostTiers:
    """The host's memory in bytes; None where it is not known."""

    #: resident in this process
    rss: int | None
    #: what counts against the limit, and the limit
    used: int | None
    limit: int | None
    available: int | None
    #: private memory of the child processes
    children: int | None
    #: share of the last 10 s, 0 to 100, in which some task of the control group waited for memory
    pressure: float | None
    #: what the process itself fills: `rss`, with pages that it maps several times counted once
    process: int | None = None
    #: whose limit that is: "given", "cgroup", "machine", or "" where nothing is known to limit it
    limited_by: str = ""


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """All passages of a phase by now."""

    name: str
    count: int
    seconds: float
    longest_seconds: float
    #: the largest peak of resident memory, in bytes
    peak_bytes: int | None
    #: False: a peak was at least that, because the kernel's mark could not be set back
    exact: bool
    #: the largest peak of each device, in bytes allocated, by its index
    device_peak_bytes: dict[int, int]

    def __str__(self) -> str:
        parts = [f"{self.count:,} time{'' if self.count == 1 else 's'}, {self.seconds:,.3f} s"]
        if self.peak_bytes is not None:
            least = "" if self.exact else "at least "
            parts.append(f"peak {least}{format_bytes(self.peak_bytes)}")
        parts += [f"cuda{i} {format_bytes(n)}" for i, n in sorted(self.device_peak_bytes.items())]
        return f"{self.name}: {', '.join(parts)}"


def percent(part: int | None, whole: int | None) -> float | None:
    """None where one of them is not known."""
    if part is None or whole is None:
        return None
    return 100.0 * part / whole if whole else 100.0


def _gb(size: int | None) -> float | None:
    return None if size is None else size / GB


def memory_stats(host: HostTiers, devices: list[DeviceTiers]) -> dict[str, float | None]:
    """The dict of a hand-made monitor: `cpu_...` and `gpu_...`, sizes in units of 2**30 bytes.

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
    if total is None:
        return f"{allocated:.2f} GB"
    return f"{allocated:.2f}/{total:.2f} GB ({_percent(stats.get(f'{name}_percent'))})"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f}%"


def host_lines(host: HostTiers, peak: tuple[int | None, bool], highest: int | None) -> list[str]:
    """The process, its workers and what limits them, each on a line of its own.

    `peak` is that of the process and whether it is exact, `highest` the most that ever counted
    against the limit.
    """
    lines = []
    if host.process is not None:
        lines.append(f"  Process: {format_bytes(host.process)}{_peak_words(*peak)}")
    if host.children:
        lines.append(f"  Workers: {format_bytes(host.children)}")
    if host.used is not None and host.limit:
        name = {"given": "Limit", "cgroup": "Container"}.get(host.limited_by, "Machine")
        used = f"{format_bytes(host.used)} of {format_bytes(host.limit)} used"
        share = _percent(percent(host.used, host.limit))
        lines.append(f"  {name}: {used} ({share}){_peak_words(highest, True)}")
    return lines


def _peak_words(peak: int | None, exact: bool) -> str:
    if peak is None:
        return ""
    return f", peak {'' if exact else 'at least '}{format_bytes(peak)}"


def phase_lines(phases: list[PhaseTotals]) -> list[str]:
    """Of the phases, those that took the most memory."""
    if not phases:
        return []
    most = sorted(phases, key=lambda p: -(p.peak_bytes or 0))[:SHOWN_PHASES]
    lines = ["Phases:"] + [f"  {p}" for p in phases if p in most]
    if len(phases) > SHOWN_PHASES:
        lines.append(f"  and {len(phases) - SHOWN_PHASES} of lower peaks")
    return lines


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


def device_metrics(tiers: DeviceTiers) -> dict[str, float | None]:
    name = f"memory/cuda{tiers.index}"
    return {
        f"{name}_allocated_bytes": tiers.allocated,
        f"{name}_reserved_bytes": tiers.reserved,
        f"{name}_free_bytes": tiers.free,
    }


def known(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what is not known: a logger has no use for it."""
    return {key: float(value) for key, value in values.items() if value is not None}
