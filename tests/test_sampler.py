"""The native sampler: its thread from start to stop, what it records, and its watermarks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import memtools
from memtools import _core
from memtools._record import UNKNOWN
from tests.samplercases import columns

MS, MIB = 10**6, 2**20


def threads() -> list[str]:
    """Names of this process's sampling threads."""
    tasks = Path("/proc/self/task")
    return [
        n for n in ((t / "comm").read_text().strip() for t in tasks.iterdir()) if n == "memtools"
    ]


def wait_for(done: Callable[[], bool], seconds: float = 30) -> None:
    """For what another thread does: fails when it never does."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def writer(tmp_path: Path) -> _core.RecordWriter:
    return _core.RecordWriter(tmp_path / "run.mem", columns())


def test_it_samples_on_a_thread_of_its_own_until_it_is_stopped() -> None:
    sampler = _core.Sampler(MS)
    assert (sampler.running, sampler.samples, sampler.latest()) == (False, 0, None)
    sampler.start()
    wait_for(lambda: sampler.samples > 20)
    assert sampler.running
    assert threads() == ["memtools"]
    assert sampler.cpu_ns > 0
    sampler.stop()
    assert (sampler.running, threads()) == (False, [])
    taken = sampler.samples
    latest = sampler.latest()
    assert latest is not None
    assert latest.rss is not None
    assert abs(latest.rss - (_core.Probe().rss() or 0)) < 16 * MIB
    assert latest.heap_used
    assert latest.children == 0
    assert sampler.samples == taken


def test_stop_does_not_wait_for_the_interval() -> None:
    sampler = _core.Sampler(3600 * 1000 * MS)
    sampler.start()
    wait_for(lambda: sampler.samples > 0)
    began = time.monotonic()
    sampler.stop()
    assert time.monotonic() - began < 60
    assert sampler.samples == 2, "one at the start, one at the stop"


def test_a_second_start_is_refused_and_a_second_stop_is_not() -> None:
    sampler = _core.Sampler(MS)
    sampler.stop()
    sampler.start()
    with pytest.raises(RuntimeError, match="it runs already; stop"):
        sampler.start()
    assert threads() == ["memtools"]
    sampler.stop()
    sampler.stop()
    sampler.start()
    assert sampler.running
    sampler.stop()


def test_what_it_records(tmp_path: Path, writer: _core.RecordWriter) -> None:
    sampler = _core.Sampler(MS, writer)
    sampler.start()
    for _ in range(3):
        seen = sampler.samples
        sampler.step()
        wait_for(lambda seen=seen: sampler.samples > seen + 3)  # type: ignore[misc]
    sampler.stop()
    writer.close()
    record = memtools.read_record(tmp_path / "run.mem")
    samples = record.samples
    assert list(samples.values) == [name for name, _ in columns()]
    assert len(samples) == sampler.samples
    steps = list(samples.values["step"])
    assert steps == sorted(steps)
    assert {1, 2, 3} <= set(steps) <= {0, 1, 2, 3}
    assert UNKNOWN not in samples.values["rss"]
    heap = [value for value in samples.values["heap_used"] if value != UNKNOWN]
    assert 0 < len(heap) < len(samples), "read, but not with every sample"
    times = list(samples.time_ns)
    assert times == sorted(set(times))


def test_a_watermark_is_told_once_to_the_step_and_to_the_record(
    tmp_path: Path, writer: _core.RecordWriter
) -> None:
    sampler = _core.Sampler(MS, writer, limit=MIB)
    high, low = sampler.watch(0.9), sampler.watch(0.5)
    sampler.unwatch(low)
    assert (high, low) == (0, 1)
    assert sampler.limit() == (MIB, "given")
    sampler.start()
    wait_for(lambda: sampler.samples > 0)
    assert sampler.step() == 1 << high
    wait_for(lambda: sampler.samples > 5)
    assert sampler.step() == 0
    sampler.stop()
    writer.close()
    (event,) = memtools.read_record(tmp_path / "run.mem").events
    assert event.kind == "pressure"
    assert event.text.startswith("90.0 % of the limit passed: ")
    assert event.text.endswith(" of 1 MiB (given)")
    assert (sampler.peak() or 0) >= (sampler.used() or 0) > MIB
