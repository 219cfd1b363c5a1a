"""Ranks with a monitor each, of which the last has little memory: cases of accrankworker.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from memtools import GradAccumulator
from tests.grad.fsdprankcases import Deep, full, sharded
from tests.grad.pressurecases import Machine, batch, loss_of, model_of

WINDOWS = 2


def machine_of(rank: int) -> Machine:
    """16 rows take 840 of 1,000 bytes; on the last rank, beside what others have, 4 do."""
    last = rank == dist.get_world_size() - 1
    return Machine(1000, base=200, row=40, others=500 if last else 0)


class Wide(Deep):
    """A sharded model that takes its rows' bytes."""

    def __init__(self, machine: Machine | None) -> None:
        super().__init__(6, 1)
        self.machine = machine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.machine is not None:
            self.machine.take(len(x) * self.machine.row)
        return super().forward(x)


def steps(acc: GradAccumulator, machine: Machine, rank: int) -> list[list[int]]:
    sizes = []
    for index in range(WINDOWS):
        machine.tried = []
        acc.step(batch(24, 10 * index + rank), loss_of(acc.model, machine))
        sizes.append(machine.tried)
    return sizes


def pressure(rank: int) -> Any:
    """Each rank takes as many rows as it has room for."""
    machine = machine_of(rank)
    model = torch.nn.parallel.DistributedDataParallel(model_of(machine))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, monitor=machine)  # type: ignore[arg-type]
    machine.serve(acc)
    sizes = steps(acc, machine, rank)
    return [[v for p in model.parameters() for v in p.detach().flatten().tolist()], sizes]


def pressure_sharded(rank: int) -> Any:
    """All take as many as the last one has room for."""
    machine = machine_of(rank)
    model = sharded(Wide(machine))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, monitor=machine)  # type: ignore[arg-type]
    machine.serve(acc)
    sizes = steps(acc, machine, rank)
    return [full(model), sizes]


def pressure_refused(rank: int) -> Any:
    found = []
    last = rank == dist.get_world_size() - 1
    machine = machine_of(rank)
    model = sharded(Wide(machine))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given: Any = machine if last else None
    try:
        found.append(str(GradAccumulator(model, optimizer, monitor=given)))
    except ValueError as error:
        found.append(f"ValueError: {error}")
    machine.running = not last
    plain = torch.nn.parallel.DistributedDataParallel(model_of(machine))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    acc = GradAccumulator(plain, optimizer, monitor=machine)  # type: ignore[arg-type]
    try:
        found.append(str(acc.step(batch(24, rank), loss_of(plain))))
    except RuntimeError as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def whole_of_ranks(world: int, sharded: bool = False) -> list[float]:
    """The parameters of one process that has all ranks' rows."""
    model: Any = Wide(None) if sharded else model_of(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for index in range(WINDOWS):
        optimizer.zero_grad()
        x = torch.cat([batch(24, 10 * index + rank) for rank in range(world)])
        loss_sum, rows = loss_of(model)(x)
        (loss_sum / rows).backward()
        optimizer.step()
    return [v for p in model.parameters() for v in p.detach().flatten().tolist()]


PRESSURE = (pressure, pressure_sharded, pressure_refused)
