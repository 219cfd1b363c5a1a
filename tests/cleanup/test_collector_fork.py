"""ManagedGc in forked children and data-loading workers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.kit.ownprocess import in_own_process

_FORKS = "ignore:This process:DeprecationWarning"  # from 3.12 on, with threads: that is meant

CHILD = """
import gc, os, sys
from memtools import CleanupPolicy
from memtools._cleanup.collector import ManagedGc
from tests.kit import children
def in_child(check):
    assert children.in_child(check) == 0
"""


def child(source: str) -> str:
    """What a program of its own prints: forks and exits are no test's business."""
    return in_own_process(CHILD + textwrap.dedent(source), warnings=_FORKS)


@pytest.mark.slow
def test_a_forked_child_has_gc_enabled_and_its_pages_shared():
    child("""
    manager = ManagedGc()
    manager.begin()
    frozen = manager.freeze()
    def check():
        assert gc.isenabled() and not manager.managed
        assert gc.get_freeze_count() >= 0.9 * frozen
        assert manager.freeze() == 0 and gc.isenabled()
        other = ManagedGc()                 # and may be managed anew
        other.begin(); other.freeze(); assert not gc.isenabled()
        manager.end(); assert not gc.isenabled() and gc.get_freeze_count() >= frozen
        other.end(); assert gc.isenabled() and gc.get_freeze_count() == 0
    in_child(check)
    def check():
        manager.end(); assert gc.isenabled() and gc.get_freeze_count() == 0
    in_child(check)
    assert not gc.isenabled() and manager.managed
    manager.end()
    assert gc.isenabled()
    """)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_fork_while_another_thread_holds_the_lock_does_not_hang():
    child("""
    import threading
    from memtools._cleanup import collector as _gcstate
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


DIRTY = """
import json
data = [[] for _ in range(1_000_000)]       # 1,000,000 objects that the collector tracks
def dirty():
    rows = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line[:16])
    return 1024 * int(rows["Private_Dirty"].split()[0])
def check():
    before = dirty()
    if sys.argv[1:] == ["setup"]: policy.worker_init(0)
    gc.collect(); print(dirty() - before, flush=True)
sys.argv += ["setup"] if SETUP else []
policy = CleanupPolicy()
gc.disable()
in_child(check)
"""


@pytest.mark.slow
def test_worker_init_keeps_a_million_objects_shared():
    bare = int(child(DIRTY.replace("SETUP", "False")))
    ours = int(child(DIRTY.replace("SETUP", "True")))
    assert bare > 40e6  # 1,000,000 lists of 72 bytes with their headers
    assert ours < 0.05 * bare


LOADER = """
import functools, gc
import torch
from memtools import CleanupPolicy

class Node:
    alive = 0
    def __init__(self):
        self.me = self
        Node.alive += 1
    def __del__(self):
        Node.alive -= 1

@functools.cache
def frozen():
    return gc.get_freeze_count()                       # walks all of them

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        for _ in range(50):
            Node()                                     # 10,000 in each worker
        return torch.tensor([gc.isenabled(), Node.alive, frozen()])

if __name__ == "__main__":
    policy = CleanupPolicy()
    policy.start()
    policy.step(2)
    for init in (None, policy.worker_init):
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=10, num_workers=2, multiprocessing_context="fork",
            worker_init_fn=init)
        rows = torch.cat(list(loader))
        assert not gc.isenabled()
        print(int(rows[:, 0].min()), int(rows[:, 1].max()), int(rows[:, 2].min()))
    policy.stop()
"""


@pytest.mark.slow
def test_garbage_stays_bounded_in_data_loading_workers(tmp_path: Path):
    program = tmp_path / "loader.py"
    program.write_text(LOADER)
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        enabled, alive, frozen = map(int, line.split())
        assert enabled
        assert alive < 4_000  # twice the young generation of 3.13
        assert frozen > 50_000  # what torch's modules are made of is put aside
