"""step() with fp32 sums of 16-bit gradients, and with new groups."""

from __future__ import annotations

import pytest
import torch

import memtools
from tests.grad.accumulatecases import summed_in_fp32
from tests.grad.backoffcases import ROWS, Model, batch, loss_of, undoing
from tests.kit.oominject import Inject

# A retry collects cycles: not among all that the other tests have imported.
pytestmark = pytest.mark.usefixtures("frozen")


def made(undo: str, dtype: torch.dtype, **settings):
    torch.manual_seed(1)
    model = summed_in_fp32(Model().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    acc = memtools.GradAccumulator(model, optimizer, 4, micro_batch_size=4, **settings)
    return undoing(acc, undo), model


def run(inject, undo, dtype, sizes=((), ()), **settings):
    acc, model = made(undo, dtype, **settings)
    model.inject = inject
    torch.manual_seed(5)
    reports = []
    for i in range(2):
        what = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch(i).items()}
        reports.append(acc._get_back_off().step(what, loss_of(model), sizes=sizes[i]))
    bits = [t.detach().double().tolist() for t in model.state_dict().values()]
    return bits, [(r.norm, r.weight) for r in reports], acc


@pytest.mark.slow
@pytest.mark.parametrize("undo", ["scratch", "redo"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("index", [0, 2])
def test_fp32_sums_of_16_bit_gradients_go_back_bit_for_bit(index, phase, undo, monkeypatch):
    monkeypatch.setattr("random.random", lambda: 0.5)
    monkeypatch.setattr("numpy.random.random", lambda: 0.5)
    settings = {"max_norm": 0.05}
    sizes = ([4] * index + [2] * (2 * (4 - index)), [2] * 8)
    want = run(Inject(), "redo", torch.bfloat16, sizes, **settings)
    got = run(Inject(**{phase: {index}}), undo, torch.bfloat16, **settings)
    assert got[:2] == want[:2]
    assert len(got[2].report().retries) == 1


@pytest.mark.parametrize("undo", ["scratch", "redo"])
def test_parameters_of_a_new_group_go_back_as_well(undo):
    """Frozen until now, and not the model's: only the optimizer knows of it."""
    acc, model = made(undo, torch.float32)
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


def test_sizes_are_part_of_a_state():
    acc, model = made("scratch", torch.float32)
    model.inject = Inject(backward={1})
    acc.step(batch(), loss_of(model))
    other, twin = made("scratch", torch.float32)
    other.load_state_dict(acc.state_dict())
    assert other.step(batch(1), loss_of(twin)).micro_batches == ROWS // 2
