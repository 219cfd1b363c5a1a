"""A made-up /proc and control group whose memory a test sets, for MemoryMonitor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtools import MemoryMonitor, Record
from tests.kit.children import wait_for

MIB = 2**20
LIMIT = 1000 * MIB


def told(record: Record) -> list[str]:
    """The kinds of a record's events but for those of what the kernel had counted before."""
    return [event.kind for event in record.events if event.kind not in ("counters", "shm_room")]


class Root:
    """`used` of `LIMIT` bytes in the container, the same for the process itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.group = path / "sys/fs/cgroup"
        self.group.mkdir(parents=True)
        (path / "proc/self").mkdir(parents=True)
        mount = f"30 20 0:26 / {'/sys/fs/cgroup'} rw - cgroup2 cgroup2 rw\n"
        (path / "proc/self/mountinfo").write_text(mount)
        (path / "proc/self/cgroup").write_text("0::/\n")
        (path / "proc/meminfo").write_text(
            "MemTotal: 8388608 kB\nMemFree: 4194304 kB\nMemAvailable: 4194304 kB\nSwapTotal: 0 kB\n"
        )
        (self.group / "memory.max").write_text(f"{LIMIT}\n")
        (self.group / "memory.stat").write_text("inactive_file 0\n")
        boot = path / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text("a-boot\n")
        self.count()
        self.stall(0)
        self.use(0.1)

    def count(self, **counters: int) -> None:
        """What the kernel has counted in the group: memory.events, zeros but for these."""
        names = ("low", "high", "max", "oom", "oom_kill", "oom_group_kill")
        lines = "".join(f"{name} {counters.get(name, 0)}\n" for name in names)
        self._put(self.group / "memory.events", lines)

    def use(self, share: float) -> None:
        pages = int(share * LIMIT) // 4096
        self.used = pages * 4096
        self._put(self.group / "memory.current", f"{self.used}\n")
        self._put(self.path / "proc/self/statm", f"{pages} {pages} 0 0 0 0 0\n")

    def stall(self, percent: float) -> None:
        self.stalled = percent
        text = f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=0\n"
        self._put(self.group / "memory.pressure", text)

    def _put(self, path: Path, text: str) -> None:
        """In place: a probe keeps its files open."""
        with path.open("r+" if path.exists() else "w") as file:
            file.write(text)
            file.truncate()


def settle(monitor: MemoryMonitor, root: Root) -> None:
    """Until the sampler has seen what was set."""
    sampler = monitor._last.sampler  # type: ignore[union-attr]

    def seen() -> bool:
        latest = sampler.latest()
        if latest is None or latest.rss != root.used:  # a sample between two files of use()
            return False
        return (sampler.used(), latest.pressure) == (root.used, round(100 * root.stalled))

    wait_for(seen)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """Every MemoryMonitor of the test reads memory here."""
    made = Root(tmp_path / "root")
    monkeypatch.setattr(MemoryMonitor, "_root", str(made.path))
    return made
