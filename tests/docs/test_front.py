"""README.md: the run and the figures that it shows are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import memtools
from tests.docs.pages import blocks_of, compare, run, typed

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text()
QUICKSTART = (PROJECT / "docs/tutorials/quickstart.md").read_text()


@pytest.mark.slow
def test_the_run_says_what_is_shown(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks_of(README) if block.language == "console")
    train = next(block for block in blocks_of(QUICKSTART) if block.file)
    (tmp_path / train.file).write_text(train.text)
    ((command, text),) = typed(shown.text)
    output = next(run([command], tmp_path))
    compare(text, output)


def test_its_figures_are_those_of_the_page_behind_it() -> None:
    page = (PROJECT / "docs/performance.md").read_text()
    figures = re.findall(r"\b\d+ of \d+", README)
    assert figures == ["13 of 13", "0 of 8"]
    assert all(figure in page for figure in figures)
    assert all(hasattr(memtools, name) for name in ("use", "GradAccumulator"))
