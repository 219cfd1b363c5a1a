"""A monitor among threads, tasks, signals, forks and short-lived children: the program goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memtools import HostMemoryPressure, MemoryMonitor, read_record
from tests.monitorroot import Root, root, settle, wait_for
from tests.test_monitor_faults import use_all_of
from tests.test_monitor_life import in_child, in_python, last, monitor, threads

__all__ = ["root"]


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


def test_an_interrupt_in_stop_comes_out_when_all_is_done(path: Path) -> None:
    m = monitor(path)
    m.start()
    assert m._last is not None
    assert m._last.watch is not None

    class Long:
        kind = "growing"

        def last_look(self, _: int) -> None:
            raise KeyboardInterrupt

    m._last.watch = Long()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        m.stop()
    assert (m.running, threads()) == (False, 0)
    assert last(path) == "exit: stop()"
    m.start()  # as ever
    m.stop()


def test_marks_in_a_forked_child(root: Root) -> None:
    with monitor() as m:
        handle = m.guard(0.9)

        def child() -> None:
            m.on_pressure(0.5, print).cancel()
            handle.cancel()
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
                doubly = [threading.Thread(target=handles[0].cancel) for _ in range(2)]
                for thread in doubly:
                    thread.start()
                for handle in handles:
                    handle.cancel()
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
        assert m._marks._handles == []
    assert faults == []


def test_a_mark_cancelled_between_two_looks_at_it(root: Root) -> None:
    """As by another thread, at the worst moment."""

    class Bits(dict[int, Any]):
        def __contains__(self, bit: object) -> bool:
            found = super().__contains__(bit)
            self.pop(bit, None)  # type: ignore[call-overload]
            return found

    class Handles(list[Any]):
        def __contains__(self, handle: object) -> bool:
            found = super().__contains__(handle)
            self.clear()
            return found

    with monitor(leaks=False) as m:
        handle = m.on_pressure(0.9, print)
        marks = m._marks
        marks._of_bit = Bits(marks._of_bit)
        root.use(0.95)
        settle(m, root)
        m.step()
        marks._handles = Handles(marks._handles)
        handle.cancel()


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


def test_a_stop_and_a_continue_of_the_process(path: Path) -> None:
    code = """
with memtools.MemoryMonitor(sys.argv[1], 1, device="cpu") as m:
    m.guard(0.999)
    while not os.path.exists(sys.argv[1] + ".end"):
        with m.phase("x"):
            m.step()
print(m.leaks().kind)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, memtools\n" + code, path],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def total() -> int:
        try:
            return read_record(path).total
        except FileNotFoundError:
            return 0

    for _ in range(3):
        seen = total()
        wait_for(lambda n=seen: total() > n + 20)  # type: ignore[misc]
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        stopped, until = total(), time.monotonic() + 0.2
        while time.monotonic() < until:
            assert total() == stopped
        process.send_signal(signal.SIGCONT)
    path.with_suffix(".mem.end").touch()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "quiet\n")
    assert last(path) == "exit: normal"


def test_a_thousand_short_lived_children(path: Path) -> None:
    with monitor(path) as m:
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(1000):
            os.posix_spawn("/bin/true", ["true"], {})
            m.step()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        assert m._last is not None
        sampler = m._last.sampler
        wait_for(lambda: (x := sampler.latest()) is not None and x.children == 0)
        use_all_of(m)
        assert len(os.listdir("/proc/self/fd")) <= files
    assert last(path) == "exit: normal"


def test_a_monitor_in_a_dataloader_worker(tmp_path: Path) -> None:
    torch_data = pytest.importorskip("torch.utils.data")

    class Data(torch_data.Dataset):  # type: ignore[name-defined,misc]
        def __init__(self, work: Callable[[int], int]) -> None:
            self.work = work

        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> int:
            return self.work(i)

    def work(i: int) -> int:
        outer.step()  # not running here
        with monitor(tmp_path / f"worker{i}.mem") as own:
            use_all_of(own)
        return int(outer.running)

    with monitor(tmp_path / "run.mem") as outer:
        loader: Any = torch_data.DataLoader(Data(work), num_workers=2, batch_size=1)
        assert sum(int(x) for x in loader) == 0
        outer.step()
    assert (outer.step_count, last(tmp_path / "run.mem")) == (1, "exit: normal")
    for i in range(4):
        assert last(tmp_path / f"worker{i}.mem") == "exit: normal"


def test_a_daemon_thread_that_steps_while_the_interpreter_ends(path: Path) -> None:
    done = in_python(
        "import threading\nm = memtools.MemoryMonitor(sys.argv[1], 1, device='cpu'); m.start()\n"
        "def work():\n  while True:\n    with m.phase('x'): m.step()\n    m.mark('y')\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "while m.step_count < 2000: pass\nsys.exit(3)",
        path,
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert read_record(path).complete
