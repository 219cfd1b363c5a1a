"""The pages of docs/symptoms: their programs run, what they show is what comes, and their figures
are those of benchmarks/results/symptoms.json. The FAQ answers what users ask."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.symptoms.symptoms import SECTIONS, with_figures
from tests.docs.test_readme import run_program  # noqa: F401
from tests.kit.ownprocess import ENV

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = sorted(DOCS.glob("symptoms/*.md"))
RESULTS = PROJECT / "benchmarks" / "results" / "symptoms.json"
FENCE = re.compile(r"^(?:<!-- file: (\S+) -->\n)?```(\w*)\n(.*?)^```$", re.S | re.M)
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


def by_page(*kinds: str) -> list[object]:
    """A parameter for each page that has blocks of these kinds."""
    return [
        pytest.param(page, id=page.stem)
        for page in PAGES
        if any(kind in kinds for _, kind, _ in FENCE.findall(page.read_text()))
    ]


def masked(line: str) -> str:
    """The line without its figures, units of time and memory, and the grade of a growth, all of
    which may differ from run to run."""
    line = re.sub(r"\b(suspect|growing|likely)\b", "GRADE", line)
    line = re.sub(r"[-+]?\d[\d,.]*", "0", line)
    line = re.sub(r"\b0 (?:B|KiB|MiB|GiB)(?=\W|$)", "0 B", line)
    line = re.sub(r"\b0 (?:d|h|min) 0 (?:h|min|s)\b|\b0 (?:us|ms|s)\b", "0 s", line)
    return re.sub(r"\s+", " ", line).strip()


def missing(shown: str, came: str) -> str | None:
    """The first shown line that does not come, in the order in which they are shown and right after
    the one before unless `...` is between them; None where all come. A line that is shown may be
    the beginning of the one that comes."""
    lines = [masked(line) for line in came.splitlines()]
    position, anywhere = 0, False
    for line in shown.splitlines():
        if line.strip() == "...":
            anywhere = True
            continue
        found = [
            number
            for number in range(position, len(lines) if anywhere else min(position + 1, len(lines)))
            if lines[number].startswith(masked(line))
        ]
        if not found:
            return line
        position, anywhere = found[0] + 1, False
    return None


# --- what the pages run ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("page", by_page("console"))
def test_the_commands_of_a_page_say_what_it_shows(page, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = ENV | {"PATH": path, "OMP_NUM_THREADS": "1"}
    compared = 0
    for file, kind, text in FENCE.findall(page.read_text()):
        if file:
            (tmp_path / file).write_text(text)
        if kind != "console":
            continue
        for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path, env=env, timeout=600,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            line = missing(shown, done.stdout)
            assert line is None, f"$ {command}\ndid not say\n{line}\nbut\n{done.stdout}"
            compared += 1
    assert compared


@pytest.mark.slow
@pytest.mark.parametrize("page", by_page("python"))
def test_what_a_program_prints_is_what_the_page_shows(
    page: Path,
    run_program: Callable[[str, Path], int],  # noqa: F811
    tmp_path: Path,
) -> None:
    blocks = FENCE.findall(page.read_text())
    for number, (_, kind, text) in enumerate(blocks):
        if kind != "python" or "print(" not in text:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        assert run_program(text, folder) == 0, (folder / "output").read_text()
        following = blocks[number + 1] if number + 1 < len(blocks) else ("", "", "")
        if following[1] == "text" and not following[0]:
            line = missing(following[2], (folder / "output").read_text())
            assert line is None, f"{line}\n\n{(folder / 'output').read_text()}"


def test_a_line_that_does_not_come_is_missed():
    came = "first 12.0 MiB\nsecond\nlikely: list A.b: +1.0 KiB/step\n"
    assert missing("first 9 KiB\nsecond\n", came) is None
    assert missing("...\ngrowing: list A.b: +3.2 MiB/step\n", came) is None
    assert missing("first 9 KiB\nlikely: list A.b\n", came) == "likely: list A.b"
    assert missing("...\nlikely: list A.c\n", came) == "likely: list A.c"
    assert missing("second\nfirst\n", came) == "second"
    assert missing("in 9.1 s, all\n", "in 3 min 20 s, all\n") is None
    assert missing("in 9.1 s, all\n", "in 3 steps, all\n") == "in 9.1 s, all"


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
