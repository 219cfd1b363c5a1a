"""How many objects come, in words."""

from __future__ import annotations

import pytest

from memtools._base.sentences import of_new_objects
from memtools._census.holders import Holder


@pytest.mark.parametrize(
    ("new", "steps", "said"),
    [
        (100, 100, "1 new tensor a step"),
        (116, 117, "1 new tensor a step"),
        (90, 100, "0.9 new tensors a step"),
        (1199, 1200, "1 new tensor a step"),
        (250, 100, "2.5 new tensors a step"),
        (4, 100, "1 new tensor every 25 steps"),
        (0, 100, ""),
    ],
)
def test_one_is_no_plural(new: int, steps: int, said: str) -> None:
    holder = Holder("list a", "list", 100, None, new, 1024, what="tensors", steps=steps)
    assert of_new_objects(holder) == said
