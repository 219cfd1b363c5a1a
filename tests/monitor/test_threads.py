"""Steps that end on other threads than the main one: one run, with safe points on any of them."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memtools import HostMemoryPressure, LeakFinding, MemoryMonitor, read_record
from memtools._leak.ledger import Ledger
from memtools._monitor import leakwatch, run
from memtools._record.figures import figures_of
from tests.kit.children import in_child
from tests.monitor.root import Root, root, settle

__all__ = ["root"]

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

        def look(self, step: int) -> None:
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
