"""The sampling thread and the life of its process: signals, forks, workers, exits, stops and what
the system refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

import memtools
from memtools import _core
from tests.kit.children import wait_for
from tests.kit.ownprocess import ENV, PROJECT, in_own_process
from tests.monitor.samplercases import columns
from tests.monitor.test_sampler import MS, threads

WRITER = f"""
import os, signal, sys, threading, time
from memtools import _core
MS = 10**6
writer = _core.RecordWriter(sys.argv[1], {columns()!r})
sampler = _core.Sampler(MS, writer)
sampler.start()
def wait_for(samples):
    while sampler.samples < samples:
        time.sleep(0.001)
wait_for(6)  # and so five are written: a sample is counted before its row is
"""


def script(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """A program with a running sampler, which ends by itself."""
    path = tmp_path / "program.py"
    path.write_text(WRITER + code)
    record = tmp_path / "run.mem"
    return subprocess.run(
        [sys.executable, path, record], cwd=PROJECT, capture_output=True, text=True, timeout=120,
        env=ENV,
    )  # fmt: skip


# --- signals --------------------------------------------------------------------------------------


def test_the_thread_takes_no_signal(tmp_path: Path) -> None:
    """One that the only other thread blocks stays pending."""
    done = script(tmp_path, """
caught = []
signal.signal(signal.SIGUSR1, lambda number, _: caught.append(number))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
os.kill(os.getpid(), signal.SIGUSR1)
assert signal.SIGUSR1 in signal.sigpending()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
assert caught == [signal.SIGUSR1]
""")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_no_burst_follows_a_stop_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(WRITER + "print('go', flush=True)\nsys.stdin.read()\nsampler.stop()\n")
    record = tmp_path / "run.mem"
    process = subprocess.Popen(
        [sys.executable, path, record], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=ENV,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    stopped = time.monotonic_ns()
    while time.monotonic_ns() < stopped + 400 * MS:
        time.sleep(0.05)
    seen = len(memtools.read_record(record).samples)
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: len(memtools.read_record(record).samples) > seen + 20)
    process.communicate("")
    assert process.returncode == 0
    times = list(memtools.read_record(record).samples.time_ns)
    assert max(b - a for a, b in pairwise(times)) >= 400 * MS
    close = [b - a for a, b in zip(times[:-1], times[12:-1], strict=False)]
    assert min(close) > 5 * MS, "twelve samples of 1 ms in less than half of their time"


# --- other threads and processes ------------------------------------------------------------------


def test_it_samples_while_the_interpreter_is_held() -> None:
    import ctypes

    sampler = _core.Sampler(MS)
    sampler.start()
    wait_for(lambda: sampler.samples > 0)
    usleep, interval = ctypes.PyDLL(None).usleep, sys.getswitchinterval()
    sys.setswitchinterval(3600)  # and so this thread keeps the GIL until it waits for something
    try:
        before, end = sampler.samples, time.monotonic() + 30
        while sampler.samples <= before + 5:
            assert time.monotonic() < end
            usleep(1000)
    finally:
        sys.setswitchinterval(interval)
    sampler.stop()


def test_stops_from_several_threads_at_once() -> None:
    sampler = _core.Sampler(MS)
    for _ in range(50):
        sampler.start()
        others = [threading.Thread(target=sampler.stop) for _ in range(4)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        assert not sampler.running
    assert threads() == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "helpers"), [("fork", 0), ("spawn", 1), ("forkserver", 2)])
def test_workers_have_their_own(tmp_path: Path, method: str, helpers: int) -> None:
    """The parent's sampler counts them, and each worker's own writes a record of its own."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import multiprocessing, sys, time
from memtools import _core
COLUMNS = {columns()!r}

def work(path, ready, go):
    writer = _core.RecordWriter(path, COLUMNS)
    sampler = _core.Sampler(10**6, writer)
    sampler.start()
    while sampler.samples < 6:  # and so five are written
        time.sleep(0.001)
    ready.release()
    go.wait()

if __name__ == "__main__":
    ctx = multiprocessing.get_context({method!r})
    sampler = _core.Sampler(10**6, limit=2**40)
    sampler.start()
    ready, go = ctx.Semaphore(0), ctx.Event()
    paths = [sys.argv[1] + name for name in "ab"]
    workers = [ctx.Process(target=work, args=(path, ready, go)) for path in paths]
    for worker in workers:
        worker.start()
    for worker in workers:
        ready.acquire()
    while sampler.latest().children != 2 + {helpers}:
        time.sleep(0.001)
    assert sampler.latest().children_private > 0
    assert sampler.used() > sampler.latest().children_private
    go.set()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    while sampler.latest().children != {helpers}:
        time.sleep(0.001)
""")
    done = subprocess.run(
        [sys.executable, program, tmp_path / "run"], timeout=120, capture_output=True, text=True,
        env=ENV,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    for name in "ab":
        assert len(memtools.read_record(tmp_path / f"run{name}").samples) >= 5


# --- the end --------------------------------------------------------------------------------------

ENDINGS = {
    "forgotten": ("", 0),
    "kept in a module": ("import memtools; memtools.forgotten = sampler", 0),
    "kept alive for ever": ("from ctypes import *; pythonapi.Py_IncRef(py_object(sampler))", 0),
    "an exception": ("raise SystemExit(3)", 3),
    "no clean-up at all": ("os._exit(4)", 4),
    "on another thread": ("threading.Thread(target=lambda: wait_for(10)).start()", 0),
    "a daemon in stop()": ("threading.Thread(target=sampler.stop, daemon=True).start()", 0),
    "the writer closed first": ("writer.close(); wait_for(10)", 0),
    "the writer let go first": ("del writer; wait_for(10)", 0),
    "in a cycle": ("loop = [sampler]; loop.append(loop); del sampler, loop, writer", 0),
    "at exit": ("import atexit; atexit.register(sampler.stop)", 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_program_ends_as_it_would_without(tmp_path: Path, ending: str) -> None:
    code, wanted = ENDINGS[ending]
    done = script(tmp_path, code)
    assert (done.returncode, done.stdout, done.stderr) == (wanted, "", "")
    assert len(memtools.read_record(tmp_path / "run.mem").samples) >= 5


def test_the_writer_may_be_closed_at_any_moment(tmp_path: Path) -> None:
    for _ in range(20):
        writer = _core.RecordWriter(tmp_path / "run.mem", columns())
        sampler = _core.Sampler(MS // 10, writer)
        sampler.start()
        closing = threading.Thread(target=writer.close)
        closing.start()
        sampler.stop()
        closing.join()
        sampler.start()
        wait_for(lambda s=sampler: s.samples > 4)  # type: ignore[misc]
        del sampler, writer
    assert threads() == []


@pytest.mark.slow
def test_many_starts_and_stops_cost_no_memory(tmp_path: Path) -> None:
    told = in_own_process(
        f"""
        import os, sys
        from memtools import _core
        from tests.kit.growth import least_growth
        from tests.kit.threadnames import thread_names

        writer = _core.RecordWriter(sys.argv[1], {columns()!r})
        probe, HEAP = _core.Probe(), 32

        def rounds(n):
            for _ in range(n):
                sampler = _core.Sampler({MS}, writer)
                sampler.watch(0.5)
                sampler.start()
                sampler.stop()
                sampler.start()

        rounds(50)
        probe.rss()  # which opens a file
        files, used = len(os.listdir("/proc/self/fd")), probe.read(HEAP).heap_used
        resident = least_growth(rounds, 1000, probe.rss)
        print(thread_names().count("memtools"), len(os.listdir("/proc/self/fd")) - files,
              probe.read(HEAP).heap_used - used, resident)
        """,
        tmp_path / "run.mem",
    )
    running, files, used, resident = map(int, told.split())
    assert (running, files) == (0, 0)
    assert used < 1000 * 64
    assert resident < 4 << 20


# --- what the system refuses ----------------------------------------------------------------------


def test_without_a_thread_it_says_so_and_can_start_later(tmp_path: Path) -> None:
    done = script(tmp_path, """
import resource
text = ""
limit = resource.getrlimit(resource.RLIMIT_AS)
pages = int(open("/proc/self/statm").read().split()[0])
other = _core.Sampler(MS)
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096, limit[1]))
try:
    other.start()
except RuntimeError as error:
    text = str(error)
resource.setrlimit(resource.RLIMIT_AS, limit)
assert "pthread_create, errno 11" in text, text
assert not other.running
other.start()
assert other.running
""")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_without_descriptors_it_goes_on_and_recovers(tmp_path: Path) -> None:
    done = script(tmp_path, """
import resource
sampler.stop()  # so that no other thread has a file open now and closes it then
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
kept = [os.open("/", os.O_RDONLY)]
resource.setrlimit(resource.RLIMIT_NOFILE, (kept[0] + 1, hard))
starved = _core.Sampler(MS)
starved.start()
while starved.samples < 9:
    time.sleep(0.001)
assert starved.latest().rss is None, starved.latest()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
while starved.latest().rss is None or starved.latest().children != 0:
    time.sleep(0.001)
""")  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
