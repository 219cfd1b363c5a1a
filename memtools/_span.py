"""A context manager around each call: of functions, methods, coroutines and generators."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

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
    return functools.wraps(function)(_wrapper(function, make))  # type: ignore[return-value]


def _wrapper(function: Callable[..., Any], make: Make) -> Callable[..., Any]:
    if inspect.isasyncgenfunction(function):
        return _async_values(function, make)
    if inspect.iscoroutinefunction(function):

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with make():
                return await function(*args, **kwargs)

        return awaited
    if inspect.isgeneratorfunction(function):

        def generated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with make():
                return (yield from function(*args, **kwargs))

        return generated

    def called(*args: Any, **kwargs: Any) -> Any:
        with make():
            return function(*args, **kwargs)

    return called


def _async_values(
    function: Callable[..., Any], make: Make
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """What `yield from` would be, had asynchronous generators one: values, exceptions and the end
    go both ways."""

    async def values(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with make():
            inner: AsyncGenerator[Any, Any] = function(*args, **kwargs)
            try:
                value = await anext(inner)
                while True:
                    try:
                        sent = yield value
                    except GeneratorExit:
                        await inner.aclose()
                        raise
                    except BaseException as error:
                        value = await inner.athrow(error)
                    else:
                        value = await inner.asend(sent)
            except StopAsyncIteration:
                return

    return values
