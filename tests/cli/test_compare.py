"""`memtools compare`: what differs, what is the same, which bounds are broken, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memtools
from memtools import _cli as cli
from memtools._leak.finding import LeakFinding
from memtools._record.compare import (
    Comparison,
    Row,
    compare,
    difference_in_words,
    host_growth,
    in_words,
)
from memtools._record.figures import figures_of
from memtools._record.growth import slope
from memtools._record.kinds import End
from memtools._record.overview import tiles
from tests.record.comparecases import GIB, KEPT, KIB, MIB, made
from tests.report.test_words import LEAK_FREE, LEAKS
from tests.traces import runs

Capture = pytest.CaptureFixture[str]


def pair(tmp_path: Path, base: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The paths of two records that are made with these arguments."""
    paths = made(tmp_path / "base.mem", **base), made(tmp_path / "new.mem", **new)
    return [str(path) for path in paths]


def compared(tmp_path: Path, base: dict[str, Any], new: dict[str, Any]) -> Comparison:
    first, second = (figures_of(memtools.read_record(path)) for path in pair(tmp_path, base, new))
    return compare(first, second)


def row(found: Comparison, label: str) -> Row:
    (one,) = (one for one in found.rows if one.label == label)
    return one


def told(capsys: Capture, *words: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `memtools compare`."""
    status = cli.main(["compare", *words])
    out, err = capsys.readouterr()
    return status, out, err


# --- the figures ----------------------------------------------------------------------------------


def test_a_run_beside_itself_is_the_same_in_all(tmp_path: Path, capsys: Capture) -> None:
    one: dict[str, Any] = {
        "phases": {"forward": 290 * MIB, "eval": None},
        "devices": [(GIB, 2 * GIB)],
        "workers": 50 * MIB,
        "findings": [KEPT],
    }
    found = compared(tmp_path, one, one)
    assert [r.name for r in found.rows] == [
        "peak", "process", "device", "device", "phase:forward", "phase:eval", "growth", "growth",
        "steps", "seconds",
    ]  # fmt: skip
    assert {r.same for r in found.rows if r.name != "phase:eval"} == {True}
    assert row(found, "phase eval").same is None
    assert [change.change for change in found.leaks] == ["same"]
    assert found.notes == ()
    words = [str(tmp_path / "base.mem"), str(tmp_path / "new.mem")]
    status, out, err = told(
        capsys, *words, "--fail", "peak=+0,growth=+0B/step,leak,phase:forward=+0%"
    )
    assert (status, err) == (0, "")
    assert out.endswith("\nall bounds hold\n") or "held, but too uncertain" in out


def test_the_report_and_the_comparison_tell_one_time_of_a_step(tmp_path: Path) -> None:
    """The page divided the whole run, its imports too, by the steps."""
    figures = figures_of(memtools.read_record(made(tmp_path / "run.mem", pace=0.02)))
    (tile,) = (tile for tile in tiles(figures) if tile.name == "Steps")
    assert (tile.value, tile.remark) == ("300", "20 ms each (median)")
    one = row(compare(figures, figures), "time of a step, median")
    assert one.new.number == figures.step_seconds == pytest.approx(0.02)


#: the arguments of two runs, and of some rows what the table says: base, new, difference
ROWS: list[tuple[dict[str, Any], dict[str, Any], dict[str, tuple[str, str, str]]]] = [
    (
        {"phases": {"forward": 310 * MIB}, "devices": [(GIB, 2 * GIB)]},
        {"base": 340 * MIB, "phases": {"forward": 360 * MIB, "eval": MIB}, "steps": 400,
         "devices": [(GIB, 3 * GIB)], "pace": 0.03},
        {
            "peak (process)": ("310.0 MiB", "360.0 MiB", "+50.0 MiB (+16.1 %)"),
            "process, exact peak": ("310.0 MiB", "360.0 MiB", "+50.0 MiB (+16.1 %)"),
            "cuda:0 allocated": ("1.00 GiB", "1.00 GiB", "same"),
            "cuda:0 reserved": ("2.00 GiB", "3.00 GiB", "+1.00 GiB (+50.0 %)"),
            "phase forward": ("310.0 MiB", "360.0 MiB", "+50.0 MiB (+16.1 %)"),
            "phase eval": ("not known: the run has no such phase", "1.0 MiB", "not known"),
            "steps": ("300", "400", "+100 (+33.3 %)"),
            "time of a step, median": ("10 ms", "30 ms", "+20 ms (+200.0 %)"),
        },
    ),
    # Two runs of one script differ by 3 % of a peak, and by 8 MiB.
    ({"base": 100 * MIB}, {"base": 107 * MIB},
     {"peak (process)": ("100.0 MiB", "107.0 MiB", "within noise (+7.0 %)")}),
    ({"base": 100 * MIB}, {"base": 109 * MIB},
     {"peak (process)": ("100.0 MiB", "109.0 MiB", "+9.0 MiB (+9.0 %)")}),
    ({"base": 1000 * MIB}, {"base": 1030 * MIB},
     {"peak (process)": ("1000.0 MiB", "1.01 GiB", "within noise (+3.0 %)")}),
    ({"base": 1000 * MIB}, {"base": 1032 * MIB},
     {"peak (process)": ("1000.0 MiB", "1.01 GiB", "+32.0 MiB (+3.2 %)")}),
    ({"pace": 0.15}, {"pace": 0.22},
     {"time of a step, median": ("0.15 s", "0.22 s", "within noise (+46.7 %)")}),
    ({"workers": 100 * MIB}, {"workers": 150 * MIB},
     {"peak (job)": ("400.0 MiB", "450.0 MiB", "within noise (+12.5 %)"),
      "process, largest sample": ("300.0 MiB", "300.0 MiB", "same")}),
    # A control group holds pages of files: it is compared with another one alone.
    ({"group": GIB}, {"group": GIB},
     {"peak (control group)": ("340.0 MiB", "340.0 MiB", "same")}),
    ({"group": GIB}, {"limit": GIB}, {"peak (job)": ("300.0 MiB", "300.0 MiB", "same")}),
    # Where one run is said to have no growth, what was measured of it within its noise is none.
    ({"grows": 64 * KIB, "findings": [KEPT]}, {"grows": 1},
     {"growth": ("+64.0 KiB/step (+47.4 KiB to +86.4 KiB)", "none (within 30 B/step)",
                 "-64.0 KiB/step")}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "new", "rows"), ROWS)
def test_a_row_has_both_figures_and_their_difference(
    base: dict[str, Any], new: dict[str, Any], rows: dict[str, tuple[str, str, str]], tmp_path: Path
) -> None:
    found = compared(tmp_path, base, new)
    for label, words in rows.items():
        one = row(found, label)
        said = in_words(one.base, one.unit), in_words(one.new, one.unit), difference_in_words(one)
        assert said == words


# --- growth ---------------------------------------------------------------------------------------


def test_growth_that_the_run_has_found_is_its_own_rate(tmp_path: Path) -> None:
    """A quarter of the time it was seen to grow makes the interval, as that of a forecast."""
    one = row(compared(tmp_path, {}, {"findings": [KEPT]}), "growth")
    assert one.base.number == 0
    assert one.new.number == 64 * KIB
    assert one.new.low == pytest.approx(64 * KIB / 1.35)
    assert one.same is False


@pytest.mark.parametrize("tests", [True, False])
@pytest.mark.parametrize("grows", [2 * KIB, 64 * KIB, -8 * KIB])
def test_growth_that_nobody_found_is_the_slope_of_the_process(
    grows: int, tests: bool, tmp_path: Path
) -> None:
    one = row(compared(tmp_path, {}, {"grows": grows, "tests": tests}), "growth")
    assert one.base.number == 0
    assert one.new.number == pytest.approx(grows, rel=0.05)
    assert one.new.low <= grows <= one.new.high
    assert one.same is False
    assert one.base.high < 64  # a page in the newer half of the run


def test_a_few_jumps_are_no_growth_that_is_known(tmp_path: Path) -> None:
    """Steps of 4 MiB at odd times: a slope, and as much doubt."""
    path = made(tmp_path / "run.mem", steps=600)
    line = figures_of(memtools.read_record(path)).line
    values = line.least["process"]
    for at in (370, 520):
        for i in range(at, len(values)):
            values[i] += 4 * MIB
    line.most["process"][:] = values
    found = slope(line, "process")
    assert found is not None
    assert found.rate_bytes > 10 * KIB
    assert found.within_bytes > found.rate_bytes


@pytest.mark.parametrize(
    ("made_as", "why"),
    [
        ({"steps": 12}, "too early to say: 12 of 16 steps"),
        ({"steps": 36}, None),
        ({"steps": 0}, "no steps"),
    ],
)
def test_growth_is_said_where_there_are_steps_enough(
    made_as: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    one = row(compared(tmp_path, {}, made_as), "growth")
    assert (one.new.number is None) is (why is not None)
    assert one.new.why == (why or "")
    assert one.difference is None or why is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LEAKS, *LEAK_FREE])
def test_growth_of_real_programs_is_between_what_it_says(name: str, tmp_path: Path) -> None:
    """Of records whose truth is known: bytes a step, or that nothing leaks."""
    figures = figures_of(memtools.read_record(runs.write(name, str(tmp_path / "run.mem"))))
    growth = host_growth(figures)
    if not figures.steps:
        assert growth.why == "no steps"
    elif name in LEAK_FREE:
        grew = name == "f11_longer_answers"  # its answers do become longer
        assert growth.number is not None
        assert (growth.low > 1024) is grew
    elif (rate := LEAKS[name]) is not None:
        assert growth.low <= rate <= growth.high


def test_growth_on_a_device_is_that_of_what_is_allocated(tmp_path: Path) -> None:
    found = compared(tmp_path, {"devices": [(GIB, GIB)]}, {"devices": [(GIB, GIB)]})
    assert row(found, "growth on cuda:0").same is True
    gains = replace(KEPT, signal="device")
    one = row(
        compared(
            tmp_path, {"devices": [(GIB, GIB)]}, {"devices": [(GIB, GIB)], "findings": [gains]}
        ),
        "growth on cuda:0",
    )
    assert one.new.number == 64 * KIB


# --- leaks ----------------------------------------------------------------------------------------


UNNAMED = LeakFinding("growing", "heap", "step", 60.0 * KIB, 20, 16)
CASES: list[tuple[str, list[LeakFinding], list[LeakFinding], bool]] = [
    ("new", [], [KEPT], True),
    ("new", [], [replace(KEPT, grade="suspect")], False),
    ("gone", [KEPT], [], False),
    ("same", [KEPT], [replace(KEPT, grade="leak", rate_bytes=70.0 * KIB)], False),
    ("worse", [KEPT], [replace(KEPT, rate_bytes=256.0 * KIB)], False),
    ("worse", [replace(KEPT, grade="suspect")], [KEPT], False),
    ("better", [KEPT], [replace(KEPT, rate_bytes=16.0 * KIB)], False),
    ("better", [KEPT], [replace(KEPT, grade="suspect")], False),
    ("same", [UNNAMED], [KEPT], False),
    ("same", [KEPT], [UNNAMED], False),
    ("new gone", [replace(UNNAMED, rate_bytes=20.0 * KIB)], [KEPT], True),
    ("new gone", [replace(KEPT, holder="list Other.kept")], [KEPT], True),
]


@pytest.mark.parametrize(("change", "base", "new", "fails"), CASES)
def test_leaks_are_new_gone_or_worse_by_who_holds_them(
    change: str,
    base: list[LeakFinding],
    new: list[LeakFinding],
    fails: bool,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    paths = pair(tmp_path, {"findings": base}, {"findings": new})
    status, out, err = told(capsys, *paths, "--fail", "leak")
    assert [line.partition(":")[0] for line in out.splitlines() if "KiB/step" in line
            and not line.startswith(("growth", "broken"))] == change.split()  # fmt: skip
    assert (status, err) == (int(fails), "")
    assert ("broken: a leak that base does not have: likely: list Trainer.kept" in out) is fails


# --- bounds ---------------------------------------------------------------------------------------

OLD: dict[str, Any] = {"phases": {"forward": 300 * MIB}, "devices": [(GIB, 2 * GIB)]}
NEW: dict[str, Any] = {
    "base": 315 * MIB,
    "grows": 2 * KIB,
    "pace": 0.011,
    "phases": {"forward": 301 * MIB},
    "devices": [(GIB, 2 * GIB + 100 * MIB)],
}


@pytest.mark.parametrize(
    ("bound", "status"),
    [
        ("peak=+6%", 0),
        ("peak=+5%", 1),
        ("peak=+16MiB", 0),
        ("peak=+15MiB", 1),
        ("peak=316MiB", 0),
        ("peak=315MiB", 1),
        ("process=+5%", 1),
        ("device=+5%", 0),
        ("device=+4%", 1),
        ("device=3GiB", 0),
        ("device=2GiB", 1),
        ("growth=+3KiB/step", 0),
        ("growth=+1KiB/step", 1),
        ("growth=3KiB/step", 0),
        ("growth=1KiB/step", 1),
        ("seconds=+20%", 0),
        ("seconds=+5%", 1),
        ("seconds=+2ms", 0),
        ("seconds=10ms", 1),
        ("phase:forward=+1%", 0),
        ("phase:forward=+0.1%", 1),
        ("leak", 0),
        ("peak=+6%,growth=+1KiB/step", 1),
        ("phase:eval=+5%", 2),
        ("phase:eval=+5%,peak=+5%", 1),
    ],
)
def test_a_bound_fails_above_it(bound: str, status: int, tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, OLD, NEW)
    found, out, err = told(capsys, *paths, "--fail", bound)
    assert found == status
    assert ("\nbroken: " in out) is (status == 1)
    assert ("\nall bounds hold\n" in out) is (status == 0)
    assert bool(err) is ("eval" in bound)
    found, out, _ = told(capsys, *paths, "--json", *(f"--fail={one}" for one in bound.split(",")))
    assert found == status
    said = json.loads(out)
    assert said["exit_code"] == status
    results = {"held": 0, "broken": 1, "unknown": 2}
    worst = [results[one["result"]] for one in said["bounds"]]
    assert (1 if 1 in worst else max(worst)) == status


@pytest.mark.parametrize(
    ("bound", "result", "doubtful"),
    [
        ("growth=+40KiB/step", "broken", False),
        ("growth=+50KiB/step", "held", True),
        ("growth=+80KiB/step", "held", True),
        ("growth=+90KiB/step", "held", False),
        ("growth=40KiB/step", "broken", False),
        ("growth=50KiB/step", "held", True),
        ("growth=90KiB/step", "held", False),
    ],
)
def test_growth_breaks_a_bound_with_the_whole_of_its_interval(
    bound: str, result: str, doubtful: bool, tmp_path: Path, capsys: Capture
) -> None:
    """64 KiB a step, seen for 284 steps: 47 to 86."""
    paths = pair(tmp_path, {}, {"findings": [KEPT]})
    (said,) = json.loads(told(capsys, *paths, "--fail", bound, "--json")[1])["bounds"]
    assert (said["result"], said["doubtful"]) == (result, doubtful)


@pytest.mark.parametrize(
    ("base", "new", "bound", "sentence"),
    [
        ({}, {"steps": 12}, "growth=+1KiB/step",
         "growth=+1KiB/step: growth of new is not known: too early to say: 12 of 16 steps"),
        ({"steps": 12}, {}, "growth=+1KiB/step",
         "growth=+1KiB/step: growth of base is not known: too early to say: 12 of 16 steps"),
        ({}, {"steps": 12}, "leak",
         "leak: whether new leaks is not known: too early to say: 12 of 16 steps"),
        ({"steps": 12}, {"findings": [KEPT]}, "leak",
         "leak: whether base leaks is not known: too early to say: 12 of 16 steps"),
        ({}, {"steps": 0}, "seconds=+10%",
         "seconds=+10%: time of a step, median of new is not known: no steps"),
        ({}, {"steps": 0}, "peak=+5%",
         "peak=+5%: peak (process) of new is not known: the record has no reading of it"),
        ({}, {}, "device=2GiB", "device=2GiB: neither record has a device"),
        ({}, {"devices": [(GIB, GIB)]}, "device=+5%",
         "device=+5%: cuda:0 allocated of base is not known: the record has no reading of it"),
        ({}, {}, "phase:a\x1b=+5%", "phase:a\\x1b=+5%: neither record has a phase of this name"),
        ({"phases": {"a": MIB}}, {}, "phase:a=+5%",
         "phase:a=+5%: phase a of new is not known: the run has no such phase"),
        ({"phases": {"a": MIB}}, {"phases": {"a": None}}, "phase:a=+5%",
         "phase:a=+5%: phase a of new is not known: no peak was read in it"),
    ],
)  # fmt: skip
def test_a_bound_that_cannot_be_judged_has_not_passed(
    base: dict[str, Any],
    new: dict[str, Any],
    bound: str,
    sentence: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    status, out, err = told(capsys, *pair(tmp_path, base, new), "--fail", bound)
    assert status == 2
    assert err.splitlines()[0] == f"memtools compare: {sentence}"
    assert out.startswith("base: ")
    assert "all bounds hold" not in out


FEW: dict[str, Any] = {"steps": 10, "step_by": 20}  # a step of 0.5 ms has a sample of one in 20
NO_GROWTH = "held, but too uncertain (run more steps): growth is"
SAID: list[tuple[dict[str, Any], dict[str, Any], str, int, str]] = [
    (OLD, NEW, "peak=+5%", 1,
     "broken: peak (process) is 315.6 MiB against 300.0 MiB (+15.6 MiB, +5.2 %); the bound is "
     "+5 %\n"),
    (OLD, NEW, "growth=1KiB/step", 1,
     "broken: growth is +2.0 KiB/step (+1.9 KiB to +2.1 KiB); the bound is 1.0 KiB/step"),
    ({"workers": 100 * MIB}, {"workers": 150 * MIB}, "peak=+5%", 1,
     "the bound is +5 %; two runs of one script may differ by that much\n"),
    ({"steps": 40}, {"steps": 40}, "growth=+16B/step", 0, NO_GROWTH),
    (FEW, FEW, "growth=+1KiB/step", 0, f"{NO_GROWTH} none found"),
    (FEW, {**FEW, "findings": [KEPT]}, "growth=+1KiB/step", 1, "broken: growth is +64.0 KiB/step"),
    # What shrinks in base is no room to grow in.
    ({"grows": -64 * KIB}, {}, "growth=+1KiB/step", 0, "all bounds hold"),
    # A bound on new alone needs nothing of base.
    ({"steps": 0}, {"devices": [(GIB, GIB)]},
     "peak=1GiB,growth=1KiB/step,device=1GiB,seconds=1s,leak", 0, "all bounds hold"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "new", "bounds", "status", "words"), SAID)
def test_what_is_said_of_a_bound(
    base: dict[str, Any],
    new: dict[str, Any],
    bounds: str,
    status: int,
    words: str,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    found, out, _ = told(capsys, *pair(tmp_path, base, new), "--fail", bounds)
    assert (found, words in out) == (status, True), out


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
def test_a_file_that_is_not_a_record_is_one_line_and_nothing_else(
    side: int, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "bad").write_text("a text")
    paths = [str(made(tmp_path / "good.mem")), str(tmp_path / "bad")]
    status, out, err = told(capsys, paths[side], paths[1 - side], "--fail", "peak=+5%")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("memtools compare: ")
    assert "bad" in err


def test_a_wrong_bound_is_one_line_before_anything_is_read(tmp_path: Path, capsys: Capture) -> None:
    status, out, err = told(capsys, "none.mem", "none.mem", "--fail", "peak=5%")
    assert (status, out) == (2, "")
    assert err == (
        "memtools compare: argument --fail: a bound in percent must be a rise above base: give "
        "peak=+5%, got 'peak=5%' (see memtools compare --help)\n"
    )


def test_different_programs_are_a_note_and_refused_where_asked(
    tmp_path: Path, capsys: Capture
) -> None:
    same = {"command": ["python3.12", "/other/train.py", "--lr", "2"]}
    paths = pair(tmp_path, {}, same)
    assert "note: " not in told(capsys, *paths, "--same-script")[1]
    paths = pair(tmp_path, {}, {"command": ["python", "eval\x1b.py"]})
    status, out, _ = told(capsys, *paths)
    assert status == 0
    assert "\nnote: the runs are of different programs: train.py and eval\\x1b.py\n" in out
    status, out, err = told(capsys, *paths, "--same-script")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "these may be runs of different programs (" in err
    assert err.endswith("compare runs of one script, or leave out --same-script\n")
    paths = pair(tmp_path, {}, {"command": []})
    assert told(capsys, *paths)[0] == 0
    assert told(capsys, *paths, "--same-script")[0] == 2


@pytest.mark.parametrize(
    ("new", "note"),
    [
        ({"steps": 400}, "runs of different length: 300 steps and 400 steps; growing memory peaks "
                         "higher in the longer one"),
        ({"end": End(signal="SIGTERM")},
         "{new}: it was killed by SIGTERM; it may have needed more"),
        ({"end": None, "left": True}, "{new}: it was ended by SIGKILL or os._exit() "
                                      "(no end mark); it may have needed more"),
        ({"end": End(exception="ValueError", text="no data")}, "{new}: it ended by exception "
                                                               "ValueError: no data; it may have "
                                                               "needed more"),
        ({"steps": 0}, "{new}: the record has no sample"),
        ({"watched": "sh train.sh"}, "one run was watched from outside, as a command; the other "
                                     "includes memtools' own memory"),
        ({"limit": GIB}, "the limits differ: 24.0 GiB and 1.00 GiB"),
    ],
)  # fmt: skip
def test_what_the_reader_has_to_know_is_a_note(
    new: dict[str, Any], note: str, tmp_path: Path, capsys: Capture
) -> None:
    paths = pair(tmp_path, {}, new)
    status, out, err = told(capsys, *paths)
    assert (status, err) == (0, "")
    assert f"note: {note.replace('{new}', paths[1])}" in out.splitlines()


def test_a_run_that_goes_on_is_compared_as_it_is(tmp_path: Path, capsys: Capture) -> None:
    with memtools.MemoryMonitor(log=tmp_path / "new.mem", leaks=False):
        paths = [str(made(tmp_path / "base.mem")), str(tmp_path / "new.mem")]
        status, out, _ = told(capsys, *paths)
    assert status == 0
    assert f"note: {paths[1]}: still running; these are its figures so far" in out


# --- how it is told -------------------------------------------------------------------------------


def test_json_has_all_figures_with_their_units(tmp_path: Path, capsys: Capture) -> None:
    """And they are those that explain has."""
    paths = pair(tmp_path, OLD, {**NEW, "findings": [KEPT]})
    status, out, err = told(capsys, *paths, "--json")
    assert (status, err) == (0, "")
    said = json.loads(out, parse_constant=pytest.fail)
    assert sorted(said) == [
        "base", "bounds", "exit_code", "figures", "leaks", "new", "notes", "same_script",
    ]  # fmt: skip
    rows = {one["label"]: one for one in said["figures"]}
    assert rows["growth"]["new_low_bytes_per_step"] < 64 * KIB
    assert rows["time of a step, median"]["new_seconds"] == pytest.approx(0.011)
    assert rows["steps"]["difference_steps"] == 0
    (leak,) = said["leaks"]
    assert (leak["change"], leak["base"]) == ("new", None)
    for side, path in zip(("base", "new"), paths, strict=True):
        assert cli.main(["explain", "--json", path]) == 0
        explained = json.loads(capsys.readouterr().out)
        assert said[side]["record"] == path
        assert rows["peak (process)"][f"{side}_bytes"] == explained["used"]["peak_bytes"]
        assert rows["steps"][f"{side}_steps"] == explained["steps"]
        phases = {phase["name"]: phase["peak_bytes"] for phase in explained["phases"]}
        assert rows["phase forward"][f"{side}_bytes"] == phases["forward"]
    assert [leak["new"]] == explained["leaks"]
    assert rows["growth"]["new_bytes_per_step"] == leak["new"]["rate_bytes"] == 64 * KIB


#: The buffers are kept as they come where KEEPS says so: 64 KiB a step.
LOOP = """
import sys, memtools
kept, keeps = [], sys.argv[2] == "keeps"
with memtools.MemoryMonitor(sys.argv[1]) as monitor:
    for _ in range(200):
        buffer = bytearray(1 << 16)
        if keeps: kept.append(buffer)
        monitor.step()
"""


@pytest.mark.slow
def test_two_real_runs_differ_by_the_leak_that_was_planted(tmp_path: Path, capsys: Capture) -> None:
    paths = [str(tmp_path / f"{name}.mem") for name in ("base", "again", "new")]
    for path in paths:
        keeps = "keeps" if path == paths[-1] else "drops"
        subprocess.run(
            [sys.executable, "-c", LOOP, path, keeps], check=True, stderr=subprocess.PIPE
        )
    bounds = "peak=+100%,growth=+1KiB/step,leak"
    status, out, err = told(capsys, *paths[:2], "--fail", bounds)
    assert (status, err) == (0, ""), out
    status, out, err = told(capsys, paths[0], paths[2], "--fail", bounds, "--json")
    assert (status, err) == (1, ""), out
    said = json.loads(out)
    (leak,) = said["leaks"]
    assert (leak["change"], leak["new"]["kind"]) == ("new", "list")
    assert leak["new"]["rate_bytes"] == pytest.approx(64 * KIB, rel=0.1)
    assert {one["name"]: one["result"] for one in said["bounds"]} == {
        "peak": "held", "growth": "broken", "leak": "broken",
    }  # fmt: skip
