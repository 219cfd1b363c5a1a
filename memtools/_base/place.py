"""A line of a program, and how it is named: `train.py:47 in training_step`."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import tokenize
from typing import NamedTuple

from memtools._base.libraries import name_in_library
from memtools._base.notebook import cell_of, file_of, source_of
from memtools._base.text import shown

#: At the end of a name. The path of a file may have " in " as well.
_FUNCTION = re.compile(r"(:\d+) in \w*$")


class Place(NamedTuple):
    """A line of a program. `function` is None where it is not known yet, "" outside of any."""

    file: str
    line: int
    function: str | None = None


def name_of(place: Place) -> str:
    """`train.py:47 in training_step`, by the path from the working directory where that is the
    shorter one; `In[3]:47 in training_step` in a notebook's cell."""
    file, function = place.file, place.function
    if function is None:
        function = function_at(file, place.line)
    cell = cell_of(file)
    if cell is not None:
        file = cell
    elif name := name_in_library(file):
        file = name
    elif not file.startswith("<"):
        with contextlib.suppress(OSError, ValueError):
            file = min(os.path.relpath(file), os.path.normpath(file), key=len)
    # Of Trainer.fit.<locals>.<lambda> it is fit.
    names = [name for name in function.split(".") if name and not name.startswith("<")]
    return shown(f"{file}:{place.line} in {names[-1]}" if names else f"{file}:{place.line}")


def line_of(name: str) -> str:
    """What name_of() has returned, without the function: `train.py:47`. Other names stay as they
    are."""
    return _FUNCTION.sub(r"\1", name)


def source_at(name: str) -> str:
    """The source text of the line that name_of() has named, without indentation; "" where there is
    no source, as for lines of a library, which are named without their folder."""
    file, _, line = line_of(name.partition(" and ")[0]).rpartition(":")
    if not line.isdecimal():
        return ""
    lines = text_of(file_of(file) or file).splitlines()
    return lines[int(line) - 1].strip() if 0 < int(line) <= len(lines) else ""


def text_of(file: str) -> str:
    """The source of a file or of a notebook's cell; "" where there is none."""
    text = source_of(file)
    if text is None:
        with contextlib.suppress(OSError, SyntaxError, ValueError), tokenize.open(file) as source:
            return source.read()
    return text or ""


def function_at(file: str, line: int) -> str:
    """The name of the innermost function of a file that has this line; "" where there is none, or
    no source. Nothing of the file stays in memory."""
    try:
        tree = ast.parse(text_of(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    inner, name = 0, ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            is_inside = node.lineno <= line <= (node.end_lineno or line)
            if is_inside and node.lineno > inner:
                inner, name = node.lineno, node.name
    return name
