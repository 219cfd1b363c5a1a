"""How memtools wraps a function of the program, of any kind, and finds out how it can be called.

    decorated(function, ...) ──► a wrapper of the same kind, name and signature
    call of the wrapper      ──► with scope: call of the function

A function that just returns is inside its scope from the call to the return. A coroutine or a
generator is suspended in between, and other tasks of its thread run meanwhile; enter() and leave()
of a scope that has them are called around each step, so that it knows what is inside:

    call ──► first step ──► suspended ──► step ──► ... ──► return or exception
             └ scope.enter() ... leave() ┘└ enter() ... leave() ┘           └ scope.__exit__

Imports nothing of memtools: the native module takes `__call__` and `__get__` from here into the
type Managed when it is loaded.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

_T = TypeVar("_T")
# Attributes of a compiled function, besides those whose names begin with _torchdynamo.
_OF_COMPILED = ("get_compiler_config", "_is_torch_compile")

#: Makes the scope of a call from its arguments. A scope is a context manager that is entered when
#: the call begins; it may have enter() and leave(), which are called around each step.
Opener = Callable[[tuple[Any, ...], dict[str, Any]], AbstractContextManager[Any]]


# --- wrapping -------------------------------------------------------------------------------------


def decorated(function: _T, who: str, wrap: Callable[[Callable[..., Any]], Any]) -> _T:
    """`wrap(function)`; a classmethod or a staticmethod stays one.

    Args:
        function: what the program decorates.
        who: the decorator's name, for errors.
        wrap: makes the wrapper of a plain function.

    Raises TypeError if `function` is not a function or a method.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorated(function.__func__, who, wrap))
    if isinstance(function, (property, functools.cached_property)):
        raise TypeError(f"{who} decorates functions; put it below the @{type(function).__name__}")
    if isinstance(function, type):
        raise TypeError(f"{who} decorates functions and methods, got class {function.__name__}")
    torch = sys.modules.get("torch")
    if isinstance(function, getattr(getattr(torch, "nn", None), "Module", ())):
        raise TypeError(
            f"{who} decorates functions, got the module {type(function).__name__}; decorate the "
            "function that calls it, or its forward()"
        )
    if not callable(function):
        name = type(function).__name__
        article = "an" if name[0] in "aeiouAEIOU" else "a"
        raise TypeError(f"{who} decorates functions and methods, got {article} {name}")
    return wrap(function)  # type: ignore[no-any-return]


def in_scope(function: Callable[..., Any], scope: Opener) -> Callable[..., Any]:
    """A function of the same kind, name and signature that runs each call in a scope of its own."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with scope(args, kwargs):
            return function(*args, **kwargs)

    return named_after(stepping(function, scope) or called, function)  # type: ignore[no-any-return]


def stepping(function: Callable[..., Any], scope: Opener) -> Callable[..., Any] | None:
    """The same for a coroutine function or a generator of either kind; None for other functions."""
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
    """True for a function of the kind, or for an object whose __call__ is one."""
    return kind(function) or kind(getattr(type(function), "__call__", None))  # noqa: B004


def named_after(wrapped: Any, function: Callable[..., Any]) -> Any:
    """functools.update_wrapper, also for an object without a name. It leaves out the marks by which
    torch.compile finds the function under a compiled one, as it would pass over the wrapper."""
    functools.update_wrapper(wrapped, function)
    marks: Mapping[str, Any] = vars(wrapped)
    for mark in [name for name in marks if name.startswith("_torchdynamo") or name in _OF_COMPILED]:
        delattr(wrapped, mark)
    for name in ("__name__", "__qualname__"):
        if not hasattr(function, name):  # a partial, an object with __call__
            under = getattr(function, "func", type(function))
            setattr(wrapped, name, getattr(under, name, type(function).__name__))
    return wrapped


# --- steps of coroutines and generators -----------------------------------------------------------


def _nothing() -> None: ...


def _driven(call: Any, inner: Any) -> Generator[Any, Any, Any]:
    """`yield from inner`, with each step inside the scope `call`."""
    enter, leave = getattr(call, "enter", _nothing), getattr(call, "leave", _nothing)
    step, value = inner.send, None
    while True:
        enter()
        try:
            item = step(value)
        except StopIteration as stop:
            return stop.value
        finally:
            value = None  # an exception that was thrown in would hold this frame, and this frame it
            leave()
        try:
            value = yield item
        except GeneratorExit:
            enter()
            try:
                inner.close()
            finally:
                leave()
            raise
        except BaseException as error:
            step, value = inner.throw, error
        else:
            step = inner.send


class _Steps:
    """What `await` takes: the steps of a coroutine, or those to one value of an async generator."""

    __slots__ = ("_call", "_inner")

    def __init__(self, call: Any, inner: Any) -> None:
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


def latest_of_thread(entered: list[tuple[int, _T]]) -> _T:
    """Take the block that this thread entered last off a list of (thread, block). If this thread
    entered none, it ends a block of another thread: the last one."""
    own = threading.get_ident()
    last = max((i for i, block in enumerate(entered) if block[0] == own), default=-1)
    return entered.pop(last)[1]


# --- what torch.compile reads in place of the slots of memtools._core.Managed, which are C --------
# The interpreter itself does not call these two.


def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
    return self._traced(*args, **kwargs)


def __get__(self: Any, instance: object, owner: type | None = None) -> Any:  # noqa: N807
    return self if instance is None else self._traced.__get__(instance, owner)


def compiling() -> bool:
    """Whether torch.compile is tracing the caller now."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_dynamo_compiling()


def twin(
    core: Any, gate: Any, function: Callable[..., Any], clear: Callable[..., None] | None
) -> Callable[..., Any]:
    """A Python function that torch.compile can trace in place of the Managed `core`; without
    torch.compile it calls `core`.

    A call of C would break the graph, and an assignment does not: it is made once, when the graph
    has run, so that a compiled region is one update of the policy that `gate` belongs to.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        if not compiling():
            return core(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        finally:
            if clear is not None:
                clear(args, kwargs)
        gate._updated = True
        return result

    return traced


# --- functions that memtools calls ----------------------------------------------------------------


def as_callback(callback: Any, who: str, argument: str) -> Callable[..., Any]:
    """The callback as a function of one argument; one that takes no argument is wrapped.

    Args:
        callback: what the program passed.
        who: the call that it was passed to, for errors.
        argument: what it is called with, for errors, like "a Pressure".

    Raises TypeError if it can be called neither with one argument nor without.
    """
    if not callable(callback):
        raise TypeError(f"{who}: a function is needed, got {type(callback).__name__}")
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):  # some built-in functions have none
        return callback  # type: ignore[no-any-return]
    for arguments in ((None,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return callback if arguments else _without_argument(callback)
    name = name_of_callback(callback)
    raise TypeError(f"{who}: {name}{signature} must take {argument} or no argument")


def name_of_callback(callback: Any) -> str:
    """The name of a function, or of the class of another object that can be called."""
    return str(getattr(callback, "__qualname__", None) or type(callback).__name__)


def _without_argument(callback: Callable[[], object]) -> Callable[..., object]:
    def call(_: object) -> object:
        return callback()

    call.__qualname__ = name_of_callback(callback)
    return call
