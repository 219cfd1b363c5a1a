"""The census against a plain model: random programs that make, share, nest and drop tensors."""

from __future__ import annotations

import collections
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memtools
from tests.census.older import older_torch
from tests.kit.long import LONG

WIDTHS = (107, 109)  # no other tensor of the tests is that wide
DTYPES = {"float32": (torch.float32, 4), "int8": (torch.int8, 1), "float64": (torch.float64, 8)}
Kind = tuple[tuple[int, ...], str]


class Node:
    """An object of the program."""


class Slotted:
    __slots__ = ("content",)


def put(container: Any, item: Any, name: str) -> None:
    """Into any kind of container, by the means of that kind."""
    if isinstance(container, (list, collections.deque)):
        container.append(item)
    elif isinstance(container, dict):
        container[name] = item
    elif isinstance(container, Slotted):
        container.content = (getattr(container, "content", None), item)
    else:
        setattr(container, name, item)


MAKERS = {"list": list, "dict": dict, "deque": collections.deque, "node": Node, "slots": Slotted}
places = st.integers(0, 40)
sizes = st.tuples(st.integers(1, 9), st.sampled_from(WIDTHS))
ops = st.one_of(
    st.tuples(st.just("tensor"), places, sizes, st.sampled_from(sorted(DTYPES))),
    st.tuples(st.just("part"), places, places, st.integers(1, 9)),
    st.tuples(st.just("container"), places, st.sampled_from(sorted(MAKERS))),
    st.tuples(st.just("share"), places, places),
    st.tuples(st.just("drop"), places),
    st.tuples(st.just("rest"), places, sizes),
)


class Program:
    """What the operations make. `alive` are the tensors that some container must keep; a dropped
    one is dropped everywhere, because the model does not look at references."""

    def __init__(self) -> None:
        self.containers: list[Any] = [[]]
        self.alive: dict[int, torch.Tensor] = {}
        self.facts: dict[int, tuple[Kind, int, int]] = {}  # kind, storage, bytes of the storage
        self.made = 0

    def run(self, op: tuple[Any, ...]) -> None:
        getattr(self, op[0])(*op[1:])

    def _new(self, tensor: torch.Tensor, kind: Kind, storage: int, whole: int) -> None:
        self.made += 1
        self.alive[self.made] = tensor
        self.facts[self.made] = kind, storage, whole

    def tensor(self, place: int, size: tuple[int, int], dtype: str) -> None:
        kind, width = DTYPES[dtype]
        made = torch.empty(size, dtype=kind)
        self._new(made, (size, dtype), self.made + 1, size[0] * size[1] * width)
        put(self.containers[place % len(self.containers)], [made], f"t{self.made}")

    def part(self, place: int, of: int, rows: int) -> None:
        """A tensor over a part of another's storage, which need not stay alive for it."""
        if not self.alive:
            return
        number = sorted(self.alive)[of % len(self.alive)]
        base, (kind, storage, whole) = self.alive[number], self.facts[number]
        size = (min(rows, kind[0][0]), kind[0][1])
        made = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage(), 0, size)
        self._new(made, (size, kind[1]), storage, whole)
        put(self.containers[place % len(self.containers)], [made], f"t{self.made}")

    def container(self, place: int, kind: str) -> None:
        made = MAKERS[kind]()
        put(self.containers[place % len(self.containers)], made, f"c{len(self.containers)}")
        self.containers.append(made)

    def share(self, place: int, other: int) -> None:
        """One container in another, and so maybe in itself."""
        inner = self.containers[other % len(self.containers)]
        put(self.containers[place % len(self.containers)], inner, f"s{place}")

    def drop(self, which: int) -> None:
        if not self.alive:
            return
        self._drop(sorted(self.alive)[which % len(self.alive)])

    def rest(self, place: int, size: tuple[int, int]) -> None:
        """Of a tensor only a part of one row stays, and keeps all of its storage alive."""
        self.tensor(place, size, "float32")
        number = self.made
        self.part(place, sorted(self.alive).index(number), 1)
        self._drop(number)

    def _drop(self, number: int) -> None:
        tensor = self.alive.pop(number)
        for cell in gc.get_referrers(tensor):  # the list of one in which it was put
            if type(cell) is list and len(cell) == 1 and cell[0] is tensor:
                cell.clear()

    def expected(self) -> dict[Kind, list[int]]:
        """{kind: [count, bytes]}: the largest tensor over a storage answers for all of it."""
        found: dict[Kind, list[int]] = {}
        largest: dict[int, tuple[int, Kind, int]] = {}
        for number in self.alive:
            kind, storage, whole = self.facts[number]
            found.setdefault(kind, [0, 0])[0] += 1
            rows = kind[0][0]
            if rows > largest.get(storage, (0, kind, 0))[0]:
                largest[storage] = rows, kind, whole
        for _, kind, whole in largest.values():
            found[kind][1] += whole
        return found


@pytest.fixture
def each_way(request: Any, without_shim: Any, monkeypatch: Any) -> Iterator[None]:
    if request.param == "shim":
        yield
        return
    with without_shim():
        monkeypatch.setattr("memtools._base.torch.connect", older_torch)
        yield


def seen(look: memtools.Census) -> dict[Kind, list[int]]:
    return {
        (group.kind.shape, group.kind.dtype): [group.count, group.bytes]
        for group in look.groups
        if group.kind.shape and group.kind.shape[-1] in WIDTHS and len(group.kind.shape) == 2
    }


@pytest.mark.slow
@pytest.mark.parametrize("each_way", ["shim", "public attributes"], indirect=True)
@pytest.mark.usefixtures("each_way")
@settings(max_examples=100 if LONG else 12, deadline=None)
@given(first=st.lists(ops, max_size=40), later=st.lists(ops, max_size=25))
def test_counts_and_bytes_are_those_of_the_model(
    first: list[tuple[Any, ...]], later: list[tuple[Any, ...]]
) -> None:
    gc.collect()  # cycles of the example before
    assert seen(memtools.census()) == {}
    program = Program()
    for op in first:
        program.run(op)
    earlier, before = memtools.census(), program.expected()
    assert seen(earlier) == before
    for op in later:
        program.run(op)
    look, now = memtools.census(), program.expected()
    assert seen(look) == now
    grown = {
        kind: [count - before.get(kind, [0, 0])[0], size - before.get(kind, [0, 0])[1]]
        for kind, (count, size) in now.items()
    }
    growth = look.diff(earlier)
    found = {(g.kind.shape, g.kind.dtype): [g.count, g.bytes] for g in growth.groups
             if g.kind.shape and g.kind.shape[-1] in WIDTHS}  # fmt: skip
    assert found == {kind: more for kind, more in grown.items() if more[0] > 0 or more[1] > 0}


steps = st.one_of(
    st.tuples(st.just("list"), st.integers(0, 3)),
    st.tuples(st.just("dict"), st.sampled_from(["loss", "a b", "it's", 7, -1, 2.5, True, b"x"])),
    st.tuples(st.just("object"), st.sampled_from(["history", "_cache", "über"])),
)


def wrapped(inner: Any, step: tuple[str, Any], number: int, owners: dict[str, Any]) -> Any:
    """A container of the step's kind, with `inner` where the step says, and something beside it."""
    kind, where = step
    if kind == "list":
        return [*(object() for _ in range(where)), inner, object()]
    if kind == "dict":
        return {"other": object(), where: inner}
    name = f"Owner{number}"
    owner = type(name, (), {})()
    setattr(owner, where, inner)
    owners[name] = owner
    return owner


@pytest.mark.slow
@settings(max_examples=100 if LONG else 20, deadline=None)
@given(
    path=st.lists(steps, min_size=0, max_size=4),
    store=st.sampled_from(["list", "dict", "deque", "set", "tuple"]),
    count=st.integers(2, 30),
)
def test_the_path_of_a_holder_evaluates_to_what_holds(
    path: list[tuple[str, Any]], store: str, count: int
) -> None:
    """The outermost is an object with an attribute, so that the path always has a name to begin at.
    Names in the path are of the innermost such object; `Owner3.history[2]['loss']` is evaluated."""
    tensors = [torch.empty(2, WIDTHS[0]) for _ in range(count)]
    make = {"list": list, "tuple": tuple, "set": set, "deque": collections.deque}
    kept = dict(enumerate(tensors)) if store == "dict" else make[store](tensors)
    owners: dict[str, Any] = {}
    whole: Any = kept
    for number, step in enumerate([*reversed(path), ("object", "root")]):
        whole = wrapped(whole, step, number, owners)
    held = memtools.holder_of(tensors)
    assert len(held) == 1
    assert (held[0].kind, held[0].length, held[0].new_objects) == (store, count, count)
    kind, _, text = held[0].path.partition(" ")
    assert kind == store
    place = eval(text, dict(owners))
    assert place is kept
    del whole, place


def test_the_model_can_be_wrong() -> None:
    """The comparison is no tautology: a tensor that the model does not know of is a difference."""
    program = Program()
    program.run(("tensor", 0, (3, WIDTHS[0]), "int8"))
    hidden = torch.empty(3, WIDTHS[0], dtype=torch.int8)
    assert seen(memtools.census()) != program.expected()
    del hidden
    assert seen(memtools.census()) == program.expected()
    assert Counter(kind[1] for kind in program.expected()) == {"int8": 1}
