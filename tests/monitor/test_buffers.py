"""Buffers of reinforcement learning, as its libraries and tutorials write them: what is a fill with
its bound, what is a leak, and what is told while the program runs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from tests.kit.ownprocess import in_own_process

PROGRAM = """
    import json, logging, os, sys, tempfile
    from collections import deque
    import numpy as np
    import memtools

    logging.getLogger("memtools").setLevel(logging.CRITICAL)
    name, limit = sys.argv[1:]
    ROWS, ROW = 1024, 256 << 10  # 256 MiB; large pages of the system are 8 rows
    frame = np.ones(ROW, np.uint8)

    class ReplayBuffer:  # as stable-baselines3 and CleanRL have it
        def __init__(self, buffer_size):
            self.buffer_size, self.pos = buffer_size, 0
            self.observations = np.zeros((buffer_size, ROW), np.uint8)
            self.next_observations = np.zeros((buffer_size, ROW), np.uint8)
        def add(self, row):
            self.observations[self.pos] = row
            self.next_observations[self.pos] = row
            self.pos = (self.pos + 1) % self.buffer_size

    class ReplayMemory:  # as the tutorial of PyTorch for DQN has had it
        def __init__(self, capacity):
            self.capacity, self.memory, self.position = capacity, [], 0
        def push(self, row):
            if len(self.memory) < self.capacity:
                self.memory.append(None)
            self.memory[self.position] = row
            self.position = (self.position + 1) % self.capacity

    class LazyStorage:  # as torchrl has it: allocated by the first rows, in a dict
        def __init__(self, max_size):
            self.max_size, self._storage, self._len = max_size, None, 0
        def set(self, row):
            import torch
            if self._storage is None:
                self._storage = {"pixels": torch.empty(self.max_size, ROW, dtype=torch.uint8)}
            self._storage["pixels"][self._len] = torch.from_numpy(row)
            self._len += 1

    class Prioritized:
        def __init__(self, capacity):
            self.memory = deque(maxlen=capacity)

    replay, memory, storage = ReplayBuffer(ROWS), ReplayMemory(ROWS), LazyStorage(ROWS)
    prioritized, episodes, rollout = Prioritized(ROWS), [], ReplayBuffer(16)
    directory = tempfile.TemporaryDirectory()
    mapped = np.memmap(os.path.join(directory.name, "rows"), np.uint8, "w+", shape=(ROWS, ROW))

    def both(step):
        replay.add(frame)
        episodes.append(frame.copy())

    def of_file(step):
        mapped[step] = frame

    act = {
        "arrays": lambda step: replay.add(frame),
        "ring": lambda step: memory.push(frame.copy()),
        "storage": lambda step: storage.set(frame),
        "deque": lambda step: prioritized.memory.append(frame.copy()),
        "rollout": lambda step: rollout.add(frame),
        "file": of_file,
        "both": both,
    }[name]
    told = []
    with memtools.MemoryMonitor(limit=limit) as monitor:
        monitor.on_leak(lambda one: told.append([one.first_step, str(one)]))
        for step in range(200):
            act(step)
            monitor.step()
        found = [one.as_json() for one in monitor.findings()]
    print(json.dumps([found, told]))
"""

FITS, TOO_LARGE = "8 GiB", "400 MiB"
ARRAYS = "ReplayBuffer.next_observations and ReplayBuffer.observations"


class Truth(NamedTuple):
    """What there is to say: the holders that fill and those that leak, and whether what fills will
    not fit."""

    program: str
    limit: str
    fills: str = ""
    leaks: str = ""
    size: str = ""
    is_told: bool = False


TRUTHS = [
    Truth("arrays", FITS, ARRAYS, size="buffer_size 1,024: 512.0 MiB when full"),
    Truth("arrays", TOO_LARGE, ARRAYS, size="buffer_size 1,024: 512.0 MiB when full", is_told=True),
    Truth("storage", FITS, "['pixels']", size="max_size 1,024: 256.0 MiB when full"),
    Truth("ring", FITS, "list ReplayMemory.memory", size="of at most 1,024, 256."),
    Truth("ring", "200 MiB", "list ReplayMemory.memory", size="of at most 1,024", is_told=True),
    Truth("deque", FITS, "deque(maxlen=1024) Prioritized.memory", size="of at most 1,024"),
    Truth("rollout", FITS),
    Truth("file", TOO_LARGE),
    Truth("both", FITS, ARRAYS, "list episodes"),
]


def ran(truth: Truth) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    found, told = json.loads(in_own_process(PROGRAM, truth.program, truth.limit))
    return found, told


@pytest.mark.parametrize("truth", TRUTHS, ids=lambda one: f"{one.program}-{one.limit}")
def test_what_fills_is_no_leak_and_is_told_before_it_does_not_fit(truth: Truth) -> None:
    found, told = ran(truth)
    fills = [one for one in found if one["grade"] == "fills"]
    leaks = [one for one in found if one["grade"] not in ("fills", "fragmentation")]
    assert [one["holder"] for one in leaks] == ([truth.leaks] if truth.leaks else [])
    if not truth.fills:
        assert (fills, told) == ([], [])
        return
    (one,) = fills
    names = set(truth.fills.split(" and "))
    assert names == set(one["holder"].split(" and ")) or truth.fills in one["holder"]
    assert truth.size in one["what"]
    said = [(step, text) for step, text in told if text.startswith("fills: ")]
    if not truth.is_told:
        assert (said, one["steps_left"], one["advice"]) == ([], None, None)
        assert f"of {float(truth.limit.split()[0]):.2f} GiB are in use" in one["what"]
        return
    assert said[0][0] <= 64, "in time to end the run"
    assert any("limit in " in text for _, text in said), "which may get known later"
    assert "are in use, and" in one["what"]
    assert "will not fit" in one["advice"]
    assert "uint8" in one["advice"]
