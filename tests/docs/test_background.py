"""The pages of docs/background: what they show is what comes, and their figures were measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.markdown import figures_without_source
from tests.docs.test_readme import run_program  # noqa: F401
from tests.docs.test_symptoms import (
    FENCE,
    missing,
    test_the_commands_of_a_page_say_what_it_shows,
    test_what_a_program_prints_is_what_the_page_shows,
)

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
ORDER = ("memory", "leak_or_warm_up", "holder", "limits", "other_tools")
PAGES = [DOCS / "background" / f"{name}.md" for name in ORDER]
run_commands = test_the_commands_of_a_page_say_what_it_shows
run_programs = test_what_a_program_prints_is_what_the_page_shows
# What another module tests is not tested here once more.
del test_the_commands_of_a_page_say_what_it_shows
del test_what_a_program_prints_is_what_the_page_shows


def pages_with(kind: str) -> list[object]:
    """A parameter for each page that has blocks of this kind."""
    return [
        pytest.param(page, id=page.stem)
        for page in PAGES
        if any(kind == found for _, found, _ in FENCE.findall(page.read_text()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("console"))
def test_the_commands_say_what_is_shown(page: Path, tmp_path: Path) -> None:
    run_commands(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python"))
def test_the_programs_print_what_is_shown(
    page: Path,
    run_program: Callable[[str, Path], int],  # noqa: F811
    tmp_path: Path,
) -> None:
    run_programs(page, run_program, tmp_path)


def test_the_menu_has_the_pages_in_the_order_in_which_they_are_read() -> None:
    menu = re.findall(r"^background/(\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert tuple(menu) == ORDER
    assert sorted(DOCS.glob("background/*.md")) == sorted(PAGES)


def test_a_figure_without_a_source_is_found() -> None:
    row = "| a | 12 to 34 us | 5 % | `x=7` | [b](../internals/b.md#c) |\n"
    assert figures_without_source(row, {"internals/b.md#c": "12 us, 34, 5 %"}.__getitem__) == []
    assert figures_without_source(row, lambda _: "12, 340, 5") == ["34 in: a"]


def test_the_figures_beside_other_tools_are_those_of_the_loops() -> None:
    results = json.loads((PROJECT / "benchmarks" / "results" / "leakset.json").read_text())
    found, loops = results["summary"], results["loops"]
    text = (DOCS / "background" / "other_tools.md").read_text()
    rows = {
        cells[0]: cells[1:]
        for line in text.splitlines()
        if len(cells := [cell.strip() for cell in line.strip("|").split(" |")]) == 5
    }
    leaks, others = found["leaks"], found["no leak"]
    steps = [loop["steps"] for loop in loops]
    assert f"{leaks} training loops that leak and {others} that do not" in text
    assert f"of {min(steps)} to {max(steps):,} steps" in text
    assert rows["loops that leak: says so"][0] == f"{found['called']} of {leaks}"
    called = found["called at the end of those"]
    assert rows["loops that do not: says that they leak"][0] == f"{called} of {others}"
    rates = rows["rate within 20 %"]
    assert rates[0] == f"{found['rate']} of {leaks}"
    assert rates[3].startswith(f"{found['slope of a thread within 20 %']} of {leaks}")
    assert rows["names who holds it"][0] == f"{found['holder']} of {leaks}"
    ways = ("made right", "made right by memray", "made right by tracemalloc")
    made = rows["a right line, of the 9 that Python, tensors or arrays make"]
    assert [f"{cell} of 9" for cell in made[:3]] == [found[way] for way in ways]


def test_a_shown_line_that_does_not_come_is_missed() -> None:
    shown = "leak       0: early  16: suspect\n"
    assert missing(shown, "leak  0: early  16: suspect  64: growing\n") is None
    assert missing(shown, "leak  0: early  64: quiet\n") == shown.strip("\n")
