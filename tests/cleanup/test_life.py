"""CleanupPolicy from start to stop: Python's gc, interrupts, forks, workers, the process's end."""

from __future__ import annotations

import contextlib
import copy
import gc
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from memtools import CleanupPolicy
from memtools._cleanup import actions, engine
from memtools.types import ActionReport
from tests.cleanup.policycases import gc_as_found, quiet, times  # noqa: F401 - a fixture
from tests.kit.ownprocess import PROJECT, in_own_process

# --- gc ---


@contextlib.contextmanager
def managing(**settings: Any) -> Iterator[CleanupPolicy]:
    """A policy that runs, past its warm-up."""
    with CleanupPolicy(**settings) as policy:
        policy.step(2)
        yield policy


@pytest.mark.slow
def test_gc_is_managed_from_warm_up_to_the_end():
    policy = CleanupPolicy()
    with policy:
        policy.step()
        assert gc.isenabled()
        assert not policy.report().manages_gc
        policy.step()
        assert not gc.isenabled()
        found = policy.report()
        assert found.manages_gc
        assert found.frozen_objects >= gc.get_freeze_count() > 10_000
        assert found["freeze"].count == 1
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert not policy.report().manages_gc


@pytest.mark.slow
def test_young_collects_come_while_gc_is_managed_and_only_then():
    policy = CleanupPolicy(None, strict=True)  # at its cadence, whatever it costs
    for _ in range(30):
        policy.step()
    with policy:
        for _ in range(30):
            policy.step()
    during = times(policy, "gc_young")
    for _ in range(30):
        policy.step()
    assert times(policy, "gc_young") == during == 3


def young_collects(monkeypatch: pytest.MonkeyPatch, cost_ns: int) -> ActionReport:
    """Forty of them, that take what the test says and free nothing. The time between them is the
    machine's own: what they take is nothing of it, or more than all of it."""
    clock = SimpleNamespace(ns=0)

    def perf_counter_ns() -> int:
        clock.ns += cost_ns // 2  # as an action begins and as it ends, among other looks
        return clock.ns

    told = SimpleNamespace(perf_counter_ns=perf_counter_ns, monotonic_ns=time.monotonic_ns)
    monkeypatch.setattr(engine, "time", told)
    monkeypatch.setattr(actions, "time", told)
    with managing(gc_every=None) as policy:
        for _ in range(40):
            policy.step(10)
        return policy.report()["gc_young"]


@pytest.mark.slow
def test_young_collects_are_not_backed_off_while_they_are_cheap(monkeypatch: pytest.MonkeyPatch):
    found = young_collects(monkeypatch, 0)
    assert found.share < 0.001
    assert (found.backoff, found.count) == (1, 40)


@pytest.mark.slow
def test_young_collects_that_are_dear_and_free_nothing_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
):
    found = young_collects(monkeypatch, 2_000_000_000_000)
    assert found.share > 1
    assert (found.count, found.skipped) == (1, 39)


@pytest.mark.slow
def test_young_collects_that_free_some_are_not_backed_off(monkeypatch: pytest.MonkeyPatch):
    """2 MiB at a time is less than what pays, and nothing else would free it."""
    monkeypatch.setattr(engine, "CHEAP", -1.0)
    with managing(gc_every=None) as policy:
        for _ in range(40):
            holder = SimpleNamespace(pages=mmap.mmap(-1, 2 << 20))
            holder.pages.write(b"x" * (2 << 20))
            holder.me = holder
            del holder
            policy.step(10)
        found = policy.report()["gc_young"]
    assert found.paid == 0
    assert (found.count, found.backoff) == (40, 1)


@pytest.mark.slow
def test_a_second_run_begins_with_warm_up_again():
    policy = CleanupPolicy()
    for run in (1, 2, 3):
        with policy:
            policy.step()
            assert gc.isenabled()
            policy.step()
            assert not gc.isenabled()
        assert times(policy, "freeze") == run


@pytest.mark.slow
def test_the_first_epochs_collect_is_left_to_the_end_of_warm_up():
    policy = CleanupPolicy(gc_every=None)
    with policy:
        for _ in range(2):
            with policy.epoch():
                policy.step(2)
    assert times(policy, "gc") >= 1
    assert times(policy, "freeze") == 1
    again = CleanupPolicy(gc_every=None)
    with again, again.epoch():
        assert times(again, "gc") == 0


@pytest.mark.slow
def test_without_a_block_gc_is_left_alone():
    policy = CleanupPolicy()
    policy.step(50)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert "freeze" not in [action.name for action in policy.report().actions]


@pytest.mark.slow
def test_an_exception_passes_and_gc_is_put_back():
    policy = CleanupPolicy()
    with pytest.raises(ZeroDivisionError), policy:
        raise ZeroDivisionError(policy.step(2))
    assert gc.isenabled()
    assert not policy.running


@pytest.mark.slow
def test_nested_blocks_and_several_policies():
    outer, inner = CleanupPolicy(), CleanupPolicy()
    with outer:
        outer.step(2)
        with outer, inner:
            inner.step(2)
            assert inner.report().manages_gc
        assert not gc.isenabled()
        assert outer.running
        assert not inner.running
    assert gc.isenabled()


@pytest.mark.slow
def test_stop_without_start_and_twice():
    policy = CleanupPolicy()
    policy.stop()
    policy.start()
    policy.step(2)
    policy.stop()
    policy.stop()
    assert gc.isenabled()


@pytest.mark.slow
def test_a_policy_that_nobody_holds_any_more_manages_nothing():
    policy = CleanupPolicy()
    policy.start()
    policy.step(2)
    core = policy._core
    gone = weakref.ref(policy)
    del policy
    assert gone() is None
    assert gc.isenabled()
    core.tick(0, 200)  # as a function does that it decorates


# --- processes ---


@pytest.mark.slow
@pytest.mark.parametrize("how", ["", "os.fork() and os.wait()\n"])
def test_at_the_end_of_the_process_finalizers_run(how):
    out = in_own_process(
        "import memtools, gc, os\n"
        "class Late:\n"
        "    def __del__(self): print('closed', gc.isenabled(), flush=True)\n"
        "a = Late(); a.me = a\n"
        "policy = memtools.CleanupPolicy()\n"
        "policy.start(); policy.step(2)  # puts it aside\n"
        "del a\n" + how,
        warnings="error",
    )
    assert out == "closed True\n" * (2 if how else 1)


def test_a_policy_loads_what_cleanup_needs_and_nothing_else():
    code = (
        "import sys; from memtools import CleanupPolicy\n"
        "print(*sorted({name.split('.')[1] for name in sys.modules if name[:9] == 'memtools.'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "_base _census _cleanup _core _version errors\n"


def test_neither_the_package_nor_a_policy_imports_torch():
    code = (
        "import sys, memtools\n"
        "policy = memtools.CleanupPolicy()\n"
        "with policy, policy.epoch():\n"
        "    for _ in range(300): policy.step()\n"
        "policy.cleanup(); print(policy.report(), file=sys.stderr) if 0 else str(policy.report())\n"
        "print('torch' in sys.modules, policy.report()['gc'].count > 0)\n"
    )
    assert in_own_process(code, warnings="error") == "False True\n"


def test_without_torch_host_actions_work():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import memtools\n"
        "with memtools.CleanupPolicy(strict=True) as policy, policy.epoch():\n"
        "    policy.step(100)\n"
        "found = policy.report()\n"
        "print([(a.name, a.count) for a in found.actions if a.count])\n"
        "print(found['empty_cache'].verdict)\n"
    )
    assert in_own_process(code, warnings="error") == (
        "[('gc', 3), ('trim', 2), ('freeze', 1)]\nno CUDA in this process\n"
    )


@pytest.mark.slow
def test_forked_while_another_thread_acts_the_child_can_act():
    policy = quiet()
    inside, go = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go.wait()

    handle = policy.add("wait", wait, 1)
    thread = threading.Thread(target=policy.step)
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # rather than to wait for ever
        handle.remove()
        os._exit(0 if len(policy.cleanup("gc")) == 1 else 1)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


# --- workers ---


class State(Dataset[list[int]]):
    """What a worker says of its gc."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> list[int]:
        return [gc.isenabled(), gc.get_freeze_count()]


@pytest.mark.slow
def test_spawned_workers_of_a_data_loader():
    policy = CleanupPolicy(ranks=False)
    with policy:
        policy.step(2)
        loader = DataLoader(
            State(), num_workers=1, worker_init_fn=policy.worker_init,
            collate_fn=list, multiprocessing_context=multiprocessing.get_context("spawn"),
        )  # fmt: skip
        found = [item for batch in loader for item in batch]
        assert not gc.isenabled()
    assert [enabled for enabled, _ in found] == [True, True]
    assert all(frozen > 10_000 for _, frozen in found)


Copier = Callable[[CleanupPolicy], CleanupPolicy]


def pickled(policy: CleanupPolicy) -> CleanupPolicy:
    return pickle.loads(pickle.dumps(policy))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_has_the_same_settings_and_is_not_running(copied: Copier):
    policy = CleanupPolicy({"update": 3, "rollout": 1}, trim_every=7, strict=True)
    policy.add("note", lambda: None, 1)
    with policy:
        policy.step(5)
        other = copied(policy)
        assert not other.running
    assert repr(other) == "CleanupPolicy(not running, 0 updates)"
    assert other.report()["gc"].when == "3 updates, 1 epoch, 1 rollout; pressure"
    assert other.report()["trim"].when == policy.report()["trim"].when
    assert "note" not in [action.name for action in other.report().actions]


def test_time_before_the_start_is_not_the_policys():
    policy = CleanupPolicy()
    while policy.report().seconds < 0.05:
        pass
    begun = time.monotonic()
    with policy:
        assert policy.report().seconds <= time.monotonic() - begun
        policy.step()
    ended = policy.report().seconds
    assert policy.report().seconds == ended
    with policy:
        assert policy.report().seconds >= ended


def test_leaking_cycles_of_bytes_stay_bounded():
    """4 MiB a step that only a cycle holds: without the policy the collector, which counts objects,
    frees none of them. Living objects are counted, as resident memory depends on malloc. Strict: a
    collect that another program interrupts takes longer: the policy would collect less often."""
    code = (
        "import gc, sys, memtools, contextlib, weakref\n"
        "class Holder: pass\n"
        "gc.collect(); gc.freeze(); gc.set_threshold(20000)\n"
        "chosen = sys.argv[1:]\n"
        "policy = memtools.CleanupPolicy(strict=True) if chosen else contextlib.nullcontext()\n"
        "living, most = weakref.WeakSet(), 0\n"
        "with policy:\n"
        "    for step in range(150):\n"
        "        holder = Holder(); holder.data = b'x' * (4 << 20); holder.me = holder\n"
        "        living.add(holder); most = max(most, len(living))\n"
        "        if chosen: policy.step()\n"
        "print(most)\n"
    )

    def most_living(*arguments: str) -> int:
        command = [sys.executable, "-c", code, *arguments]
        return int(subprocess.run(command, cwd=PROJECT, capture_output=True, check=True).stdout)

    assert most_living() == 150
    assert most_living("policy") <= 20
