"""`memtools compare`: what differs, what is the same, which bounds are broken, and bad input."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import memtools
from memtools import _cli as cli
from memtools._leak.finding import LeakFinding
from memtools._record.compare import Comparison, Row, compare, difference_in_words, host_growth
from memtools._record.figures import figures_of
from memtools._record.growth import slope
from memtools._record.kinds import End
from memtools._record.overview import tiles
from tests.cli.runs import run, write
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
    assert out.endswith("\nall bounds are kept\n") or "held, but not known" in out


def test_figures_are_those_that_were_made(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        {"base": 300 * MIB, "phases": {"forward": 310 * MIB}, "devices": [(GIB, 2 * GIB)]},
        {
            "base": 340 * MIB,
            "phases": {"forward": 360 * MIB, "eval": MIB},
            "devices": [(GIB, 3 * GIB)],
            "pace": 0.03,
            "steps": 400,
        },
    )
    numbers = {r.label: (r.base.number, r.new.number, r.same) for r in found.rows}
    assert numbers["peak (process)"] == (310 * MIB, 360 * MIB, False)
    assert numbers["process, exact peak"] == (310 * MIB, 360 * MIB, False)
    assert numbers["cuda:0 allocated"] == (GIB, GIB, True)
    assert numbers["cuda:0 reserved"] == (2 * GIB, 3 * GIB, False)
    assert numbers["phase forward"] == (310 * MIB, 360 * MIB, False)
    assert numbers["phase eval"] == (None, MIB, None)
    assert numbers["steps"] == (300, 400, False)
    seconds = row(found, "time of a step, median")
    assert seconds.base.number == pytest.approx(0.01)
    assert seconds.new.number == pytest.approx(0.03)
    assert seconds.same is False
    assert row(found, "phase forward").share == pytest.approx(50 / 310)


@pytest.mark.parametrize(
    ("base", "new", "same"),
    [(100, 107, True), (100, 109, False), (1000, 1030, True), (1000, 1032, False)],
)
def test_peaks_are_the_same_within_what_two_runs_of_one_script_differ_by(
    base: int, new: int, same: bool, tmp_path: Path
) -> None:
    found = compared(tmp_path, {"base": base * MIB}, {"base": new * MIB})
    assert row(found, "peak (process)").same is same


def test_what_is_no_difference_is_not_called_the_same_beside_a_difference(tmp_path: Path) -> None:
    """It said `0.15 s -> 0.22 s  same (+48.4 %)`."""
    found = compared(tmp_path, {"pace": 0.15}, {"pace": 0.22, "base": 301 * MIB})
    words = {one.label: difference_in_words(one) for one in found.rows}
    assert words["time of a step, median"] == "within noise (+46.7 %)"
    assert words["peak (process)"] == "within noise (+0.3 %)"
    assert words["steps"] == "same"


def test_growth_that_ended_is_a_difference_of_all_of_it(tmp_path: Path) -> None:
    """Where the other run is told to have none, what was measured of it within its noise is none
    as well: `+513.2 KiB ... none` had a difference of -502.8 KiB."""
    found = compared(tmp_path, {"grows": 64 * KIB, "findings": [KEPT]}, {"grows": 1})
    one = row(found, "growth")
    assert one.new.number
    assert (one.difference, one.same) == (-64 * KIB, False)
    assert difference_in_words(one) == "-64.0 KiB/step"


def test_the_report_and_the_comparison_tell_one_time_of_a_step(tmp_path: Path) -> None:
    """The page divided the whole run, its imports too, by the steps."""
    figures = figures_of(memtools.read_record(made(tmp_path / "run.mem", pace=0.02)))
    (tile,) = (tile for tile in tiles(figures) if tile.name == "Steps")
    assert (tile.value, tile.remark) == ("300", "20 ms each (median)")
    one = row(compare(figures, figures), "time of a step, median")
    assert one.new.number == figures.step_seconds == pytest.approx(0.02)


def test_with_workers_the_job_is_compared_and_differs_by_more(tmp_path: Path) -> None:
    found = compared(tmp_path, {"workers": 100 * MIB}, {"workers": 150 * MIB})
    one = row(found, "peak (job)")
    assert (one.base.number, one.new.number, one.same) == (400 * MIB, 450 * MIB, True)
    assert row(found, "process, largest sample").difference == 0


def test_a_control_group_is_compared_with_a_control_group_alone(tmp_path: Path) -> None:
    found = compared(tmp_path, {"group": GIB}, {"group": GIB})
    assert row(found, "peak (control group)").base.number == 340 * MIB
    found = compared(tmp_path, {"group": GIB}, {"limit": GIB})
    assert row(found, "peak (job)").same is True
    assert "one run is counted by its control group" in found.notes[0]


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
        ({"steps": 0}, "no steps were made"),
    ],
)
def test_growth_is_said_where_there_are_steps_enough(
    made_as: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    one = row(compared(tmp_path, {}, made_as), "growth")
    assert (one.new.number is None) is (why is not None)
    assert one.new.why == (why or "")
    assert one.difference is None or why is None


def test_where_readings_are_too_few_the_runs_own_test_has_found_none(
    tmp_path: Path, capsys: Capture
) -> None:
    """A step of 0.5 ms has a sample for one step of twenty."""
    few: dict[str, Any] = {"steps": 10, "step_by": 20}
    one = row(compared(tmp_path, few, {**few, "findings": [KEPT]}), "growth")
    assert (one.base.number, one.base.why, one.new.number) == (0, "none found", 64 * KIB)
    assert one.same is False
    one = row(compared(tmp_path, {**few, "tests": False}, few), "growth")
    assert (one.base.number, one.base.why) == (None, "too few readings to say")
    paths = pair(tmp_path, few, few)
    status, out, _ = told(capsys, *paths, "--fail", "growth=+1KiB/step")
    assert status == 0
    assert "held, but not known well enough, more steps tell: growth is none found" in out
    paths = pair(tmp_path, few, {**few, "findings": [KEPT]})
    assert told(capsys, *paths, "--fail", "growth=+1KiB/step")[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LEAKS, *LEAK_FREE])
def test_growth_of_real_programs_is_between_what_it_says(name: str, tmp_path: Path) -> None:
    """Of records whose truth is known: bytes a step, or that nothing leaks."""
    figures = figures_of(memtools.read_record(runs.write(name, str(tmp_path / "run.mem"))))
    growth = host_growth(figures)
    if not figures.steps:
        assert growth.why == "no steps were made"
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
    assert ("\nall bounds are kept\n" in out) is (status == 0)
    assert bool(err) is ("eval" in bound)
    found, out, _ = told(capsys, *paths, "--json", *(f"--fail={one}" for one in bound.split(",")))
    assert found == status
    said = json.loads(out)
    assert said["exit_code"] == status
    results = {"held": 0, "broken": 1, "unknown": 2}
    worst = [results[one["result"]] for one in said["bounds"]]
    assert (1 if 1 in worst else max(worst)) == status


def test_a_broken_bound_is_one_sentence_with_all_numbers(tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, OLD, NEW)
    _, out, _ = told(capsys, *paths, "--fail", "peak=+5%,growth=1KiB/step")
    assert (
        "broken: peak (process) is 315.6 MiB against 300.0 MiB (+15.6 MiB, +5.2 %); the bound is "
        "+5 %\n"
    ) in out
    assert (
        "broken: growth is +2.0 KiB/step (+1.9 KiB to +2.1 KiB); the bound is 1.0 KiB/step" in out
    )


def test_a_bound_within_the_noise_says_so(tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, {"workers": 100 * MIB}, {"workers": 150 * MIB})
    status, out, _ = told(capsys, *paths, "--fail", "peak=+5%")
    assert status == 1
    assert "the bound is +5 %; two runs of one script may differ as much\n" in out


def test_growth_that_is_not_known_well_enough_is_held_and_says_so(
    tmp_path: Path, capsys: Capture
) -> None:
    paths = pair(tmp_path, {"steps": 40}, {"steps": 40})
    status, out, _ = told(capsys, *paths, "--fail", "growth=+16B/step")
    assert status == 0
    assert "held, but not known well enough, more steps tell: growth is" in out
    assert "all bounds are kept" in out


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


def test_what_shrinks_in_base_is_no_room_to_grow_in(tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, {"grows": -64 * KIB}, {})
    assert told(capsys, *paths, "--fail", "growth=+1KiB/step")[0] == 0


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
         "seconds=+10%: time of a step, median of new is not known: no steps were made"),
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
    assert "all bounds are kept" not in out


def test_a_bound_on_new_alone_needs_nothing_of_base(tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, {"steps": 0}, {"devices": [(GIB, GIB)]})
    bounds = "peak=1GiB,growth=1KiB/step,device=1GiB,seconds=1s,leak"
    assert told(capsys, *paths, "--fail", bounds)[0] == 0


# --- bad input ------------------------------------------------------------------------------------


def test_what_is_no_record_is_one_line_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    good = str(made(tmp_path / "good.mem"))
    data = Path(good).read_bytes()
    bad = {
        "empty": b"",
        "short": data[: len(data) // 2],
        "text": b"no record",
        "later": data[:8] + b"\3" + data[9:],
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    said = {}
    for name in (*bad, "folder", "none"):
        for paths in ([good, str(tmp_path / name)], [str(tmp_path / name), good]):
            status, out, err = told(capsys, *paths, "--fail", "peak=+5%")
            assert (status, out, err.count("\n")) == (2, "", 1)
            assert err.startswith("memtools compare: ")
            said[name] = err
    assert "is a directory; give the run.mem file in it" in said["folder"]
    assert "memtools run writes one" in said["none"]
    assert "upgrade" in said["later"]
    for name in bad:
        assert name in said[name]


def test_a_wrong_bound_is_one_line_before_anything_is_read(tmp_path: Path, capsys: Capture) -> None:
    status, out, err = told(capsys, "none.mem", "none.mem", "--fail", "peak=5%")
    assert (status, out) == (2, "")
    assert err == (
        "memtools compare: argument --fail: a bound in percent is of what base has: give "
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
    assert "\nnote: these are runs of different programs: train.py and eval\\x1b.py\n" in out
    status, out, err = told(capsys, *paths, "--same-script")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "these are not known to be runs of one program (" in err
    assert err.endswith("compare runs of one script, or leave out --same-script\n")
    paths = pair(tmp_path, {}, {"command": []})
    assert told(capsys, *paths)[0] == 0
    assert told(capsys, *paths, "--same-script")[0] == 2


@pytest.mark.parametrize(
    ("new", "note"),
    [
        ({"steps": 400}, "runs of different length: 300 steps and 400 steps; what grows peaks "
         "higher in the longer one"),
        ({"end": End(signal="SIGTERM")},
         "{new}: it was killed by SIGTERM; what it would have taken is not known"),
        ({"end": None, "left": True}, "{new}: no end mark: the process is gone (SIGKILL and "
         "os._exit() leave no mark); what it would have taken is not known"),
        ({"end": End(exception="ValueError", text="no data")}, "{new}: it ended by exception "
         "ValueError: no data; what it would have taken is not known"),
        ({"steps": 0}, "{new}: the record has no sample"),
        ({"watched": "sh train.sh"}, "one run was watched from outside, as a command; in the "
         "other, what memtools itself takes counts"),
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
    assert f"note: {paths[1]}: the run goes on, these are its figures until now" in out


# --- how it is told -------------------------------------------------------------------------------


def test_json_has_all_figures_with_their_units(tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, OLD, {**NEW, "findings": [KEPT]})
    status, out, err = told(capsys, *paths, "--json")
    assert (status, err) == (0, "")
    said = json.loads(out, parse_constant=pytest.fail)
    assert sorted(said) == [
        "base", "bounds", "exit_code", "figures", "leaks", "new", "notes", "same_script",
    ]  # fmt: skip
    assert (said["base"]["record"], said["new"]["steps"]) == (paths[0], 300)
    by_label = {one["label"]: one for one in said["figures"]}
    assert by_label["peak (process)"]["base_bytes"] == 300 * MIB
    assert by_label["growth"]["new_bytes_per_step"] == 64 * KIB
    assert by_label["growth"]["new_low_bytes_per_step"] < 64 * KIB
    assert by_label["time of a step, median"]["new_seconds"] == pytest.approx(0.011)
    assert by_label["steps"]["difference_steps"] == 0
    (leak,) = said["leaks"]
    assert (leak["change"], leak["base"]) == ("new", None)
    assert leak["new"]["holder"] == "list Trainer.kept"


def test_the_figures_are_those_that_explain_says(tmp_path: Path, capsys: Capture) -> None:
    paths = pair(tmp_path, OLD, {**NEW, "findings": [KEPT], "limit": GIB})
    told_by_explain = []
    for path in paths:
        assert cli.main(["explain", "--json", path]) == 0
        told_by_explain.append(json.loads(capsys.readouterr().out))
    said = json.loads(told(capsys, *paths, "--json")[1])
    rows = {one["label"]: one for one in said["figures"]}
    for side, explained in zip(("base", "new"), told_by_explain, strict=True):
        assert rows["peak (process)"][f"{side}_bytes"] == explained["used"]["peak_bytes"]
        assert rows["steps"][f"{side}_steps"] == explained["steps"]
        phases = {phase["name"]: phase["peak_bytes"] for phase in explained["phases"]}
        assert rows["phase forward"][f"{side}_bytes"] == phases["forward"]
    assert said["leaks"][0]["new"] == told_by_explain[1]["leaks"][0]
    assert rows["growth"]["new_bytes_per_step"] == told_by_explain[1]["leaks"][0]["rate_bytes"]


@pytest.mark.slow
def test_on_a_terminal_it_is_drawn(tmp_path: Path) -> None:
    paths = pair(tmp_path, OLD, NEW)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 140, 0, 0))
    done = subprocess.Popen(
        [sys.executable, "-m", "memtools", "compare", *paths, "--fail", "peak=+5%"],
        stdout=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    drawn = b""
    try:
        while part := os.read(ours, 65536):
            drawn += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert done.wait() == 1
    text = drawn.decode()
    assert "┃" in text
    assert "\x1b[31m" in text  # the broken one is red
    assert "broken: peak (process) is 315.6 MiB against 300.0 MiB" in text


#: the losses are kept as they come where KEEPS says so: 64 KiB a step
TRAINS = """
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, kept = torch.nn.Linear(64, 64), []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if KEEPS: kept.append(torch.zeros(128, 128))
"""


@pytest.mark.slow
def test_two_real_runs_differ_by_the_leak_that_was_planted(tmp_path: Path, capsys: Capture) -> None:
    paths = {}
    for name, keeps in (("base", False), ("again", False), ("new", True)):
        write(tmp_path, TRAINS.replace("KEEPS", str(keeps)))
        done = run(tmp_path, "--quiet", "-o", f"{name}.mem", "train.py")
        assert (done.returncode, done.stderr) == (0, b"")
        paths[name] = str(tmp_path / f"{name}.mem")
    bounds = "peak=+10%,growth=+1KiB/step,leak"
    status, out, err = told(capsys, paths["base"], paths["again"], "--fail", bounds)
    assert (status, err) == (0, ""), out
    status, out, err = told(capsys, paths["base"], paths["new"], "--fail", bounds, "--json")
    assert (status, err) == (1, ""), out
    said = json.loads(out)
    (leak,) = said["leaks"]
    assert (leak["change"], leak["new"]["kind"]) == ("new", "list")
    assert leak["new"]["rate_bytes"] == pytest.approx(64 * KIB, rel=0.1)
    assert {one["name"]: one["result"] for one in said["bounds"]} == {
        "peak": "held", "growth": "broken", "leak": "broken",
    }  # fmt: skip
    growth = next(one for one in said["figures"] if one["name"] == "growth")
    assert (growth["base_low_bytes_per_step"] or 0) <= 1024
    assert growth["new_bytes_per_step"] == pytest.approx(64 * KIB, rel=0.1)
