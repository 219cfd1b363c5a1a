"""Every pair of methods of a shared object while one waits, and children forked meanwhile."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings

import memtools
from memtools import AuxLoss, Budget, DeviceError, GateHistory, KVPool, _core
from tests.kit.children import start_child
from tests.kit.fakecuda import FakeRuntime, as_cuda
from tests.meta import reentry

#: `make fuzz` takes all pairs, and forks more often
LONG = not settings.default.derandomize
FORKS = 300 if LONG else 2
ROWS, FULL = 64, 1024  # of a gate tensor on the device; copies that a stage holds
HOST = torch.full((1, 8), 1.0)
LARGER = torch.full((300_000, 8), 2.0)  # wants another stage; one for all: they are kept

# --- pairs of methods -----------------------------------------------------------------------------


class Shared:
    """A history with all its copies on their way, and what two threads may do with it."""

    def __init__(self, waits: str) -> None:
        self.budget = Budget("64 MiB")
        self.device = as_cuda(torch.full((ROWS, 8), 2.0))
        self.larger = as_cuda(LARGER)
        self.history = GateHistory(4000, self.budget)
        for _ in range(FULL if waits == "append" else 12):
            self.history.append(self.device)

    def check(self) -> None:
        """Every entry is what was appended, whole: its rows say by whom."""
        if self.history.closed:
            assert self.budget.used == 0
            return
        for entry in self.history:
            assert entry.unique().tolist() == [1.0 if entry.shape[0] == 1 else 2.0]
        self.history.stats()
        assert self.history.pending == 0
        assert self.budget.used == sum(line.reserved for line in self.budget.report())


WAITS: dict[str, Callable[[Shared], object]] = {
    "append": lambda it: it.history.append(it.device),
    "append_larger": lambda it: it.history.append(it.larger),
    "item": lambda it: it.history[0],
    "last": lambda it: it.history[-1],
    "slice": lambda it: it.history[2:9:3],
    "iterate": lambda it: [entry.shape for entry in itertools.islice(it.history, 3)],
    "cat": lambda it: torch.cat(it.history),  # type: ignore[call-overload]
    "stats": lambda it: it.history.stats(5),
    "windows": lambda it: it.history.windows(),
    "state": lambda it: it.history._state(),
    "copy": lambda it: copy.copy(it.history),
    "reset_stats": lambda it: it.history.reset_stats(),
    "close": lambda it: it.history.close(),
}
MEANWHILE: dict[str, Callable[[Shared], object]] = WAITS | {
    "append_host": lambda it: it.history.append(HOST),
    "extend": lambda it: it.history.extend([HOST] * 5),
    "clear": lambda it: it.history.clear(),
    "len": lambda it: len(it.history),
    "figures": lambda it: (it.history.nbytes, it.history.pending, repr(it.history)),
    "report": lambda it: it.budget.report(),
    "budget": lambda it: (it.budget.used, it.budget.available),
    "suballocate": lambda it: it.budget.suballocate("more", "1 MiB"),
    "forget": lambda it: gc.collect(),
}


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, raised


SOME_WAITS = WAITS if LONG else ("append", "append_larger", "item", "cat", "close")


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("waits", SOME_WAITS)
def test_two_methods_while_the_copy_of_one_is_held(fake_cuda: FakeRuntime, waits, meanwhile):
    it = Shared(waits)
    fake_cuda.hold(True)
    first, one = in_thread(lambda: WAITS[waits](it))
    fake_cuda.await_held(1)
    second, other = in_thread(lambda: MEANWHILE[meanwhile](it))
    second.join(timeout=0.02)  # it may be done now, or wait for the first: both are right
    fake_cuda.hold(False)
    for thread in (first, second):
        thread.join(timeout=60)
        assert not thread.is_alive(), "deadlock"
    for error in (*one, *other):
        assert isinstance(error, (ValueError, IndexError, RuntimeError)), error
        assert re.search("closed|evicted|changed|of 0 entries|holds 0|non-empty", str(error))
    it.check()


POOL: dict[str, Callable[[KVPool, Any], object]] = {
    "acquire": lambda pool, lease: pool.acquire(1, 16).release(),
    "would_fit": lambda pool, lease: pool.would_fit(1, 16),
    "stats": lambda pool, lease: pool.stats(),
    "trim": lambda pool, lease: pool.trim(0),
    "update": lambda pool, lease: lease.update(0, *(torch.ones(1, 1, 1, 64),) * 2),
    "fork": lambda pool, lease: lease.fork(1).release(),
    "crop": lambda pool, lease: lease.crop(0),
    "reserve": lambda pool, lease: lease.reserve(16),
    "release": lambda pool, lease: lease.release(),
    "close": lambda pool, lease: pool.close(),
    "report": lambda pool, lease: pool.budget.report(),
}


@pytest.mark.parametrize("meanwhile", POOL)
def test_a_pools_methods_while_an_acquire_waits_for_room(meanwhile):
    budget = Budget("64 KiB")
    pool = KVPool(1, 1, 64, max_tokens=256, max_sequences=4, dtype="float32", limit=budget)
    lease = pool.acquire(1, 96)
    waiter, raised = in_thread(lambda: pool.acquire(1, 64, wait=True, timeout=30.0).release())
    second, other = in_thread(lambda: POOL[meanwhile](pool, lease))
    second.join(timeout=30)
    assert not second.is_alive(), "deadlock"
    assert all(isinstance(error, (memtools.BudgetError, ValueError)) for error in other), other
    if not lease.released:
        lease.release()
    waiter.join(timeout=60)
    assert not waiter.is_alive(), "deadlock"
    assert all(isinstance(error, (TimeoutError, ValueError)) for error in raised), raised
    assert pool.closed or pool._check()


# --- children -------------------------------------------------------------------------------------


def ends_well(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def start_calls(*calls: Callable[[], object]) -> int:
    """The process id of a child that makes the calls; they may refuse, but not wait for ever."""

    def make_calls() -> None:
        for call in calls:
            with contextlib.suppress(ValueError, RuntimeError, MemoryError, DeviceError, OSError):
                call()

    return start_child(make_calls, seconds=20)


@pytest.mark.slow
@pytest.mark.parametrize("waits", WAITS)
def test_a_child_forked_while_a_method_waits_for_the_device(fake_cuda: FakeRuntime, waits):
    it = Shared(waits)
    fake_cuda.hold(True)
    thread, _ = in_thread(lambda: WAITS[waits](it))
    fake_cuda.await_held(1)
    child = start_calls(
        lambda: it.history.append(HOST),
        lambda: it.history[-1],
        lambda: it.history[0],
        lambda: it.history.stats(),
        lambda: copy.copy(it.history),
        it.history.clear,
        it.budget.report,
        it.history.close,
    )
    assert ends_well(child)
    fake_cuda.hold(False)
    thread.join(timeout=60)
    assert not thread.is_alive(), "deadlock"
    it.check()


def _history() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    budget = Budget("8 MiB")
    histories = [GateHistory(100, budget) for _ in range(4)]
    gates = torch.rand(64, 8)
    return budget.report, [
        lambda: histories[0].append(gates),
        histories[1].clear,
        lambda: budget.used,
        budget.report,
        histories.clear,
    ]


def _pool() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    budget = Budget("8 MiB")
    pool = KVPool(1, 1, 64, max_tokens=256, max_sequences=4, dtype="float32", limit=budget)
    lease = pool.acquire(1, 64)

    def work() -> None:
        with pool.acquire(1, 32) as other:
            other.update(0, *(torch.ones(1, 1, 20, 64),) * 2)
        pool.trim(0)

    return work, [
        pool.stats,
        lambda: pool.acquire(1),
        lambda: GateHistory(10, budget).append(torch.rand(64, 8)),
        budget.report,
        lease.release,
        pool.close,
    ]


def _monitor() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    it = reentry.monitor()

    def work() -> None:
        with it.phase("a"):
            it.step()
        it.metrics()

    return work, [it.step, it.metrics, it.phases, lambda: it.mark("x"), it.stop]


def _writer() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    it = reentry.writer()
    row = list(range(len(reentry.COLUMNS)))

    def work() -> None:
        it.append(None, row)
        it.event("a", "b")
        it.phase("c", 5)

    return work, [lambda: it.append(None, row), lambda: it.event("a", "b"), it.close]


def _aux_loss() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    it, loss = AuxLoss(), torch.ones(())
    return lambda: (it.add(loss), it.reset()), [lambda: it.add(loss), it.total, it.reset]


def _policy() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    it = reentry.policy()
    return it.step, [it.step, it.report, it.stop]


def _gradients() -> tuple[Callable[[], object], list[Callable[[], object]]]:
    it = _core.GradSet(reentry.parameters())
    return it.measure, [it.measure, lambda: it.multiply(0.5)]


BUSY = {
    "history": _history,
    "pool": _pool,
    "monitor": _monitor,
    "writer": _writer,
    "aux_loss": _aux_loss,
    "policy": _policy,
    "gradients": _gradients,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUSY)
@pytest.mark.filterwarnings("ignore")
def test_children_forked_beside_a_busy_thread_can_use_what_it_uses(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work, calls = BUSY[kind]()
    stop = threading.Event()

    def body() -> None:
        while not stop.is_set():
            work()

    thread, raised = in_thread(body)
    try:
        assert all(ends_well(start_calls(*calls)) for _ in range(FORKS))
    finally:
        stop.set()
        thread.join(timeout=60)
    assert (thread.is_alive(), raised) == (False, [])
    if kind in ("monitor", "policy"):
        calls[-1]()
