"""Messages among the output of a program: terminals, pipes, progress bars, closed descriptors."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from memtools._cli.run import SUMMARY
from memtools._record.kinds import Start
from tests.kit.ownprocess import ENV
from tests.report.reportcases import LEAK, write

SAY = """
import sys
from dataclasses import replace
from memtools import LeakFinding
from memtools._monitor.inprocess import Findings
found = LeakFinding("likely", "heap", rate_bytes=527565, holder="list Trainer.losses", kind="list",
                    kept_at="train.py:17 in fit", steps_left=(300.0, 420.0),
                    source="self.losses.append(loss)  # caf\\xe9",
                    advice="clear it after use, or use deque(maxlen=...)")
say = Findings()
sys.stderr.write(sys.argv[1])
sys.stderr.flush()
say(found)
say(found)
say(replace(found, grade="leak"))
"""
HEAD = "memtools: likely  list Trainer.losses  +515.2 KiB/step  limit in 300 to 420 steps"


def on_terminal(columns: int, before: str = "", command: Sequence[str] = (), **env: str) -> str:
    """What a terminal of so many columns gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    words = command or [sys.executable, "-c", SAY, before]
    env = {**ENV, "TERM": "xterm", **env}
    done = subprocess.Popen(words, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while True:
        try:
            text += (part := os.read(ours, 4096))
        except OSError:  # all of it was read, and the other end is closed
            break
        if not part:
            break
    os.close(ours)
    assert done.wait(timeout=60) == 0
    return text.decode()


def lines_of(text: str, columns: int) -> list[str]:
    """The lines that the terminal shows: of what is written over, the newest."""
    rows = [""]
    for piece in re.split(r"(\r\n|\r)", re.sub(r"\x1b\[[\d;]*m", "", text)):
        if piece == "\r":
            at = (len(rows[-1]) - 1) // columns * columns if rows[-1] else 0
            rows[-1:] = [rows[-1][:at].rstrip(), ""] if at else [""]
        elif piece == "\r\n":
            rows.append("")
        else:
            rows[-1] += piece
    return [row for row in rows if row]


def test_a_wide_terminal_shows_two_lines_and_the_second_once() -> None:
    assert lines_of(on_terminal(140), 140) == [
        HEAD,
        "          train.py:17  self.losses.append(loss)  # caf\xe9  "
        "fix: clear it after use, or use deque(maxlen=...)",
        HEAD.replace("likely", "leak"),
    ]


def test_a_terminal_of_60_columns_shows_all_of_it() -> None:
    lines = lines_of(on_terminal(60), 60)
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    for part in (*HEAD.split("  "), "train.py:17", "fix: clear it after use, or use deque(maxlen"):
        assert part in text


def test_it_does_not_continue_a_progress_bar() -> None:
    assert lines_of(on_terminal(100, " 45%|####     |"), 100)[:2] == [" 45%|####     |", HEAD]


@pytest.mark.parametrize(
    ("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_only_the_grade_is_coloured(env: dict[str, str], coloured: bool) -> None:
    text = on_terminal(140, **env)
    assert ("\x1b[31mlikely\x1b[0m" in text) == coloured
    assert text.count("\x1b") == (4 if coloured else 0)


def test_the_summary_and_explain_show_it_in_the_same_lines(tmp_path: Path) -> None:
    path = str(tmp_path / "run.mem")
    found = replace(
        LEAK,
        source="self.gate_history.append(gates)",
        kept_at="train.py:17 in fit",
        advice="clear it after use",
    )
    write(
        path, steps=600, grows=65536, limit=1 << 30, events=[Start("run", tests_leaks=True), found]
    )
    summary = on_terminal(80, command=[sys.executable, str(SUMMARY), path, "run.mem"])
    explained = on_terminal(80, command=[sys.executable, "-m", "memtools", "explain", path])
    said = [line[10:] for line in lines_of(summary, 80)]
    at = next(i for i, line in enumerate(said) if line.startswith("leak  list MoEBlock.gate"))
    of_finding = [line.strip() for line in said[at : at + 2]]
    assert of_finding == [
        "leak  list MoEBlock.gate_history  +64.0 KiB/step",
        "train.py:17  self.gate_history.append(gates)  fix: clear it after use",
    ]
    growth = explained.partition("Growth\r\n")[2].partition("\r\n\r\n")[0]
    assert [line.strip() for line in lines_of(growth, 80)][:2] == of_finding
    for text in (summary, growth):
        assert text.count("\x1b[1;31mleak\x1b[0m") == text.count("\x1b[1") == 1
        assert max(map(len, lines_of(text, 80))) <= 80


def test_a_terminal_without_utf8_gets_escapes() -> None:
    text = on_terminal(140, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert "# caf\\xe9" in text


def test_a_pipe_gets_ascii_and_the_rank() -> None:
    env = {**ENV, "RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", SAY, ""], env=env, capture_output=True, timeout=60)
    head, rest, again = done.stderr.decode("ascii").splitlines()
    assert head == again.replace("leak", "likely") == f"[rank1] {HEAD}"
    assert rest.startswith(
        "[rank1]           train.py:17  self.losses.append(loss)  # caf\\xe9  fix"
    )


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = f'"{sys.executable}" -c "$SAY" "" 2>&1 | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], env={**ENV, "SAY": SAY}, timeout=60)
    assert done.returncode == 0
