"""The page about the architecture: what it names is there, and each way has few stations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs/architecture.md").read_text()
WAYS = {
    title: re.findall(r"^ (\d)  (\S+) +(\S+)  ", text, re.M)
    for title, text in re.findall(r"^## (From .+?)\n(.*?)(?=^## )", PAGE, re.M | re.S)
}


def test_it_has_the_ways_that_a_reader_asks_for() -> None:
    assert {title for title, stations in WAYS.items() if stations} >= {
        "From a gate tensor to the ring",
        "From a token to its page",
        "From a sample to a verdict",
        "From a gradient to its factor",
    }


@pytest.mark.parametrize("title", [title for title, stations in WAYS.items() if stations])
def test_a_way_has_at_most_seven_stations_and_each_is_there(title: str) -> None:
    numbers, paths, names = zip(*WAYS[title], strict=True)
    assert [int(number) for number in numbers] == list(range(1, len(numbers) + 1))
    assert len(numbers) <= 7
    for path, name in zip(paths, names, strict=True):
        text = (PROJECT / path).read_text()
        for word in name.split("."):
            assert re.search(rf"\b{word}\b", text), f"{path} has no {word}"


def test_the_files_that_it_names_exist() -> None:
    named = set(re.findall(r"\b(?:csrc|memtools|tests)/[\w/]+\.\w+", PAGE))
    assert len(named) > 15
    assert sorted(path for path in named if not (PROJECT / path).is_file()) == []
