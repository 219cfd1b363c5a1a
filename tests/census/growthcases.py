"""Calls of memtools._core.GrowthTable, good and bad, for tests/meta/test_leaks.py."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch

from memtools import _core
from tests.kit.refusals import refused

CACHE = type(functools.lru_cache(lambda: None))
TABLE = _core.GrowthTable()
CALLS: list[int] = []


def look(table: _core.GrowthTable, step: Any, **changed: Any) -> Any:
    """A look at the heap with good arguments, but for those that are changed."""
    values: dict[str, Any] = {
        "deque": collections.deque,
        "cache": CACHE,
        "ndarray": None,
        "tensor": torch.Tensor,
        "shim": True,
        "libraries": ("/usr/",),
        "package": "/nowhere/",
        "own": (),
        "users": (),
        "quick": False,
    }
    return table._look(step, *(values | changed).values())


def now_and_then() -> None:
    """A walk takes as long as the heap is large: every hundredth round."""
    CALLS.append(1)
    if len(CALLS) == 100:
        CALLS.clear()
        table = _core.GrowthTable()
        for step in range(2):
            look(table, step, quick=step == 1)


CASES: dict[str, list[Callable[[], object]]] = {
    "GrowthTable": [
        lambda: refused(TypeError, lambda: _core.GrowthTable(1)),  # type: ignore[call-arg]
        _core.GrowthTable,
    ],
    "GrowthTable.__new__": [_core.GrowthTable],
    "GrowthTable._look": [
        now_and_then,
        lambda: refused(TypeError, lambda: look(TABLE, "x")),
        lambda: refused(TypeError, lambda: look(TABLE, 10**9, tensor=1)),
        lambda: refused(TypeError, lambda: look(TABLE, 10**9, own=(1,))),
        lambda: refused(TypeError, lambda: look(TABLE, 10**9, libraries=(1,))),
        lambda: refused(ValueError, lambda: look(TABLE, 0)),
    ],
}
look(TABLE, 1)
