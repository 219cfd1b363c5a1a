"""A program may close what it did not open, and open files of its own that get the same numbers: no
object that keeps a descriptor writes to them, or closes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import gc, os, sys
import torch, memtools
from memtools.data import PackedList
folder = sys.argv[1]
"""
TAIL = """
os.closerange(3, 256)
users = [open(f"{folder}/user{i}", "w+b", buffering=0) for i in range(40)]
for file in users:
    file.write(b"A" * 100)
for use in (use_it, close_it):
    try:
        use()
    except (OSError, ValueError, RuntimeError) as error:
        print(type(error).__name__, error, file=sys.stderr)
del made
gc.collect()
for i, file in enumerate(users):
    assert os.fstat(file.fileno()).st_size == 100, i
    file.seek(0)
    assert file.read() == b"A" * 100, i
    file.close()
os._exit(0)
"""
STORE = """
made.append(x=torch.ones(2))
def use_it():
    made.append(x=torch.ones(2))
    made.put(y=torch.full((2, 3000), 7.0))
close_it = made.close
"""
OBJECTS = {
    "a trajectory": "made = memtools.TrajectoryStore(4, 2, file=folder + '/t')" + STORE,
    "an overflow": "made = memtools.TrajectoryStore(4, 2, overflow=folder, limit=1)" + STORE,
    "a packed list": """
import pickle
made = PackedList([{"a": 1}] * 10)
def use_it():
    assert made[3] == {"a": 1}
    try: pickle.dumps(made)
    except pickle.PicklingError as error: assert "has closed the descriptor" in str(error)
    else: raise AssertionError
close_it = lambda: None
""",
    "a pool": """
made = memtools.KVPool(1, 1, 8, max_tokens=64, max_sequences=4, dtype="float32")
lease = made.acquire(1)
lease.update(0, torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8))
def use_it():
    lease.update(0, torch.ones(1, 1, 30, 8), torch.ones(1, 1, 30, 8))
    lease.fork(2).update(0, torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8))
    made.trim()
close_it = made.close
""",
    "a monitor": """
made = memtools.MemoryMonitor(folder + "/run.mem")
made.start()
def use_it():
    for _ in range(50): made.step()
    with made.phase("x"): pass
close_it = made.stop
""",
    "a history": """
made = memtools.GateHistory(10)
def use_it():
    for _ in range(30): made.append(torch.rand(400, 4))
close_it = made.clear
""",
    "an accumulator": """
model = torch.nn.Linear(2, 2)
made = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
def use_it(): made.step(torch.ones(4, 2), lambda x: (model(x).sum(), 4))
use_it()
close_it = lambda: None
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OBJECTS)
def test_files_of_the_program_are_left_alone(what: str, tmp_path: Path) -> None:
    program = HEAD + OBJECTS[what] + TAIL
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if what == "a trajectory":
        assert "so that it cannot grow; open it again" in done.stderr
