"""What README.md and docs name exists."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

import memtools
import memtools.types

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [PROJECT / "README.md", *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("examples/*.md")]
)


def is_made_by_memtools(value: object) -> bool:
    """Whether it is a type of what memtools returns or raises, which no program makes."""
    made = (tuple, Exception, memtools.types.BudgetReport)
    return isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, made))


def test_the_pages_show_everything_that_a_program_calls():
    text = "".join(page.read_text() for page in PAGES)
    called = {
        name
        for name in set(memtools.__all__) - {"__version__"}
        if not is_made_by_memtools(getattr(memtools, name))
    }
    assert len(called) > 15
    assert {name for name in called if not re.search(rf"\b{name}\b", text)} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_make_targets_exist(page):
    text, makefile = page.read_text(), (PROJECT / "Makefile").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_every_public_name_has_a_docstring():
    for name in memtools.__all__:
        if name != "__version__":
            assert getattr(memtools, name).__doc__, name


def test_no_line_of_the_project_names_this_machine():
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    common = PROJECT.parent in (Path("/"), Path(tempfile.gettempdir()))
    home = f"{PROJECT if common else PROJECT.parent}/"
    for name in filter(None, files):
        path = PROJECT / name
        if path.is_file():
            assert home not in path.read_text(errors="replace"), name
