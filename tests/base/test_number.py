"""Arguments that are numbers, and the sentences for what is none."""

import numpy as np
import pytest
import torch

from memtools._base.number import positive, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), torch.tensor(3)])
def test_a_whole_number_of_any_library_is_an_int(value):
    found = whole_number("steps", value)
    assert found == 3
    assert type(found) is int


@pytest.mark.parametrize("value", [True, 3.0, np.float32(3), "3", None])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match=f"^steps must be an int, got {type(value).__name__}$"):
        whole_number("steps", value)


def test_a_whole_number_has_a_least_value_or_none():
    assert whole_number("seed", -5, None) == -5
    assert whole_number("done", 0, 0) == 0
    with pytest.raises(ValueError, match="^steps must be at least 1, got 0$"):
        whole_number("steps", 0)
    with pytest.raises(ValueError, match="^bytes must be at least 4,096, got -1,000$"):
        whole_number("bytes", -1000, 4096)
    for large in (2**63, 2**64, 10**5000):
        with pytest.raises(ValueError, match=r"^steps must be at most 2\*\*63 - 1, got "):
            whole_number("steps", large)
    with pytest.raises(ValueError, match=r"^seed must be at least -2\*\*63, got "):
        whole_number("seed", -(2**63) - 1, None)


def test_an_int_of_very_many_digits_is_refused_in_a_short_sentence():
    huge = 10**5000
    with pytest.raises(ValueError, match=r"^steps must be at most 9, got 10$"):
        whole_number("steps", 10, 1, 9)
    with pytest.raises(ValueError, match=r"^steps must be at most 9, got about 2\*\*16610$"):
        whole_number("steps", huge, 1, 9)
    with pytest.raises(ValueError, match=r"^steps must be at least 1, got about -2\*\*16610$"):
        whole_number("steps", -huge)
    for sign, text in ((1, ""), (-1, "-")):
        with pytest.raises(ValueError, match=rf"above 0 and finite, got about {text}2\*\*16610"):
            positive("max_norm", sign * huge)


def test_a_positive_number_is_finite():
    assert type(positive("max_norm", 2)) is float
    with pytest.raises(TypeError, match="^max_norm must be a number, got bool$"):
        positive("max_norm", True)
    for wrong in (0, -1.5, float("nan")):
        with pytest.raises(ValueError, match=f"^max_norm must be above 0 and finite, got {wrong}$"):
            positive("max_norm", wrong, "; leave it out")
    with pytest.raises(ValueError, match="got inf; leave it out$"):
        positive("max_norm", float("inf"), "; leave it out")
