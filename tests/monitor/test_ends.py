"""However a program ends, it ends as it would without memtools, and its record tells how."""

from __future__ import annotations

import errno
import functools
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import memtools
from memtools._base.oom import shortage
from memtools._monitor.ending import end_by, limits_met
from memtools._record.events import ending
from memtools._record.figures import figures_of
from memtools._record.kinds import Counters, End, Limit
from tests.cli.runs import RUN, execute, run, write
from tests.kit.ownprocess import ENV
from tests.monitor.root import LIMIT, Root, root

__all__ = ["root"]

NO_MARK = None  # nothing of the process runs when it ends so
TOLD = ("killed by SIGTERM", "killed by SIGHUP")  # of signals, those that a summary follows
OUT_OF_MEMORY = """
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_{}, (used + (64 << 20),) * 2)
    held = []
    while True:
        held.append(bytearray(1 << 16))
    """

# What a program does, and what its record says of its end.
ENDS: dict[str, tuple[str, str | None]] = {
    "clean": ("pass", "code 0"),
    "an exit code": ("import sys; sys.exit(3)", "code 3"),
    "a text for sys.exit": ("import sys; sys.exit('no such batch')", "code 1"),
    "an exception": ("raise ValueError('no such batch')", "exception ValueError: no such batch"),
    "an error that a prompt has kept": ("import sys; sys.last_value = ValueError()", "code 0"),
    "an exit after it": (
        "import sys; sys.last_value = ValueError(); raise SystemExit('no')",
        "code 1",
    ),
    "a MemoryError": ("bytearray(1 << 60)", "exception MemoryError"),
    "RLIMIT_AS": (OUT_OF_MEMORY.format("AS"), "exception MemoryError"),
    "RLIMIT_DATA": (OUT_OF_MEMORY.format("DATA"), "exception MemoryError"),
    "a guard": (
        "import memtools; raise memtools.HostMemoryPressure('host memory runs out')",
        "exception HostMemoryPressure: host memory runs out",
    ),
    "os._exit": ("import os; os._exit(5)", NO_MARK),
    "SIGKILL": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", NO_MARK),
    "SIGTERM": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "killed by SIGTERM"),
    "SIGTERM, and nothing happens after it": (
        """
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
        while True: os.write(1, b"x")
        """,
        "killed by SIGTERM",
    ),
    "SIGTERM in a loop": (
        """
        import os, signal, threading
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while True: pass
        """,
        "killed by SIGTERM",
    ),
    "SIGTERM asleep": (
        """
        import os, signal, threading, time
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(100)
        """,
        "killed by SIGTERM",
    ),
    "SIGTERM while C code runs": (
        """
        import re, signal
        timer = __import__("subprocess").Popen(
            ["sh", "-c", "sleep 0.2; kill -TERM $PPID"], start_new_session=True
        )
        re.match("(a*)*b", "a" * 40)  # for hours, with the lock of the interpreter
        """,
        "killed by SIGTERM",
    ),
    "SIGHUP": ("import os, signal; os.kill(os.getpid(), signal.SIGHUP)", "killed by SIGHUP"),
    "Ctrl-C": (
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "exception KeyboardInterrupt",
    ),
    "Ctrl-C that another hook prints": (
        """
        import os, signal, sys
        sys.excepthook = lambda *_: print("interrupted", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGINT)
        """,
        "exception KeyboardInterrupt",
    ),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    "SIGBUS": (
        """
        import mmap, os
        with open("cut", "wb+") as file:
            file.truncate(4096)
            page = mmap.mmap(file.fileno(), 4096)
            file.truncate(0)
        page[0]
        """,
        "killed by SIGBUS",
    ),
    "abort": ("import os; os.abort()", "killed by SIGABRT"),
    "a code that a shell gives to signals": ("import sys; sys.exit(143)", "code 143"),
    "a handler of its own": (
        """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        "code 9",
    ),
    "an ignored SIGHUP": (
        """
        import os, signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGHUP)
        """,
        "code 0",
    ),
    "faulthandler": ("import ctypes, faulthandler; faulthandler.enable(); ctypes.string_at(0)",
                     "killed by SIGSEGV"),
}  # fmt: skip
# A program that forgets its monitor, and one whose monitor is left by what ends the program.
START = "import memtools; memtools.MemoryMonitor('run.mem', device='cpu').start()\n"
WITH = "import memtools\nwith memtools.MemoryMonitor('run.mem', device='cpu'):\n"
LEFT = ("clean", "an exit code", "a text for sys.exit", "an exception", "RLIMIT_AS", "a guard",
        "SIGTERM", "Ctrl-C", "a handler of its own")  # fmt: skip

Ends = Callable[[str], tuple[int, bytes]]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """The exit status and the output of a case without memtools, which runs once."""

    @functools.cache
    def ends(case: str) -> tuple[int, bytes]:
        folder = tmp_path_factory.mktemp("plain")
        script = str(write(folder, ENDS[case][0]))
        done = execute([sys.executable, script], folder)
        return done.returncode, done.stdout

    return ends


def check(path: Path, end: str | None) -> None:
    record = memtools.read_record(path)
    assert not record.written
    ends = [event.text for event in record.events if event.kind == "end"]
    assert ends == ([] if end is None else [f"exit: {end}"])
    assert record.complete == (end is not None and not end.startswith("killed"))
    assert str(record)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_under_memtools_run(case: str, without: Ends, tmp_path: Path) -> None:
    program, end = ENDS[case]
    found = run(tmp_path, str(write(tmp_path, program)))
    assert (found.returncode, found.stdout) == without(case)
    assert b"Exception ignored" not in found.stderr
    check(tmp_path / "run.mem", end)
    said = [line for line in found.stderr.decode().splitlines() if line.startswith("memtools: ")]
    if end is None or (end.startswith("killed") and end not in TOLD):
        return
    assert said[-1].startswith("memtools: Wrote run.mem")
    told = ending(memtools.read_record(tmp_path / "run.mem"))
    words = told.text[:1].upper() + told.text[1:]
    assert any(words in line for line in said) == (end != "code 0"), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "is_left"), [(case, False) for case in ENDS] + [(case, True) for case in LEFT]
)
def test_with_a_monitor(case: str, is_left: bool, without: Ends, tmp_path: Path) -> None:
    program, end = ENDS[case]
    code = START + textwrap.dedent(program)
    if is_left:
        code = WITH + textwrap.indent(textwrap.dedent(program), "    ")
        end = {"code 0": "normal", "code 1": "code 1: no such batch"}.get(str(end), end)
    write(tmp_path, code)
    found = execute([sys.executable, "train.py"], tmp_path)
    assert (found.returncode, found.stdout) == without(case)
    assert b"Exception ignored" not in found.stderr
    check(tmp_path / "run.mem", end)


@pytest.mark.slow
def test_a_program_that_is_terminated_has_a_summary(tmp_path: Path) -> None:
    write(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(100)\n")
    pipe = subprocess.PIPE
    command = [*RUN, "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "memtools: It was killed by SIGTERM" in errors
    assert "workers" not in errors, "what prints the summary is no process of the program"
    assert errors.splitlines()[-1].startswith("memtools: Wrote run.mem")


@pytest.mark.slow
def test_a_reader_of_the_summary_that_does_not_read_keeps_nobody_from_ending(
    tmp_path: Path,
) -> None:
    program = """
        import fcntl, os, signal
        reading, writing = os.pipe()
        os.write(writing, bytes(fcntl.fcntl(writing, 1032)))  # all that it holds
        os.dup2(writing, 2)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    write(tmp_path, program)
    assert run(tmp_path, "train.py").returncode == -signal.SIGTERM
    check(tmp_path / "run.mem", "killed by SIGTERM")


@pytest.mark.slow
def test_a_forked_child_that_is_terminated_leaves_the_record_alone(tmp_path: Path) -> None:
    program = """
        import multiprocessing, time
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
        worker.start()
        worker.terminate()
        worker.join()
        print(worker.exitcode)
    """
    write(tmp_path, program)
    found = run(tmp_path, "train.py")
    assert found.stdout == b"-15\n"
    check(tmp_path / "run.mem", "code 0")


def test_a_hook_that_another_package_puts_over_ours_makes_no_circle(tmp_path: Path) -> None:
    program = """
        import sys, memtools
        monitor = memtools.MemoryMonitor()
        monitor.start()
        ours = sys.excepthook
        def theirs(*error):
            print("theirs", file=sys.stderr)
            ours(*error)
        sys.excepthook = theirs
        monitor.stop()
        {}
        1 / 0
        """
    for then in ("", "monitor.start()"):
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(program.format(then)))
        done = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert done.stderr.count("theirs") == 1
        assert done.stderr.count("ZeroDivisionError") == 1


def test_a_monitor_that_has_stopped_leaves_no_handler(tmp_path: Path) -> None:
    program = """
        import signal, sys, memtools
        def caught(): return [l for l in open("/proc/self/status") if l.startswith("SigCgt")]
        with memtools.MemoryMonitor("run.mem", device="cpu"): pass
        before, hook = caught(), sys.excepthook
        with memtools.MemoryMonitor("run.mem", device="cpu"):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            assert caught() != before and sys.excepthook is not hook
        assert caught() == before and sys.excepthook is hook is sys.__excepthook__
    """
    found = execute([sys.executable, str(write(tmp_path, program))], tmp_path)
    assert (found.returncode, found.stderr) == (0, b"")


def test_a_handler_that_was_restored_takes_no_mark_away(tmp_path: Path) -> None:
    """As libraries do it around a training: Python knows of no handler before theirs."""
    program = """
        import os, signal, time
        def has_handler():
            caught = next(l for l in open("/proc/self/status") if l.startswith("SigCgt"))
            return int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1
        before = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.signal(signal.SIGTERM, before)
        end = time.monotonic() + 20
        while not has_handler() and time.monotonic() < end: time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    write(tmp_path, START + textwrap.dedent(program))
    found = execute([sys.executable, "train.py"], tmp_path)
    assert found.returncode == -signal.SIGTERM
    check(tmp_path / "run.mem", "killed by SIGTERM")


def test_ctrl_c_at_a_prompt_is_no_end(tmp_path: Path) -> None:
    lines = START + "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nexit()\n"
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=lines, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "KeyboardInterrupt" in done.stderr
    check(tmp_path / "run.mem", "code 0")


def events_of(path: Path, kind: str) -> list[object]:
    return [event.data for event in memtools.read_record(path).events if event.kind == kind]


def test_a_run_writes_what_the_kernel_counted_meanwhile(root: Root, tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    root.count(oom_kill=2, oom=1)
    with memtools.MemoryMonitor(path, device="cpu"):
        root.count(oom_kill=3, oom=2, max=4)
    first, last = events_of(path, "counters")
    assert isinstance(first, Counters)
    assert isinstance(last, Counters)
    assert (first.own, first.group, first.boot, first.limit_bytes) == (True, "/", "a-boot", LIMIT)
    assert (first.oom_kill, first.oom, first.met) == (2, 1, 0)
    assert (last.oom_kill, last.oom, last.met) == (3, 2, 4)
    assert events_of(path, "shm_room") == []  # this root has no such folder


def fail(path: Path, error: BaseException) -> None:
    with memtools.MemoryMonitor(path, device="cpu"):
        raise error


def test_the_room_for_shared_memory_is_told_at_a_bad_end(tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    with pytest.raises(ValueError, match="no such batch"):
        fail(path, ValueError("no such batch"))
    assert len(events_of(path, "shm_room")) == 2
    with memtools.MemoryMonitor(path, device="cpu"):
        pass
    assert len(events_of(path, "shm_room")) == 1


def worker_error(said: str, cause: str = "") -> RuntimeError:
    error = RuntimeError(said)
    error.__cause__ = RuntimeError(cause) if cause else None
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (worker_error("DataLoader worker (pid(s) 7) exited unexpectedly",
                      "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"),
         "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"),
        (worker_error("DataLoader worker (pid(s) 7) exited unexpectedly"),
         "DataLoader worker (pid(s) 7) exited unexpectedly"),
        (worker_error("Caught RuntimeError in DataLoader worker process 1.\nOriginal Traceback:\n"
                      "  File x\nRuntimeError: no room\n"),
         "Caught RuntimeError in DataLoader worker process 1. RuntimeError: no room"),
        (worker_error("Caught X in DataLoader worker process 1."),
         "Caught X in DataLoader worker process 1."),
        (worker_error("two\nlines"), "two"),
    ],
)  # fmt: skip
def test_what_a_dataloader_says_of_its_worker(error: RuntimeError, said: str) -> None:
    assert end_by(error) == End(exception="RuntimeError", text=said)


def made_status(path: Path, size: int, data: int) -> str:
    (path / "proc/self").mkdir(parents=True, exist_ok=True)
    (path / "proc/self/status").write_text(f"Name:\tx\nVmSize:\t{size} kB\nVmData:  {data} kB\n")
    return str(path)


def test_the_limit_that_acted_is_the_one_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {resource.RLIMIT_AS: 100 << 20, resource.RLIMIT_DATA: 50 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, -1), -1))
    unsized, sized = MemoryError(), MemoryError("Unable to allocate 20.0 MiB for an array")

    def met(error: BaseException, size: int, data: int) -> list[Limit]:
        root = made_status(tmp_path, size << 10, data << 10)
        return limits_met(error, shortage(error), root)

    assert met(unsized, 70, 49) == [Limit("RLIMIT_DATA", 50 << 20, 49 << 20)]
    assert met(unsized, 99, 20) == [Limit("RLIMIT_AS", 100 << 20, 99 << 20)]
    assert met(sized, 70, 49) == [Limit("RLIMIT_DATA", 50 << 20, 49 << 20)]
    assert [limit.name for limit in met(sized, 90, 49)] == ["RLIMIT_AS", "RLIMIT_DATA"]
    assert met(sized, 10, 10) == [], "both had room: something else refused it"
    assert met(ValueError("x"), 99, 49) == []
    assert limits_met(unsized, shortage(unsized), str(tmp_path / "nothing")) == []
    limits.clear()
    assert met(unsized, 99, 49) == []


def test_limits_that_count_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, threads in {1: 3, 20: 4}.items():
        for number in range(threads):
            (tmp_path / f"proc/{pid}/task/{number}").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    root, thread = str(tmp_path), RuntimeError("can't start new thread")
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "proc/1").stat().st_uid or 0)
    limits = {resource.RLIMIT_NPROC: 7, resource.RLIMIT_FSIZE: 1000}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, -1), -1))
    nobody = os.geteuid() == 0  # whom RLIMIT_NPROC does not bind
    expected = [] if nobody else [Limit("RLIMIT_NPROC", 7, 7)]
    assert limits_met(thread, None, root) == expected
    assert limits_met(BlockingIOError(errno.EAGAIN, "x"), None, root) == expected
    limits[resource.RLIMIT_NPROC] = 8
    assert limits_met(thread, None, root) == [], "a stack found no room, or a control group's limit"
    assert limits_met(OSError(errno.EFBIG, "x"), None, root) == [Limit("RLIMIT_FSIZE", 1000, 0)]
    assert limits_met(OSError(errno.EIO, "x"), None, root) == []


@pytest.mark.slow
def test_of_two_limits_the_one_that_refused_is_named(tmp_path: Path) -> None:
    program = """
        import resource
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30),) * 2)
        resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20),) * 2)
        held = []
        while True: held.append(bytearray(1 << 16))
    """
    write(tmp_path, program)
    errors = run(tmp_path, "train.py").stderr.decode()
    assert "RLIMIT_DATA of " in errors
    assert "RLIMIT_AS" not in errors


@pytest.mark.slow
def test_a_kill_by_hand_is_never_called_out_of_memory(tmp_path: Path) -> None:
    """Whatever is known of control groups on this machine, and however much memory is used."""
    program = """
        import os, signal
        held = bytearray(b"x" * (200 << 20))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    write(tmp_path, program)
    assert run(tmp_path, "train.py").returncode == -signal.SIGKILL
    told = figures_of(memtools.read_record(tmp_path / "run.mem"))
    assert told.ending.kind == "gone"
    assert not told.ending.by_memory(near=told.near_limit)
    assert "out-of-memory killer" not in told.headline().replace("not by the out-of-memory", "")


@pytest.mark.slow
def test_a_worker_that_is_killed_by_hand(tmp_path: Path) -> None:
    """By hand: the exception of the DataLoader names the signal, and no memory is blamed. It dies
    before it has sent anything: killed in the middle of a batch, it may end the loader by an
    EOFError of the connection, which names nothing."""
    program = """
        import os, signal, torch
        from torch.utils.data import DataLoader, Dataset
        class Data(Dataset):
            def __len__(self): return 100
            def __getitem__(self, i):
                os.kill(os.getpid(), signal.SIGKILL)
        for batch in DataLoader(Data(), 4, num_workers=1): pass
    """
    write(tmp_path, program)
    assert run(tmp_path, "train.py").returncode == 1
    told = figures_of(memtools.read_record(tmp_path / "run.mem"))
    assert "is killed by signal: Killed" in told.ending.text
    assert "out-of-memory killer" not in told.headline().replace("not by the out-of-memory", "")
    assert told.ending.cause is None or told.ending.cause.by == "nobody"


# The run begins before multiprocessing is imported, as with `memtools run`: its own end comes last.
CHILD = """
import sys
import memtools

if __name__ == "__main__":
    monitor = memtools.MemoryMonitor(log=sys.argv[1])
    monitor.start()
import multiprocessing

def grow(there):
    kept = bytearray(b"x") * there.recv()
    there.send(len(kept))
    there.recv()

context = multiprocessing.get_context(sys.argv[2])
if __name__ == "__main__":
    here, there = context.Pipe()
    child = context.Process(target=grow, args=(there,), daemon=True)
    child.start()
    for _ in range(20):
        monitor.step()
    here.send(64 << 20)
    assert here.recv() == 64 << 20
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_children_have_at_the_end_is_read_before_they_are_ended(start, tmp_path):
    """The child has grown when it answers, and the program ends at once."""
    script, path = tmp_path / "program.py", tmp_path / "run.mem"
    script.write_text(CHILD)
    subprocess.run([sys.executable, script, path, start], check=True, env=ENV, timeout=100)
    workers = figures_of(memtools.read_record(path)).workers
    assert workers is not None
    assert workers.peak_bytes >= 64 << 20
