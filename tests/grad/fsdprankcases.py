"""Ranks of a model in fully_shard: cases of tests/grad/accrankworker.py."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memtools import GradAccumulator
from tests.grad.backoffcases import ROWS, batch, loss_of, undoing
from tests.grad.gradrankcases import STEPS, data
from tests.grad.oomrankcases import PHASES, SIZE, split_after
from tests.kit.oominject import Inject


class Deep(torch.nn.Module):
    """Layers that are sharded each; runs out of memory after the layer that it is told."""

    def __init__(self, width: int = 3, out: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.first = torch.nn.Linear(width, 7)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(3))
            self.last = torch.nn.Linear(7, out)
        self.inject, self.after = Inject(), 1
        self.drop = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = self.drop(torch.tanh(layer(x)))
            if i == self.after:
                x = self.inject(x)
        made: torch.Tensor = self.last(x)
        return made


def sharded(model: Deep, mesh: Any = None) -> Any:
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def full(model: torch.nn.Module) -> list[float]:
    return [v for p in model.parameters() for v in p.full_tensor().detach().flatten().tolist()]  # type: ignore[attr-defined]


def told(call: Any) -> str:
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def train(acc: GradAccumulator, batches: list[Any]) -> None:
    for x, y in batches:
        with acc.micro_batch():
            acc.backward((acc.model(x) - y).square().sum(), weight=len(x))
    acc.flush()


def fsdp(rank: int) -> Any:
    """Two windows and a partial one, of micro-batches of all sizes; clipped by the whole norm."""
    found = []
    for shape in ((dist.get_world_size(),), (1, dist.get_world_size())):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
        model = sharded(Deep(), mesh)
        acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.5), STEPS, max_norm=0.2)
        train(acc, data(rank)[:10])
        last = acc.report().last
        found.append([full(model), last.norm, last.weight, last.micro_batches])
    return found


def fsdp_scale(rank: int) -> Any:
    """fp16: an inf on one rank is seen by all, though its shards lie elsewhere."""
    model = sharded(Deep())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    acc = GradAccumulator(model, optimizer, 2, precision="fp16", init_scale=2.0**8)
    before = full(model)
    for i, (x, y) in enumerate(data(rank)[:2]):
        with acc.micro_batch():
            loss = (model(x) - y).float().square().sum()
            acc.backward(loss * (1e38 if i == 1 and rank == 1 else 1.0), weight=len(x))
    last = acc.report().last
    return [last.skipped, last.infs + last.nans > 0, last.first_bad, full(model) == before,
            acc.scale]  # fmt: skip


def run(rank: int, inject: Inject, after: int, sizes: Any = None, undo: str = "scratch") -> Any:
    torch.manual_seed(rank)
    inner = Deep(6, 1)
    inner.inject, inner.after, inner.drop.p = inject, after, 0.3
    model = sharded(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, 4, micro_batch_size=SIZE, max_norm=1.0)
    undoing(acc, undo)
    for i in range(2):
        named = {} if sizes is None else {"sizes": sizes[i]}
        step: Any = acc.step if sizes is None else acc._get_back_off().step
        step(batch(10 * i + rank, SIZE if i else ROWS), loss_of(model), **named)
    retries = [[r.micro_batch, r.next_rows] for r in acc.report().retries]
    return [full(model), torch.rand(2).tolist()], retries


def fsdp_out_of_memory(rank: int) -> Any:
    """The last rank runs out in the middle of each micro-batch in turn; all halve together. Says
    where that is not the run in which all began with the split."""
    alone = rank == dist.get_world_size() - 1
    wrong = []
    for index in range(4):
        want, none = run(rank, Inject(), 0, [split_after(index), [SIZE // 2] * 2])
        for phase in PHASES:
            inject = Inject(**({phase: {index}} if alone else {}))
            found, retries = run(rank, inject, index % 3)
            if found != want or none or retries != [[index, SIZE // 2]]:
                wrong.append([index, phase, retries])
    return wrong


def fsdp_undo(rank: int) -> Any:
    """Which ways to take a micro-batch back do not come to the same bits."""
    wrong = []
    for index in (0, 2):
        want = None
        for undo in ("scratch", "redo"):
            inject = Inject(backward={index} if rank == 0 else ())
            found = told(lambda i=inject, u=undo: run(rank, i, 1, undo=u)[0])
            want = found if want is None else want
            if found != want or "Error" in found:
                wrong.append([index, undo, found])
    return wrong


def fsdp_hopeless(rank: int) -> Any:
    """Rank 0 cannot take one row: all leave, and the next batch is fine."""
    inner = Deep(6, 1)
    inner.inject = Inject(backward={1, 2, 3} if rank == 0 else ())
    model = sharded(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    acc = GradAccumulator(model, optimizer, 4, micro_batch_size=SIZE)
    before, found = full(model), []
    for i in range(2):
        found.append(told(lambda i=i: acc.step(batch(10 * i + rank), loss_of(model)).weight > 0))
        found.append(full(model) == before)
    return found


def fsdp_raises(rank: int) -> Any:
    """A loss function that fails on one rank in the middle, in step() and in a loop."""
    model = sharded(Deep(6, 1))
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), lr=0.05), 4)
    before, found = full(model), []

    def bad(micro: Any) -> Any:
        if rank == 0:
            raise KeyError("label")
        return loss_of(model)(micro)

    def loop(loss_fn: Any) -> None:
        for i in range(4):
            with acc.micro_batch():
                acc.backward(*loss_fn(batch(i)))

    found.append(told(lambda: acc.step(batch(rank), bad)))
    found.append(told(lambda: loop(bad)))
    acc.reset()
    found.append(full(model) == before)
    found.append(told(lambda: loop(loss_of(model))))
    return [found, full(model)]


def fsdp_uneven(rank: int) -> Any:
    """Loaders that are not even: every rank is told, in the middle of a window and at its end."""
    found = []
    for many in (3, 4):
        model = sharded(Deep())
        acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.5), STEPS)
        mine = data(rank)[: many + (rank == 0)]
        found.append(told(lambda a=acc, m=mine: train(a, m)))
    return found


def fsdp_refused(rank: int) -> Any:
    found = []
    part = Deep()
    for layer in part.layers:
        fully_shard(layer)
    model = Deep()
    ignored = fully_shard(model, ignored_params={model.last.bias})
    for wrong in (part, ignored):
        optimizer = torch.optim.SGD(wrong.parameters(), 0.5)
        found.append(told(lambda m=wrong, o=optimizer: GradAccumulator(m, o, 2)))
    good = sharded(Deep())
    optimizer = torch.optim.SGD(good.parameters(), 0.5)
    found.append(told(lambda: GradAccumulator(good, optimizer, 2, overlap=True)))
    return found


def fsdp_outside(rank: int) -> Any:
    """Passes outside of micro-batches, as those of an evaluation, ask nobody."""
    model = sharded(Deep())
    acc = GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.5), STEPS)
    with mock.patch.object(acc._runner.ranks._pass, "_before") as asked:
        model(data(rank)[0][0]).sum().backward()
        outside = asked.call_count
        acc.optimizer.zero_grad()
        x, y = data(rank)[0]
        with acc.micro_batch():
            acc.backward((model(x) - y).square().sum(), weight=len(x))
    return [outside, asked.call_count]


def fsdp_closed(rank: int) -> Any:
    """How many calls lie around FSDP's own, with several accumulators and with none."""
    model = sharded(Deep())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def depths(acc: GradAccumulator) -> list[int]:
        found = []
        for group in acc._runner.ranks._pass._groups:  # type: ignore[attr-defined]
            for name in ("unshard", "post_backward"):
                call, depth = getattr(group, name), 0
                while isinstance(call, functools.partial):
                    call, depth = call.args[1], depth + 1
                found.append(depth)
        return sorted(set(found))

    x, y = data(rank)[0]
    found = []
    first = GradAccumulator(model, optimizer, 1)
    second = GradAccumulator(model, optimizer, 1)
    found.append(depths(second))
    first.close()  # which has the model no more
    found.append(depths(second))
    third = GradAccumulator(model, optimizer, 1)
    groups = third._runner.ranks._pass._groups  # type: ignore[attr-defined]
    with third.micro_batch():
        third.backward((model(x) - y).square().sum(), weight=len(x))
    del third, first, second
    last = GradAccumulator(model, optimizer, 1)
    found.append(depths(last))
    last.close()
    found.append(depths(last))
    found.append([name for group in groups for name in vars(group) if name == "unshard"])
    (model(x) - y).square().sum().backward()
    return found


FSDP = (fsdp, fsdp_scale, fsdp_out_of_memory, fsdp_undo, fsdp_hopeless, fsdp_raises, fsdp_uneven,
        fsdp_refused, fsdp_outside, fsdp_closed)  # fmt: skip
