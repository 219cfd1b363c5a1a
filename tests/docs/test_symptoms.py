"""The pages of docs/symptoms have their parts, and the figures of benchmarks/results/symptoms.json.
The FAQ answers what users ask."""

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
#: the titles, as users say it
TITLES = {
    "Killed, exit code 137",
    "CUDA out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "It grows every epoch",
    "It grows in C and no tensor does",
    "DataLoader: Bus error",
    "nvidia-smi shows more than my tensors",
    "Reserved but not allocated: fragmentation",
    "Memory does not come back after `del`",
    "It gets slower and slower (gc)",
}


# --- what the pages say ---------------------------------------------------------------------------


def test_each_symptom_has_its_page_and_each_page_its_parts():
    titles = set()
    for page in PAGES:
        lines = page.read_text().splitlines()
        titles.add(lines[0].removeprefix("# "))
        heads = [line for line in lines if line.startswith("## ")]
        assert any(head == "## Which cause is yours?" for head in heads), page
        assert any(head.startswith("## Remedies") for head in heads), page
        assert heads[-1] == "## What memtools does", page
        assert len(lines) <= 105, (page, len(lines))
    assert titles == TITLES


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


def test_the_picture_is_what_its_script_draws():
    path = DOCS / "symptoms" / "allocated_and_reserved.py"
    spec = importlib.util.spec_from_file_location("allocated_and_reserved", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert path.with_suffix(".svg").read_text() == module.drawing()


# --- the FAQ --------------------------------------------------------------------------------------


def test_the_faq_answers_what_users_ask():
    text = (DOCS / "faq.md").read_text()
    for asked in (
        "slow", "FSDP", "DeepSpeed", "Jupyter", "Slurm", "Docker", "WSL", "Windows", "macOS",
        "torch.compile", "Lightning", "profiler", "leaves my machine",
    ):  # fmt: skip
        assert re.search(rf"^## .*{re.escape(asked)}", text, re.M), asked
