"""A program may close what it did not open, and open files of its own that get the same numbers: no
object that keeps a descriptor reads them, writes to them, or closes them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.long import LONG

HEAD = """
import contextlib, gc, os, random, socket, sys
import torch, memtools
from memtools.data import ByteCache, H5Episodes
from tests.data.episodecases import write_episodes
folder, rounds = sys.argv[1], int(sys.argv[2])
"""
# In the first round the program closes all that it may, as a daemon does; then some of what the
# object has opened. What it opens itself is listening, or has text that nobody may change.
TAIL = """
def is_open(fd):
    with contextlib.suppress(OSError):
        return bool(os.fstat(fd))
    return False

def content(file):
    return os.pread(file.fileno(), 200, 0)

def turn(number):
    before = {fd for fd in range(256) if is_open(fd)}
    made, *uses = make(f"{folder}/{number}")
    own = [fd for fd in range(256) if is_open(fd) and fd not in before]
    chosen = random.Random(number)
    if number == 0:
        os.closerange(3, 256)
    for fd in chosen.sample(own, chosen.randint(1, len(own))) if own and number else ():
        os.close(fd)
    server = socket.create_server(("127.0.0.1", 0))
    files = [open(f"{folder}/user{i}", "w+b", buffering=0) for i in range(40)]
    for file in files:
        file.write(b"A" * 100)
    client = socket.create_connection(server.getsockname())
    for use in uses:
        try:
            use()
        except (OSError, ValueError, RuntimeError) as error:
            print(type(error).__name__, error, file=sys.stderr)
    del made, use, uses
    gc.collect()
    accepted, _ = server.accept()
    accepted.sendall(b"hello")
    assert client.recv(5) == b"hello"
    for file in files:
        assert content(file) == b"A" * 100, (number, own, file.fileno())
    for one in (accepted, client, server, *files):
        one.close()

for number in range(rounds):
    turn(number)
os._exit(0)
"""
STORE = """
def make(path):
    made = memtools.TrajectoryStore(4, 2, **WHERE(path))
    made.append(x=torch.ones(2))
    def use():
        made.append(x=torch.ones(2))
        made.put(y=torch.full((2, 3000), 7.0))
    return made, use, made.close
"""
OBJECTS = {
    "a trajectory": "WHERE = lambda path: {'file': path}" + STORE,
    "an overflow": "WHERE = lambda path: {'overflow': folder, 'limit': 1}" + STORE,
    "a pool": """
def make(path):
    made = memtools.KVPool(1, 1, 8, max_tokens=64, max_sequences=4, dtype="float32")
    lease = made.acquire(1)
    lease.update(0, torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8))
    def use():
        lease.update(0, torch.ones(1, 1, 30, 8), torch.ones(1, 1, 30, 8))
        lease.fork(2).update(0, torch.ones(2, 1, 3, 8), torch.ones(2, 1, 3, 8))
        made.trim()
    return made, use, made.close
""",
    "a monitor": """
def make(path):
    made = memtools.MemoryMonitor(path + ".mem")
    made.start()
    def use():
        for _ in range(50): made.step()
        with made.phase("x"): pass
        made.headroom()
    return made, use, made.stop
""",
    "a policy": """
def make(path):
    made = memtools.CleanupPolicy()
    made.step()
    def use():
        for _ in range(50): made.step()
    return made, use
""",
    "a history": """
def make(path):
    made = memtools.GateHistory(10)
    def use():
        for _ in range(30): made.append(torch.rand(400, 4))
    return made, use, made.clear
""",
    "an accumulator": """
def make(path):
    model = torch.nn.Linear(2, 2)
    made = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
    def use(): made.step(torch.ones(4, 2), lambda x: (model(x).sum(), 4))
    use()
    return made, use
""",
    "a cache": """
def make(path):
    made = ByteCache("1 MiB")
    def use():
        for i in range(200): made[i % 7] = bytes(200_000)
    use()
    return made, use, made.clear
""",
    "episodes": """
import pathlib
def make(path):
    made = H5Episodes(write_episodes(pathlib.Path(path)), chunk=3, cache=None)
    first = [made[i]["action"] for i in range(len(made))]
    def use(): assert all(torch.equal(made[i]["action"], one) for i, one in enumerate(first))
    return made, use, made.close
""",
}
SENTENCES = {
    "a trajectory": "so that it cannot grow; open it again",
    "episodes": "read it in a new process",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", OBJECTS)
def test_files_of_the_program_are_left_alone(what: str, tmp_path: Path) -> None:
    program = HEAD + OBJECTS[what] + TAIL
    words = [sys.executable, "-c", program, str(tmp_path), "30" if LONG else "3"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert SENTENCES.get(what, "") in done.stderr
