"""However a program ends, it ends as it would without memtools, and its record tells how."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memtools
from memtools.record.events import ending
from tests.cli.runs import RUN, execute, run, write

NO_MARK = None  # nothing of the process runs when it ends so
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
    "a text for sys.exit": ("import sys; sys.exit('no such batch')", "code 1: no such batch"),
    "a text for SystemExit": ("raise SystemExit('no such batch')", "code 1: no such batch"),
    "an exception": ("raise ValueError('no such batch')", "exception ValueError: no such batch"),
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
# With memtools.MemoryMonitor() around or before the program, in place of `memtools run`.
FORMS = {
    "start": "import memtools; memtools.MemoryMonitor('run.mem', device='cpu').start()\n",
    "with": "import memtools\nwith memtools.MemoryMonitor('run.mem', device='cpu'):\n",
}


def check(path: Path, end: str | None) -> None:
    record = memtools.read_record(path)
    assert not record.written
    ends = [event.text for event in record.events if event.kind == "end"]
    assert ends == ([] if end is None else [f"exit: {end}"])
    assert record.complete == (end is not None and not end.startswith("killed"))
    assert str(record)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_under_memtools_run(case: str, tmp_path: Path) -> None:
    program, end = ENDS[case]
    script = str(write(tmp_path, program))
    expected = execute([sys.executable, script], tmp_path)
    found = run(tmp_path, script)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert b"Exception ignored" not in found.stderr
    check(tmp_path / "run.mem", end)
    said = [line for line in found.stderr.decode().splitlines() if line.startswith("memtools: ")]
    if end is None or end.startswith("killed"):
        return  # it may have had no time for a summary
    assert said[-1].startswith("memtools: Wrote run.mem")
    told = ending(memtools.read_record(tmp_path / "run.mem"))
    words = told.text[:1].upper() + told.text[1:]
    assert any(words in line for line in said) == (end != "code 0"), said


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ENDS)
def test_with_a_monitor(case: str, form: str, tmp_path: Path) -> None:
    program, end = ENDS[case]
    plain = write(tmp_path, program, "plain.py").read_text()
    expected = execute([sys.executable, "plain.py"], tmp_path)
    if form == "with":
        plain = "".join(f"    {line}\n" for line in plain.splitlines())
        end = "normal" if end == "code 0" else end
    elif case.startswith("a text for "):  # it is heard of under memtools run alone
        end = "code 1"
    write(tmp_path, FORMS[form] + plain)
    found = execute([sys.executable, "train.py"], tmp_path)
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert b"Exception ignored" not in found.stderr
    check(tmp_path / "run.mem", end)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asleep", "in a loop"])
def test_a_program_that_is_terminated_has_a_summary(how: str, tmp_path: Path) -> None:
    """Where Python can run: it has 0.2 s to begin with it."""
    program = "import time\nprint('ready', flush=True)\nwhile True: "
    write(tmp_path, program + {"asleep": "time.sleep(100)", "in a loop": "pass"}[how])
    pipe = subprocess.PIPE
    command = [*RUN, "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert "memtools: It was killed by SIGTERM" in errors
    assert errors.splitlines()[-1].startswith("memtools: Wrote run.mem")


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
    write(tmp_path, FORMS["start"] + textwrap.dedent(program))
    found = execute([sys.executable, "train.py"], tmp_path)
    assert found.returncode == -signal.SIGTERM
    check(tmp_path / "run.mem", "killed by SIGTERM")


def test_ctrl_c_at_a_prompt_is_no_end(tmp_path: Path) -> None:
    lines = FORMS["start"] + "import os, signal; os.kill(os.getpid(), signal.SIGINT)\nexit()\n"
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=lines, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "KeyboardInterrupt" in done.stderr
    check(tmp_path / "run.mem", "code 0")
