"""A context manager around each call: of functions, methods, coroutines and generators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeVar

from memtools._base import stepwise

Make = Callable[[], AbstractContextManager[Any]]
_F = TypeVar("_F", bound=Callable[..., Any])


def spanned(function: _F, make: Make, what: str) -> _F:
    """`function` with a context of `make` around each call: a new one each, as calls may overlap on
    several threads. A generator's lasts from its first value to its end.

    Keeps name, signature and documentation. Raises TypeError for what is no function, with `what`
    in the text.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(spanned(function.__func__, make, what))
    if not callable(function) or isinstance(function, type):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{what} decorates a function or a method, got {name!r}")

    def called(*args: Any, **kwargs: Any) -> Any:
        with make():
            return function(*args, **kwargs)

    stepping = stepwise.wrapper(function, lambda args, kwargs: _Span(make()))
    return functools.wraps(function)(stepping or called)  # type: ignore[return-value]


class _Span:
    """A context to which it is all the same what other tasks do between two steps."""

    __slots__ = ("_context",)

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        self._context = context

    def __enter__(self) -> _Span:
        self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._context.__exit__(kind, error, traceback)

    def enter(self) -> None: ...

    def leave(self) -> None: ...
