"""One rank of a small job that accumulates gradients: runs a case and writes down what it got.

python -m tests.grad.gradrankworker CASE RANK WORLD RENDEZVOUS OUT
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from memtools._grad.gradients import Gradients
from memtools._grad.ranks import Ranks, find_ranks
from memtools._grad.ranks_wire import BUCKET_BYTES, Wire
from memtools._grad.window import Window
from tests.grad.gradrankcases import STEPS, Net, counts, data, flat
from tests.kit.ranks import fork_ranks

DDP = torch.nn.parallel.DistributedDataParallel


def says(call: Callable[[], Any]) -> str:
    """What the call raises, in words."""
    try:
        return str(call())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


# --- what goes over the wire ----------------------------------------------------------------------


def table(rank: int) -> Any:
    made = Wire().table([rank + 0.1, 2.0**60 + rank], [1.0, float(rank)])
    empty = Wire().table([float(rank)])
    return [made.rows, made.counts, empty.rows, empty.counts]


def tensors(rank: int) -> list[torch.Tensor]:
    """All kinds, and more than one bucket: rank r has r + 1 everywhere."""
    made = [
        torch.ones(3, 5),
        torch.ones(4, 6, dtype=torch.float64).t(),  # not contiguous
        torch.ones(7, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.float16),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(0, 3),
        torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(BUCKET_BYTES // 4 + 5),  # one that is a bucket of its own
        torch.ones(11),
    ]
    return [tensor.mul_(rank + 1) for tensor in made]


def sums(rank: int) -> Any:
    made = tensors(rank)
    before = [(t.data_ptr(), t.stride()) for t in made]
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(flat: torch.Tensor, *args: Any, **named: Any) -> Any:
        sent.append(flat.nbytes)
        return reduce(flat, *args, **named)

    with mock.patch.object(dist, "all_reduce", counted):
        Wire().sum(made, 0.5)
    same = [(t.data_ptr(), t.stride()) for t in made] == before
    return [same, len(sent), [sorted({complex(v).real for v in t.flatten().tolist()})
                              for t in made]]  # fmt: skip


def half_sums(rank: int) -> Any:
    """bf16 has 8 bits: 256 + 1 is 256, so that a sum by steps would lose what this one keeps."""
    kept = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    large = torch.tensor([60000.0, 1.0] if rank == 0 else [-30000.0, 1.0], dtype=torch.float16)
    Wire().sum([kept, large])
    return [kept.item(), large.tolist()]


def modes(rank: int) -> Any:
    made = torch.ones(2) * rank
    with torch.inference_mode(), torch.device("meta"):
        wire = Wire()
        rows = wire.table([float(rank)]).rows
        wire.sum([made])
    return [rows, made.tolist()]


def copies(rank: int) -> Any:
    made = [t.add_(rank) for t in (torch.zeros(3), torch.zeros(2, dtype=torch.int64))]
    Wire().broadcast(made)
    return [t.tolist() for t in made]


# --- windows, by a loop as small as it can be -----------------------------------------------------


class Loop:
    """A window's end without precision, clipping and reports."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.5)
        self.ranks: Ranks = find_ranks(model, list(model.parameters()), **options)
        self.gradients = Gradients(model.parameters())
        self.window = Window()
        self.ends: list[Any] = []

    def micro(self, x: torch.Tensor, y: torch.Tensor, last: bool = False) -> None:
        weight = float(len(x))
        with self.ranks.forward(last):
            loss = (self.model(x) - y).square().sum()
            if self.window.empty:
                self.window.begin(STEPS, weight, 1.0)
                self.window.guess = self.ranks.guess(self.window.guess)
            (loss * self.window.scale * self.window.guess).backward()
        self.window.add(weight)
        self.window.count += 1

    def end(self, flushing: bool = False) -> bool:
        reduced = self.ranks.reduce(self.gradients, self.window, flushing=flushing)
        self.window = Window()
        self.ends.append([reduced.weight, list(reduced.counts), reduced.finished])
        if reduced.guess:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= reduced.divided / (reduced.guess * reduced.weight)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return reduced.finished

    def run(self, batches: list[Any], flush: bool = True) -> None:
        for i, (x, y) in enumerate(batches):
            last = (i + 1) % STEPS == 0
            self.micro(x, y, last)
            if last:
                self.end()
        while flush and not self.end(flushing=True):
            pass


def windows(rank: int) -> Any:
    """Loaders of different length, micro-batches of different size; two epochs."""
    loop = Loop(DDP(Net()))
    mine = data(rank)[: counts(dist.get_world_size())[rank]]
    for _ in range(2):
        loop.run(mine)
    return [flat(loop.model), loop.ends]


def without_ddp(rank: int) -> Any:
    """ranks=True over models that differ at first."""
    model = Net()
    if rank:
        for parameter in model.parameters():
            parameter.data.add_(1.0)
    loop = Loop(model, ranks=True)
    mine = data(rank)[: counts(dist.get_world_size())[rank]]
    for _ in range(2):
        loop.run(mine)
    return [flat(loop.model), loop.ends]


def overlapped(rank: int) -> Any:
    """Even loaders of 6: DDP reduces the first window, flush the rest by hand."""
    loop = Loop(DDP(Net()), overlap=True)
    with mock.patch.object(loop.ranks._wire, "sum", wraps=loop.ranks._wire.sum) as by_hand:  # type: ignore[attr-defined]
        loop.run(data(rank)[:6])
    return [flat(loop.model), loop.ends, by_hand.call_count]


def no_collective(rank: int) -> Any:
    """Rank 0 runs micro-batches alone, in all forms; another wait would never end."""
    loop = Loop(DDP(Net(norm=True)))
    again = 3 if rank == 0 else 1
    for x, y in data(rank)[:again]:
        loop.micro(x, y)
    loop.end()
    for x, y in data(rank)[:again]:
        loop.micro(x, y)
    with torch.no_grad(), loop.ranks.forward(False):
        loop.model(data(rank)[0][0])
    loop.end()
    return loop.ends


def batch_norm(rank: int) -> Any:
    """The buffers of every window's first forward pass are rank 0's, as in DDP's own loop."""
    seen = []
    for ours in (True, False):
        loop = Loop(DDP(Net(norm=True)))
        for start in (0, 4):
            for i, (x, y) in enumerate(data(rank)[start : start + 4]):
                if ours:
                    loop.micro(x, y)
                    continue
                with contextlib.nullcontext() if i == 3 else loop.model.no_sync():
                    loop.model(x).sum().backward()
            if ours:
                loop.ranks.reduce(loop.gradients, loop.window)
        with torch.no_grad():  # where DDP's broadcast comes
            loop.model(data(0)[0][0])
        seen.append([b.tolist() for b in loop.model.buffers()])
    return seen


def unused(rank: int) -> Any:
    """Each rank uses another branch; the last is used by none, and keeps no gradient."""
    model = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(4))
    loop = Loop(DDP(model, find_unused_parameters=True))
    with loop.ranks.forward(False):
        loss = loop.model.module[rank](torch.ones(1, 2)).sum()
        loop.window.begin(1, 1.0, 1.0)
        (loss * loop.window.scale * loop.window.guess).backward()
    loop.window.add(1.0)
    loop.window.count += 1
    reduced = loop.ranks.reduce(loop.gradients, loop.window)
    return [None if layer.weight.grad is None else (layer.weight.grad / reduced.guess).tolist()
            for layer in model]  # fmt: skip


def failing(rank: int) -> Any:
    """The last rank fails in its second window: all are told, and go on together."""
    loop = Loop(DDP(Net()))
    batches, told = data(rank), []
    for start in (0, 4, 8):
        before = flat(loop.model)
        for x, y in batches[start : start + 4]:
            loop.micro(x, y)
        if start == 4 and rank == dist.get_world_size() - 1:
            loop.ranks.fail(MemoryError("too much"))
            told.append("its own")
        else:
            told.append(says(loop.end))
        if start == 4:
            told.append(flat(loop.model) == before)
            loop.window = Window()
            loop.optimizer.zero_grad()
    return [told, flat(loop.model)]


def problem(rank: int) -> Any:
    """An error found at a window's end is the rank's own, after the others know."""
    loop = Loop(DDP(Net()))
    loop.micro(*data(rank)[0])
    own = TypeError("sparse") if rank == 0 else None
    try:
        loop.ranks.reduce(loop.gradients, loop.window, problem=own)
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def unlike(rank: int) -> Any:
    """Ranks whose windows are not of one kind."""
    found = []
    for name, value in (("weighted", rank == 0), ("scale", 2.0 ** (16 + rank))):
        loop = Loop(DDP(Net()))
        loop.micro(*data(rank)[0])
        setattr(loop.window, name, value)
        found.append(says(loop.end))
    return found


def refused(rank: int) -> Any:
    """What is not supported is said when the accumulator is made."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.fsdp import FullyShardedDataParallel

    hooked = DDP(Net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    cast = DDP(Net())
    cast.mixed_precision = SimpleNamespace()
    kind = type("FullyShardedDataParallel", (torch.nn.Module,), {})
    assert FullyShardedDataParallel.__name__ == kind.__name__
    models = [(DDP(Net(), static_graph=True), {}), (hooked, {}), (cast, {}),
              (torch.nn.Sequential(kind()), {}), (Net(), {"overlap": True}),
              (Net(), {"ranks": True, "overlap": True})]  # fmt: skip
    found = [says(lambda m=m, o=o: find_ranks(m, list(m.parameters()), **o)) for m, o in models]
    wider = torch.nn.Linear(2 + rank, 1)
    found.append(says(lambda: find_ranks(wider, list(wider.parameters()), ranks=True)))
    return found


def kinds(rank: int) -> Any:
    """Which way is found for which model."""
    ddp = DDP(Net())
    with_sync = torch.nn.Sequential(torch.nn.SyncBatchNorm(3), Net())
    models: list[tuple[Any, Any]] = [
        (Net(), None), (ddp, None), (torch.nn.Sequential(ddp), None), (ddp, False), (Net(), True),
        (Net(), dist.group.WORLD), (with_sync, True),
    ]  # fmt: skip
    found = [find_ranks(m, list(m.parameters()), ranks) for m, ranks in models]
    return [[type(r).__name__, r.world, r.rank, bool(r.no_retry)] for r in found]


def left_out(rank: int) -> Any:
    """A parameter that DDP was told to ignore stays the rank's own."""
    model = Net()
    model._ddp_params_and_buffers_to_ignore = ["out.bias"]  # type: ignore[assignment]
    ddp = DDP(model)
    ranks = find_ranks(ddp, list(ddp.parameters()))
    for parameter in ddp.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    window = Window()
    window.begin(1, 1.0, 1.0)
    window.add(1.0)
    ranks.reduce(Gradients(ddp.parameters()), window)
    return [p.grad.flatten()[0].item() for _, p in model.named_parameters()]  # type: ignore[union-attr]


SHARED = (table, sums, half_sums, modes, copies, windows, without_ddp, overlapped, no_collective,
          batch_norm, unused, failing, problem, unlike, refused, kinds, left_out)  # fmt: skip


def by_hand(rank: int) -> Any:
    """One after the other: a process that imports torch is dear."""
    found = {}
    for case in SHARED:
        torch.manual_seed(3)
        found[case.__name__] = case(rank)
    return found


CASES: dict[str, Callable[[int], Any]] = {case.__name__: case for case in (by_hand,)}


if __name__ == "__main__":
    fork_ranks(CASES, ready=lambda: torch.set_num_threads(1))
