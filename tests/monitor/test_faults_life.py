"""A monitor among threads, tasks, signals and forks: the program goes on."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType

import pytest

from memtools import HostMemoryPressure, MemoryMonitor, read_record
from memtools._monitor import ending, guards, log, run
from memtools._monitor import monitor as monitor_monitor
from tests.kit.interrupts import interrupted
from tests.monitor.root import Root, root, settle
from tests.monitor.test_faults import use_all_of
from tests.monitor.test_life import in_child, in_python, monitor, threads

__all__ = ["root"]

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mem"


def test_of_threads_that_start_one_monitor_one_does() -> None:
    for _ in range(30):
        m = monitor(leaks=False)
        barrier, done = threading.Barrier(4), list[bool]()

        def start(m: MemoryMonitor = m, b: threading.Barrier = barrier) -> None:
            b.wait()
            try:
                m.start()
                done.append(True)  # noqa: B023
            except RuntimeError as error:
                assert "already" in str(error)

        starters = [threading.Thread(target=start) for _ in range(4)]
        for thread in starters:
            thread.start()
        for thread in starters:
            thread.join()
        assert done == [True]
        m.stop()
        assert threads() == 0


INTERRUPTED = """
import random, signal
from tests.kit.threadnames import thread_names
random.seed(7)
m = memtools.MemoryMonitor(sys.argv[1], 0.1, device="cpu")
heard = []
def handler(*_):
    heard.append(1)
    if sys.argv[2] == "stop":
        m.stop()
    else:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handler)
for n in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 6e-3))
        try:
            m.start()
            for k in range(30):
                with m.phase("x"):
                    m.step()
            m.stop()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    m.stop()
    assert "memtools" not in thread_names(), n
    assert not m.running, n
    if os.path.exists(sys.argv[1]):
        assert memtools.read_record(sys.argv[1]).complete, n
assert len(heard) > 20
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["raise", "stop"])
def test_a_signal_at_any_instant_of_a_run(path: Path, what: str) -> None:
    """Whatever it interrupts, no thread and no open record is left, and it can be started."""
    done = in_python(INTERRUPTED, path, what)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", [monitor_monitor, run], ids=["monitor", "run"])
@pytest.mark.parametrize("way", ["start", "with"])
def test_who_gets_an_interrupt_out_of_start_has_no_monitor_that_runs(
    module: ModuleType, way: str
) -> None:
    """Not one that nobody knows any more, with a thread and twelve descriptors for ever."""

    def enter(m: MemoryMonitor) -> None:
        m.start() if way == "start" else m.__enter__()

    n, alive = 0, list[weakref.ref[MemoryMonitor]]()
    while True:
        m = monitor(leaks=False)
        alive.append(weakref.ref(m))
        hit = interrupted(module, n, functools.partial(enter, m))
        if not hit:
            m.stop()
        assert not m.running, n
        del m
        if not hit:
            break
        n += 1
    gc.collect()
    assert n > 3
    assert [ref() for ref in alive if ref() is not None] == []
    assert not run._owners
    assert threads() == 0


PARTS = [monitor_monitor, run, guards, log, ending]


@pytest.mark.slow
@pytest.mark.parametrize("module", PARTS, ids=[part.__name__ for part in PARTS])
@pytest.mark.parametrize("way", ["stop", "with"])
def test_who_gets_an_interrupt_out_of_stop_has_no_monitor_that_runs(
    module: ModuleType, way: str, path: Path
) -> None:
    """But for one that comes before the first line of stop(), which has then done nothing."""

    def end(m: MemoryMonitor) -> None:
        m.stop() if way == "stop" else m.__exit__(None, None, None)

    hook, n, wrong = sys.excepthook, 0, list[object]()
    while True:
        m = monitor(path, leaks=False)
        m.guard(0.9, "record")
        (guard,) = m._watermarks.all
        m.start()
        hit = interrupted(module, n, functools.partial(end, m))
        if hit and n == 0 and module is monitor_monitor:
            assert m.running
            m.stop()
        left = (m.running, m in run._owners, threads(), sys.excepthook is not hook)
        if left != (False, False, 0, False) or guard.bits or not read_record(path).complete:
            wrong.append((n, *left, guard.bits))
            m.stop()
            run._owners.discard(m)
        m.start()  # as ever
        m.stop()
        assert (m.running, m in run._owners, threads()) == (False, False, 0)
        if not hit:
            break
        n += 1
    assert n > 1
    assert wrong == []


def test_marks_in_a_forked_child(root: Root) -> None:
    with monitor() as m:
        handle = m.guard(0.9)

        def child() -> None:
            m.on_pressure(0.5, print).remove()
            handle.remove()
            m.start()
            m.on_pressure(0.5, print)
            use_all_of(m)
            m.stop()

        assert in_child(child) == 0
        root.use(0.95)
        settle(m, root)
        with pytest.raises(HostMemoryPressure, match="host memory runs out"):
            m.step()


def test_a_fork_within_a_phase(path: Path) -> None:
    with monitor(path) as m:
        with m.phase("x"):
            pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert [(p.name, p.count) for p in read_record(path).phases] == [("x", 1)]


def test_marks_that_come_and_go_on_other_threads(root: Root) -> None:
    stop = threading.Event()
    faults: list[BaseException] = []

    def churn() -> None:
        try:
            while not stop.is_set():
                handles = [m.guard(0.5 + k / 100, "record") for k in range(3)]
                doubly = [threading.Thread(target=handles[0].remove) for _ in range(2)]
                for thread in doubly:
                    thread.start()
                for handle in handles:
                    handle.remove()
                for thread in doubly:
                    thread.join()
        except BaseException as error:
            faults.append(error)

    with monitor(leaks=False) as m:
        churners = [threading.Thread(target=churn) for _ in range(3)]
        for thread in churners:
            thread.start()
        for k in range(60):
            root.use(0.95 if k % 2 else 0.1)
            settle(m, root)
            for _ in range(20):
                m.step()
        stop.set()
        for thread in churners:
            thread.join()
        assert m._watermarks.all == ()
    assert faults == []


def test_phases_that_overlap_on_threads_and_tasks(path: Path) -> None:
    async def task(name: str, m: MemoryMonitor) -> None:
        for _ in range(20):
            with m.phase(name), m.phase("inner"):
                await asyncio.sleep(0)

    async def tasks(m: MemoryMonitor) -> None:
        await asyncio.gather(*(task(f"task {i}", m) for i in range(5)))

    with monitor(path) as m:
        workers = [threading.Thread(target=lambda: asyncio.run(tasks(m))) for _ in range(3)]
        for worker in workers:
            worker.start()
        with m.phase("main"):
            asyncio.run(tasks(m))
        for worker in workers:
            worker.join()
    counts = {p.name: p.count for p in read_record(path).phases}
    assert counts == {f"task {i}": 80 for i in range(5)} | {"inner": 400, "main": 1}
    assert {p.name: p.count for p in m.phases()} == counts


def test_a_name_that_is_no_text(path: Path) -> None:
    with monitor(path, name="\ud800") as m, m.phase("a\udcffb"):
        m.mark("\udc80")
        m.step()
    assert [p.name for p in read_record(path).phases] == ["a?b"]
