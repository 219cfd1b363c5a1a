"""The HTML page, taken apart without a browser; `make test-pages` opens it in one."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import memtools
from memtools import _cli as cli
from memtools import _core
from memtools._base.peak import PARTS, Large, Layer, Span
from memtools._leak.advice import advice_for
from memtools._leak.finding import LeakFinding
from memtools._record.figures import figures_of
from memtools._record.kinds import Cleanup, End, Event, Fork, GuardAct, SharedRoom, Start
from memtools._record.record import UNKNOWN
from memtools._record.source import source_of
from memtools.report import render, write_report
from memtools.report._payload import CELLS, LETTERS, OTHER, part_colour
from tests.report.reportcases import (
    COLUMNS,
    FINISHED,
    HOSTILE,
    MIB,
    SIGKILLED,
    Page,
    recorded,
    traced,
    write,
)

PROJECT = Path(__file__).resolve().parents[2]
STATIC = PROJECT / "memtools/report/static"
LIMIT_BYTES = 2 * MIB
KEPT = LeakFinding("leak", "heap", "step", 65536.0, 100, 3, "list Net.kept", "list")
KEPT = dataclasses.replace(KEPT, advice=advice_for(KEPT))
EVENTS = [Start(), KEPT, Cleanup(("gc",), (3.0,), (), MIB), FINISHED]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.mem")


@pytest.fixture
def record(path: str) -> memtools.Record:
    return memtools.read_record(write(path, grows=65536, device=True, events=EVENTS))


@pytest.fixture
def page(record: memtools.Record) -> Page:
    return Page(render(record))


def sources(policy: str, kind: str) -> list[str]:
    found = next(part.split() for part in policy.split(";") if part.split()[0] == kind)
    return found[1:]


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_is_whole_and_each_element_is_closed(page):
    assert (page.wrong, page.open) == ([], [])
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert page.tags[0] == ("html", {"lang": "en"})


def test_nothing_can_be_loaded_and_nothing_else_can_run(page):
    metas = [attrs for tag, attrs in page.tags if tag == "meta"]
    (policy,) = [m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy"]
    assert sources(policy, "default-src") == ["'none'"]
    _data, *scripts = page.parts["script"]
    assert sources(policy, "script-src") == [digest(script) for script in scripts]
    assert sources(policy, "style-src") == [digest(style) for style in page.parts["style"]]
    assert {part.split()[0] for part in policy.split(";")} == {
        "default-src", "script-src", "style-src", "base-uri", "form-action"}  # fmt: skip
    order = [tag for tag, attrs in page.tags if tag in ("style", "script") or "http-equiv" in attrs]
    assert order[0] == "meta"


def test_no_attribute_style_or_script_reaches_for_an_address(page):
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form"), tag
        for name, value in attrs.items():
            assert name not in ("style", "srcset", "action", "data", "background"), name
            assert not name.startswith("on"), name
            if name in ("src", "href"):
                assert value is not None
                assert value.startswith("#")
    assert not re.search(r"url\(|@import|expression\(", page.parts["style"][0])
    calls = (
        r"fetch\(|XMLHttpRequest|WebSocket|EventSource|import\(|sendBeacon|\beval\(|new Function"
    )
    for script in page.parts["script"][1:]:
        assert not re.search(calls + r"|\.src\s*=|innerHTML|document\.write", script)


def test_the_series_are_the_records_in_bytes(page, record):
    (drawn,) = page.data["records"]
    cells = len(drawn["ms"])
    assert 500 < cells <= CELLS
    assert drawn["ms"] == sorted(drawn["ms"])
    for name, line in drawn["lines"].items():
        if name.startswith("="):
            continue
        assert len(line["most"]) == cells
        values = [v for v in record.samples.values[name] if v != UNKNOWN]
        assert max(v for v in line["most"] if v is not None) == max(values)
        least = line.get("least", line["most"])
        assert min(v for v in least if v is not None) == min(values)
        assert {*line["most"], *least} <= {*values, None}
    assert drawn["step"][-1] == 2999
    assert drawn["lines"]["= limit"] == {"level": 1024 * MIB}
    assert [lane["name"] for lane in drawn["lanes"]] == ["train"]
    assert drawn["lanes"][0]["spans"] == [[0, 5000], [8000, 5000], [16000, 5000]]
    kinds = ["start", "finding", "cleanup", "end"]
    texts = [one.sentence() if isinstance(one, Event) else str(one) for one in EVENTS]
    assert [mark[1:] for mark in drawn["marks"]] == [*map(list, zip(kinds, texts, strict=True))]


def test_each_chart_has_its_place_and_its_lines(page):
    places = [attrs["data-chart"] for _, attrs in page.tags if "data-chart" in attrs]
    charts = {chart["place"]: chart for chart in page.data["charts"]}
    assert places == list(charts) == ["r0-host", "r0-cuda0"]
    keys = [line["key"] for line in charts["r0-host"]["lines"]]
    assert keys == ["rss", "private", "children_private", "cgroup_used", "heap_used", "available",
                    "cgroup_limit"]  # fmt: skip
    keys = [line["key"] for line in charts["r0-cuda0"]["lines"]]
    assert keys == ["cuda0_allocated", "cuda0_reserved", "cuda0_free", "cuda0_total"]
    for chart in charts.values():
        for line in chart["lines"]:
            assert line["key"] in page.data["records"][line["record"]]["lines"]


def test_the_page_says_what_explain_says(page, record):
    text, figures = page.text().replace("\u00a0", " "), figures_of(record)
    assert figures.used is not None
    for words in ("Finished", "Memory of train.py", "fix: clear it after use",
                  figures.verdict.findings[0].rate(), "freed 1.0 MiB", "2,999",
                  f"of 1.00 GiB (cgroup limit), at {figures.used.peak_seconds:.1f} s"):  # fmt: skip
        assert words in text, words
    phases = [attrs for tag, attrs in page.tags if tag == "th" and attrs.get("scope") == "row"]
    assert len(phases) == 2 + 1 + len(figures.tiers)  # phases, cleanups, columns


def test_tables_are_marked_up_for_those_who_cannot_see_them(page):
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    plots = [attrs for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert all(attrs["tabindex"] == "0" and "Arrow keys" in attrs["aria-label"] for attrs in plots)
    assert sum(tag == "h1" for tag, _ in page.tags) == 1


def test_what_lived_at_peaks_is_stacked_by_step_and_the_highest_is_in_tables(path):
    events = [recorded(3, 10 * MIB), recorded(1000, 20 * MIB), recorded(2000, 5 * MIB)]
    page = Page(render(memtools.read_record(write(path, events=events))))  # type: ignore[arg-type]
    assert (page.wrong, page.open) == ([], [])
    stacks = [attrs for tag, attrs in page.tags if tag == "svg" and attrs["class"] == "stack"]
    assert (
        stacks[0]["aria-label"]
        == "parameters 10.0 MiB, optimizer state 20.0 MiB, not seen 10.0 MiB"
    )
    assert len(stacks) == 3
    stripes = [attrs for tag, attrs in page.tags if tag == "rect" and attrs["class"] == "s3"]
    assert [(one["x"], one["width"]) for one in stripes] == [
        ("12.50", "25.00"), ("25.00", "50.00"), ("6.25", "12.50")
    ]  # fmt: skip
    text = page.text()
    assert (
        "Peak of step 1,000, the highest of 3 recorded steps (3 to 2,000 of 2,999): 80.0 MiB "
        "of tensors, in the optimizer's step"
    ) in text
    cells = page.parts["td"]
    for row in (["40.0 MiB", "50 %", "4"], ["20.0 MiB", "7"],
                ["20.0 MiB", "float32 [8, 9]", "parameters", "0.weight"]):  # fmt: skip
        assert row in [cells[i : i + len(row)] for i in range(len(cells))]
    assert "Net.forward (net.py:3)" in text


def test_the_highest_recorded_step_is_drawn_over_time_in_the_colours_of_its_bar(path):
    events = [recorded(3, 10 * MIB), recorded(1000, 20 * MIB)]
    page = Page(render(memtools.read_record(write(path, events=events))))  # type: ignore[arg-type]
    assert (page.wrong, page.open) == ([], [])
    (place,) = [attrs for _, attrs in page.tags if "data-stack" in attrs]
    assert (place["data-stack"], place["aria-label"]) == ("p0", "Step 1,000 from beginning to end")
    assert "Step 1,000 from beginning to end" in page.parts["h3"]
    size = 20 * MIB
    (stack,) = page.data["stacks"]
    assert stack == {
        "place": "p0",
        "title": "Step 1,000 from beginning to end",
        "lines": [
            {"label": "parameters", "colour": "s0", "bytes": [size] * 4},
            {"label": "optimizer state", "colour": "s3", "bytes": [0, 2 * size, 2 * size, size]},
            {"label": "not seen", "colour": "unseen", "bytes": [0, size, 0, 0]},
        ],
        "spans": [["forward", 1], ["backward", 2], ["optimizer", 1]],
        "highest": 1,
        "top": 0,
    }
    keys = [attrs["class"] for tag, attrs in page.tags if tag == "rect"]
    assert {line["colour"] for line in stack["lines"]} <= set(keys)


def test_the_traced_step_is_drawn_beside_itself_after_each_change(path):
    events = [recorded(3, 10 * MIB, traced=traced())]
    page = Page(render(memtools.read_record(write(path, events=events))))  # type: ignore[arg-type]
    assert (page.wrong, page.open) == ([], [])
    places = [attrs["data-stack"] for _, attrs in page.tags if "data-stack" in attrs]
    assert places == ["p0", "t0", "t0-1"]
    options = [attrs["value"] for tag, attrs in page.tags if tag == "option"]
    assert options == ["t0-1", "t0-2"]
    assert page.parts["option"] == ["fused: 40.0 MiB", "zero_grad: 40.0 MiB"]
    _, before, after, _ = page.data["stacks"]
    spans = [["forward", 1], ["backward", 1], ["optimizer", 1]]
    parameters = {"label": "parameters", "colour": "s0", "bytes": [40 * MIB] * 3}
    assert before == {
        "place": "t0", "title": "Unchanged: 60.0 MiB",
        "lines": [
            parameters,
            {"label": "optimizer's temporaries", "colour": "s4", "bytes": [0, 0, 20 * MIB]},
        ],
        "spans": spans, "highest": 2, "top": 60 * MIB,
    }  # fmt: skip
    assert after == before | {
        "place": "t0-1", "title": "fused: 40.0 MiB", "lines": [parameters], "highest": 0,
    }  # fmt: skip


@pytest.mark.parametrize("kept", [(), ("no trace",)])
def test_a_record_without_a_trace_has_no_such_drawing(path, kept):
    events = [recorded(3, 10 * MIB, traced=traced()._replace(kept=kept))]
    page = Page(render(memtools.read_record(write(path, events=events))))  # type: ignore[arg-type]
    assert [one["place"] for one in page.data["stacks"]] == ["p0"]
    assert "select" not in page.parts


def test_each_part_has_a_colour_of_its_own():
    colours = {what: part_colour(what) for what in PARTS}
    assert len(set(colours.values())) == len(PARTS)
    style = (STATIC / "page.css").read_text()
    for colour in colours.values():
        assert f".{colour} {{ color: var(--{colour}); }}" in style
        assert f"--{colour}:" in style
    assert part_colour("of a later version") == "unseen"


def test_hostile_texts_are_shown_and_do_nothing(path, tmp_path):
    events: list[Event | LeakFinding | tuple[str, str | bytes]] = []
    for text in HOSTILE:
        one = dataclasses.replace(KEPT, holder=text, advice=text, kept_at=text, source=text)
        events += [one, ("mark", text)]
        events += [Cleanup((text,), (1.0,)), End(text)]
    odd_step = {
        "layers": tuple(Layer(text, (1, 2, 3, 4)) for text in HOSTILE),
        "spans": (Span(HOSTILE[0], 1), Span(HOSTILE[4], 3)),
    }
    events += [recorded(n, MIB, text, **odd_step) for n, text in enumerate(HOSTILE)]
    write(path, events=events, command=tuple(HOSTILE))
    odd = tmp_path / "'\"><script>x<.mem"
    os.rename(path, odd)
    events = [*EVENTS, dataclasses.replace(KEPT, kept_at="x:1", source="x"), recorded(3, MIB)]
    plain = Page(render(memtools.read_record(write(path, events=events))))
    for records in ([memtools.read_record(odd)], [memtools.read_record(odd)] * 2):
        text = render(records, title=HOSTILE[0])
        page = Page(text)
        assert (page.wrong, page.open) == ([], [])
        assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags} | {"a", "h2"}
        assert len(page.parts["script"]) == 3
        assert HOSTILE[0] in page.parts["title"][0]
        assert all(char in "\n\t\xa0" or char.isprintable() for char in text)
        assert "{{ 7*7 }}" in page.text()
        assert not set("<>&") & set(page.parts["script"][0])
        texts = [line["label"] for line in page.data["stacks"][0]["lines"]]
        texts += [phase for phase, _ in page.data["stacks"][0]["spans"]]
        assert HOSTILE[0] in texts
        assert all(text.isprintable() for text in texts)
        marks = [mark[2] for mark in page.data["records"][0]["marks"]]
        assert HOSTILE[0] in marks
        assert all(mark.isprintable() for mark in marks)


def test_several_records_lie_side_by_side(tmp_path, capsys):
    paths = [write(str(tmp_path / f"{name}.mem"), steps=steps, grows=grows)
             for name, steps, grows in (("plain", 2000, 65536), ("memtools", 1000, 0))]  # fmt: skip
    out = str(tmp_path / "both.html")
    assert cli.main(["report", *paths, "-o", out, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == out
    assert said["bytes"] == os.path.getsize(out)
    assert [one["path"] for one in said["records"]] == paths
    page = Page(Path(out).read_text())
    assert (page.wrong, page.open) == ([], [])
    overlay = page.data["charts"][0]
    assert overlay["place"] == "all-0"
    assert [line["label"] for line in overlay["lines"]] == ["plain.mem", "memtools.mem", "Limit"]
    assert [len(record["ms"]) for record in page.data["records"]] == [2000, 1000]
    places = [attrs["data-chart"] for _, attrs in page.tags if "data-chart" in attrs]
    assert places == ["all-0", "r0-host", "r1-host"]
    assert "Side by side" in page.text()


def test_growth_that_the_run_itself_saw_is_not_called_none(path):
    seen = LeakFinding("leak", "children", "step", 39.3 * 1024, kind="children")
    write(path, steps=500, events=[seen])
    text = Page(render(memtools.read_record(path))).text()
    assert "Growth at the end+39.3 KiB/stepleak: the memory of child processes" in text


@pytest.mark.parametrize("end", [FINISHED, SIGKILLED], ids=End.clause)
def test_evidence_for_who_ended_a_run_is_shown_where_somebody_did(end, path):
    write(path, events=[Start(), SharedRoom(64 * MIB, 60 * MIB), end])
    page = Page(render(memtools.read_record(path)))
    killed = end is SIGKILLED
    assert any("shm_room" in cell for cell in page.parts["td"]) == killed
    assert [mark[1] for mark in page.data["records"][0]["marks"]].count("shm_room") == killed


def test_a_process_without_a_limit_of_its_own_is_told_from_its_machine(path):
    write(path, steps=500, limit=None, events=[Start(machine_bytes=10 * 2**30)])
    record = memtools.read_record(path)
    text = Page(render(record)).text()
    assert "Peak of the process302.0 MiB" in text
    assert "Peak of the job320.2 MiB" in text
    assert "Machine, all programs1.21 GiB 1.21 of 10.0 GiB (12 %) in use at the end" in text
    both = Page(render([record, record]))
    assert max(both.data["records"][0]["lines"]["= used"]["most"]) < 330 * MIB


def test_records_of_one_name_are_told_apart_by_their_paths(tmp_path):
    (tmp_path / "a").mkdir()
    records = [memtools.read_record(write(str(tmp_path / name), steps=5))
               for name in ("run.mem", "a/run.mem")]  # fmt: skip
    labels = [line["label"] for line in Page(render(records)).data["charts"][0]["lines"]]
    assert labels[:2] == [record.path for record in records]


@pytest.mark.slow
def test_a_page_stays_small_whatever_it_shows(tmp_path):
    columns = {"rows": 20_000, "buckets": 4096, "events": 4096}
    long = write(str(tmp_path / "long.mem"), steps=30_000, grows=997, device=True, sizes=columns,
                 events=[("mark", "x" * 190)] * 4000)  # fmt: skip
    record = memtools.read_record(long)
    assert len(render(record)) < LIMIT_BYTES
    assert len(render([record] * 3)) < LIMIT_BYTES


def test_without_jinja2_it_says_what_to_install(path, tmp_path):
    write(path, steps=5)
    script = (
        "import sys; sys.modules.update(jinja2=None)\n"
        "from memtools import _cli as cli; sys.exit(cli.main(['report', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "memtools report: the report needs jinja2, which is not installed; run "
        "python -m pip install jinja2\n"
    )
    assert sorted(os.listdir(tmp_path)) == ["run.mem"]


def test_only_an_earlier_report_is_replaced(path, tmp_path, capsys):
    write(path, steps=5)
    assert cli.main(["report", path]) == 0
    out, first = capsys.readouterr().out, tmp_path / "run.html"
    assert re.fullmatch(rf"Wrote {re.escape(str(first))} \([\d.]+ KiB\)\n", out)
    assert cli.main(["report", path]) == 0
    mine = tmp_path / "notes.html"
    mine.write_text("<p>mine</p>")
    for other in (mine, Path(path)):
        before = other.read_bytes()
        assert cli.main(["report", path, "-o", str(other)]) == 1
        assert "is not a report of memtools and is left as it is" in capsys.readouterr().err
        assert other.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["notes.html", "run.html", "run.mem"]


def test_a_page_that_cannot_be_written_leaves_nothing_behind(path, tmp_path, monkeypatch, capsys):
    write(path, steps=5)
    assert cli.main(["report", path, "-o", str(tmp_path / "none/x.html")]) == 1
    said = capsys.readouterr().err
    assert f"there is no such directory: '{tmp_path / 'none'}'" in said
    assert said.count("\n") == 1
    assert cli.main(["report", path, "-o", str(tmp_path)]) == 1

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    assert cli.main(["report", path]) == 1
    assert "no space left" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["run.mem"]


def test_the_page_is_its_owners_as_the_record_is(path, tmp_path):
    record = memtools.read_record(write(path, steps=5))
    write_report(record, tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_mode & 0o777 == 0o600


def test_a_report_needs_a_record_and_an_empty_one_will_do(tmp_path, path):
    with pytest.raises(ValueError, match="at least one record"):
        render([])
    write(path, steps=0)
    page = Page(render(memtools.read_record(path)))
    assert (page.wrong, page.open) == ([], [])
    assert page.data["charts"] == []


def test_the_chart_library_comes_with_its_license_and_is_packaged():
    text = (STATIC / "uplot.js").read_text()
    assert "uPlot 1.6.32" in text
    assert "Permission is hereby granted, free of charge" in text
    assert sum(file.stat().st_size for file in STATIC.iterdir()) <= 150_000
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["package-data"]["memtools.report.static"] == ["*"]
    assert "memtools.report.static" in settings["tool"]["setuptools"]["packages"]
    assert settings["project"]["optional-dependencies"]["report"] == ["jinja2>=3.1"]


def test_columns_of_another_program_are_drawn_too(path):
    with _core.RecordWriter(path, [("buffers", "bytes"), ("workers", "")]) as writer:
        for i in range(10):
            writer.append(10**15 + i, [i * MIB, i])
    page = Page(render(memtools.read_record(path)))
    assert [line["label"] for line in page.data["charts"][0]["lines"]] == ["buffers"]
    assert "workers" in page.text()
    assert len(COLUMNS) == 11


KERNEL = ("python", "-m", "ipykernel_launcher", "-f", "/run/kernel-4711.json")


@pytest.mark.parametrize(
    ("command", "notebook", "title"),
    [
        (KERNEL, "train.ipynb", "Memory of train.ipynb"),
        (KERNEL, "", "Memory of a notebook"),
        (("python", "/lib/ipykernel_launcher.py", "-f", "x.json"), "", "Memory of a notebook"),
        (("python3", "/lib/colab_kernel_launcher.py", "-f", "x"), "", "Memory of a notebook"),
        (("python", "train.py"), "started_from.ipynb", "Memory of train.py"),
        (("python", "-m", "package.train"), "", "Memory of package.train"),
        ((), "", "Memory of a run"),
    ],
)
def test_the_title_names_the_script_or_the_notebook(
    command: tuple[str, ...], notebook: str, title: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "run.mem")
    write(path, steps=20, events=[Start(notebook=notebook)], command=command)
    record = memtools.read_record(path)
    assert Page(render(record)).parts["title"][0] == title


# --- growth, and what is drawn at first ----------------------------------------------------------


def test_growth_comes_first_with_its_fix_and_no_growth_below_the_charts(path):
    first, grows, last = "What to do next", "Growth", "Events"
    peaks = "Memory at the peak of a step"
    heads = {first, grows, "Host memory", peaks, last}
    events = [recorded(3, 10 * MIB), KEPT, SIGKILLED]
    page = Page(render(memtools.read_record(write(path, events=events))))
    assert (page.wrong, page.open) == ([], [])
    found = [head for head in page.parts["h3"] if head in heads]
    assert found == [grows, first, "Host memory", peaks, last]
    assert page.text().count(KEPT.advice) == 1
    page = Page(render(memtools.read_record(write(path, events=events[::2]))))
    found = [head for head in page.parts["h3"] if head in heads]
    assert found == [first, "Host memory", peaks, grows, last]


def test_a_finding_is_an_event_where_it_says_something_new(path):
    """Not each of the rates on the way to the last, which is the only one above the table."""
    rates = [dataclasses.replace(KEPT, rate_bytes=1024.0 * n) for n in (50, 60, 70)]
    line = dataclasses.replace(rates[2], made_at="train.py:3 in step")
    ended = dataclasses.replace(line, over=True)
    page = Page(render(memtools.read_record(write(path, events=[*rates, line]))))
    (drawn,) = page.data["records"]
    assert [mark[2] for mark in drawn["marks"]] == [str(rates[0]), str(line)]
    assert "+70.0 KiB/step" in page.text()
    assert "+60.0 KiB/step" not in page.text()
    page = Page(render(memtools.read_record(write(path, events=[*rates, line, ended]))))
    assert len(page.data["records"][0]["marks"]) == 3


@pytest.mark.parametrize("limited", [True, False])
def test_the_control_group_is_drawn_at_first_if_it_has_a_limit(limited, path):
    limit = 1024 * MIB if limited else None
    write(path, limit=limit, events=[Start(machine_bytes=10 * 2**30)])
    (chart,) = Page(render(memtools.read_record(path))).data["charts"]
    on = {line["key"]: line["on"] for line in chart["lines"]}
    assert on["cgroup_used"] == limited
    assert on["rss"]
    assert on["heap_used"]
    assert not on["private"]


def test_the_job_is_drawn_where_it_is_more_than_the_process(tmp_path):
    columns = [("rss", "B"), ("job", "B"), ("children", ""), ("children_private", "B")]
    for workers, keys in ((0, ["rss"]), (2, ["job", "rss", "children_private"])):
        path = str(tmp_path / f"{workers}.mem")
        with _core.RecordWriter(path, columns) as writer:
            for i in range(10):
                own = (i + 1) * MIB
                writer.append(10**15 + i, [own, (1 + workers) * own, workers, workers * own])
        (chart,) = Page(render(memtools.read_record(path))).data["charts"]
        lines = {line["key"]: line["on"] for line in chart["lines"]}
        assert [key for key, on in lines.items() if on] == keys


def test_equal_blocks_are_one_row_with_their_number(path):
    older = Large(MIB, "older than the step", "", (), "", "", "")
    named = older._replace(what="parameters", dtype="float32", shape=(8, 9), name="0.weight")
    events = [recorded(3, MIB, largest=(named, *[older] * 9))]
    page = Page(render(memtools.read_record(write(path, events=events))))  # type: ignore[arg-type]
    cells = [cell.strip() for cell in page.parts["td"]]
    row = ["9 \u00d7 1.0 MiB", "", "older than the step", ""]
    at = cells.index(row[0])
    assert cells[at : at + 4] == row
    assert cells[at - 4 : at] == ["1.0 MiB", "float32 [8, 9]", "parameters", "0.weight"]


# --- the text of lines ----------------------------------------------------------------------------

SOURCE = """class Net:
    def forward(self, x):
        self.kept.append(x)
kept = []
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("net.py:3 in forward", "self.kept.append(x)"),
        ("net.py:4", "kept = []"),
        ("net.py:3 in backward", ""),  # The file has changed: another function is there.
        ("net.py:3", ""),
        ("net.py:99 in forward", ""),
        ("gone.py:3 in forward", ""),
        ("notes.txt:1", ""),
        ("torch/nn/modules/linear.py:125 in forward", ""),
        ("In[3]:1 in train", ""),  # The kernel of this cell is gone.
        ("C code", ""),
    ],
)
def test_a_line_has_its_text_if_the_file_is_the_one_that_ran(name, text, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for file in ("net.py", "notes.txt"):
        (tmp_path / file).write_text(SOURCE)
        os.utime(tmp_path / file, (10**6, 10**6))
    record = memtools.read_record(write(str(tmp_path / "run.mem"), steps=5))
    assert source_of(record, name) == text
    os.utime(tmp_path / "net.py", (2 * 10**9, 2 * 10**9))  # newer than the run
    if record.start_ns < 2 * 10**18:
        assert source_of(record, name) == ""


def test_the_page_shows_the_text_next_to_each_line(path, tmp_path):
    (tmp_path / "net.py").write_text(SOURCE)
    os.utime(tmp_path / "net.py", (10**6, 10**6))
    line = "net.py:3 in forward"
    large = Large(MIB, "saved for backward", "float32", (8,), "", "aten::mul", line)
    kept = dataclasses.replace(KEPT, kept_at=line, made_at="net.py:4")
    events = [recorded(3, MIB, largest=(large,)), kept]
    page = Page(render(memtools.read_record(write(path, events=events))))
    assert page.parts["code"] == ["self.kept.append(x)", "kept = []", *["self.kept.append(x)"] * 2]
    assert "kept at net.py:3 self.kept.append(x) made at net.py:4 kept = [] fix: " in page.text()


# --- the marks on the time line -------------------------------------------------------------------


def test_the_marks_on_the_time_line_have_a_legend(path):
    act = GuardAct("raise", 0.9, 9 * MIB, 10 * MIB, "given")
    events = [Start(), Fork(12), act, ("made up", "x"), Fork(13)]
    page = Page(render(memtools.read_record(write(path, events=events))))
    (legend,) = re.findall(r"Marks on the time line: [^.]*\.", page.text())
    assert legend == (
        "Marks on the time line: S start, G guard (a guard acted), Y fork (a process was "
        "started), ? other."
    )
    letters = page.data["letters"]
    assert (letters["finding"], letters["fork"]) == ("F", "Y")


def test_no_two_kinds_of_events_have_the_same_letter():
    kinds = {one.KIND for one in Event.__subclasses__()}
    assert kinds - {"phase"} <= set(LETTERS)
    assert len({*LETTERS.values(), OTHER}) == len(LETTERS) + 1
