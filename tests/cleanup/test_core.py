"""memtools._core.Policy: counts, reads memory, calls act, and takes what it did.

What it decides by that is tested in C: tests/c/test_policy*.c."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memtools import _core
from tests.cleanup.policyleaks import UNKNOWN, core_policy
from tests.kit.children import in_child
from tests.monitor.root import LIMIT, MIB, Root
from tests.monitor.test_sampler_life import ENV, PROJECT

Rule = tuple[tuple[int, ...], int, bool]
GIB = 1 << 30
PAID = (GIB, 0, GIB, UNKNOWN, UNKNOWN, UNKNOWN)
NOTHING = (GIB, GIB, GIB, 0, 0, GIB)
HOST, DEVICE, CACHE, HEAP, DUE = 1, 2, 8, 16, 32


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


# --- ticks ----------------------------------------------------------------------------------------


def test_acts_at_the_multiples_of_its_cadences() -> None:
    actor = Actor(((100,), 0, False), ((50, 0, 0, 1), 0, True))
    actor.tick(200)
    actor.core.tick(3)
    assert actor.asked == [(2, 0, 50), (3, 0, 100), (2, 0, 150), (3, 0, 200), (2, 3, 1)]
    assert actor.core.why(0) == actor.core.why(1) == DUE
    assert [actor.core.ticks(clock) for clock in range(5)] == [200, 0, 0, 1, 0]
    assert actor.core.figures(0) == (2, 0, 1)


def test_what_frees_nothing_is_backed_off_and_forgotten() -> None:
    actor = Actor(((1,), 0, False), max_cost=1)
    actor.frees = NOTHING
    actor.tick(100)
    assert [at for _, _, at in actor.asked] == [1, 2, 4, 8, 16, 32, 64]
    assert actor.core.figures(0) == (0, 0, 64)
    actor.core.forget()
    actor.tick(1)
    assert actor.core.seconds < 60
    assert actor.core.figures(0) == (0, 0, 1)


def test_the_budget_skips_what_does_not_pay() -> None:
    actor = Actor(((1,), 0, False), max_cost=0)
    actor.frees = NOTHING
    actor.tick(10)
    assert len(actor.asked) == 1
    assert actor.core.figures(0) == (0, 9, 1)
    strict = Actor(((1,), 0, False), max_cost=0, strict=True)
    strict.frees = NOTHING
    strict.tick(10)
    assert len(strict.asked) == 10


def test_together_it_acts_at_multiples_with_nothing_too() -> None:
    actor = Actor(((0, 1), 0, False), together=5)
    actor.core.tick(1)
    actor.tick(10)
    assert actor.asked == [(1, 0, 5), (0, 0, 10)]


# --- act ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
def test_what_act_raises_leaves_tick_and_is_asked_again(error: type[BaseException]) -> None:
    def act(mask: int, clock: int) -> None:
        asked.append(mask)
        if len(asked) == 1:
            raise error("no")
        core.done(0, 1, *PAID)

    asked: list[int] = []
    core = ruled(act, ((2,), 0, False))
    core.tick()
    with pytest.raises(error, match="no"):
        core.tick()
    core.tick()
    assert asked == [1, 1]
    core.tick(0, 1)
    core.tick(0, 1)
    assert len(asked) == 3


def test_a_tick_from_within_act_only_counts() -> None:
    def act(mask: int, clock: int) -> None:
        asked.append((mask, core.ticks(0)))
        core.tick()
        assert core.look() == 1
        core.done(0, 1, *PAID)

    asked: list[tuple[int, int]] = []
    core = ruled(act, ((2,), 0, False))
    for _ in range(3):
        core.tick()
    assert asked == [(1, 2), (1, 4)]
    assert core.ticks(0) == 5


class Slow:
    """Acts until it is let go; `inside` is set meanwhile."""

    def __init__(self) -> None:
        self.inside, self.go, self.calls = threading.Event(), threading.Event(), 0
        self.core = ruled(self.act, ((1,), 0, False))
        self.thread = threading.Thread(target=self.core.tick)

    def act(self, mask: int, clock: int) -> None:
        self.calls += 1
        self.inside.set()
        assert self.go.wait(60)
        self.core.done(0, 1, *PAID)

    def __enter__(self) -> Slow:
        self.thread.start()
        assert self.inside.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self.thread.join()


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


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_acts_goes_on() -> None:
    def run() -> None:
        slow.go.set()
        slow.core.tick()
        assert slow.calls == 2
        slow.core.tick()
        assert slow.calls == 3

    with Slow() as slow:
        assert in_child(run) == 0


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


# --- memory ---------------------------------------------------------------------------------------


def test_pressure_is_that_of_the_container(root: Root) -> None:
    actor = Actor(((), HOST, False), pressure=0.8, root=str(root.path))
    root.use(0.79)
    assert actor.core.look() == 0
    root.use(0.8)
    assert actor.core.look() == 1
    actor.core.tick()
    assert actor.asked == [(1, 0, 1)]
    assert actor.core.why(0) == HOST
    assert actor.core.looks == 2
    assert 0 < actor.core.look_ns < 10**9


def test_pressure_is_that_of_a_given_limit(root: Root) -> None:
    root.use(0.5)
    assert Actor(((), HOST, False), root=str(root.path), limit=LIMIT // 2).core.look() == 1
    assert Actor(((), HOST, False), root=str(root.path), limit=LIMIT * 8 // 10).core.look() == 0


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


@pytest.mark.slow
@pytest.mark.usefixtures("_fake_library")
def test_devices_are_read_by_the_allocator_and_the_driver(
    allocator: Path,
) -> None:
    code = f"""
import ctypes, os, sys
import torch
from pathlib import Path
from tests.cleanup.test_core import ruled
from tests.kit.fakecuda import FakeRuntime
MIB = {MIB}
allocator, cuda = ctypes.CDLL(sys.argv[1]), FakeRuntime(Path(sys.argv[2]))
def put(device, *mib):
    allocator.fake_allocator_set(device, *[ctypes.c_int64(x * MIB) for x in mib])
cuda.reset()
cuda.set_capacity(1000 * MIB)
allocator.fake_allocator_register()
core = ruled(print, ((), {CACHE}, True), ((), {DEVICE}, False), devices=2)
assert core.look() == 0
put(0, 100, 300, 0, 200)
put(1, 100, 449, 0, 200)
cuda.set_device(1)
stream = cuda.stream()
allocator.fake_allocator_begin()
assert core.look() == 0
put(1, 100, 450, 0, 200)
assert core.look() == 1
if os.fork() == 0:
    core.forget()
    assert core.look() == 0, "the devices are the parent's"
    core.done(0, 1, -1, -1, -1, 5, 4, 5)
    os._exit(0)
assert os.wait()[1] == 0
"""
    library = PROJECT / "build/c/libfakecudart.so"
    subprocess.run(
        [sys.executable, "-c", code, allocator, library], check=True, timeout=120, cwd=PROJECT,
        env=ENV | {"MEMTOOLS_CUDART": str(library)},
    )  # fmt: skip
