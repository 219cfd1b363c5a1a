"""memtools.use(accelerator): a loop of accelerate, watched and cleaned up in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import memtools

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def prepared() -> tuple[Any, ...]:
    torch.manual_seed(3)
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=3), torch.nn.Linear(4, 1)
    data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return accelerator, *accelerator.prepare(model, optimizer, data)


def train(is_used: bool) -> tuple[Any, Any]:
    accelerator, model, optimizer, data = prepared()
    adapter = memtools.use(accelerator) if is_used else None
    for (x,) in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()
    return model, adapter


def test_a_loop_is_watched_and_trains_as_before():
    (plain, _), (used, adapter) = train(False), train(True)
    assert used.weight.equal(plain.weight)
    assert adapter.monitor.step_count == 3  # of 8 batches: 3, 3 and 2
    assert {phase.name for phase in adapter.monitor.phases()} == {"backward", "optimizer"}
    assert not adapter.monitor.running
    assert "memtools.integrations.accelerate.accumulator runs them in parts" in str(adapter)


def test_remove_puts_everything_back():
    accelerator, _, optimizer, _ = prepared()
    before = dict(vars(accelerator)), dict(vars(optimizer))
    adapter = memtools.use(accelerator)
    assert "backward" in vars(accelerator)
    with pytest.raises(ValueError, match="already: call its remove"):
        memtools.use(accelerator)
    adapter.remove()
    assert (dict(vars(accelerator)), dict(vars(optimizer))) == before


def unprepared(accelerator: Any) -> dict[str, Any]:
    accelerator._optimizers.clear()
    return {}


BAD = {
    "call use\\(\\) after its prepare": unprepared,
    "leave micro_batch_size out": lambda accelerator: {"micro_batch_size": 2},
}


@pytest.mark.parametrize("why", BAD)
def test_bad_input_changes_nothing(why):
    accelerator = prepared()[0]
    options, before = BAD[why](accelerator), dict(vars(accelerator))
    with pytest.raises(ValueError, match=why):
        memtools.use(accelerator, **options)
    assert vars(accelerator) == before
