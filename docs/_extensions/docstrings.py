"""Docstrings as they are read in an editor and by help(), made into good pages.

an indented block after a blank line ──► a block of Python code
    the two hyphens after a parameter    ──► a dash
    docs/guides/leaks.md                 ──► a link to that page
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes

#: A page, as docstrings name it.
PAGE = re.compile(r"\bdocs/([\w/]+)\.md\b")


def mark_examples(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """autodoc-process-docstring, before napoleon: a directive before each indented block that
    follows a blank line and a line of text."""
    marked: list[str] = []
    text = True  # the last line that was not blank is not indented
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and text and number > 0 and not lines[number - 1]:
            marked += [".. code-block:: python", ""]
        if line:
            text = not indented
        marked.append(PAGE.sub(r":doc:`/\1`", line))
    lines[:] = marked


def draw_dashes(app: Any, page: nodes.document) -> None:
    """doctree-read: the two hyphens between a parameter and its description become a dash. All
    other hyphens are left alone: they are those of --log."""
    for text in list(page.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \u2013 "))


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", mark_examples, priority=100)
    app.connect("doctree-read", draw_dashes)
    return {"parallel_read_safe": True}
