"""Facts about the host: memory, control groups, kernel settings and limits.

Every reader takes `root`, the directory that stands for "/", so that tests can drive it with fake
trees. Nothing here raises because a file is missing, unreadable or odd: the fact's value is then
None and its text says why.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path("/")
POPULATE_READ_SINCE = (5, 14)
OVERCOMMIT_MODES = {0: "heuristic", 1: "always", 2: "never past the commit limit"}

# cgroup v1 writes "no limit" as the largest multiple of the page size that fits a signed long.
# No machine has this many bytes, whatever its page size.
V1_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Fact:
    """`value` is what --json prints and `text` what people read: where the value is None or
    False, the text says why."""

    value: str | int | bool | None
    text: str


Section = dict[str, Fact]


def known(value: str | int) -> Fact:
    return Fact(value, str(value))


def unknown(reason: str) -> Fact:
    return Fact(None, f"unknown ({reason})")


def yes(remark: str = "") -> Fact:
    return Fact(True, f"yes ({remark})" if remark else "yes")


def no(reason: str) -> Fact:
    return Fact(False, f"no ({reason})")


def size(count: int) -> Fact:
    return Fact(count, size_text(count))


def size_text(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.2f} {unit}"
    return f"{count} bytes"


def why(error: Exception) -> str:
    """One line for a failed read: the file and what is wrong with it."""
    if isinstance(error, FileNotFoundError):
        return f"no {error.filename}"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error)


def guarded(read: Callable[[], Fact]) -> Fact:
    """The one place where a missing, unreadable or odd file becomes a fact that says so."""
    try:
        return read()
    except (OSError, ValueError) as error:
        return unknown(why(error))


def _text(path: Path) -> str:
    # Control groups are named in bytes: what is not UTF-8 must survive the way back to a path.
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def _number(path: Path) -> int:
    text = _text(path).strip()
    if not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError(f"{path} says {text[:40]!r}")
    return int(text)


# --- control groups -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo: the part `top` of a hierarchy is visible at `point`."""

    version: str  # "v1" or "v2"
    controllers: tuple[str, ...]
    top: str
    point: str


@dataclass(frozen=True)
class Place:
    """A control group as directories: itself first, then its visible ancestors."""

    version: str
    levels: tuple[Path, ...]


def _unescape(field: str) -> str:
    """mountinfo writes space, tab, newline, backslash and # as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def parse_mounts(text: str) -> list[Mount]:
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *others) = left.split(" "), right.split(" ")
        if len(fields) < 5 or kind not in ("cgroup", "cgroup2"):
            continue
        version = "v1" if kind == "cgroup" else "v2"
        controllers = tuple(others[-1].split(",")) if version == "v1" and others else ()
        top, point = _unescape(fields[3]), _unescape(fields[4])
        found[point] = Mount(version, controllers, top, point)  # a later mount hides an earlier one
    return list(found.values())


def parse_memberships(text: str) -> dict[str, str]:
    """Controller -> path of this process's group; the key of the v2 hierarchy is ""."""
    found = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            found.update(dict.fromkeys(controllers.split(","), path))
    return found


def below(top: str, path: str) -> list[str] | None:
    """The way from `top` down to `path`, or None where `path` is not below it.

    Both are relative to the root of the control-group namespace and may lead out of it by "..";
    the names beyond that root are hidden, so only equal leading parts can be matched.
    """
    above = [part for part in top.split("/") if part]
    parts = [part for part in path.split("/") if part]
    rest = parts[len(above) :]
    return None if parts[: len(above)] != above or ".." in rest else rest


class Cgroups:
    """Where this process sits among the control groups. The constructor raises OSError."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts = parse_mounts(_text(root / "proc/self/mountinfo"))
        try:
            self.paths = parse_memberships(_text(root / "proc/self/cgroup"))
        except FileNotFoundError:  # a kernel without control groups has no such file
            self.paths = {}

    def version(self) -> str:
        versions = {mount.version for mount in self.mounts}
        return "hybrid" if len(versions) == 2 else next(iter(versions), "none")

    def memory_version(self) -> str | None:
        """Which hierarchy has the memory controller; on a hybrid host that is usually v1."""
        if "memory" in self.paths:
            return "v1"
        has_v2 = "" in self.paths and any(mount.version == "v2" for mount in self.mounts)
        return "v2" if has_v2 else None

    def place(self, version: str) -> Place:
        """The group's directories. ValueError or OSError where it cannot be seen from here."""
        controller = "memory" if version == "v1" else ""
        path = self.paths.get(controller)
        if path is None:
            raise ValueError(f"/proc/self/cgroup names no {version} group")
        best: tuple[Mount, list[str]] | None = None
        mounts = [
            mount
            for mount in self.mounts
            if mount.version == version and (version == "v2" or controller in mount.controllers)
        ]
        for mount in mounts:
            rest = below(mount.top, path)
            # The longest way down shows the most ancestors; of two equal ones the later counts.
            if rest is not None and (best is None or len(rest) >= len(best[1])):
                best = (mount, rest)
        if best is None:
            points = ", ".join(mount.point for mount in mounts)
            where = f"outside what is mounted at {points}" if points else "in no mounted hierarchy"
            raise ValueError(f"the control group {path} lies {where}")
        mount, rest = best
        directory = top = self.root / mount.point.lstrip("/")
        levels = [top]
        for part in rest:
            directory = directory / part
            levels.insert(0, directory)
        directory.stat()  # a group that is not there has no limit files either: say that instead
        return Place(version, tuple(levels))


def _limit(path: Path) -> int | None:
    """The limit that one file states; None is no limit."""
    if path.name == "memory.max" and _text(path).strip() == "max":
        return None
    limit = _number(path)
    return limit if 0 <= limit < V1_UNLIMITED else None


def _hierarchical_limit(stat: Path) -> int | None:
    """v1 states the minimum over all ancestors, those above the mount included."""
    try:
        match = re.search(r"^hierarchical_memory_limit (\d+)$", _text(stat), re.M)
    except FileNotFoundError:
        return None
    limit = int(match[1]) if match else V1_UNLIMITED
    return limit if limit < V1_UNLIMITED else None


def tightest_limit(place: Place) -> tuple[int, Path | None] | None:
    """The lowest memory limit over the group and its ancestors, and the directory that states it;
    no directory where that ancestor is not visible from here."""
    found: list[tuple[int, Path | None]] = []
    for level in place.levels:
        name = "memory.limit_in_bytes" if place.version == "v1" else "memory.max"
        try:
            limit = _limit(level / name)
        except FileNotFoundError:
            # v2 has no such file in the root group and where the controller is switched off.
            if place.version == "v1":
                raise
            continue
        if limit is not None:
            found.append((limit, level))
    if place.version == "v1":
        limit = _hierarchical_limit(place.levels[0] / "memory.stat")
        if limit is not None:
            found.append((limit, None))
    return min(found, key=lambda pair: pair[0], default=None)


def _usage(place: Place, level: Path) -> Fact:
    name = "memory.usage_in_bytes" if place.version == "v1" else "memory.current"
    return size(_number(level / name))


MEMORY_KEYS = (
    "cgroup_memory_version",
    "cgroup_directory",
    "memory_limit_bytes",
    "memory_limit_directory",
    "memory_usage_bytes",
)


def cgroup_facts(root: Path = ROOT) -> Section:
    try:
        groups = Cgroups(root)
    except OSError as error:
        keys = ("cgroup_version", *MEMORY_KEYS, "pressure_cgroup")
        return dict.fromkeys(keys, unknown(why(error)))
    memory = dict(zip(MEMORY_KEYS, _memory(groups), strict=True))
    version = known(groups.version())
    return {"cgroup_version": version, **memory, "pressure_cgroup": _pressure(groups)}


def _memory(groups: Cgroups) -> tuple[Fact, ...]:
    """The facts of MEMORY_KEYS, in that order."""
    version = groups.memory_version()
    if version is None:
        return _without_controller(groups)
    try:
        place = groups.place(version)
    except (OSError, ValueError) as error:
        return (known(version), *[unknown(why(error))] * 4)
    level = place.levels[0]
    limit, stated_by = Fact(None, "unlimited"), Fact(None, "none (unlimited)")
    try:
        tightest = tightest_limit(place)
    except (OSError, ValueError) as error:
        limit = stated_by = unknown(why(error))
    else:
        if tightest is not None:
            limit, stated_by = size(tightest[0]), unknown(f"above {place.levels[-1]}")
            if tightest[1] is not None:
                level, stated_by = tightest[1], known(str(tightest[1]))
    # What counts against a limit is the usage of the group that states it, not of this one.
    usage = guarded(lambda: _usage(place, level))
    return (known(version), known(str(place.levels[0])), limit, stated_by, usage)


def _without_controller(groups: Cgroups) -> tuple[Fact, ...]:
    """No group accounts for memory: is that how the host is set up, or is it hidden from here?"""
    if groups.mounts and not groups.paths:
        return (unknown("no /proc/self/cgroup"),) * len(MEMORY_KEYS)
    if groups.paths and not groups.mounts:
        return (unknown("no control-group file system is mounted"),) * len(MEMORY_KEYS)
    reason = "the memory controller is off" if groups.mounts else "no control groups"
    words = ("none", "none", "unlimited", "none", "not counted")
    return tuple(Fact(None, f"{word} ({reason})") for word in words)


def _readable(path: Path) -> Fact:
    # The file can exist and yet refuse to be read, where the kernel was started with psi=0.
    try:
        _text(path)
    except OSError as error:
        return no(why(error))
    return yes(str(path))


def _pressure(groups: Cgroups) -> Fact:
    """Only v2 groups account for pressure, also on a host whose memory controller is v1."""
    try:
        return _readable(groups.place("v2").levels[0] / "memory.pressure")
    except (OSError, ValueError) as error:
        return no(why(error))


# --- the rest of the host -------------------------------------------------------------------------


def _meminfo(root: Path, name: str) -> Fact:
    path = root / "proc/meminfo"
    match = re.search(rf"^{name}:\s*(\d+) kB$", _text(path), re.M)
    if match is None:
        raise ValueError(f"{path} has no {name}")
    return size(int(match[1]) * 1024)


def host_memory(root: Path = ROOT) -> Section:
    names = {
        "total_bytes": "MemTotal",
        "available_bytes": "MemAvailable",
        "swap_total_bytes": "SwapTotal",
        "swap_free_bytes": "SwapFree",
    }
    facts = {key: guarded(partial(_meminfo, root, name)) for key, name in names.items()}
    pressure = _readable(root / "proc/pressure/memory")
    return {**facts, **cgroup_facts(root), "pressure_host": pressure}


def _chosen(path: Path) -> Fact:
    """The bracketed one of "always [madvise] never"."""
    text = _text(path)
    match = re.search(r"\[(\w+)\]", text)
    if match is None:
        raise ValueError(f"{path} says {text.strip()[:40]!r}")
    return Fact(match[1], text.strip())


def _overcommit(path: Path) -> Fact:
    mode = _number(path)
    return Fact(mode, f"{mode} ({OVERCOMMIT_MODES.get(mode, 'not a known mode')})")


def _populate_read(path: Path) -> Fact:
    release = _text(path).strip()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        raise ValueError(f"{path} says {release[:40]!r}")
    if (int(match[1]), int(match[2])) >= POPULATE_READ_SINCE:
        return yes()
    return no(f"kernel {release} is older than 5.14")


def _rlimit(which: int) -> Fact:
    soft, _ = resource.getrlimit(which)
    return Fact(None, "unlimited") if soft == resource.RLIM_INFINITY else size(soft)


def kernel(root: Path = ROOT) -> Section:
    vm, thp = root / "proc/sys/vm", root / "sys/kernel/mm/transparent_hugepage"
    return {
        "page_size_bytes": size(os.sysconf("SC_PAGE_SIZE")),
        "huge_page_size_bytes": guarded(lambda: _meminfo(root, "Hugepagesize")),
        "transparent_huge_pages": guarded(lambda: _chosen(thp / "enabled")),
        "transparent_huge_pages_shmem": guarded(lambda: _chosen(thp / "shmem_enabled")),
        "max_map_count": guarded(lambda: known(_number(vm / "max_map_count"))),
        "overcommit_mode": guarded(lambda: _overcommit(vm / "overcommit_memory")),
        "madv_populate_read": guarded(lambda: _populate_read(root / "proc/sys/kernel/osrelease")),
        "rlimit_as_bytes": _rlimit(resource.RLIMIT_AS),
        "rlimit_data_bytes": _rlimit(resource.RLIMIT_DATA),
        "rlimit_memlock_bytes": _rlimit(resource.RLIMIT_MEMLOCK),
    }
