"""What lives at the peak, in a monitor's run: when it records, and that nothing stays on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memtools import HostMemoryPressure, MemoryMonitor, read_record
from memtools._blocks import recorder
from memtools._record.kinds import Peak
from tests.kit.children import in_child
from tests.kit.ownprocess import in_own_process

MIB = 1 << 20


class Training:
    """A model whose step takes some 2 MiB."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(256, 256)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def step(self, rows: int = 512) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(rows, 256)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture(autouse=True)
def _nothing_stays_on() -> Iterator[None]:
    yield
    assert not recorder._open


def events(path: Path) -> list[Peak]:
    events = read_record(str(path)).events
    return [event.data for event in events if isinstance(event.data, Peak)]


def peaks(path: Path) -> list[Peak]:
    """Those of recorded steps, without what traced steps say of them."""
    return [peak for peak in events(path) if peak.traced is None]


def blocks(monitor: MemoryMonitor) -> Any:
    run = monitor._live
    assert run is not None
    assert run.blocks is not None
    return run.blocks.blocks


def is_recording(monitor: MemoryMonitor) -> bool:
    run = monitor._live
    return run is not None and run.peaks is not None and run.peaks.is_open


@pytest.mark.slow
def test_step_3_is_recorded_and_no_other_of_the_first():
    """In a process where no other test has left a model: all that there are count."""
    in_own_process(
        """
        import tempfile, torch
        from pathlib import Path
        from memtools import MemoryMonitor
        from tests.monitor.test_peaks import Training, is_recording, peaks

        training, recorded = Training(), []
        path = Path(tempfile.mkdtemp()) / "run.mem"
        with MemoryMonitor(path, device="cpu") as monitor:
            for n in range(1, 41):
                if is_recording(monitor):
                    recorded.append(n)
                training.step()
                monitor.step()
        assert recorded == [3]
        (peak,) = peaks(path)
        assert (peak.step, peak.backward, peak.lost) == (3, True, 0)
        assert peak.bytes_of("parameters") == (256 * 256 + 256) * 4
        assert peak.bytes_of("inputs") == 512 * 256 * 4
        assert "test_peaks.py:" in peak.line, peak.line
        """
    )


def test_losses_are_the_same_bit_by_bit(tmp_path, training):
    plain = Training()
    with MemoryMonitor(tmp_path / "run.mem", device="cpu") as monitor:
        torch.manual_seed(1)
        for _ in range(6):
            training.step()
            monitor.step()
    torch.manual_seed(1)
    for _ in range(6):
        plain.step()
    assert training.losses == plain.losses
    assert torch.equal(training.model.weight, plain.model.weight)


@pytest.mark.slow
def test_a_new_peak_is_recorded_where_a_safe_point_sees_it(tmp_path, training):
    path = tmp_path / "run.mem"
    with MemoryMonitor(path, device="cpu") as monitor:
        for n in range(1, 60):
            training.step(512 if n < 30 else 4096)
            monitor.step()
    first, second = peaks(path)
    assert (first.step, second.step >= 31) == (3, True)
    # Both have in them what other tests of this process have left alive.
    assert second.peak_bytes > first.peak_bytes + 16 * MIB


def test_without_a_record_and_without_traces_nothing_is_recorded(tmp_path, training):
    path = tmp_path / "run.mem"
    for monitor in (MemoryMonitor(device="cpu"), MemoryMonitor(path, device="cpu", trace=False),
                    MemoryMonitor(path, device="cpu", leaks=False)):  # fmt: skip
        with monitor:
            for _ in range(5):
                training.step()
                monitor.step()
                assert not is_recording(monitor)
    assert peaks(path) == []


def test_without_the_shim_the_record_says_why(
    tmp_path: Path,
    training: Training,
    without_shim: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    path = tmp_path / "run.mem"
    with without_shim(), MemoryMonitor(path, device="cpu") as monitor:
        for _ in range(5):
            training.step()
            monitor.step()
    (said,) = peaks(path)
    assert "memtools._torch" in said.why
    assert said.peak_bytes == 0


# --- what comes in between ---


def recording(monitor: MemoryMonitor, training: Training) -> None:
    """To the midst of step 3."""
    for _ in range(2):
        training.step()
        monitor.step()
    assert is_recording(monitor)
    training.step()


def test_a_monitor_that_stops_within_the_step_leaves_nothing_on(tmp_path, training):
    monitor = MemoryMonitor(tmp_path / "run.mem", device="cpu")
    monitor.start()
    recording(monitor, training)
    table = blocks(monitor)
    monitor.stop()
    assert not table.is_on
    with MemoryMonitor(tmp_path / "next.mem", device="cpu") as monitor:
        for _ in range(4):
            training.step()
            monitor.step()
    assert [peak.step for peak in peaks(tmp_path / "next.mem")] == [3]


def test_a_step_that_raises_ends_at_the_next_one(tmp_path, training):
    path = tmp_path / "run.mem"
    with MemoryMonitor(path, device="cpu") as monitor:
        recording(monitor, training)
        with contextlib.suppress(ValueError):
            training.step()
            raise ValueError("a bad batch")
        training.step()
        monitor.step()
        assert not is_recording(monitor)
    assert [peak.step for peak in peaks(path)] == [3]


def test_a_guard_that_raises_in_it_leaves_nothing_on(tmp_path, training):
    monitor = MemoryMonitor(tmp_path / "run.mem", device="cpu", limit="1 MiB")
    with pytest.raises(HostMemoryPressure), monitor:  # noqa: PT012
        monitor.guard(0.9, action="raise")
        for _ in range(100):
            training.step()
            time.sleep(0.02)  # the sampler sees the limit
            monitor.step()
    assert not recorder._open


@pytest.mark.slow
def test_two_monitors_record_one_after_the_other(tmp_path, training):
    paths = tmp_path / "a.mem", tmp_path / "b.mem"
    with MemoryMonitor(paths[0], device="cpu") as a, MemoryMonitor(paths[1], device="cpu") as b:
        for _ in range(40):
            training.step()
            a.step()
            b.step()
            assert not (is_recording(a) and is_recording(b))
    assert peaks(paths[0])[0].step == 3
    assert 3 < peaks(paths[1])[0].step <= 24


@pytest.mark.slow
def test_a_child_that_is_forked_within_the_step_goes_on_as_it_would(tmp_path):
    torch.set_num_threads(1)
    training = Training()
    path = tmp_path / "run.mem"
    with MemoryMonitor(path, device="cpu") as monitor:
        recording(monitor, training)

        def child() -> None:
            assert not recorder._open
            training.step()
            monitor.step()
            with MemoryMonitor(f"{path}.child", device="cpu") as own:
                for _ in range(4):
                    training.step()
                    own.step()
            assert peaks(Path(f"{path}.child"))[0].step == 3

        assert in_child(child) == 0
        monitor.step()
    assert [peak.step for peak in peaks(path)] == [3]


def test_a_profiler_of_the_program_works_in_and_across_the_step(tmp_path, training):
    path = tmp_path / "run.mem"
    with MemoryMonitor(path, device="cpu") as monitor:
        recording(monitor, training)
        with torch.profiler.profile(profile_memory=True) as profiler:
            training.step()
            monitor.step()
            training.step()
    assert {event.key for event in profiler.key_averages()} >= {"aten::addmm"}
    first, second = events(path)
    assert (first.step, second.step, first.traced) == (3, 3, None)
    assert second.traced is not None
    assert second.traced.why == "a profiler of torch is on"


@pytest.mark.slow
def test_events_of_peaks_last_in_a_long_record(tmp_path, training):
    path = tmp_path / "run.mem"
    with MemoryMonitor(path, device="cpu") as monitor:
        for _ in range(4):
            training.step()
            monitor.step()
        for n in range(3000):
            monitor.mark(f"{n}")
    assert events(path)
    assert events(path)[-1].step == 3


@pytest.mark.slow
def test_a_program_without_torch_has_no_such_event(tmp_path):
    import subprocess
    import sys

    path = tmp_path / "run.mem"
    code = (
        "import memtools, sys\n"
        f"with memtools.MemoryMonitor({os.fspath(path)!r}, device='cpu') as monitor:\n"
        "    for _ in range(40): monitor.step()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert peaks(path) == []
