"""What a spawned process does with a PackedList: a module that imports neither torch nor NumPy."""

from __future__ import annotations

from typing import Any

from memtools.data import PackedList


def add_up(records: PackedList, results: Any) -> None:
    results.put((len(records), sum(record["n"] for record in records), records[-1]["text"]))


def read_all(parts: tuple[PackedList, ...], results: Any) -> None:
    results.put([list(part) for part in parts])
