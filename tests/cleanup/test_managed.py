"""@managed on functions and methods: what counts as an update, what passes, and what stays."""

from __future__ import annotations

import abc
import copy
import functools
import inspect
import pickle
import pydoc
import threading
import typing
from collections.abc import Callable

import pytest

import memtools
from memtools import HostMemoryPressure, _core
from tests.cleanup.managedcases import policy

P, Q = policy(), policy()


def counted(call: Callable[[], object], by: _core.Policy = P) -> int:
    before = by.ticks(0)
    call()
    return by.ticks(0) - before


class Agent:
    def __init__(self) -> None:
        self.seen: list[object] = []

    @memtools.managed(P)
    def update(self, buffer: object, *rest: object, lr: float = 0.1, **more: object) -> str:
        """One update."""
        self.seen.append((buffer, rest, lr, more))
        return "done"

    @memtools.managed(P)
    def depth(self, n: int) -> int:
        return 1 + self.depth(n - 1) if n else 0

    @memtools.managed(P)
    def broken(self, error: BaseException) -> None:
        raise error

    def plain(self, buffer: object) -> object:
        return buffer


class Derived(Agent):
    @memtools.managed(P)
    def update(self, buffer: object, *rest: object, lr: float = 0.2, **more: object) -> str:
        return "derived " + super().update(buffer, *rest, lr=lr, **more)


@memtools.managed(P)
def function(a: int, /, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
    """Adds nothing."""
    return a, b, c


# --- counting -------------------------------------------------------------------------------------


def test_each_call_is_one_update():
    agent = Agent()
    assert counted(lambda: [agent.update(i) for i in range(5)]) == 5
    bound = agent.update
    assert counted(lambda: [bound(i) for i in range(3)]) == 3
    assert counted(lambda: Agent.update(agent, 1)) == 1
    assert counted(lambda: getattr(agent, "update")(1)) == 1  # noqa: B009
    assert counted(lambda: function(1)) == 1
    assert len(agent.seen) == 10


def test_arguments_and_result_pass():
    agent = Agent()
    assert agent.update(1, 2, 3, lr=0.5, extra=6) == "done"
    agent.update(buffer=1)
    assert Derived().update("b") == "derived done"
    assert agent.seen == [(1, (2, 3), 0.5, {"extra": 6}), (1, (), 0.1, {})]
    assert function(1) == (1, 2, 3) == function(1, c=3) == function(*(1,), b=2)
    with pytest.raises(TypeError, match=r"positional-only"):
        function(a=1)
    with pytest.raises(TypeError, match=r"update\(\) missing 1 required positional argument"):
        agent.update()


def test_calls_inside_a_call_are_part_of_it():
    agent = Agent()
    assert counted(lambda: agent.depth(50)) == 1
    assert counted(lambda: Derived().update(1)) == 1

    @memtools.managed(P)
    def outer() -> None:
        assert counted(lambda: agent.update(1)) == 0
        agent.depth(3)

    assert counted(outer) == 1
    assert counted(lambda: agent.update(1)) == 1, "the outer call is closed again"


def test_policies_count_by_themselves():
    @memtools.managed(Q)
    @memtools.managed(P)
    def both() -> None:
        function(1)

    assert counted(both, P) == 1 == counted(both, Q)
    twice = memtools.managed(P)(memtools.managed(P)(len))
    assert counted(lambda: twice("x")) == 1


def test_a_call_that_raised_is_no_update():
    agent, error = Agent(), ValueError("why")
    with pytest.raises(ValueError, match="why") as caught:
        agent.broken(error)
    assert caught.value is error
    assert caught.traceback[-1].name == "broken"
    assert error.__context__ is None

    def caught_outside() -> None:
        for raised in ValueError(), KeyboardInterrupt():
            with pytest.raises(type(raised)):
                agent.broken(raised)

    assert counted(caught_outside) == 0
    caught_inside = memtools.managed(P)(caught_outside)

    assert counted(caught_inside) == 1, "what raised was inside"
    assert counted(lambda: agent.update(1)) == 1


def test_none_as_policy_counts_nothing():
    assert memtools.managed(None)(max)(1, 2) == 2


def test_threads_have_their_own_outermost_calls():
    inside, go_on = threading.Barrier(5), threading.Event()
    agent = Agent()

    @memtools.managed(P)
    def wait() -> None:
        inside.wait(20)
        go_on.wait(20)

    before = P.ticks(0)
    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    inside.wait(20)  # all are within the call
    agent.update(1)
    assert P.ticks(0) - before == 1
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert P.ticks(0) - before == 5


# --- actions --------------------------------------------------------------------------------------


def test_what_an_action_raises_passes_and_leaves_no_call_open():
    wanted: list[BaseException] = [HostMemoryPressure("full"), KeyboardInterrupt()]

    def act(mask: int, clock: int) -> None:
        if wanted:
            raise wanted.pop(0)

    acting = policy(act)
    update = memtools.managed(acting)(lambda: "done")
    with pytest.raises(HostMemoryPressure, match="full"):
        update()
    with pytest.raises(KeyboardInterrupt):
        update()
    assert update() == "done"
    assert acting.ticks(0) == 3


def test_actions_come_after_the_call():
    order: list[str] = []
    acting = policy(lambda mask, clock: order.append(f"act {mask} {clock}"))

    @memtools.managed(acting)
    def update() -> None:
        order.append("update")

    update()
    update()
    assert order == ["update", "act 1 0"] * 2


# --- what stays as it was -------------------------------------------------------------------------


def test_it_looks_like_the_function():
    wrapped = Agent.__dict__["update"]
    assert (wrapped.__name__, wrapped.__qualname__) == ("update", "Agent.update")
    assert (wrapped.__module__, wrapped.__doc__) == (__name__, "One update.")
    assert wrapped.__wrapped__.__code__.co_name == "update"
    assert inspect.unwrap(function).__code__.co_name == "function"
    assert str(inspect.signature(function)).startswith("(a: 'int', /, b: 'int' = 2, *, c: 'int' =")
    assert list(inspect.signature(Agent().update).parameters) == ["buffer", "rest", "lr", "more"]
    assert typing.get_type_hints(function)["return"] == tuple[int, int, int]
    assert inspect.getsource(function).startswith("@memtools.managed(P)")
    assert inspect.isroutine(function)
    assert callable(function)
    assert repr(Agent.update).startswith("<managed <function Agent.update at ")
    assert Agent.update is Agent.update
    agent = Agent()
    assert agent.update == agent.update
    assert agent.update.__self__ is agent
    text = pydoc.render_doc(Agent, renderer=pydoc.plaintext)
    words = " ".join(text.replace("|", " ").split())  # 3.13 gives each parameter a line
    assert "self, buffer: 'object', *rest: 'object'" in words
    assert "One update." in text
    assert "function(a: 'int', /" in pydoc.render_doc(function, renderer=pydoc.plaintext)


def test_abstract_methods_stay_abstract():
    class Base(abc.ABC):
        @memtools.managed(P)
        @abc.abstractmethod
        def update(self) -> None: ...

        @abc.abstractmethod
        @memtools.managed(P)
        def other(self) -> None: ...

    assert Base.__abstractmethods__ == {"update", "other"}


def test_pickled_by_name_and_copied_as_itself():
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(function, protocol)) is function
    assert pickle.loads(pickle.dumps(Agent.update)) is Agent.update
    assert pickle.loads(pickle.dumps(Agent().update))(1) == "done"
    assert copy.copy(function) is function is copy.deepcopy([function])[0]
    assert copy.deepcopy(Agent()).update(1) == "done"

    @memtools.managed(P)
    def local() -> None: ...

    with pytest.raises((pickle.PicklingError, AttributeError), match="local"):
        pickle.dumps(local)


def test_partials_and_objects_with_a_call_are_functions_too():
    part = memtools.managed(P)(functools.partial(function, 1, c=9))
    assert counted(lambda: part()) == 1
    assert part.__name__ == "function"

    class Updater:
        def __call__(self, x: int) -> int:
            return x + 1

    assert memtools.managed(P)(Updater())(1) == 2
    bound = memtools.managed(P)(Agent().plain)
    assert counted(lambda: bound(1)) == 1


# --- memory ---------------------------------------------------------------------------------------


def test_memory_that_runs_out_at_any_allocation_leaves_nothing_open():
    _testcapi = pytest.importorskip("_testcapi")
    fresh = _core.Managed(lambda *args, **kwargs: [1], P, lambda args, kwargs: None)
    others = [_core.Managed(dict, policy()) for _ in range(200)]  # use up what is kept for calls
    opened = [(gate, gate._begin()) for gate in others[:100]]
    outcomes = []
    for at, gate in enumerate(others[100:120]):
        opened.append((gate, gate._begin()))
        arguments = {f"long name {at} {i}": i for i in range(20)}
        _testcapi.set_nomemory(at, at + 1)
        try:
            fresh(1, 2, 3, **arguments)
            outcomes.append(True)
        except MemoryError:
            outcomes.append(False)
        finally:
            _testcapi.remove_mem_hooks()
        number = fresh._begin()
        assert number, "a call was left open"
        assert fresh._end(number)
    assert all(gate._end(number) for gate, number in opened)
    assert outcomes.count(False) >= 3, outcomes
    assert outcomes[-1]


# --- bad input ------------------------------------------------------------------------------------


def test_what_is_no_policy_is_refused():
    with pytest.raises(TypeError, match=r"takes a CleanupPolicy.*got function plain; write @mem"):
        memtools.managed(Agent.plain)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got int"):
        memtools.managed(3)  # type: ignore[arg-type]


def test_what_is_no_function_is_refused():
    manage = memtools.managed(P)
    with pytest.raises(TypeError, match=r"put it below the @property"):
        manage(property(len))  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"put it below the @cached_property"):
        manage(functools.cached_property(len))  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"functions and methods, got class Agent"):
        manage(Agent)
    with pytest.raises(TypeError, match=r"functions and methods, got an int"):
        manage(3)  # type: ignore[type-var]
