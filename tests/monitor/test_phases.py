"""Phases: times, exact peaks of host and devices, nested, decorated, on threads; and the record."""

from __future__ import annotations

import asyncio
import gc
import inspect
import mmap
import threading
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from memtools import DeviceError, MemoryMonitor, read_record
from memtools._base import torch as bridge
from memtools._base.devices import find_devices, tiers
from memtools._monitor.phases import PhaseTotals
from tests.kit.fakedevice import FakeCuda, cuda

__all__ = ["cuda"]
MIB = 2**20


def monitor(**options: Any) -> MemoryMonitor:
    return MemoryMonitor(**{"interval_ms": 1000, "device": "cpu", "leaks": False, **options})


def totals(m: MemoryMonitor) -> dict[str, PhaseTotals]:
    return {phase.name: phase for phase in m.phases()}


def touch(size: int) -> None:
    """Has so much resident memory for a moment, and gives all of it back."""
    with mmap.mmap(-1, size) as area:
        for at in range(0, size, 4096):
            area[at] = 1


@pytest.fixture
def tidy() -> Iterator[None]:
    """What other tests left is freed before, and nothing is collected meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("tidy")
def test_peaks_of_nested_phases() -> None:
    with monitor() as m:
        with m.phase("outer"):
            touch(96 * MIB)
            with m.phase("inner"):
                touch(32 * MIB)
        with m.phase("after"):
            pass
    found = totals(m)
    assert list(found) == ["outer", "inner", "after"]
    inner, outer, after = (found[name].peak_bytes or 0 for name in ("inner", "outer", "after"))
    assert 60 * MIB < outer - inner < 70 * MIB
    assert 28 * MIB < inner - after < 36 * MIB
    assert all(phase.exact and phase.count == 1 for phase in found.values())
    assert found["outer"].seconds >= found["inner"].seconds > 0


@pytest.mark.usefixtures("tidy")
def test_it_counts_passages_and_keeps_the_largest_peak() -> None:
    with monitor() as m:
        for size in (8, 64, 16):
            with m.phase("train"):
                touch(size * MIB)
        with m.phase("nothing"):
            pass
    found = totals(m)
    assert found["train"].count == 3
    assert found["train"].longest_seconds < found["train"].seconds
    assert (found["train"].peak_bytes or 0) - (found["nothing"].peak_bytes or 0) > 60 * MIB
    assert str(found["train"]).startswith(f"train: 3 times, {found['train'].seconds:.3f} s, ")


def test_a_phase_object_may_be_entered_inside_itself() -> None:
    with monitor() as m:
        phase = m.phase("deep")
        with phase, phase, phase:
            pass
        with phase:
            pass
    assert totals(m)["deep"].count == 4


def test_exceptions_pass_through_and_the_phase_is_left() -> None:
    with monitor() as m:
        with pytest.raises(ZeroDivisionError), m.phase("x"):
            _ = 1 / 0
        assert totals(m)["x"].count == 1


class Model:
    def __init__(self, m: MemoryMonitor) -> None:
        self.m = m


def test_functions_and_methods_keep_their_metadata() -> None:
    m = monitor()

    @m.phase("f")
    def double(x: int, *, y: int = 2) -> int:
        """Twice."""
        return x * y

    class Trainer:
        @m.phase("method")
        def fit(self, n: int) -> tuple[object, int]:
            return self, n

        @m.phase("static")
        @staticmethod
        def still(n: int) -> int:
            return n

        @m.phase("class")
        @classmethod
        def made(cls) -> type:
            return cls

    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert str(inspect.signature(double)) == "(x: 'int', *, y: 'int' = 2) -> 'int'"
    assert double(4) == 8, "without a start it is the function itself"
    with m:
        trainer = Trainer()
        assert (double(4, y=3), trainer.fit(3), trainer.still(5)) == (12, (trainer, 3), 5)
        assert (Trainer.still(6), Trainer.made(), trainer.made()) == (6, Trainer, Trainer)
    counts = {name: phase.count for name, phase in totals(m).items()}
    assert counts == {"f": 1, "method": 1, "static": 2, "class": 2}


def test_recursion_and_generators() -> None:
    m = monitor()

    @m.phase("down")
    def down(n: int) -> int:
        return 0 if n == 0 else 1 + down(n - 1)

    @m.phase("values")
    def values(n: int) -> Generator[int, str, str]:
        heard = []
        for i in range(n):
            heard.append((yield i))
        return " ".join(heard)

    assert inspect.isgeneratorfunction(values)
    with m:
        assert down(5) == 5
        running = values(2)
        assert totals(m)["down"].count == 6
        assert [next(running), running.send("a")] == [0, 1]
        assert "values" not in totals(m)
        with pytest.raises(StopIteration) as end:
            running.send("b")
        assert end.value.value == "a b"
        unfinished = values(3)
        next(unfinished)
        unfinished.close()
    assert totals(m)["values"].count == 2


def test_coroutines_and_asynchronous_generators() -> None:
    m = monitor()

    @m.phase("waits")
    async def waits(n: int) -> int:
        await asyncio.sleep(0)
        return n

    log: list[object] = []

    @m.phase("streams")
    async def streams() -> AsyncGenerator[int, str]:
        try:
            log.append((yield 1))
            try:
                yield 2
            except KeyError as error:
                log.append(error.args[0])
            yield 3
        finally:
            await asyncio.sleep(0)
            log.append("closed")

    async def main() -> None:
        assert list(await asyncio.gather(waits(1), waits(2))) == [1, 2]
        stream = streams()
        assert [await anext(stream), await stream.asend("sent")] == [1, 2]
        assert await stream.athrow(KeyError("thrown")) == 3
        await stream.aclose()
        assert [value async for value in streams()] == [1, 2, 3]

    assert inspect.iscoroutinefunction(waits)
    assert inspect.isasyncgenfunction(streams)
    with m:
        asyncio.run(main())
    assert log == ["sent", "thrown", "closed", None, "closed"]
    assert {name: p.count for name, p in totals(m).items()} == {"waits": 2, "streams": 2}


@pytest.mark.parametrize("what", [Model, 3, None])
def test_what_cannot_be_decorated(what: Any) -> None:
    with pytest.raises(TypeError, match=r"phase\('x'\) decorates functions and methods, got"):
        monitor().phase("x")(what)


def test_names_that_are_none() -> None:
    m = monitor()
    for name in (None, 3, b"x"):
        with pytest.raises(TypeError, match="a phase's name must be a str"):
            m.phase(name)  # type: ignore[arg-type]
    for text in ("", "a\0b"):
        with pytest.raises(ValueError, match="must have characters, none of them zero"):
            m.phase(text)


def test_threads_may_be_in_one_decorated_function_at_once() -> None:
    m, gate = monitor(), threading.Barrier(4)

    @m.phase("both")
    def meet() -> None:
        gate.wait(30)

    with m:
        threads = [threading.Thread(target=meet) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert totals(m)["both"].count == 4


def test_the_65th_open_phase_is_not_measured_and_nothing_else_happens() -> None:
    with monitor() as m:
        phases = [m.phase(f"p{i}") for i in range(66)]
        for phase in phases[:64]:
            phase.__enter__()
        with pytest.warns(
            RuntimeWarning, match="phase 'p64' is not measured: .*64 phases are open"
        ):
            phases[64].__enter__()
        phases[65].__enter__()
        for phase in reversed(phases):
            phase.__exit__(None, None, None)
    assert sum(p.count for p in m.phases()) == 64


def test_a_phase_may_outlast_its_run() -> None:
    m = monitor()
    m.start()
    phase = m.phase("long")
    phase.__enter__()
    m.stop()
    m.start()
    phase.__exit__(None, None, None)
    with phase:
        pass
    m.stop()
    assert totals(m)["long"].count == 1, "of this run"


def test_phases_in_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic_ns() + 10**9
    monkeypatch.setattr("memtools._monitor.phases.time.monotonic_ns", lambda: now)
    path = tmp_path / "run.mem"
    with monitor(log=path) as m:
        for _ in range(3):
            with m.phase("train"), m.phase("forward"):
                pass
    record = read_record(path)
    assert {p.name: p.count for p in record.phases} == {"forward": 3, "train": 3}
    assert all((p.peak_bytes or 0) > MIB and p.seconds > 0 for p in record.phases)
    events = [e for e in record.events if e.kind == "phase"]
    assert sorted(e.text for e in events) == ["forward", "train"], "one a name and second"
    assert all(e.duration_ns > 0 and e.time_ns >= record.clock_ns for e in events)


def test_events_come_again_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0
    monkeypatch.setattr("memtools._monitor.phases.time.monotonic_ns", lambda: clock)
    path = tmp_path / "run.mem"
    with monitor(log=path) as m:
        for clock in (10**9, 10**9 + 5, 2 * 10**9 - 1, 2 * 10**9, 2 * 10**9 + 1, 5 * 10**9):  # noqa: B007
            with m.phase("train"):
                pass
    events = [e for e in read_record(path).events if e.kind == "phase"]
    assert len(events) == 3


def test_many_names_take_no_more_room(tmp_path: Path) -> None:
    with monitor(log=tmp_path / "run.mem") as m:
        for i in range(1000):
            with m.phase(f"step {i}"):
                pass
    assert len(m.phases()) == 64
    assert totals(m)["(others)"].count == 1000 - 63
    assert m._last is not None
    assert len(m._last.book._next_event) == 256


# --- devices ---


def test_device_peaks_of_nested_phases(cuda: FakeCuda) -> None:
    cuda.allocate(0, 7000)
    cuda.allocate(0, -6000)  # a peak from before
    with monitor(device="cuda") as m, m.phase("outer"):
        cuda.allocate(0, 500)
        cuda.allocate(0, -500)
        with m.phase("inner"):
            cuda.allocate(0, 100)
            cuda.allocate(1, 50)
        cuda.allocate(0, 100)
        with m.phase("second"):
            pass
        cuda.allocate(0, -200)
    found = {name: phase.device_peak_bytes for name, phase in totals(m).items()}
    assert found["outer"] == {0: 1500, 1: 50}, "an inner reset must not lose the outer peak"
    assert found["inner"] == {0: 1100, 1: 50}
    assert found["second"] == {0: 1200, 1: 50}
    assert m.get_peak_memory()["gpu_peak_gb"] == 1500 / 2**30
    assert "cuda0 1.5 KiB" in str(totals(m)["outer"])


def test_device_peaks_of_overlapping_phases(cuda: FakeCuda) -> None:
    with monitor(device="cuda:1") as m:
        a, b = m.phase("a"), m.phase("b")
        a.__enter__()
        cuda.allocate(1, 10)
        b.__enter__()
        cuda.allocate(1, 10)
        a.__exit__(None, None, None)
        cuda.allocate(1, 10)
        b.__exit__(None, None, None)
    found = {name: phase.device_peak_bytes for name, phase in totals(m).items()}
    assert found == {"a": {1: 20}, "b": {1: 30}}


def test_the_peak_by_torchs_public_counters(cuda: FakeCuda) -> None:
    cuda.allocate(1, 9 * MIB)
    cuda.allocate(1, -4 * MIB)
    now = tiers(1)
    assert (now.allocated, now.allocated_peak, now.inactive) == (5 * MIB, 9 * MIB, 5)
    cuda.reset_peak_memory_stats(1)
    assert [tiers(i).allocated_peak for i in (0, 1)] == [0, 5 * MIB]
    cuda.ready = False
    assert tiers(1).allocated_peak is None


def test_no_context_is_made_and_figures_begin_with_one(cuda: FakeCuda) -> None:
    cuda.ready = False
    with monitor() as off, off.phase("x"):
        pass
    with monitor(device="auto") as m:
        with m.phase("before"):
            pass
        assert m.metrics().get("memory/cuda0_allocated_bytes") is None
        assert m.summary().count("GPU") == 0
        assert cuda.calls == 0
        with m.phase("makes it"):
            cuda.ready = True
            cuda.allocate(0, 640)
    found = {name: phase.device_peak_bytes for name, phase in totals(m).items()}
    assert found == {"before": {}, "makes it": {0: 640, 1: 0}}


def test_device_peaks_in_the_record(cuda: FakeCuda, tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    with monitor(device="cuda:0", log=path) as m, m.phase("train"):
        cuda.allocate(0, 4096)
    found = {p.name: p.peak_bytes for p in read_record(path).phases}
    assert found["train (cuda0)"] == 4096


def test_devices_before_torch_is_imported(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected: list[int] = []

    def connect() -> Any:
        connected.append(1)
        raise ImportError("no torch here")

    monkeypatch.setattr(bridge, "loaded", lambda: None)
    monkeypatch.setattr(bridge, "connect", connect)
    assert find_devices("auto", str(tmp_path)) == ()
    assert connected == [], "nothing is imported where there is no device"
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert find_devices("auto", str(tmp_path)) == ()
    assert connected == [1]
    with pytest.raises(DeviceError, match="no torch here"):
        find_devices("cuda", str(tmp_path))
    assert find_devices("cpu", str(tmp_path)) == ()
