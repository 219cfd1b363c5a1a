"""The site of the docs builds without a warning, its links lead somewhere, and its reference has
every public name."""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memtools

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
REFERENCE = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))

#: Public modules beside memtools itself.
MODULES = (
    "memtools.distributed",
    "memtools.errors",
    "memtools.export",
    "memtools.integrations.accelerate",
    "memtools.integrations.lightning",
    "memtools.integrations.nanochat",
    "memtools.integrations.transformers",
    "memtools.report",
    "memtools.testing",
)


def offered(module: str) -> set[str]:
    """The names that a public module offers: its __all__, or what it defines without an underscore.
    Read from its source, because the libraries of the integrations take seconds to import."""
    path = PROJECT / module.replace(".", "/")
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            found.add(node.name)
    return found


def documented() -> list[str]:
    return re.findall(r"^\.\. auto(?:class|function|data):: (\S+)$", REFERENCE, re.MULTILINE)


def test_the_reference_has_every_public_name_once() -> None:
    names = documented()
    assert len(names) == len(set(names))
    errors = offered("memtools.errors")
    wanted = {f"memtools.{name}" for name in memtools.__all__}
    wanted |= {f"{m}.{name}" for m in MODULES for name in offered(m) if name not in errors}
    assert sorted(wanted ^ set(names)) == []
