"""`memtools export`: what it writes, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memtools import _cli as cli
from memtools import _core
from memtools._cli import export


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "run.mem"
    with _core.RecordWriter(str(path), [("rss", "B")], rows=8, buckets=4) as writer:
        for step in range(5):
            writer.append(None, [step])
        writer.event("phase", "épreuve", step=1, duration_ns=2000)
    return path


def test_lines_of_json_go_beside_the_record(record, capsys):
    assert cli.main(["export", str(record), "--to", "jsonl"]) == 0
    out = record.with_suffix(".jsonl")
    assert capsys.readouterr().out == f"Wrote {out}\n"
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert lines[0]["type"] == "record"
    assert [line["values"]["rss"] for line in lines if line["type"] == "sample"] == [0, 1, 2, 3, 4]
    assert [line["text"] for line in lines if line["type"] == "event"] == ["épreuve"]


def test_a_trace_goes_where_it_is_told_and_json_says_so(record, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert cli.main(["export", str(record), "--to", "trace", "-o", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"wrote": str(out), "format": "trace", "bytes": out.stat().st_size,
                    "samples": 5, "complete": True}  # fmt: skip
    events = json.loads(out.read_text("utf-8"))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "C", "X"}


def test_a_dash_is_the_standard_output_in_utf8(record):
    done = subprocess.run(
        [sys.executable, "-m", "memtools", "export", str(record), "--to", "jsonl", "-o", "-"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode().splitlines()[-1])["text"] == "épreuve"
    assert list(record.parent.iterdir()) == [record]


def test_a_file_that_is_there_stays_without_force(record, capsys):
    out = record.with_suffix(".jsonl")
    out.write_text("mine")
    assert cli.main(["export", str(record), "--to", "jsonl"]) == 1
    assert capsys.readouterr().err == (
        f"memtools export: {out} exists; pass --force to replace it\n"
    )
    assert out.read_text() == "mine"
    assert cli.main(["export", str(record), "--to", "jsonl", "--force"]) == 0
    assert out.read_text() != "mine"


def test_what_is_no_record_is_one_line_and_no_file(tmp_path, capsys):
    bad = tmp_path / "bad.mem"
    bad.write_text("no record")
    assert cli.main(["export", str(bad), "--to", "jsonl"]) == 1
    assert capsys.readouterr().err.startswith("memtools export: ")
    assert cli.main(["export", str(tmp_path / "none"), "--to", "trace"]) == 1
    assert "none; memtools run writes one" in capsys.readouterr().err
    assert cli.main(["export", str(bad)]) == 2
    assert list(tmp_path.iterdir()) == [bad]


def test_a_failure_leaves_no_half_of_a_file(tmp_path):
    def fail(file):
        file.write("half")
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        export.save(str(tmp_path / "out"), fail, False)
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_and_a_full_one_is_said(record, capsys):
    assert cli.main(["export", str(record), "--to", "jsonl", "-o", "/dev/null"]) == 0
    assert cli.main(["export", str(record), "--to", "jsonl", "-o", "/dev/full"]) == 1
    assert "No space left" in capsys.readouterr().err


def test_without_a_name_it_is_the_newest_record_here(record, tmp_path, monkeypatch, capsys):
    """By when it was begun: moving a record aside, or copying it, does not make it newer."""
    monkeypatch.chdir(tmp_path)
    record.rename(tmp_path / "run.1.mem")
    _core.RecordWriter("run.rank1.mem", ["x"], rows=8, buckets=4).close()
    os.utime(tmp_path / "run.1.mem", (2**31, 2**31))
    (tmp_path / "text.mem").write_text("not a record" * 10)
    (tmp_path / "short.mem").write_bytes(b"MTRECORD")
    (tmp_path / "folder.mem").mkdir()
    os.mkfifo(tmp_path / "pipe.mem")
    assert cli.main(["export", "--to", "jsonl"]) == 0
    assert capsys.readouterr().out == "Wrote run.rank1.jsonl\n"
    for name in ("run.rank1.mem", "run.1.mem"):
        (tmp_path / name).unlink()
    assert cli.main(["export", "--to", "jsonl"]) == 1
    assert "there is no record in this folder; give its path" in capsys.readouterr().err
