"""GradAccumulator on ranks of a model in fully_shard: they go through each micro-batch together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from memtools import GradAccumulator
from memtools._grad.ranks import RankError
from memtools._grad.ranks_fsdp import PeerMemoryError
from tests.grad.accumulatecases import summed_in_fp32
from tests.grad.backoffcases import ROWS, batch, loss_of, undoing
from tests.grad.pressurecases import Machine, machine_of, sizes_of_steps, whole_of_ranks
from tests.grad.rankcases import FAILED, close, data, flat, made, micro, train
from tests.kit.oominject import Inject
from tests.kit.ranks import ranks, same

SIZE = 4


class Deep(torch.nn.Module):
    """Layers that are sharded each; runs out of memory after the layer that it is told."""

    def __init__(self, width: int = 3, out: int = 2, machine: Machine | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.first = torch.nn.Linear(width, 7)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(3))
            self.last = torch.nn.Linear(7, out)
        self.inject, self.after = Inject(), 1
        self.drop, self.machine = torch.nn.Dropout(0.0), machine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.machine is not None:
            self.machine.take(len(x) * self.machine.row)
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = self.drop(torch.tanh(layer(x)))
            if i == self.after:
                x = self.inject(x)
        found: torch.Tensor = self.last(x)
        return found


def sharded(model: Deep, *shape: int) -> Any:
    shape = shape or (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@ranks(1, 3)
def test_sharded_models_have_the_gradient_and_the_norm_of_all_data(rank: int, world: int) -> None:
    """Two windows and a partial one, of micro-batches of all sizes."""
    plain = Deep().double()
    optimizer = torch.optim.SGD(plain.parameters(), 0.5)
    for start, end in ((0, 4), (4, 8), (8, 10)):
        together = [one for r in range(world) for one in data(r)[start:end]]
        x, y = (torch.cat(parts).double() for parts in zip(*together, strict=True))
        optimizer.zero_grad()
        ((plain(x) - y).square().sum() / len(x)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.2).item()
        optimizer.step()
    for shape in ((world,), (1, world)):  # in one dimension, and with replicas
        acc = made(sharded(Deep(), *shape), max_norm=0.2)
        last = train(acc, data(rank)[:10])
        assert close(same(flat(acc.model)), flat(plain))
        assert last.norm == pytest.approx(norm, rel=1e-6)
        assert (last.weight, last.micro_batches) == (len(x), 2 * world)


@ranks(3)
def test_an_inf_in_one_ranks_part_is_seen_by_all(rank: int, world: int) -> None:
    acc = made(sharded(Deep()), precision="fp16", init_scale=2.0**8)
    before = flat(acc.model)
    for i, one in enumerate(data(rank)[:4]):
        micro(acc, one, 1e38 if i == 1 and rank == 1 else 1.0)
    last = acc.report().last
    assert last is not None
    assert (last.skipped, last.infs + last.nans > 0, last.first_bad) == (True, True, "first.weight")
    assert (flat(acc.model), acc.scale) == (before, 128.0)


def run(rank: int, inject: Inject, after: int, sizes: Any = None, undo: str = "scratch") -> Any:
    """What two windows leave behind, and their retries."""
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
    return [flat(model), torch.rand(2).tolist()], retries


@ranks(1, 3)
def test_an_oom_between_two_collectives_lets_all_ranks_halve_together(
    rank: int, world: int
) -> None:
    """The last rank runs out in the middle of a pass, in both ways of undoing."""
    alone = rank == world - 1
    for index, phase, undos in (
        (0, "forward", ["scratch"]),
        (2, "backward", ["scratch", "redo"]),
        (3, "forward", ["redo"]),
    ):
        smaller = [SIZE] * index + [SIZE // 2] * ((ROWS - SIZE * index) // (SIZE // 2))
        want, _ = run(rank, Inject(), 0, [smaller, [SIZE // 2] * 2])
        for undo in undos:
            inject = Inject(**({phase: {index}} if alone else {}))
            found, retries = run(rank, inject, index % 3, undo=undo)
            assert (found, retries) == (want, [[index, SIZE // 2]])


@ranks(3)
def test_a_sharded_rank_that_fails_for_good_ends_the_window_of_all(rank: int, world: int) -> None:
    inner = Deep(6, 1)
    inner.inject = Inject(backward={1, 2, 3} if rank == 0 else ())
    acc = made(sharded(inner), micro_batch_size=SIZE)
    before = flat(acc.model)
    with pytest.raises(PeerMemoryError if rank else torch.OutOfMemoryError) as caught:
        acc.step(batch(rank), loss_of(acc.model))
    assert str(caught.value).startswith("out of memory on rank 0" if rank else "CUDA")
    assert flat(acc.model) == before
    acc.step(batch(10 + rank), loss_of(acc.model))  # the next batch is fine
    assert flat(acc.model) != before


@ranks(3)
def test_an_exception_on_a_sharded_rank_is_told_in_the_middle_of_a_pass(
    rank: int, world: int
) -> None:
    acc = made(sharded(Deep(6, 1)))
    usual, before = loss_of(acc.model), flat(acc.model)

    def bad(part: Any) -> Any:
        if rank == 0:
            raise KeyError("label")
        return usual(part)

    def loop(loss_fn: Callable[[Any], Any]) -> None:
        for i in range(4):
            with acc.micro_batch():
                acc.backward(*loss_fn(batch(i)))

    for call in (lambda: acc.step(batch(rank), bad), lambda: loop(bad)):
        with pytest.raises(RankError if rank else KeyError) as caught:
            call()
        assert str(caught.value) == (FAILED.format(0, rank) if rank else "'label'")
    acc.reset()
    assert flat(acc.model) == before
    loop(usual)
    same(flat(acc.model))


@ranks(3)
def test_uneven_loaders_of_a_sharded_model_are_an_error_on_every_rank(
    rank: int, world: int
) -> None:
    """In the middle of a window, and at its end."""
    for many in (3, 4):
        acc = made(sharded(Deep()))
        with pytest.raises(RankError) as caught:
            train(acc, data(rank)[: many + (rank == 0)])
        assert str(caught.value).startswith(
            "the ranks do not have the same micro-batches: rank 0 is in a micro-batch, rank 1 is "
            "at flush()"
        )


@ranks(3)
def test_what_is_not_sharded_alike_is_refused(rank: int, world: int) -> None:
    part, model = Deep(), Deep()
    for layer in part.layers:
        fully_shard(layer)
    ignored = fully_shard(model, ignored_params={model.last.bias})
    for words, wrong, options in (
        ("first.weight is not sharded", part, {}),
        ("last.bias is not sharded", ignored, {}),
        ("overlap=True is for models in Distributed", sharded(Deep()), {"overlap": True}),
        (
            "grad_dtype does not work with fully_shard",
            summed_in_fp32(sharded(Deep().bfloat16())),
            {},
        ),
    ):
        with pytest.raises(ValueError, match=words):
            made(wrong, **options)


@ranks(3)
def test_only_micro_batches_of_the_newest_accumulator_ask_the_ranks(rank: int, world: int) -> None:
    """Before each of FSDP's collectives, once; and a closed one leaves nothing around its calls."""
    model = sharded(Deep())
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as asked:
        model(data(rank)[0][0]).sum().backward()
        optimizer.zero_grad()
        assert asked.call_count == 0
        counts = []
        for _ in range(3):
            acc = GradAccumulator(model, optimizer, 1)
            asked.reset_mock()
            micro(acc, data(rank)[0])
            counts.append(asked.call_count)
        assert len(set(counts)) == 1
        assert counts[0] >= 2 * 4  # a gather and a reduction of each of 4 groups
        acc.close()
        asked.reset_mock()
        model(data(rank)[0][0]).sum().backward()
        assert asked.call_count == 0


@ranks(3)
def test_sharded_ranks_take_the_rows_that_the_shortest_of_them_has_room_for(
    rank: int, world: int
) -> None:
    machine = machine_of(rank, world)
    model = sharded(Deep(6, 1, machine))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, monitor=machine)
    machine.serve(acc)
    assert sizes_of_steps(acc, machine, rank) == [[2, 2, 4, 4, 4, 4, 4], [4] * 6]
    assert close(same(flat(model)), whole_of_ranks(Deep(6, 1), world))


@ranks(3)
def test_a_monitor_on_some_sharded_ranks_alone_is_refused(rank: int, world: int) -> None:
    monitor = machine_of(rank, world) if rank == world - 1 else None
    with pytest.raises(ValueError, match="some ranks have a monitor and others none"):
        made(sharded(Deep(6, 1)), monitor=monitor)
