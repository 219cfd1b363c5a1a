"""Ranks of which one runs out of memory: cases of tests/grad/accrankworker.py."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from memtools import GradAccumulator
from tests.grad.backoffcases import ROWS, Model, batch, loss_of
from tests.grad.gradrankcases import flat
from tests.kit.oominject import Inject

SIZE = 4
PHASES = ("forward", "backward")


def split_after(index: int) -> list[int]:
    """Sizes of a window in which micro-batch `index` did not fit."""
    return [SIZE] * index + [SIZE // 2] * ((ROWS - SIZE * index) // (SIZE // 2))


def made(rank: int, inject: Inject) -> tuple[GradAccumulator, Model]:
    torch.manual_seed(1)
    inner = Model()
    inner.inject = inject
    model = torch.nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, 4, micro_batch_size=SIZE, max_norm=1.0)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    return acc, inner


def run(rank: int, inject: Inject, sizes: list[list[int]] | None = None) -> Any:
    """All that two windows leave behind; every rank has rows of its own."""
    acc, inner = made(rank, inject)
    for i in range(2):
        named = {} if sizes is None else {"sizes": sizes[i]}
        step: Any = acc.step if sizes is None else acc._get_back_off().step
        step(batch(10 * i + rank), loss_of(acc.model), **named)
    assert len(acc.report().retries) == len(inject.fails["forward"] | inject.fails["backward"])
    return [flat(inner), [b.tolist() for b in inner.buffers()], random.random(),
            float(np.random.random()), torch.rand(2).tolist()]  # fmt: skip


def out_of_memory(rank: int) -> Any:
    """The last rank runs out in each micro-batch in turn, in the forward and the backward pass.
    Says where that is not the run in which it began with the split; and every rank's bits."""
    alone = rank == dist.get_world_size() - 1
    wrong, left = [], []
    for index in range(4):
        smaller = [[split_after(index), [SIZE // 2] * 8], None]
        want = run(rank, Inject(), smaller[0] if alone else None)
        for phase in PHASES:
            found = run(rank, Inject(**({phase: {index}} if alone else {})))
            if found != want:
                wrong.append([index, phase])
            left.append(found[:2])
    return [wrong, left]


def hopeless(rank: int) -> Any:
    """The last rank cannot take one row: its error is its own, the others are told, nobody has
    stepped; and the next batch is fine."""
    alone = rank == dist.get_world_size() - 1
    acc, inner = made(rank, Inject(forward={1, 2, 3} if alone else ()))
    inner.norm = torch.nn.Identity()  # BatchNorm does not take one row
    before, found = flat(inner), []
    for i in range(2):
        try:
            found.append(acc.step(batch(10 * i + rank), loss_of(acc.model)).micro_batches > 0)
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error)[:40]}")
            found.append([flat(inner) == before, acc.report().windows])
    return [found, flat(inner)]


def raises(rank: int) -> Any:
    """A loss function that fails on one rank."""
    acc, inner = made(rank, Inject())
    found = []

    def bad(micro: Any) -> Any:
        if rank == 0 and acc._runner.window.count == 2:
            raise KeyError("label")
        return loss_of(acc.model)(micro)

    for loss_fn in (bad, loss_of(acc.model)):
        try:
            found.append(acc.step(batch(rank), loss_fn).micro_batches > 0)
        except Exception as error:
            found.append(f"{type(error).__name__}: {str(error)[:40]}")
    return [found, flat(inner)]


def ended(rank: int) -> Any:
    """One rank has no batch left, and flushes while the others step."""
    acc, inner = made(rank, Inject())
    for i in range(3 if rank else 1):
        acc.step(batch(10 * i + rank), loss_of(acc.model))
    acc.flush()
    return [flat(inner), acc.report().updates]


OOM = (out_of_memory, hopeless, raises, ended)
