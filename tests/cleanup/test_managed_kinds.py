"""@managed on classmethods, coroutines, generators of both kinds, and as a `with` block."""

from __future__ import annotations

import asyncio
import gc
import inspect
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Literal

import pytest

import memtools
from tests.cleanup.managednotes import CLEARED, NOTE, manage, nothing_cleared  # noqa: F401 - a fixture
from tests.cleanup.test_managed import P, counted, function


class Kinds:
    @classmethod
    @memtools.managed(P)
    def inner_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    @memtools.managed(P)
    @classmethod
    def outer_class(cls, x: int) -> tuple[type, int]:
        return cls, x

    @staticmethod
    @memtools.managed(P)
    def inner_static(x: int) -> int:
        return x

    @memtools.managed(P)
    @staticmethod
    def outer_static(x: int) -> int:
        return x

    @property
    @memtools.managed(P)
    def value(self) -> int:
        return 7

    @memtools.managed(P)
    async def wait(self, x: int) -> int:
        await asyncio.sleep(0)
        return x

    @memtools.managed(P)
    def values(self, n: int) -> Iterator[int]:
        yield from range(n)


class Derived(Kinds):
    pass


@manage
def stream(n: int) -> Iterator[int]:
    """A stream."""
    got: int = 0
    for i in range(n):
        got = (yield i) or got
    return got


class Gate(asyncio.Event):
    """An event that knows how many have waited for it."""

    waiting = 0

    async def wait(self) -> Literal[True]:
        self.waiting += 1
        return await super().wait()

    async def is_waited_for(self, tasks: int) -> None:
        while self.waiting < tasks:
            await asyncio.sleep(0)  # gives the tasks their turns


@manage
async def wait(gate: asyncio.Event | None = None, error: BaseException | None = None) -> str:
    """Waits."""
    await asyncio.sleep(0)
    if gate is not None:
        await gate.wait()
    if error is not None:
        raise error
    return "done"


@manage
async def astream(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


def run(what: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Any]:
    return lambda: asyncio.run(what())


# --- kinds of methods -----------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [Kinds, Kinds(), Derived])
def test_class_and_static_methods_in_either_order(owner):
    cls = owner if isinstance(owner, type) else type(owner)
    assert owner.inner_class(1) == (cls, 1) == owner.outer_class(x=1)
    assert owner.inner_static(2) == 2 == owner.outer_static(x=2)
    assert counted(lambda: (owner.inner_class(1), owner.outer_class(1))) == 2
    assert counted(lambda: (owner.inner_static(1), owner.outer_static(1))) == 2
    assert isinstance(Kinds.__dict__["outer_class"], classmethod)
    assert isinstance(Kinds.__dict__["outer_static"], staticmethod)
    assert pickle.loads(pickle.dumps(owner.inner_class))(1) == (cls, 1)
    assert str(inspect.signature(owner.outer_class)).startswith("(x: 'int')")


def test_a_property_over_it_works():
    assert Kinds().value == 7
    assert counted(lambda: Kinds().value) == 1


# --- generators -----------------------------------------------------------------------------------


def test_a_generator_is_one_update_when_it_ends():
    assert inspect.isgeneratorfunction(stream)
    assert (stream.__name__, stream.__doc__) == ("stream", "A stream.")
    assert pickle.loads(pickle.dumps(stream)) is stream
    values = stream(2)
    assert counted(lambda: next(values)) == 0
    assert values.send(5) == 1
    assert CLEARED == []
    with pytest.raises(StopIteration) as end:
        values.send(0)
    assert end.value.value == 5
    assert CLEARED == ["cleared"]
    assert counted(lambda: list(stream(3))) == 1
    assert counted(lambda: list(Kinds().values(3))) == 1
    assert counted(lambda: stream(3)) == 0, "not begun"


@pytest.mark.slow
def test_a_generator_closed_early_is_no_update_but_cleared():
    values = stream(9)
    next(values)
    assert counted(values.close) == 0
    assert CLEARED == ["cleared"]
    left = stream(9)
    next(left)

    def drop() -> None:
        nonlocal left
        left = None
        gc.collect()

    assert counted(drop) == 0
    assert CLEARED == ["cleared"] * 2


def test_a_generator_that_is_closed_ends_first_and_inside_its_call():
    order: list[int] = []

    @manage
    def values() -> Iterator[int]:
        try:
            yield 1
        finally:
            order.append(len(CLEARED))
            order.append(counted(lambda: function(1)))

    @manage
    async def avalues() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            order.append(len(CLEARED))
            order.append(counted(lambda: function(1)))

    async def close() -> None:
        started = avalues()
        await anext(started)
        await started.aclose()

    started = values()
    next(started)
    assert counted(started.close) == 0
    assert order == [0, 0]
    assert counted(run(close)) == 0
    assert order == [0, 0, 1, 0]


def test_exceptions_go_both_ways_through_a_generator():
    @manage
    def catching() -> Iterator[str]:
        try:
            yield "first"
        except LookupError as error:
            yield f"caught {error}"
        raise OSError("own")

    values = catching()
    assert next(values) == "first"
    assert values.throw(LookupError("x")) == "caught x"
    with pytest.raises(OSError, match="own"):
        next(values)
    assert CLEARED == ["cleared"]
    thrown = stream(2)
    next(thrown)
    error = LookupError("mine")
    with pytest.raises(LookupError, match="mine") as caught:
        thrown.throw(error)
    assert caught.value is error


def test_what_a_generator_calls_is_part_of_it_and_what_its_reader_calls_is_not():
    @memtools.managed(P)
    def values() -> Iterator[int]:
        for i in range(3):
            assert counted(lambda: function(1)) == 0
            yield i

    def read() -> None:
        for _ in values():
            function(1)

    assert counted(read) == 4

    @memtools.managed(P)
    def outer() -> None:
        list(values())

    assert counted(outer) == 1


def test_a_generator_may_move_to_another_thread():
    values = stream(3)
    next(values)
    thread = threading.Thread(target=lambda: list(values))
    assert counted(lambda: (thread.start(), thread.join(20))) == 1
    assert counted(lambda: function(1)) == 1


# --- coroutines -----------------------------------------------------------------------------------


def test_a_coroutine_is_one_update():
    assert inspect.iscoroutinefunction(wait)
    assert asyncio.iscoroutinefunction(Kinds().wait)
    assert wait.__doc__ == "Waits."
    assert asyncio.run(wait()) == "done"
    assert counted(run(wait)) == 1
    assert counted(lambda: asyncio.run(Kinds().wait(3))) == 1
    assert CLEARED == ["cleared"] * 2


def test_a_coroutine_that_raised_or_was_cancelled_is_none():
    error = LookupError("x")
    with pytest.raises(LookupError) as caught:
        asyncio.run(wait(error=error))
    assert caught.value is error

    async def cancelled() -> None:
        gate = Gate()
        task = asyncio.create_task(wait(gate))
        await gate.is_waited_for(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert counted(run(cancelled)) == 0
    assert CLEARED == ["cleared"] * 2
    never = wait()
    assert counted(never.close) == 0


def test_tasks_that_take_turns_count_each():
    async def main() -> None:
        gate = Gate()
        tasks = [asyncio.create_task(wait(gate)) for _ in range(5)]
        await gate.is_waited_for(5)
        function(1)  # an update of its own: no task is at work on this thread
        gate.set()
        await asyncio.gather(*tasks)

    assert counted(run(main)) == 6


def test_what_a_coroutine_awaits_is_part_of_it():
    @memtools.managed(P)
    async def outer() -> None:
        await wait()
        function(1)
        async for _ in astream(2):
            pass

    assert counted(run(outer)) == 1


# --- asynchronous generators ----------------------------------------------------------------------


def test_an_asynchronous_generator_is_one_update():
    assert inspect.isasyncgenfunction(astream)

    async def read() -> list[int]:
        return [value async for value in astream(3)]

    assert asyncio.run(read()) == [0, 1, 2]
    assert counted(run(read)) == 1
    assert CLEARED == ["cleared"] * 2

    async def close() -> None:
        values = astream(3)
        assert await anext(values) == 0
        await values.aclose()

    assert counted(run(close)) == 0
    assert CLEARED == ["cleared"] * 3


def test_what_an_asynchronous_generator_calls_is_part_of_it():
    @memtools.managed(P)
    async def values() -> AsyncIterator[int]:
        for i in range(3):
            assert counted(lambda: function(1)) == 0
            yield i

    async def read() -> None:
        async for _ in values():
            function(1)

    assert counted(run(read)) == 4


def test_values_and_exceptions_go_into_an_asynchronous_generator():
    @manage
    async def echo() -> AsyncIterator[object]:
        got: object = None
        while got != "end":
            try:
                got = yield got
            except LookupError as error:
                got = f"caught {error}"

    async def talk() -> None:
        values = echo()
        assert await anext(values) is None
        assert await values.asend(1) == 1
        assert await values.athrow(LookupError("x")) == "caught x"
        with pytest.raises(StopAsyncIteration):
            await values.asend("end")

    assert counted(run(talk)) == 1
