"""The native sampler: its thread from start to stop, what it records, and its watermarks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import memtools
from memtools import _core
from memtools._record.record import UNKNOWN
from tests.kit.children import wait_for
from tests.kit.threadnames import thread_names
from tests.monitor.samplercases import columns
from tests.monitor.test_probe import plant_limit

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


def test_a_second_start_is_refused_and_a_second_stop_is_not() -> None:
    sampler = _core.Sampler(MS)
    sampler.stop()
    sampler.start()
    with pytest.raises(RuntimeError, match="it runs already; stop"):
        sampler.start()
    wait_for(lambda: threads() == ["memtools"])
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


def test_a_limit_that_changes_at_run_time_is_seen(tmp_path: Path) -> None:
    plant_limit(tmp_path, str(3 * MIB))
    sampler = _core.Sampler(MS, root=str(tmp_path), limit=4 * MIB - 1)
    assert sampler.limit() == (3 * MIB, "cgroup")
    sampler.start()
    plant_limit(tmp_path, str(2 * MIB))
    wait_for(lambda: sampler.limit() == (2 * MIB, "cgroup"))
    plant_limit(tmp_path, "max")
    wait_for(lambda: sampler.limit() == (4 * MIB - 1, "given"))
    sampler.stop()


def test_it_goes_on_where_nothing_can_be_read(tmp_path: Path) -> None:
    sampler = _core.Sampler(MS, root=str(tmp_path))
    sampler.watch(0.1)
    sampler.start()
    wait_for(lambda: sampler.samples > 5)
    latest = sampler.latest()
    assert latest is not None
    assert [latest.rss, latest.available, latest.cgroup_limit, latest.children] == [None] * 4
    assert (sampler.limit(), sampler.used(), sampler.peak(), sampler.step()) == (None,) * 3 + (0,)
    sampler.stop()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((0,), r"interval_ns must be 100000 \(0.1 ms\) to 3600000000000 \(1 hour\), got 0"),
        ((99_999,), "got 99999"),
        ((3600 * 10**9 + 1,), "got 3600000000001"),
        ((MS, None, "/", 9), "devices must be 0 to 8, got 9"),
        ((MS, None, "/", -1), "devices must be 0 to 8, got -1"),
        ((MS, None, "/", 0, 0), "limit must be a number of bytes above 0, got 0"),
        ((MS, None, "/", 0, -5), "limit must be a number of bytes above 0, got -5"),
        ((MS, None, "/", 0, 2**64), "above 0, got 18446744073709551616"),
        ((MS, None, "/", 0, 2**64 - 2), "limit must be a number of bytes above 0"),
        ((MS, None, "/" + "x" * 5000), r"Sampler\(\): root has 5001 bytes, at most 2048"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments: tuple[Any, ...], wanted: str) -> None:
    with pytest.raises(ValueError, match=wanted):
        _core.Sampler(*arguments)


def test_things_of_a_wrong_type_are_refused(writer: _core.RecordWriter) -> None:
    with pytest.raises(TypeError, match="a RecordWriter is needed, got str"):
        _core.Sampler(MS, "run.mem")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="integer"):
        _core.Sampler(MS, limit="1 GiB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="14 columns, a sampler of 2 devices writes 22; make one"):
        _core.Sampler(MS, writer, devices=2)
    sampler = _core.Sampler(MS, writer)
    for fraction in (0, -1, 1.01, float("nan")):
        with pytest.raises(ValueError, match="above 0 and at most 1, got"):
            sampler.watch(fraction)
    for mark in (0, -1, 32, 2**40):
        with pytest.raises(ValueError, match=f"there is no watermark {mark}"):
            sampler.unwatch(mark)
    with pytest.raises(ValueError, match="n must be from 0 to 281474976710656, got -1"):
        sampler.step(-1)
    for _ in range(32):
        sampler.watch(1)
    with pytest.raises(RuntimeError, match="32 watermarks are set already"):
        sampler.watch(1)
    assert (sampler.step_count, sampler.running) == (0, False)
