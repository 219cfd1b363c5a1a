"""CONTRIBUTING.md: the files, folders and targets that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "CONTRIBUTING.md").read_text()
#: made by a build, or a placeholder for any room
MADE = ("build/", ".venv", "csrc/core/<", "csrc/py/<", "memtools/<")


def test_the_paths_that_it_names_exist() -> None:
    paths = set(re.findall(r"`([\w./<>-]+/[\w./<>-]*)`", PAGE))
    missing = [
        path for path in paths if not path.startswith(MADE) and not (PROJECT / path).exists()
    ]
    assert len(paths) > 10
    assert missing == []


def test_its_targets_exist() -> None:
    made = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.M))
    lines = re.findall(r"^make ([^#\n]+)", PAGE, re.M)
    named = {word for line in lines for word in re.sub(r'\w+="?.*', "", line).split()}
    named |= set(re.findall(r"`make ([a-z-]+)", PAGE))
    assert len(named) >= 6
    assert named <= made
