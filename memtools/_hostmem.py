"""host_memory(): what this process has of the host's memory, and what it may have."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from memtools import _core
from memtools._size import format_bytes

_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA")


@dataclass(frozen=True)
class HostMemory:
    """The host's memory at one moment, in bytes; None where a figure was not to be had."""

    #: resident memory of this process
    rss: int | None
    #: of it, neither of files nor shared
    private: int | None
    #: of this process, swapped out
    swap: int | None
    #: what counts against the container's limit, less file cache that is easily dropped
    cgroup_used: int | None
    #: the lowest limit over the control group and its ancestors; None: there is none, or it is
    #: unknown, which `limit_source` tells apart
    cgroup_limit: int | None
    #: what the machine could still hand out without swapping
    available: int | None
    #: the machine's memory
    total: int | None
    #: share of the last 10 s, 0 to 100, in which some task of the control group waited for memory
    pressure: float | None
    #: where the limit comes from, in words: "cgroup v2 limit 8.0 GiB (/sys/fs/cgroup/a)"
    limit_source: str

    @property
    def percent(self) -> float | None:
        """What is used of the container's limit, 0 to 100 or above, or where there is none, of the
        machine's memory; None where it is unknown."""
        if self.cgroup_limit is not None:
            return _share(self.cgroup_used, self.cgroup_limit)
        if self.available is None or self.total is None:
            return None
        return _share(self.total - self.available, self.total)

    def __str__(self) -> str:
        own = "unknown" if self.rss is None else format_bytes(self.rss)
        what, used, limit = "the container", self.cgroup_used, self.cgroup_limit
        if limit is None:
            left, what, limit = self.available, "the machine", self.total
            used = None if left is None or limit is None else limit - left
        if used is None or limit is None or self.percent is None:
            return f"the process {own}; {what} unknown"
        share = f"{self.percent:.1f}%"
        return f"the process {own}; {what} {format_bytes(used)} of {format_bytes(limit)} ({share})"


def _share(used: int | None, limit: int) -> float | None:
    if used is None:
        return None
    return 100.0 * used / limit if limit else 100.0


def limit_source(probe: _core.Probe, total: int | None) -> str:
    """Where the memory limit comes from, or that there is none, or why it is unknown."""
    version, limit, directory, above, why, _, _ = probe.source()
    if limit is None:
        return f"unknown ({why})"
    if limit == -1:
        machine = "of unknown size" if total is None else format_bytes(total)
        return f"no cgroup limit; machine {machine}"
    where = f"above {directory}" if above else directory
    return f"cgroup v{version} limit {format_bytes(limit)} ({where})"


def host_memory(root: str = "/") -> HostMemory:
    """Reads this process's memory, its container's limit and the machine's memory, all new.

    Takes about 0.1 ms, most of it to find the control group; a MemoryMonitor keeps what it found
    and reads in microseconds. Raises nothing for what cannot be read: such a figure is None.

    Args:
        root: the folder under which `proc` and `sys` are read.
    """
    probe = _core.Probe(root, True)
    s = probe.read()
    unlimited = s.cgroup_limit == -1
    return HostMemory(
        rss=s.rss,
        private=s.private,
        swap=s.swap,
        cgroup_used=s.cgroup_used,
        cgroup_limit=None if unlimited else s.cgroup_limit,
        available=s.available,
        total=s.total,
        pressure=None if s.pressure is None else s.pressure / 100,
        limit_source=limit_source(probe, s.total),
    )


def process_limits() -> dict[str, int | None]:
    """What RLIMIT_AS and RLIMIT_DATA allow this process now, in bytes; None for no limit."""
    found = {name: resource.getrlimit(getattr(resource, name))[0] for name in _LIMITS}
    return {n: None if limit == resource.RLIM_INFINITY else limit for n, limit in found.items()}
