"""memtools._grad.gradients: what is read from gradients, and how they are multiplied."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from memtools._grad.gradients import Gradients

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def parameters_of(grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    made = []
    for grad in grads:
        parameter = torch.zeros(1) if grad is None else torch.zeros_like(grad)
        parameter.grad = grad
        made.append(parameter)
    return made


def squares_of(grads: Sequence[torch.Tensor | None]) -> float:
    """By Python, one element at a time."""
    values = [x for grad in grads if grad is not None for x in grad.flatten().tolist()]
    return math.fsum(abs(x) ** 2 for x in values)


def mixed(extra: torch.Tensor | None = None) -> list[torch.Tensor | None]:
    """Dtypes, layouts and a parameter without a gradient."""
    grads: list[torch.Tensor | None] = [torch.randn(33, 7).to(dtype) for dtype in FLOATS]
    grads += [None, torch.randn(6, 9).t(), torch.randn(8, 8)[:, ::2], torch.randn(()).abs()]
    grads += [torch.zeros(0, 4), torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last)]
    return [*grads, extra]


# --- measuring ------------------------------------------------------------------------------------


def gaps(values: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between them, which the native pass leaves."""
    return torch.stack([values, values], -1)[..., 0]


@pytest.mark.parametrize("left_first", [False, True])
@pytest.mark.parametrize("left_bad", [False, True])
def test_bad_elements_count_whoever_reads_them(left_first: bool, left_bad: bool) -> None:
    native, left = (
        torch.tensor([math.inf, 1.0]),
        gaps(torch.tensor([1.0, math.nan if left_bad else 1.0])),
    )
    grads = [left, native] if left_first else [native, left]
    found = Gradients(parameters_of(grads), ["a", "b"]).measure()
    first = "a" if left_bad else "b" if left_first else "a"
    assert (found.finite, found.bad) == (False, (1, left_bad, first))


def test_what_is_left_is_read_in_float64() -> None:
    grads = [gaps(torch.full((10,), 1e25)), gaps(torch.full((10,), 1e-25))]
    for grad in grads:
        found = Gradients(parameters_of([grad])).measure()
        assert found.sum_squares == pytest.approx(squares_of([grad]), rel=1e-12)


def test_infinite_squares_of_finite_float64_are_finite_gradients() -> None:
    found = Gradients(parameters_of([torch.full((3,), 1e200, dtype=torch.float64)])).measure()
    assert found.sum_squares == math.inf
    assert (found.finite, found.bad) == (True, (0, 0, None))


def test_complex_gradients_count_with_their_absolute_value() -> None:
    grads = [torch.randn(9, dtype=torch.complex64), torch.randn(4, dtype=torch.complex128).conj()]
    gradients = Gradients(parameters_of(grads))
    assert gradients.measure().sum_squares == pytest.approx(squares_of(grads), rel=1e-7)
    wanted = [grad.clone() * 0.5 for grad in grads]
    gradients.multiply(0.5)
    assert all(map(torch.equal, gradients.tensors(), wanted))


# --- multiplying ----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3), torch.tensor(0.3).double()])
def test_multiply_rounds_once(factor: float | torch.Tensor) -> None:
    grads = mixed()
    wanted = [
        None if grad is None else (grad.clone().to(_exact(grad)) * float(factor)).to(grad.dtype)
        for grad in grads
    ]
    Gradients(parameters_of(grads)).multiply(factor)
    for grad, value in zip(grads, wanted, strict=True):
        assert grad is value is None or torch.equal(grad, value)  # type: ignore[arg-type]


def _exact(grad: torch.Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)


# --- refused --------------------------------------------------------------------------------------
