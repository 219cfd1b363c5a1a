"""memtools._core.Policy: its life, in forked children too, and how it reads memory.

What it decides is tested in C, tests/c/cleanup; what a CleanupPolicy makes of it, beside this."""

from __future__ import annotations

import _testcapi
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memtools import _core
from tests.cleanup.policyleaks import UNKNOWN, core_policy
from tests.kit.children import in_child
from tests.monitor.root import LIMIT, Root
from tests.monitor.test_sampler_life import ENV, PROJECT

Rule = tuple[tuple[int, ...], int, bool]
GIB = 1 << 30
PAID = (GIB, 0, GIB, UNKNOWN, UNKNOWN, UNKNOWN)
HOST, HEAP = 1, 16


def ruled(act: Callable[[int, int], object], *rules: Rule, **settings: Any) -> _core.Policy:
    """A policy with a rule for each of the first actions."""
    core = core_policy(act, **settings)
    for action, rule in enumerate(rules):
        core.set_rule(action, *rule)
    return core


class Actor:
    """Does what is asked for, and remembers it."""

    def __init__(self, *rules: Rule, **settings: Any) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.frees: tuple[int, ...] = PAID
        self.core = ruled(self.act, *rules, **settings)

    def act(self, mask: int, clock: int) -> None:
        self.asked.append((mask, clock, self.core.ticks(clock)))
        for action in range(16):
            if mask >> action & 1:
                self.core.done(action, 1000, *self.frees)  # type: ignore[call-arg]

    def tick(self, n: int) -> None:
        for _ in range(n):
            self.core.tick()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


# --- forks ----------------------------------------------------------------------------------------


def test_a_forked_child_goes_on(root: Root) -> None:
    def run() -> None:
        root.use(0.9)
        assert actor.core.look() == 2
        actor.core.tick(0, 300)
        assert actor.asked == [(3, 0, 799)]
        assert in_child(lambda: actor.core.tick(0, 1000)) == 0

    actor = Actor(((500,), 0, False), ((), HOST, True), root=str(root.path))
    actor.tick(499)
    assert in_child(run) == 0
    root.use(0.1)
    actor.core.tick()
    assert actor.asked == [(1, 0, 500)]


def test_a_child_forked_from_within_act_is_in_it_too() -> None:
    def child() -> None:
        core.tick()
        assert (len(calls), core.ticks(0)) == (1, 2)

    def act(mask: int, clock: int) -> None:
        calls.append(mask)
        if len(calls) == 1:
            assert in_child(child) == 0
        core.done(0, 1, *PAID)

    calls: list[int] = []
    core = ruled(act, ((1,), 0, False))
    core.tick()
    core.tick()
    assert len(calls) == 2


# --- life -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["made", "ticked", "asked"])
def test_whatever_allocation_fails_it_is_a_memory_error_and_all_goes_on(what: str) -> None:
    """Each allocation of Python's; the native parts' failures are tested in C."""

    def act(mask: int, clock: int) -> None:
        pass

    core = core_policy(act)
    core.set_rule(15, (1,), 31, True)  # a mask that is no small int
    calls = {
        "made": lambda: ruled(act, ((1, 2), 31, True), limit=GIB),
        "ticked": lambda: core.tick(0, 1000),
        "asked": lambda: (core.figures(0), core.seconds, core.look_ns, core.ticks(0), core.look()),
    }
    calls[what]()
    count = sys.getrefcount(act)
    failed = at = 0
    while at < 1000:
        _testcapi.set_nomemory(at)
        try:
            calls[what]()
        except MemoryError:
            failed += 1
        else:
            break
        finally:
            _testcapi.remove_mem_hooks()
        at += 1
    assert failed > 0
    assert at < 1000
    assert sys.getrefcount(act) == count
    core.tick()
    assert core.look() == 1 << 15


# --- memory ---------------------------------------------------------------------------------------


def test_what_may_grow_back_is_judged_by_a_reading(root: Root) -> None:
    for again, paid in (0.1, 1), (0.9, 0):
        actor = Actor(((10,), 0, True), root=str(root.path))
        actor.frees = (LIMIT // 2, 0, LIMIT, UNKNOWN, UNKNOWN, UNKNOWN)
        root.use(0.1)
        actor.tick(10)
        root.use(again)
        actor.tick(3)
        assert actor.core.figures(0) == (0, 0, 1)
        actor.tick(1)
        assert actor.core.figures(0) == (paid, 0, 1)


@pytest.mark.parametrize("size", [64, 8])
def test_what_malloc_keeps_is_an_idle_heap(size: int) -> None:
    """Small blocks below one that stays: they cannot go back by themselves."""
    code = f"""
import ctypes
from tests.cleanup.test_core import ruled
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.free.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
core = ruled(print, ((), {HEAP}, True))
assert core.look() == 0
blocks = [libc.malloc({size} << 10) for _ in range(2 << 10)]
libc.malloc({size} << 10)
for block in blocks:
    libc.free(block)
core = ruled(print, ((), {HEAP}, True))
assert core.look() == {int(size == 64)}, core.look()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=PROJECT, env=ENV)
