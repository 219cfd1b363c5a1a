"""memtools._grad.gradients for gradients on a device, without one: meta tensors raise when anything
waits for their values, and the same functions give the right values for tensors on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from memtools._grad import gradients as grad_gradients
from memtools._grad.gradients import Gradients, Measure
from tests.grad.test_gradients import FLOATS, mixed, parameters_of, squares_of


def there(grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
    return [grad for grad in grads if grad is not None]


def test_nothing_waits_for_the_device() -> None:
    grads = [torch.ones(3, 4, dtype=dtype, device="meta") for dtype in FLOATS]
    gradients = Gradients(parameters_of([*grads, torch.ones(2)]))
    with pytest.raises((RuntimeError, NotImplementedError)):
        grads[0].sum().item()  # the proof works: a value cannot be had
    found = gradients.measure()
    assert isinstance(found.sum_squares, torch.Tensor)
    assert isinstance(found.finite, torch.Tensor)
    assert isinstance(found.norm, torch.Tensor)
    assert (found.sum_squares.device.type, found.sum_squares.dtype) == ("meta", torch.float64)
    assert (found.finite.dtype, found.finite.shape) == (torch.bool, torch.Size([]))
    assert found.count == 5
    on_device = Gradients(parameters_of(list(grads)))
    for factor in (0.5, torch.ones((), device="meta"), torch.ones((), device="meta").double()):
        on_device.multiply(factor)
    assert [grad._version > 0 for grad in grads] == [True] * 4


def test_sums_are_those_of_python() -> None:
    grads = there(mixed(torch.randn(7, dtype=torch.complex64)))
    found = grad_gradients.device_sums(torch, grads)
    assert float(found.squares) == pytest.approx(squares_of(grads), rel=1e-7)
    assert bool(found.finite)


@pytest.mark.parametrize("size", [1e25, 1e-25, 3e38])
def test_sums_are_in_float64(size: float) -> None:
    grad = torch.randn(5_000).clamp(-1, 1) * size
    found = grad_gradients.device_sums(torch, [grad])
    assert float(found.squares) == pytest.approx(squares_of([grad]), rel=1e-7)
    assert bool(found.finite)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_found(dtype: torch.dtype, value: float) -> None:
    grads = [torch.randn(5).to(dtype), torch.randn(5).to(dtype), torch.zeros(0, dtype=dtype)]
    assert bool(grad_gradients.device_sums(torch, grads).finite)
    grads[1][3] = value
    assert not bool(grad_gradients.device_sums(torch, grads).finite)


def test_large_float64_is_finite() -> None:
    large = torch.full((3,), 1e200, dtype=torch.float64)
    empty = torch.zeros(0, dtype=torch.float64)
    assert bool(grad_gradients.device_sums(torch, [large, empty]).finite)


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3, dtype=torch.float64)])
def test_factor_is_not_rounded_to_16_bits(factor: float | torch.Tensor) -> None:
    grads = there(mixed())
    wanted = [(exact(g) * 0.3).to(g.dtype) for g in grads]
    grad_gradients.device_multiply(torch, grads, factor)
    assert all(map(torch.equal, grads, wanted))


def exact(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def test_bad_elements_are_counted_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has values, and says that it is not the CPU."""
    grads = [torch.ones(3), torch.tensor([1.0, math.inf]), torch.tensor([math.nan, math.inf])]
    gradients = Gradients(parameters_of(list(grads)), ["a", "b", "c"])
    counted: list[int] = []
    bad = Gradients.bad

    def counting(self: Gradients) -> tuple[int, int, str | None]:
        counted.append(1)
        return bad(self)

    monkeypatch.setattr(Gradients, "bad", counting)
    monkeypatch.setattr(grad_gradients, "_by_device", lambda left: {torch.device("cpu"): grads})
    found = gradients._with_devices(torch, Measure(0.0, 3, True), [])
    assert isinstance(found.finite, torch.Tensor)
    assert not bool(found.finite)
    assert counted == []
    assert found.bad == (2, 1, "b")
    grads[1][1] = grads[2][0] = grads[2][1] = 1.0
    beside = gradients._with_devices(torch, Measure(5.0, 1, True), [])
    assert float(beside.sum_squares) == 5 + 3 + 2 + 2
    assert bool(beside.finite)
    assert not bool(gradients._with_devices(torch, Measure(5.0, 1, finite=False), []).finite)
    again = gradients._with_devices(torch, Measure(0.0, 3, True), [])
    assert again.bad == (0, 0, None)
    assert counted == [1]


def test_gradients_on_the_cpu_count_beside_those_on_a_device() -> None:
    grads = [torch.ones(3, device="meta"), torch.tensor([math.nan])]
    found = Gradients(parameters_of(list(grads))).measure()
    assert isinstance(found.finite, torch.Tensor)
    assert found.finite.device.type == "meta"
