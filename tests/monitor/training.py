"""Small training loops under MemoryMonitor, as a program: `python -m tests.monitor.training RECORD
LOOP`. What each of them keeps is known, to the byte."""

from __future__ import annotations

import collections
import ctypes
import functools
import sys
from collections.abc import Callable
from multiprocessing import shared_memory

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memtools

STEPS = 240
KEPT = torch.ones(64, 64)  # 16 KiB
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]


class MoEBlock(nn.Module):
    """A block with a router, whose gates a loop may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.router = nn.Linear(32, 8)
        self.gate_history: list[torch.Tensor] = []
        self.replay: collections.deque[torch.Tensor] = collections.deque(maxlen=100)
        self.total: torch.Tensor | float = 0.0
        self.newest: object = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gates = torch.softmax(self.router(x), -1)
        out: torch.Tensor = self.inner(x) * self.gates.sum(-1, keepdim=True)
        return out


def gates(block: MoEBlock, loss: torch.Tensor) -> None:
    block.gate_history.append(block.gates.detach().clone())


def cleared(block: MoEBlock, loss: torch.Tensor) -> None:
    """An epoch has 60 steps."""
    gates(block, loss)
    if len(block.gate_history) == 60:
        block.gate_history.clear()


def graph(block: MoEBlock, loss: torch.Tensor) -> None:
    block.total = block.total + loss


def bounded(block: MoEBlock, loss: torch.Tensor) -> None:
    block.replay.append(KEPT.clone())


def c_heap(block: MoEBlock, loss: torch.Tensor) -> None:
    ctypes.memset(libc.malloc(16 << 10), 1, 16 << 10)


class Pair:
    """In a cycle with itself."""

    def __init__(self) -> None:
        self.me, self.kept = self, KEPT.clone()


def cycles(block: MoEBlock, loss: torch.Tensor) -> None:
    block.newest = Pair()


@functools.cache
def decoded(index: int) -> torch.Tensor:
    return KEPT.clone()


def cache(block: MoEBlock, loss: torch.Tensor) -> None:
    block.newest = decoded(len(block.gate_history))
    block.gate_history.append(torch.ones(()))


def shared(block: MoEBlock, loss: torch.Tensor) -> None:
    one = shared_memory.SharedMemory(create=True, size=16 << 10)
    one.buf[:] = bytes(16 << 10)
    one.close()
    block.newest = one  # nobody unlinks it; the resource tracker does at the end


def nothing(block: MoEBlock, loss: torch.Tensor) -> None:
    pass


class Frames(Dataset[torch.Tensor]):
    """Keeps 16 KiB in a worker for each item."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 4 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen[index] = KEPT.clone()
        return torch.randn(32)


LOOPS: dict[str, Callable[[MoEBlock, torch.Tensor], None]] = {
    "gates": gates, "cleared": cleared, "graph": graph, "bounded": bounded, "c heap": c_heap,
    "cycles": cycles, "cache": cache, "shared": shared, "nothing": nothing, "workers": nothing,
}  # fmt: skip


def train(path: str, loop: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block, keep = MoEBlock(), LOOPS[loop]
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    monitor = memtools.MemoryMonitor(log=path, limit="16 GiB")
    with monitor, monitor.phase("train"):
        batches = iter(DataLoader(Frames(), 4, num_workers=2)) if loop == "workers" else None
        for _ in range(STEPS):
            x = torch.randn(512, 32) if batches is None else next(batches)
            loss = (block(x) - x).square().mean()
            loss.backward(retain_graph=loop == "graph")
            optimizer.step()
            optimizer.zero_grad()
            keep(block, loss)
            monitor.step()
        print(monitor.summary())


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2])
