"""The pages of docs/symptoms have the figures of benchmarks/results/symptoms.json."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks.symptoms.symptoms import SECTIONS, with_figures

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.glob("symptoms/*.md"))
RESULTS = PROJECT / "benchmarks" / "results" / "symptoms.json"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_figures_of_a_page_are_those_that_were_measured(page):
    text = page.read_text()
    assert with_figures(text, json.loads(RESULTS.read_text())["sections"]) == text


def test_every_measured_way_is_shown_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(SECTIONS)
    for section in SECTIONS.values():
        for way in section.ways:
            assert f"\n| {way.label} |" in text, way


def test_a_figure_that_was_not_measured_is_refused():
    page = "<!-- figures: kept -->\n| a | b |\n| --- | --- |\n| made up | 12 |\n"
    sections = json.loads(RESULTS.read_text())["sections"]
    with pytest.raises(ValueError, match="nothing was measured for 'made up' of kept"):
        with_figures(page, sections)
    with pytest.raises(ValueError, match="nothing was measured for a table of other"):
        with_figures(page.replace("kept", "other"), sections)


def test_the_messages_of_torch_are_in_torch():
    library = Path(importlib.util.find_spec("torch").origin).parent / "lib"
    bus, host = (
        (DOCS / "symptoms" / name).read_text() for name in ("bus_error.md", "cpu_allocator.md")
    )
    for page, name, message in (
        (bus, "libtorch_python.so", "ERROR: Unexpected bus error encountered in worker."),
        (bus, "libtorch_python.so", "It is possible that dataloader's workers are out of"),
        (host, "libc10.so", "DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ):
        assert message in page
        assert message.encode() in (library / name).read_bytes()
