"""A small training run under MemoryMonitor, as a program: `python -m tests.monitor.training`."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

import memtools
from memtools.monitor import leakwatch

# A search for holders waits until those before it are a small part of the time. This run is over
# before that where the machine does other things meanwhile: here a search is due by steps alone.
leakwatch.GRACE_NS = 3600 * 10**9


class MoEBlock(nn.Module):
    """Keeps the gates of every step, when told to."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.router = nn.Linear(32, 8)
        self.keep = keep
        self.gate_history: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.softmax(self.router(x), -1)
        if self.keep:
            self.gate_history.append(gates.detach().clone())
        out: torch.Tensor = self.inner(x) * gates.sum(-1, keepdim=True)
        return out


def train(path: str, keep: bool, steps: int, killed: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = MoEBlock(keep)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    monitor = memtools.MemoryMonitor(log=path)
    with monitor, monitor.phase("train"):
        for _ in range(steps):
            x = torch.randn(512, 32)
            loss = (block(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
    print(monitor.leaks().kind)
    print(monitor.summary())


if __name__ == "__main__":
    train(sys.argv[1], "keep" in sys.argv, 4000, "killed" in sys.argv)
