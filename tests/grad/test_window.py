"""The numbers of a window, and the constant that its losses are multiplied with."""

from __future__ import annotations

import torch

from memtools._grad.window import Window


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
