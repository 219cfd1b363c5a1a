"""Storages that torch's reports do not tell: found by the line that made the tensor over them."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from memtools import _core
from memtools._monitor.untracked_storages import untracked_storages

KIB = 2**10


@pytest.fixture(autouse=True)
def _traced() -> Iterator[None]:
    tracemalloc.start(16)
    yield
    tracemalloc.stop()


def found(*heard: torch.Tensor) -> list[tuple[int, int]]:
    """(line in this file, bytes) of each."""
    known = {one.data_ptr() for one in heard}
    lines = []
    for frames, size in untracked_storages(known.__contains__):
        line = next((line for file, line in frames if file == __file__), 0)
        if line:
            lines.append((line, size))
    return sorted(lines)


def here() -> int:
    return sys._getframe(1).f_lineno


def test_an_object_has_the_line_that_made_it_also_where_it_has_a_dict() -> None:
    class Plain:
        pass

    class Slots:
        __slots__ = ("a",)

    made, line = (Plain(), Slots(), torch.zeros(3)), here()
    for one in made:
        frames = _core._traced_at(one)
        assert frames is not None
        assert frames[0] == (__file__, line)
    assert _core._traced_at(1) is None
    tracemalloc.stop()
    assert _core._traced_at(made[0]) is None


def test_what_lives_is_told_by_stack_and_nothing_is_collected_meanwhile() -> None:
    kept, line = [bytearray(KIB) for _ in range(3000)], here()
    collections = list[str]()

    def note(phase: str, _: object) -> None:
        collections.append(phase)

    gc.collect()
    gc.callbacks.append(note)
    told = _core._traced()
    gc.callbacks.remove(note)
    assert collections == []
    assert gc.isenabled()
    sizes = {stack[0]: size for stack, size in told}
    assert 3000 * KIB < sizes[__file__, line] < 3500 * KIB
    snapshot = tracemalloc.take_snapshot()
    most = max(snapshot.statistics("traceback"), key=lambda one: one.size)
    stack = tuple((frame.filename, frame.lineno) for frame in reversed(most.traceback))
    assert (stack, most.size) in told
    del kept
    tracemalloc.stop()
    assert _core._traced() == []


def test_what_deepcopy_makes_is_found_at_the_line_that_calls_it() -> None:
    state = {"a": torch.zeros(KIB), "b": torch.zeros(2, KIB)}
    copied, line = copy.deepcopy(state), here()
    assert found(*state.values()) == [(line, 4 * KIB), (line, 8 * KIB)]
    del copied
    assert found(*state.values()) == []


def test_a_storage_counts_once_and_by_all_its_bytes() -> None:
    whole, line = torch.zeros(4, KIB), here()
    parts = [whole[i] for i in range(4)]
    ((_, size),) = found()
    assert size == 16 * KIB
    assert found(whole) == []
    assert line
    assert len(parts) == 4


def test_what_was_made_before_and_memory_of_others_does_not_count() -> None:
    tracemalloc.stop()
    before = torch.zeros(KIB)
    tracemalloc.start(16)
    array = torch.from_numpy(np.zeros(KIB))
    empty, sparse = torch.zeros(0), torch.eye(3).to_sparse()
    meta = torch.zeros(KIB, device="meta")
    assert [size for _, size in found() if size >= KIB] == []
    del before, array, empty, sparse, meta


def test_no_code_of_the_program_runs() -> None:
    class Asked(torch.overrides.TorchFunctionMode):
        asked = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Asked.asked += 1
            return function(*args, **(kwargs or {}))

    class Derived(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: object, **kwargs: object) -> object:
            raise AssertionError

    kept = torch.zeros(KIB)
    derived = torch.Tensor._make_subclass(Derived, torch.zeros(KIB))
    with Asked():
        assert len(found()) == 1
        assert Asked.asked == 0
    del kept, derived


KEEPS = """
import copy, sys, torch
from memtools import MemoryMonitor
weights, best = torch.zeros(100 << 8), []
torch.set_num_threads(1)

def epoch():
    best.append(copy.deepcopy({"weights": weights}))

with MemoryMonitor(device="cpu") as monitor:
    for _ in range(120):
        epoch()
        monitor.step()
    print([one.made_at for one in monitor.findings()])
"""


@pytest.mark.slow
def test_a_monitor_says_the_line_that_copies_weights(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KEEPS)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True
    )  # fmt: skip
    assert done.stdout == "['train.py:8 in epoch']\n", done.stdout + done.stderr
