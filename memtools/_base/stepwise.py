"""Decorating what does not run from a call to its return: coroutines and generators of both kinds.

    call ──► first step ──► suspended ──► step ──► ... ──► return or exception
             └ scope.enter() ... leave() ┘└ enter() ... leave() ┘           └ scope.__exit__

A scope is inside its thread only while a step runs there: what other tasks do meanwhile is not
inside it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from memtools._base import torch as bridge

_T = TypeVar("_T")
_OF_COMPILED = ("get_compiler_config", "_is_torch_compile")  # beside what is called _torchdynamo...


class Scope(AbstractContextManager[Any], Protocol):
    """One call: left when it ends, and inside a thread between enter() and leave()."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


Opener = Callable[[tuple[Any, ...], dict[str, Any]], Scope]


def wrapper(function: Callable[..., Any], scope: Opener) -> Callable[..., Any] | None:
    """A function of the same kind, each call of it in a scope; None for one that just returns."""
    if _is(inspect.isasyncgenfunction, function):
        return _async_values(function, scope)
    if _is(inspect.iscoroutinefunction, function):

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with scope(args, kwargs) as call:
                return await _Steps(call, function(*args, **kwargs))

        return awaited
    if _is(inspect.isgeneratorfunction, function):

        def generated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with scope(args, kwargs) as call:
                return (yield from _driven(call, function(*args, **kwargs)))

        return generated
    return None


def _is(kind: Callable[[Any], bool], function: Callable[..., Any]) -> bool:
    """Of an object that can be called, its __call__ says it."""
    return kind(function) or kind(getattr(type(function), "__call__", None))  # noqa: B004


def _driven(call: Scope, inner: Any) -> Generator[Any, Any, Any]:
    """`yield from inner`, with each step inside the scope."""
    step, value = inner.send, None
    while True:
        call.enter()
        try:
            item = step(value)
        except StopIteration as stop:
            return stop.value
        finally:
            value = None  # an exception that was thrown in would hold this frame, and this frame it
            call.leave()
        try:
            value = yield item
        except GeneratorExit:
            _close(call, inner)
            raise
        except BaseException as error:
            step, value = inner.throw, error
        else:
            step = inner.send


def _close(call: Scope, inner: Any) -> None:
    call.enter()
    try:
        inner.close()
    finally:
        call.leave()


class _Steps:
    """What `await` takes: the steps of a coroutine, or those to one value of an async generator."""

    __slots__ = ("_call", "_inner")

    def __init__(self, call: Scope, inner: Any) -> None:
        self._call, self._inner = call, inner

    def __await__(self) -> Generator[Any, Any, Any]:
        return _driven(self._call, self._inner)


def _async_values(
    function: Callable[..., Any], scope: Opener
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def values(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with scope(args, kwargs) as call:
            inner: AsyncGenerator[Any, Any] = function(*args, **kwargs)
            try:
                value = await _Steps(call, inner.__anext__())
                while True:
                    try:
                        sent = yield value
                    except GeneratorExit:
                        await _Steps(call, inner.aclose())
                        raise
                    except BaseException as error:
                        value = await _Steps(call, inner.athrow(error))
                    else:
                        value = await _Steps(call, inner.asend(sent))
            except StopAsyncIteration:
                return

    return values


# --- what both decorators have in common ----------------------------------------------------------


def left(entered: list[tuple[int, _T]]) -> _T:
    """Takes this thread's latest block off the list, or another's that is ended here."""
    own = threading.get_ident()
    last = max((i for i, block in enumerate(entered) if block[0] == own), default=-1)
    return entered.pop(last)[1]


def decorated(function: _T, who: str, wrap: Callable[[Callable[..., Any]], Any]) -> _T:
    """`wrap(function)`, inside of a classmethod or staticmethod too; TypeError for what is none."""
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorated(function.__func__, who, wrap))
    if isinstance(function, (property, functools.cached_property)):
        raise TypeError(f"{who} decorates functions; put it below the @{type(function).__name__}")
    if isinstance(function, type):
        raise TypeError(f"{who} decorates functions and methods, got class {function.__name__}")
    torch = bridge.loaded()
    if torch is not None and isinstance(function, torch.nn.Module):
        raise TypeError(
            f"{who} decorates functions, got the module {type(function).__name__}; decorate the "
            "function that calls it, or its forward()"
        )
    if not callable(function):
        raise TypeError(f"{who} decorates functions and methods, got {_kind(function)}")
    return wrap(function)  # type: ignore[no-any-return]


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def named_after(wrapped: Any, function: Callable[..., Any]) -> Any:
    """functools.update_wrapper, also for what has no name of its own; without the marks by which
    torch.compile finds the function under a compiled one, since it would find past the wrapper."""
    functools.update_wrapper(wrapped, function)
    marks: Mapping[str, Any] = vars(wrapped)
    for mark in [name for name in marks if name.startswith("_torchdynamo") or name in _OF_COMPILED]:
        delattr(wrapped, mark)
    for name in ("__name__", "__qualname__"):
        if not hasattr(function, name):  # a partial, an object with __call__
            under = getattr(function, "func", type(function))
            setattr(wrapped, name, getattr(under, name, type(function).__name__))
    return wrapped
