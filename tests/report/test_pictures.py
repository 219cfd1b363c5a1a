"""What a notebook shows of a record and of a page: HTML without a script, small and harmless."""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

import memtools
from memtools import _core
from memtools._base.text import sentence
from memtools._record import picture
from memtools._record.figures import figures_of
from memtools._record.kinds import Start
from memtools._record.overview import growth, headline, tiles
from memtools.report import render
from tests.kit.growth import least_growth, python_blocks
from tests.report.reportcases import HOSTILE, LEAK, MIB, START, Page, recorded, write

NASTY = "<script>alert(1)</script>&\"'<b>$x$\x1b[2J\u202e"
MOST_BYTES = 30 * 1024


def parsed(html: str) -> ElementTree.Element:
    """Each tag is closed and each attribute quoted, so that a picture is XML as well."""
    return ElementTree.fromstring(f"<div>{html}</div>")


def text_of(html: str) -> str:
    return " ".join("".join(parsed(html).itertext()).split())


def paths(html: str) -> list[str]:
    """Of the drawings in images, which hold nothing else."""
    found = []
    for image in parsed(html).iter("img"):
        url = image.get("src", "")
        assert re.fullmatch(r"data:image/svg\+xml,[\w%=:/;,.()' -]+", url)
        drawing = ElementTree.fromstring(unquote(url.partition(",")[2]))
        assert {part.tag.partition("}")[2] for part in drawing.iter()} == {"svg", "path"}
        assert "".join(drawing.itertext()) == ""
        found += [path.get("d", "") for path in drawing.iter() if path.get("d")]
    return found


def record_of(path: Path, **more: Any) -> memtools.Record:
    return memtools.read_record(write(str(path), **more))


# --- what draws itself ----------------------------------------------------------------------------


def a_record(folder: Path) -> object:
    return record_of(
        folder / f"{NASTY.replace('/', '')}.mem",
        events=[("mark", text) for text in HOSTILE],
        command=("python", NASTY),
    )


def a_killed_record(folder: Path) -> object:
    return record_of(folder / "run.mem", close=False, grows=200_000, device=True)


def a_record_without_samples(folder: Path) -> object:
    path = folder / "run.mem"
    _core.RecordWriter(str(path), [("step", ""), ("rss", "B")]).close()
    return memtools.read_record(path)


def a_page(folder: Path) -> object:
    records = [record_of(folder / f"{i}.mem", steps=300) for i in range(6)]
    return render(records, title=NASTY)


MAKERS = [a_record, a_killed_record, a_record_without_samples, a_page]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_an_object_draws_itself_without_script_and_no_text_gets_out_of_its_place(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    made = make(tmp_path)
    html = made._repr_html_()
    elements = list(parsed(html).iter())
    tags = {element.tag for element in elements}
    assert tags <= {"div", "span", "b", "code", "img", "table", "tbody", "tr", "th", "td"}
    attributes = {name for element in elements for name in element.keys()}  # noqa: SIM118
    assert not {name for name in attributes if name.startswith("on")}
    assert attributes.isdisjoint({"id", "href", "name"})
    sources = [element.get("src", "data:image/svg+xml,") for element in elements]
    assert all(source.startswith("data:image/svg+xml,") for source in sources)
    assert all("url(" not in element.get("style", "") for element in elements)
    assert html.replace("\u00a0", " ").isprintable()
    assert 'class="tex2jax_ignore mathjax_ignore"' in html
    paths(html)
    pictures = len(made.records) if isinstance(made, str) else 1
    assert len(html.encode()) <= MOST_BYTES * min(pictures, 4)


@pytest.mark.slow
def test_a_class_that_draws_itself_is_among_these(tmp_path: Path) -> None:
    drawn = {type(make(tmp_path)) for make in MAKERS}
    modules = [sys.modules[name] for name in sorted(sys.modules) if name.startswith("memtools")]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    assert {kind for kind in kinds if hasattr(kind, "_repr_html_")} == drawn


@pytest.mark.slow
def test_drawing_leaks_nothing(tmp_path: Path) -> None:
    made = record_of(tmp_path / "run.mem", close=False, device=True, steps=300)

    def draw(rounds: int) -> None:
        for _ in range(rounds):
            made._repr_html_()

    draw(2)  # what is loaded once
    assert least_growth(draw, 24, python_blocks) < 24


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted(set(picture.COLOURS.values())))
def test_colours_are_seen_on_white_and_on_the_black_of_dark_notebooks(colour: str) -> None:
    own, dark = luminance(colour), luminance("#111111")
    assert 1.05 / (own + 0.05) >= 3
    assert (own + 0.05) / (dark + 0.05) >= 3


# --- records --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_says_what_the_page_says_of_it(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run.mem", grows=200_000)
    figures, text = figures_of(record), text_of(record._repr_html_())
    page = Page(render(record)).text()
    said = [headline(figures), *map(sentence, figures.verdict.notes())]
    said += [part for tile in tiles(figures) for part in (tile.name, tile.value, tile.remark)]
    for one in growth(figures):
        said += [one.grade, one.subject, one.rate, one.left, one.remark]
    assert growth(figures)
    for words in said:
        words = " ".join(words.split())
        assert words in text.replace("\u00a0", " "), words
        assert words.partition(": ")[2][:60] in page.replace("\u00a0", " "), words


def test_a_finding_has_its_grade_holder_rate_forecast_line_and_fix_in_this_order(
    tmp_path: Path,
) -> None:
    """In a notebook as on the page, the worst first; the forecast of all on the first alone."""
    one = replace(LEAK, steps_left=(300.0, 420.0), joint_bytes=65536.0, what="1 new tensor a step")
    one = replace(one, kept_at="train.py:17 in step", advice="clear it")
    other = replace(one, grade="suspect", holder="dict Net.cache", rate_bytes=1024.0, kept_at="")
    record = record_of(tmp_path / "run.mem", grows=65536, events=[Start(), other, one])
    first = (
        "leak list MoEBlock.gate_history +64.0 KiB/step limit in 6,300 to 11,000 steps kept at "
        "train.py:17 in step fix: clear it 1 new tensor a step; first reported at step 300 "
        "suspect dict Net.cache +1.0 KiB/step fix: clear it"
    )
    for text in (text_of(record._repr_html_()), Page(render(record)).text()):
        assert "".join(first.split()) in "".join(text.split())


@pytest.mark.slow
def test_the_lines_of_a_record_are_those_that_the_page_begins_with(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run.mem", device=True, grows=200_000)
    text = text_of(record._repr_html_())
    for name in ("Resident", "Heap in use", "Control group", "Allocated", "Reserved", "train"):
        assert name in text
    assert "Available on the machine" not in text  # which the page does not show at first
    assert "Limit (cgroup) 1.00 GiB" in text


@pytest.mark.slow
def test_the_peak_of_a_single_sample_is_drawn(tmp_path: Path) -> None:
    columns, path = [("step", ""), ("rss", "B")], str(tmp_path / "run.mem")
    with _core.RecordWriter(path, columns) as writer:
        for step in range(3000):
            writer.append(None, [step, 900 * MIB if step == 1234 else 100 * MIB])
    html = memtools.read_record(path)._repr_html_()
    line = max(paths(html), key=lambda path: path.count("L") if path[-1] != "z" else 0)
    heights = [int(point.split()[1]) for point in line[1:].split("L")]
    assert min(heights) < 25 < 150 < max(heights)
    assert "1.00 GiB" in text_of(html)  # the axis


@pytest.mark.slow
def test_what_was_not_read_is_not_drawn(tmp_path: Path) -> None:
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("step", ""), ("rss", "B"), ("swap", "B")]) as writer:
        for step in range(300):
            writer.append(None, [step, 100 * MIB if step % 2 else None, None])
    html = memtools.read_record(path)._repr_html_()
    assert "Resident" in text_of(html)
    assert "Swap" not in text_of(html)
    assert "102.0 MiB94.0 MiB86.0 MiB" in text_of(html)  # the axis


@pytest.mark.slow
def test_what_is_marked_says_so_under_the_pointer(tmp_path: Path) -> None:
    record = record_of(tmp_path / "run.mem", events=[("mark", "epoch 2 begins")])
    titles = [element.get("title") for element in parsed(record._repr_html_()).iter("div")]
    assert "epoch 2 begins" in titles


def test_passages_of_a_phase_are_drawn_where_they_were(tmp_path: Path) -> None:
    """Those that are one on the screen are drawn as one."""
    path = str(tmp_path / "run.mem")
    with _core.RecordWriter(path, [("step", ""), ("rss", "B")]) as writer:
        start = memtools.read_record(path).clock_ns
        for second in range(241):
            writer.append(start + second * 10**9, [second, MIB])
        for second in (*range(60), 120):
            begun = start + second * 10**9
            writer.event("phase", "train", time_ns=begun, duration_ns=9 * 10**8)
    lane = next(one for one in paths(memtools.read_record(path)._repr_html_()) if "v10H" in one)
    found = [(int(x), int(wide)) for x, wide in re.findall(r"M(\d+) 0h(\d+)v10H", lane)]
    assert found == [(0, 180), (360, 3)]  # of 720 for the 240 seconds


@pytest.mark.slow
def test_the_largest_picture_is_small(tmp_path: Path) -> None:
    """All lines, noise in each of them, phases without end, and findings of long names."""
    path, noise = str(tmp_path / "run.mem"), random.Random(1)
    devices = [
        (f"cuda{i}_{tier}", "B")
        for i in range(8)
        for tier in ("allocated", "reserved", "free", "total")
    ]
    hosts = ["rss", "process", "private", "children_private", "shm", "cgroup_used", "swap", "own"]
    columns = [("step", ""), *((name, "B") for name in hosts), *devices]
    with _core.RecordWriter(path, columns) as writer:
        for step in range(4000):
            sizes = [noise.randrange(10**9) for _ in columns[1:]]
            writer.append(START + step * 10**7, [step, *sizes])
        for i in range(200):
            writer.phase(f"{i} {NASTY * 5}", 10**9, MIB)
            writer.event("mark", f"{i} {NASTY * 20}"[:400], step=i, time_ns=START + i * 10**8)
            writer.event("phase", f"{i % 6} {NASTY}", time_ns=START + i * 10**8, duration_ns=10**7)
        writer.event(*recorded(3, MIB, NASTY), step=3)
    html = memtools.read_record(path)._repr_html_()
    assert 20_000 < len(html.encode()) <= 48 * 1024


def test_a_page_is_a_text_that_shows_itself_briefly(tmp_path: Path) -> None:
    page = render(record_of(tmp_path / "run.mem", steps=300))
    assert page.startswith("<!doctype html>")
    assert repr(page).startswith(f"<page of {tmp_path}/run.mem, ")
    assert len(repr(page)) < 300
    assert type(str(page)) is str
    copied = pickle.loads(pickle.dumps(page))
    assert (type(copied), copied) == (str, str(page))
