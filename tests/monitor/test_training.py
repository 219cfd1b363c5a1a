"""Loops of which it is known what they keep, each in a process of its own: what is said of them,
and at which step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memtools import LeakFinding, read_record
from memtools._leak.finding import WORKERS, is_call
from memtools._leak.forecast import WIDEST
from memtools._record.record import Record

pytest.importorskip("torch")  # the loops train

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024


def train(path: Path, loop: str) -> tuple[subprocess.CompletedProcess[str], Record]:
    command = [sys.executable, "-m", "tests.monitor.training", str(path), loop]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT
    )
    return done, read_record(path)


def told(record: Record) -> list[LeakFinding]:
    return [e.data for e in record.events if isinstance(e.data, LeakFinding)]


def standing(record: Record) -> list[LeakFinding]:
    """The newest word about each, without those that are over, and without what is small."""
    newest = {one.key: one for one in told(record)}
    return [one for one in newest.values() if not one.over]


LEAKS = [
    ("gates", "list MoEBlock.gate_history", "list", 16 * KIB),
    ("cache", "lru_cache of decoded()", "lru_cache", 17 * KIB),
    ("c heap", "", "C heap", 16 * KIB),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "holder", "kind", "rate"), LEAKS, ids=[one[0] for one in LEAKS])
def test_a_leak_is_called_with_its_holder_and_rate_by_step_64(
    tmp_path: Path, loop: str, holder: str, kind: str, rate: int
) -> None:
    done, record = train(tmp_path / "run.mem", loop)
    assert done.returncode == 0
    (found,) = [one for one in standing(record) if is_call(one.grade)]
    assert (found.holder, found.kind) == (holder, kind)
    assert found.rate_bytes == pytest.approx(rate, rel=0.2)
    assert found.first_step is not None
    assert found.first_step <= 64
    if found.steps_left is not None:  # else resident memory still grows by more than that
        assert found.steps_left[1] <= WIDEST * found.steps_left[0]
    assert f"Leak test: {found.grade}: " in done.stdout
    lines = [line for line in done.stderr.splitlines() if holder in line]
    assert 1 <= len(lines) <= 6, "once for each grade and name"


@pytest.mark.slow
def test_a_graph_that_is_kept_is_named_by_who_keeps_it(tmp_path: Path) -> None:
    _, record = train(tmp_path / "run.mem", "graph")
    (found,) = [one for one in standing(record) if is_call(one.grade)]
    assert found.kind == "autograd graph"
    assert found.holder == "autograd graph in MoEBlock.total"
    assert found.first_step is not None
    assert found.first_step <= 64


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["nothing", "cleared", "bounded", "cycles"])
def test_what_does_not_leak_is_no_leak_at_the_end(tmp_path: Path, loop: str) -> None:
    """While something fills or a list waits to be cleared, a word may be said, and never `leak`."""
    done, record = train(tmp_path / "run.mem", loop)
    assert done.returncode == 0
    assert not [one for one in standing(record) if is_call(one.grade)]
    assert "leak" not in {one.grade for one in told(record)}
    if loop == "nothing":
        assert (told(record), done.stderr) == ([], "")
    if loop == "bounded":
        assert "fills" in {one.grade for one in told(record)}
        assert not [one for one in told(record) if one.holder and is_call(one.grade)]
    if loop == "cycles":
        assert {one.holder for one in told(record)} <= {""}
        assert "C heap" not in {one.kind for one in told(record)}


@pytest.mark.slow
def test_shared_memory_that_nobody_unlinks_is_said(tmp_path: Path) -> None:
    _, record = train(tmp_path / "run.mem", "shared")
    (found,) = [one for one in standing(record) if one.kind == "shared memory"]
    assert found.rate_bytes == pytest.approx(16 * KIB, rel=0.2)
    assert is_call(found.grade)


@pytest.mark.slow
def test_a_dict_in_a_worker_is_named_with_the_worker(tmp_path: Path) -> None:
    _, record = train(tmp_path / "run.mem", "workers")
    (found,) = [one for one in standing(record) if one.key[0] == WORKERS]
    assert (found.process, found.holder) == ("2 workers", "dict Frames.seen")
    assert found.rate_bytes == pytest.approx(2 * 2 * 16 * KIB, rel=0.2)
