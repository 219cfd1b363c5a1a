"""host_memory(): what this process and its job have of the host's memory, and what they may have.

process   this process alone
job       it, its descendants and their shared memory: each page once, swapped out or not
machine   all processes
"""

from __future__ import annotations

from dataclasses import dataclass

from memtools import _core
from memtools._base import devices, limits
from memtools._base.size import format_bytes

LEAST_SAID = 64 * 2**10  # Fewer bytes of a job beside its process may be memtools' own.
SOURCE_NS = 1_000_000_000  # The words about the source of the limit are kept for so long.


@dataclass(frozen=True)
class HostMemory:
    """The host's memory at one moment, in bytes; None for unknown figures."""

    #: resident memory of this process
    rss: int | None
    #: the part of `rss` that is neither of files nor shared
    private: int | None
    #: swapped-out memory of this process
    swap: int | None
    #: what counts against the container's limit, less file cache that is easily dropped
    cgroup_used: int | None
    #: the lowest limit of the control group and its ancestors
    cgroup_limit: int | None
    #: what the machine can hand out without swapping
    available: int | None
    #: the machine's memory
    total: int | None
    #: share of the last 10 s, 0 to 100, in which some task of the control group waited for memory
    pressure: float | None
    #: where the limit comes from, like "cgroup v2 limit 8.00 GiB (/sys/fs/cgroup/a)"
    limit_source: str
    #: `rss`, with pages that are mapped several times counted once
    process: int | None = None
    #: `process`, private bytes of all descendants and `shm`, each page once, with swapped-out pages
    job: int | None = None
    #: the job's files in /dev/shm and nameless shared memory
    shm: int | None = None
    #: swapped-out memory of the job
    job_swap: int | None = None
    #: pinned for copies to devices, in use or kept by torch's allocator; None until the program
    #: uses CUDA
    pinned: int | None = None

    @property
    def percent(self) -> float | None:
        """The use in percent of the container's limit, or of the machine's memory without one. May
        be above 100."""
        lowest = limits.lowest_limit(cgroup=self.cgroup_limit, machine=self.total)
        if lowest is not None and lowest[1] == "cgroup":
            return percent(self.cgroup_used, self.cgroup_limit)
        if self.available is None or self.total is None:
            return None
        return percent(self.total - self.available, self.total)

    def __str__(self) -> str:
        process = "unknown" if self.process is None else f"{self.process / 2**30:.2f} GB"
        percent = "unknown" if self.percent is None else f"{self.percent:.1f}%"
        lines = [f"CPU: {process} (System: {percent})"]
        if self.process is not None:
            lines.append(f"  Process: {format_bytes(self.process)}")
        lines += job_lines(self.process, self.job)
        if self.cgroup_limit is not None and self.cgroup_used is not None:
            used, limit = format_bytes(self.cgroup_used), format_bytes(self.cgroup_limit)
            lines.append(f"  Container: {used} of {limit} used")
        if self.available is not None and self.total is not None:
            used, total = format_bytes(self.total - self.available), format_bytes(self.total)
            lines.append(f"  Machine: {used} of {total} used")
        return "\n".join(lines)


def job_lines(process: int | None, job: int | None) -> list[str]:
    """The bytes of the job, and which those are, where they are more than those of the process."""
    if process is None or job is None or abs(job - process) < LEAST_SAID:
        return []
    return [f"  Job: {format_bytes(job)}, with workers and shared memory"]


def percent(part: int | None, whole: int | None) -> float | None:
    """None where one of them is not known."""
    if part is None or whole is None:
        return None
    return 100.0 * part / whole if whole else 100.0


def limit_source(probe: _core.Probe, total: int | None) -> str:
    """Say where the memory limit comes from, or that there is none, or why it is unknown."""
    version, limit, directory, above, why, _, _ = probe.source()
    if limit is None:
        return f"unknown ({why})"
    if limit == -1:
        machine = "of unknown size" if total is None else format_bytes(total)
        return f"no cgroup limit; machine {machine}"
    where = f"above {directory}" if above else directory
    return f"cgroup v{version} limit {format_bytes(limit)} ({where})"


def high_water(root: str = "/") -> int | None:
    """The most that this process has had resident, since it began or since a monitor's phase has
    reset the kernel's mark."""
    return limits.sizes_of_process(root).get("VmHWM")


class _Reader:
    """Keeps the files of one root open, and the words about its limit while that stays the same."""

    __slots__ = ("_of", "_probe", "_until", "_words")

    def __init__(self, root: str) -> None:
        self._probe = _core.Probe(root, True)
        self._of: tuple[int | None, int | None] = (None, None)
        self._until, self._words = 0, ""

    def read(self) -> tuple[_core.Sample, str]:
        sample = self._probe.host()
        of = (sample.cgroup_limit, sample.total)
        if of != self._of or sample.time_ns >= self._until:
            self._words = limit_source(self._probe, sample.total)
            self._of, self._until = of, sample.time_ns + SOURCE_NS
        return sample, self._words


_readers: dict[str, _Reader] = {}  # of the machine's own root, from the first call on


def host_memory(root: str = "/") -> HostMemory:
    """Read the memory of this process and its job, the container's limit and the machine's memory.

    Takes about 30 us, without torch. Descendants and shared memory are read again when their
    reading is 20 times as old as it took, the control group at most once a second.

    Args:
        root: the folder with `proc` and `sys`.
    """
    if root == "/":
        s, words = (_readers.get(root) or _readers.setdefault(root, _Reader(root))).read()
    else:
        s, words = _Reader(root).read()
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
        limit_source=words,
        process=s.process,
        job=s.job,
        shm=s.shm,
        job_swap=s.job_swap,
        pinned=devices.pinned(),
    )
