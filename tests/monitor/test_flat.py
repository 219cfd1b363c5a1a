"""The monitor does not leak itself: ten thousand of everything, and memory is what it was."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from memtools import MemoryMonitor, _core
from tests.kit.growth import least_growths, python_blocks
from tests.kit.long import LONG

ROUNDS, WARM = 10_000, 200


def in_use() -> int:
    """Bytes that malloc has handed out."""
    return _core.Probe().read(32).heap_used or 0


def flat(work: Callable[[], object], rounds: int, rss: Callable[[], int]) -> None:
    """Some rounds first, so that what is set up once, is, and the interpreter's free lists are
    full. The collector is off: descriptors and threads must not wait for it."""

    def run(count: int) -> None:
        for _ in range(count):
            work()

    gc.collect()
    gc.disable()
    try:
        run(WARM)
        files = len(os.listdir("/proc/self/fd"))
        readings = (python_blocks, in_use, rss)
        blocks, heap, resident = least_growths(run, rounds, readings)
        assert blocks < rounds / 10
        assert heap < 256 << 10
        assert resident < 2 << 20
        # The newest run keeps its files, and some are opened when they are read first: as many as
        # one run has, however many runs there were.
        assert len(os.listdir("/proc/self/fd")) <= files + rounds / 100
    finally:
        gc.enable()


def test_phases_and_steps(tmp_path: Path, rss: Callable[[], int]) -> None:
    with MemoryMonitor(tmp_path / "run.mem", device="cpu", census=False) as m:

        @m.phase("decorated")
        def nothing() -> None:
            pass

        def work() -> None:
            with m.phase("outer"), m.phase("inner"):
                nothing()
            m.step()

        flat(work, ROUNDS, rss)
    assert m.step_count == ROUNDS + WARM


@pytest.mark.slow
def test_starts_and_stops_of_one_monitor(rss: Callable[[], int]) -> None:
    m = MemoryMonitor(device="cpu")

    def work() -> None:
        with m:
            m.step()

    flat(work, ROUNDS if LONG else 2000, rss)


@pytest.mark.slow
def test_starts_and_stops_of_new_monitors_with_records(
    tmp_path: Path, rss: Callable[[], int]
) -> None:
    def work() -> None:
        with MemoryMonitor(tmp_path / "run.mem", device="cpu") as m:
            m.step()

    flat(work, 300, rss)


def test_guards_and_callbacks(rss: Callable[[], int]) -> None:
    with MemoryMonitor(device="cpu") as m:

        def work() -> None:
            m.guard(0.99, "record").remove()
            m.on_pressure(0.9, lambda: None).remove()
            m.step()

        flat(work, 2000, rss)


def test_readings(tmp_path: Path, rss: Callable[[], int]) -> None:
    with MemoryMonitor(tmp_path / "run.mem", device="cpu") as m:
        with m.phase("x"):
            m.step(100)

        def work() -> None:
            m.metrics(expert=True)
            m.format_memory_stats(m.log_memory(1))
            m.summary()
            m.get_peak_memory()
            m.mark("text")
            m.phases()

        flat(work, 1000, rss)


def test_a_planted_leak_is_found(rss: Callable[[], int]) -> None:
    kept: list[object] = []
    with pytest.raises(AssertionError):
        flat(lambda: kept.append([1]), 1000, rss)
