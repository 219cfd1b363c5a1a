"""GradAccumulator on several ranks with a whole model each: the gradient of all their data, and no
rank that waits for one that failed."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from memtools import GradAccumulator
from memtools._grad.ranks import RankError
from tests.grad.accumulatecases import summed_in_fp32
from tests.grad.backoffcases import ROWS, Model, batch, loss_of
from tests.grad.pressurecases import machine_of, model_of, sizes_of_steps, whole_of_ranks
from tests.grad.rankcases import (
    FAILED,
    Net,
    close,
    counts,
    data,
    flat,
    made,
    micro,
    reference,
    train,
    windows_of,
)
from tests.kit.oominject import Inject
from tests.kit.ranks import Ended, every, meet, ranks, same

DDP = torch.nn.parallel.DistributedDataParallel

# --- the gradient ---------------------------------------------------------------------------------


def plain(rank: int) -> Net:
    """A model without a wrapper, which differs on each rank at first."""
    model = Net()
    for parameter in model.parameters():
        parameter.data.add_(float(rank))
    return model


@ranks(1, 2, 3)
def test_uneven_loaders_give_the_gradient_of_all_their_data(rank: int, world: int) -> None:
    """Two epochs, in each of the ways that ranks are found."""
    lengths = counts(world)
    wanted = reference(Net(), [data(r)[:n] for r, n in enumerate(lengths)], epochs=2)
    own = [windows_of(data(r)[:n]) for r, n in enumerate(lengths)]
    updates = max(map(len, own))
    last, batches = [w[-1] for w in own if len(w) == updates], data(rank)[: lengths[rank]]
    for model, options in (
        (DDP(Net()), {}),
        (torch.nn.Sequential(DDP(Net())), {}),
        (plain(rank), {"ranks": True}),
        (plain(rank), {"ranks": dist.group.WORLD}),
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        acc = GradAccumulator(model, optimizer, 4, scheduler=scheduler, **options)
        with torch.device("meta"):  # a default device of the program's changes nothing
            ends = [train(acc, batches) for _ in range(2)]
        assert close(same(flat(model)), wanted)
        report = acc.report()
        assert (report.updates, scheduler.last_epoch) == (2 * updates, 2 * updates)
        assert report.micro_batches == 2 * sum(lengths)
        for end in ends:
            assert end.weight == sum(len(x) for window in last for x, _ in window)
            assert end.micro_batches == sum(map(len, last))


@ranks(3)
def test_without_weights_each_micro_batch_counts_one_wherever_it_was(rank: int, world: int) -> None:
    acc = made(DDP(Net()))
    for x, y in data(rank)[: 2 + rank]:
        with acc.micro_batch():
            acc.backward((acc.model(x) - y).square().sum() / len(x))
    acc.flush()
    model = Net().double()
    losses = [
        (model(x.double()) - y.double()).square().sum() / len(x)
        for r in range(world)
        for x, y in data(r)[: 2 + r]
    ]
    torch.stack(losses).mean().backward()
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert close(same(flat(acc.model)), flat(model))


@ranks(3)
def test_a_process_can_train_alone_in_a_job(rank: int, world: int) -> None:
    acc = made(Net(), ranks=False)
    assert train(acc, data(rank)[: 1 + rank]).micro_batches == 1 + rank


@ranks(3)
def test_gradients_of_all_kinds_are_summed_where_they_lie(rank: int, world: int) -> None:
    """In more than one bucket; rank r adds r + 1 to each, so that the mean is 2."""
    kinds = [
        torch.ones(3, 5),
        torch.ones(4, 6, dtype=torch.float64).t(),
        torch.ones(7, dtype=torch.bfloat16),
        torch.ones((), dtype=torch.float16),
        torch.ones(2, 2, dtype=torch.complex64),
        torch.ones(0, 3),
        torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.ones(100),
        torch.ones(11),
        torch.ones(1, dtype=torch.bfloat16),
    ]
    model = torch.nn.ParameterList([torch.nn.Parameter(kind) for kind in kinds])
    optimizer = torch.optim.SGD(model.parameters(), 0.0, foreach=False)
    seen: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad for p in model))
    acc = GradAccumulator(model, optimizer, ranks=True)
    with mock.patch("memtools._grad.ranks_wire.BUCKET_BYTES", 256), acc.micro_batch():
        *most, last = (torch.real(p).double().sum() for p in model)
        # bf16 has 8 bits: 256 + 1 is 256, so that a sum by steps would lose what this one keeps.
        large = 256.0 if rank == 0 else 1.0
        acc.backward((rank + 1) * sum(most, torch.zeros(())) + large * last, weight=1)
    for parameter, grad in zip(model, seen[:-1], strict=False):
        assert grad.stride() == parameter.stride()
        assert torch.equal(grad, torch.full_like(grad, 2.0))
    assert seen[-1].item() == (256 + world - 1) / world


@ranks(3)
def test_a_parameter_that_one_rank_alone_uses_gets_its_gradient_everywhere(
    rank: int, world: int
) -> None:
    """And one that no rank uses keeps none."""
    branches = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(world + 1))
    acc = made(DDP(branches, find_unused_parameters=True))
    seen: list[Any] = []
    acc.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad for p in branches.parameters())
    )
    with acc.micro_batch():
        acc.backward(branches[rank](torch.ones(1, 2)).sum(), weight=1)
    acc.flush()
    for grad in seen[:-1]:
        assert torch.allclose(grad, torch.full((1, 2), 1 / world))
    assert seen[-1] is None


@ranks(3)
def test_what_ddp_ignores_stays_each_ranks_own(rank: int, world: int) -> None:
    model = Net()
    model._ddp_params_and_buffers_to_ignore = ["out.bias"]
    acc = made(DDP(model))
    seen: list[float] = []
    acc.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.flatten()[0].item() for p in model.parameters())
    )
    with acc.micro_batch():
        acc.backward((rank + 1.0) * sum(p.sum() for p in model.parameters()), weight=1)
    acc.flush()
    assert seen == pytest.approx([2.0] * 3 + [(rank + 1) / world])


@ranks(2, 3)
def test_overlap_reduces_in_the_last_backward_pass_and_flushes_by_hand(
    rank: int, world: int
) -> None:
    acc = made(DDP(Net()), overlap=True)
    wire = acc._runner.ranks._wire
    with mock.patch.object(wire, "sum", wraps=wire.sum) as by_hand:
        train(acc, data(rank)[:6])
    assert close(same(flat(acc.model)), reference(Net(), [data(r)[:6] for r in range(world)]))
    assert by_hand.call_count == 1


@ranks(1, 3)
def test_gradients_that_are_views_of_ddps_buckets_have_the_same_bits(rank: int, world: int) -> None:
    make = torch.Generator().manual_seed(rank)
    batches = [[torch.randn(16, n, generator=make) for n in (3, 2)] for _ in range(3)]

    def run(view: bool, overlap: bool, how: str) -> Any:
        model = DDP(Net(), gradient_as_bucket_view=view)
        acc = made(model, overlap=overlap, micro_batch_size=4)
        inject = Inject(backward={1} if how == "out of memory" else ())

        def loss_fn(part: Any) -> Any:
            return (inject(model(part[0])) - part[1]).square().sum(), len(part[0])

        for one in batches:
            if how == "loop":
                train(acc, list(zip(*(part.split(4) for part in one), strict=True)))
            else:
                acc.step(tuple(one), loss_fn)
        report = acc.report()
        return [flat(model), report.updates, report.micro_batches, report.ran_out]

    for overlap in (False, True):
        for how in ("loop", "step", "out of memory"):
            assert run(True, overlap, how) == run(False, overlap, how)


@ranks(3)
def test_fp32_gradients_of_bf16_are_what_the_ranks_sum(rank: int, world: int) -> None:
    """Two windows, of which the second is of rank 0 alone."""
    acc = made(DDP(summed_in_fp32(Net().bfloat16())))
    batches = [data(r)[: 8 if r == 0 else 3] for r in range(world)]
    train(acc, [(x.bfloat16(), y.bfloat16()) for x, y in batches[rank]])
    wanted = torch.tensor(reference(Net(), batches))
    assert (torch.tensor(same(flat(acc.model))) - wanted).norm() < 0.01 * wanted.norm()
    assert acc.report().updates == 2
    with pytest.raises(ValueError, match="overlap=True reduces the gradients of the last"):
        made(DDP(summed_in_fp32(Net().bfloat16())), overlap=True)


@ranks(1, 3)
def test_the_norm_is_that_of_the_whole_gradient(rank: int, world: int) -> None:
    acc = made(DDP(Net()), max_norm=0.05)
    for one in data(rank)[:4]:
        micro(acc, one)
    last = acc.report().last
    assert last is not None
    model = Net().double()
    together = [one for r in range(world) for one in data(r)[:4]]
    x, y = (torch.cat(parts).double() for parts in zip(*together, strict=True))
    ((model(x) - y).square().sum() / len(x)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    torch.optim.SGD(model.parameters(), 0.5).step()
    assert last.norm == pytest.approx(wanted, rel=1e-6)
    assert last.coefficient == pytest.approx(0.05 / wanted, rel=1e-4)
    assert close(same(flat(acc.model)), flat(model))


@ranks(1, 3)
def test_loss_and_sums_are_each_ranks_own_and_the_weight_is_that_of_all(
    rank: int, world: int
) -> None:
    acc = made(DDP(Net()))
    own = data(rank)[: 1 + (rank > 0)]
    sums = [float((acc.model.module(x) - y).square().sum().detach()) for x, y in own]

    @acc.accumulate
    def part(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (acc.model(x) - y).square().sum(), len(x), {"rows": len(x)}

    for x, y in own:
        part(x, y)
    report = acc.flush()
    assert report is not None
    rows = sum(len(x) for x, _ in own)
    assert report.loss == pytest.approx(sum(sums) / rows, rel=1e-6)
    assert (report.own_weight, report.extras) == (rows, {"rows": rows})
    assert report.weight == sum(every(rows))


# --- what passes do not wait for ------------------------------------------------------------------


@ranks(2, 3)
def test_no_forward_or_backward_pass_waits_for_another_rank(rank: int, world: int) -> None:
    """Rank 0 runs micro-batches alone, also one without gradients; a wait would never end."""
    acc = made(DDP(Net(norm=True)))
    for _ in range(2):
        for one in data(rank)[: 3 if rank == 0 else 1]:
            micro(acc, one)
        report = acc.flush()
        assert report is not None
        assert same(report.micro_batches) == 3 + world - 1
    if rank == 0:
        with acc.micro_batch():
            with torch.no_grad():
                acc.model(data(0)[0][0])
            acc.backward(acc.model(data(0)[0][0]).sum(), weight=1)
    acc.flush()


@ranks(2, 3)
def test_batch_norm_sees_the_buffers_that_ddps_own_loop_sees(rank: int, world: int) -> None:
    """The buffers of each window's first forward pass are rank 0's."""
    seen = []
    for ours in (True, False):
        model = DDP(Net(norm=True))
        acc = made(model, lr=0.0, ranks=None if ours else False)
        for start in (0, 4):
            for i, (x, y) in enumerate(data(rank)[start : start + 4]):
                if ours:
                    micro(acc, (x, y))
                    continue
                with contextlib.nullcontext() if i == 3 else model.no_sync():
                    model(x).sum().backward()
        acc.close()
        with torch.no_grad():  # where DDP's broadcast comes
            model(data(0)[0][0])
        seen.append([b.tolist() for b in model.buffers()])
    assert same(seen[0]) == seen[1]


@ranks(3)
def test_a_closed_accumulator_leaves_ddp_as_it_was(rank: int, world: int) -> None:
    model = DDP(Net(norm=True))
    before = model.require_forward_param_sync
    acc = made(model)
    train(acc, data(rank)[:1])
    acc.close()
    assert model.require_forward_param_sync == before
    model.zero_grad()
    x, y = data(rank)[0]
    (model(x) - y).square().sum().backward()
    same([p.grad.tolist() for p in model.parameters()])


@ranks(3)
def test_a_flush_of_nothing_anywhere_does_nothing(rank: int, world: int) -> None:
    acc = made(DDP(Net()))
    assert (acc.flush(), acc.flush(), acc.report().windows) == (None, None, 0)


@ranks(3)
def test_a_state_of_the_middle_of_a_window_goes_on_to_the_same_bits(rank: int, world: int) -> None:
    """Taken by ranks at different places in it."""
    results = []
    for stop in (False, True):
        acc = made(DDP(Net()))
        for i, one in enumerate(data(rank)[:8]):
            if stop and i == 5 + rank:
                state, weights = acc.state_dict(), acc.model.state_dict()
                acc.close()
                model = DDP(Net())
                model.load_state_dict(weights)
                acc = made(model)
                acc.load_state_dict(state)
            micro(acc, one)
        results.append(flat(acc.model))
    assert results[0] == results[1]


# --- what fails on one rank -----------------------------------------------------------------------


@ranks(3)
def test_an_inf_on_one_rank_leaves_the_update_out_on_all(rank: int, world: int) -> None:
    acc = made(DDP(Net()), precision="fp16", init_scale=2.0**8)
    before, seen = flat(acc.model), []
    for i, one in enumerate(data(rank)[:8]):
        micro(acc, one, 1e30 if i == 1 and rank == 1 else 1.0)
        if i % 4 == 3:
            last = acc.report().last
            assert last is not None
            seen.append((last.skipped, last.infs > 0, last.first_bad, last.scale))
            assert (flat(acc.model) == before) == (i == 3)
    assert seen == [(True, True, "module.body.weight", 256.0), (False, False, None, 128.0)]
    assert acc.scale == 128.0
    same(flat(acc.model))


@ranks(2, 3)
def test_an_exception_after_a_backward_pass_drops_the_window_on_all_ranks(
    rank: int, world: int
) -> None:
    acc = made(DDP(Net()))
    alone = rank == world - 1

    def window(start: int) -> None:
        for i, one in enumerate(data(rank)[start : start + 4]):
            if start == 4 and i == 2 and alone:
                with acc.micro_batch():
                    acc.backward(acc.model(one[0]).sum(), weight=1)
                    raise ValueError("a bad batch")
            micro(acc, one)

    window(0)
    before = flat(acc.model)
    with pytest.raises(ValueError if alone else RankError) as caught:
        window(4)
    assert str(caught.value) == ("a bad batch" if alone else FAILED.format(world - 1, rank))
    with pytest.raises(RuntimeError, match=f"{caught.typename} came after a backward pass had"):
        micro(acc, data(rank)[0])
    assert flat(acc.model) == before
    acc.reset()
    window(8)
    batches = [data(r)[:4] + data(r)[8:12] for r in range(world)]
    assert close(same(flat(acc.model)), reference(Net(), batches))
    assert acc.report().updates == 2


@ranks(3)
def test_a_batch_that_fails_before_its_backward_pass_can_be_left_out(rank: int, world: int) -> None:
    acc = made(DDP(Net()))
    for i, one in enumerate(data(rank)[:5]):
        if rank == 0 and i == 2:
            with contextlib.suppress(KeyError), acc.micro_batch():
                raise KeyError("no label")
        elif rank == 0 or i < 4:
            micro(acc, one)
    first = [data(0)[i] for i in (0, 1, 3, 4)]
    batches = [first] + [data(r)[:4] for r in range(1, world)]
    assert close(same(flat(acc.model)), reference(Net(), batches))
    assert acc.report().micro_batches == 4 * world


@ranks(3)
def test_a_gradient_that_cannot_be_summed_is_one_ranks_error_and_told_to_the_others(
    rank: int, world: int
) -> None:
    model = torch.nn.ModuleList([torch.nn.Embedding(4, 2, sparse=rank == 0)])
    acc = made(model, ranks=True)
    with acc.micro_batch():
        acc.backward(model[0](torch.tensor([1, 2])).sum(), weight=2)
    with pytest.raises(RankError if rank else TypeError) as caught:
        acc.flush()
    wanted = "the gradient of 0.weight is sparse" if rank == 0 else FAILED.format(0, rank)
    assert str(caught.value).startswith(wanted)


@ranks(3)
def test_weights_of_zero_count_over_all_ranks(rank: int, world: int) -> None:
    """Padding on one rank is fine; on all of them there is nothing to average over."""
    acc = made(DDP(Net()))
    x, y = data(rank)[0]

    def part(weight: float) -> None:
        with acc.micro_batch():
            acc.backward((acc.model(x) - y).square().sum() * (weight > 0), weight=weight)

    for _ in range(4):
        part(0.0 if rank == 0 else float(len(x)))
    once = [[data(r)[0]] * 4 for r in range(1, world)]
    assert close(same(flat(acc.model)), reference(Net(), once))
    for _ in range(3):
        part(0.0)
    with pytest.raises(ValueError, match="the weights of this window sum to 0"):
        part(0.0)
    part(float(len(x)))  # it goes on in the same window
    after = [data(r)[0] for r in range(world)]
    wanted = reference(Net(), [[*once[0], *after], *once[1:]])
    assert close(same(flat(acc.model)), wanted)


@ranks(3)
def test_windows_of_two_kinds_are_an_error_on_every_rank(rank: int, world: int) -> None:
    acc = made(DDP(Net()))
    with acc.micro_batch():
        acc.backward(acc.model(data(0)[0][0]).sum(), weight=1 if rank == 0 else None)
    with pytest.raises(ValueError, match="some ranks passed a weight with their losses and others"):
        acc.flush()
    acc.reset()
    other = made(DDP(Net()), precision="fp16", init_scale=2.0 ** (4 + rank))
    micro(other, data(rank)[0])
    with pytest.raises(ValueError, match=r"the ranks have different loss scales, \[16.0, 32.0"):
        other.flush()
    other.reset()


@ranks(3)
def test_what_is_not_supported_is_refused_at_once(rank: int, world: int) -> None:
    hooked, cast = DDP(Net()), DDP(Net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    cast.mixed_precision = SimpleNamespace()
    kind = type("FullyShardedDataParallel", (torch.nn.Module,), {})
    for words, model, options in (
        ("static_graph", DDP(Net(), static_graph=True), {}),
        ("communication hook", hooked, {}),
        ("mixed_precision", cast, {}),
        ("fully_shard", torch.nn.Sequential(kind(), Net()), {}),
        ("overlap=True is for", Net(), {"overlap": True}),
        ("overlap=True is for", Net(), {"ranks": True, "overlap": True}),
        (r"different models: \[3, 4", torch.nn.Linear(2 + rank, 1), {"ranks": True}),
    ):
        with pytest.raises(ValueError, match=words):
            made(model, **options)
    waits = torch.nn.Sequential(torch.nn.SyncBatchNorm(3), Net())  # needs a GPU to run
    assert "SyncBatchNorm waits" in made(waits, ranks=True)._runner.ranks.no_retry


# --- step() ---------------------------------------------------------------------------------------

SIZE = 4


def stepping(rank: int, inject: Inject) -> tuple[GradAccumulator, Model]:
    torch.manual_seed(1)
    inner = Model()
    inner.inject = inject
    model = DDP(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, 4, micro_batch_size=SIZE, max_norm=1.0)
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    return acc, inner


def split_after(index: int) -> list[int]:
    """Sizes of a window in which micro-batch `index` did not fit."""
    return [SIZE] * index + [SIZE // 2] * ((ROWS - SIZE * index) // (SIZE // 2))


@ranks(1, 3)
def test_an_oom_on_one_rank_equals_the_run_with_that_split(rank: int, world: int) -> None:
    alone = rank == world - 1

    def run(inject: Inject, sizes: Any = None) -> Any:
        """All that two windows leave behind; every rank has rows of its own."""
        acc, inner = stepping(rank, inject)
        for i in range(2):
            named = {} if sizes is None else {"sizes": sizes[i]}
            step: Any = acc.step if sizes is None else acc._get_back_off().step
            step(batch(10 * i + rank), loss_of(acc.model), **named)
        assert acc.report().ran_out == sum(map(len, inject.fails.values()))
        same([flat(inner), [b.tolist() for b in inner.buffers()]])
        drawn = random.random(), float(np.random.random()), torch.rand(2).tolist()
        return flat(inner), [b.tolist() for b in inner.buffers()], drawn

    for index, phase in enumerate(("forward", "backward", "forward", "backward")):
        want = run(Inject(), [split_after(index), [SIZE // 2] * 8] if alone else None)
        assert run(Inject(**({phase: {index}} if alone else {}))) == want


@ranks(3)
def test_a_rank_that_fails_for_good_raises_its_own_error_and_the_others_are_told(
    rank: int, world: int
) -> None:
    """It cannot take one row; no rank has stepped, and the next batch is fine."""
    alone = rank == world - 1
    acc, inner = stepping(rank, Inject(forward={1, 2, 3} if alone else ()))
    inner.norm = torch.nn.Identity()  # BatchNorm does not take one row
    before = flat(inner)
    with pytest.raises(torch.OutOfMemoryError if alone else RankError):
        acc.step(batch(rank), loss_of(acc.model))
    assert (flat(inner), acc.report().windows) == (before, 0)
    acc.step(batch(10 + rank), loss_of(acc.model))
    same(flat(inner))


@ranks(3)
def test_an_exception_of_a_loss_function_is_its_ranks_own(rank: int, world: int) -> None:
    acc, inner = stepping(rank, Inject())

    def bad(part: Any) -> Any:
        if rank == 0 and acc._runner.window.count == 2:
            raise KeyError("label")
        return loss_of(acc.model)(part)

    with pytest.raises(RankError if rank else KeyError):
        acc.step(batch(rank), bad)
    acc.step(batch(rank), loss_of(acc.model))
    same(flat(inner))


@ranks(3)
def test_a_rank_without_batches_flushes_while_others_step(rank: int, world: int) -> None:
    acc, inner = stepping(rank, Inject())
    for i in range(3 if rank else 1):
        acc.step(batch(10 * i + rank), loss_of(acc.model))
    acc.flush()
    assert acc.report().updates == 3
    same(flat(inner))


@ranks(3)
def test_a_rank_that_is_short_of_memory_takes_fewer_rows_and_the_gradient_is_that_of_all(
    rank: int, world: int
) -> None:
    """By a monitor, before anything runs out."""
    machine = machine_of(rank, world)
    model = DDP(model_of(machine))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = GradAccumulator(model, optimizer, monitor=machine)
    machine.serve(acc)
    sizes = sizes_of_steps(acc, machine, rank)
    assert close(same(flat(model)), whole_of_ranks(model_of(None), world))
    short = [[2, 2, 4, 4, 4, 4, 4], [4] * 6]
    assert sizes == (short if rank == world - 1 else [[2, 2, 4, 8, 8], [16, 8]])


@ranks(3)
def test_a_monitor_that_does_not_run_on_one_rank_is_told_to_all(rank: int, world: int) -> None:
    machine, last = machine_of(rank, world), rank == world - 1
    machine.running = not last
    model = DDP(model_of(machine))
    acc = made(model, monitor=machine)
    with pytest.raises(RuntimeError if last else RankError) as caught:
        acc.step(torch.ones(24, 6), lambda x: (model(x).sum(), len(x)))
    assert str(caught.value).startswith("step(): the monitor" if last else "rank 2 failed")


@ranks(2)
def test_a_rank_that_died_is_torchs_error_on_the_others(rank: int, world: int) -> None:
    """Rank 1 ends in the middle of a window; rank 0 gets the error at its end."""
    acc = made(DDP(Net()))
    for one in data(rank)[: 2 if rank == 1 else 3]:
        micro(acc, one)
    meet()
    if rank == 0:
        with pytest.raises(RuntimeError):  # torch has several classes for it
            micro(acc, data(0)[3])
    raise Ended


def test_a_model_of_one_process_needs_no_job() -> None:
    with pytest.raises(ValueError, match="overlap=True is for models"):
        made(Net(), overlap=True)
