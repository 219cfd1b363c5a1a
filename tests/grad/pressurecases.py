"""A made-up machine of which a made-up monitor tells, for back-off by pressure.

machine = Machine(limit=1000, base=200, row=50)      others hold nothing
acc, model = made(machine)                           each layer of the model takes its part of a
acc.step(batch(24), loss_of(model))                  row's bytes; above the limit it is killed
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from memtools import GradAccumulator
from memtools._base import reclaim

LAYERS = 4


class Killed(BaseException):
    """What the kernel does, here: nothing in the program answers it."""


@dataclasses.dataclass
class Machine:
    """Memory in bytes: of this process, and of others, against a limit."""

    limit: int
    base: int = 0
    row: int = 0
    others: int = 0
    running: bool = True
    memory: str = "host"
    #: what a pool keeps and would give back
    idle: int = 0
    #: what malloc keeps, and the next pass uses first
    heap_free: int = 0
    #: of that, pages that malloc gave back and nobody has used since
    given_back: int = 0
    #: rows of each micro-batch that was begun
    tried: list[int] = dataclasses.field(default_factory=list)
    #: which reading fails, counted from 0, or None
    fails: int | None = None
    readings: int = 0
    cleanups: int = 0
    #: by how much the rows of the batch at hand take more than usual
    factor: float = 1.0

    def __post_init__(self) -> None:
        self.taken = self.peak = 0

    @property
    def own(self) -> int:
        return self.base + self.idle + max(self.taken, self.heap_free - self.given_back)

    def take(self, count: float) -> None:
        self.taken += int(count)
        self.given_back = min(self.given_back, max(0, self.heap_free - self.taken))
        self.peak = max(self.peak, self.own)
        if self.own + self.others > self.limit:
            raise Killed

    def serve(self, acc: GradAccumulator) -> None:
        """Be the heap of an accumulator's process as well, which keeps `heap_free` bytes."""
        watermark: Any = acc._get_back_off().watermark
        watermark._probe = self

    def read(self, fields: int) -> Any:
        """What the probe of a process has."""
        return SimpleNamespace(heap_free=max(0, self.heap_free - self.taken))

    # --- what a monitor has ---

    def headroom(self) -> list[Any]:
        at, self.readings = self.readings, self.readings + 1
        if at == self.fails:
            raise OSError("no such file")
        if not self.limit:
            return []
        return [
            SimpleNamespace(
                memory=self.memory,
                used_bytes=self.own + self.others,
                limit_bytes=self.limit,
                own_bytes=self.own,
            )
        ]

    def phase(self, name: str) -> Passage:
        return Passage(self)

    def cleanup_memory(self, aggressive: bool = False) -> dict[str, float]:
        self.cleanups += 1
        if aggressive:  # Else only a heap of another size is trimmed, see reclaim.WORTH.
            self.given_back = max(0, self.heap_free - self.taken)
            reclaim.times_trimmed += 1
        return {}


class Passage:
    """A micro-batch: what it has taken is free when it ends."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.peak_bytes: int | None = None
        self.device_peak_bytes: dict[int, int] = {}

    def __enter__(self) -> None:
        self.machine.peak = self.machine.own

    def __exit__(self, *error: object) -> None:
        machine = self.machine
        if machine.memory.startswith("cuda:"):
            self.device_peak_bytes = {int(machine.memory[5:]): machine.peak}
        else:
            self.peak_bytes = machine.peak
        machine.taken = 0


class Layer(nn.Module):
    """Takes its part of what a row takes, and what was asked for before in a forward pass."""

    def __init__(self, machine: Machine | None) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.machine = machine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.machine is not None:
            rows = x.numel() // x.shape[-1]  # A long row takes as much as several.
            self.machine.take(rows * self.machine.row * self.machine.factor / LAYERS)
        made: torch.Tensor = self.inner(x).tanh()
        return made


def model_of(machine: Machine | None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Layer(machine) for _ in range(LAYERS)), nn.Linear(6, 1))


def made(machine: Machine, **options: Any) -> tuple[GradAccumulator, nn.Sequential]:
    model = model_of(machine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, monitor=machine, **options)  # type: ignore[arg-type]
    machine.serve(acc)
    return acc, model


def loss_of(model: nn.Module, machine: Machine | None = None) -> Any:
    def loss_fn(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        if machine is not None:
            machine.tried.append(len(x))
            machine.taken = 0  # where nobody measures micro-batches
        return (model(x) - 0.5).square().sum(), len(x)

    return loss_fn


def batch(rows: int = 24, index: int = 0, *lengths: int) -> torch.Tensor:
    """Rows of one vector, or of `lengths`."""
    return torch.randn(rows, *lengths, 6, generator=torch.Generator().manual_seed(100 + index))


def windows(acc: GradAccumulator, model: nn.Module, machine: Machine, count: int = 1,
            rows: int = 24) -> list[list[int]]:  # fmt: skip
    """Some windows; the rows of each one's micro-batches."""
    found = []
    for index in range(count):
        machine.tried, machine.taken = [], 0
        acc.step(batch(rows, index), loss_of(model, machine))
        found.append(machine.tried)
    return found


def whole(count: int = 1, rows: int = 24) -> list[torch.Tensor]:
    """Parameters after as many windows of the whole batch, without an accumulator."""
    model = model_of(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index in range(count):
        optimizer.zero_grad()
        x = batch(rows, index)
        ((model(x) - 0.5).square().sum() / len(x)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


# --- ranks, of which the last has little memory ---


def machine_of(rank: int, world: int) -> Machine:
    """16 rows take 840 of 1,000 bytes; on the last rank, beside what others have, 4 do."""
    return Machine(1000, base=200, row=40, others=500 if rank == world - 1 else 0)


def sizes_of_steps(acc: GradAccumulator, machine: Machine, rank: int) -> list[list[int]]:
    """Rows of the micro-batches of two windows."""
    sizes = []
    for index in range(2):
        machine.tried = []
        acc.step(batch(24, 10 * index + rank), loss_of(acc.model, machine))
        sizes.append(machine.tried)
    return sizes


def whole_of_ranks(model: nn.Module, world: int) -> list[float]:
    """The parameters of one process that has all ranks' rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index in range(2):
        optimizer.zero_grad()
        x = torch.cat([batch(24, 10 * index + rank) for rank in range(world)])
        loss_sum, rows = loss_of(model)(x)
        (loss_sum / rows).backward()
        optimizer.step()
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()]
