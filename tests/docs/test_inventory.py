"""The file of Python's names by which types in the reference become links."""

from __future__ import annotations

import importlib.util
import zlib
from pathlib import Path

INVENTORIES = Path(__file__).resolve().parents[2] / "docs" / "_inventories"
HEAD = b"# Sphinx inventory version 2\n# Project: Python\n# Version: 3.11\n# compressed using "
NAMES = """\
ValueError py:exception 1 library/exceptions.html#$ -
a-label std:label -1 library/a.html#$ A label
collections.abc.Mapping py:class 1 library/collections.abc.html#$ -
dict py:class 1 library/stdtypes.html#$ -
dict.clear py:method 1 library/stdtypes.html#$ -
os py:module 0 library/os.html#module-$ -
os.PathLike py:class 1 library/os.html#$ -
sqlite3.Row py:class 1 library/sqlite3.html#$ -
"""


def names_of(inventory: bytes) -> list[str]:
    head, packed = inventory.split(b"zlib.\n", 1)
    assert head.startswith(b"# Sphinx inventory version 2\n")
    return [line.split()[0] for line in zlib.decompress(packed).decode().splitlines()]


def test_only_types_and_functions_of_the_modules_in_use_are_kept() -> None:
    spec = importlib.util.spec_from_file_location("shorten", INVENTORIES / "shorten.py")
    assert spec is not None
    assert spec.loader is not None
    shorten = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shorten)
    short = shorten.shortened(HEAD + b"zlib.\n" + zlib.compress(NAMES.encode()))
    kept = ["ValueError", "collections.abc.Mapping", "dict", "os", "os.PathLike"]
    assert names_of(short) == kept


def test_the_file_is_small_and_has_what_signatures_name() -> None:
    inventory = (INVENTORIES / "python.inv").read_bytes()
    assert len(inventory) < 8192
    wanted = {"int", "str", "ValueError", "collections.abc.Callable", "os.PathLike"}
    assert wanted <= set(names_of(inventory))
