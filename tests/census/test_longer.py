"""Objects of extensions that the program has by a name, and that become longer."""

from __future__ import annotations

import inspect
import itertools
import sqlite3
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from xml.etree import ElementTree

import pytest

from memtools import _core
from memtools._census import longer
from memtools._census.extensions import is_of_extension
from memtools._census.holders import Holder
from memtools._census.longer import Lengths, length_of

STEPS = 16


def tree(length: int = 0) -> ElementTree.Element:
    """An object of C code that has a length."""
    made = ElementTree.Element("run")
    made.extend(ElementTree.Element("event") for _ in range(length))
    return made


def one_more(before: ElementTree.Element) -> ElementTree.Element:
    made = tree()
    made.extend([*before, ElementTree.Element("event")])
    return made


class Recorder:
    """Has an object of an extension as an attribute."""

    def __init__(self) -> None:
        self.events: Any = tree()

    def record(self) -> None:
        self.events.append(ElementTree.Element("event"))


class Rebuilder:
    """Makes the object of the one before it."""

    def __init__(self) -> None:
        self.events = tree()

    def record(self) -> None:
        self.events = one_more(self.events)


class Slots:
    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events = tree()


def found(act: Callable[[], object], *, steps: int = STEPS) -> list[Holder]:
    lengths = Lengths(100)
    for _ in range(STEPS):
        act()
    return list(lengths.longer(100 + steps))


@pytest.mark.parametrize("kind", [Recorder, Rebuilder])
def test_what_is_changed_in_place_or_made_of_itself_becomes_longer(kind: Any) -> None:
    holders = found(kind().record)
    assert [one.path for one in holders] == [f"{kind.__name__}.events"]
    one = holders[0]
    assert (one.new_objects, one.new_bytes, one.steps, one.length) == (STEPS, 0, STEPS, STEPS)
    assert (one.kind, one.what, one.extension) == (
        "variable", "items", "xml.etree.ElementTree.Element",
    )  # fmt: skip
    assert one.only_gained
    line = inspect.getsourcelines(kind.record)[1] + 1
    assert one.kept_at == f"tests/census/test_longer.py:{line} in record"


def test_what_is_cut_to_its_newest_part_does_not() -> None:
    recorder = Recorder()
    recorder.events = tree(8)

    def record() -> None:
        recorder.record()
        recorder.events = ElementTree.Element("run")
        recorder.events.extend(tree(8))

    assert found(record) == []


def test_less_than_one_item_in_eight_steps_is_none() -> None:
    recorder = Recorder()
    assert found(recorder.record, steps=8 * STEPS + 1) == []
    assert found(recorder.record, steps=8 * STEPS) != []


def test_what_has_become_longer_is_compared_with_the_reading_before() -> None:
    recorder = Recorder()
    lengths = Lengths(0)
    for step, more in enumerate([4, 4, 0], start=1):
        for _ in range(more):
            recorder.record()
        mine = [one for one in lengths.longer(4 * step) if one.path == "Recorder.events"]
        assert [one.new_objects for one in mine] == ([more] if more else [])


def in_a_variable() -> Iterator[list[Holder]]:
    events = tree()
    yield found(lambda: events.append(ElementTree.Element("event")))  # a cell


def in_its_own_variable() -> Iterator[list[Holder]]:
    events = tree()
    lengths = Lengths(0)
    for _ in range(STEPS):
        events.append(ElementTree.Element("event"))
    yield list(lengths.longer(STEPS))


def in_a_dict() -> Iterator[list[Holder]]:
    recorder = Recorder()
    events = recorder.events
    recorder.events = {"a": {"b": events}}
    yield found(lambda: events.append(ElementTree.Element("event")))


def in_a_slot() -> Iterator[list[Holder]]:
    slots = Slots()
    yield found(lambda: slots.events.append(ElementTree.Element("event")))


class Table:
    """Stands for a class of a library, which has an object of an extension."""

    def __init__(self) -> None:
        self._frame = tree()


def in_a_class_of_a_library() -> Iterator[list[Holder]]:
    recorder = Recorder()
    Table.__module__ = "tables"
    table = recorder.events = Table()
    yield found(lambda: table._frame.append(ElementTree.Element("event")))


@pytest.mark.parametrize(
    ("place", "path"),
    [
        (in_a_variable, "local 'events' of in_a_variable()"),
        (in_its_own_variable, "local 'events' of in_its_own_variable()"),
        (in_a_dict, "Recorder.events['a']['b']"),
        (in_a_slot, "Slots.events"),
        (in_a_class_of_a_library, "Recorder.events"),
    ],
)
def test_it_is_found_by_its_name(place: Callable[[], Iterator[list[Holder]]], path: str) -> None:
    assert [one.path for one in next(place())] == [path]


def test_instances_of_a_class_with_many_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    recorders = [Recorder() for _ in range(4)]
    assert [(one.path, one.new_objects) for one in found(recorders[2].record)] == [
        ("Recorder.events", STEPS)
    ]
    monkeypatch.setattr(longer, "_MOST_INSTANCES", 3)
    assert found(recorders[2].record) == []


class Counting(ElementTree.Element):
    """Has a length of Python's."""

    asked = 0

    def __len__(self) -> int:
        Counting.asked += 1
        return Counting.asked


class Rows(sqlite3.Connection):
    """Has a length by another name."""

    height = 7


def test_no_code_of_the_program_is_asked_for_a_length() -> None:
    assert length_of(tree(3)) == 3
    assert length_of(Counting("run")) is None
    assert length_of(sqlite3.connect(":memory:")) is None
    assert length_of(sqlite3.connect(":memory:", factory=Rows)) is None
    assert length_of(weakref.proxy(tree(3))) is None or Counting.asked == 0
    assert Counting.asked == 0


def test_nothing_of_the_program_is_kept() -> None:
    recorder = Recorder()
    gone = weakref.ref(recorder)
    lengths = Lengths(0)
    recorder.record()
    assert lengths.longer(1)
    del recorder
    assert gone() is None


def test_a_type_without_a_module_is_of_an_extension() -> None:
    made = type("PyTable", (), {"__slots__": (), "__module__": "builtins"})
    assert not is_of_extension(made)
    type.__delattr__(made, "__slots__")  # as one that C code has made
    assert is_of_extension(made)


def test_variables_of_a_frame_are_read_without_a_trace() -> None:
    def values() -> Iterator[int]:
        rows = [1]
        yield from itertools.chain(rows)

    made = values()
    next(made)
    assert [name for name, _ in _core._frame_variables(made.gi_frame)] == ["rows"]
