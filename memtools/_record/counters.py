"""What the kernel counts in the control groups of a process, and the room in /dev/shm: read while
a run goes on and at its end, and written into its record as Counters and SharedRoom.

    proc/PID/cgroup ──► folders of the group and of those above it
                              └──► memory.events, memory.max ... ──► Counters, the own one first
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from memtools import _core
from memtools._base.limits import shm_room
from memtools._record.kinds import Counters, SharedRoom

UNLIMITED = 2**62  # Version 1 of control groups writes a larger number for "no limit".


def read_counters(
    probe: _core.Probe, root: str = "/", membership: str | None = None
) -> list[Counters]:
    """Read the counters of a control group and of those above it, the own one first; empty if none
    can be read. Takes 30 us for each group.

    Args:
        probe: the probe of this process.
        root: the folder under which the kernel's files are.
        membership: the text of a process's /proc/PID/cgroup. None, the default: this process's.
    """
    version, folders = probe.groups()
    if membership is not None:
        folders = _folders_of(membership, version, folders, root)
    boot = boot_id(root)
    found = (_counters_in(folder, folders[-1], version, boot) for folder in folders)
    first, *above = [*found, None] if folders else [None]
    return [] if first is None else [replace(first, own=True), *filter(None, above)]


def membership_of(pid: int | str, root: str = "/") -> str | None:
    """The text of /proc/PID/cgroup; None if it cannot be read, as for a process that has ended."""
    return text_of(os.path.join(root, f"proc/{pid}/cgroup"))


def _folders_of(membership: str, version: int, own: Sequence[str], root: str) -> list[str]:
    """The folders of another process's group and of those above it, relative to our own."""
    ours = _group_in(membership_of("self", root) or "", version)
    theirs = _group_in(membership, version)
    if not own or ours is None or theirs is None or not own[0].endswith(ours.rstrip("/")):
        return []
    base, top = own[0].removesuffix(ours.rstrip("/")), own[-1]
    folder, found = base + theirs.rstrip("/"), []
    while len(folder) > len(top) and folder.startswith(f"{top}/"):
        found.append(folder)
        folder = folder.rpartition("/")[0]
    return [*found, top] if folder == top else []


def _group_in(membership: str, version: int) -> str | None:
    """The memory controller's group in a text of /proc/PID/cgroup, as the kernel names it."""
    for line in membership.splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if ("memory" in controllers.split(",")) if version == 1 else not controllers:
            return path if path.startswith("/") and "/.." not in path else None
    return None


def boot_id(root: str = "/") -> str:
    """The kernel's name of this boot; "" if it has none."""
    return (text_of(os.path.join(root, "proc/sys/kernel/random/boot_id")) or "").strip()


def room_of_shm(root: str = "/") -> SharedRoom | None:
    """The size and the use of /dev/shm; None if there is none."""
    free, size = shm_room(root) or (0, 0)
    return SharedRoom(size, size - free) if size else None


def _counters_in(folder: str, top: str, version: int, boot: str) -> Counters | None:
    try:
        inode = os.stat(folder).st_ino & (2**62 - 1)  # some are larger than a record's numbers
    except (OSError, ValueError):
        return None
    events = _numbers(folder, "memory.oom_control" if version == 1 else "memory.events")
    if version == 1:
        met, limit = _number(folder, "memory.failcnt"), _number(folder, "memory.limit_in_bytes")
    else:
        met, limit = events.get("max"), _number(folder, "memory.max")
    if not events and met is None:
        return None
    return Counters(
        group=folder.removeprefix(top) or "/",
        folder=folder,
        version=version,
        inode=inode,
        boot=boot,
        limit_bytes=None if limit is None or limit >= UNLIMITED else limit,
        oom_kill=events.get("oom_kill"),
        oom=events.get("oom"),
        oom_group_kill=events.get("oom_group_kill"),
        met=met,
        high=events.get("high"),
    )


def _numbers(folder: str, name: str) -> dict[str, int]:
    """The numbers of a file whose lines are `name number`, by name."""
    words = (line.split() for line in (text_of(os.path.join(folder, name)) or "").splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) == 2 and re.fullmatch(r"\d{1,18}", w[1])}


def _number(folder: str, name: str) -> int | None:
    found = re.fullmatch(r"(\d{1,20})\s*", text_of(os.path.join(folder, name)) or "")
    return None if found is None else int(found[1])


def text_of(path: str) -> str | None:
    """The text of a file; None if it cannot be read. Never waits: a record may name any path."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(file, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(file)


def changed(before: Sequence[Counters], now: Sequence[Counters]) -> Iterator[Counters]:
    """The counters that show a kill or another limit. How often a limit was met changes all the
    time near the limit, and does not count."""
    known = {of.folder: (of.oom_kill, of.oom, of.limit_bytes) for of in before}
    for of in now:
        if of.folder in known and known[of.folder] != (of.oom_kill, of.oom, of.limit_bytes):
            yield of


def counters_to_write(first: Sequence[Counters], last: Sequence[Counters]) -> Iterator[Counters]:
    """The counters to write at the end: those of the own group, and those that have changed."""
    before = {counters.folder: counters for counters in first}
    for i, counters in enumerate(last):
        if i == 0 or before.get(counters.folder) != counters:
            yield counters
