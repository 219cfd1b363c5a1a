"""The mean loss of a window and the sums that a loss function counts: `report.loss`, `extras`."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch

import memtools
from tests.grad.accumulatecases import batches, loss_sum, net


def accumulator(steps: int = 3, **settings: Any) -> memtools.GradAccumulator:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memtools.GradAccumulator(model, optimizer, steps, **settings)


def test_the_loss_of_a_window_is_the_mean_over_its_units():
    acc, data = accumulator(), batches((12, 2, 5))
    wanted = loss_sum(acc.model, torch.cat(data)).item() / 19
    for x in data:
        with acc.micro_batch():
            acc.backward(loss_sum(acc.model, x), weight=len(x))
    last = acc.report().last
    assert last.loss == pytest.approx(wanted, rel=1e-6)
    assert (last.own_weight, last.extras) == (19.0, {})


def test_without_weights_the_loss_is_the_mean_over_micro_batches_however_many_parts_they_have():
    acc = accumulator()
    with acc.micro_batch():
        acc.backward(acc.model[0].weight.sum() * 0 + 2.0)
        acc.backward(acc.model[0].weight.sum() * 0 + 4.0)
    with acc.micro_batch():
        acc.backward(acc.model[0].weight.sum() * 0 + 1.0)
    assert acc.flush().loss == 3.5


def test_step_sums_what_the_loss_function_counts_besides():
    acc, data = accumulator(micro_batch_size=4), torch.randn(10, 8)

    def loss_fn(x):
        seen = {"rows": len(x), "positive": (x[:, 0] > 0).sum(), "double": x.double().sum()}
        return loss_sum(acc.model, x), len(x), seen

    wanted = loss_sum(acc.model, data).item() / 10
    report = acc.step(data, loss_fn)
    assert report.loss == pytest.approx(wanted, rel=1e-6)
    assert report.extras["rows"] == 10.0
    assert report.extras["positive"] == int((data[:, 0] > 0).sum())
    assert report.extras["double"] == pytest.approx(data.double().sum().item())
    assert report.as_dict()["loss"] == report.loss
    assert report.as_dict()["extras"] == report.extras
    assert f"loss {report.loss:.6g}" in str(report)
    assert pickle.loads(pickle.dumps(report)).loss == report.loss


def test_a_mean_without_a_weight_counts_its_rows():
    acc, data = accumulator(micro_batch_size=4), torch.randn(10, 8)
    wanted = loss_sum(acc.model, data).item() / 10
    report = acc.step(data, lambda x: (loss_sum(acc.model, x) / len(x), None, {"n": 1}))
    assert report.loss == pytest.approx(wanted, rel=1e-6)
    assert report.extras == {"n": 3.0}
    assert report.weight == 10.0


def test_a_decorated_function_may_return_sums_too():
    acc = accumulator(steps=2)

    @acc.accumulate
    def micro(x):
        return loss_sum(acc.model, x), len(x), {"rows": torch.tensor(len(x))}

    for x in batches((3, 4)):
        micro(x)
    assert acc.report().last.extras == {"rows": 7.0}


def test_a_name_may_be_missing_in_a_micro_batch():
    acc = accumulator(micro_batch_size=2)
    seen: list[int] = []

    def loss_fn(x):
        seen.append(len(x))
        return loss_sum(acc.model, x), len(x), {"late": 5} if len(seen) > 1 else {}

    assert acc.step(torch.randn(6, 8), loss_fn).extras == {"late": 10.0}


class Elsewhere(torch.Tensor):
    """A tensor that says when it is read, as one of a device would wait there."""

    reads: list[str]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__):
            cls.reads.append(function.__name__)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_loss_elsewhere_is_read_when_it_is_asked_for_and_holds_no_graph():
    Elsewhere.reads = []
    acc = accumulator(steps=2)

    @acc.accumulate
    def micro(x):
        loss = loss_sum(acc.model, x).as_subclass(Elsewhere)
        return loss, len(x), {"loss": loss}

    data = batches((3, 4))
    wanted = loss_sum(acc.model, torch.cat(data)).item()
    for x in data:
        micro(x)
    last = acc.report().last
    assert Elsewhere.reads == []
    assert not any(kept.requires_grad for kept in last._loss.later)
    assert last.loss == pytest.approx(wanted / 7, rel=1e-6)
    assert last.extras["loss"] == pytest.approx(wanted, rel=1e-6)
    assert Elsewhere.reads


def test_what_a_program_does_to_the_loss_afterwards_does_not_matter():
    acc = accumulator(steps=1)
    with acc.micro_batch():
        loss = loss_sum(acc.model, torch.randn(4, 8))
        wanted = loss.item() / 4
        acc.backward(loss, weight=4)
        loss.detach().zero_()
    assert acc.report().last.loss == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("sums", "text"),
    [
        ([1.0], "got list as sums"),
        ({1: 2.0}, "got the key 1"),
        ({"a": "x"}, r"sums\['a'\] .* got str"),
        ({"a": torch.ones(3)}, r"sums\['a'\] .* got Tensor of shape \(3,\)"),
        ({"a": torch.ones((), dtype=torch.complex64)}, r"sums\['a'\]"),
    ],
)
def test_sums_that_cannot_be_added_are_refused_before_the_backward_pass(sums, text):
    acc = accumulator()
    with pytest.raises(TypeError, match=text):
        acc.step(torch.randn(4, 8), lambda x: (loss_sum(acc.model, x), len(x), sums))
    assert all(p.grad is None for p in acc.model.parameters())
    assert acc._runner.window.empty


def test_a_window_that_was_saved_halfway_has_the_loss_of_all_its_micro_batches():
    acc, data = accumulator(steps=2), batches((3, 4))

    def micro(acc, x):
        return acc.accumulate(lambda: (loss_sum(acc.model, x), len(x), {"rows": len(x)}))()

    micro(acc, data[0])
    state, twin = acc.state_dict(), accumulator(steps=2)
    twin.model.load_state_dict(acc.model.state_dict())
    twin.load_state_dict(state)
    for each in (acc, twin):
        micro(each, data[1])
    assert twin.report().last.loss == acc.report().last.loss
    assert twin.report().last.extras == {"rows": 7.0}


def test_the_loss_of_an_update_that_was_left_out_is_what_it_was():
    acc = accumulator(steps=1)
    with acc.micro_batch():
        acc.backward(loss_sum(acc.model, torch.full((2, 8), math.inf)), weight=2)
    assert acc.report().last.skipped
    assert not math.isfinite(acc.report().last.loss)
