"""Pictures for notebooks: each text is escaped, and what is drawn stays small and to scale."""

from __future__ import annotations

import re
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from memtools._record import drawing
from memtools._record.drawing import Curve, Span
from tests.report.reportcases import HOSTILE

SVG = "{http://www.w3.org/2000/svg}"


def parsed(html: str) -> ElementTree.Element:
    """Each tag is closed and each attribute quoted, so that a picture is XML as well."""
    return ElementTree.fromstring(html)


def texts(html: str) -> str:
    return " ".join("".join(parsed(html).itertext()).split())


def paths(html: str) -> list[str]:
    """Of the drawings in images."""
    urls = [image.get("src", "") for image in parsed(f"<div>{html}</div>").iter("img")]
    drawings = [ElementTree.fromstring(unquote(url.partition(",")[2])) for url in urls]
    return [path.get("d", "") for drawing in drawings for path in drawing.iter(f"{SVG}path")]


@pytest.mark.parametrize("text", HOSTILE)
def test_every_function_escapes_the_texts_that_it_takes(text):
    made = drawing.card(
        drawing.heading(text, text, "bad"),
        drawing.line(text, colour="bad"),
        drawing.title(text),
        drawing.tiles([(text, text, text)]),
        drawing.table([[text, text]], [text, text], right=[1]),
        drawing.legend([(text, "s0")]),
        drawing.graph(
            text,
            [Curve(text, "s0", [(0, 1, 2), (1, 2, 3)])],
            1.0,
            level=(text, 4),
            marks=[(0.5, "bad", text)],
            lanes=[(text, [Span(0, 1)])],
        ),
    )
    tags = {element.tag for element in parsed(made).iter()}
    assert tags == {"div", "span", "img", "table", "tbody", "tr", "th", "td"}
    names = {name for element in parsed(made).iter() for name in element.keys()}  # noqa: SIM118
    assert not {name for name in names if name.startswith("on") or name in ("id", "href")}
    assert "<script" not in made
    assert "\x1b" not in made
    assert "\u202e" not in made


def test_a_text_that_is_very_long_is_cut():
    made = drawing.line("x" * 10_000)
    assert texts(made) == "x" * (drawing.CUT - 4) + " ..."


def test_formulas_are_not_looked_for():
    assert 'class="tex2jax_ignore mathjax_ignore"' in drawing.card(drawing.line("a $x$ b"))


def test_a_drawing_holds_no_text_that_somebody_gave():
    made = drawing.graph("<b>", [Curve("<i>", "s0", [(0, 1, 2)])], 1.0, level=("<u>", 5))
    [image] = parsed(f"<div>{made}</div>").iter("img")
    found = ElementTree.fromstring(unquote(image.get("src", "").partition(",")[2]))
    assert {element.tag for element in found.iter()} == {f"{SVG}svg", f"{SVG}path"}
    assert "".join(found.itertext()) == ""
    assert re.fullmatch(r"data:image/svg\+xml,[\w%=:/;,.()' -]+", image.get("src", ""))


def test_a_curve_runs_from_edge_to_edge_and_its_peak_is_drawn():
    made = drawing.graph("memory", [Curve("rss", "s0", [(0, 0, 0), (5, 8, 8), (10, 4, 4)])], 10.0)
    line = next(path for path in paths(made) if path.count("L") == 2)
    assert line == f"M0 {drawing.HIGH}L{drawing.WIDE // 2} 0L{drawing.WIDE} {drawing.HIGH // 2}"
    assert "8 B" in texts(f"<div>{made}</div>")


def test_a_band_is_drawn_where_least_and_most_differ():
    made = drawing.graph("memory", [Curve("rss", "s0", [(0, 1, 2), (1, 1, 2)])], 1.0)
    assert sum(path.endswith("z") for path in paths(made)) == 1


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (0, 0, (0, 2)),
        (100, 300, (0, 384)),
        (260, 280, (240, 288)),
        (100 * 2**20, 100 * 2**20, (86 * 2**20, 102 * 2**20)),
        (160 * 2**20, 320 * 2**20, (160 * 2**20, 352 * 2**20)),
    ],
)
def test_the_axis_begins_at_nothing_unless_all_would_be_flat(least, most, expected):
    low, top = drawing._scale(least, most)
    assert (low, top) == expected
    assert low <= least
    assert most <= top


def test_passages_that_are_one_on_the_screen_are_drawn_as_one():
    many = [Span(i / 1000, (i + 0.9) / 1000) for i in range(1000)]
    [path] = drawing._passages(many, 1.0)
    assert path.startswith("M0 0h720")
    two = list(drawing._passages([Span(0.0, 0.1), Span(0.5, 0.6)], 1.0))
    assert len(two) == 2


def test_a_lane_is_short_whatever_it_holds():
    many = [Span(i / 100_000, (i + 0.1) / 100_000) for i in range(0, 100_000, 3)]
    assert sum(map(len, drawing._passages(many, 1.0))) < 8_000


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted(set(drawing.COLOURS.values())))
def test_colours_are_seen_on_white_and_on_the_black_of_dark_notebooks(colour):
    assert re.fullmatch("#[0-9a-f]{6}", colour)
    own, dark = luminance(colour), luminance("#111111")
    assert 1.05 / (own + 0.05) >= 3
    assert (own + 0.05) / (dark + 0.05) >= 3
