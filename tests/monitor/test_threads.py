"""Steps that end on other threads than the main one: one run, with safe points on any of them."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memtools import HostMemoryPressure, LeakFinding, MemoryMonitor, read_record
from memtools._leak.finding import is_call
from memtools._leak.growth import line_of
from memtools._leak.judge import C_HEAP, THRESHOLDS
from memtools._leak.ledger import Ledger
from memtools._monitor import leakwatch, run, walks
from memtools._monitor.sensor import Sensor
from memtools._monitor.signals import Signal
from memtools._monitor.tracing import OF_BURSTS, OF_THREADS, Tracing
from memtools._record.figures import figures_of
from tests.kit.children import in_child
from tests.monitor.program import Clock, Program, clock, holder
from tests.monitor.root import Root, root, settle
from tests.monitor.traced import MS

__all__ = ["clock", "root"]

MIB = 1 << 20

LONG_S = 60.0  # A test that waits so long for another thread fails.


def monitor(path: Path | None = None, *, census: bool = False) -> MemoryMonitor:
    return MemoryMonitor(path, 1, device="cpu", census=census, trace=False)


def on_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, name="server", daemon=True)
    thread.start()
    return thread


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> LeakFinding:
    """What every look finds."""
    one = LeakFinding("likely", "heap", rate_bytes=1 << 20, holder="dict Server.sessions",
                      kind="dict", since_step=1)  # fmt: skip
    monkeypatch.setattr(leakwatch, "findings_of", lambda seen: [one])
    monkeypatch.setattr(Ledger, "end", lambda *_: [])
    return one


def test_steps_of_another_thread_alone_test_leaks(tmp_path: Path, found: LeakFinding) -> None:
    threads: list[str] = []
    with monitor(tmp_path / "run.mem") as m:
        m.on_leak(lambda: threads.append(threading.current_thread().name))
        on_a_thread(lambda: [m.step() for _ in range(32)]).join()
        assert threads == ["server"]
        assert [one.holder for one in m.findings()] == [found.holder]
    verdict = figures_of(read_record(tmp_path / "run.mem")).verdict
    assert (verdict.tested, verdict.untested) == (True, "")


@pytest.mark.parametrize("first", ["main", "server", "one after the other"])
def test_all_threads_make_the_steps_of_one_run(first: str, found: LeakFinding) -> None:
    with monitor() as m, ThreadPoolExecutor(2) as pool:
        for n in range(32):
            is_on_main = n % 2 if first == "one after the other" else (n < 8) == (first == "main")
            if is_on_main:
                m.step()
            else:
                pool.submit(m.step).result(LONG_S)
        assert m.step_count == 32
        assert m.findings()[0].first_step == 16


def test_a_guard_raises_on_the_thread_whose_step_ends(root: Root) -> None:
    with monitor() as m, ThreadPoolExecutor(1) as pool:
        m.guard(0.9)
        root.use(0.95)
        settle(m, root)
        with pytest.raises(HostMemoryPressure):
            pool.submit(m.step).result(LONG_S)
        m.step()


class Callback:
    """A callback that another thread waits for, and that waits for another thread."""

    def __init__(self) -> None:
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        self.entered.set()
        assert self.goes_on.wait(LONG_S)


@pytest.mark.usefixtures("found")
def test_steps_that_end_while_another_thread_looks_count_and_do_not_wait() -> None:
    callback = Callback()
    with monitor() as m:
        m.on_leak(callback)
        thread = on_a_thread(lambda: m.step(16))
        assert callback.entered.wait(LONG_S)
        for _ in range(100):
            m.step()
        assert (m.step_count, callback.calls) == (116, 1)
        callback.goes_on.set()
        thread.join()


@pytest.mark.usefixtures("found")
def test_what_passes_while_another_thread_looks_acts_at_the_next_step(root: Root) -> None:
    callback, acted = Callback(), list[str]()
    with monitor() as m:
        m.on_leak(callback)
        m.on_pressure(0.9, lambda: acted.append(threading.current_thread().name))
        thread = on_a_thread(lambda: m.step(16))
        assert callback.entered.wait(LONG_S)
        root.use(0.95)
        settle(m, root)
        m.step()
        assert acted == []
        callback.goes_on.set()
        thread.join()
        m.step()
        assert acted == ["MainThread"]


@pytest.mark.usefixtures("found")
def test_stop_waits_for_a_look_on_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOOK_S", LONG_S)
    callback, order = Callback(), list[str]()
    m = monitor(tmp_path / "run.mem")
    m.start()
    m.on_leak(callback)
    m.on_leak(lambda: order.append("looked"))
    thread = on_a_thread(lambda: m.step(16))
    assert callback.entered.wait(LONG_S)
    assert m._live is not None
    looks = m._live.looks

    class Looks:
        """The lock: that it is waited for ends the callback."""

        def acquire(self, timeout: float) -> bool:
            callback.goes_on.set()
            return looks.acquire(timeout=timeout)

        release = looks.release

    m._live.looks = Looks()  # type: ignore[assignment]
    m.stop()
    order.append("stopped")
    thread.join()
    assert order == ["looked", "stopped"]
    assert read_record(tmp_path / "run.mem").complete


@pytest.mark.usefixtures("found")
def test_stop_does_not_wait_for_a_callback_that_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "LOOK_S", 0.01)
    callback, errors = Callback(), list[object]()
    monkeypatch.setattr(threading, "excepthook", errors.append)
    m = monitor(tmp_path / "run.mem")
    m.start()
    m.on_leak(callback)
    thread = on_a_thread(lambda: [m.step(16), m.step(16)])
    assert callback.entered.wait(LONG_S)
    m.stop()
    assert (m.running, read_record(tmp_path / "run.mem").complete) == (False, True)
    callback.goes_on.set()
    thread.join()
    assert (errors, callback.calls, m.step_count) == ([], 1, 16)


@pytest.mark.usefixtures("found")
def test_a_callback_stops_the_monitor_on_its_thread(tmp_path: Path) -> None:
    errors: list[object] = []
    with monitor(tmp_path / "run.mem") as m:
        m.on_leak(m.stop)
        thread = on_a_thread(lambda: errors.append([m.step() for _ in range(64)]))
        thread.join()
        assert (m.running, m.step_count, len(errors)) == (False, 16, 1)
    assert read_record(tmp_path / "run.mem").complete


@pytest.mark.usefixtures("found")
def test_a_thread_ends_within_its_look() -> None:
    """By an exception that is not an Exception. The next look is another thread's."""

    def leave() -> None:
        if threading.current_thread().name == "server":
            raise SystemExit

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            m.step(16)

    with monitor() as m:
        m.on_leak(leave)
        on_a_thread(serve).join()
        assert m.step_count == 16
        m.step(16)
        assert m.findings()[0].first_step == 16


@pytest.mark.usefixtures("found")
def test_a_fork_while_another_thread_looks() -> None:
    callback = Callback()

    def child() -> None:
        assert (m.running, gc.isenabled()) == (False, True)
        m.step()
        m.start()
        for _ in range(32):
            m.step()
        assert len(m.findings()) == 1

    with monitor() as m:
        handle = m.on_leak(callback)
        thread = on_a_thread(lambda: m.step(16))
        assert callback.entered.wait(LONG_S)
        handle.remove()
        assert in_child(child) == 0
        callback.goes_on.set()
        thread.join()
        assert len(m.findings()) == 1


def test_a_fork_within_a_walk_leaves_the_collector_on_in_the_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []

    class Forks:
        looks, cut, reached_bytes = 0, False, 0

        def look(self, step: int, *, quick: bool = False) -> None:
            assert not gc.isenabled()
            codes.append(in_child(lambda: os._exit(0 if gc.isenabled() else 1)))

        def holders(self) -> tuple[()]:
            return ()

    monkeypatch.setattr(run, "growth_census", Forks)
    with monitor(census=True) as m:
        m.step(16)
    assert codes == [0]
    assert gc.isenabled()


@pytest.mark.usefixtures("found")
def test_the_leak_test_begins_anew_while_another_thread_looks(tmp_path: Path) -> None:
    callback = Callback()
    with monitor(tmp_path / "run.mem") as m:
        m.on_leak(callback)
        thread = on_a_thread(lambda: m.step(16))
        assert callback.entered.wait(LONG_S)
        m._restart_leak_test()
        callback.goes_on.set()
        thread.join()
        m.step(3)
        assert m.findings() == ()
        m.step(16)
        assert [one.first_step for one in m.findings()] == [35]


# --- several threads make the steps ---


@pytest.mark.parametrize(
    ("threads", "is_shared"),
    [("AAAA", False), ("AABB", False), ("ABCD", False), ("ABAB", True), ("ABCA", True)],
)
def test_threads_share_the_steps_if_one_comes_back_after_another(
    threads: str, is_shared: bool
) -> None:
    with monitor() as m:
        assert m._live is not None
        assert m._live.watch is not None
        pools = {name: ThreadPoolExecutor(1) for name in "ABCD"}
        for name in threads:
            pools[name].submit(m.step, 4).result(LONG_S)
        assert m._live.watch._sensor.is_shared == is_shared
        for pool in pools.values():
            pool.shutdown()


def test_threads_share_the_steps_if_one_makes_a_step_while_another_looks(
    found: LeakFinding,
) -> None:
    callback = Callback()
    with monitor() as m:
        watch = m._live.watch if m._live else None
        assert watch is not None
        m.on_leak(callback)
        thread = on_a_thread(lambda: m.step(16))
        assert callback.entered.wait(LONG_S)
        m.step()
        assert not watch._sensor.is_shared, "that is noted at the next step where one is due"
        callback.goes_on.set()
        thread.join()
        m.step(100)
        assert watch._sensor.is_shared


class NoLimits:
    def above(self) -> int:
        return 0


def test_the_lowest_reading_of_the_newest_steps_counts() -> None:
    sizes = [50 * MIB, 30 * MIB, 10 * MIB, 40 * MIB, 60 * MIB, 70 * MIB, 60 * MIB]
    left = iter(sizes)
    sensor = Sensor([Signal("heap", lambda: next(left))], NoLimits())  # type: ignore[arg-type]
    sensor.share()
    assert sensor.read(1)["heap"] == 50 * MIB
    for step in (2, 3, 4):
        sensor.read_lows(step)
    assert sensor.read(5)["heap"] == 10 * MIB
    assert sensor.read(12)["heap"] == 60 * MIB, "those of steps long before do not count"


@pytest.mark.parametrize("by_time", [False, True])
def test_the_heap_without_tensors_has_a_lowest_reading_of_its_own(by_time: bool) -> None:
    """Eight threads have tensors at each reading, now more and now fewer."""
    rng, at = random.Random(0), [0]

    def of_torch() -> int:
        return int(4 * MIB * random.Random(at[0]).random())

    heap = Signal("heap", lambda: 100 * MIB + 10_000 * at[0] + of_torch())
    sensor = Sensor([heap, Signal("tensors", of_torch)], NoLimits())  # type: ignore[arg-type]
    sensor.share()
    sizes = []
    for step in range(1, 400):
        at[0] = step
        if step % 40:
            if rng.random() < 0.2:
                sensor.read_lows(step)
        elif by_time and step > 40:
            heap.due = 0
            sensor.read_cheap(step, 1)
            sizes.append((step, heap.newest[1] or 0))
        else:
            sizes.append((step, sensor.read(step)["heap"]))
    line = line_of(sizes[1:])
    assert line.slope == pytest.approx(10_000, rel=0.3)
    assert line.error < 0.2 * line.slope, "by the heap alone it is more"


def test_what_other_threads_do_meanwhile_is_not_left_out() -> None:
    size = [100 * MIB]
    sensor = Sensor([Signal("heap", lambda: size[0])], NoLimits())  # type: ignore[arg-type]
    sensor.share()
    with sensor.left_out():
        assert gc.isenabled(), "a child that another thread forks would not collect garbage"
        size[0] -= 40 * MIB
    assert sensor.read(1)["heap"] == 60 * MIB


class Server(Program):
    """Other threads have up to 3 MiB in use each, which changes within a walk of the heap, too."""

    def serve(self, steps: int, *, leaks: int, seed: int) -> None:
        rng = random.Random(seed)

        def work() -> None:
            others = sum(rng.random() for _ in range(3)) * 3 * MIB
            self.sizes["heap"] = 100 * MIB + leaks * self.step + int(others)

        self.watch._share()
        self.census_looks = work
        for _ in range(steps):
            work()
            self.run(1)


@pytest.mark.parametrize("seed", range(8))
def test_a_leak_beside_the_work_of_other_threads_is_not_taken_back(clock: Clock, seed: int) -> None:
    server, rate = Server(clock), 32 << 10
    server.held = [holder(rate)]
    server.serve(1000, leaks=rate, seed=seed)
    (one,) = server.watch.findings()
    assert one.holder == "list Trainer.losses"
    assert one.grade in ("growing", "likely")
    assert abs(one.rate_bytes - rate) < 0.2 * rate
    assert [str(one) for one in server.said if one.over and one.holder] == []


@pytest.mark.parametrize("seed", range(8))
def test_the_work_of_other_threads_is_not_growth(clock: Clock, seed: int) -> None:
    server = Server(clock)
    server.serve(1000, leaks=0, seed=seed)
    assert server.watch.findings() == ()
    assert not any(is_call(one.grade) for one in server.said)


@pytest.mark.parametrize("threads", [2, 8])
def test_the_c_heap_is_judged_once_each_thread_has_made_its_first_steps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(walks.threading, "active_count", lambda: threads)
    server, first = Program(clock), None
    server.watch._share()
    while first is None and server.step < 2000:
        server.run(1, heap=64 << 10)
        if any(one.kind == C_HEAP for one in server.watch.findings()):
            first = server.step
    assert first is not None
    each = THRESHOLDS.confirmed_steps
    assert first is not None
    assert each * threads <= first < 4 * each * threads


@pytest.mark.parametrize(("more", "is_named"), [(0, False), (1, True)])
def test_calls_that_run_on_other_threads_hold_nothing_unless_threads_become_more(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, more: int, is_named: bool
) -> None:
    threads = itertools.count(8, more)
    monkeypatch.setattr(walks.threading, "active_count", lambda: next(threads))
    server = Program(clock)
    server.watch._share()
    server.held = [holder(32 << 10, path="local 'x' of f()", kind="calls", what="running calls")]
    server.run(128, heap=32 << 10)
    assert ("local 'x' of f()" in {one.holder for one in server.watch.findings()}) == is_named


# --- tracing ---


def test_a_window_is_long_where_several_threads_make_the_steps() -> None:
    events: list[dict[str, object]] = []
    tracing = Tracing(write=lambda fields: events.append(dict(fields)))
    tracing.share()
    one = LeakFinding("growing", "heap", rate_bytes=1e6, holder="dict Server.sessions")
    assert tracing.wants(1, [one])
    for n in range(OF_BURSTS):
        assert not tracing.is_due(n)
        # Two steps end one after the other, and the next two as late.
        tracing.step_took(2 * MS * (n % 2), 2 * MS * (n % 2))
    assert tracing.is_due(OF_BURSTS)
    tracing.begin(OF_BURSTS)
    assert tracing.is_open
    steps = OF_BURSTS
    while tracing.is_open:
        steps += 1
        tracing.step_took(4 * MS * (steps % 2), 4 * MS * (steps % 2))
        tracing.turn(steps, [one])
    assert events[-1]["steps"] == steps - 2 * OF_BURSTS
    assert steps - 2 * OF_BURSTS >= OF_THREADS
    assert events[-1]["sources"] == ("tracemalloc",), "it is twice as slow, which is borne"


# --- programs ---

SERVER = """
    import asyncio, collections, sys
    from concurrent.futures import ThreadPoolExecutor
    import torch

    model, sessions = torch.nn.Linear(64, 64).eval(), collections.OrderedDict()

    def answer(number):
        with torch.inference_mode():
            state = model(torch.randn(256, 64))
        sessions[number] = state  # 64 KiB
        while len(sessions) > int(sys.argv[1]):
            sessions.popitem(last=False)

    async def main():
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(4) as pool:
            for first in range(0, 640, 4):
                some = range(first, first + 4)
                await asyncio.gather(*(loop.run_in_executor(pool, answer, n) for n in some))

    asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "leaks"), [(10_000, True), (40, False)])
def test_a_server_on_four_threads(tmp_path: Path, kept: int, leaks: bool) -> None:
    (tmp_path / "server.py").write_text(textwrap.dedent(SERVER))
    command = [sys.executable, "-m", "memtools", "run", "--log", "run.mem", "server.py", str(kept)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    verdict = figures_of(read_record(tmp_path / "run.mem")).verdict
    assert verdict.tested
    named = [one for one in verdict.findings if is_call(one.grade)]
    assert [one.holder for one in named][:1] == (
        ["OrderedDict server.sessions"] if leaks else []
    ), done.stderr
