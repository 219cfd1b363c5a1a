"""Threads, fork, interpreter exit, and memory over a hundred thousand appends."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from memtools import AuxLoss, GateHistory
from tests.kit.growth import least_growth
from tests.kit.long import LONG


def run_all(*workers: object) -> None:
    """Starts all at once; a worker's exception fails the test, and so does a deadlock."""
    start, errors = threading.Barrier(len(workers)), []

    def body(worker: object) -> None:
        start.wait()
        try:
            worker()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "deadlock"
    assert errors == []


def test_appends_from_several_threads_are_all_recorded_whole():
    history = GateHistory(max_entries=100_000)

    def append(value: float) -> None:
        tensor = torch.full((5, 8), value)
        for _ in range(2000):
            history.append(tensor)

    run_all(*(lambda value=value: append(value) for value in (1.0, 2.0, 3.0, 4.0)))
    assert history.stats().entries == len(history) == 8000
    assert history.stats().tokens == 40_000
    assert all((entry == entry[0, 0]).all() for entry in history)
    assert torch.tensor(history.stats().importance).eq(2.5).all()


def test_readers_writers_and_closers_do_not_crash_each_other():
    for _ in range(20):
        history = GateHistory(max_entries=50)

        def write(history: GateHistory = history) -> None:
            try:
                for n in range(300):
                    history.append(torch.rand(n % 9, 4))
            except ValueError as error:
                assert "closed" in str(error)

        def read(history: GateHistory = history) -> None:
            try:
                for _ in range(100):
                    history.stats()
                    list(history[-5:])
                    history.clear()
            except ValueError as error:
                assert "closed" in str(error)

        run_all(write, write, read, history.close)


def test_a_tensor_freed_or_resized_by_another_thread_while_it_is_read():
    history = GateHistory(max_entries=100)

    def churn() -> None:
        for n in range(3000):
            tensor = torch.rand(64, 8)
            holder = [tensor]
            del tensor
            worker = threading.Thread(target=holder.clear) if n % 100 == 0 else None
            if worker:
                worker.start()
            history.append(holder[0] if holder else torch.zeros(64, 8))
            if worker:
                worker.join()

    run_all(churn, churn)
    assert history.appended == 6000
    assert all(entry.min() >= 0 and entry.max() <= 1 for entry in history)


def test_aux_losses_from_several_threads_add_up():
    aux = AuxLoss()
    run_all(*([lambda: [aux.add(torch.ones(())) for _ in range(500)]] * 4))
    assert aux.total().item() == 2000


@pytest.mark.slow
def test_fork_while_another_thread_appends():
    history = GateHistory(max_entries=50)
    stop = threading.Event()

    def append() -> None:
        while not stop.is_set():
            history.append(torch.full((100, 8), 0.5))

    worker = threading.Thread(target=append)
    worker.start()
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                try:
                    assert all((entry == 0.5).all() for entry in history)
                    history.append(torch.full((100, 8), 0.5))
                    assert history.stats().entries == history.appended
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        worker.join()


AT_EXIT = """
import atexit, sys, threading, torch, memtools
kept = memtools.GateHistory()
kept.append(torch.rand(3, 4))
sys.modules["somewhere"] = kept
class Node: pass
node = Node(); node.self = node; node.history = kept[:]; node.aux = memtools.AuxLoss()
node.aux.add(torch.ones(1, requires_grad=True).sum())
atexit.register(lambda: kept.append(torch.rand(3, 4)))
class AtDel:
    def __del__(self):
        kept.append(torch.rand(3, 4)); kept[0]
at_del = AtDel()
gates = torch.rand(3, 4)  # made here: torch itself aborts when a daemon thread is in torch.rand()
def forever():
    while True:
        kept.append(gates)
threading.Thread(target=forever, daemon=True).start()
print("done")
"""


@pytest.mark.slow
def test_interpreter_shutdown_with_histories_everywhere():
    command = [sys.executable, "-X", "faulthandler", "-c", AT_EXIT]
    for _ in range(10 if LONG else 1):
        program = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (program.returncode, program.stdout) == (0, "done\n"), program.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("frozen")
def test_a_dead_history_gives_its_memory_back(rss):
    gates = torch.rand(1 << 20, 4)
    gc.collect()

    def use_and_drop(count: int) -> None:
        for _ in range(count):
            before = rss()
            history = GateHistory(max_entries=10, max_bytes="256 MiB")
            for _ in range(4):
                history.append(gates)
            assert rss() - before > 60 << 20
            ref = weakref.ref(history)
            del history
            gc.collect()
            assert ref() is None

    assert least_growth(use_and_drop, 12, rss) < 8 << 20


@pytest.mark.slow
def test_a_hundred_thousand_appends_after_the_limit_cost_no_memory(rss):
    history = GateHistory(max_entries=1000, max_bytes="32 MiB")
    gates = torch.softmax(torch.randn(512, 8), -1)
    for _ in range(2000):
        history.append(gates)
    gc.collect()

    def more(count: int) -> None:
        for _ in range(count):
            history.append(gates)
            assert history.nbytes <= 32 << 20

    assert least_growth(more, 100_000, rss) < 1 << 20
    assert history.stats().tokens == 102_000 * 512


class Meddler:
    """A garbage cycle whose finalizer does something to a history that is just being read."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self.itself, self.meddle = self, meddle

    def __del__(self) -> None:
        self.meddle()


MEDDLE: dict[str, Callable[[GateHistory], object]] = {
    "close": GateHistory.close,
    "append": lambda history: history.closed or history.append(torch.rand(2000, 8)),
    "clear": lambda history: history.closed or history.clear(),
}
READ: dict[str, Callable[[GateHistory], object]] = {
    "index": lambda history: history[1],
    "cat": torch.cat,
    "stats": GateHistory.stats,
    "windows": GateHistory.windows,
    "slice": lambda history: history[1:],
    "window": lambda history: history.stats(window=2),
    "copy": copy.copy,
    "save": lambda history: history._state(),
}


def read_while_meddled_with(reading: str, meddling: str, pause: int) -> bool:
    """Whether the read came through when the collector ran after `pause` more allocations."""
    history = GateHistory(max_entries=4, keep="topk", top_k=2)
    history.extend([torch.rand(3, 8)] * 4)
    gc.collect()
    gc.disable()
    Meddler(lambda: MEDDLE[meddling](history))
    before = gc.get_threshold()
    gc.set_threshold(gc.get_count()[0] + 1 + pause)
    gc.enable()
    try:
        READ[reading](history)
    except (RuntimeError, ValueError, IndexError):
        return False
    finally:
        gc.set_threshold(*before)
        gc.collect()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("meddling", MEDDLE)
@pytest.mark.parametrize("reading", READ)
def test_finalizers_that_change_the_history_while_it_is_read(reading, meddling):
    gc.collect()
    gc.freeze()  # or each of the collections goes through all of torch
    try:
        came_through = [read_while_meddled_with(reading, meddling, pause) for pause in range(40)]
    finally:
        gc.unfreeze()
    assert any(came_through)
