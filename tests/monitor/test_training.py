"""A training loop that keeps its gates is called a leak, with its holder; a clean one is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memtools import read_record

ROOT = Path(__file__).resolve().parents[2]
HOLDER = "+16.0 KiB/step: 1 new [512, 8] float32 tensor a step, held by list MoEBlock.gate_history"


def train(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.monitor.training", str(path), *options]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT
    )


@pytest.mark.slow
@pytest.mark.parametrize("end", ["whole", "killed"])
def test_a_leak_is_found_and_its_holder_named(tmp_path: Path, end: str) -> None:
    done = train(tmp_path / "run.mem", "keep", end)
    record = read_record(tmp_path / "run.mem")
    leaks = [e.text for e in record.events if e.kind == "leak"]
    assert leaks[-1].startswith("leak: +16.")
    assert " KiB/step in heap since step" in leaks[-1]
    assert HOLDER in [e.text for e in record.events if e.kind == "holder"]
    if end == "killed":
        assert (done.returncode, record.complete) == (-9, False)
        return
    assert (done.returncode, record.complete, done.stderr) == (0, True, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "leak"
    assert lines[1] == "Memory Usage:"
    assert f"  {HOLDER}" in lines
    assert lines[-1].startswith("Forecast: limit in ")


@pytest.mark.slow
def test_a_clean_loop_is_not(tmp_path: Path) -> None:
    done = train(tmp_path / "run.mem")
    assert (done.returncode, done.stderr) == (0, "")
    record = read_record(tmp_path / "run.mem")
    assert [e.kind for e in record.events] == ["start", "phase", "end"]
    assert done.stdout.splitlines()[0] == "quiet"
