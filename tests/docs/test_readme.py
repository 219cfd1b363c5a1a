"""The Python in README.md and docs is executed; what the docs name exists."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memtools
import memtools.types
from tests.docs.test_guides import GUIDES, shown_below_programs
from tests.docs.test_guides import PAGES as COMPARED
from tests.kit.ownprocess import ENV

PROJECT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [PROJECT / "README.md", *PROJECT.glob("docs/**/*.md"), *PROJECT.glob("examples/*.md")]
)


def programs_of(page: Path) -> Iterator[tuple[int, str]]:
    """The number and the text of each program of a page that no other module here runs: those that
    are typed into a file are run from there, and those whose output is shown are compared."""
    text = page.read_text()
    compared = set()
    if page.parent == GUIDES and page.stem in COMPARED:
        compared = {program for program, _ in shown_below_programs(text)}
    for n, program in enumerate(re.findall(r"(?<!-->\n)^```python\n(.*?)^```", text, re.S | re.M)):
        printed = page.parent.name in ("symptoms", "background") and "print(" in program
        if program not in compared and not printed:
            yield n, program


BLOCKS = [
    pytest.param(program, id=f"{page.name}-{n}")
    for page in PAGES
    for n, program in programs_of(page)
]


@pytest.fixture(scope="module")
def run_program() -> Iterator[Callable[[str, Path], int]]:
    """run_program(text, folder): what a process of its own ends with."""
    command = [sys.executable, "-W", "error", "-m", "tests.docs.blocks"]
    with subprocess.Popen(
        command, cwd=PROJECT, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def run(text: str, folder: Path) -> int:
            print(json.dumps([text, str(folder)]), file=requests, flush=True)
            return int(answers.readline())

        yield run
        requests.close()


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_in_the_docs_runs(block, run_program, tmp_path):
    assert run_program(block, tmp_path) == 0, (tmp_path / "output").read_text()


@pytest.mark.slow
def test_a_program_that_fails_or_warns_is_told(run_program, tmp_path):
    assert run_program("import warnings; warnings.warn('so')", tmp_path) == 1
    assert "UserWarning: so" in (tmp_path / "output").read_text()
    assert run_program("raise SystemExit(3)", tmp_path) == 3
    assert run_program("import sys; assert 'memtools' not in sys.modules", tmp_path) == 0


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
