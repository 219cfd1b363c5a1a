"""Managed functions and torch's compiler: no graph break, the same numbers, and updates counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import memtools
from tests.cleanup.managedcases import policy
from tests.cleanup.test_managed import P, counted

HISTORY: list[int] = []
X = torch.arange(4.0).reshape(2, 2)


@memtools.managed(P, clear=[HISTORY])
def double(x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
    return x * 2 + plus


@memtools.managed(P)
def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no")


def captured() -> Callable[[torch.Tensor], torch.Tensor]:
    k = torch.ones(2, 2)

    @memtools.managed(P)
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + k

    return inner


class Agent:
    def __init__(self) -> None:
        self.losses = [1.0]

    @memtools.managed(P, clear="losses")
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Derived(Agent):
    @memtools.managed(P)
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return super().update(x) + 1


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    @memtools.managed(P)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


ADD, AGENT, DERIVED, MODEL = captured(), Agent(), Derived(), Model()
ways = pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(function: Any, fullgraph: bool) -> tuple[Any, CompileCounter]:
    counter = CompileCounter()
    return torch.compile(function, backend=counter, fullgraph=fullgraph), counter


def check(function: Any, fullgraph: bool) -> None:
    """Compiled once, without a break; each call the same numbers, and one update."""
    expected = function(X)
    fast, counter = compiled(function, fullgraph)
    for _ in range(3):
        assert counted(lambda: torch.testing.assert_close(fast(X), expected)) == 1
    assert counter.frame_count == 1


@pytest.mark.slow
@ways
@pytest.mark.parametrize(
    "what", [double, ADD, AGENT.update, MODEL], ids=lambda what: str(what)[:20]
)
def test_managed_ones_can_be_compiled(what, fullgraph):
    check(what, fullgraph)


CALLERS = {
    "function": lambda x: double(x, plus=1.0) + 1,
    "closure": lambda x: ADD(x) * 2,
    "method": lambda x: AGENT.update(x) + 1,
    "bound": lambda x: (lambda update: update(x) + 1)(AGENT.update),
    "module": lambda x: MODEL(x) + 1,
}


@pytest.mark.slow
@ways
@pytest.mark.parametrize("name", CALLERS)
def test_a_compiled_function_may_call_managed_ones(name, fullgraph):
    check(CALLERS[name], fullgraph)


@pytest.mark.slow
def test_what_is_named_is_cleared_within_a_compiled_region():
    fast, counter = compiled(CALLERS["function"], True)
    method, _ = compiled(CALLERS["method"], True)
    for _ in range(3):
        HISTORY.append(1)
        AGENT.losses.append(2.0)
        fast(X)
        method(X)
        assert HISTORY == [] == AGENT.losses
    assert counter.frame_count == 1


@pytest.mark.slow
def test_calls_through_super_break_the_graph_and_count_once():
    def outer(x: torch.Tensor) -> torch.Tensor:
        return DERIVED.update(x) + 1

    for what in outer, DERIVED.update:
        fast, _ = compiled(what, False)
        for _ in range(3):
            before = P.ticks(0)
            result = fast(X)
            assert P.ticks(0) == before + 1
            torch.testing.assert_close(result, what(X))


def test_a_region_is_one_update_and_a_part_of_one_that_is_open():
    def twice(x: torch.Tensor) -> torch.Tensor:
        return double(double(x)) + ADD(x)

    fast, _ = compiled(twice, True)
    for _ in range(3):
        torch.testing.assert_close(fast(X), X * 4 + X + 1)
    assert counted(lambda: fast(X)) == 1
    assert counted(lambda: memtools.managed(P)(fast)(X)) == 1


@pytest.mark.slow
def test_exceptions_are_no_updates():
    def outer(x: torch.Tensor) -> torch.Tensor:
        try:
            return refuse(x)
        except ValueError:
            return x + 1

    fast, _ = compiled(outer, True)
    assert counted(lambda: torch.testing.assert_close(fast(X), X + 1)) == 0
    alone, _ = compiled(refuse, False)
    with pytest.raises(ValueError, match="no"):
        alone(X)


def test_actions_are_done_when_the_graph_has_run():
    seen: list[str] = []

    def act(mask: int, clock: int) -> None:
        seen.append("act")

    update = memtools.managed(policy(act))(lambda x: x + 1)
    fast, counter = compiled(lambda x: update(x) * 2, True)
    torch.testing.assert_close(fast(X), (X + 1) * 2)
    assert seen == ["act"]
    fast(X)
    assert seen == ["act"] * 2
    assert counter.frame_count == 1


def test_a_compiled_function_can_be_managed():
    fast, counter = compiled(lambda x: x * 5, True)
    update = memtools.managed(P)(fast)
    for _ in range(3):
        assert counted(lambda: torch.testing.assert_close(update(X), X * 5)) == 1
    assert counter.frame_count == 1
    again, _ = compiled(update, False)
    assert counted(lambda: torch.testing.assert_close(again(X), X * 5)) == 1


def test_a_module_can_be_exported():
    exported = torch.export.export(MODEL, (X,))
    torch.testing.assert_close(exported.module()(X), MODEL(X))


def test_modules_are_not_decorated_themselves():
    with pytest.raises(TypeError, match=r"got the module Linear; decorate the function that calls"):
        memtools.managed(P)(torch.nn.Linear(1, 1))


def test_generation_is_left_out_of_compiled_regions():
    made = memtools.generation()(lambda x: x + 1)
    fast, counter = compiled(lambda x: made(x) * 2, True)
    torch.testing.assert_close(fast(X), (X + 1) * 2)
    assert counter.frame_count == 1
