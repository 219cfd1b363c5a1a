"""`memtools run -- command`: the command is left alone, and its whole tree watched from outside."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import memtools
from memtools import _core
from memtools._cli import tree as tree_module
from memtools._cli.tree import COLUMNS, Ended, Guard, Tree, pass_on
from memtools._record.events import ending
from memtools._record.kinds import Counters
from memtools._record.record import UNKNOWN
from tests.cli.runs import RUN, run

MIB = 2**20


def python(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


ENDINGS = {
    "falls off its end": ["sh", "-c", "echo out; echo err >&2"],
    "exit 3": ["sh", "-c", "exit 3"],
    "exit 255": ["sh", "-c", "exit 255"],
    "stdin": ["tr", "a-z", "A-Z"],
    "terminated": ["sh", "-c", "kill -TERM $$"],
    "killed": ["sh", "-c", "kill -KILL $$"],
    "a fault": ["sh", "-c", "kill -SEGV $$"],
    "a broken pipe": ["sh", "-c", "kill -PIPE $$"],
    "interrupted": ["sh", "-c", "kill -INT $$"],
    "what sh says for a signal": ["sh", "-c", "sh -c 'kill -TERM $$'; exit $?"],
    "a traceback": [sys.executable, "-c", "1 / 0"],
    "its options": ["printf", "%s,", "--log", "--", "-m", "-c", "--help"],
    "a pipe that breaks": ["sh", "-c", "yes | head -1"],
    "its signals": [
        sys.executable,
        "-c",
        "import signal; print([(s.name, signal.getsignal(s)) for s in signal.valid_signals() "
        "if s in list(signal.Signals)], signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    ],
    "its group and descriptors": ["sh", "-c", "ls /proc/self/fd; ps -o pgid= -p $$"],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDINGS)
def test_a_command_ends_as_it_does_alone(case: str, tmp_path: Path) -> None:
    expected = subprocess.run(ENDINGS[case], cwd=tmp_path, input=b"typed", capture_output=True)
    found = run(tmp_path, "--quiet", "--", *ENDINGS[case], stdin=b"typed")
    assert found.returncode == expected.returncode
    assert (found.stdout, found.stderr) == (expected.stdout, expected.stderr)
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.complete
    code = expected.returncode
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"code {code}"
    assert [(e.kind, e.text) for e in record.events][-1] == ("end", f"exit: {end}")
    assert record.command == tuple(ENDINGS[case])


@pytest.mark.slow
def test_the_record_is_of_the_whole_tree(tmp_path: Path) -> None:
    """A child of 40 MiB, a grandchild of 60 whose parent ends; the command ends once the record
    shows both."""
    text = f"""
        import os, sys
        import memtools

        def hold(mib, go_on):
            block = b"x" * (mib << 20)
            os.write(ready, b"x")
            os.read(go_on, 1)
            os._exit(0)

        del [b"x" * {120 * MIB}][:]  # seen by the kernel alone, between two samples
        asked, ready = os.pipe()
        ending, end = os.pipe()
        if os.fork() == 0:
            os.close(end)
            hold(40, ending)
        if os.fork() == 0:
            if os.fork() == 0:
                os.close(end)
                hold(60, ending)
            os._exit(0)
        os.read(asked, 1), os.read(asked, 1)
        while True:
            values = memtools.read_record("run.mem").samples.values
            rows = zip(values["children"], values["private"])
            if any(count == 2 and private > {100 * MIB} for count, private in rows):
                break
        os.close(end)
    """
    found = run(tmp_path, "--json", "--", *python(text))
    assert found.returncode == 0, found.stderr
    record = memtools.read_record(tmp_path / "run.mem")
    values = record.samples.values
    rows = [i for i in range(len(record.samples)) if values["children"][i] == 2]
    row = max(rows, key=lambda i: values["private"][i])
    assert 100 * MIB < values["private"][row] < values["rss"][row] < 300 * MIB
    for name in ("step", "heap_used", "children_private"):
        assert set(values[name]) == {UNKNOWN}
    summary = json.loads(found.stderr)
    assert summary["children_most"] >= 2
    (phase,) = record.phases
    assert (phase.name, phase.count) == ("command", 1)
    assert phase.peak_bytes is not None
    assert 120 * MIB < phase.peak_bytes < 200 * MIB
    assert summary["peak_bytes"] == max(phase.peak_bytes, *values["rss"])


@pytest.mark.slow
def test_thousands_of_short_lived_children(tmp_path: Path) -> None:
    text = """
        import os
        for _ in range(3000):
            if os.fork() == 0: os._exit(0)
            os.wait()
        for _ in range(500):  # and as many orphans, which come to memtools
            if os.fork() == 0:
                os.fork()
                os._exit(0)
            os.wait()
    """
    found = run(tmp_path, "--quiet", "--interval-ms", "1", "--", *python(text))
    assert (found.returncode, found.stderr) == (0, b"")
    record = memtools.read_record(tmp_path / "run.mem")
    assert record.complete
    assert record.unreadable == 0


RELAY = """
    import signal, sys
    heard = [getattr(signal, name) for name in sys.argv[1:]]
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    print("ready", flush=True)
    while True:
        print(signal.Signals(signal.sigwait(heard)).name, flush=True)
"""


def test_signals_are_passed_on_once_each(tmp_path: Path) -> None:
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGCONT", "SIGALRM"]
    command = [*RUN, "--quiet", "--", *python(RELAY), *names]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for name in names:
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"{name}\n"
        process.send_signal(signal.SIGPIPE)  # ignored by memtools; nothing to pass on
        (command_pid,) = (
            Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        )
        os.kill(int(command_pid), signal.SIGKILL)
        assert process.stdout.read() == ""
    assert process.returncode == -signal.SIGKILL


def test_what_the_kernel_sent_to_both_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    for code in (128, 0, -1, -6):  # SI_KERNEL, SI_USER, SI_QUEUE, SI_TKILL
        info: Any = SimpleNamespace(si_code=code, si_signo=signal.SIGINT)
        pass_on(info, 17)
    assert sent == [(17, signal.SIGINT)] * 3


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stop_stops_both_and_a_continue_continues_both(tmp_path: Path) -> None:
    command = [*RUN, "--quiet", "--", *python(RELAY), "SIGUSR1"]
    # A group of its own, with a parent outside: the kernel discards SIGTSTP for orphaned groups.
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTSTP)
        pid, status = os.waitpid(process.pid, os.WUNTRACED)
        assert (pid, os.WIFSTOPPED(status)) == (process.pid, True)
        while state_of(int(child)) != "T":  # it was sent the signal before memtools stopped
            pass
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGUSR1\n"
        process.terminate()
    assert process.returncode == -signal.SIGTERM


def test_what_is_typed_reaches_the_command_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(sys.executable, [*RUN, "--quiet", "--", *python(RELAY), "SIGINT", "SIGQUIT"])
    with os.fdopen(terminal, "rb+", buffering=0) as typed:
        heard = b""

        def hear(until: bytes) -> None:
            nonlocal heard
            while until not in heard:
                heard += os.read(terminal, 1000)

        hear(b"ready")
        typed.write(b"\x03")
        hear(b"SIGINT")
        typed.write(b"\x1c")
        hear(b"SIGQUIT")
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert os.getpgid(int(child)) == os.tcgetpgrp(terminal)  # it may read the terminal
        os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGTERM
    assert heard.count(b"SIGINT") == heard.count(b"SIGQUIT") == 1


def test_a_kill_of_memtools_leaves_a_record_and_the_command_alone(tmp_path: Path) -> None:
    text = """
        import os, sys
        print("ready", flush=True)
        print(sys.stdin.readline(), flush=True)
    """
    pipe = subprocess.PIPE
    command = [*RUN, "--", *python(text)]
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        while memtools.read_record(tmp_path / "run.mem").total < 3:
            pass
        process.kill()
        process.wait()
        print("goes on", file=process.stdin, flush=True)
        assert process.stdout.readline() == "goes on\n"
    record = memtools.read_record(tmp_path / "run.mem")
    assert not record.complete
    assert not record.written
    assert record.total >= 3
    assert "memtools, which watched the command, ended before it" in ending(record).text


@pytest.mark.slow
def test_a_guard_asks_the_command_to_end_and_says_so(tmp_path: Path) -> None:
    text = """
        import signal
        blocks = b"x" * (200 << 20)
        signal.pause()
    """
    options = ["--limit", "300 MiB", "--guard", "0.5", "--interval-ms", "1"]
    found = run(tmp_path, *options, "--", *python(text))
    assert found.returncode == -signal.SIGTERM
    record = memtools.read_record(tmp_path / "run.mem")
    (guard,) = (event.text for event in record.events if event.kind == "guard")
    assert "of 300.0 MiB (given) used" in guard
    assert guard.endswith("(guard: 50 %): sent SIGTERM")
    assert found.stderr.decode().splitlines()[0] == f"memtools: {guard}"
    assert record.events[0].text.endswith("every 1 ms; limit 300.0 MiB (given)")


def test_a_guard_acts_once_and_not_below_its_share(tmp_path: Path) -> None:
    with _core.RecordWriter(tmp_path / "x.mem", COLUMNS) as writer:
        tree = Tree(writer, 100)
        guard = Guard(0.5)
        with subprocess.Popen(python(RELAY) + ["SIGTERM"], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            tree.used = 49
            guard.look(tree, process.pid)
            assert memtools.read_record(tmp_path / "x.mem").events_total == 0
            tree.used = 50
            guard.look(tree, process.pid)
            assert process.stdout.readline() == b"SIGTERM\n"
            guard.look(tree, process.pid)
            process.kill()
            assert process.stdout.read() == b""
        assert memtools.read_record(tmp_path / "x.mem").events_total == 1


def write_file(folder: Path, name: str, text: str, mode: int) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(mode)


@pytest.mark.slow
def test_commands_that_cannot_be_started(tmp_path: Path) -> None:
    write_file(tmp_path, "plain", "#!/bin/sh\n", 0o644)
    write_file(tmp_path, "odd", "neither a program nor a script", 0o755)
    for command, code, reason in [
        ("nosuch", 127, "the command nosuch is not found"),
        ("./nosuch", 127, "the command ./nosuch is not found"),
        ("./plain", 126, "the command ./plain cannot be executed"),
        ("./", 126, "the command ./ cannot be executed"),
        ("./odd", 126, "./odd: Exec format error"),
    ]:
        found = run(tmp_path, "--", command)
        assert (found.returncode, found.stdout) == (code, b""), command
        assert found.stderr.decode().startswith(f"memtools run: {reason}"), found.stderr
        assert found.stderr.count(b"\n") == 1


def test_a_record_that_cannot_be_made_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    found = run(tmp_path, "--log", "no/run.mem", "--", "touch", "started")
    assert (found.returncode, found.stdout) == (1, b"")
    assert b"no/run.mem" in found.stderr
    assert found.stderr.count(b"\n") == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_in_a_read_only_folder_the_record_is_a_temporary_file(tmp_path: Path) -> None:
    (folder := tmp_path / "ro").mkdir()
    (temporary := tmp_path / "tmp").mkdir()
    shell = (
        'mount --bind . . && mount -o remount,ro,bind . && cd "$PWD" && "$0" "$@" &&'
        '"$0" -m memtools explain'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", shell, *RUN, "--", "true"],
        cwd=folder, env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    (record,) = temporary.glob("run-*.mem")
    assert done.stderr.startswith(f"memtools: this folder is read-only: the record is {record}\n")
    assert f"which is read-only; a run in it writes {temporary}/run-PID.mem: give" in done.stderr
    assert (done.returncode, list(folder.iterdir())) == (2, [])


def test_a_run_in_a_run_in_a_run(tmp_path: Path) -> None:
    inner = [*RUN, "--quiet", "--", *RUN, "--quiet", "-c", "import sys; sys.exit(4)"]
    found = run(tmp_path, "--quiet", "--", *inner)
    assert (found.returncode, found.stderr) == (4, b"")
    records = [memtools.read_record(path) for path in tmp_path.glob("*.mem")]
    assert [record.complete for record in records] == [True] * 3


def test_a_command_that_moves_to_another_group_is_told_by_that_ones_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd-run moves it. A process that has ended is in no group any more."""
    asked: list[str | None] = []

    def read(probe: object, root: str = "/", membership: str | None = None) -> list[Counters]:
        asked.append(membership)
        group = "/moved" if membership == "0::/moved" else "/first"
        return [Counters(group, group, 2, 1, "boot", own=True, oom_kill=len(asked))]

    groups = {"self": "0::/first"}
    monkeypatch.setattr(tree_module, "read_counters", read)
    monkeypatch.setattr(tree_module, "membership_of", lambda pid: groups.get(str(pid)))
    path = tmp_path / "x.mem"
    with _core.RecordWriter(path, COLUMNS) as writer:
        tree = Tree(writer, None)
        tree.write_counters()
        with subprocess.Popen(["sleep", "100"]) as process:
            tree.begin(process.pid)
            for now in (None, "0::/first", "0::/moved", "0::/moved"):
                if now is not None:
                    groups[str(process.pid)] = now
                tree.sample()
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
            groups[str(process.pid)] = "0::/"
            tree.sample()
            tree.write_ended(Ended(signal.SIGKILL, None))
    found = [e.data for e in memtools.read_record(path).events if isinstance(e.data, Counters)]
    assert [c.group for c in found] == ["/first", "/moved", "/moved"]
    assert asked == [None, "0::/moved", "0::/moved"]
