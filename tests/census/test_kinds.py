"""What keeps objects without being a list or a dict: instances of classes derived from str, bytes
and int, text in memory, objects of C with contents of their own, and the interpreter itself."""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import io
import itertools
import json
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import memtools
from memtools._census.holders import holder_of
from tests.census.test_growth import STEPS, named

BIG = 20_000


class Text(str):
    pass


class Slotted(str):
    __slots__ = ("tree",)


class Blob(bytes):
    pass


class Number(int):
    pass


class Sink:
    def write(self, data: bytes) -> int:
        return len(data)


class Sample:
    def __init__(self) -> None:
        self.data: Any = None


def big() -> bytearray:
    return bytearray(BIG)


def with_attribute(kind: Callable[[Any], Any], value: Any) -> Callable[[Any], Callable[[int], Any]]:
    """A program that keeps instances of a class with an attribute that is large."""

    def begin(keeper: Any) -> Callable[[int], Any]:
        keeper.kept = []

        def step(i: int) -> None:
            made = kind(value)
            made.tree = big()
            keeper.kept.append(made)

        return step

    return begin


def stream(keeper: Any) -> Callable[[int], object]:
    keeper.log = io.StringIO()
    return lambda i: keeper.log.write("x" * BIG)


def stream_that_was_rewound(keeper: Any) -> Callable[[int], object]:
    keeper.log = io.StringIO()
    keeper.log.write("x")
    keeper.log.seek(0)
    keeper.log.read(1)
    return lambda i: keeper.log.write("x" * (BIG // 4))


def elements(keeper: Any) -> Callable[[int], object]:
    keeper.root = ET.Element("root")

    def step(i: int) -> None:
        ET.SubElement(keeper.root, "doc").text = str(i) * (BIG // len(str(i)))

    return step


def elements_below_one(keeper: Any) -> Callable[[int], object]:
    keeper.root = ET.Element("root")
    body = ET.SubElement(keeper.root, "body")

    def step(i: int) -> None:
        ET.SubElement(body, "doc").text = str(i) * (BIG // len(str(i)))

    return step


def pickler(keeper: Any) -> Callable[[int], object]:
    keeper.pickler = pickle.Pickler(Sink())

    def step(i: int) -> None:
        keeper.pickler.dump([str(i) * (BIG // len(str(i)))])

    return step


def array_that_fills(keeper: Any) -> Callable[[int], object]:
    keeper.store = np.empty(10_000, dtype=object)
    return lambda i: keeper.store.__setitem__(i, big())


def lagging_tee(keeper: Any) -> Callable[[int], object]:
    keeper.first, keeper.second = itertools.tee(iter(big, None))
    return lambda i: next(keeper.first)


def samples_that_load(keeper: Any) -> Callable[[int], object]:
    keeper.samples = [Sample() for _ in range(1000)]
    return lambda i: setattr(keeper.samples[i], "data", big())


def rows_that_load(keeper: Any) -> Callable[[int], object]:
    keeper.rows = {i: (i, Sample()) for i in range(300)}
    return lambda i: setattr(keeper.rows[i][1], "data", big())


HISTORY: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("history")
NESTED: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("nested")


def context_variable(keeper: Any) -> Callable[[int], object]:
    HISTORY.set([])
    return lambda i: HISTORY.get().append(big())


def below_a_context_variable(keeper: Any) -> Callable[[int], object]:
    NESTED.set({"calls": []})
    return lambda i: NESTED.get()["calls"].append(big())


def ctypes_arrays(keeper: Any) -> Callable[[int], object]:
    keeper.handles = []
    return lambda i: keeper.handles.append((ctypes.c_char * BIG)())


LONG = (*STEPS, 64, 96, 128, 160, 192, 224, 256, 288)
#: a program, the path of its holder, and at which steps it is looked at
KEEPERS: dict[str, tuple[Callable[[Any], Callable[[int], object]], str, tuple[int, ...]]] = {
    "str": (with_attribute(Text, "a title"), "list Keeper.kept", STEPS),
    "str with slots": (with_attribute(Slotted, "a title"), "list Keeper.kept", STEPS),
    "long str": (with_attribute(Text, "a title" * 999), "list Keeper.kept", STEPS),
    "bytes": (with_attribute(Blob, b"x"), "list Keeper.kept", STEPS),
    "int": (with_attribute(Number, 7), "list Keeper.kept", STEPS),
    "StringIO": (stream, "StringIO Keeper.log", STEPS),
    "StringIO that was rewound": (stream_that_was_rewound, "StringIO Keeper.log", STEPS),
    "Element": (elements, "Element Keeper.root", STEPS),
    "Element below another": (elements_below_one, "Element Keeper.root", STEPS),
    "Pickler": (pickler, "Pickler Keeper.pickler", STEPS),
    "array of objects": (array_that_fills, "ndarray Keeper.store", STEPS),
    "tee": (lagging_tee, "_tee_dataobject Keeper.second, whose entries grow", LONG),
    "instances": (samples_that_load, "list Keeper.samples, whose entries grow", STEPS),
    "instances in tuples": (rows_that_load, "dict Keeper.rows, whose entries grow", LONG),
    "ContextVar": (context_variable, "list ContextVar 'history'", STEPS),
    "below a ContextVar": (below_a_context_variable, "list ContextVar 'nested'['calls']", STEPS),
    "ctypes arrays": (ctypes_arrays, "list Keeper.handles", STEPS),
}


SLOW = {name for name, (_, _, steps) in KEEPERS.items() if steps is LONG}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in KEEPERS]
)
def test_a_keeper_is_named_with_its_rate(keeper, case):
    begin, path, steps = KEEPERS[case]
    found = named(begin(keeper), steps)
    assert path in found, list(found)
    least = BIG // 4 if case == "StringIO that was rewound" else BIG
    most = 4 if case == "StringIO that was rewound" else 1
    assert 0.8 * least < found[path].rate_bytes < 1.5 * most * least
    assert len(found) == 1


def test_an_array_of_objects_says_how_full_it_is(keeper):
    holder = named(array_that_fills(keeper))["ndarray Keeper.store"]
    assert (holder.length, holder.capacity) == (48, 10_000)


def test_entries_that_grow_are_no_evidence_of_a_leak(keeper):
    (holder,) = named(samples_that_load(keeper)).values()
    assert (holder.kind, holder.only_gained, holder.length) == ("entries", False, 1000)


def test_a_container_whose_length_changes_is_not_said_to_have_entries_that_grow(keeper):
    keeper.samples = [Sample() for _ in range(1000)]

    def step(i: int) -> None:
        keeper.samples[i].data = big()
        keeper.samples.pop()
        if i % 16 == 0:
            keeper.samples += [Sample() for _ in range(17)]

    assert named(step) == {}


def test_what_grows_in_a_container_of_the_container_is_named_alone(keeper):
    keeper.logs = [[] for _ in range(40)]
    assert list(named(lambda i: keeper.logs[7].append(big()))) == ["list Keeper.logs[7]"]


def test_callbacks_of_atexit_are_named(keeper):
    added: list[Callable[..., object]] = []

    def save(data: bytearray) -> None:
        pass

    def step(i: int) -> None:
        atexit.register(save, big())
        added.append(save)

    try:
        found = named(step)
    finally:
        atexit.unregister(save)
    assert found["callbacks of atexit.register()"].rate_bytes == pytest.approx(BIG, rel=0.1)


def test_a_list_that_atexit_keeps_is_named_by_it():
    kept: list[Any] = []

    def save(data: list[Any]) -> None:
        pass

    atexit.register(save, kept)
    try:
        with_locals = {name.partition(" local ")[0] for name in named(lambda i: kept.append(big()))}
        assert with_locals == {"list"}
        before = memtools.census()
        kept += [Sample() for _ in range(50)]
        held = memtools.census().diff(before).holders()
        assert any("atexit.register()" in h.path or "'kept'" in h.path for h in held)
    finally:
        atexit.unregister(save)


def test_the_value_of_a_context_variable_is_found_from_the_object():
    HISTORY.set([Sample() for _ in range(20)])
    (holder,) = holder_of(HISTORY.get()[3:9])
    assert holder.path == "list ContextVar 'history'"
    assert holder.new_objects == 6


PROGRAM = """
import contextvars, ctypes, io, json, logging, xml.etree.ElementTree as ET
import memtools

class Text(str):
    pass

SIZE, VARIABLE = 20_000, contextvars.ContextVar("history")
texts, log, root = [], io.StringIO(), ET.Element("root")
VARIABLE.set([])
keep = ctypes.pythonapi.Py_IncRef

def text(i):
    texts.append(Text(i))
    texts[-1].tree = bytearray(SIZE)

def printed(i):
    log.write("x" * SIZE)

def element(i):
    ET.SubElement(root, "doc").text = str(i) * (SIZE // len(str(i)))

def history(i):
    VARIABLE.get().append(bytearray(SIZE))

def given_to_c(i):
    keep(ctypes.py_object([object() for _ in range(1000)]))

logging.getLogger("memtools").setLevel(logging.ERROR)
for step in (text, printed, element, history, given_to_c):
    called = set()
    with memtools.MemoryMonitor(limit="8 GiB") as monitor:
        monitor.on_leak(lambda one: called.add(one.kind))
        for i in range(130):
            step(i)
            monitor.step()
        found = {one.holder or one.kind: one.what for one in monitor.findings()}
    print(json.dumps([step.__name__, found, sorted(called)]))
"""


@pytest.mark.slow
def test_a_monitor_names_keepers_and_never_says_c_of_python_objects():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    said = {name: (found, kinds) for name, found, kinds in map(json.loads, run.stdout.splitlines())}
    assert {name: list(found) for name, (found, _) in said.items()} == {
        "text": ["list texts"],
        "printed": ["StringIO log"],
        "element": ["Element root"],
        "history": ["list ContextVar 'history'"],
        "given_to_c": ["Python objects"],
    }
    assert said["given_to_c"][0]["Python objects"].endswith(", which C code keeps")
    assert all("C heap" not in kinds for _, kinds in said.values())
