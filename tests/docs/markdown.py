"""Markdown as it is read as files: headings, their anchors, and links."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.kit.tables import tables

DOCS = Path(__file__).resolve().parents[2] / "docs"
FENCE = re.compile(r"^(`{3,}).*?^\1 *$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-?\d+)?(?!\w)")
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)")


def without_code(text: str) -> str:
    """The text with neither blocks of code nor code in a line: as many lines as before."""
    text = FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    return re.sub(r"`[^`\n]*`", "", text)


def anchor(heading: str) -> str:
    """The anchor of a heading, as in the address of a page."""
    plain = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return plain.replace(" ", "-")


def headings(text: str) -> list[tuple[int, str, int]]:
    """The level of each heading, its words, and where the text after it begins."""
    blank = FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    found = re.finditer(r"^(#+) +(.*?) *$", blank, re.MULTILINE)
    return [(len(one[1]), one[2], one.end()) for one in found]


def sections(text: str) -> dict[str, str]:
    """The text under each heading and under those below it, by its anchor."""
    found = headings(text)
    ends = {}
    for number, (level, words, begin) in enumerate(found):
        later = (start for deep, _, start in found[number + 1 :] if deep <= level)
        ends[anchor(words)] = text[begin : next(later, len(text))]
    return ends


def dead_links(file: Path, text: str | None = None) -> list[str]:
    """The links of a file that lead to no file, or to no heading of one."""
    found = []
    for path, part in LINK.findall(without_code(file.read_text() if text is None else text)):
        target = (file.parent / path).resolve() if path else file
        if not target.exists():
            found.append(f"{file.name}: {path}")
        elif part and target.suffix == ".md" and part not in sections(target.read_text()):
            found.append(f"{file.name}: {path}#{part}")
    return found


def figures_without_source(
    page: str, source_of: Callable[[str], str], columns: slice = slice(-1)
) -> list[str]:
    """The figures in the tables of a page that stand in none of the texts which the last cell of
    their row names."""
    found = []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        places = sources(cells[-1])
        if not line.startswith("|") or not places:
            continue
        there = {number for place in places for number in NUMBER.findall(source_of(place))}
        text = re.sub(r"`[^`]*`", "", " ".join(cells[columns]))
        found += [f"{n} in: {cells[0]}" for n in NUMBER.findall(text) if n not in there]
    return found


def sources(cell: str) -> list[str]:
    """The benchmarks that a cell names, and the pages that it leads to."""
    return [
        benchmark or page
        for benchmark, page in re.findall(
            r"`(\w+)`|\]\((?:\.\./)?((?:internals|guides)/[^)]*)\)", cell
        )
    ]


def source_of(place: str) -> str:
    """The tables of a benchmark, or a section of the lab book; of a guide all guides, among which
    figures may move."""
    path, _, heading = place.partition("#")
    if path.startswith("guides/"):
        return "\n".join(guide.read_text() for guide in DOCS.glob("guides/*.md"))
    return sections((DOCS / path).read_text())[heading] if "/" in path else tables(path)
