"""Examples in docstrings.

A docstring is read in an editor and by help() as well, so that an example in it is an indented
block after a blank line and nothing more. Here it becomes a block of Python code.
"""

from __future__ import annotations

from typing import Any


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
        marked.append(line)
    lines[:] = marked


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", mark_examples, priority=100)
    return {"parallel_read_safe": True}
