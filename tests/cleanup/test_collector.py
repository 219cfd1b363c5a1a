"""ManagedGc: the collector taken over for a training loop and given back as it was found."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from memtools._cleanup import collector
from memtools._cleanup.collector import ManagedGc
from tests.kit.interrupts import interrupted


def state() -> tuple[bool, tuple[int, ...], bool]:
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > collector._IMMORTAL


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Whatever a test does, the next one and pytest find the collector as it was."""
    enabled, thresholds, frozen = state()
    assert not frozen
    gc.enable()
    yield
    left = len(collector._shared.members)
    collector._shared.members.clear()
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()
    assert not left, "a test has left a manager"


@pytest.fixture
def nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Puts all objects aside as if the interpreter had done so at its start: to collect takes no
    tenth of a second for a while, until they are thawed."""

    def put_aside() -> None:
        gc.freeze()
        monkeypatch.setattr(collector, "_IMMORTAL", gc.get_freeze_count())

    return put_aside


def begun() -> ManagedGc:
    manager = ManagedGc()
    manager.begin()
    return manager


@pytest.mark.slow
@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_the_last_one_out_restores_in_whatever_order(order):
    before = state()
    managers = {name: begun() for name in "abc"}
    managers["a"].freeze()
    managers["b"].freeze()
    for name in order[:2]:
        managers[name].end()
        assert (managers[name].managed, managers[name].frozen) == (False, 0)
        assert (gc.isenabled(), managers[order[2]].managed) == (False, True)
        assert managers[order[2]].frozen >= gc.get_freeze_count() > 0
    managers[order[2]].end()
    assert state() == before


@pytest.mark.slow
@pytest.mark.parametrize("enabled", [True, False])
def test_what_others_change_within_does_not_stay(enabled, nothing_to_collect):
    (gc.enable if enabled else gc.disable)()
    before = state()

    def change() -> None:
        (gc.disable if enabled else gc.enable)()
        gc.set_threshold(7, 3, 2)
        gc.freeze()

    for early in (False, True):
        nothing_to_collect()
        manager = begun()
        if early:
            change()
            gc.unfreeze()
        manager.freeze()
        change()
        manager.end()
        assert state() == before


@pytest.mark.slow
def test_threads_that_begin_and_end_at_the_same_time():
    before, gate, faults = state(), threading.Barrier(4), []

    def run() -> None:
        gate.wait()
        for _ in range(8):
            manager = begun()
            with collector._shared.lock:  # collecting each time would take long
                collector._shared.freeze(manager)
                if gc.isenabled():
                    faults.append("enabled")
            manager.end()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert state() == before
    assert collector._shared.found is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "company"), [("begin", False), ("freeze", False), ("end", False), ("end", True)]
)
def test_an_interrupt_anywhere_leaves_a_state_that_end_completes(name, company, nothing_to_collect):
    before, places = state(), 0
    while True:
        nothing_to_collect()
        other = begun() if company else None
        manager = ManagedGc()
        if name != "begin":
            manager.begin()
        if name == "end":
            manager.freeze()
        struck = interrupted(collector, places, getattr(manager, name))
        if manager.managed and name != "end":
            manager.freeze()
        if manager.managed:
            manager.end()
        if other is not None:
            other.end()
        assert state() == before, places
        assert not collector._shared.members, places
        if not struck:
            break
        places += 1
    assert places >= 3  # the function itself, and what it calls
