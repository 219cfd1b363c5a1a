"""Places: lines of a program, which of a stack is the user's, and how they are named.

frames of a stack, innermost first ──► place_of ──► the innermost line of the user's code
                                          │
                                          ▼
                                       name_of ──► train.py:47 in training_step
"""

from __future__ import annotations

import ast
import contextlib
import os
import tokenize
from collections.abc import Iterable
from typing import NamedTuple

from memtools._base.libraries import LIBRARY, MEMTOOLS, USER, owner_of
from memtools._base.notebook import cell_of, source_of
from memtools._base.text import shown


class Place(NamedTuple):
    """A line of a program. `function` is None where it is not known yet, "" outside of any."""

    file: str
    line: int
    function: str | None = None


class Site(NamedTuple):
    """A place, and the bytes a step that stay of what is made there."""

    place: Place
    rate: float


Living = dict[Place, float]  # bytes by place, of what was made since a window began, and lives


def place_of(frames: Iterable[Place]) -> Place | None:
    """The place to be named of a stack, innermost frame first: the innermost of the user's code;
    where there is none, the innermost of a library, else of anything. None for what memtools has
    allocated for itself."""
    library: Place | None = None
    other: Place | None = None
    for place in frames:
        owner = owner_of(place.file)
        if owner == USER:
            return place
        if owner == MEMTOOLS:
            return library  # it has called the library
        if owner == LIBRARY:
            library = library or place
        other = other or place
    return library or other


def name_of(place: Place) -> str:
    """`train.py:47 in training_step`, by the path from the working directory where the file is
    below it; `In[3]:47 in training_step` in a notebook's cell."""
    file, function = place.file, place.function
    if function is None:
        function = function_at(file, place.line)
    cell = cell_of(file)
    if cell is not None:
        file = cell
    elif not file.startswith("<"):
        with contextlib.suppress(OSError, ValueError):
            inside = os.path.relpath(file)
            file = os.path.normpath(file) if inside.startswith(os.pardir + os.sep) else inside
    # Of Trainer.fit.<locals>.<lambda> it is fit.
    names = [name for name in function.split(".") if name and not name.startswith("<")]
    return shown(f"{file}:{place.line} in {names[-1]}" if names else f"{file}:{place.line}")


def function_at(file: str, line: int) -> str:
    """The name of the innermost function of a file that has this line; "" where there is none, or
    no source. Nothing of the file stays in memory."""
    try:
        text = source_of(file)
        if text is None:
            with tokenize.open(file) as source:
                text = source.read()
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    inner, name = 0, ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_inside = node.lineno <= line <= (node.end_lineno or line)
            if is_inside and node.lineno > inner:
                inner, name = node.lineno, node.name
    return name
