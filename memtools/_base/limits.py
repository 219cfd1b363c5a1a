"""The limits of host memory: the lowest one, what counts against each, and what is left.

    given, control group, machine ──► lowest_limit          the limit by which a run is measured
    control group, machine, now ────► nearest_limit         the one with the least left
    RLIMIT_AS, RLIMIT_DATA ─────────► limits_of_process     with what the kernel counts against them
    /dev/shm ───────────────────────► shm_room

The sampler's thread applies the rule of lowest_limit in C (csrc/core/monitor/limit.h), because it
runs without the interpreter lock; a test compares the two.
"""

from __future__ import annotations

import os
import re
import resource

from memtools import _core
from memtools._base.size import format_bytes

SHM = "/dev/shm"
#: by limit of the process: the line of /proc/self/status whose bytes the kernel counts against it
COUNTED_AGAINST = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}


def lowest_limit(
    *, given: int | None = None, cgroup: int | None = None, machine: int | None = None
) -> tuple[int, str] | None:
    """Return the lowest of the limits in bytes, and "given", "cgroup" or "machine"; the first of
    these where two are equal. None where no limit is known.

    Args:
        given: a limit that the user set.
        cgroup: the control group's; -1 for unlimited.
        machine: the machine's memory.
    """
    found = (given, "given"), (cgroup, "cgroup"), (machine, "machine")
    known = [(size, source) for size, source in found if size is not None and size > 0]
    return min(known, key=lambda one: one[0], default=None)


def job_limit() -> int | None:
    """Return the lower of the control group's limit and the machine's memory now, in bytes."""
    now = _core.Probe("/", True).host()
    lowest = lowest_limit(cgroup=now.cgroup_limit, machine=now.total)
    return None if lowest is None else lowest[0]


def left_of(limit: int | None, used: int | None) -> int | None:
    """Return what is left of a limit, at least 0; None where one of the two is not known."""
    return None if limit is None or used is None else max(0, limit - used)


def too_little(left: int, needs: int) -> str:
    """Return why steps are not traced, in words, where less is left than must be."""
    return (
        f"at least {format_bytes(needs)} of memory must be left at the highest point of a step to "
        f"trace it, and {format_bytes(max(0, left))} are"
    )


def nearest_limit(now: _core.Sample) -> tuple[int | None, int | None]:
    """Return the limit with the least left, the control group's or the machine's, and what is used
    of it."""
    limit, used = now.cgroup_limit, now.cgroup_used
    left = None if limit == -1 else left_of(limit, used)
    if left is not None and (now.available is None or left <= now.available):
        return limit, used
    return now.total, left_of(now.total, now.available)


def shm_room(root: str = "/") -> tuple[int, int] | None:
    """Return the bytes of /dev/shm (free, total); None where there is no such folder."""
    try:
        found = os.statvfs(os.path.join(root, SHM[1:]))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def process_limits() -> dict[str, int | None]:
    """Return RLIMIT_AS and RLIMIT_DATA of this process in bytes; None for no limit."""
    found = {name: resource.getrlimit(getattr(resource, name))[0] for name in COUNTED_AGAINST}
    return {n: None if limit == resource.RLIM_INFINITY else limit for n, limit in found.items()}


def lowest_limit_of_process() -> tuple[int, str] | None:
    """Return the lower of RLIMIT_AS and RLIMIT_DATA, and its name; None where neither is set."""
    known = [(limit, name) for name, limit in process_limits().items() if limit is not None]
    return min(known, default=None)


def sizes_of_process(root: str = "/") -> dict[str, int]:
    """Return the sizes in /proc/self/status by name, in bytes; empty where it cannot be read."""
    try:
        with open(f"{root.rstrip('/')}/proc/self/status", "rb") as file:
            found = re.findall(rb"^(\w+):\s*(\d+) kB$", file.read(), re.MULTILINE)
    except OSError:
        return {}
    return {name.decode(): 1024 * int(kib) for name, kib in found}


def limits_of_process(root: str = "/") -> dict[str, tuple[int, int]]:
    """Return, for RLIMIT_AS and RLIMIT_DATA where they are set, the bytes that the kernel counts
    against the limit now, and the limit."""
    limits = {name: limit for name, limit in process_limits().items() if limit is not None}
    sizes = sizes_of_process(root) if limits else {}
    lines = {name: COUNTED_AGAINST[name] for name in limits}
    return {n: (sizes[line], limits[n]) for n, line in lines.items() if line in sizes}
