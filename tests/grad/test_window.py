"""The numbers of a window, and the constant that its losses are multiplied with."""

from __future__ import annotations

import math

import pytest
import torch

from memtools._grad.window import Window


@pytest.mark.parametrize("steps", [1, 3, 4, 1000])
@pytest.mark.parametrize("weight", [None, 0.0, 1e-3, 1.0, 37.0, 8192.0])
def test_the_guess_is_a_power_of_two_near_one_over_the_weight(steps, weight):
    window = Window(2.0**16)
    window.begin(steps, weight, 5.0)
    mantissa, _ = math.frexp(window.scale * window.guess)
    assert mantissa == 0.5
    assert 0.7 < window.guess * steps * (weight or 1.0) < 1.42


@pytest.mark.parametrize("weight", [1e-300, 1e300])
def test_a_guess_stays_within_float32(weight):
    window = Window(2.0**16)
    window.begin(1, weight, 1.0)
    assert 2.0**-126 < (window.scale * window.guess) < 2.0**127


def test_weights_on_a_device_stay_there_and_count_as_the_usual_one():
    window = Window()
    window.begin(2, torch.tensor(100.0, dtype=torch.float64), 16.0)
    assert window.guess == 1 / 32
    first = torch.tensor(3.0, dtype=torch.float64)
    window.add(first)
    mark = window.mark()
    window.add(torch.tensor(4.0, dtype=torch.float64))
    window.add(5.0)
    assert isinstance(window.on_device, torch.Tensor)
    assert window.total() == 12.0
    window.rewind(mark)
    assert window.total() == 3.0
    assert first == 3.0


def test_a_mark_has_all_of_a_window():
    window = Window(4.0)
    before = window.mark()
    window.begin(2, 3.0, 1.0)
    window.add(3.0)
    window.add(torch.tensor(2.0))
    window.loss = window.loss.plus(1.5)
    window.count_extras({"rows": 2.0})
    window.count, window.torn, window.open, window.last, window.scale = (
        1,
        "OSError",
        True,
        True,
        2.0,
    )
    assert [old for old, new in zip(before, window.mark(), strict=True) if old is new] == []
    window.rewind(before)
    assert window.mark() == before
    assert window.empty
