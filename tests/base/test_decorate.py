"""How functions of the program are wrapped and called back."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from memtools._base.decorate import as_callback, decorated, in_scope, latest_of_thread


class Scope:
    """Writes down what happens to it, with or without steps."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> Scope:
        self.log.append("begin")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.log.append("end" if kind is None else kind.__name__)


class Steps(Scope):
    def enter(self) -> None:
        self.log.append("(")

    def leave(self) -> None:
        self.log.append(")")


def wrapped(function: Any, kind: type[Scope]) -> tuple[Any, list[str]]:
    log: list[str] = []
    return in_scope(function, lambda args, kwargs: kind(log)), log


@pytest.mark.parametrize("kind", [Scope, Steps])
def test_a_function_that_returns_is_in_its_scope_once(kind):
    function, log = wrapped(lambda x: 2 * x, kind)
    assert (function(4), log) == (8, ["begin", "end"])
    failing, log = wrapped(lambda: [][0], kind)
    with pytest.raises(IndexError):
        failing()
    assert log == ["begin", "IndexError"]


def test_a_scope_with_steps_is_inside_while_a_generator_runs():
    def count() -> Iterator[int]:
        yield from range(2)

    for kind, steps in ((Steps, ["(", ")"]), (Scope, [])):
        function, log = wrapped(count, kind)
        assert list(function()) == [0, 1]
        assert log == ["begin", *3 * steps, "end"]


def test_coroutines_and_async_generators_have_steps_too():
    async def wait() -> int:
        await asyncio.sleep(0)
        return 3

    async def stream() -> AsyncIterator[int]:
        yield await wait()

    async def all_of(function: Any) -> list[int]:
        return [value async for value in function()]

    function, log = wrapped(wait, Steps)
    assert (asyncio.run(function()), log) == (3, ["begin", "(", ")", "(", ")", "end"])
    function, log = wrapped(stream, Steps)
    assert asyncio.run(all_of(function)) == [3]
    assert (log[0], log[-1], log.count("(")) == ("begin", "end", log.count(")"))


def test_methods_of_a_class_keep_their_kind():
    marked = functools.partial(decorated, who="mark()", wrap=lambda plain: plain)
    assert isinstance(marked(classmethod(len)), classmethod)
    assert isinstance(marked(staticmethod(len)), staticmethod)


@pytest.mark.parametrize(
    ("callback", "got"),
    [(lambda: "none", "none"), (lambda x: x, 7), (lambda *a: a, (7,)), (lambda x=1: x, 7)],
)
def test_a_callback_is_called_with_an_argument_if_it_takes_one(callback, got):
    assert as_callback(callback, "add()", "a number")(7) == got


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (3, r"add\(\): a function is needed, got int"),
        (lambda a, b: None, r"takes neither a number nor nothing"),
        (lambda *, key: None, r"takes neither a number nor nothing"),
    ],
)
def test_a_callback_that_takes_something_else_is_refused(callback, words):
    with pytest.raises(TypeError, match=words):
        as_callback(callback, "add()", "a number")


def test_the_block_that_a_thread_entered_last_is_left_first():
    own = threading.get_ident()
    entered = [(own, "a"), (own, "b"), (own + 1, "c")]
    assert [latest_of_thread(entered) for _ in range(3)] == ["b", "a", "c"]
