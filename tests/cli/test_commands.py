"""What all commands share: the word about a killed run, completion, and progress."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from memtools import _core
from tests.cli.runs import RUN

MEMTOOLS = [sys.executable, "-m", "memtools"]
SAID = "memtools: run.mem was killed or cut off; memtools explain tells what happened\n"


def stderr_of(*words: str, cwd: Path) -> str:
    return subprocess.run([*MEMTOOLS, *words], cwd=cwd, capture_output=True, text=True).stderr


def kill_a_run(folder: Path) -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([*RUN, "-c", code], cwd=folder, capture_output=True).returncode == -9


@pytest.mark.slow
def test_after_a_kill_the_next_command_points_to_explain(tmp_path: Path) -> None:
    kill_a_run(tmp_path)
    assert stderr_of("watch", "--once", cwd=tmp_path) == SAID
    assert stderr_of("report", "run.mem", cwd=tmp_path) == SAID
    assert stderr_of("explain", cwd=tmp_path) == ""
    assert "tells what happened" not in stderr_of("run", "-c", "pass", cwd=tmp_path)
    # The newest record is now of a run that ended.
    assert stderr_of("watch", "--once", cwd=tmp_path) == ""


def test_a_run_that_goes_on_is_not_called_killed(tmp_path: Path) -> None:
    writer = _core.RecordWriter(str(tmp_path / "run.mem"), [("rss", "bytes")])
    assert stderr_of("watch", "--once", cwd=tmp_path) == ""
    writer.close()
    (tmp_path / "other.mem").write_bytes(b"MTRECORD")  # too short to be a record
    assert stderr_of("watch", "--once", "run.mem", cwd=tmp_path) == ""


@pytest.mark.slow
def test_a_closed_stderr_gets_no_word_of_a_kill(tmp_path: Path) -> None:
    kill_a_run(tmp_path)
    line = f"{sys.executable} -m memtools watch --once 2>&-"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert "tells what happened" not in done.stdout


def completions(words: str, folder: Path, **environ: str) -> list[str]:
    """What argcomplete's shell functions are answered for these words."""
    answer = folder / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": words,
        "COMP_POINT": str(len(words)),
        "COMP_TYPE": "9",
        "IFS": "\013",
    }
    subprocess.run(
        MEMTOOLS, cwd=folder, env=os.environ | asked | environ, capture_output=True, check=False
    )
    return answer.read_text().split("\013") if answer.exists() else []


def test_a_shell_completes_commands_options_and_files(tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    (tmp_path / "train.mem").touch()
    assert [word.strip() for word in completions("memtools ex", tmp_path)] == ["explain", "export"]
    assert "--exit-code" in completions("memtools explain --e", tmp_path)[0]
    assert [word.strip() for word in completions("memtools explain tr", tmp_path)] == ["train.mem"]


def test_without_argcomplete_nothing_is_completed(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none/argcomplete.py").write_text("raise ImportError\n")
    assert completions("memtools ex", tmp_path, PYTHONPATH=str(tmp_path / "none")) == []


@pytest.mark.slow
def test_progress_is_seen_on_a_terminal_and_gone_at_the_end() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*MEMTOOLS, "doctor"])
    seen = b""
    try:
        while more := os.read(terminal, 4096):
            seen += more
    except OSError:  # The other side has closed.
        pass
    os.waitpid(pid, 0)
    os.close(terminal)
    assert seen.startswith(b"\r\x1b[Kexamining torch and this machine ...\r\x1b[K")
    assert seen.count(b"\x1b") == 2
