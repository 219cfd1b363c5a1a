"""Annotations hold: mypy --strict on users' programs, as make lint has it on the package; stubtest
on the package's stub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]

USER = """
import torch
import memtools

history = memtools.GateHistory(10, "1 MiB", trim="oldest", dtype=torch.float16)
history.append(torch.rand(2, 2))
part: memtools.GateHistory = history[1:]
first: torch.Tensor = history[0]
for entry in history:
    entry.sum()
load: tuple[int, ...] = history.stats().load
aux = memtools.AuxLoss()
aux.add(torch.ones(()))
total: torch.Tensor = 0.01 * aux.total()
loaded: memtools.GateHistory = memtools.GateHistory.load("x")
budget = memtools.Budget("1 GiB", device=torch.device("cpu"))
counted = memtools.GateHistory(max_bytes=budget.suballocate("gates"))
limit: int | None = budget.limit
names: list[str] = [line.name for line in budget.report()]
pool = memtools.KVPool(2, 2, 64, max_tokens=9, max_sequences=4, dtype=torch.float32, limit="1 MiB")
with pool, pool.acquire(1, num_tokens=5) as lease, lease.fork(2) as child:
    k, v = child.update(0, torch.rand(2, 2, 1, 64), torch.rand(2, 2, 1, 64), counts=[1, 0])
    k.sum()
    kind: memtools.KVLease = child
    lengths: list[int] = child.lengths
    lingering: tuple[str, ...] = pool.stats().lingering_names
    child.reorder(torch.tensor([1, 0]))
class Agent:
    @memtools.managed(memtools.CleanupPolicy(), clear=("model.gate_history", history))
    def update(self, buffer: list[int], lr: float = 0.1) -> str:
        return ""
    @memtools.managed(None)
    @classmethod
    def make(cls, n: int) -> int:
        return n
    @memtools.generation(pool=pool)
    async def serve(self, n: int) -> bytes:
        return b""
reveal_type(Agent().update)
reveal_type(Agent().serve)
with memtools.managed(None, clear=[history]), memtools.generation():
    updated: str = Agent().update([1], lr=0.5)
    made: int = Agent.make(3)
reveal_type(history.windows())
"""


def check(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_users_program_is_understood(tmp_path):
    program = tmp_path / "user.py"
    program.write_text(USER)
    told = check("mypy", "--strict", str(program))
    assert "list[memtools._gate.stats.GateStats]" in told
    assert "def (buffer: list[int], lr: float =) -> str" in told
    assert "def (n: int) -> typing.Coroutine[Any, Any, bytes]" in told


@pytest.mark.slow
def test_a_wrong_program_is_caught(tmp_path):
    program = tmp_path / "user.py"
    program.write_text('import memtools\nmemtools.GateHistory(trim="newest")\n')
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
    )
    assert "incompatible type \"Literal['newest']\"" in done.stdout


@pytest.mark.slow
def test_the_stub_says_what_the_extension_has(tmp_path):
    # Names and parameters are compared, for which torch need not be read, nor what has no types.
    config = tmp_path / "mypy.ini"
    config.write_text(
        "[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n"
        "[mypy-transformers.*,lightning.*,pytorch_lightning.*]\nfollow_imports = skip\n"
        "[mypy-tensordict.*]\nignore_missing_imports = True\n"
    )
    options = ["--ignore-disjoint-bases", "--mypy-config-file", str(config)]
    check("mypy.stubtest", "memtools._core", *options)
