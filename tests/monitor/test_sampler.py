"""The native sampler: its thread from start to stop, what it records, and its watermarks."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

import memtools
from memtools import _core
from memtools._record.record import UNKNOWN
from tests.kit.children import wait_for
from tests.kit.threadnames import thread_names
from tests.monitor.samplercases import columns

MS, MIB = 10**6, 2**20


def threads() -> list[str]:
    """Names of this process's sampling threads."""
    return [name for name in thread_names() if name == "memtools"]


def agrees_with_a_reading_now(sampler: _core.Sampler) -> bool:
    latest = sampler.latest()
    assert latest is not None
    assert latest.rss is not None
    return abs(latest.rss - (_core.Probe().rss() or 0)) < MIB


@pytest.fixture
def writer(tmp_path: Path) -> _core.RecordWriter:
    return _core.RecordWriter(tmp_path / "run.mem", columns())


def test_it_samples_on_a_thread_of_its_own_until_it_is_stopped() -> None:
    sampler = _core.Sampler(MS)
    children = len(psutil.Process().children(recursive=True))  # other tests may leave a fork server
    assert (sampler.running, sampler.samples, sampler.latest()) == (False, 0, None)
    sampler.start()
    wait_for(lambda: sampler.samples > 20)
    assert sampler.running
    assert threads() == ["memtools"]
    assert sampler.cpu_ns > 0
    # Under a sanitiser memory comes and goes by itself: the two readings agree as long as it rests.
    wait_for(lambda: agrees_with_a_reading_now(sampler))
    sampler.stop()
    assert (sampler.running, threads()) == (False, [])
    taken = sampler.samples
    latest = sampler.latest()
    assert latest is not None
    assert latest.heap_used is not None
    assert latest.children == children
    assert sampler.samples == taken


def test_stop_does_not_wait_for_the_interval() -> None:
    sampler = _core.Sampler(3600 * 1000 * MS)
    sampler.start()
    wait_for(lambda: sampler.samples > 0)
    began = time.monotonic()
    sampler.stop()
    assert (time.monotonic() - began) * 1e9 < sampler.interval_ns, "an hour"
    assert sampler.samples == 2, "one at the start, one at the stop"


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
