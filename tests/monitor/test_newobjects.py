"""Objects that become more while a walk does not find who holds them: those that C code keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from memtools._leak.growth import Pace
from memtools._leak.judge import C_HEAP
from memtools._monitor import newobjects
from memtools._monitor import walks as walks_module
from memtools._monitor.newobjects import Counts
from memtools._monitor.walks import HeapWalks
from tests.monitor.program import holder

STEPS, SIZE = 40, 20_000


@pytest.fixture
def kept() -> Iterator[list[int]]:
    """The addresses of lists to which only C code refers, from the end of `keep_by_c` on."""
    addresses: list[int] = []
    yield addresses
    for address in addresses:
        ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))


def keep_by_c(addresses: list[int]) -> None:
    for _ in range(STEPS):
        made = [bytearray(SIZE)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        addresses.append(id(made))


def test_objects_that_only_c_code_keeps_are_found_with_their_bytes(kept):
    counts = Counts(100)
    keep_by_c(kept)
    found = counts.found(100 + STEPS, 1024, 100)
    assert found is not None
    assert found.kept_by_c
    assert found.what.endswith("new list objects a step, which C code keeps") or found.what == (
        "1 new list object a step, which C code keeps"
    )
    assert found.rate_bytes == pytest.approx(SIZE, rel=0.2)


class Page:
    """What the list of a test keeps."""

    def __init__(self) -> None:
        self.text = "x" * SIZE + hex(id(self))


PAGES: list[Any] = []


@pytest.mark.slow
@pytest.mark.parametrize("least", [1024, 10**9])
def test_objects_that_take_what_grows_are_found_with_their_holder(least):
    counts = Counts(0)
    PAGES.extend(Page() for _ in range(STEPS))
    try:
        found = counts.found(STEPS, least, 0)
    finally:
        PAGES.clear()
    if least > SIZE:
        assert found is None or "Page" not in found.what
        return
    assert found is not None
    assert found.what.startswith("1 new tests.monitor.test_newobjects.Page object a step, held by ")
    assert "list tests.monitor.test_newobjects.PAGES" in found.what
    assert found.rate_bytes == pytest.approx(SIZE, rel=0.2)


def test_what_new_objects_share_is_of_none_of_them(kept):
    """Running calls all refer to the application, for example."""
    shared = [bytearray(SIZE) for _ in range(100)]
    counts = Counts(0)
    for _ in range(STEPS):
        made = [shared, bytearray(SIZE)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        kept.append(id(made))
    found = counts.found(STEPS, 1024, 0)
    assert found is not None
    assert found.rate_bytes == pytest.approx(SIZE, rel=0.2)


@pytest.mark.parametrize(("since", "is_found"), [(0, True), (-1000, False)])
def test_objects_that_come_and_go_are_not_new(kept, since, is_found):
    """There are as many as have become more just now, though memory has grown for longer."""
    counts = Counts(0)
    for _ in range(STEPS):
        made = OfCalls()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
        kept.append(id(made))
    found = counts.found(STEPS, 1024, since)
    assert (found is not None and "OfCalls" in found.what) == is_found


class OfCalls:
    def __init__(self) -> None:
        self.data = bytearray(SIZE)


def test_what_comes_with_imported_modules_is_left_out():
    assert {"function", "type", "property", "member_descriptor"} <= newobjects._OF_MODULES
    assert "list" not in newobjects._OF_MODULES


def test_objects_are_compared_with_those_of_an_earlier_look(monkeypatch):
    """Growth without a holder is C's only after a look that follows the one that counts."""
    budget = SimpleNamespace(wait_ns=lambda cost: 0)
    sensor = SimpleNamespace(
        is_shared=False, use=lambda: 1 << 20, in_use=list, left_out=nullcontext
    )
    complaints = []
    walks = HeapWalks(lambda: None, sensor, budget, lambda *said: complaints.append(said))
    walks._census = SimpleNamespace(cut=False, looks=8)
    walks._threads, walks._reached = [1], [(0, 0), (96, 0)]
    rates = {"use": 65536.0, "python": 0.0}
    said = []
    for step in (96, 128):
        seen = SimpleNamespace(
            step=step, steps=[0], since=0, of_c=lambda held, **_: True,
            pace=rates.__getitem__, points=SimpleNamespace(pace=lambda *_: Pace(0.0, 0, 0.0)),
        )  # fmt: skip
        said.append(walks.unheld(seen, 0.0))
        PAGES.append(Page())  # more objects than before
    PAGES.clear()
    assert (said, complaints) == (["", C_HEAP], [])


def test_lengths_are_read_again_as_long_as_something_becomes_longer(monkeypatch):
    lengths = SimpleNamespace(longer=lambda step: next(found))
    found = iter([(holder(0, path="Log.rows"),), (holder(0, path="Log.rows"),), ()])
    monkeypatch.setattr(walks_module, "Lengths", lambda step: lengths)
    budget = SimpleNamespace(wait_ns=lambda cost: 0)
    sensor = SimpleNamespace(
        is_shared=False, use=lambda: 1 << 20, in_use=list, left_out=nullcontext
    )
    walks = HeapWalks(lambda: None, sensor, budget, lambda *_: None)
    walks._census = SimpleNamespace(cut=False, looks=8)
    walks._threads, walks._reached = [1], [(0, 0), (96, 0)]
    rates = {"use": 65536.0, "python": 0.0}
    said = []
    for step in (96, 128, 192, 256, 384):
        seen = SimpleNamespace(
            step=step, steps=[0], since=0, of_c=lambda held, **_: True,
            pace=rates.__getitem__, points=SimpleNamespace(pace=lambda *_: Pace(0.0, 0, 0.0)),
        )  # fmt: skip
        walks.unheld(seen, 0.0)
        said.append([one.path for one in walks.longer])
    assert said == [[], ["Log.rows"], ["Log.rows"], [], []], "by 256 it has stopped"


def test_the_gains_of_a_bounded_number_of_holders_are_known(monkeypatch):
    """A program may replace its containers in each step, under new names."""
    monkeypatch.setattr(walks_module, "MOST_NAMES", 10)
    walks = HeapWalks(lambda: None, None, None, lambda *_: None)
    for step in range(100):
        named = [holder(100, since_step=0, steps=step, path=f"list a[{i}]") for i in (0, 9 + step)]
        walks.holders = tuple(named)
        assert len(walks._gained(step)) == 2
    assert len(walks._gains) == 10
    assert "list list a[0]" in walks._gains, "which has come again"
