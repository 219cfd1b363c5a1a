"""The figures of a record are computed once: whoever prints them says the same."""

from __future__ import annotations

import io
import json
import re
import resource
from pathlib import Path

import pytest

import memtools
from memtools import _cli as cli
from memtools import _core
from memtools._base.limits import process_limits
from memtools._base.size import format_bytes
from memtools._cli.frame import frame_of
from memtools._record.figures import Figures, figures_of
from memtools._record.kinds import End, Limit, Start
from memtools._record.summary import summary_json, summary_lines
from memtools.report import render
from tests.report.reportcases import COLUMNS, FINISHED, MIB, Page, event

GIB = 2**30
START = Start(machine_bytes=24 * GIB)
GIVEN = Start(given_bytes=GIB)


def written(path: str, *, start: Start = START, limit: int | None = None) -> memtools.Record:
    """700 steps of 10 ms after 3 s of imports: 64 KiB a step in the process, two workers of 40 MiB
    each, and a machine on which others use 14 GiB."""
    with _core.RecordWriter(path, COLUMNS, command=["python", "train.py"]) as writer:
        origin = memtools.read_record(path).clock_ns
        writer.event(*event(start))
        for i in range(1000):
            step = max(0, i - 300)
            used = (100 + min(i, 300) // 3) * MIB + step * 65536
            workers = 80 * MIB if step > 10 and i % 20 == 0 else None
            row = [step, used, used - 50 * MIB, 0, used + 100 * MIB, limit, 10 * GIB - used, 0]
            heap = used - 100 * MIB if i % 10 == 0 else None
            writer.append(origin + i * 10**7, [*row, heap, 2 if step > 10 else 0, workers])
        writer.phase("train", 10**9, 260 * MIB)
        writer.event(*event(FINISHED), time_ns=origin + 10**10)
    return memtools.read_record(path)


def told(record: memtools.Record, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What each says, as text."""
    found = {"run": "\n".join(summary_lines(figures_of(record)))}
    for name, words in (("watch", ["watch", "--once"]), ("explain", ["explain"])):
        assert cli.main([*words, record.path]) == 0
        found[name] = capsys.readouterr().out
    found["report"] = Page(render(record)).text().replace("\xa0", " ")
    return found


def data(record: memtools.Record, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, int]]:
    """What each says as JSON, under one set of names."""
    summary = summary_json(figures_of(record))
    assert cli.main(["watch", "--once", "--json", record.path]) == 0
    frame = json.loads(capsys.readouterr().out)
    assert cli.main(["explain", "--json", record.path]) == 0
    explained = json.loads(capsys.readouterr().out)
    page = str(Path(record.path).with_suffix(".html"))
    assert cli.main(["report", "--json", "-o", page, record.path]) == 0
    (reported,) = json.loads(capsys.readouterr().out)["records"]
    out = io.StringIO()
    record.to_jsonl(out)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    (exported,) = (line for line in lines if line["type"] == "figures")
    trace = io.StringIO()
    record.to_chrome_trace(trace)
    del explained["advice"]  # which is explain's alone
    assert json.loads(trace.getvalue())["otherData"] == explained
    assert {frame["used"]} == {one["used"]["last_bytes"] for one in (explained, exported, reported)}
    found = {
        "run": {
            "process": summary["peak_bytes"],
            "job": summary["job_peak_bytes"],
            "workers": summary["children_peak_bytes"],
            "limit": summary["limit_bytes"],
            "machine": summary["machine_peak_bytes"],
            "leaks": summary["leaks"],
            "seconds": summary["seconds"],
            "steps": summary["steps"],
            "used": summary["used_peak_bytes"],
            "source": summary["limit_source"],
            "ended": summary["ended"],
        },
        "watch": {
            "seconds": frame["seconds"],
            "steps": frame["steps"],
            "used": frame["used_peak"],
            "source": frame["limit_source"],
            "ended": frame["ended"],
            "process": frame["peak"],
            "job": frame["job_peak"],
            "workers": frame["workers"]["peak_bytes"],
            "limit": frame["limit"],
            "machine": (frame["machine"] or {}).get("peak_bytes"),
            "leaks": frame["leaks"],
        },
    }
    for name, one in (("explain", explained), ("export", exported), ("report", reported)):
        found[name] = {
            "process": one["process"]["peak_bytes"],
            "job": one["job_peak_bytes"],
            "workers": one["workers"]["peak_bytes"],
            "limit": one["used"]["limit_bytes"],
            "machine": (one["machine"] or {}).get("peak_bytes"),
            "leaks": one["leaks"],
            "seconds": one["seconds"],
            "steps": one["steps"],
            "used": one["used"]["peak_bytes"],
            "source": one["used"]["source"],
            "ended": one["ending"]["text"],
        }
    return found


def test_what_is_not_known_is_told_alike(tmp_path: Path) -> None:
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, ["x"]) as writer:
        writer.event(*event(End(signal="SIGTERM")))
    summary = summary_json(figures_of(memtools.read_record(path)))
    frame = frame_of(memtools.read_record(path)).as_json()
    names = {
        "peak_bytes": "peak", "job_peak_bytes": "job_peak",
        "used_peak_bytes": "used_peak", "limit_bytes": "limit", "limit_source": "limit_source",
        "ended": "ended", "seconds": "seconds", "steps": "steps", "samples": "samples",
    }  # fmt: skip
    assert {a: summary[a] for a in names} == {a: frame[b] for a, b in names.items()}
    assert summary["ended"] == "it was killed by SIGTERM"


LIMITS = {
    "the machine": (START, None),
    "given": (Start("memtools run", given_bytes=2 * GIB), None),
    "the control group": (Start(), GIB),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LIMITS)
def test_run_watch_explain_report_and_export_say_the_same(case, tmp_path, capsys):
    start, limit = LIMITS[case]
    record = written(str(tmp_path / "run.mem"), start=start, limit=limit)
    figures = figures_of(record)
    (growth,) = figures.verdict.findings
    assert (growth.signal, growth.per) == ("heap", "step")
    assert growth.rate_bytes == pytest.approx(65536, rel=0.02)
    assert growth.since_step is not None
    assert growth.since_step <= 20
    assert growth.steps_left is not None
    for name, text in told(record, capsys).items():
        sizes = [use.peak_bytes for use in parties(figures)]
        if figures.used is not None and figures.used.source != "machine":
            sizes += [figures.used.peak_bytes, figures.used.limit_bytes or 0]
        growing = [growth.subject, growth.rate(), growth.forecast()]
        for words in [*map(format_bytes, sizes), *growing]:
            assert words in text.replace("\u00a0", " "), (name, words)
    first, *others = data(record, capsys).values()
    for other in others:
        assert other.items() <= first.items()


def parties(figures: Figures):
    assert figures.process is not None
    assert figures.workers is not None
    assert figures.job is not None
    assert figures.process.peak_bytes == 260 * MIB  # the kernel's mark of a phase
    assert figures.workers.peak_bytes == 80 * MIB
    yield from (figures.process, figures.workers)


def test_the_process_its_workers_and_the_machine_have_three_names(tmp_path):
    figures = figures_of(written(str(tmp_path / "run.mem")))
    assert figures.job is not None
    peak = (100 + 100) * MIB + 699 * 65536 + 80 * MIB
    assert figures.job.peak_bytes == peak
    assert figures.peaks() == (
        f"peak: the process 260.0 MiB; its workers 80.0 MiB; the job {format_bytes(peak)}; "
        "the machine 14.2 of 24.0 GiB (59 %)"
    )
    assert "it used" not in figures.headline()
    assert figures.headline().startswith(
        "finished (exit code 0); at the last sample: the process 243.7 MiB; its workers 80.0 MiB"
    )


def test_what_was_loaded_before_the_first_step_is_no_growth(tmp_path):
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, COLUMNS) as writer:
        writer.event(*event(START))
        for i in range(2000):  # 12 s of imports, then flat
            rss = min(20 + i // 4, 320) * MIB
            writer.append(10**15 + i * 10**7, [max(0, i - 1300), rss, *[None] * 9])
    assert figures_of(memtools.read_record(path)).verdict.notes() == ["the process does not grow"]


def test_a_peak_counts_each_page_once_where_the_record_knows(tmp_path):
    """A KV pool maps pages again; the kernel's rss counts them each time, a phase's peak once."""
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("rss", "B"), ("process", "B")]) as writer:
        for own in (100, 200, 150):
            writer.append(None, [(own + 800) * MIB, own * MIB])
        writer.phase("generate", 10**9, 210 * MIB)
    figures = figures_of(memtools.read_record(path))
    assert figures.process is not None
    assert (figures.process.last_bytes, figures.process.peak_bytes) == (150 * MIB, 210 * MIB)


def test_the_limits_of_a_process_are_in_its_record(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        with memtools.MemoryMonitor(tmp_path / "run.mem"):
            resource.setrlimit(resource.RLIMIT_DATA, (2**44, hard))  # as a program may itself
            assert process_limits()["RLIMIT_DATA"] == 2**44
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    record = memtools.read_record(tmp_path / "run.mem")
    assert "RLIMIT_DATA 17592186044416 B" in [e.text for e in record.events if e.kind == "limit"]
    assert figures_of(record).process_limits["RLIMIT_DATA"] == 2**44


def test_a_limit_that_is_set_later_is_in_the_record_and_one_that_is_lifted_is_not(tmp_path):
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, ["x"]) as writer:
        limits = [("RLIMIT_AS", 4096), ("RLIMIT_DATA", 8192), ("RLIMIT_AS", None), ("RLIMIT_X", 9)]
        for limit in limits:
            writer.event(*event(Limit(*limit)))
    assert figures_of(memtools.read_record(path)).process_limits == {"RLIMIT_DATA": 8192}


@pytest.mark.parametrize("command", ["explain", "report", "watch"])
def test_the_newest_record_is_taken_when_none_is_named(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = 1 if command == "watch" else 2
    assert cli.main([command]) == refused
    assert "there is no record in this folder" in capsys.readouterr().err
    written("old.mem")
    written("run.mem")
    once = ["--once"] if command == "watch" else []
    assert cli.main([command, *once]) == 0
    assert re.search(r"\brun\.(mem|html)\b", capsys.readouterr().out)


def test_a_report_can_be_redacted(tmp_path, capsys):
    path = str(tmp_path / "run.mem")
    command = ["python", "train.py", "--token", "abc123", "--api-key=xyz789"]
    with _core.RecordWriter(path, COLUMNS, command=command) as writer:
        writer.event("mark", "logged in with HF_TOKEN=hf_abcdefghijkl")
        writer.append(None, [1, MIB, *[None] * 9])
    secrets = ("abc123", "xyz789", "hf_abcdefghijkl")
    assert cli.main(["report", path]) == 0
    page = (tmp_path / "run.html").read_text()
    assert all(secret in page for secret in secrets)
    assert cli.main(["report", "--redact", "--json", path]) == 0
    out = capsys.readouterr().out
    page = (tmp_path / "run.html").read_text()
    assert not any(secret in page or secret in out.partition("{")[2] for secret in secrets)
    assert "--token ***" in page


def test_the_job_is_the_process_its_workers_and_shared_memory_that_nobody_maps(tmp_path):
    """Files of /dev/shm that are closed and not unlinked are in no process, and fill the job."""
    path = str(tmp_path / "run.mem")
    columns = ["rss", "process", "children", "children_private", "shm", "job"]
    with _core.RecordWriter(path, [(name, "B") for name in columns]) as writer:
        writer.event(*event(GIVEN))
        # The process maps 10 MiB of the shared memory. That and the children are read seldom, and
        # not at the same time; the sampler's sum has the newest of each.
        for i in range(20):
            shm = (10 + 20 * (i - i % 5)) * MIB
            private = 50 * MIB if i % 5 == 2 else None
            job = (100 - 10 + (50 if i >= 2 else 0)) * MIB + shm
            row = [100 * MIB, 100 * MIB, 2, private, None if i % 5 else shm, job]
            writer.append(10**15 + i * 10**7, row)
    figures = figures_of(memtools.read_record(path))
    assert figures.job is not None
    assert figures.used is not None
    expected = (100 + 50 + 300) * MIB
    assert (figures.job.last_bytes, figures.job.peak_bytes) == (expected, expected)
    assert (figures.used.of, figures.used.last_bytes) == ("job", expected)
    assert figures.peaks() == (
        "peak: the process 100.0 MiB; its workers 50.0 MiB; shared memory 310.0 MiB; "
        "the job 450.0 MiB of 1.00 GiB (given limit, 44 %)"
    )


@pytest.mark.parametrize(("until", "words"), [
    (20, "80.0 MiB; the job"),
    (5, "80.0 MiB (read at step 4, 15.0 s before the last sample); the job"),
])  # fmt: skip
def test_a_figure_of_workers_that_is_old_has_its_age(until, words, tmp_path):
    path = str(tmp_path / "run.mem")
    columns = ["step", "rss", "process", "children", "children_private", "job"]
    with _core.RecordWriter(path, [(name, "B") for name in columns]) as writer:
        writer.event(*event(GIVEN))
        for i in range(20):
            private = 80 * MIB if i < until else None
            children = None if private is None else 2
            row = [i, 100 * MIB, 100 * MIB, children, private, 180 * MIB]
            writer.append(10**15 + i * 10**9, row)
    figures = figures_of(memtools.read_record(path))
    assert f"its workers {words}" in figures.peaks()
    assert f"its workers {words}" in figures.now()


def test_workers_that_have_ended_are_no_part_of_the_end(tmp_path):
    path = str(tmp_path / "run.mem")
    columns = ["rss", "process", "children", "children_private", "job"]
    with _core.RecordWriter(path, [(name, "B") for name in columns]) as writer:
        writer.event(*event(GIVEN))
        for i in range(20):
            private = 50 * MIB if i < 10 else 0
            row = [100 * MIB, 100 * MIB, int(i < 10), private, 100 * MIB + private]
            writer.append(10**15 + i * 10**7, row)
    figures = figures_of(memtools.read_record(path))
    assert figures.now() == "the process 100.0 MiB of 1.00 GiB (given limit, 10 %)"
    assert figures.peaks() == (
        "peak: the process 100.0 MiB; its workers 50.0 MiB; "
        "the job 150.0 MiB of 1.00 GiB (given limit, 15 %)"
    )
