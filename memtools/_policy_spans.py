"""Parts of a program that a cleanup policy counts: epochs and phases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from memtools._span import spanned

if TYPE_CHECKING:
    from collections.abc import Callable

    from memtools import _core

_F = TypeVar("_F", bound="Callable[..., Any]")


class Span:
    """Counts where the block ends, an epoch also where it begins; cleans up there if that is due.

    A context manager and a decorator. It keeps nothing between begin and end, so one object serves
    blocks inside each other and on several threads. What an exception leaves is not counted, and
    the exception passes.
    """

    __slots__ = ("_begins", "_clock", "_core", "_what")

    def __init__(self, core: _core.Policy, clock: int, begins: bool, what: str) -> None:
        self._core, self._clock, self._begins, self._what = core, clock, begins, what

    def __enter__(self) -> Span:
        if self._begins:
            self._core.tick(self._clock)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._core.tick(self._clock)

    def __call__(self, function: _F) -> _F:
        """`function` as such a part; keeps its name, signature and documentation."""
        return spanned(function, lambda: self, self._what)
