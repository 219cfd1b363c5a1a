"""`memtools run`: its record, its summary, its steps, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memtools
from memtools._cli.run import own_flags
from memtools._monitor.log import ranked
from tests.cli.runs import RUN, execute, run, write


@pytest.mark.slow
def test_the_record_tells_what_ran_and_how_it_ended(tmp_path: Path) -> None:
    write(tmp_path, "x = bytearray(100 << 20)\nraise ValueError('too much\\nof it')")
    found = run(tmp_path, "--limit", "1 GiB", "train.py", "--lr", "1")
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.complete
    assert record.command[1:] == ("train.py", "--lr", "1")
    assert max(record.buckets.most["rss"]) > 100 << 20
    lines = found.stderr.decode().splitlines()
    wrote = f"memtools: Wrote run.mem ({record.nbytes / 2**20:.1f} MiB)"
    assert lines[-1] == f"{wrote}; for details: memtools explain run.mem"
    first = next(line for line in lines if line.startswith("memtools: "))
    assert first == "memtools: It ended by exception ValueError: too much"
    assert " of 1.00 GiB (given limit, 1" in found.stderr.decode()


CODES = {
    "class Own(SystemExit): pass\nraise Own(4)": "code 4",
    "import sys\ntry: sys.exit('no')\nexcept SystemExit: 1 / 0": (
        "exception ZeroDivisionError: division by zero"
    ),
    "import sys\ntry: 1 / 0\nexcept Exception as e: sys.last_value = e": "code 0",
    "import sys\ntry: 1 / 0\nexcept Exception as e: sys.last_value = e; sys.exit(1)": "code 1",
    "import sys\ntry: 1 / 0\nexcept Exception: sys.excepthook(*sys.exc_info())": "code 0",
    "import sys; sys.excepthook = print; 1 / 0": "code 1",
    "import sys; sys.excepthook = sys.__excepthook__; 1 / 0": (
        "exception ZeroDivisionError: division by zero"
    ),
    "import threading as t; t.Thread(target=lambda: 1 / 0).start()": "code 0",
    "raise SystemExit(256 + 7)": "code 7",
    "import os; os.fork() or exit(9); os.wait(); exit(4)": "code 4",
    "import atexit, os; atexit.register(os.closerange, 0, 9); exit(5)": "code 5",
}


@pytest.mark.slow
@pytest.mark.parametrize("code", CODES)
def test_the_record_has_the_code_that_the_process_ends_with(code: str, tmp_path: Path) -> None:
    """tests/monitor/test_ends.py has the usual ends."""
    run(tmp_path, "-c", code)
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.events[-1].kind == "end"
    assert record.events[-1].text == f"exit: {CODES[code]}"
    assert record.complete


@pytest.mark.slow
def test_a_forked_child_that_ends_as_python_does_says_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, "-c", "import os; os.fork() or exit(9); os.wait()")
    assert found.returncode == 0
    assert found.stderr.count(b"Wrote run.mem") == 1
    assert b"Traceback" not in found.stderr


def test_json_is_the_last_line_of_stderr(tmp_path: Path) -> None:
    write(tmp_path, "import sys; print('out'); sys.stderr.write('err\\n')")
    found = run(tmp_path, "--json", "-o", "other.mem", "--limit", "2 GiB", "train.py")
    assert found.stdout == b"out\n"
    first, last = found.stderr.decode().splitlines()
    summary = json.loads(last)
    assert first == "err"
    assert summary["record"] == "other.mem"
    assert summary["limit_bytes"] == 2 << 30
    assert 0 < summary["peak_bytes"] < 1 << 30
    assert summary["samples"] >= 1


SLOW_ENDS = {
    "code 0": "",
    "a text": "sys.exit('no such batch')",
    "Ctrl-C": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
}


@pytest.mark.slow
@pytest.mark.parametrize("end", SLOW_ENDS)
def test_the_summary_and_the_record_have_one_duration(end: str, tmp_path: Path) -> None:
    """Until the program's end: what the interpreter tidies up behind it is not the program's."""
    slow = "class Slow:\n    def __del__(self, sleep=time.sleep): sleep(0.3)\n"
    write(tmp_path, f"import os, signal, sys, time\n{slow}slow = Slow()\n{SLOW_ENDS[end]}\n")
    found = run(tmp_path, "--json", "train.py")
    told = json.loads(found.stderr.decode().splitlines()[-1])["seconds"]
    assert told == memtools.read_record(tmp_path / "run.mem").seconds


REFUSED = {
    "nothing to run": ([], 2, "nothing to run"),
    "a script that is not there": (["nosuch.py"], 2, "there is no script nosuch.py"),
    "a command without --": (
        ["true", "--x", "a b"],
        2,
        "there is no script true; to run a command: memtools run -- true --x 'a b'",
    ),
    "an unknown option, whose help is this command's": (
        ["--nosuch", "train.py"],
        2,
        "unrecognized arguments: --nosuch (see memtools run --help)",
    ),
    "no module": (["-m"], 2, "-m needs an argument"),
    "a limit in words": (["--limit", "much", "train.py"], 2, "like \"64 MiB\", got 'much'"),
    "a guard above the limit": (["--guard", "1.5", "train.py"], 2, "at most 1, got 1.5"),
    "an interval of nothing": (["--interval-ms", "0", "train.py"], 2, "1 to 60000 ms, got 0"),
    "a folder that is not there": (["--log", "no/run.mem", "train.py"], 1, "no/run.mem"),
    "a record that is something else": (["--log", "train.py", "train.py"], 1, "train.py"),
    "a folder as record": (["--log", ".", "train.py"], 1, "Is a directory; name a file in it"),
    "a folder of a command": (["--log", ".", "--", "true"], 1, "Is a directory; name a file in it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_in_one_line_before_it_starts(
    case: str, tmp_path: Path
) -> None:
    words, code, text = REFUSED[case]
    write(tmp_path, "print('started')")
    found = run(tmp_path, *words)
    assert (found.returncode, found.stdout) == (code, b"")
    errors = found.stderr.decode()
    assert errors.startswith("memtools run: ")
    assert errors.count("\n") == 1
    assert text in errors
    assert "log=None" not in errors
    assert sorted(os.listdir(tmp_path)) == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_flags_that_keep_the_monitor_out_are_refused(flag: str, tmp_path: Path) -> None:
    write(tmp_path, "print('started')")
    root = str(Path(memtools.__file__).parent.parent)
    code = f"import sys; sys.path.insert(0, {root!r}); from memtools import _cli; "
    code += "sys.exit(_cli.main())"
    found = execute([sys.executable, flag, "-c", code, "run", "train.py"], tmp_path)
    assert (found.returncode, found.stdout) == (1, b"")
    assert b"watch from outside: memtools run -- python -I" in found.stderr


@pytest.mark.slow
def test_a_run_within_a_run_writes_a_record_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "print('inner')", "inner.py")
    write(tmp_path, f"import subprocess; subprocess.run({[*RUN, 'inner.py']!r}, check=True)")
    found = run(tmp_path, "train.py")
    assert (found.returncode, found.stdout) == (0, b"inner\n")
    assert [r.complete for r in map(memtools.read_record, sorted(tmp_path.glob("*.mem")))] == [
        True
    ] * 2
    assert b"Wrote run-2.mem" in found.stderr


@pytest.mark.slow
def test_a_record_that_is_asked_for_and_in_use_gets_the_next_name(tmp_path: Path) -> None:
    """Two processes that were told one name: what watches them must not end one of them."""
    write(tmp_path, "print('inner')", "inner.py")
    again = [*RUN, "--log", "x.mem", "inner.py"]
    write(tmp_path, f"import subprocess; print(subprocess.run({again!r}).returncode)")
    found = run(tmp_path, "--log", "x.mem", "train.py")
    assert found.stdout == b"inner\n0\n"
    said = b"memtools: another monitor writes x.mem already; the record of this monitor is x-2.mem"
    assert found.stderr.splitlines()[0] == said
    assert [memtools.read_record(tmp_path / name).complete for name in ("x.mem", "x-2.mem")] == [
        True
    ] * 2


def test_every_rank_has_a_record_of_its_own() -> None:
    for path, environment, name in [
        ("run.mem", {}, "run.mem"),
        ("run.mem", {"RANK": "3", "WORLD_SIZE": "8"}, "run.rank3.mem"),
        ("logs/1/x", {"RANK": "1"}, "logs/1/x.rank1"),
        ("run.mem", {"RANK": "0", "WORLD_SIZE": "1"}, "run.mem"),
        ("run.mem", {"RANK": "a/b"}, "run.mem"),
        ("logs/rank-3.mem", {"RANK": "3"}, "logs/rank-3.mem"),
        ("run13.mem", {"RANK": "3"}, "run13.rank3.mem"),
    ]:
        assert ranked(path, environment) == name


RANKS = """
    import os, subprocess, sys
    if "RANK" not in os.environ:
        ranks = [
            subprocess.Popen([*sys.argv[1:]], env={**os.environ, "RANK": str(rank)},
                             stdin=subprocess.PIPE)
            for rank in range(2)
        ]
        for process in ranks:
            process.communicate()
        sys.exit(max(process.returncode for process in ranks))
    import memtools
    with memtools.MemoryMonitor("mine.mem") as monitor:
        sys.stdin.read()
"""


@pytest.mark.slow
def test_two_ranks_of_one_name_write_one_record_each(tmp_path: Path) -> None:
    script = str(write(tmp_path, RANKS))
    found = execute([sys.executable, script, *RUN, "--quiet", "--log", "out.mem", script], tmp_path)
    assert (found.returncode, found.stderr) == (0, b"")
    assert sorted(path.name for path in tmp_path.glob("*.mem")) == [
        "mine.rank0.mem", "mine.rank1.mem", "out.rank0.mem", "out.rank1.mem"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", [[], ["--"]])
def test_the_record_of_a_killed_run_is_kept(way: list[str], tmp_path: Path) -> None:
    """As a launcher does that starts a job anew; a run of other ways may have been killed."""
    killed = [*RUN, sys.executable, "-c", "import os; os.kill(os.getppid(), 9)"]
    killed.insert(len(RUN), "--")
    for n in (1, 2):
        assert execute(killed, tmp_path).returncode == -9
        script = str(write(tmp_path, "print('again')"))
        command = [sys.executable, script] if way else [script]
        found = run(tmp_path, *way, *command)
        kept = (
            f"memtools: the run that wrote run.mem was cut off; its record is kept as run.{n}.mem"
        )
        assert (found.returncode, found.stderr.decode().splitlines()[0]) == (0, kept)
        assert memtools.read_record(tmp_path / "run.mem").complete
        old = memtools.read_record(tmp_path / f"run.{n}.mem")
        assert not old.complete
        assert old.total > 0
    assert len(list(tmp_path.glob("*.mem"))) == 4  # and that of the first run that ended


@pytest.mark.slow
@pytest.mark.parametrize("way", [[], ["--"]])
def test_the_record_of_the_run_before_is_kept(way: list[str], tmp_path: Path) -> None:
    """One of them, the last, beside the new one."""
    said = b"memtools: run.mem of the run before is kept as run.previous.mem\n"
    for n in range(3):
        script = str(write(tmp_path, "pass"))
        found = run(tmp_path, *way, *([sys.executable] if way else []), script, f"run{n}")
        assert found.stderr.count(said) == (n > 0), found.stderr
    kept = memtools.read_record(tmp_path / "run.previous.mem")
    assert (kept.complete, kept.command[-1]) == (True, "run1")
    assert len(list(tmp_path.glob("*.mem"))) == 2


@pytest.mark.slow
def test_many_kept_records_are_counted(tmp_path: Path) -> None:
    """From the tenth on: a job that is killed and started again for ever fills the disk."""
    others = ["run.mem.1", "run.x.mem", "other.1.mem", "run-2.mem"]
    for n, kept in [(8, []), (9, ["run.10.mem"])]:
        for name in [*others, *(f"run.{i}.mem" for i in range(1, n + 1))]:
            (tmp_path / name).write_bytes(bytes(1 << 20))
        execute([*RUN, "-c", "import os; os._exit(3)"], tmp_path)
        line = run(tmp_path, "-c", "pass").stderr.decode().splitlines()[0]
        assert ("records of runs that were cut off" in line) == bool(kept), line
        (tmp_path / f"run.{n + 1}.mem").unlink()
    size = 9 + memtools.read_record(tmp_path / "run.mem").nbytes / 2**20
    assert line == (
        "memtools: the run that wrote run.mem was cut off; its record is kept as run.10.mem; 10 "
        f"records of runs that were cut off take {size:.1f} MiB now: remove what is not needed"
    )


def test_a_limit_that_python_alone_has_passed_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "print('started')")
    found = run(tmp_path, "--limit", "10 KiB", "train.py")
    assert (found.returncode, found.stdout) == (1, b"")
    assert b"memtools run: the limit of 10.0 KiB is below the " in found.stderr
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "command"])
def test_a_record_tells_no_secrets(way: str, tmp_path: Path) -> None:
    write(tmp_path, "raise ValueError('no model for https://me:p4ss@hub/x')")
    secrets = ["--api-key=p4ss", "--token", "p4ss", "HF_TOKEN=p4ss"]
    words = {"script": ["train.py"], "command": ["--", sys.executable, "train.py"]}[way]
    run(tmp_path, *words, *secrets)
    assert b"p4ss" not in (tmp_path / "run.mem").read_bytes()
    assert (tmp_path / "run.mem").stat().st_mode & 0o777 == 0o600
    command = memtools.read_record(tmp_path / "run.mem").command
    assert command[-4:] == ("--api-key=***", "--token", "***", "HF_TOKEN=***")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "end", ["", "raise ValueError('x')", "os.kill(os.getpid(), 15)", "raise SystemExit(3)"]
)
def test_a_program_that_leaves_its_folder_gets_its_summary(end: str, tmp_path: Path) -> None:
    """As Hydra's job.chdir does; the name of the record is the one for the folder it began in."""
    write(tmp_path, f"import os\nos.mkdir('out')\nos.chdir('out')\n{end}")
    expected = execute([sys.executable, "train.py"], tmp_path)
    (tmp_path / "out").rmdir()
    found = run(tmp_path, "train.py")
    assert found.returncode == expected.returncode
    lines = found.stderr.decode().splitlines()
    assert lines[: len(lines) - len(of_memtools(lines))] == expected.stderr.decode().splitlines()
    assert lines[-1].startswith("memtools: Wrote run.mem (")
    assert lines[-1].endswith("; for details: memtools explain run.mem")
    assert sorted(os.listdir(tmp_path)) == ["out", "run.mem", "train.py"]
    assert os.listdir(tmp_path / "out") == []


def of_memtools(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("memtools: ")]


@pytest.mark.slow
def test_a_monitor_of_the_programs_own_gets_the_next_name(tmp_path: Path) -> None:
    code = """
    import memtools
    with memtools.MemoryMonitor("run.mem") as monitor:
        monitor.mark("mine")
    print(monitor.record_path)
    memtools.MemoryMonitor("other.mem").start()
    """
    write(tmp_path, textwrap.dedent(code))
    found = run(tmp_path, "train.py")
    assert (found.returncode, found.stdout) == (0, os.fsencode(tmp_path / "run-2.mem") + b"\n")
    assert b"memtools: the monitor of memtools run writes run.mem already" in found.stderr
    assert b"train.py:3: " in found.stderr
    own = memtools.read_record(tmp_path / "run-2.mem")
    assert "mine" in [event.text for event in own.events]
    assert memtools.read_record(tmp_path / "run.mem").complete
    assert memtools.read_record(tmp_path / "other.mem").complete


@pytest.mark.slow
def test_a_guard_that_cannot_act_is_told_at_the_end(tmp_path: Path) -> None:
    write(tmp_path, "x = bytearray(200 << 20)")
    found = run(tmp_path, "--limit", "100 MiB", "--guard", "0.9", "train.py")
    assert found.returncode == 0
    assert b"the guard at 90% could not act although memory passed it" in found.stderr
    said = [line for line in found.stderr.decode().splitlines() if "guard" in line]
    assert len(said) == 1  # the summary alone says it
    record = memtools.read_record(tmp_path / "run.mem")
    assert [event.kind for event in record.events if " cannot act: " in event.text] == ["pressure"]
    explained = execute([sys.executable, "-m", "memtools", "explain"], tmp_path)
    assert b"the guard at 90% could not act" in explained.stdout


@pytest.mark.slow
def test_a_quiet_run_says_in_the_log_that_a_guard_cannot_act(tmp_path: Path) -> None:
    write(tmp_path, "x = bytearray(200 << 20)")
    found = run(tmp_path, "--quiet", "--limit", "100 MiB", "--guard", "0.9", "train.py")
    assert found.stderr.decode().splitlines() == [
        "<guard raise at 90%> cannot act: no step() was called; it acts in step()"
    ]


FILLED = """
    import resource
    room = 64 << 20
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
    held = []
    while True:
        held.append(bytearray(100))
"""


@pytest.mark.slow
def test_a_program_that_used_up_its_own_limit_gets_a_summary_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, FILLED)
    found = run(tmp_path, "train.py")
    errors = found.stderr.decode()
    assert found.returncode == 1
    assert "Exception ignored" not in errors
    assert "It ran out of memory: exception MemoryError; RLIMIT_AS of " in errors
    assert errors.splitlines()[-1].endswith("for details: memtools explain run.mem")


@pytest.mark.slow
def test_a_summary_that_cannot_be_made_leaves_the_name_of_the_record(tmp_path: Path) -> None:
    """No process that prints it finds room under the limit that the program has left behind. A
    thread that runs while Python finalizes is ended by pthread_exit(), which needs libgcc_s."""
    program = """
        import _thread, atexit, resource, time
        def spin():
            while True:
                pass
        _thread.start_new_thread(spin, ())
        time.sleep(0.1)  # memtools' threads have begun
        atexit.register(resource.setrlimit, resource.RLIMIT_AS, (20 << 20, 20 << 20))
    """
    write(tmp_path, program)
    found = run(tmp_path, "--log", "a\x1b.mem", "train.py")
    assert found.returncode == 0
    assert found.stderr.splitlines()[-1] == rb"memtools: Wrote a\x1b.mem"
    assert memtools.read_record(tmp_path / "a\x1b.mem").complete


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("used", "cached", "is_run"), [(67, 0, True), (69, 0, False), (90, 23, True), (101, 0, False)]
)
def test_the_last_command_needs_room_in_the_control_group(
    version: int, used: int, cached: int, is_run: bool, tmp_path: Path
) -> None:
    """A summary takes 26 MiB: it is not printed if less than 32 are left of these 100."""
    group = tmp_path / "group"
    mount = f"36 31 0:33 / {group} rw - " + ("cgroup2 x rw", "cgroup x rw,memory")[version == 1]
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    files = {
        "proc/self/cgroup": "0::/\n" if version == 2 else "4:memory:/\n",
        "proc/self/mountinfo": mount.replace(str(tmp_path), ""),
        f"group/{names[0]}": f"{100 << 20}\n",
        f"group/{names[1]}": f"{used << 20}\n",
        "group/memory.stat": f"{names[2]} {cached << 20}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = f"""
        from memtools import _core
        command = (b"/bin/sh", b"-c", b"echo summary >&2")
        _core._set_last_command(command, b"no room\\n", {str(tmp_path)!r})
        _core._run_last_command(False)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True)
    assert done.stderr == (b"summary\n" if is_run else b"no room\n")


FREED = """
import resource
blocks = [bytearray(100_000) for _ in range(3000)]
kept = blocks[::32]  # they keep what lies between them from going back to the system
del blocks
with open("/proc/self/statm") as file:
    data = int(file.read().split()[5]) * 4096
resource.setrlimit(resource.RLIMIT_DATA, (data + 2**24, data + 2**24))
bytearray(2**29)
"""


@pytest.mark.slow
def test_freed_memory_that_is_in_the_way_of_an_allocation_is_told(tmp_path: Path) -> None:
    write(tmp_path, FREED)
    errors = run(tmp_path, "train.py").stderr.decode()
    assert "exception MemoryError; RLIMIT_DATA of " in errors
    assert re.search(r"malloc keeps 2\d\d\.\d MiB of freed memory, which counts against", errors)
    events = memtools.read_record(str(tmp_path / "run.mem")).events
    assert [event.kind for event in events].count("heap") == 1


def test_ctrl_c_that_is_pressed_again_leaves_the_summary_as_it_is(tmp_path: Path) -> None:
    """The command that prints it sends the signal here, to the whole group, as a terminal does."""
    write(
        tmp_path,
        """
        import os, signal
        from memtools import _core
        again = (b"/bin/sh", b"-c", b"kill -INT 0; echo the summary >&2")
        _core._set_last_command(again, b"no summary")
        os.kill(os.getpid(), signal.SIGINT)
        """,
    )
    done = subprocess.run(
        [*RUN, "train.py"], cwd=tmp_path, capture_output=True, start_new_session=True, timeout=60
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith(b"\nKeyboardInterrupt\nthe summary\n")
