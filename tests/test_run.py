"""`memtools run script`: what the script sees and does is what `python script` does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import memtools
from memtools._run import StepCounter, log_names
from memtools.cli.run import own_flags

RUN = [sys.executable, "-m", "memtools", "run"]
Done = subprocess.CompletedProcess[bytes]


def execute(command: Sequence[str], folder: Path, stdin: bytes = b"") -> Done:
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, timeout=60)


def run(folder: Path, *words: str, stdin: bytes = b"") -> Done:
    return execute([*RUN, *words], folder, stdin)


def without_addresses(text: bytes) -> bytes:
    return re.sub(rb"0x[0-9a-f]+", b"0x", text)


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


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


@pytest.mark.parametrize("case", ENDINGS)
def test_a_script_ends_as_it_does_under_python(case: str, tmp_path: Path) -> None:
    script = str(write(tmp_path, ENDINGS[case]))
    expected = execute([sys.executable, script], tmp_path, b"typed")
    found = run(tmp_path, "--quiet", script, stdin=b"typed")
    assert (found.returncode, found.stdout) == (expected.returncode, expected.stdout)
    assert without_addresses(found.stderr) == without_addresses(expected.stderr)
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


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("way", WAYS)
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
    assert record.total >= 1
    assert record.complete == (name == "INT")  # which Python turns into an exception


def test_the_record_tells_what_ran_and_how_it_ended(tmp_path: Path) -> None:
    write(tmp_path, "x = bytearray(100 << 20)\nraise ValueError('too much\\nof it')")
    found = run(tmp_path, "--limit", "1 GiB", "train.py", "--lr", "1")
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.complete
    assert record.command[1:] == ("train.py", "--lr", "1")
    assert max(record.buckets.most["rss"]) > 100 << 20
    lines = found.stderr.decode().splitlines()
    assert lines[-1] == f"memtools: Wrote run.mem ({record.nbytes / 2**20:.1f} MiB)"
    assert lines[-2] == "memtools: ended: exception ValueError: too much"
    assert " of 1.0 GiB (1" in found.stderr.decode()


CODES = {
    "pass": "code 0",
    "import sys; sys.exit()": "code 0",
    "import sys; sys.exit(3)": "code 3",
    "import sys; sys.exit('no')": "code 1",
    "raise SystemExit(256 + 7)": "code 7",
    "1 / 0": "exception ZeroDivisionError: division by zero",
    "raise KeyboardInterrupt": "exception KeyboardInterrupt",
    "import os; os.fork() or exit(9); os.wait(); exit(4)": "code 4",
    "import atexit, os; atexit.register(os.closerange, 0, 9); exit(5)": "code 5",
}


@pytest.mark.parametrize("code", CODES)
def test_the_record_has_the_code_that_the_process_ends_with(code: str, tmp_path: Path) -> None:
    run(tmp_path, "-c", code)
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.events[-1].kind == "end"
    assert record.events[-1].text == f"exit: {CODES[code]}"
    assert record.complete


@pytest.mark.parametrize("code", ["import os; os._exit(3)", "import os; os.abort()"])
def test_a_process_that_just_stops_leaves_a_record_without_an_end(
    code: str, tmp_path: Path
) -> None:
    assert run(tmp_path, "-c", code).returncode in (3, -6)
    record = memtools.read_record(tmp_path / "run.mem")
    assert not record.complete
    assert not record.written
    assert [event.kind for event in record.events] == ["start"]


def test_json_is_the_last_line_of_stderr(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print('out'); sys.stderr.write('err\\n')")
    found = run(tmp_path, "--json", "--log", "other.mem", "--limit", "2 GiB", "train.py")
    assert found.stdout == b"out\n"
    first, last = found.stderr.decode().splitlines()
    summary = json.loads(last)
    assert first == "err"
    assert summary["record"] == "other.mem"
    assert summary["limit_bytes"] == 2 << 30
    assert 0 < summary["peak_bytes"] < 1 << 30
    assert summary["samples"] >= 1


REFUSED = {
    "nothing to run": ([], 2, "nothing to run"),
    "a script that is not there": (["nosuch.py"], 2, "there is no script nosuch.py"),
    "an unknown option": (["--nosuch", "train.py"], 2, "--nosuch"),
    "no module": (["-m"], 2, "-m needs an argument"),
    "a limit in words": (["--limit", "much", "train.py"], 2, "like \"64 MiB\", got 'much'"),
    "a guard above the limit": (["--guard", "1.5", "train.py"], 2, "at most 1, got 1.5"),
    "an interval of nothing": (["--interval-ms", "0", "train.py"], 2, "1 to 60000 ms, got 0"),
    "a folder that is not there": (["--log", "no/run.mem", "train.py"], 1, "no/run.mem"),
    "a record that is something else": (["--log", "train.py", "train.py"], 1, "train.py"),
    "a folder as record": (["--log", ".", "train.py"], 1, "memtools run: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_in_one_line_before_it_starts(
    case: str, tmp_path: Path
) -> None:
    words, code, text = REFUSED[case]
    write(tmp_path, "print('started')")
    found = run(tmp_path, *words)
    assert (found.returncode, found.stdout) == (code, b"")
    errors = found.stderr.decode()
    assert errors.startswith(("memtools run: ", "memtools: unrecognized"))
    assert errors.count("\n") == 1
    assert text in errors
    assert sorted(os.listdir(tmp_path)) == ["train.py"]


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_flags_that_keep_the_monitor_out_are_refused(flag: str, tmp_path: Path) -> None:
    write(tmp_path, "print('started')")
    root = str(Path(memtools.__file__).parent.parent)
    code = (
        f"import sys; sys.path.insert(0, {root!r}); from memtools.cli import main; sys.exit(main())"
    )
    found = execute([sys.executable, flag, "-c", code, "run", "train.py"], tmp_path)
    assert (found.returncode, found.stdout) == (1, b"")
    assert b"watch from outside: memtools run -- python -I" in found.stderr


def test_a_run_within_a_run_writes_a_record_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "print('inner')", "inner.py")
    write(tmp_path, f"import subprocess; subprocess.run({[*RUN, 'inner.py']!r}, check=True)")
    found = run(tmp_path, "train.py")
    assert (found.returncode, found.stdout) == (0, b"inner\n")
    assert [r.complete for r in map(memtools.read_record, sorted(tmp_path.glob("*.mem")))] == [
        True
    ] * 2
    assert b"Wrote run-2.mem" in found.stderr


def test_a_record_that_is_asked_for_and_in_use_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "print('inner')", "inner.py")
    again = [*RUN, "--log", "run.mem", "inner.py"]
    write(tmp_path, f"import subprocess; print(subprocess.run({again!r}).returncode)")
    found = run(tmp_path, "train.py")
    assert found.stdout == b"1\n"
    assert b"run.mem" in found.stderr.splitlines()[0]


def test_every_rank_has_a_record_by_default() -> None:
    assert log_names("x.mem", {"RANK": "3"}) == ["x.mem"]
    assert log_names(None, {})[:3] == ["run.mem", "run-2.mem", "run-3.mem"]
    assert log_names(None, {"RANK": "3", "WORLD_SIZE": "8"})[0] == "run.rank3.mem"
    assert log_names(None, {"RANK": "0", "WORLD_SIZE": "1"})[0] == "run.mem"
    assert log_names(None, {"RANK": "a/b"})[0] == "run.mem"


STARTED = [
    (["python", "-m", "memtools", "run", "x"], 2, []),
    (["python", "/bin/memtools", "run", "x"], 2, []),
    (["python", "-O", "-X", "dev", "-m", "memtools", "run", "x", "y"], 3, ["-O", "-X", "dev"]),
    (["python", "-W", "error", "/bin/memtools", "run"], 1, ["-W", "error"]),
    (["python", "-uOm", "memtools", "run"], 1, ["-uO"]),
    (["python", "-Bc", "import memtools", "run"], 1, ["-B"]),
    (["python"], 0, []),
]


@pytest.mark.parametrize(("command", "arguments", "flags"), STARTED)
def test_pythons_own_flags_are_handed_on(
    command: list[str], arguments: int, flags: list[str]
) -> None:
    assert own_flags(command, arguments) == flags


# --- steps ----------------------------------------------------------------------------------------


class Steps:
    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1


def test_of_several_optimizers_the_first_counts_until_it_is_out_of_use() -> None:
    steps = Steps()
    counter = StepCounter(steps)  # type: ignore[arg-type,unused-ignore]
    first, second, third = object(), object(), object()
    for _ in range(10):
        for optimizer in (first, second, second, third):
            counter(optimizer, (), {})
    assert steps.count == 10
    for _ in range(100):
        counter(third, (), {})
    assert steps.count == 10 + 100 - 13  # 3 steps of others had come since the first's last


TRAINING = """
    import sys
    import torch
    import torch.optim.optimizer as module
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert type(module.__loader__) is type(module.__spec__.loader) is type(torch.__loader__)
    assert not any(type(finder).__module__ == "memtools._run" for finder in sys.meta_path)
    print(step, bool(model.weight.isfinite().all()))
"""


def test_steps_of_an_unchanged_script_are_those_of_its_optimizer(tmp_path: Path) -> None:
    write(tmp_path, TRAINING.replace("STEPS", "37"))
    found = run(tmp_path, "--json", "train.py")
    assert found.returncode == 0, found.stderr
    assert found.stdout == b"36 True\n"
    assert json.loads(found.stderr)["steps"] == 37
