"""A look at objects whose own code raises, lies or never ends."""

from __future__ import annotations

import collections
import threading
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from memtools._census.growth import GrowthCensus
from tests.census.test_growth import named

PAYLOAD = 3000


def ran(*_: object, **__: object) -> NoReturn:
    """In the place of whatever a look might ask for."""
    raise AssertionError("a look has run code of the program")


TRAP = property(ran)
ASKED = (
    "__len__", "__sizeof__", "__iter__", "__reversed__", "__getitem__", "__contains__", "__eq__",
    "__bool__", "__repr__", "__str__", "__instancecheck__",
)  # fmt: skip


class Meta(type):
    """A class of classes that does not like to be asked."""

    __instancecheck__ = __subclasscheck__ = __eq__ = __hash__ = __repr__ = ran  # type: ignore[assignment]
    mro = type.mro
    __name__ = TRAP  # type: ignore[assignment]


def hostile(base: type, *names: str) -> type:
    """A class that is derived from a built-in one, and raises whatever is asked of it."""
    space: dict[str, Any] = dict.fromkeys(ASKED, ran) | {"__hash__": ran, "__class__": TRAP}
    return type(f"Hostile{base.__name__}", (base,), space | dict.fromkeys(names, TRAP))


HostileList, HostileDict, HostileSet = hostile(list), hostile(dict), hostile(set)
HostileDeque = hostile(collections.deque, "maxlen")
HostileArray = hostile(np.ndarray, "nbytes", "base", "shape", "dtype", "itemsize")
HostileTensor = hostile(torch.Tensor, "nbytes", "shape", "dtype", "grad_fn", "grad", "data")
HostileTensor.__torch_function__ = classmethod(ran)  # type: ignore[attr-defined]
WithMeta = Meta("WithMeta", (list,), {"__class__": TRAP})
WithMetaAlone = Meta("WithMetaAlone", (), {"__class__": TRAP, "__slots__": ("kept",)})


class Proxy:
    """Says that it is a list, as mocks and lazy objects do."""

    __class__ = list  # type: ignore[assignment]
    __len__ = __getitem__ = __iter__ = ran

    def __init__(self) -> None:
        self.kept: list[bytes] = []


CONTAINERS = {
    "HostileList": (HostileList, lambda c, i: list.append(c, bytes(PAYLOAD))),
    "HostileDict": (HostileDict, lambda c, i: dict.__setitem__(c, i, bytes(PAYLOAD))),
    "HostileSet": (HostileSet, lambda c, i: set.add(c, bytes([i]) * PAYLOAD)),
    "Hostiledeque": (HostileDeque, lambda c, i: collections.deque.append(c, bytes(PAYLOAD))),
    "WithMeta": (WithMeta, lambda c, i: list.append(c, bytes(PAYLOAD))),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_containers_are_read_by_their_built_in_types(keeper, case):
    make, add = CONTAINERS[case]
    keeper.things = make()
    (holder,) = named(lambda i: add(keeper.things, i)).values()
    assert holder.path.casefold() == f"{case} Keeper.things".casefold()
    assert holder.rate_bytes == pytest.approx(PAYLOAD, rel=0.1)


ENTRIES = {
    "arrays": lambda: np.zeros(PAYLOAD // 8).view(HostileArray),
    "views of arrays": lambda: np.ndarray.__getitem__(
        np.zeros(PAYLOAD // 8).view(HostileArray), slice(1, 5)
    ),
    "tensors": lambda: torch.Tensor._make_subclass(HostileTensor, torch.zeros(PAYLOAD // 4)),
    "lists": lambda: HostileList([bytes(PAYLOAD)]),
    "objects whose class cannot be hashed or compared": lambda: with_payload(WithMetaAlone()),
}


def with_payload(made: Any) -> Any:
    WithMetaAlone.kept.__set__(made, bytes(PAYLOAD))  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_are_weighed_by_what_they_have(keeper, case):
    things = keeper.things
    (holder,) = named(lambda i: things.append(ENTRIES[case]())).values()
    assert holder.path == "list Keeper.things"
    assert PAYLOAD <= holder.rate_bytes < PAYLOAD + 700


def test_an_object_that_holds_what_grows_is_not_asked_for_its_class(keeper):
    keeper.things = with_payload(WithMetaAlone())
    kept: list[bytes] = []
    WithMetaAlone.kept.__set__(keeper.things, kept)  # type: ignore[attr-defined]
    (holder,) = named(lambda i: kept.append(bytes(PAYLOAD))).values()
    assert holder.path == "list WithMetaAlone.kept"


def test_what_an_object_says_of_its_class_is_not_believed(keeper):
    keeper.proxy = Proxy()
    (holder,) = named(lambda i: keeper.proxy.kept.append(bytes(PAYLOAD))).values()
    assert holder.path == "list Proxy.kept"


def test_containers_that_contain_themselves(keeper):
    ring: Any = collections.deque()
    table: Any = {}
    array = np.empty(1, dtype=object)
    array[0] = ring
    ring.append(table)
    table["ring"], table["array"] = ring, array
    keeper.things = [ring, table, array]
    keeper.things.append(keeper.things)

    def step(i: int) -> None:
        ring.append([table, ring, bytes(PAYLOAD)])

    (holder,) = named(step).values()
    assert holder.path.startswith("deque Keeper.things[0]")
    assert holder.rate_bytes == pytest.approx(PAYLOAD + 150, rel=0.1)
    ring.clear()
    table.clear()


def test_a_look_while_threads_change_what_it_reads(keeper):
    """What grows is named, whatever other threads do to it and beside it."""
    stop, turn = threading.Event(), threading.Barrier(3)

    def change(own: list[Any]) -> None:
        turn.wait()
        i = 0
        while not stop.is_set():
            own.append([i])
            keeper.noise[i % 50] = own[-1]
            if len(own) > 500:
                own.clear()
            keeper.noise.pop(i % 7, None)
            i += 1

    keeper.noise = {}
    threads = [threading.Thread(target=change, args=([],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    turn.wait()
    try:
        holders = named(lambda i: keeper.things.append(bytes(PAYLOAD)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert holders["list Keeper.things"].rate_bytes == pytest.approx(PAYLOAD, rel=0.1)


def test_looks_from_two_threads_do_not_meet(keeper):
    """The second of two that look into one table waits, or is told that its step is over."""
    census, wrong = GrowthCensus(least_rate=1024), []

    def look(first: int) -> None:
        for i in range(first, first + 12, 2):
            try:
                census.look(i)
            except ValueError as error:  # the other one's step is above
                wrong.append(str(error))

    threads = [threading.Thread(target=look, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert census.looks + len(wrong) == 12
    assert all("does not come after" in text for text in wrong)
