"""Training loops whose memory is recorded: some leak, some only look like it.

Each is a generator: it sets up, then does one step between two yields. `LEAKS` says what a step
leaks, in bytes, and which signal should tell; the others leak nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BATCH = 32


class Trainer:
    """A small network, its optimiser, and one update."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.net.parameters())

    def update(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.net(x) - x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def batch(rows: int = BATCH) -> Tensor:
    return torch.randn(rows, 64)


def plain() -> Iterator[None]:
    trainer = Trainer()
    while True:
        trainer.update(batch())
        yield


def replay_buffer() -> Iterator[None]:
    """Transitions of 16 KiB are kept, up to 1,500 of them."""
    trainer, kept = Trainer(), list[Tensor]()
    while True:
        trainer.update(batch())
        kept.append(torch.randn(4096))
        if len(kept) > 1500:
            kept.pop(0)
        yield


def gc_off() -> Iterator[None]:
    """Cycles that hold tensors, collected every 300 steps."""
    trainer, step = Trainer(), 0
    gc.disable()
    while True:
        trainer.update(batch())
        cycle: list[Any] = [torch.randn(1024)]
        cycle.append(cycle)
        step += 1
        if step % 300 == 0:
            gc.collect()
        yield


def varlen() -> Iterator[None]:
    trainer = Trainer()
    while True:
        trainer.update(batch(int(torch.randint(8, 400, ()))))
        yield


class Rows(Dataset[Tensor]):
    def __init__(self, leak: int = 0) -> None:
        self.leak, self.kept = leak, list[bytearray]()

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, i: int) -> Tensor:
        if self.leak:
            self.kept.append(bytearray(self.leak))
        return torch.randn(64)


def from_workers(rows: Rows) -> Iterator[None]:
    trainer = Trainer()
    for x in DataLoader(rows, batch_size=BATCH, num_workers=2):
        trainer.update(x)
        yield


def workers() -> Iterator[None]:
    yield from from_workers(Rows())


def workers_leak() -> Iterator[None]:
    yield from from_workers(Rows(leak=1024))


def gates_list() -> Iterator[None]:
    """The gates of every step are kept, 16 KiB each."""
    trainer, history = Trainer(), list[Tensor]()
    while True:
        trainer.update(batch())
        history.append(torch.rand(512, 8))
        yield


def metrics_dict() -> Iterator[None]:
    """A dict of a few numbers for every step: small Python objects."""
    trainer, metrics, step = Trainer(), dict[int, dict[str, object]](), 0
    while True:
        loss = trainer.update(batch()).item()
        metrics[step] = {"loss": loss, "steps": [step * 1.5, step * 2.5], "name": f"step {step}"}
        step += 1
        yield


def graph() -> Iterator[None]:
    """A sum of losses that keeps every step's graph alive."""
    trainer, total = Trainer(), torch.zeros(())
    scale = torch.ones((), requires_grad=True)
    while True:
        trainer.update(batch())
        total = total + (scale * torch.randn(1024)).sum()
        yield


def late_onset() -> Iterator[None]:
    """From step 1,500 on every step leaves 16 KiB."""
    trainer, history, step = Trainer(), list[Tensor](), 0
    while True:
        trainer.update(batch())
        step += 1
        if step > 1500:
            history.append(torch.rand(512, 8))
        yield


LOOPS: dict[str, Callable[[], Iterator[None]]] = {
    f.__name__: f
    for f in (plain, replay_buffer, gc_off, varlen, workers)
    + (gates_list, metrics_dict, graph, late_onset, workers_leak)
}
