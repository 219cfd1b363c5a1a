"""Pictures for notebooks: each text is escaped, and what is drawn stays small and to scale."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from memtools._base import picture
from memtools._base.picture import Curve, Part, Span
from tests.report.reportcases import HOSTILE


def parsed(html: str) -> ElementTree.Element:
    """Each tag is closed and each attribute quoted, so that a picture is XML as well."""
    return ElementTree.fromstring(html)


def texts(html: str) -> str:
    return " ".join("".join(parsed(html).itertext()).split())


def paths(html: str) -> list[str]:
    return [path.get("d", "") for path in parsed(html).iter("path")]


@pytest.mark.parametrize("text", HOSTILE)
def test_every_function_escapes_the_texts_that_it_takes(text):
    made = picture.card(
        picture.heading(text, text),
        picture.line(text, colour="bad"),
        picture.title(text),
        picture.tiles([(text, text, text)]),
        picture.table([[text, text]], [text, text], right=[1]),
        picture.legend([(text, "s0")]),
        picture.bar([Part(text, 5, "s0")], 10, mark=(text, 7)),
        picture.columns([(text, 1.0)], 1.0),
        picture.graph(
            text,
            [Curve(text, "s0", [(0, 1, 2), (1, 2, 3)])],
            1.0,
            level=(text, 4),
            marks=[(0.5, "bad", text)],
            lanes=[(text, [Span(0, 1)])],
        ),
    )
    tags = {element.tag for element in parsed(made).iter()}
    assert tags == {"div", "span", "svg", "path", "rect", "title", "table", "tbody", "tr", "th",
                    "td"}  # fmt: skip
    names = {name for element in parsed(made).iter() for name in element.keys()}  # noqa: SIM118
    assert not {name for name in names if name.startswith("on") or name in ("id", "href", "src")}
    assert "<script" not in made
    assert "\x1b" not in made
    assert "\u202e" not in made


def test_a_text_that_is_very_long_is_cut():
    made = picture.line("x" * 10_000)
    assert texts(made) == "x" * (picture.CUT - 4) + " ..."


def test_formulas_are_not_looked_for():
    assert 'class="tex2jax_ignore mathjax_ignore"' in picture.card(picture.line("a $x$ b"))


def test_a_bar_is_to_scale_and_named():
    made = picture.bar([Part("live", 25, "s0"), Part("idle", 50, "s1")], 100, mark=("peak", 100))
    rects = [
        (float(r.get("x", "")), float(r.get("width", "")))
        for r in parsed(f"<div>{made}</div>").iter("rect")
    ]
    assert rects == [(0.0, picture.WIDE / 4), (picture.WIDE / 4, picture.WIDE / 2)]
    assert "live 25 B" in made
    assert f"M{picture.WIDE:.1f} 0" in made


def test_a_bar_of_nothing_is_a_bar():
    assert list(parsed(f"<div>{picture.bar([Part('live', 0, 's0')], 0)}</div>").iter("rect")) == []


def test_parts_that_are_more_than_the_whole_fill_the_bar():
    made = picture.bar([Part("a", 300, "s0"), Part("b", 100, "s1")], 100)
    widths = [float(r.get("width", "")) for r in parsed(f"<div>{made}</div>").iter("rect")]
    assert sum(widths) == picture.WIDE


def test_a_curve_runs_from_edge_to_edge_and_its_peak_is_drawn():
    made = picture.graph("memory", [Curve("rss", "s0", [(0, 0, 0), (5, 8, 8), (10, 4, 4)])], 10.0)
    line = next(path for path in paths(f"<div>{made}</div>") if path.count("L") == 2)
    assert line == f"M0 {picture.HIGH}L{picture.WIDE // 2} 0L{picture.WIDE} {picture.HIGH // 2}"
    assert "8 B" in texts(f"<div>{made}</div>")


def test_a_band_is_drawn_where_least_and_most_differ():
    made = picture.graph("memory", [Curve("rss", "s0", [(0, 1, 2), (1, 1, 2)])], 1.0)
    assert sum(path.endswith("z") for path in paths(f"<div>{made}</div>")) == 1


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (0, 0, (0, 2)),
        (100, 300, (0, 384)),
        (260, 280, (260, 284)),
        (300 * 2**20, 320 * 2**20, (300 * 2**20, 324 * 2**20)),
    ],
)
def test_the_axis_begins_at_nothing_unless_all_would_be_flat(least, most, expected):
    low, top = picture._scale(least, most)
    assert (low, top) == expected
    assert low <= least
    assert most <= top


def test_passages_that_are_one_on_the_screen_are_drawn_as_one():
    many = [Span(i / 1000, (i + 0.9) / 1000) for i in range(1000)]
    [path] = picture._passages(many, 1.0)
    assert path.startswith("M0 0h720")
    two = list(picture._passages([Span(0.0, 0.1), Span(0.5, 0.6)], 1.0))
    assert len(two) == 2


def test_a_lane_is_short_whatever_it_holds():
    many = [Span(i / 100_000, (i + 0.1) / 100_000) for i in range(0, 100_000, 3)]
    assert sum(map(len, picture._passages(many, 1.0))) < 8_000


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted(set(picture.COLOURS.values())))
def test_colours_are_seen_on_white_and_on_the_black_of_dark_notebooks(colour):
    assert re.fullmatch("#[0-9a-f]{6}", colour)
    own, dark = luminance(colour), luminance("#111111")
    assert 1.05 / (own + 0.05) >= 3
    assert (own + 0.05) / (dark + 0.05) >= 3
