"""`memtools run script`: what the script sees and does is what `python script` does."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import memtools
from memtools._cli.run import BOOT
from tests.cli.runs import RUN, execute, run, without_addresses, write
from tests.kit.long import LONG

# All that a program can ask about how it was started. Python 3.11 has no last_exc.
FACTS = """
    import __main__, inspect, os, pickle, sys, threading, warnings

    class Thing: pass

    def depth():
        try: return 1 + depth()
        except RecursionError: return 0

    for name in sorted(vars(__main__)):
        if name.startswith("__"):
            print(name, str(getattr(__main__, name)).partition(" object at ")[0])
    print(sys.argv, sys.path, sys.flags, sys.orig_argv, sys.executable, sys.warnoptions)
    print(sorted(os.environ.items()), os.getcwd(), sys.excepthook, sys.stdin.isatty())
    print(sys._xoptions, sys.stdout.line_buffering, sys.stdout.encoding, os.getppid())
    print(pickle.dumps(Thing()), sys.modules["__main__"] is __main__, depth())
    print([frame.filename for frame in inspect.stack()], "sitecustomize" in sys.modules)
    print(threading.current_thread().name, threading.active_count())
    warnings.warn("from the module", stacklevel=2)
"""
ENDINGS = {
    "falls off its end": "print('out')",
    "exit without code": "import sys; sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit 256": "import sys; sys.exit(256)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit with a message": "import sys; sys.exit('bad learning rate')",
    "exit with an object": "raise SystemExit([1, 2])",
    "a subclass of SystemExit": "class Stop(SystemExit): pass\nraise Stop(4)",
    "an exception": "def f(): raise ValueError('x')\nf()",
    "a chained exception": "try: 1 / 0\nexcept Exception as e: raise KeyError('k') from e",
    "an exception group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "a syntax error": "def f(:",
    "an interrupt": "raise KeyboardInterrupt",
    "an excepthook": "import sys\nsys.excepthook = lambda t, v, b: print('mine', t, v)\n1 / 0",
    "an excepthook that fails": """
        import sys
        def hook(*a): raise OSError(5)
        sys.excepthook = hook
        1 / 0
        """,
    "os._exit": "import os; print('lost'); os._exit(7)",
    "abort": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "blocked signals": """
        import os, signal
        for name in "INT", "TERM", "HUP", "USR1", "ALRM":
            number = signal.Signals["SIG" + name]
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])
            os.kill(os.getpid(), number)
            print(signal.sigwait([number]))
        """,
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')",
    "atexit that fails": "import atexit\natexit.register(lambda: 1 / 0)\nprint(1)",
    "exit in atexit": "import atexit, sys\natexit.register(lambda: sys.exit(9))",
    "a thread that goes on": """
        import threading
        go = threading.Event()
        threading.Thread(target=lambda: (go.wait(), print('late'))).start()
        threading.Timer(0.05, go.set).start()
        print('main is done')
        """,
    "a daemon thread": "from threading import *; Thread(target=Event().wait, daemon=True).start()",
    "a forked child": """
        import os, sys
        if os.fork() == 0:
            print('child'); sys.exit(5)
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
        sys.exit(6)
        """,
    "spawned workers": """
        import multiprocessing
        def double(x): return 2 * x
        if __name__ == '__main__':
            with multiprocessing.get_context('spawn').Pool(2) as pool:
                print(pool.map(double, [1, 2]))
        """,
    "forked workers": """
        import multiprocessing
        def double(x): return 2 * x
        with multiprocessing.get_context('fork').Pool(2) as pool: print(pool.map(double, [1, 2]))
        """,
    "a subprocess": """
        import subprocess, sys
        code = 'import os, sys; print(sys.path, "memtools" in sys.modules, sorted(os.environ))'
        print(subprocess.run([sys.executable, '-c', code], capture_output=True).stdout)
        """,
    "stdin": "import sys; print(sys.stdin.read().upper())",
    "unbuffered": "import os, sys; sys.stdout.write('a'); os.write(1, b'b'); sys.stderr.write('c')",
    "a closed stderr": "import os; os.close(2); print('on')",
    "a replaced stderr": "import io, sys; sys.stderr = io.StringIO(); print(1); 1 / 0",
}  # fmt: skip


#: From Python 3.12 on the interpreter warns of a fork in a process with threads, and a monitor has
#: one.
FORK_WARNING = re.compile(
    rb"[^\n]*DeprecationWarning: This process \(pid=\d+\) is multi-threaded, "
    rb"use of fork\(\)[^\n]*\n[^\n]*os\.fork\(\)[^\n]*\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDINGS)
def test_a_script_ends_as_it_does_under_python(case: str, tmp_path: Path) -> None:
    """tests/monitor/test_ends.py does the same of runs that print a summary."""
    script = str(write(tmp_path, ENDINGS[case]))
    expected = execute([sys.executable, script], tmp_path, b"typed")
    found = run(tmp_path, "--quiet", script, stdin=b"typed")
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    said = FORK_WARNING.sub(b"", found.stderr)
    assert without_addresses(said) == without_addresses(expected.stderr)
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.events[0].kind == "start"
    assert not record.written


WAYS = {
    "a script": ["train.py", "--lr", "0.1", "--", "-m", "x"],
    "a script of another folder": ["sub/inner.py", "--log", "x"],
    "a module": ["-m", "sub.inner", "--log", "x", "--", "y"],
    "a package": ["-m", "sub", "y"],
    "a program in the arguments": ["-c", "exec(open('train.py').read())", "-c", "--quiet"],
    "a folder": ["sub", "1"],
    "an archive": ["packed.zip", "1"],
    "standard input": ["-", "a", "-"],
}
FLAGS = {"none": [], "some": ["-O", "-X", "dev", "-W", "ignore::DeprecationWarning", "-B"],
         "unbuffered": ["-u"], "safe path": ["-P"]}  # fmt: skip


#: every way without flags, and all flags where Python finds the program on its path and where not
STARTS = [
    (way, flags)
    for way in WAYS
    for flags in FLAGS
    if LONG or flags == "none" or way in ("a script", "a module")
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "flags"), STARTS)
def test_a_program_finds_everything_as_under_python(way: str, flags: str, tmp_path: Path) -> None:
    for name in ("train.py", "sub/inner.py", "sub/__main__.py"):
        write(tmp_path, FACTS, name)
    write(tmp_path, "", "sub/__init__.py")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("__main__.py", textwrap.dedent(FACTS))
    stdin = textwrap.dedent(FACTS).encode()
    python = [sys.executable, *FLAGS[flags]]
    words = WAYS[way]
    # Under -P the folder that memtools was started in is on no path, for a module of the test.
    expected = execute([*python, *words], tmp_path, stdin)
    started = [*python, "-m", "memtools", "run", "--quiet"]
    found = execute([*started, *words], tmp_path, stdin)
    assert found.stdout.decode() == expected.stdout.decode()
    assert found.stderr.decode() == expected.stderr.decode()
    assert found.returncode == expected.returncode


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print('mine', len(sys.path) > 2, sys.path[0])", "sitecustomize.py")
    script = str(write(tmp_path, "import sitecustomize, os; print(sitecustomize, os.environ)"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found, expected = (
        subprocess.run([*start, script], cwd=tmp_path, env=environment, capture_output=True)
        for start in ([*RUN, "--quiet"], [sys.executable])
    )
    assert expected.stdout.startswith(b"mine True")
    # `memtools run` is a Python too, which reads it first.
    line, _, rest = found.stdout.partition(b"\n")
    assert (line, rest) == (b"mine True " + os.fsencode(tmp_path), expected.stdout)
    assert found.stderr == expected.stderr


def test_a_sitecustomize_that_fails_is_reported_as_by_python(tmp_path: Path) -> None:
    write(tmp_path, "raise ValueError('mine')", "sitecustomize.py")
    script = str(write(tmp_path, "print('runs')"))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found, expected = (
        subprocess.run([*start, script], cwd=tmp_path, env=environment, capture_output=True)
        for start in ([*RUN, "--quiet"], [sys.executable])
    )
    assert found.stdout == expected.stdout == b"runs\n"
    assert found.stderr == 2 * expected.stderr
    assert (tmp_path / "run.mem").exists()


@pytest.mark.parametrize("options", [None, "null"])
def test_the_folder_alone_on_the_path_starts_nothing(options: str | None, tmp_path: Path) -> None:
    """As in a child that is given the environment of its parent's start, in part."""
    environment = {**os.environ, "PYTHONPATH": str(BOOT)}
    if options is not None:
        environment["MEMTOOLS_RUN"] = options
    code = "import sys; print('runs', 'memtools' in sys.modules, sys.path[1:2])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("runs False")
    assert str(BOOT) not in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "USR1", "KILL"])
def test_a_signal_ends_it_as_it_ends_python(name: str, tmp_path: Path) -> None:
    number = getattr(signal, f"SIG{name}")
    script = str(
        write(tmp_path, "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)")
    )
    ends = []
    for start in ([sys.executable], [*RUN, "--quiet"]):
        pipe = subprocess.PIPE
        with subprocess.Popen([*start, script], cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        # Where in the loop it was interrupted, no two runs agree.
        ends.append((process.returncode, errors.splitlines()[:1], errors.splitlines()[-1:]))
    assert ends[0] == ends[1]
    assert ends[1][0] == -number
    record = memtools.read_record(tmp_path / "run.mem")
    assert not record.written
    assert record.events[0].kind == "start"
    assert record.complete == (name == "INT")  # which Python turns into an exception
    ends = [event.text for event in record.events if event.kind == "end"]
    expected = {"KILL": [], "INT": ["exit: exception KeyboardInterrupt"]}
    assert ends == expected.get(name, [f"exit: killed by SIG{name}"])
