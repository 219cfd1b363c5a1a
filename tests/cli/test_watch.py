"""`memtools watch`: what it shows of a record that is written, was completed, or was cut off."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import memtools
from memtools import _cli as cli
from memtools import _core
from memtools._cli import watch_live
from memtools._cli.frame import Frame, frame_of
from memtools._cli.tree import COLUMNS as TREE_COLUMNS
from memtools._leak.finding import LeakFinding
from memtools._leak.shown import head_of
from memtools._monitor.run import columns
from memtools._record.kinds import Pressure, Start
from tests.report.reportcases import FINISHED, event

WATCH = [sys.executable, "-m", "memtools", "watch"]
MIB, GIB = 2**20, 2**30
NAMELESS = LeakFinding("leak", "heap", "step", 4.0 * MIB, 320, 310)
LEAK = replace(NAMELESS, holder="list MoEBlock.gate_history", kind="list")
NOW, HELD = ("  ".join(head_of(one)) for one in (NAMELESS, LEAK))
TREE = Start(command="sh", given_bytes=9 * GIB)
GIVEN = Start(given_bytes=GIB)
NO_LIMIT = Start(interval_ms=10, limit="no cgroup limit")
Capture = pytest.CaptureFixture[str]


def row(rss: int, **others: int) -> list[int | None]:
    """Of a record with two devices, as the sampler writes it."""
    names = [name for name, _ in columns(2)]
    values = {"step": 7, "rss": rss, "available": 3 * GIB, "children": 0, "children_private": 0}
    values |= others
    return [values.get(name) for name in names]


def writer_at(path: Path, start: Start = NO_LIMIT) -> _core.RecordWriter:
    writer = _core.RecordWriter(path, columns(2), command=["python", "train.py"])
    writer.event(*event(start))
    return writer


def frame_after(path: Path, *rows: list[int | None], start: Start = NO_LIMIT) -> Frame:
    with writer_at(path, start) as writer:
        for values in rows:
            writer.append(None, values)
    return frame_of(memtools.read_record(path))


LIMITS = [
    ({"given_bytes": 2 * GIB}, {}, 700, (2 * GIB, "given")),
    ({"command": "x", "given_bytes": 12345678}, {}, 700, (12345678, "given")),
    ({}, {"cgroup_limit": GIB, "cgroup_used": 5 * MIB}, 5, (GIB, "cgroup")),
    ({"given_bytes": 2 * GIB}, {"cgroup_limit": GIB, "cgroup_used": 5 * MIB}, 5, (GIB, "cgroup")),
    ({"given_bytes": GIB}, {"cgroup_limit": 2 * GIB, "cgroup_used": 5}, 700, (GIB, "given")),
    ({"machine_bytes": 8 * GIB}, {}, 700, (8 * GIB, "machine")),
]


@pytest.mark.parametrize(("start", "others", "used", "limit"), LIMITS)
def test_use_is_held_against_the_limit_that_counts(
    start: dict[str, Any], others: dict[str, int], used: int, limit: tuple[int, str], tmp_path: Path
) -> None:
    values = row(400 * MIB, children=2, children_private=300 * MIB, **others)
    frame = frame_after(tmp_path / "run.mem", values, start=Start(**start))
    found = frame.figures.used
    assert found is not None
    assert found.last_bytes == used * MIB
    assert (found.limit_bytes, found.source) == limit
    assert frame.series == [used * MIB]
    full = 5 * GIB if found.source == "machine" else used * MIB  # 3 of the machine's 8 are left
    assert frame.share == pytest.approx(full / limit[0])


def test_a_series_is_as_long_as_it_may_be_and_keeps_its_peaks(tmp_path: Path) -> None:
    with writer_at(tmp_path / "run.mem") as writer:
        begun = time.monotonic_ns()
        for k in range(5000):
            writer.append(begun + k * 10**7, row((9 if k == 1234 else 1) * MIB))
    series = frame_of(memtools.read_record(tmp_path / "run.mem")).series
    assert len(series) == 512
    assert sorted(set(series)) == [MIB, 9 * MIB]
    assert 120 <= series.index(9 * MIB) <= 130  # equal spans of time: 1234 of 5000


def test_a_record_without_a_sample_has_no_figures(tmp_path: Path) -> None:
    frame = frame_after(tmp_path / "run.mem")
    assert (frame.figures.process, frame.figures.used, frame.share, frame.series) == (
        (None,) * 3 + ([],)
    )
    assert "memory unknown, peak unknown" in frame.block()


def test_a_leak_is_shown_with_its_holder_until_it_is_taken_back(tmp_path: Path) -> None:
    with writer_at(tmp_path / "run.mem") as writer:
        writer.append(None, row(MIB))
        for one, expected in [
            (replace(NAMELESS, grade="growing"), [NOW.replace("leak", "growing", 1)]),
            (NAMELESS, [NOW]),
            (Pressure("forecast", signal="heap", steps_left=(9.0, 9.0, 9.0)), [NOW]),
            (LEAK, [NOW, HELD]),
            (replace(NAMELESS, over=True), [HELD]),
            (replace(LEAK, grade="likely"), [HELD.replace("leak", "likely", 1)]),
            (replace(LEAK, over=True), []),
            (LEAK, [HELD]),
        ]:
            writer.event(*event(one))
            assert frame_of(memtools.read_record(tmp_path / "run.mem")).leak == expected


def test_once_is_all_of_it_as_text(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.mem"
    with writer_at(path, GIVEN) as writer:
        device = {"cuda0_allocated": 5 * MIB, "cuda0_reserved": 6 * MIB, "cuda0_total": 9 * MIB}
        writer.append(None, row(400 * MIB, children=2, children_private=MIB, **device))
        writer.phase("forward", 2_500_000_000, 410 * MIB)
        writer.event(*event(LEAK))
        assert cli.main(["watch", "--once", str(path)]) == 0
    head, line, *rest = capsys.readouterr().out.splitlines()
    assert head == f"{path}: python train.py (process {os.getpid()}), running"
    now, peak = "the job 401.0 MiB of 1.00 GiB (given limit, 39 %)", "the process 410.0 MiB"
    assert f"step 7, the process 400.0 MiB; its workers 1.0 MiB; {now}, peak: {peak}" in line
    assert "2 workers, cuda0 5.0 MiB in 6.0 MiB, cuda1 unknown in unknown" in line
    assert rest[0] == "  phase forward: 1 time, 2.500 s, peak 410.0 MiB"
    assert rest[1] == f"  {HELD}"  # The run knew no time that is left.
    assert rest[-1].endswith(f" s finding: {LEAK}")


def test_json_is_an_object_a_line_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    writer = writer_at(path)
    writer.append(None, row(400 * MIB))
    command = [*WATCH, "--json", "--interval", "0.05", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        writer.append(None, row(500 * MIB, step=8))
        writer.event(*event(FINISHED))
        writer.close()
        *_, last = map(json.loads, process.stdout)
    assert process.returncode == 0
    assert (first["state"], first["rss"], first["steps"]) == ("running", 400 * MIB, 7)
    assert (last["state"], last["rss"], last["steps"]) == ("ended", 500 * MIB, 8)
    assert (last["ended"], last["events"][-1]["kind"]) == ("finished (exit code 0)", "end")
    assert {device["name"] for device in last["devices"]} == {"cuda0", "cuda1"}


def test_what_is_only_evidence_for_the_end_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    with writer_at(path) as writer:
        writer.append(None, row(400 * MIB))
        writer.event("shm_room", '{"total_bytes": 100, "used_bytes": 7}')
        writer.event("mark", "epoch 2")
    frame = frame_of(memtools.read_record(path))
    assert [event.kind for event in frame.events] == ["start", "mark"]


def test_a_pipe_gets_lines_and_each_event_once(tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    writer = writer_at(path)
    writer.append(None, row(400 * MIB))
    command = [*WATCH, "--interval", "0.05", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        writer.event("mark", "epoch 2")
        while "epoch 2" not in lines[-1]:
            lines.append(process.stdout.readline())
        writer.close()
        lines += process.stdout
    events = [line.split(" s ", 1)[1] for line in lines if line.startswith("  ")]
    assert events == ["start: host every 10 ms; no cgroup limit\n", "mark: epoch 2\n"]
    assert lines[-1] == f"{path}: finished\n"


def killed_writer(folder: Path) -> subprocess.Popen[str]:
    code = f"""
        import sys
        from tests.cli.test_watch import *
        writer = writer_at(Path({str(folder / "run.mem")!r}))
        writer.append(None, row(400 * MIB))
        print("ready", flush=True)
        sys.stdin.read()
    """
    root = Path(__file__).resolve().parents[2]
    command, pipe = [sys.executable, "-c", textwrap.dedent(code)], subprocess.PIPE
    process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_a_writer_is_found_by_its_process_and_its_death_is_told(tmp_path: Path) -> None:
    with killed_writer(tmp_path) as process:
        command = [*WATCH, "--interval", "0.05", str(process.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            assert "peak: the process 400.0 MiB" in watch.stdout.readline()
            process.kill()
            *_, last = watch.stdout
    assert last.startswith(f"{tmp_path}/run.mem: it was ended by SIGKILL or os._exit()")
    assert watch.returncode == 0


@pytest.mark.parametrize("target", ["nosuch.mem", "999999999", "pid", "plain", "."])
def test_what_is_no_record_is_refused_in_one_line(
    target: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("no record")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        name = str(process.pid) if target == "pid" else target
        assert cli.main(["watch", "--once", name]) == 1
        process.communicate()
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("memtools watch: ")
    assert errors.count("\n") == 1
    assert name in errors or target == "."


# --- on a terminal --------------------------------------------------------------------------------


class Terminal:
    """`memtools watch` on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execv(sys.executable, [*WATCH, *words])
        self.text = ""
        self.resize(100, 40)

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read_until(self, text: str) -> None:
        while text not in self.text:
            self._read()

    def type(self, key: bytes) -> None:
        os.write(self._fd, key)

    def _read(self) -> None:
        self.text += os.read(self._fd, 1 << 16).decode(errors="replace")

    def wait(self) -> int:
        try:
            while True:
                self._read()
        except OSError:  # how Linux tells that the other side is closed
            os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.slow
def test_the_live_view_follows_the_run_and_the_size_of_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "run.mem"
    writer = writer_at(path, GIVEN)
    writer.append(None, row(400 * MIB))
    terminal = Terminal("--interval", "0.05", str(path))
    terminal.read_until("running")
    for width, height in [(40, 10), (20, 5), (200, 60), (5, 2)]:
        terminal.resize(width, height)
        terminal.text = ""
        terminal.read_until("\x1b[H")  # a frame began and none before it failed
    terminal.resize(100, 40)
    writer.event("mark", "epoch 2")
    terminal.text = ""
    terminal.read_until("epoch 2")
    writer.event(*event(FINISHED))
    writer.close()
    assert terminal.wait() == 0
    left = terminal.text.rpartition("\x1b[?1049l")[2]  # after the screen was given back
    assert "finished (exit code 0)" in left
    assert "400.0 MiB of 1.00 GiB (39 %), given limit" in left


@pytest.mark.slow
def test_an_interrupt_leaves_the_view_and_not_the_run(tmp_path: Path) -> None:
    with writer_at(tmp_path / "run.mem") as writer:
        writer.append(None, row(MIB))
        terminal = Terminal(str(tmp_path / "run.mem"))
        terminal.read_until("running")
        terminal.type(b"\x03")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
        assert "\x1b[?1049l" in terminal.text


@pytest.mark.parametrize("once", [["--once"], []])
def test_without_rich_a_terminal_gets_lines_and_is_told_of_the_view(
    once: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame_after(tmp_path / "run.mem", row(MIB))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["watch", *once, str(tmp_path / "run.mem")]) == 0
    out, err = capsys.readouterr()
    assert "peak: the process 1.0 MiB" in out
    assert err == "memtools watch: for the live view run python -m pip install rich\n"
    assert cli.main(["watch", *once, "--json", str(tmp_path / "run.mem")]) == 0
    assert capsys.readouterr().err == ""


def drawn(frame: Frame, width: int) -> str:
    console = Console(width=width, force_terminal=True, color_system=None, record=True)
    with console.capture() as capture:
        console.print(watch_live.drawn(frame))
    return capture.get()


def frame_with_all(path: Path) -> Frame:
    device = {f"cuda0_{name}": n * GIB for name, n in
              [("allocated", 6), ("reserved", 12), ("free", 6), ("total", 24)]}  # fmt: skip
    with writer_at(path, GIVEN) as writer:
        for k in range(1000):
            writer.append(
                None, row((100 + k) * MIB, step=k, children=3, children_private=0, **device)
            )
        writer.phase("forward", 2_000_000_000, 900 * MIB)
        writer.event(*event(LEAK))
        return frame_of(memtools.read_record(path))


def test_the_drawing_has_bars_in_proportion(tmp_path: Path) -> None:
    lines = drawn(frame_with_all(tmp_path / "run.mem"), 100).splitlines()
    (cuda,) = (line for line in lines if "cuda0" in line)
    full, free = cuda.count("█"), cuda.count("░")
    assert full / (full + free) == pytest.approx(0.75, abs=0.02)  # 24 less 6 GiB that are free
    assert "6.00 GiB in 12.0 GiB of 24.0 GiB" in cuda
    (host,) = (line for line in lines if "host" in line and "█" in line)
    assert "░" not in host.partition(" 1.07 of")[0]  # above the limit is full
    text = "\n".join(lines)
    assert HELD in text
    assert "forward      1     2.00  900.0 MiB" in text
    assert "no context yet" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 10, 39, 80, 500])
def test_a_drawing_is_no_wider_than_the_terminal(width: int, tmp_path: Path) -> None:
    frame = frame_with_all(tmp_path / "run.mem")
    assert max(len(line) for line in drawn(frame, width).splitlines()) <= width
    empty = frame_after(tmp_path / "empty.mem")
    assert max(len(line) for line in drawn(empty, width).splitlines()) <= width


def test_a_tree_counts_its_children_once(tmp_path: Path) -> None:
    names = [name for name, _ in TREE_COLUMNS]
    values: dict[str, Any] = {"rss": 900 * MIB, "children": 3}
    with _core.RecordWriter(tmp_path / "run.mem", TREE_COLUMNS) as writer:
        writer.event(*event(TREE))
        writer.append(None, [values.get(name) for name in names])
    used = frame_of(memtools.read_record(tmp_path / "run.mem")).figures.used
    assert used is not None
    assert used.last_bytes == 900 * MIB


def test_the_interval_has_bounds(capsys: Capture) -> None:
    assert cli.main(["watch", "--interval", "0"]) == 2
    assert "0.05 to 3600 seconds, got 0" in capsys.readouterr().err


def test_a_reader_that_goes_ends_the_watching(tmp_path: Path) -> None:
    with writer_at(tmp_path / "run.mem") as writer:
        writer.append(None, row(MIB))
        command = [*WATCH, "--interval", "0.05", str(tmp_path / "run.mem")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            errors = process.stderr.read()
    assert (process.returncode, errors) == (1, b"")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
