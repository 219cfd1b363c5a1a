"""SIGKILL at any moment of a process that writes a trajectory: what it had done is in the file."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memtools import TrajectoryStore
from memtools._trajectory.mapped import COUNTS
from tests.kit.children import seen_meanwhile, start_child, wait_for
from tests.kit.long import LONG

T, SAMPLES, PUTS = 4, 3, 30
KILLS = 300 if LONG else 12
Fields = dict[str, list[float]]  # of each entry the number that fills it


def calls() -> Iterator[dict[str, float] | str]:
    """Without an end: what is appended, what is put ("put 0" and so on), or "reset"."""
    number = itertools.count(1.0)
    while True:
        yield {"x": next(number)}
        for _ in range(T):
            yield {"x": next(number), "reward": next(number)}
        for put in range(PUTS):  # in the first rollout each is a new field
            yield {f"put {put}": next(number)}
        yield "reset"


def write(path: Path, tell: Callable[[int], None]) -> None:
    store = TrajectoryStore(T, SAMPLES, states=("x",), file=path)
    tell(1)
    for done, call in enumerate(calls(), 2):
        if isinstance(call, str):
            store.reset()
        else:
            values = {name: torch.full((SAMPLES, 5), number) for name, number in call.items()}
            store.append(values) if "x" in call else store.put(values)
        tell(done)


def after(done: int) -> Fields:
    """What the file has after so many calls, of which the first made it."""
    fields: Fields = {}
    for call in itertools.islice(calls(), max(0, done - 1)):
        if isinstance(call, str):
            fields = {name: [] for name in fields}
            continue
        for name, number in call.items():
            fields.setdefault(name, []).append(number)
    return fields


def numbers_of(store: TrajectoryStore, name: str) -> list[float]:
    """The number that fills each entry of a field."""
    try:
        values = store[name].reshape(-1, SAMPLES * 5)
    except KeyError:  # it was not put since reset()
        return []
    assert torch.equal(values, values[:, :1].expand_as(values))
    return values[:, 0].tolist()


@pytest.mark.slow
def test_a_kill_at_any_moment_loses_at_most_the_call_that_runs(tmp_path):
    moment, done = random.Random(None if LONG else 0), mmap.mmap(-1, 8)
    for kill in range(KILLS):
        path, done[:] = tmp_path / f"{kill}", bytes(8)
        child = start_child(
            lambda path=path: write(path, lambda n: struct.pack_into("<Q", done, 0, n))
        )
        first = moment.choice([0, 1, 1, 30])
        wait_for(lambda first=first: struct.unpack("<Q", done[:])[0] >= first)
        time.sleep(moment.uniform(0, 0.02))  # any moment will do
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        (calls_done,) = struct.unpack("<Q", done[:])
        if calls_done == 0:
            continue  # it may not be there, or not be made
        least, most = after(calls_done), after(calls_done + 1)
        with TrajectoryStore.open(path) as store:
            assert least.keys() <= set(store.names) <= most.keys()
            for name in store.names:
                assert numbers_of(store, name) in (least.get(name, []), most[name]), calls_done
            store.reset()
            store.append(x=torch.ones(SAMPLES, 5))
        path.unlink()


@pytest.mark.slow
def test_no_moment_has_another_count(tmp_path):
    """Another process sees each store of this one, as the file of a killed process has it."""
    with TrajectoryStore(T, SAMPLES, file=tmp_path / "file") as store:
        store.put({"x": torch.ones(SAMPLES)})
        file = store._file

        def write_counts() -> None:
            for number in range(300_000):
                file.count(0, 1 + number % 2)

        seen = seen_meanwhile(write_counts, lambda: struct.unpack_from("<Q", file._head, COUNTS)[0])
        file.count(0, 1)
    assert seen <= {1, 2}
