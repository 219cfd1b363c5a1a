"""The host's memory, its limits and the kernel's settings, for `memtools doctor`.

`_core.Probe` reads memory, its limit and pressure, as it does for the monitor: a run will see what
doctor prints. `root` is the folder that stands for "/"; tests have trees of their own. A file that
is missing, unreadable or odd does not raise: the fact's value is None, and its text says why.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

from memtools._base.size import format_bytes
from memtools._cli.facts import (
    Fact,
    Section,
    guarded,
    known,
    no,
    read_number,
    read_text,
    size,
    unknown,
    yes,
)

ROOT = Path("/")
OVERCOMMIT_MODES = {0: "heuristic", 1: "always", 2: "never past the commit limit"}
SHM_NARROW = 64 * 2**20  # the default size of /dev/shm in a container


def host_memory(root: Path = ROOT) -> Section:
    """The machine's memory, and how much of it this process may use. Raises ImportError without
    _core."""
    from memtools import _core
    from memtools._base.limits import shm_room

    nobody_counts = "no control group accounts for memory"
    probe = _core.Probe(str(root), True)
    now = probe.read(_core.READ_ROOM | _core.READ_PRESSURE)
    version, limit, directory, above, reason, pressure_path, of_machine = probe.source()

    def machine(count: int | None, name: str) -> Fact:
        return unknown(f"no {name} in {root / 'proc/meminfo'}") if count is None else size(count)

    if limit is None:
        limit_fact = stated_by = unknown(reason or "the control group cannot be read")
    elif limit < 0:
        counts = "unlimited" if version else f"unlimited ({nobody_counts})"
        if now.total is not None:
            counts += f", so the machine's {format_bytes(now.total)} counts"
        limit_fact = Fact(None, counts)
        stated_by = Fact(None, "none (unlimited)")
    else:
        limit_fact = size(limit)
        stated_by = unknown(f"above {directory}") if above else known(directory or "")
    usage = unknown(reason or nobody_counts)
    if now.cgroup_used is not None:
        usage = size(now.cgroup_used)
    if now.pressure is None:
        pressure = no(f"no {pressure_path}" if pressure_path else "no v2 control group is mounted")
    else:
        group = "of the whole machine: this is the root group" if of_machine else f"{pressure_path}"
        pressure = yes(group)
    exact = "/proc/self/clear_refs cannot be written: peaks of phases are at least what is reported"
    return {
        "total_bytes": machine(now.total, "MemTotal"),
        "available_bytes": machine(now.available, "MemAvailable"),
        "swap_free_bytes": machine(now.swap_free, "SwapFree"),
        **_shared_memory(shm_room(str(root)), root / "dev/shm"),
        "cgroup_version": known(f"v{version}") if version else unknown(reason or nobody_counts),
        "memory_limit_bytes": limit_fact,
        "memory_limit_directory": stated_by,
        "memory_usage_bytes": usage,
        "pressure_readings": pressure,
        "peak_reset": yes() if probe.reset_peak() else no(exact),
    }


def _shared_memory(room: tuple[int, int] | None, folder: Path) -> Section:
    """The size of /dev/shm, and what happens to a program that needs more. `room` is its free and
    total bytes, None if there is no such folder."""
    keys = ("shared_memory_size_bytes", "shared_memory_free_bytes")
    if room is None:
        return dict.fromkeys(keys, unknown(f"no {folder}"))
    free, total = room
    facts = {keys[0]: size(total), keys[1]: size(free)}
    ends = 'a DataLoader with workers fails with "Bus error" if its batches do not fit'
    if total <= SHM_NARROW:
        remedy = "give the container more: docker run --shm-size=8g, or --ipc=host"
        facts[keys[0]] = Fact(total, f"{format_bytes(total)} ({ends}; {remedy})")
    elif free <= SHM_NARROW:
        remedy = f"see what is left there: ls -l {folder}"
        facts[keys[1]] = Fact(free, f"{format_bytes(free)} ({ends}; {remedy})")
    return facts


def _chosen(path: Path) -> Fact:
    """The word in brackets of a text like "always [madvise] never"."""
    text = read_text(path)
    match = re.search(r"\[(\w+)\]", text)
    if match is None:
        raise ValueError(f"{path} says {text[:40]!r}")
    return Fact(match[1], text)


def _overcommit(path: Path) -> Fact:
    mode = read_number(path)
    return Fact(mode, f"{mode} ({OVERCOMMIT_MODES.get(mode, 'not a known mode')})")


def _rlimit(which: int) -> Fact:
    soft, _ = resource.getrlimit(which)
    return Fact(None, "unlimited") if soft == resource.RLIM_INFINITY else size(soft)


def kernel(root: Path = ROOT) -> Section:
    vm, thp = root / "proc/sys/vm", root / "sys/kernel/mm/transparent_hugepage"
    return {
        "transparent_huge_pages": guarded(lambda: _chosen(thp / "enabled")),
        "transparent_huge_pages_shmem": guarded(lambda: _chosen(thp / "shmem_enabled")),
        "max_map_count": guarded(lambda: known(read_number(vm / "max_map_count"))),
        "overcommit_mode": guarded(lambda: _overcommit(vm / "overcommit_memory")),
        "rlimit_as_bytes": _rlimit(resource.RLIMIT_AS),
        "rlimit_data_bytes": _rlimit(resource.RLIMIT_DATA),
        "rlimit_memlock_bytes": _rlimit(resource.RLIMIT_MEMLOCK),
    }
