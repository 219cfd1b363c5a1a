"""`memtools run script`: what the script sees and does is what `python script` does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import memtools
from memtools._cli.run import BOOT
from tests.cli.runs import RUN, execute, write
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
