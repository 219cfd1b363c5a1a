"""Linked chains: what grows by one link a step, of which no container is longer."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memtools._census.growth import GrowthCensus
from memtools._census.holders import Holder
from tests.census.test_growth import STEPS, looked, named

PAYLOAD = 3000  # bytes of each link
last: Any = None


class Node:
    """A link with a dict of its own."""

    def __init__(self, prev: Any) -> None:
        self.prev, self.data = prev, bytes(PAYLOAD)


class Slotted:
    __slots__ = ("data", "prev")

    def __init__(self, prev: Any) -> None:
        self.prev, self.data = prev, bytes(PAYLOAD)


def closure(before: Any) -> Callable[[], Any]:
    data = bytes(PAYLOAD)
    return lambda: (before, data)


def failed(before: BaseException | None) -> BaseException:
    """An exception that was raised while the one before was being handled."""
    data = bytes(PAYLOAD)
    try:
        try:
            if before is not None:
                raise before
        finally:
            raise ValueError(len(data))
    except ValueError as error:
        return error


def generator(before: Any) -> Iterator[Any]:
    data = bytes(PAYLOAD)
    yield data
    yield from before or ()


def begun(before: Any) -> Iterator[Any]:
    made = generator(before)
    next(made)
    return made


LINKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dicts": (lambda before: {"prev": before, "data": bytes(PAYLOAD)}, "dict"),
    "tuples": (lambda before: (before, bytes(PAYLOAD)), "tuple"),
    "lists": (lambda before: [before, bytes(PAYLOAD)], "list"),
    "instances": (Node, "Node"),
    "instances with slots": (Slotted, "Slotted"),
    "instances whose dicts were asked for": (lambda before: vars(n := Node(before)) and n, "Node"),
    "closures": (closure, "function"),
    "partials": (lambda before: functools.partial(print, before, bytes(PAYLOAD)), "partial"),
    "exceptions": (failed, "ValueError"),
    "generators": (begun, "generator"),
    "iterators": (lambda before: itertools.chain([bytes(PAYLOAD)], before or ()), "chain"),
}


@pytest.mark.parametrize("case", LINKS)
def test_a_chain_is_named_by_who_holds_its_head(keeper, case):
    make, kind = LINKS[case]
    holders = named(lambda i: setattr(keeper, "head", make(keeper.head)))
    (holder,) = holders.values()
    assert (holder.path, holder.kind) == (f"chain of {kind} in Keeper.head", "chain")
    assert holder.rate_bytes == pytest.approx(PAYLOAD, rel=0.35)
    assert holder.rate_bytes > PAYLOAD
    assert (holder.new_objects, holder.since_step) == (32, 16)
    assert holder.what.endswith(f"{kind} objects")


def test_a_chain_that_gets_longer_at_its_end(keeper):
    keeper.head = keeper.tail = Slotted(None)

    def step(i: int) -> None:
        keeper.tail.prev = Slotted(None)
        keeper.tail = keeper.tail.prev

    (holder,) = named(step).values()
    assert holder.path == "chain of Slotted in Keeper.head"
    assert holder.rate_bytes == pytest.approx(PAYLOAD + 100, rel=0.05)


def test_a_chain_of_a_module_and_one_of_a_running_function(keeper):
    global last
    local: Any = None
    census = GrowthCensus(least_rate=1024)
    for i in range(1, STEPS[-1] + 1):
        last = {"prev": last, "data": bytes(PAYLOAD)}
        local = (local, bytes(PAYLOAD))
        if i in STEPS:
            census.look(i)
    last = None
    name = "test_a_chain_of_a_module_and_one_of_a_running_function()"
    assert {holder.path for holder in census.holders()} == {
        f"chain of dict in {__name__}.last",
        f"chain of tuple in local 'local' of {name}",
    }


def test_chains_that_do_not_grow_or_are_made_anew_are_not_named(keeper):
    def of(links: int) -> Any:
        made: Any = None
        for _ in range(links):
            made = Slotted(made)
        return made

    keeper.tail = of(100)
    # The one of the step before lives until the new one is whole, so no address is the same.
    assert named(lambda i: setattr(keeper, "head", of(20 + 4 * i))) == {}


def test_a_chain_that_was_let_go_of_begins_anew(keeper):
    def step(i: int) -> None:
        keeper.head = None if i == 30 else Slotted(keeper.head)

    assert named(step) == {}


def test_a_list_of_links_is_named_as_the_list(keeper):
    keeper.head = []

    def step(i: int) -> None:
        keeper.tail = Slotted(keeper.tail)
        keeper.head.append(keeper.tail)

    paths = {path: holder.rate_bytes for path, holder in named(step).items()}
    (largest,) = paths
    assert largest == "list Keeper.head"


def test_chains_in_one_dict_are_taken_together(keeper):
    keeper.head = {}

    def step(i: int) -> None:
        for key in "abc":
            keeper.head[key] = Slotted(keeper.head.get(key))

    (holder,) = named(step).values()
    assert holder.path == "dict Keeper.head (3 that grow in it)"
    assert holder.rate_bytes == pytest.approx(3 * (PAYLOAD + 100), rel=0.05)


def test_a_chain_longer_than_the_stack_is_deep(keeper):
    links = 100 * sys.getrecursionlimit()
    for _ in range(links):
        keeper.head = Slotted(keeper.head)
    holders: dict[str, Holder] = named(
        lambda i: setattr(keeper, "head", Slotted(keeper.head)), (4, 8, 12, 16)
    )
    (holder,) = holders.values()
    assert holder.path == "chain of Slotted in Keeper.head"
    assert holder.rate_bytes == pytest.approx(PAYLOAD + 100, rel=0.05)
    while keeper.head is not None:  # which would take a frame of C for each link
        keeper.head = keeper.head.prev


def test_looks_at_chains_keep_nothing(keeper):
    census = looked(lambda i: setattr(keeper, "head", Slotted(keeper.head)))
    references = sys.getrefcount(keeper.head)
    assert references == 2  # the attribute and the argument
    assert len(census.holders()) == 1
