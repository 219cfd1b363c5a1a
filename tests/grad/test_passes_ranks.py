"""BatchPasses on several ranks: the mean over the ranks of the gradients of their whole batches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from memtools._grad.passes import BatchPasses
from memtools._grad.ranks import RankError, find_ranks
from tests.kit.oominject import Inject
from tests.kit.ranks import every, ranks, same

ROWS, BATCHES = (5, 3), 2


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def batch(rank: int, at: int) -> torch.Tensor:
    return torch.randn(ROWS[rank], 4, generator=torch.Generator().manual_seed(10 * rank + at))


def wanted() -> list[float]:
    model = net()
    for rank in range(2):
        for at in range(BATCHES):
            (model(batch(rank, at)).square().sum() / 2).backward()
    return [x for p in model.parameters() for x in p.grad.flatten().tolist()]


def gradient(model: Any) -> list[float]:
    grads = (getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters())
    return [x for grad in grads for x in grad.flatten().tolist()]


def made(kind: str, inject: Any = None) -> Any:
    """The model, which runs out of memory in the middle of a pass."""
    model = net()
    if inject is not None:
        model[0].register_forward_hook(
            lambda module, args, output: inject(output) if torch.is_grad_enabled() else output
        )
    if kind == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    fully_shard(model[2], reshard_after_forward=False)
    return fully_shard(model)


def passes_of(model: Any) -> BatchPasses:
    found = find_ranks(model, list(model.parameters()))
    found.attach()
    with torch.no_grad():  # as an evaluation, which leaves whole parameters in fully_shard
        model(batch(0, 0))
    return BatchPasses(model, torch.Tensor.backward, micro_batch_size=4, ranks=found)


KINDS = ("DDP", "sharded")
FAILS: tuple[dict[str, set[int]], ...] = (
    {}, {"forward": {1}}, {"backward": {0}}, {"backward": {1}}
)  # fmt: skip


def run(kind: str, rank: int, inject: Inject) -> tuple[Any, BatchPasses]:
    """The batches of one update."""
    passes = passes_of(model := made(kind, inject))
    for at in range(BATCHES):
        own = batch(rank, at)

        def forward(rows: slice, own: Any = own) -> Any:
            count = len(own[rows])  # a part may be of rows that only another rank has
            return model(own[rows] if count else own[:1]).square().sum() * (count > 0)

        passes.step(len(own), forward)
    passes.reduce()
    return model, passes


@ranks(2)
def test_ranks_with_uneven_batches_and_one_out_of_memory(rank: int, world: int) -> None:
    for kind, fails in itertools.product(KINDS, FAILS):
        model, passes = run(kind, rank, Inject(**fails if rank else {}))
        assert same(gradient(model)) == pytest.approx(wanted(), rel=1e-5, abs=1e-6)
        retries = every(len(passes.retries))
        assert retries == ([len(fails)] * 2 if kind == "sharded" else [0, len(fails)])


@ranks(2)
def test_a_rank_that_fails_ends_the_update_of_all(rank: int, world: int) -> None:
    for kind in KINDS:
        inject = Inject(forward={0} if rank else (), error=lambda: KeyError("rows"))
        with pytest.raises(KeyError if rank else RankError) as failed:
            run(kind, rank, inject)
        assert rank or "rank 1 failed" in str(failed.value)


@ranks(2)
def test_ranks_exchange_values(rank: int, world: int) -> None:
    for kind in KINDS:
        found = find_ranks(model := made(kind), list(model.parameters()))
        assert same(found.exchange({"rank": rank})) == [{"rank": 0}, {"rank": 1}]
