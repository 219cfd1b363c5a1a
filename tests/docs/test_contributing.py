"""CONTRIBUTING.md: the files, folders and targets that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "CONTRIBUTING.md").read_text()
#: what is there only after a build, or stands for any room
MADE = ("build/", ".venv", "csrc/core/<", "csrc/py/<", "memtools/<")


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./<>-]+/[\w./<>-]*)`", PAGE))))
def test_what_it_names_is_there(path: str) -> None:
    assert path.startswith(MADE) or (PROJECT / path).exists()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", PAGE))))
def test_its_links_lead_somewhere(path: str) -> None:
    assert (PROJECT / path).exists()


def test_its_targets_are_there() -> None:
    made = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.M))
    lines = re.findall(r"^make ([^#\n]+)", PAGE, re.M)
    named = {word for line in lines for word in re.sub(r'\w+="?.*', "", line).split()}
    named |= set(re.findall(r"`make ([a-z-]+)", PAGE))
    assert len(named) >= 6
    assert named <= made


@pytest.mark.parametrize(
    "said", ["make test-pages", "make bench RUNS=3", "python -m benchmarks.kit.tables"]
)
def test_it_says_how_pages_and_figures_are_checked(said: str) -> None:
    assert said in PAGE


def test_it_has_ten_pairs_of_words() -> None:
    table = PAGE.split("| instead of | write |")[1]
    pairs = re.findall(r"^\| (?!---)(.+?) \| (.+?) \|$", table, re.M)
    assert len(pairs) >= 10
    assert all(before != after for before, after in pairs)
