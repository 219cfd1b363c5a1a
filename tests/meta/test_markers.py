"""What `make check` leaves out: little, and no public name with it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import memtools
import memtools.types

TESTS = Path(__file__).resolve().parents[1]


class Definition(NamedTuple):
    """A name that a module of tests/ defines: all words of its code, those in strings included (the
    program of a child is one), and for a test function whether it is marked slow."""

    words: set[str]
    slow: bool | None


@functools.cache
def definitions() -> dict[Path, dict[str, Definition]]:
    """By the files that `make test` reads."""
    found: dict[Path, dict[str, Definition]] = {}
    for path in sorted(TESTS.glob("*/*.py")):
        if path.parent.name in ("gpu", "pages", "traces"):
            continue
        text, found[path] = path.read_text(), {}
        whole = "\npytestmark = pytest.mark.slow" in text
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                name, marks = node.name, [ast.unparse(mark) for mark in node.decorator_list]
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, marks = node.targets[0].id, []
            else:
                continue
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            words = set(re.findall(r"\w+", "\n".join([*marks, *lines])))
            marked = whole or "pytest.mark.slow" in marks
            slow = marked if name.startswith("test_") else None
            found[path][name] = Definition(words, slow)
    return found


@functools.cache
def used_in_the_quick_loop() -> set[str]:
    """All words of its test functions and of what they lead to, in their files and in those that
    hold no tests."""
    files = definitions()
    shared: dict[str, Definition] = {}
    for path in files:
        if not path.name.startswith("test_"):
            shared |= files[path]
    found: set[str] = set()
    for path in files:
        todo, seen = [name for name, one in files[path].items() if one.slow is False], set[str]()
        while todo:
            name = todo.pop()
            one = files[path].get(name) or shared.get(name)
            if one and name not in seen:
                seen.add(name)
                todo += one.words
                found |= one.words
    return found


def test_the_quick_loop_has_most_test_functions():
    slow = [one.slow for defined in definitions().values() for one in defined.values()]
    slow = [marked for marked in slow if marked is not None]
    assert len(slow) > 1500
    assert sum(slow) < 0.4 * len(slow)


@pytest.mark.parametrize("name", sorted(memtools.__all__))
def test_every_public_name_is_in_the_quick_loop(name):
    assert name in used_in_the_quick_loop()


@pytest.mark.usefixtures("frozen")
def test_what_public_functions_return_is_public():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1), 1)
    with acc.micro_batch():
        acc.backward(model(torch.ones(1, 2)).sum())
    assert type(acc.report()) is memtools.types.AccumulatorReport
    assert type(acc.report().last) is memtools.WindowReport
    with pytest.raises(MemoryError):
        acc.step(torch.ones(1, 2), lambda batch: bytes(1 << 60))
    assert {type(retry) for retry in acc.report().retries} == {memtools.types.Retry}
    assert type(memtools.host_memory()) is memtools.HostMemory
    monitor = memtools.MemoryMonitor()
    assert type(monitor.guard(0.9)) is memtools.Handle
    assert type(monitor.on_leak(print)) is memtools.Handle
    assert type(monitor.phase("forward")) is memtools.Phase
    assert {type(room) for room in monitor.headroom()} == {memtools.Headroom}
    store = memtools.TrajectoryStore(1, 2)
    store.append(x=torch.ones(2, 1))
    assert type(store.stats()) is memtools.types.TrajectoryStats
    epochs = store.epochs(1)
    assert type(epochs) is memtools.types.TrajectoryEpochs
    epoch = next(iter(epochs))
    assert type(epoch) is memtools.types.TrajectoryEpoch
    assert type(next(iter(epoch))) is memtools.types.TrajectoryChunk
    calls: list[memtools.types.CleanupCall] = []
    policy = memtools.CleanupPolicy()
    assert type(policy.add("note", calls.append)) is memtools.Handle
    assert type(policy.cleanup("note")[0]) is memtools.types.Cleaned
    assert type(calls[0]) is memtools.types.CleanupCall
    assert type(policy.report().cycles) is memtools.types.CycleReport
    assert type(policy.report()["note"]) is memtools.types.ActionReport
    before = memtools.census()
    kept = [torch.ones(3, 5, 7) for _ in range(9)]
    others = [memtools.types.LeakVerdict("quiet", 0.0, "none") for _ in range(9)]
    growth = memtools.census().diff(before)
    assert memtools.types.GroupGrowth in map(type, growth.groups)
    assert memtools.types.TypeGrowth in map(type, growth.types)
    del kept, others
    assert type(memtools.checkpoint_layers(model)) is memtools.types.CheckpointedLayers
