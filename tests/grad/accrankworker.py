"""One rank of a small job that trains with GradAccumulator: runs a case, writes down what it got.

python -m tests.grad.accrankworker CASE RANK WORLD RENDEZVOUS OUT
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from memtools import GradAccumulator
from tests.grad.accumulatecases import summed_in_fp32
from tests.grad.fsdprankcases import FSDP, Deep, fsdp, fsdp_out_of_memory, sharded
from tests.grad.gradrankcases import STEPS, Net, counts, data, flat
from tests.grad.oomrankcases import OOM, out_of_memory
from tests.grad.pressurerankcases import PRESSURE
from tests.kit.oominject import Inject
from tests.kit.ranks import fork_ranks, meet

DDP = torch.nn.parallel.DistributedDataParallel


def told(call: Callable[[], Any]) -> str:
    """What the call raises, in words."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def made(model: torch.nn.Module, **options: Any) -> GradAccumulator:
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return GradAccumulator(model, optimizer, STEPS, **options)


def lossy(acc: GradAccumulator, batch: Any, factor: float = 1.0) -> None:
    x, y = batch
    with acc.micro_batch():
        loss = (acc.model(x) - y).float().square().sum() * factor
        acc.backward(loss, weight=len(x))


def shape(report: Any) -> Any:
    return None if report is None else [report.micro_batches, report.weight, report.skipped]


def windows(rank: int) -> Any:
    """Uneven loaders, two epochs, with a scheduler."""
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    acc = GradAccumulator(model, optimizer, STEPS, scheduler=scheduler)
    ends = []
    for _ in range(2):
        for batch in data(rank)[: counts(dist.get_world_size())[rank]]:
            lossy(acc, batch)
        ends.append(shape(acc.flush()))
    report = acc.report()
    return [flat(model), ends, report.updates, report.micro_batches, scheduler.last_epoch]


def means(rank: int) -> Any:
    """Losses without weights: the mean over the micro-batches that there are, on all ranks."""
    model = DDP(Net())
    acc = made(model)
    for x, y in data(rank)[: 2 + rank]:
        with acc.micro_batch():
            acc.backward((model(x) - y).square().sum() / len(x))
    acc.flush()
    return flat(model)


def clipped(rank: int) -> Any:
    """By the norm of the whole gradient, which all ranks see alike."""
    model = DDP(Net())
    acc = made(model, max_norm=0.05)
    for batch in data(rank)[:4]:
        lossy(acc, batch)
    last = acc.report().last
    return [flat(model), last.norm, last.coefficient]


def wide_gradients(rank: int) -> Any:
    """bf16 parameters whose gradients are added up in fp32: the sums are what the ranks add up,
    also where a rank has none."""
    model = DDP(summed_in_fp32(Net().bfloat16()))
    acc = made(model)
    for x, y in data(rank)[: 8 if rank == 0 else 3]:
        lossy(acc, (x.bfloat16(), y.bfloat16()))
    acc.flush()
    refused = told(lambda: made(summed_in_fp32(sharded(Deep().bfloat16()))))
    both = told(lambda: made(DDP(summed_in_fp32(Net().bfloat16())), overlap=True))
    return [flat(model), acc.report().updates, refused, both]


def skips(rank: int) -> Any:
    """fp16: one rank's inf leaves the update out everywhere, and the scale falls everywhere."""
    model = DDP(Net())
    acc = made(model, precision="fp16", init_scale=2.0**8)
    before, seen = flat(model), []
    for i, batch in enumerate(data(rank)[:8]):
        lossy(acc, batch, 1e30 if i == 1 and rank == 1 else 1.0)
        if i % 4 == 3:
            last = acc.report().last
            seen.append([last.skipped, last.infs > 0, last.nans, last.first_bad, last.scale])
            seen.append(flat(model) == before)
    return [seen, flat(model), acc.scale]


def torn(rank: int) -> Any:
    """The last rank's loss function fails after a backward pass; all drop the window and go on."""
    model = DDP(Net())
    acc = made(model)
    found = []

    def fails() -> None:
        with acc.micro_batch():
            x, y = data(rank)[4]
            acc.backward((model(x) - y).square().sum(), weight=len(x))
            raise ValueError("a bad batch")

    def window(start: int) -> None:
        for i, batch in enumerate(data(rank)[start : start + 4]):
            if start == 4 and i == 2 and rank == dist.get_world_size() - 1:
                fails()
            lossy(acc, batch)

    for start in (0, 4, 8):
        before = flat(model)
        found.append(told(lambda start=start: window(start)))
        if start == 4:
            found.append(told(lambda: lossy(acc, data(rank)[0])))
            found.append(flat(model) == before)
            acc.reset()
    return [found, flat(model), acc.report().updates]


def skipped_batch(rank: int) -> Any:
    """What fails before its backward pass can be left out, and nobody else knows."""
    model = DDP(Net())
    acc = made(model)
    for i, batch in enumerate(data(rank)[:5]):
        if rank == 0 and i == 2:
            try:
                with acc.micro_batch():
                    raise KeyError("no label")
            except KeyError:
                continue
        lossy(acc, batch)
        if acc.report().updates:
            break
    return [flat(model), acc.report().micro_batches]


def sparse_error(rank: int) -> Any:
    """One rank's gradient cannot be summed: its own error there, the others are told."""
    model = torch.nn.ModuleList([torch.nn.Embedding(4, 2, sparse=rank == 0)])
    acc = made(model, ranks=True)

    def micro() -> None:
        with acc.micro_batch():
            acc.backward(model[0](torch.tensor([1, 2])).sum(), weight=2)

    return [told(micro) for _ in range(4)][-1]


def no_weight(rank: int) -> Any:
    """Padding only, on one rank it is fine; on all of them there is nothing to average over."""
    model = DDP(Net())
    acc = made(model)
    x, y = data(rank)[0]

    def micro(weight: float) -> None:
        with acc.micro_batch():
            acc.backward((model(x) - y).square().sum() * (weight > 0), weight=weight)

    for _ in range(4):
        micro(0.0 if rank == 0 else float(len(x)))
    good = flat(model)
    for _ in range(3):
        micro(0.0)
    refused = told(lambda: micro(0.0))
    micro(float(len(x)))  # it goes on in the same window
    return [good, refused, flat(model), acc.report().updates]


def nothing(rank: int) -> Any:
    """flush() where no rank has anything."""
    acc = made(DDP(Net()))
    return [shape(acc.flush()), shape(acc.flush()), acc.report().windows]


def resumed(rank: int) -> Any:
    """A state taken in the middle of a window, by ranks at different places in it."""
    results = []
    for stop in (False, True):
        model = DDP(Net())
        acc = made(model)
        for i, batch in enumerate(data(rank)[:8]):
            if stop and i == 5 + rank:
                state, weights = acc.state_dict(), model.state_dict()
                acc.close()
                model = DDP(Net())
                model.load_state_dict(weights)
                acc = made(model)
                acc.load_state_dict(state)
            lossy(acc, batch)
        results.append(flat(model))
    return results[0] == results[1]


def closed(rank: int) -> Any:
    """What an accumulator leaves of DDP's flags, and whether DDP reduces by itself again."""
    model = DDP(Net(norm=True))
    before = model.require_forward_param_sync
    acc = made(model)
    x, y = data(rank)[0]
    with acc.micro_batch():
        acc.backward((model(x) - y).square().sum(), weight=len(x))
    acc.flush()
    acc = made(model)
    acc.close()
    model.zero_grad()
    (model(x) - y).square().sum().backward()
    gradients = [v for p in model.parameters() for v in p.grad.flatten().tolist()]  # type: ignore
    return [before, model.require_forward_param_sync, gradients]


def losses(rank: int) -> Any:
    """A window in which the first rank has one batch and the others have two."""
    model = DDP(Net())
    acc = made(model)
    own = data(rank)[: 1 + (rank > 0)]
    sums = [float((model.module(x) - y).square().sum().detach()) for x, y in own]

    @acc.accumulate
    def micro(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (model(x) - y).square().sum(), len(x), {"rows": len(x)}

    for x, y in own:
        micro(x, y)
    report = acc.flush()
    assert report is not None
    rows = sum(len(x) for x, _ in own)
    found = [report.loss, report.own_weight, report.extras]
    return [found, [sum(sums) / rows, rows, {"rows": rows}], report.weight]


def views(rank: int) -> Any:
    """DDP whose gradients are views of its buckets: which of its runs do not have the bits of those
    in which they are not."""
    make = torch.Generator().manual_seed(rank)
    batches = [[torch.randn(16, n, generator=make) for n in (3, 2)] for _ in range(3)]

    def run(view: bool, overlap: bool, how: str) -> Any:
        model = DDP(Net(), gradient_as_bucket_view=view)
        acc = made(model, overlap=overlap, micro_batch_size=4)
        inject = Inject(backward={1} if how == "out of memory" else ())

        def loss_fn(micro: Any) -> Any:
            return (inject(model(micro[0])) - micro[1]).square().sum(), len(micro[0])

        for batch in batches:
            if how != "loop":
                acc.step(tuple(batch), loss_fn)
                continue
            for x, y in zip(*(part.split(4) for part in batch), strict=True):
                lossy(acc, (x, y))
        report = acc.report()
        return [flat(model), report.updates, report.micro_batches, report.ran_out]

    wrong = []
    for overlap in (False, True):
        for how in ("loop", "step", "out of memory"):
            wanted = told(lambda o=overlap, h=how: run(False, o, h))  # type: ignore[misc]
            found = told(lambda o=overlap, h=how: run(True, o, h))  # type: ignore[misc]
            if found != wanted or "Error" in wanted:
                wrong.append([overlap, how, found, wanted])
    return wrong


SHARED = (views, windows, means, losses, closed, clipped, wide_gradients, skips, torn,
          skipped_batch, sparse_error, no_weight, nothing, resumed, *OOM, *PRESSURE)  # fmt: skip


def healthy(rank: int) -> Any:
    """One after the other: a process that imports torch is dear."""
    found = {}
    for case in (*SHARED, *FSDP):
        torch.manual_seed(3)
        found[case.__name__] = case(rank)
    return found


def alone(rank: int) -> Any:
    """A job of one rank, as one tries it on a machine of one's own."""
    cases = (views, windows, means, losses, clipped, out_of_memory, fsdp, fsdp_out_of_memory)
    return {case.__name__: case(rank) for case in cases}


def dead(rank: int) -> Any:
    """Rank 1 ends in the middle of a window; rank 0 gets torch's error at its end."""
    acc = made(DDP(Net()))
    for batch in data(rank)[: 2 if rank == 1 else 3]:
        lossy(acc, batch)
    meet()
    if rank == 1:
        return None
    return told(lambda: lossy(acc, data(rank)[3])).split(":")[0]


CASES: dict[str, Callable[[int], Any]] = {case.__name__: case for case in (healthy, alone, dead)}


def ready() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a retry collects cycles: not among all that was imported


if __name__ == "__main__":
    fork_ranks(CASES, ready=ready)
