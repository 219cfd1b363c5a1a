"""step(): the same gradient however it is cut, sizes over several windows, and their report."""

from __future__ import annotations

import re

import pytest
import torch

import memtools
from memtools._grad import backoff
from memtools._grad.backoff import FIRST_WAIT, THRASHING
from tests.grad.backoffcases import batch, loss_of, made, undoing
from tests.kit.oominject import Inject

# A retry collects cycles: not among all that the other tests have imported.
pytestmark = pytest.mark.usefixtures("frozen")


class Kept:
    """An optimizer's step that keeps what it was given."""

    def __init__(self, acc):
        self.gradients = []
        optimizer = acc.optimizer
        optimizer.step = lambda: self.gradients.append(
            torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]])
        )


def linear(undo="scratch", **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return undoing(memtools.GradAccumulator(model, optimizer, **settings), undo), model


def reference(model, what, loss_fn):
    """The full batch's gradient, in double precision."""
    model.double()
    loss, weight = loss_fn({k: v.double() for k, v in what.items()})
    loss.backward()
    grads = torch.cat([p.grad.flatten() / float(weight) for p in model.parameters()])
    model.zero_grad()
    model.float()
    return grads


@pytest.mark.parametrize("fails", [{}, {0}, {0, 2}, {0, 1, 2, 4}])
@pytest.mark.parametrize("form", ["sum and weight", "mean of rows"])
def test_the_gradient_is_the_full_batchs_however_it_was_cut(form, fails):
    acc, model = linear()
    what, inject, kept = batch(rows=13), Inject(forward=fails), Kept(acc)

    def summed(micro):
        error = (model(inject(micro["x"])) - micro["y"]).square().squeeze(1)
        return (error * micro["n"]).sum(), micro["n"].sum()

    def mean(micro):
        return (model(inject(micro["x"])) - micro["y"]).square().mean()

    loss_fn = summed if form == "sum and weight" else mean
    report = acc.step(what, loss_fn)
    inject.fails["forward"] = set()
    exact = reference(model, what, summed if loss_fn is summed else lambda m: (mean(m), 1))
    error = (kept.gradients[0].double() - exact).norm() / exact.norm()
    assert error < 1e-6
    assert report.weight == (what["n"].sum() if loss_fn is summed else 13)
    assert len(report.retries) == len(fails)


class Seen(torch.optim.SGD):
    """Keeps the gradients that it steps with."""

    def step(self, closure=None):
        self.gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]


def sixteen_bits(dtype: torch.dtype, rows: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(rows)
    return torch.nn.Linear(8, 3).to(dtype), torch.randn(rows, 8).to(dtype)


@pytest.mark.parametrize("way", ["step", "pair"])
@pytest.mark.parametrize("rows", [257, 2000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mean_in_16_bits_has_the_gradient_of_other_loops_and_a_finite_loss(dtype, rows, way):
    """257 rows are 256 in bf16, and 2,000 times a loss of 50 is inf in fp16."""
    model, x = sixteen_bits(dtype, rows)

    def mean(micro):
        return model(10 * micro).float().square().mean().to(dtype)

    loss = mean(x)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    optimizer = Seen(model.parameters(), 0.1)
    acc = memtools.GradAccumulator(model, optimizer)
    if way == "step":
        report = acc.step(x, mean)
    else:
        report = acc.step(x, lambda micro: (mean(micro), None, {"rows": len(micro)}))
        assert report.extras == {"rows": rows}
    assert report.weight == rows
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    for got, grad in zip(optimizer.gradients, expected, strict=True):
        assert torch.equal(got, grad)


def test_a_sum_in_fp16_over_very_many_units_has_a_gradient():
    model, x = sixteen_bits(torch.float16, 16)
    acc = memtools.GradAccumulator(model, torch.optim.SGD(model.parameters(), 0.1))
    report = acc.step(x, lambda micro: (model(micro).sum(), 2**30))
    assert 1e-9 < report.norm < 1e-6


def test_a_batch_that_fits_is_one_micro_batch_and_as_if_written_by_hand():
    acc, model = linear()
    other, twin = linear()
    for i in range(3):
        what = batch(i)
        acc.step(what, loss_of(model))
        with other.micro_batch():
            other.backward(*loss_of(twin)(what))
    assert acc.report().micro_batches == 3
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_the_size_is_remembered_and_a_step_up_is_on_trial():
    acc, model = made(size=16)
    model.inject = Inject(forward={0, 5 + 4 * FIRST_WAIT})
    counts = [acc.step(batch(i, 32), loss_of(model)).micro_batches for i in range(FIRST_WAIT + 3)]
    assert counts == [4] * len(counts)
    first, trial = acc.report().retries
    assert (first.window, first.rows, first.next_rows, first.probing) == (0, 16, 8, False)
    assert (trial.window, trial.rows, trial.probing) == (FIRST_WAIT + 1, 16, True)
    assert acc.report().micro_batch_size == 8
    assert acc._back_off.control.wait == 2 * FIRST_WAIT


def test_the_report_says_the_rows_that_were_used():
    acc, model = made()
    assert acc.step(batch(rows=6), loss_of(model)).micro_batch_size == 6
    model.inject = Inject(backward={0})
    assert acc.step(batch(rows=8), loss_of(model)).micro_batch_size == 4
    assert "Micro-batch: 4 rows" in str(acc.report())


LINE = re.compile(
    r"window 0, micro-batch 1 of 4 rows, backward: OutOfMemoryError: CUDA out of memory\. .*"
    r"\(asked 2\.50 GiB\); restored random numbers, 3 buffers, gradients \((\w+)\)"
    r"(, the window from its start)?; continued with 2 rows; \d+\.\d ms lost"
)


@pytest.mark.parametrize(
    ("undo", "whole"), [("scratch", None), ("redo", ", the window from its start")]
)
def test_each_retry_is_a_line_of_the_report(undo, whole):
    acc, model = made(undo=undo, size=4)
    model.inject = Inject(backward={1})
    report = acc.step(batch(), loss_of(model))
    (line,) = [str(one) for one in report.retries]
    assert LINE.fullmatch(line).groups() == (undo, whole)
    assert line in str(report)
    assert line in str(acc.report())
    assert report.as_dict()["retries"] == [line]
    assert acc.step(batch(), loss_of(model)).retries == ()
    assert len(acc.report().retries) == 1


def graphs(rows: int, nodes: list[int]) -> list[dict[str, torch.Tensor]]:
    make = torch.Generator().manual_seed(rows)
    return [{"x": torch.randn(n, 6, generator=make)} for n in nodes]


class Graphs:
    """A batch that only its maker can cut, by a budget of nodes."""

    def __init__(self, nodes):
        self.nodes = nodes

    @staticmethod
    def split(whole, budget):
        parts = [[]]
        for n in whole.nodes:
            if parts[-1] and sum(parts[-1]) + n > budget:
                parts.append([])
            parts[-1].append(n)
        return [Graphs(part) for part in parts]


def by_nodes(model, limit, tried):
    def loss_fn(micro):
        nodes = sum(micro.nodes)
        tried.append(list(micro.nodes))
        if nodes > limit:
            raise MemoryError
        return model(torch.ones(nodes, 6)).sum(), nodes

    return loss_fn


def test_a_users_function_cuts_what_only_it_knows():
    acc, model = linear(micro_batch_size=40)
    tried = []
    report = acc.step(Graphs([10, 20, 10, 30, 5]), by_nodes(model, 30, tried), Graphs.split)
    assert tried == [[10, 20, 10], [10], [20], [10], [30], [5]]
    assert (report.weight, report.micro_batch_size) == (75, 20)
    assert acc._back_off.control.size == 20
    assert [(r.rows, r.next_rows) for r in report.retries] == [(40, 20)]


def test_a_whole_batch_of_the_users_is_tried_first_and_cut_by_its_parts():
    acc, model = linear()
    tried = []
    report = acc.step(Graphs([1, 1, 1, 1, 1]), by_nodes(model, 3, tried), Graphs.split)
    assert [len(one) for one in tried] == [5, 3, 2]
    assert [(r.rows, r.next_rows) for r in report.retries] == [(None, 3)]
    assert "micro-batch 0 of the whole batch, forward: MemoryError; restored" in str(report)


@pytest.mark.slow
def test_one_part_that_cannot_be_cut_raises():
    acc, model = linear(micro_batch_size=1000)
    with pytest.raises(MemoryError) as caught:
        acc.step(Graphs([500, 7]), by_nodes(model, 400, []), Graphs.split)
    assert "no smaller micro-batch is possible" in caught.value.__notes__[0]
    assert "of 500 rows, forward: MemoryError; restored" in caught.value.__notes__[-1]


@pytest.mark.parametrize("undo", ["scratch", "redo"])
def test_a_window_of_a_users_parts_is_cut_the_same_when_it_runs_again(undo):
    acc, model = linear(undo, micro_batch_size=20)
    inject, tried = Inject(backward={1}), []

    def loss_fn(micro):
        tried.append(list(micro.nodes))
        return inject(model(torch.ones(sum(micro.nodes), 6))).sum(), sum(micro.nodes)

    acc.step(Graphs([10, 10, 10, 10]), loss_fn, Graphs.split)
    again = [[10, 10]] if undo == "redo" else []
    assert tried == [[10, 10], [10, 10], *again, [10], [10]]


def test_an_allocator_that_empties_its_cache_again_and_again_lowers_the_size(monkeypatch):
    flushes = iter(range(1000))
    monkeypatch.setattr(backoff, "_allocator_flushes", lambda torch: next(flushes))
    acc, model = made(size=16)
    counts = [acc.step(batch(i), loss_of(model)).micro_batches for i in range(THRASHING + 1)]
    assert counts == [1] * THRASHING + [2]
    (retry,) = acc.report().retries
    assert (retry.phase, retry.rows, retry.next_rows) == ("allocator", 16, 8)
    assert "its cache was emptied once in this window" in str(retry)


def test_an_allocator_that_did_so_now_and_then_changes_nothing(monkeypatch):
    flushes = iter([0, 5, 5, 5, 5, 9, 9, 10, 10, 10])
    monkeypatch.setattr(backoff, "_allocator_flushes", lambda torch: next(flushes))
    acc, model = made(size=16)
    assert [acc.step(batch(i), loss_of(model)).micro_batches for i in range(5)] == [1] * 5


def test_flushes_are_read_of_all_devices_once_torch_uses_them(monkeypatch):
    assert backoff._allocator_flushes(torch) == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda i: {"num_alloc_retries": 3 + i}
    )
    assert backoff._allocator_flushes(torch) == 7


def pairs(rows: int, width: int = 6) -> list[torch.Tensor]:
    """As TensorDataset(x, y) comes out of a DataLoader: a list of two tensors of one kind."""
    make = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, width, generator=make), torch.randn(rows, 1, generator=make)]


@pytest.mark.parametrize("undo", ["scratch", "redo"])
def test_a_list_of_two_columns_is_cut_along_its_rows(undo):
    acc, model = linear(undo)
    inject, kept, tried = Inject(forward={0}), Kept(acc), []

    def loss_fn(micro):
        a, b = micro
        tried.append(len(a))
        return (model(inject(a)) - b).square().mean()

    what = pairs(13)
    report = acc.step(what, loss_fn)
    assert tried == [13, 7, 6]
    assert (report.micro_batch_size, report.weight) == (7, 13)
    model.zero_grad()
    (model(what[0]) - what[1]).square().mean().backward()
    want = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(kept.gradients[0], want)
    model.zero_grad()
    inject.fails["forward"] = set()
    del tried[:]
    acc.step(pairs(20), loss_fn)
    assert tried == [7, 7, 6]


class Samples(list):
    """Says that its items are samples."""


@pytest.mark.parametrize("lengths", [[6, 6, 6, 6], [6, 5, 6, 6]])
def test_a_list_of_samples_is_cut_by_samples_whatever_their_lengths(lengths):
    acc, model = linear()
    inject, tried = Inject(), []
    samples = [torch.randn(n, 6) for n in lengths]

    def loss_fn(micro):
        tried.append([len(one) for one in micro])
        inject(torch.zeros(1))
        return sum(model(one).square().sum() for one in micro), sum(map(len, micro))

    with pytest.raises(ValueError, match=r"4 rows or 4 columns, .*derived from list"):
        acc.step(samples, loss_fn)
    assert tried == []
    inject.fails["forward"] = {0}
    acc.step(Samples(samples), loss_fn)
    assert tried == [lengths, lengths[:2], lengths[2:]]


@pytest.mark.parametrize("split", [None, Graphs.split])
def test_a_loss_of_unknown_weight_is_refused_before_anything_ran_out(split):
    """A mean over what a user's function cut would weigh each part alike."""
    acc, model = linear()
    before = [p.tolist() for p in model.parameters()]

    def loss_fn(micro):
        loss = model(torch.ones(4, 6)).mean()
        if split is not None:
            return loss
        return acc.backward(loss)

    with pytest.raises(ValueError, match=r"let loss_fn return \(loss_sum, weight\)"):
        acc.step(Graphs([1, 3]) if split else torch.ones(4, 6), loss_fn, split)
    assert before == [p.tolist() for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters())
    assert acc._runner.window.empty


@pytest.mark.parametrize("undo", ["scratch", "redo"])
def test_parameters_of_a_new_group_go_back_as_well(undo):
    """Frozen until now, and not the model's: only the optimizer knows of it."""
    acc, model = made(undo=undo, size=4)
    acc.step(batch(), loss_of(model))
    extra = torch.nn.Parameter(torch.ones(1))
    acc.optimizer.add_param_group({"params": [extra], "lr": 1.0})
    model.inject = Inject(backward={2})
    twin = torch.nn.Parameter(torch.ones(1))

    def loss_fn(micro):
        loss, weight = loss_of(model)(micro)
        return loss + extra.sum() * weight, weight

    acc.step(batch(1), loss_fn)
    assert len(acc.report().retries) == 1
    twin.grad = torch.ones(1)  # each unit counts one
    torch.optim.SGD([twin], lr=1.0).step()
    torch.testing.assert_close(extra, twin)
