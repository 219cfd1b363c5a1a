"""`memtools run`: environment keys, and what it says while the program runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import memtools
from memtools._leak.finding import LeakFinding
from memtools._monitor import inprocess
from tests.cli.runs import RUN, Done, write


def run(folder: Path, keys: dict[str, str], *words: str) -> Done:
    """`memtools run` with these environment keys."""
    return subprocess.run(
        [*RUN, *words], cwd=folder, env={**os.environ, **keys}, capture_output=True, timeout=60
    )


HELD = "held = bytearray(64 << 20)\nprint('ran')"


@pytest.mark.slow
def test_keys_set_what_no_option_sets(tmp_path: Path) -> None:
    write(tmp_path, HELD)
    keys = {"MEMTOOLS_LOG": "key.mem", "MEMTOOLS_LIMIT": "3 GiB", "MEMTOOLS_GUARD": "0.9"}
    found = run(tmp_path, keys, "--limit", "2 GiB", "train.py")
    assert found.returncode == 0, found.stderr.decode()
    record = memtools.read_record(tmp_path / "key.mem")
    assert "limit given, 2.00 GiB" in record.events[0].text
    assert [event.text for event in record.events if event.kind == "guard_set"]
    assert b"of 2.00 GiB (given limit" in found.stderr


@pytest.mark.slow
def test_the_keys_of_a_command_are_those_of_a_script(tmp_path: Path) -> None:
    keys = {"MEMTOOLS_LOG": "key.mem", "MEMTOOLS_LIMIT": "3 GiB"}
    found = run(tmp_path, keys, "--", sys.executable, "-c", HELD)
    assert (found.returncode, found.stdout) == (0, b"ran\n")
    assert "3.00 GiB" in memtools.read_record(tmp_path / "key.mem").events[0].text


@pytest.mark.slow
def test_a_monitor_of_the_program_leaves_the_keys_to_the_run(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import os, memtools
        with memtools.MemoryMonitor() as monitor:
            print(monitor.record_path, os.environ["MEMTOOLS_LOG"])
        """,
    )
    found = run(tmp_path, {"MEMTOOLS_LOG": "key.mem"}, "--quiet", "train.py")
    assert (found.stdout, found.stderr) == (b"None key.mem\n", b"")


@pytest.mark.slow
def test_a_monitor_takes_its_defaults_from_the_keys(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import memtools
        for options in ({}, {"log": "mine.mem", "limit": "5 GiB", "print_every": "1 h"}):
            with memtools.MemoryMonitor(**options) as monitor:
                print(monitor.record_path, monitor._last.limit_source)
                print(monitor._settings.print_every, monitor._watermarks.all)
                handle = monitor.guard(0.5, "record")
                print(monitor._watermarks.all)
        """,
    )
    keys = {
        "MEMTOOLS_LOG": "key.mem",
        "MEMTOOLS_LIMIT": "4 GiB",
        "MEMTOOLS_GUARD": "0.75",
        "MEMTOOLS_PRINT_EVERY": "1000",
    }
    found = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={**os.environ, **keys}, capture_output=True
    )
    assert found.stderr == b""
    assert found.stdout.decode().splitlines() == [
        f"{tmp_path / 'key.mem'} limit given, 4.00 GiB",
        "1,000 steps (<guard raise at 75%>,)",
        "(<guard record at 50%>,)",  # the program has asked for one
        f"{tmp_path / 'mine.mem'} limit given, 5.00 GiB",
        "3600 s (<guard raise at 75%>,)",
        "(<guard record at 50%>,)",
    ]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("MEMTOOLS", "off", "MEMTOOLS must be 0 (off) or 1 (on), got 'off'"),
        ("MEMTOOLS_LIMIT", "much", 'MEMTOOLS_LIMIT must be a number of bytes or like "64 MiB"'),
        ("MEMTOOLS_GUARD", "95", "MEMTOOLS_GUARD must be a share of the limit, above 0"),
        ("MEMTOOLS_PRINT_EVERY", "often", "MEMTOOLS_PRINT_EVERY must be a number of steps"),
    ],
)
def test_a_key_that_makes_no_sense_is_named_before_anything_starts(
    key: str, value: str, says: str, tmp_path: Path
) -> None:
    write(tmp_path, "print('ran')")
    found = run(tmp_path, {key: value}, "train.py")
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr.decode().startswith(f"memtools run: {says}")
    assert len(found.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["script", "command"])
def test_where_memtools_is_off_the_program_runs_alone(way: str, tmp_path: Path) -> None:
    write(tmp_path, "import os, sys; print(os.getppid(), 'memtools' in sys.modules); sys.exit(3)")
    words = ["train.py"] if way == "script" else ["--", sys.executable, "train.py"]
    found = run(tmp_path, {"MEMTOOLS": "0"}, *words)
    assert (found.returncode, found.stderr) == (3, b"")
    assert found.stdout.decode() == f"{os.getpid()} False\n"
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_command_that_is_not_there_is_told_where_memtools_is_off(tmp_path: Path) -> None:
    found = run(tmp_path, {"MEMTOOLS": "0"}, "--", "no-such-command")
    assert (found.returncode, found.stdout) == (127, b"")
    assert found.stderr == b"memtools run: no-such-command: No such file or directory\n"


@pytest.mark.slow
def test_a_summary_is_printed_each_so_many_steps(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write(
        tmp_path,
        """
        import io, sys, torch
        sys.stderr = io.StringIO()
        model = torch.nn.Linear(4, 4)
        for _ in range(70): model(torch.ones(2, 4))
        print(sys.stderr.getvalue(), end="")
        """,
    )
    found = run(tmp_path, {"MEMTOOLS_PRINT_EVERY": "20"}, "train.py")
    lines = found.stderr.decode().splitlines()
    assert all(line.startswith("memtools: ") for line in lines), lines
    assert sum("System:" in line for line in lines) == 3
    assert found.stdout == b""
    quiet = run(tmp_path, {"MEMTOOLS_PRINT_EVERY": "20"}, "--quiet", "train.py")
    assert quiet.stderr == b""


# --- what is said at once -------------------------------------------------------------------------

FINDING = LeakFinding("growing", "heap", rate_bytes=2.0**20, holder="list held", kind="list")


def said(options: dict[str, bool], capfd: pytest.CaptureFixture[str]) -> list[str]:
    notices, findings, summaries = inprocess._voices({"quiet": False, "json": False} | options)
    notices("the record of this monitor is run-2.mem")
    findings(FINDING)
    summaries("System: much\nLeak")
    return capfd.readouterr().err.splitlines()


def test_a_finding_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert said({}, capfd) == [
        "memtools: the record of this monitor is run-2.mem",
        "memtools: growing  list held  +1.0 MiB/step",
        "memtools: System: much",
        "memtools: Leak",
    ]
    assert said({"quiet": True}, capfd) == []
    run = types.SimpleNamespace(step_count=1200, inner=None)
    running = types.SimpleNamespace(_live=run)
    monkeypatch.setattr(inprocess, "_running", [running])
    assert said({}, capfd)[1] == "memtools: step 1,200  growing  list held  +1.0 MiB/step"


def test_machines_get_lines_of_json(capfd: pytest.CaptureFixture[str]) -> None:
    notice, finding, summary = map(json.loads, said({"json": True}, capfd))
    assert notice == {"notice": "the record of this monitor is run-2.mem"}
    assert finding == {"finding": FINDING.as_json()}
    assert summary == {"summary": "System: much\nLeak"}
