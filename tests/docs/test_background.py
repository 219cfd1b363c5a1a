"""The pages of docs/background are in the menu, and their figures were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.docs.markdown import figures_without_source

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
ORDER = ("memory", "leak_or_warm_up", "holder", "limits", "other_tools")
PAGES = [DOCS / "background" / f"{name}.md" for name in ORDER]


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
