"""ManagedGc: the collector taken over for a training loop and given back as it was found."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memtools import _gcstate
from memtools._gcstate import ManagedGc


def state() -> tuple[bool, tuple[int, ...], bool]:
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > _gcstate._IMMORTAL


@pytest.fixture(autouse=True)
def _as_found() -> Iterator[None]:
    """Whatever a test does, the next one and pytest find the collector as it was."""
    enabled, thresholds, frozen = state()
    assert not frozen
    gc.enable()
    yield
    left = len(_gcstate._shared.members)
    _gcstate._shared.members.clear()
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()
    assert not left, "a test has left a manager"


def begun() -> ManagedGc:
    manager = ManagedGc()
    manager.begin()
    return manager


def test_freeze_puts_all_aside_and_end_gives_it_back():
    before, manager = state(), begun()
    assert state() == before
    assert (manager.managed, manager.frozen) == (True, 0)
    known = len(gc.get_objects())
    objects, ms = manager.freeze()
    assert 0.5 * known < gc.get_freeze_count() <= objects == manager.frozen
    assert ms > 0
    assert not gc.isenabled()
    assert len(gc.get_objects()) < 0.05 * known
    manager.end()
    assert state() == before
    assert (manager.managed, manager.frozen) == (False, 0)


def test_freeze_collects_first():
    class Node:
        pass

    died = []
    node = Node()
    node.self, node.weak = node, weakref_to(node, died)
    manager = begun()
    gc.disable()
    del node
    manager.freeze()
    assert died == [True]
    manager.end()


def weakref_to(obj: object, died: list[bool]) -> Any:
    import weakref

    return weakref.finalize(obj, died.append, True)


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_the_last_one_out_restores_in_whatever_order(order):
    before = state()
    managers = {name: begun() for name in "abc"}
    managers["a"].freeze()
    managers["b"].freeze()
    for name in order[:2]:
        managers[name].end()
        assert (gc.isenabled(), managers[order[2]].managed) == (False, True)
        assert managers[order[2]].frozen >= gc.get_freeze_count() > 0
    managers[order[2]].end()
    assert state() == before


def test_one_manager_may_begin_twice_and_ends_twice():
    before, manager = state(), begun()
    manager.begin()
    manager.freeze()
    manager.end()
    assert not gc.isenabled()
    manager.end()
    assert state() == before
    manager.end()  # one too many
    assert state() == before
    manager.begin()  # and again
    assert manager.managed
    manager.end()


@pytest.mark.parametrize("enabled", [True, False])
def test_what_others_change_within_does_not_stay(enabled):
    (gc.enable if enabled else gc.disable)()
    before = state()
    changes: list[Callable[[], Any]] = [
        gc.enable, gc.disable, gc.freeze, gc.unfreeze, lambda: gc.set_threshold(7, 3, 2),
    ]  # fmt: skip
    for change in changes:
        for first in (False, True):
            manager = begun()
            if first:
                change()
                gc.unfreeze()
            manager.freeze()
            change()
            manager.end()
            assert state() == before, change


def test_what_others_froze_is_never_thawed():
    gc.freeze()
    theirs = gc.get_freeze_count()
    manager = begun()
    assert manager.freeze()[0] == manager.frozen == 0
    assert not gc.isenabled()
    assert gc.get_freeze_count() <= theirs
    manager.end()
    assert gc.get_freeze_count() > 0.9 * theirs
    assert gc.isenabled()


def test_what_others_freeze_between_begin_and_freeze_is_theirs_too():
    manager = begun()
    gc.freeze()
    assert manager.freeze()[0] == 0
    manager.end()
    assert gc.get_freeze_count() > 0


def test_a_manager_that_dies_without_end_has_ended():
    before, manager, other = state(), begun(), begun()
    manager.begin()
    manager.freeze()
    del manager
    assert not gc.isenabled()
    other.freeze()
    del other
    assert state() == before


def test_freeze_without_begin_says_so():
    manager = ManagedGc()
    with pytest.raises(RuntimeError, match=r"call begin\(\) first"):
        manager.freeze()
    manager.end()
    assert gc.isenabled()
    assert not manager.managed


def test_threads_that_begin_and_end_at_the_same_time():
    before, gate, faults = state(), threading.Barrier(4), []

    def run() -> None:
        gate.wait()
        for _ in range(25):
            manager = begun()
            with _gcstate._shared.lock:  # collecting 100 times would take a minute
                _gcstate._shared.freeze()
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
    assert _gcstate._shared.found is None


class Interrupt:
    """KeyboardInterrupt at the n-th place where Python may deliver it within _gcstate: as a
    function is entered, and as a call into C returns."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename == _gcstate.__file__:
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def interrupted(n: int, call: Callable[[], Any]) -> bool:
    sys.setprofile(Interrupt(n))
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("name", ["begin", "freeze", "end"])
@pytest.mark.parametrize("company", [False, True])
def test_an_interrupt_anywhere_leaves_a_state_that_end_completes(name, company):
    before, places = state(), 0
    while True:
        other = begun() if company else None
        manager = ManagedGc()
        if name != "begin":
            manager.begin()
        if name == "end":
            manager.freeze()
        struck = interrupted(places, getattr(manager, name))
        if manager.managed and name != "end":
            manager.freeze()
        if manager.managed:
            manager.end()
        if other is not None:
            other.end()
        assert state() == before, places
        assert not _gcstate._shared.members, places
        if not struck:
            break
        places += 1
    assert places >= 3  # the function itself, and what it calls


CHILD = """
import gc, os, sys
from memtools._gcstate import ManagedGc, worker_setup
def in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
        except BaseException as error:
            print("child:", type(error).__name__, error, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def child(source: str) -> str:
    """What a program of its own prints: forks and exits are no test's business."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD + textwrap.dedent(source)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    return run.stdout


def test_a_forked_child_has_gc_enabled_and_its_pages_shared():
    child("""
    manager, dropped = ManagedGc(), ManagedGc()
    manager.begin(), dropped.begin()
    frozen = manager.freeze()[0]
    del dropped
    def check():
        assert gc.isenabled() and not manager.managed
        assert gc.get_freeze_count() >= 0.9 * frozen
        assert manager.freeze() == (0, 0.0) and gc.isenabled()
        other = ManagedGc()                 # and may be managed anew
        other.begin(); other.freeze(); assert not gc.isenabled()
        manager.end(); assert not gc.isenabled()
        other.end(); assert gc.isenabled() and gc.get_freeze_count() == 0
    in_child(check)
    def check():
        manager.end(); assert gc.isenabled() and gc.get_freeze_count() == 0
    in_child(check)
    assert not gc.isenabled() and manager.managed
    manager.end()
    assert gc.isenabled()
    """)


def test_a_forked_child_stays_without_gc_where_others_had_disabled_it():
    child("""
    gc.disable()
    in_child(lambda: gc.isenabled() and os._exit(1))
    manager = ManagedGc()
    manager.begin(), manager.freeze()
    in_child(lambda: gc.isenabled() and os._exit(1))
    manager.end()
    assert not gc.isenabled()
    gc.enable(); gc.disable()               # after the end it is the program's own affair
    in_child(lambda: gc.isenabled() and os._exit(1))
    """)


def test_a_fork_while_another_thread_holds_the_lock_does_not_hang():
    child("""
    import threading
    from memtools import _gcstate
    held, done = threading.Event(), threading.Event()
    def hold():
        with _gcstate._shared.lock:
            held.set(); done.wait()
    manager = ManagedGc(); manager.begin(); manager.freeze()
    thread = threading.Thread(target=hold); thread.start(); held.wait()
    def check():
        import signal
        signal.alarm(20)
        assert gc.isenabled()
        other = ManagedGc(); other.begin(); other.freeze(); other.end()
    in_child(check)
    done.set(); thread.join(); manager.end()
    """)


@pytest.mark.parametrize("how", ["", "os.fork() and os.wait()"])
def test_the_end_of_the_interpreter_runs_the_finalizers_of_what_was_frozen(how):
    out = child(f"""
    class Last:
        def __del__(self): print("finalized", flush=True)
    last = Last(); last.self = last
    manager = ManagedGc(); manager.begin(); manager.freeze()
    del last
    {how}
    """)
    assert out == "finalized\n" * (2 if how else 1)


def test_the_handlers_are_there_once_and_hold_nobody():
    child("""
    import atexit, weakref
    kept = atexit._ncallbacks()
    managers = [ManagedGc() for _ in range(9)]
    for manager in managers: manager.begin()
    assert atexit._ncallbacks() == kept + 1
    died = weakref.ref(managers[0])
    del manager, managers
    assert died() is None and gc.isenabled()
    """)


DIRTY = """
import json
data = [[] for _ in range(1_000_000)]       # 1,000,000 objects that the collector tracks
def dirty():
    rows = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line[:16])
    return 1024 * int(rows["Private_Dirty"].split()[0])
def check():
    if sys.argv[1:] == ["setup"]: worker_setup()
    before = dirty(); gc.collect(); print(dirty() - before, flush=True)
sys.argv += ["setup"] if SETUP else []
gc.disable()
in_child(check)
"""


def test_worker_setup_keeps_a_million_objects_shared():
    bare = int(child(DIRTY.replace("SETUP", "False")))
    ours = int(child(DIRTY.replace("SETUP", "True")))
    assert bare > 40e6  # 1,000,000 lists of 72 bytes with their headers
    assert ours < 0.05 * bare
