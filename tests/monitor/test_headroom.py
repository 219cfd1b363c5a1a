"""MemoryMonitor.headroom() and the peak of one passage of a phase."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memtools import Headroom, MemoryMonitor, _core
from memtools._base import reclaim
from memtools._monitor.readings import Readings
from tests.kit.fakedevice import cuda
from tests.kit.madeupdevice import Program, device_program
from tests.monitor.root import LIMIT, MIB, Root, root, settle

__all__ = ["cuda", "device_program", "root"]
PROJECT = Path(__file__).resolve().parents[2]


def test_the_host_is_what_the_monitor_says_with_the_own_part_read_anew(root: Root) -> None:
    with MemoryMonitor(interval_ms=1000, device="cpu", leaks=False) as monitor:
        settle(monitor, root)
        root.use(0.5)  # the thread has not seen it, the call has
        (room,) = monitor.headroom()
        assert type(room) is Headroom
        assert (room.memory, room.limit_bytes, room.own_bytes) == ("host", LIMIT, root.used)
        assert room.used_bytes == root.used
        assert room.left_bytes == LIMIT - root.used
        assert "cgroup v2 limit 1000.0 MiB" in room.limit_source
        assert str(room).startswith("host: 500.0 MiB of 1000.0 MiB used (50.0%; cgroup v2 limit")


def test_it_works_before_the_start_and_after_the_end(root: Root) -> None:
    monitor = MemoryMonitor(device="cpu", leaks=False, limit=400 * MIB)
    assert monitor.headroom()[0].limit_bytes == 400 * MIB
    assert monitor.headroom()[0].limit_source == "limit given, 400.0 MiB"
    with monitor:
        pass
    root.use(0.2)
    assert monitor.headroom()[0].own_bytes == root.used


def test_a_sample_that_comes_in_the_middle_of_a_reading_is_not_mixed_with_the_one_before() -> None:
    class Samples:
        """A new sample comes after the first time that the latest one was asked for."""

        asked = 0

        def latest(self) -> Any:
            self.asked += 1
            missing: dict[str, Any] = dict.fromkeys(_core.Probe().read().__match_args__)
            rss, time_ns = (100, 1) if self.asked == 1 else (700, 2)
            return SimpleNamespace(**missing | {"rss": rss, "time_ns": time_ns})

        def used(self) -> int:
            return 800  # of the new sample: 100 of others

        def limit(self) -> tuple[int, str]:
            return 1000, "given"

        def swap_rise(self) -> None:
            return None

    readings = Readings(Samples(), SimpleNamespace(rss=lambda: 700), ())  # type: ignore[arg-type]
    (room,) = readings.headroom()
    assert (room.used_bytes, room.own_bytes) == (800, 700)


def test_what_is_above_the_limit_leaves_nothing(root: Root) -> None:
    root.use(0.5)
    (room,) = MemoryMonitor(device="cpu", leaks=False, limit=100 * MIB).headroom()
    assert room.left_bytes == 0


LIMITED = """
import json, resource
import memtools
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.RLIM_INFINITY))
monitor = memtools.MemoryMonitor(device="cpu", leaks=False)
before = {room.memory: room for room in monitor.headroom()}
kept = bytearray(64 << 20)
after = {room.memory: room for room in monitor.headroom()}
one, other = before["RLIMIT_DATA"], after["RLIMIT_DATA"]
print(json.dumps([one.limit_bytes, other.used_bytes - one.used_bytes,
                  other.own_bytes - one.own_bytes, sorted(before)]))
"""


@pytest.mark.slow
def test_a_limit_of_the_process_is_a_memory_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], cwd=PROJECT, capture_output=True,
                          text=True, timeout=60, check=True)  # fmt: skip
    limit, counted, own, names = json.loads(done.stdout)
    assert limit == 4 << 30
    assert 63 << 20 <= counted <= 66 << 20
    assert 63 << 20 <= own <= 66 << 20
    assert names == ["RLIMIT_DATA", "host"]


@pytest.mark.slow
def test_a_device_counts_what_is_allocated_and_what_others_hold(device_program: Program) -> None:
    device_program("""
        monitor = MemoryMonitor(device="cuda", leaks=False)
        with monitor:
            assert [room.memory for room in monitor.headroom()] == ["host"]
            device.begin()
            device.hold(10 * GIB, cached=5 * GIB, others=3 * GIB)
            host, room = monitor.headroom()
            assert (room.memory, room.used_bytes, room.own_bytes) == ("cuda:0", 13 * GIB, 10 * GIB)
            assert (room.limit_bytes, room.left_bytes) == (40 * GIB, 27 * GIB)
            with monitor.phase("a") as phase:
                device.hold(20 * GIB)
                device.hold(1 * GIB)
            assert phase.device_peak_bytes == {0: 20 * GIB}, phase.device_peak_bytes
    """)


def test_a_phase_has_the_peak_of_its_last_passage(tmp_path: Path) -> None:
    for log in (None, tmp_path / "run.mem"):
        monitor = MemoryMonitor(log=log, device="cpu", leaks=False)
        phase = monitor.phase("a")
        with phase:
            pass
        assert phase.peak_bytes is None  # it does not run
        with monitor:
            with phase:
                kept = bytearray(96 * MIB)
                del kept
            high = phase.peak_bytes
            with phase:
                pass
            low = phase.peak_bytes
        assert high is not None
        assert low is not None
        assert high - low > 80 * MIB
        assert phase.device_peak_bytes == {}


def test_parts_that_offer_to_give_back_are_asked_as_long_as_they_live() -> None:
    class Part:
        asked = 0

        def trim(self) -> int:
            Part.asked += 1
            return 5

    class Broken:
        def trim(self) -> int:
            raise RuntimeError("closed")

    parts = [Broken(), Part()]
    for part in parts:
        reclaim.offer(part)
    assert reclaim.ask() >= 5
    del part
    parts.clear()
    reclaim.ask()
    assert Part.asked == 1
