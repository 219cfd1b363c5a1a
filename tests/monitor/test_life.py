"""A monitor from start to stop: twice, by exceptions, signals, forks, exits; and its record."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from memtools import MemoryMonitor, _core, read_record
from memtools._record.figures import figures_of
from tests.kit.children import in_child, wait_for
from tests.kit.threadnames import thread_names
from tests.monitor.root import told

PROJECT = Path(__file__).resolve().parents[2]


def monitor(path: Path | None = None, **options: Any) -> MemoryMonitor:
    return MemoryMonitor(path, **{"interval_ms": 1, "device": "cpu", **options})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mem"


def last(path: Path) -> str:
    record = read_record(path)
    assert record.complete
    assert record.events[-1].kind == "end"
    return record.events[-1].text


def threads() -> int:
    """Sampling threads of this process."""
    return thread_names().count("memtools")


def test_what_a_record_holds(path: Path) -> None:
    m = monitor(path, name="rank 3", limit="1 TiB")
    assert m.record_path == str(path)
    with m:
        assert m.running
        for _ in range(5):
            m.step(2)
        m.mark("half\0way")
        wait_for(lambda: m.samples_taken > 3)
    record = read_record(path)
    assert [c.name for c in record.columns][:5] == ["step", "rss", "private", "swap", "cgroup_used"]
    assert [c.name for c in record.columns][-2:] == ["job", "shm"]
    assert record.samples.values["process"] == record.samples.values["rss"]  # no page twice
    assert {c.name: c.unit for c in record.columns}["pressure"] == "0.01%"
    assert (record.total, record.samples.values["step"][-1]) == (m.samples_taken, 10)
    assert record.samples.values["rss"][-1] > 2**20
    assert told(record) == ["start", "mark", "end"]
    start, mark, end = (one for one in record.events if one.kind in told(record))
    assert start.text.startswith("rank 3: host every 1 ms; ")
    assert (mark.text, mark.step, m.step_count, end.text) == ("half\\0way", 10, 10, "exit: normal")


def test_a_second_start_is_refused_and_a_second_stop_is_not(path: Path) -> None:
    m = monitor(path)
    m.stop()
    m.start()
    with pytest.raises(RuntimeError, match="running already; stop\\(\\) it first"):
        m.start()
    assert m.running
    wait_for(lambda: threads() == 1)  # it takes its name itself
    run = m._last
    m.stop()
    m.stop()
    assert (m.running, threads()) == (False, 0)
    assert run is not None
    assert not run.end("once more"), "as two that stop it at one time"
    assert last(path) == "exit: stop()"


def test_a_new_run_of_the_same_monitor_takes_the_place_of_the_old(path: Path) -> None:
    m = monitor(path)
    for steps in (3, 5):
        with m:
            m.step(steps)
        assert m.step_count == steps
    assert read_record(path).samples.values["step"][-1] == 5


def test_two_monitors_at_once(tmp_path: Path) -> None:
    with monitor(tmp_path / "a.mem") as a, monitor(tmp_path / "b.mem") as b:
        with a.phase("x"), b.phase("y"):
            a.step(1)
            b.step(2)
        wait_for(lambda: threads() == 2)
    assert [p.name for p in read_record(tmp_path / "a.mem").phases] == ["x"]
    assert [p.name for p in read_record(tmp_path / "b.mem").phases] == ["y"]
    assert (a.step_count, b.step_count) == (1, 2)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such batch\nsecond line"), "exit: exception ValueError: no such batch"),
        (KeyboardInterrupt(), "exit: exception KeyboardInterrupt"),
        (SystemExit(3), "exit: code 3"),
        (SystemExit(), "exit: code 0"),
        (SystemExit("died\nhere"), "exit: code 1: died"),
        (SystemExit(259), "exit: code 3"),
        (
            ValueError("a longer text " * 20),
            "exit: exception ValueError: " + "a longer text " * 11 + "a ...",
        ),
        (OSError("401: token=abc123"), "exit: exception OSError: 401: token=***"),
    ],
)
def test_how_it_ended(path: Path, error: BaseException, text: str) -> None:
    with pytest.raises(type(error)), monitor(path):
        raise error
    assert last(path) == text


def test_stopped_in_a_signal_handler(path: Path) -> None:
    m = monitor(path)
    m.start()
    old = signal.signal(signal.SIGUSR1, lambda *_: m.stop())
    try:
        with m.phase("train"):
            for step in range(2000):
                m.step()
                if step == 1000:
                    os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert not m.running
    assert m.step_count == 1001
    assert last(path) == "exit: stop()"


def test_stopped_by_another_thread(path: Path) -> None:
    m = monitor(path)
    m.start()
    stopper = threading.Thread(target=m.stop)
    stopper.start()
    while m.running:
        with m.phase("x"):
            m.step()
    stopper.join()
    assert last(path) == "exit: stop()"


def in_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import os, sys, memtools\n" + code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=PROJECT
    )


BEGIN = "m = memtools.MemoryMonitor(sys.argv[1]); m.start(); m.step()\n"


@pytest.mark.slow
def test_in_a_forked_child_it_is_not_running_and_writes_nothing(path: Path) -> None:
    m = monitor(path)

    @m.phase("both")
    def work() -> None:
        m.step(100)
        m.mark("from the child")

    def child() -> None:
        assert not m.running
        work()
        m.stop()
        assert m.findings() == ()
        assert m.summary().startswith("Memory Usage:")
        m.metrics(expert=True)
        m.log_memory(1)
        m.cleanup_memory()
        with pytest.warns(RuntimeWarning, match="the record of this monitor is .*run-2.mem"):
            m.start()
        m.stop()
        with monitor() as own:
            own.step()
            assert own.samples_taken >= 0

    with m:
        m.step()
        assert in_child(child) == 0
        work()
    record = read_record(path)
    assert [kind for kind in told(record) if kind != "phase"] == ["start", "fork", "mark", "end"]
    assert record.samples.values["step"][-1] == 101
    assert {p.name: p.count for p in record.phases} == {"both": 1}


@pytest.mark.slow
def test_many_forks_are_one_event_a_second(path: Path) -> None:
    began = time.monotonic()
    with monitor(path):
        for _ in range(30):
            assert in_child(lambda: None) == 0
    events = [e for e in read_record(path).events if e.kind == "fork"]
    assert 1 <= len(events) <= 1 + time.monotonic() - began
    assert events[0].text == "a child process forked"


def spawned(queue: Any, path: str) -> None:
    with MemoryMonitor(path) as m:
        m.step(2)
    queue.put(m.step_count)


@pytest.mark.slow
def test_a_spawned_process_has_its_own(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with monitor(tmp_path / "a.mem") as m:
        process = context.Process(target=spawned, args=(queue, str(tmp_path / "b.mem")))
        process.start()
        assert queue.get(timeout=120) == 2
        process.join()
        m.step()
    assert last(tmp_path / "b.mem") == "exit: normal"
    with pytest.raises(TypeError, match="cannot be pickled; make one there"):
        pickle.dumps(m)


# --- a start that fails ---


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "No space left on device; free space there"),
        (errno.EROFS, "Read-only file system; the file system is read-only; name another place"),
        (errno.EMFILE, "Too many open files; close files"),
        (errno.EIO, "Input/output error; name another place, or pass log=None"),
    ],
)
def test_a_record_that_cannot_be_made(
    path: Path, number: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(_core, "RecordWriter", refuse)
    m = monitor(path)
    with pytest.raises(OSError, match=advice) as caught:
        m.start()
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert (m.running, threads()) == (False, 0)


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    (tmp_path / "link").symlink_to("nothing")
    for place, kind, text in (
        (tmp_path / "no" / "run.mem", FileNotFoundError, "make its directory first"),
        (tmp_path / "text", FileExistsError, "it, or its .previous.mem, is not a record"),
        (tmp_path / "text" / "run.mem", NotADirectoryError, "make its directory first"),
        (tmp_path, IsADirectoryError, "Is a directory; name a file in it"),
        (tmp_path / "link", FileNotFoundError, "a symbolic link is there that leads to nothing"),
    ):
        with pytest.raises(kind, match=text):
            monitor(place).start()
    assert (tmp_path / "text").read_text() == "mine"


def test_a_program_may_leave_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    m = monitor("run.mem")
    (tmp_path / "before").mkdir()
    monkeypatch.chdir(tmp_path / "before")
    m.start()
    (tmp_path / "after").mkdir()
    monkeypatch.chdir(tmp_path / "after")
    m.step()
    assert m.record_path == str(tmp_path / "run.mem")
    m.stop()
    assert read_record(m.record_path).complete
    assert sorted(os.listdir(tmp_path)) == ["after", "before", "run.mem"]


def test_a_record_that_another_monitor_writes(tmp_path: Path) -> None:
    """It gets the next name, also where warnings are errors: what watches must not end a job."""
    with monitor(tmp_path / "a.mem"):
        second = monitor(tmp_path / "a.mem")
        with pytest.warns(RuntimeWarning, match="another monitor writes .*a.mem already"):
            second.start()
        assert second.record_path == str(tmp_path / "a-2.mem")
        second.stop()
        with warnings.catch_warnings(), monitor(tmp_path / "a.mem"):
            warnings.simplefilter("error")
            third = monitor(tmp_path / "a.mem")
            third.start()
            third.stop()
    made = ["a-2.mem", "a-2.previous.mem", "a-3.mem", "a.mem"]
    assert sorted(path.name for path in tmp_path.iterdir()) == made


def test_the_record_of_a_killed_run_is_kept(path: Path) -> None:
    for n in (1, 2):
        done = in_python(BEGIN + "os.kill(os.getpid(), 9)", path)
        assert done.returncode == -signal.SIGKILL
        m = monitor(path)
        with pytest.warns(RuntimeWarning, match=f"cut off; its record is kept as .*run.{n}.mem"):
            m.start()
        m.stop()
        assert last(path) == "exit: stop()"
        kept = read_record(path.with_suffix(f".{n}.mem"))
        assert (told(kept), kept.complete) == (["start"], False)


def test_the_record_of_the_run_before_is_kept_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "memtools")
    written, previous = [], path.with_suffix(".previous.mem")
    for _ in range(3):
        with monitor(path):
            written.append(path.stat().st_ino)
    assert [previous.stat().st_ino, path.stat().st_ino] == written[1:]
    assert len([*path.parent.iterdir()]) == 2
    assert caplog.messages == [f"{path} of the run before is kept as {previous}"] * 2


@pytest.mark.slow
def test_no_file_descriptors_left(path: Path) -> None:
    gc.collect()  # monitors of other tests: their files must not close on the way
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The limit is one of numbers. Those that other tests left free among the open ones are taken,
    # so that the next one to be had is `open_now`.
    highest = max(map(int, os.listdir("/proc/self/fd")))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] <= highest:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    open_now = taken[-1] + 1
    refused = 0
    try:
        for room in range(-8, 40):
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + room, hard))
            path.unlink(missing_ok=True)
            m = monitor(path)
            try:
                m.start()
            except OSError as error:
                assert error.errno == errno.EMFILE
                assert error.filename == str(path)
                refused += 1
            else:
                m.step()
                m.stop()
            assert not m.running
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)
    assert (0 < refused < 48, threads()) == (True, 0)
    with monitor(path) as m:
        m.step()
    assert last(path) == "exit: normal"


def test_no_thread_to_be_had(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class NoThread:
        step_count = 0

        def __init__(self, *_: object, **__: object) -> None:
            made.append(self)

        def limit(self) -> None:
            return None

        def start(self) -> None:
            raise RuntimeError("the system gives no thread")

    monkeypatch.setattr(_core, "Sampler", NoThread)
    m = monitor(path)
    with pytest.raises(RuntimeError, match="gives no thread"):
        m.start()
    assert (len(made), m.running) == (1, False)
    assert read_record(path).complete


class Broken:
    """A RecordWriter whose n-th call, and each one after it, fails."""

    path, closed = "run.mem", False

    def __init__(self, n: int) -> None:
        self.left, self.calls = n, 0

    def _call(self, *_: object, **__: object) -> None:
        self.calls += 1
        if self.calls >= self.left:
            raise OSError("no such luck")

    event = phase = close = _call


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_training_goes_on_without_its_record_and_it_is_said_once(path: Path, n: int) -> None:
    with monitor(path) as m:
        assert m._last is not None
        m._last.log._writer = writer = Broken(n)  # type: ignore[assignment]

        def train() -> None:
            for _ in range(5):
                with m.phase("x"):
                    m.step()
                m.mark("y")

        with pytest.warns(RuntimeWarning, match="nothing more is recorded: no such luck") as said:
            train()
        assert m.step_count == 5
    assert (len(said), m.running) == (1, False)
    assert writer.calls == n + 1, "only to close it"


# --- whether leaks are tested ---


def test_a_monitor_that_is_not_to_test_leaks_says_nothing_of_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    m = monitor(path, leaks=False)
    with m:
        for _ in range(40):
            m.step()
    assert caplog.messages == []
    assert figures_of(read_record(path)).verdict.untested == ""
