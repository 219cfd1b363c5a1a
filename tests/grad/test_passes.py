"""BatchPasses: a batch in parts, whose gradients are added to those of the update so far."""

from __future__ import annotations

import pytest
import torch

from memtools._grad.passes import BatchPasses
from memtools._grad.undo import Redo, Undo
from tests.kit.oominject import Inject

# A retry collects cycles: not among all that the other tests have imported.
pytestmark = pytest.mark.usefixtures("frozen")
BATCHES = [torch.randn(11, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def made() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("redo", [False, True])
@pytest.mark.parametrize("fails", [{}, {"forward": {0, 2}}, {"backward": {1}}, {"backward": {3}}])
def test_an_updates_gradient_is_that_of_its_whole_batches(fails, redo):
    whole = made()
    for batch in BATCHES:
        whole(batch).square().sum().backward()
    model, inject = made(), Inject(**fails)

    def backward(loss: torch.Tensor) -> float:
        loss.backward()
        return loss.item()

    passes = BatchPasses(model, backward, micro_batch_size=6)
    if redo:
        passes._back_off._undo = Undo(passes._back_off._tensors(), Redo)
    results = []
    for batch in BATCHES:
        results += passes.step(11, lambda rows, b=batch: inject(model(b[rows])).square().sum())

    torch.testing.assert_close(gradient(model), gradient(whole))
    with torch.no_grad():
        total = sum(float(whole(b).square().sum()) for b in BATCHES)
    assert sum(results) == pytest.approx(total)
    assert len(passes.retries) == sum(len(at) for at in fails.values())


def test_a_batch_whose_one_row_does_not_fit_raises_and_leaves_no_gradient():
    model, inject = made(), Inject(forward=set(range(100)))
    passes = BatchPasses(model, lambda loss: loss.backward())
    with pytest.raises(RuntimeError, match="out of memory|allocate") as failed:
        passes.step(4, lambda rows: model(inject(BATCHES[0][rows])).sum())
    assert any("no smaller micro-batch" in note for note in failed.value.__notes__)
    assert all(p.grad is None for p in model.parameters())
