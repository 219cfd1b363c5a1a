"""What a cleanup policy tells running monitors, and what reports make of it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from memtools import MemoryMonitor, read_record
from memtools._cleanup import engine
from memtools._cleanup.actions import Change, Outcome
from memtools._cleanup.engine import Events
from memtools._record.figures import figures_of
from tests.cleanup.policycases import gc_as_found, quiet  # noqa: F401 - a fixture

MIB = 2**20


def texts(path: Path) -> list[str]:
    return [event.text for event in read_record(path).events if event.kind == "cleanup"]


def outcome(ns: int = 2_000_000, host: int = 0, device: int = 0, note: str = "") -> Outcome:
    changes = Change(host, 0, 1 << 30), Change(device, 0, 1 << 30)
    return Outcome(ns, *changes, note, None, None)


def monitor(path: Path) -> MemoryMonitor:
    return MemoryMonitor(log=path, device="cpu", leaks=False)


@pytest.mark.slow
def test_every_running_monitor_is_told(tmp_path: Path):
    policy = quiet(gc_every=2)
    with monitor(tmp_path / "a.mem"), monitor(tmp_path / "b.mem"):
        policy.step(2)
    policy.step(2)
    for name in ("a.mem", "b.mem"):
        (text,) = texts(tmp_path / name)
        assert text.startswith("gc (")
        assert "objects, cadence)" in text
        (event,) = [e for e in read_record(tmp_path / name).events if e.kind == "cleanup"]
        assert event.duration_ns > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic time, as the test sets it."""
    now = [10**12]
    own = SimpleNamespace(monotonic_ns=lambda: now[0], perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr(engine, "time", own)
    return now


def test_the_text_is_what_reports_read(tmp_path: Path, clock: list[int]):
    path = tmp_path / "run.mem"
    with monitor(path):
        events = Events()
        events.add("gc", outcome(host=4 * MIB, note="1,200 objects"), "cadence, host pressure")
        events.add("empty_cache", outcome(ns=1_500_000, device=8 * MIB), "fragmented")
        events.add("drop: a (small) one", outcome(), "")
    assert texts(path) == [
        "gc (1,200 objects, cadence, host pressure) 2.0 ms: freed 4.0 MiB on the host",
        "empty_cache (fragmented) 1.5 ms: freed 0 B on the host, 8.0 MiB on the devices",
        "drop: a (small) one 2.0 ms: freed 0 B on the host",
    ]
    cleanups = figures_of(read_record(path)).cleanups
    read = [(each.what, each.seconds, each.freed_bytes) for each in cleanups]
    assert read == [
        ("drop: a (small) one", 0.002, 0),
        ("empty_cache", 0.0015, 8 * MIB),
        ("gc", 0.002, 4 * MIB),
    ]


def test_what_comes_often_is_added_up(tmp_path: Path, clock: list[int]):
    path = tmp_path / "run.mem"
    with monitor(path):
        events = Events()
        for _ in range(10):
            events.add("gc_young", outcome(host=MIB, note="3 objects"), "cadence")
            clock[0] += 100_000_000
        events.add("gc_young", outcome(host=MIB, note="3 objects"), "cadence")
        events.add("gc_young", outcome(host=MIB, note="3 objects"), "cadence")
        assert len(texts(path)) == 2
        events.flush()
        events.flush()
    assert texts(path) == [
        "gc_young (3 objects, cadence) 2.0 ms: freed 1.0 MiB on the host",
        "gc_young (cadence, 10 times) 20.0 ms: freed 10.0 MiB on the host",
        "gc_young (3 objects, cadence) 2.0 ms: freed 1.0 MiB on the host",
    ]
    (sum_,) = figures_of(read_record(path)).cleanups
    assert sum_.seconds == pytest.approx(0.024)


def test_days_of_it_leave_the_record_its_other_events(tmp_path: Path, clock: list[int]):
    """A record keeps 1,024 events."""
    path = tmp_path / "run.mem"
    with monitor(path):
        events = Events()
        for _ in range(7 * 24 * 360):
            events.add("gc_young", outcome(), "cadence")
            clock[0] += 10_000_000_000
        events.flush()
    kinds = [event.kind for event in read_record(path).events]
    assert 150 <= kinds.count("cleanup") <= 300
    assert kinds[0] == "start"


@pytest.mark.slow
def test_the_economics_are_in_the_facts_of_the_record(tmp_path: Path):
    path = tmp_path / "run.mem"
    policy = quiet(gc_every=1, trim_every=2)
    with monitor(path), policy:
        for _ in range(4):
            policy.step()
    found = {one.what: one for one in figures_of(read_record(path)).cleanups}
    report = policy.report()
    assert set(found) == {"freeze", "gc", "malloc_trim"}
    assert found["gc"].seconds == pytest.approx(report["gc"].total_ms / 1e3, abs=1e-6)
    assert found["gc"].freed_bytes == pytest.approx(report["gc"].host_freed_bytes, rel=0.1, abs=2e5)
    assert found["malloc_trim"].seconds == pytest.approx(report["trim"].total_ms / 1e3, abs=1e-6)
