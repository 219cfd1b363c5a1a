"""Parts of a program that a cleanup policy counts: epochs and phases."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

from memtools._base.span import spanned

if TYPE_CHECKING:
    from collections.abc import Callable

    from memtools.cleanup.engine import Engine

_F = TypeVar("_F", bound="Callable[..., Any]")


class Span:
    """Counts where the block ends, an epoch also where it begins; cleans up there if that is due.

    A context manager and a decorator. It keeps nothing between begin and end, so one object serves
    blocks inside each other and on several threads. What an exception leaves is not counted, and
    the exception passes. One that was made and never used is said once for each policy.
    """

    __slots__ = ("_begins", "_clock", "_core", "_engine", "_used", "_what")

    def __init__(self, engine: Engine, clock: int, begins: bool, what: str) -> None:
        self._engine, self._core = engine, engine.core
        self._clock, self._begins, self._what = clock, begins, what
        self._used = False

    def __enter__(self) -> Span:
        self._used = True
        if self._begins:
            self._core.tick(self._clock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._core.tick(self._clock)

    def __call__(self, function: _F) -> _F:
        """`function` as such a part; keeps its name, signature and documentation."""
        self._used = True
        return spanned(function, lambda: self, self._what)

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            call = f"policy.{self._what}"
            self._engine.complain(
                self._what,
                f"{call} was called and not entered, so nothing was counted: write `with {call}:` "
                f"around what it is to count, or @{call} above a function",
            )
