"""The tables of limits and times say what the results say, and "yes" where every run has both."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.kit.limits import Limit, finish, number_limit, reached
from benchmarks.kit.tables import tables

FACTS = {"cpu": "a", "cores": 2, "torch": "b", "load_average": [0.5], "date": "2026-01-02 03:04:05"}


def run(out: Path, median: float, revision: str) -> None:
    options = argparse.Namespace(only=None, quick=False, out=out)
    row = number_limit("a call", 2.0, "us", 1.0, median)
    finish("made_up", options, {**FACTS, "revision": revision}, {}, [row])


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([(True, True)] * 3, "yes"),
        ([(True, True), (True, False), (True, True)], "in 2 of 3 runs"),
        ([(True, False)] * 3, "by min only"),
        ([(False, True)] * 2, "by median only"),
        ([(True, False), (False, True)], "NO"),
        ([(False, False)], "NO"),
    ],
)
def test_a_limit_is_reached_where_both_figures_of_each_run_are_within(
    runs: list[tuple[bool, bool]], said: str
) -> None:
    assert reached(Limit("a", "<= 1", "0", "0", *both) for both in runs) == said


def test_results_keep_the_limits_of_the_last_three_runs(tmp_path: Path) -> None:
    out = tmp_path / "made_up.json"
    for median, revision in ((9.0, "r1"), (1.0, "r2"), (1.5, "r3"), (3.0, "r4")):
        run(out, median, revision)
    assert [one["revision"] for one in json.loads(out.read_text())["runs"]] == ["r2", "r3", "r4"]
    row = "| a call | <= 2 us | 1 us | 1 us / 1.5 us | 1 us / 3 us | in 2 of 3 runs |"
    found = tables("made_up", tmp_path)
    assert row in found
    assert "- Run 3: revision r4, 2026-01-02 03:04, load 0.5 when it began" in found


def test_ways_of_doing_a_thing_stand_side_by_side(tmp_path: Path) -> None:
    run(tmp_path / "made_up.json", 1.0, "r1")
    content = json.loads((tmp_path / "made_up.json").read_text())
    times = [("by hand", 2e3, 2.5e3, 1, 1), ("ours", 999.6, 1200, 0.4998, 0.48)]
    keys = ("name", "min_ns", "median_ns", "ratio_of_mins", "median_ratio")
    rows = [dict(zip(keys, each, strict=True)) for each in times]
    alone = [{"name": "all", "min_ns": 1.5e9, "median_ns": 2.25e9}]
    other = [{"name": "a count", "turns": 3}]
    content["sections"] = {"rows": rows, "whole": {"rows": alone}, "counts": other}
    (tmp_path / "made_up.json").write_text(json.dumps(content))
    wanted = """| made_up | least / median | beside by hand |
| --- | --- | --- |
| by hand | 2 / 2.5 us | |
| ours | 1,000 / 1,200 ns | 0.5 / 0.48 x |

| whole | least / median |
| --- | --- |
| all | 1.5 / 2.25 s |
"""
    assert tables("made_up", tmp_path).endswith(wanted)


def test_a_limit_that_a_run_did_not_measure_is_said_so(tmp_path: Path) -> None:
    out = tmp_path / "made_up.json"
    run(out, 1.0, "r1")
    content = json.loads(out.read_text())
    content["runs"][0]["limits"][0]["limit"] = "another call"
    out.write_text(json.dumps(content))
    run(out, 1.0, "r2")
    assert "| a call | <= 2 us | not measured | 1 us | yes |" in tables("made_up", tmp_path)
