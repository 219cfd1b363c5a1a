"""What a monitor says: summary, metrics, and the surface of hand-made monitors."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memtools
from memtools import MemoryMonitor, read_record
from memtools._base.devices import DeviceMemory
from memtools._monitor.readings import (
    HostTiers,
    format_stats,
    host_lines,
    memory_stats,
)
from tests.kit.fakedevice import TOTAL, FakeCuda, cuda
from tests.monitor.root import LIMIT, Root, root, settle

__all__ = ["cuda", "root"]
GIB = 2**30
MIB = 2**20


def monitor(**options: Any) -> MemoryMonitor:
    return MemoryMonitor(**{"interval_ms": 1, "device": "cpu", **options})


def host(rss: int, used: int, limit: int) -> HostTiers:
    return HostTiers(rss, used, limit, None, None, None)


def test_the_summary_of_the_design() -> None:
    gpu = DeviceMemory(0, int(11.10 * GIB), 12 * GIB, 11 * GIB, int(23.63 * GIB), 0)
    stats = memory_stats(host(int(0.86 * GIB), 378, 1000), [gpu])
    assert format_stats(stats) == (
        "Memory Usage:\n  GPU: 11.10/23.63 GB (47.0%), reserved 12.00 GB\n"
        "  CPU: 0.86 GB (System: 37.8%)"
    )


def test_several_devices_and_what_is_not_known() -> None:
    one = DeviceMemory(0, GIB, GIB, GIB, 4 * GIB, 0)
    two = DeviceMemory(1, 2 * GIB, GIB, GIB, None, 0)
    none = DeviceMemory(2, None, None, None, None, None)
    stats = memory_stats(HostTiers(None, None, None, None, None, None), [one, two, none])
    assert format_stats(stats) == (
        "Memory Usage:\n  GPU: 1.00/4.00 GB (25.0%), reserved 1.00 GB\n"
        "  GPU1: 2.00 GB, reserved 1.00 GB\n"
        "  CPU: unknown (System: unknown)"
    )


def test_before_the_first_start_memory_is_read_and_nothing_else_known(root: Root) -> None:
    m = monitor()
    (root.path / "proc/self/status").write_text("VmPeak:  9 kB\nVmHWM:\t  131072 kB\n")
    assert m.summary() == (
        "Memory Usage:\n  CPU: 0.10 GB (System: 10.0%)\n"
        "  Process: 100.0 MiB, peak at least 128.0 MiB\n"
        "  Container: 100.0 MiB of 1000.0 MiB used (10.0%)"
    )
    stats = m.log_memory()
    assert (stats["step"], stats["cpu_memory_process_gb"]) == (0, root.used / GIB)
    assert (stats["cpu_memory_percent"], stats["peak_cpu_memory_gb"]) == (10.0, 0.125)
    assert (m.metrics(), m.phases(), m.findings()) == ({}, [], ())
    assert m.overhead == (0.0, 0.0)
    assert (m.samples_taken, m.step_count, m.running) == (0, 0, False)
    assert m.get_peak_memory() == {"cpu_peak_gb": 0.125, "peak_cpu_memory_gb": 0.125}
    (root.path / "proc/self/status").unlink()
    assert m.get_peak_memory() == {"cpu_peak_gb": None, "peak_cpu_memory_gb": None}
    m.step()
    m.mark("nobody reads it")
    m.stop()
    assert repr(m) == "MemoryMonitor(not started, 0 steps)"


def test_percent_is_of_the_containers_limit(root: Root) -> None:
    with monitor() as m:
        root.use(0.378)
        settle(m, root)
        assert m.summary() == (
            "Memory Usage:\n  CPU: 0.37 GB (System: 37.8%)\n"
            "  Process: 378.0 MiB, peak at least 378.0 MiB\n"
            "  Container: 378.0 MiB of 1000.0 MiB used (37.8%), peak 378.0 MiB"
        )
        with m.phase("train"):
            pass
        m.step(7)
        assert "\nPhases:\n  train: 1 time, 0.0" in m.summary()
        assert repr(m) == "MemoryMonitor(running, 7 steps)"


def test_phases_of_low_peaks_are_left_out() -> None:
    with monitor() as m:
        for i in range(12):
            with m.phase(f"p{i}"):
                pass
    lines = m.summary().splitlines()
    assert sum(line.startswith("  p") for line in lines) == 8
    assert lines[-1] == "  and 4 of lower peaks"


HOST_KEYS = {"host_rss_bytes", "host_limit_bytes", "host_percent", "host_peak_bytes"}


def test_metrics(root: Root, cuda: FakeCuda) -> None:
    cuda.allocate(0, 3 * GIB)
    cuda.cached[0] = GIB
    with monitor(device="cuda") as m:
        root.use(0.25)
        root.stall(12.5)
        settle(m, root)
        few, all_of_them = m.metrics(), m.metrics(expert=True)
    assert len(few) <= 12
    assert all(key.startswith("memory/") and type(value) is float for key, value in few.items())
    assert {f"memory/{key}" for key in HOST_KEYS} - few.keys() <= {"memory/host_peak_bytes"}
    assert few["memory/host_percent"] == pytest.approx(25, abs=0.01)
    assert few["memory/host_limit_bytes"] == LIMIT
    assert few["memory/pressure_percent"] == 12.5
    assert few["memory/leak_bytes_per_step"] == 0
    assert "memory/steps_left" not in few
    assert few["memory/cuda0_allocated_bytes"] == 3 * GIB
    assert few["memory/cuda0_reserved_bytes"] == 4 * GIB
    assert few["memory/cuda0_free_bytes"] == TOTAL - 4 * GIB
    assert few.keys() < all_of_them.keys()
    assert all_of_them["memory/cuda1_total_bytes"] == TOTAL
    assert all_of_them["memory/samples"] > 0


def test_metrics_after_the_end_are_those_of_the_end(root: Root) -> None:
    with monitor() as m:
        root.use(0.6)
        settle(m, root)
        peak = m.get_peak_memory()
    root.use(0.1)
    assert m.metrics()["memory/host_percent"] == pytest.approx(60, abs=0.01)
    assert m.get_peak_memory().keys() == peak.keys()
    assert (m.samples_taken > 0, m.overhead[0] > 0) == (True, True)
    assert 0 < m.overhead[1] < 1


def test_log_memory_is_throttled(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memtools")
    with monitor() as m:
        stats = m.log_memory(3)
        m.log_memory(4)
        m.log_memory(5, force=True)
    assert [record.getMessage()[:7] for record in caplog.records] == ["step 3:", "step 5:"]
    assert "Memory Usage: CPU: 0.10 GB (System: 10.0%)" in caplog.text
    assert (stats["step"], stats["cpu_limit_gb"]) == (3, LIMIT / GIB)
    assert m.format_memory_stats(stats) == "Memory Usage:\n  CPU: 0.10 GB (System: 10.0%)"


def test_lines_of_log_memory_come_every_log_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memtools")
    m = monitor(log_interval=10)
    for step in (0, 7, 9, 12, 21, 22, 3, 4):  # the last two: another epoch counts anew
        m.log_memory(step)
    with m:
        m.step(13)
        m.log_memory()
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == ["step 0", "step 12", "step 22", "step 3", "step 13"]
    with pytest.raises(ValueError, match="log_interval must be at least 1, got 0"):
        monitor(log_interval=0)


@pytest.mark.parametrize("wrong", ["5", True, 1.5, [1]])
def test_a_step_that_is_no_int_is_refused_and_changes_nothing(wrong: object) -> None:
    name = type(wrong).__name__
    with pytest.raises(TypeError, match=f"log_interval must be an int, got {name}"):
        monitor(log_interval=wrong)
    m = monitor(log_interval=10)
    with pytest.raises(TypeError, match=f"step must be an int, got {name}"):
        m.log_memory(wrong)  # type: ignore[arg-type]
    assert m.log_memory()["step"] == 0
    assert m.log_memory(np.int64(3))["step"] == 3


def test_workers_and_a_given_limit_have_lines_of_their_own() -> None:
    tiers = HostTiers(900 * MIB, 600 * MIB, GIB, None, 200 * MIB, None, 400 * MIB, "given")
    assert host_lines(tiers, (500 * MIB, True), 700 * MIB) == [
        "  Process: 400.0 MiB, peak 500.0 MiB",
        "  Workers: 200.0 MiB",
        "  Limit: 600.0 MiB of 1.00 GiB used (58.6%), peak 700.0 MiB",
    ]
    assert memory_stats(tiers, [])["cpu_memory_process_gb"] == 400 / 1024
    assert "CPU: 0.39 GB" in format_stats(memory_stats(tiers, []))


def test_the_process_its_job_and_the_machine_are_told_apart() -> None:
    tiers = HostTiers(400 * MIB, 700 * MIB, GIB, None, 200 * MIB, None, 400 * MIB, "given",
                      job=700 * MIB, shm=60 * MIB, job_swap=40 * MIB, pinned=32 * MIB,
                      swap_rise=(30 * MIB, 20 * 10**9, 0))  # fmt: skip
    assert host_lines(tiers, (None, False), None) == [
        "  Process: 400.0 MiB",
        "  Pinned for devices: 32.0 MiB of it",
        "  Workers: 200.0 MiB",
        "  Shared memory: 60.0 MiB",
        "  Job: 700.0 MiB, with workers and shared memory",
        "  Swapped out: 40.0 MiB of it, +1.5 MiB/s in the last 20 s",
        "  Limit: 700.0 MiB of 1.00 GiB used (68.4%)",
    ]
    by_step = replace(tiers, swap_rise=(30 * MIB, 20 * 10**9, 60))
    assert "of it, +512.0 KiB/step in the last 20 s" in host_lines(by_step, (None, False), None)[5]
    few = replace(tiers, shm=4096, job=400 * MIB + 4096, job_swap=0, pinned=0, children=0)
    assert len(host_lines(few, (None, False), None)) == 2  # a page of memtools' own is not said


def plant(root: Root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root.path / name).parent.mkdir(parents=True, exist_ok=True)
        (root.path / name).write_text(text)


MEMINFO = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 9000 kB\nSwapFree: 0 kB\n"
ALONE = {"proc/meminfo": MEMINFO, "proc/self/task/1/children": "10",
         "proc/self/status": "VmSize: 1 kB\nVmSwap: 2048 kB\nRssShmem: 0 kB\n",
         "proc/10/statm": "4 2560 0 1 0 9 0\n", "proc/10/status": "VmSize: 1 kB\nVmSwap: 1024 kB\n",
         }  # fmt: skip


def test_what_workers_and_swap_have_is_in_the_summary_and_in_metrics(root: Root) -> None:
    plant(root, ALONE)
    with monitor() as m:
        settle(m, root)
        summary, metrics = m.summary(), m.metrics(expert=True)
    assert "\n  Process: 100.0 MiB" in summary
    assert "\n  Workers: 10.0 MiB\n" in summary
    assert "\n  Job: 113.0 MiB, with workers and shared memory\n" in summary
    assert "\n  Swapped out: 3.0 MiB of it\n" in summary
    assert metrics["memory/job_bytes"] == root.used + 13 * MIB
    assert metrics["memory/job_swap_bytes"] == 3 * MIB
    assert metrics["memory/host_swap_bytes"] == 2 * MIB
    assert "memory/pinned_bytes" not in metrics  # no CUDA


def test_host_memory_tells_process_job_and_machine_apart(root: Root) -> None:
    plant(root, ALONE)
    memory = memtools.host_memory(str(root.path))
    assert (memory.process, memory.job) == (root.used, root.used + 13 * MIB)
    assert (memory.swap, memory.job_swap, memory.pinned) == (2 * MIB, 3 * MIB, None)
    assert str(memory).splitlines()[1:] == [
        "  Process: 100.0 MiB",
        "  Job: 113.0 MiB, with workers and shared memory",
        "  Container: 100.0 MiB of 1000.0 MiB used",
        "  Machine: 4.00 GiB of 8.00 GiB used",
    ]
    (root.path / "proc/10/status").write_text("VmSize: 1 kB\n")
    assert memtools.host_memory(str(root.path)).job_swap is None


def test_pinned_memory_is_by_torchs_own_counter(cuda: FakeCuda, root: Root) -> None:
    cuda.pinned = 48 * MIB
    assert memtools.host_memory().pinned == 48 * MIB
    with monitor(device="cuda") as m:
        assert "\n  Pinned for devices: 48.0 MiB of it\n" in m.summary()
        assert m.metrics(expert=True)["memory/pinned_bytes"] == 48 * MIB
    cuda.ready = False
    assert memtools.host_memory().pinned is None


@pytest.mark.parametrize("told", [None, {}, {"allocated_bytes": {}}, {"allocated_bytes": 5}])
def test_pinned_memory_that_torch_does_not_tell_is_not_known(told: Any, cuda: FakeCuda) -> None:
    cuda.host_memory_stats_as_nested_dict = lambda: told  # type: ignore[method-assign]
    assert memtools.host_memory().pinned is None


def test_after_the_end_no_size_lies_above_the_peak() -> None:
    with monitor() as m:
        m.step()
        kept = b"x" * (8 << 20)
    assert len(kept) == 8 << 20
    metrics = m.metrics()
    assert metrics["memory/host_peak_bytes"] >= metrics["memory/host_rss_bytes"]


def test_peaks_are_of_this_run() -> None:
    with monitor() as m:
        kept = bytearray(64 << 20)
        first = m.get_peak_memory()["cpu_peak_gb"] or 0
        del kept
    with m:
        second = m.get_peak_memory()["cpu_peak_gb"] or 0
    assert 0.055 < first - second < 0.075


def test_cleanup_says_what_it_took_and_gave(tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    with monitor(log=path) as m:
        gc.disable()
        try:
            for _ in range(40):
                cycle: list[Any] = [bytearray(1 << 20)]
                cycle.append(cycle)
            del cycle
            done = m.cleanup_memory(aggressive=True)
        finally:
            gc.enable()
    assert done["collected_objects"] >= 40
    assert done["host_freed_bytes"] > 30 << 20
    assert done["freed_bytes"] == done["host_freed_bytes"]
    assert done["ms"] >= done["gc_ms"] > 0
    assert done["trim_ms"] > 0
    text = next(e.text for e in read_record(path).events if e.kind == "cleanup")
    assert text.startswith("gc (")
    assert ", malloc_trim " in text
    assert " MiB on the host" in text


def test_cleanup_of_devices_and_without_a_start(cuda: FakeCuda) -> None:
    cuda.cached[1] = GIB
    done = monitor(device="auto").cleanup_memory()
    assert done["device_freed_bytes"] == GIB
    assert done["freed_bytes"] >= GIB
    cuda.ready = False
    cuda.calls = 0
    assert monitor(device="auto").cleanup_memory()["device_freed_bytes"] == 0
    assert cuda.calls == 0


def test_without_the_leak_test() -> None:
    m = monitor(leaks=False)
    with m:
        m.step()
        for ask in (m.findings, m.check_memory_leak):
            with pytest.raises(RuntimeError, match="made with leaks=False; leave that out"):
                ask()
        assert "memory/leak_bytes_per_step" not in m.metrics()
        assert m.summary().startswith("Memory Usage:")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"interval_ms": 0}, ValueError, "must be between 0.1 and 3,600,000 .* got 0"),
        ({"interval_ms": float("nan")}, ValueError, "got nan"),
        ({"interval_ms": "10"}, TypeError, "interval_ms must be a number, got str"),
        ({"device": "gpu"}, ValueError, "got 'gpu'"),
        ({"device": "cpu:1"}, ValueError, "got 'cpu:1'"),
        ({"device": "cuda:8"}, ValueError, "cuda:0 to cuda:7 can be watched"),
        ({"limit": "much"}, ValueError, "limit must be a number of bytes"),
        ({"limit": 0}, ValueError, "limit must be at least 1 byte"),
        ({"log": 3}, TypeError, "PathLike"),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        MemoryMonitor(**options)


def test_a_device_that_is_not_there(cuda: FakeCuda) -> None:
    with pytest.raises(memtools.DeviceError, match="torch sees 2 CUDA devices; pass device='auto'"):
        monitor(device="cuda:2").start()
    cuda.count = 0
    with pytest.raises(memtools.DeviceError, match="torch sees 0 CUDA devices"):
        monitor(device="cuda").start()
    with monitor(device="auto") as m:
        assert m.running


def test_a_forecast_is_in_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    from memtools import LeakFinding
    from memtools._monitor.leakwatch import LeakWatch

    found = LeakFinding("leak", "heap", rate_bytes=4 * GIB, since_step=10, holder="list a.b",
                        steps_left=(100.0, 200.0))  # fmt: skip
    monkeypatch.setattr(LeakWatch, "findings", lambda self: (found,))
    with monitor() as m:
        m.step(11)
        assert m.summary().splitlines()[-1:] == [
            "Leak test: leak: list a.b +4.00 GiB/step, limit in 100 to 200 steps"
        ]
        assert m.metrics()["memory/steps_left"] == 100
        assert m.metrics()["memory/leak_bytes_per_step"] == 4 * GIB
        assert m.check_memory_leak(3.9)
        assert not m.check_memory_leak(4.1)
