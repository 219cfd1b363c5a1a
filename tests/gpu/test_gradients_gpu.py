"""Gradients on a GPU: run by `make test-gpu` on a machine that has one.

How to read the proofs of "does not wait": `busy()` keeps the current stream busy for about a second
and returns an event behind that. While the event has not been reached, nothing has waited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import memtools
from memtools._grad.gradients import Gradients

CUDA = torch.device("cuda")
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def busy() -> torch.cuda.Event:
    torch.cuda._sleep(int(2e9))
    behind = torch.cuda.Event()
    behind.record()
    return behind


def parameters_of(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    made = []
    for grad in grads:
        parameter = torch.zeros_like(grad)
        parameter.grad = grad
        made.append(parameter)
    return made


def mixed() -> list[torch.Tensor]:
    """Dtypes, layouts, an empty one, and one on the CPU."""
    made = [torch.randn(33, 7, device=CUDA).to(dtype) for dtype in FLOATS]
    made += [torch.randn(6, 9, device=CUDA).t(), torch.randn(8, 8, device=CUDA)[:, ::2]]
    return [*made, torch.zeros(0, 4, device=CUDA), torch.randn(5)]


def squares_of(grads: Sequence[torch.Tensor]) -> float:
    return math.fsum(float(grad.double().square().sum()) for grad in grads)


def wide(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


# --- values ---------------------------------------------------------------------------------------


def test_measure_is_exact() -> None:
    grads = mixed()
    found = Gradients(parameters_of(grads)).measure()
    assert isinstance(found.sum_squares, torch.Tensor)
    assert found.sum_squares.device.type == "cuda"
    assert float(found.sum_squares) == pytest.approx(squares_of(grads), rel=1e-7)
    assert (bool(found.finite), found.count) == (True, 8)


@pytest.mark.parametrize("size", [1e25, 1e-25, 3e38])
def test_squares_that_fp32_cannot_hold(size: float) -> None:
    grad = torch.randn(100_000, device=CUDA).clamp(-1, 1) * size
    found = Gradients(parameters_of([grad])).measure()
    assert float(found.sum_squares) == pytest.approx(squares_of([grad]), rel=1e-7)
    assert bool(found.finite)


def test_norm_of_100_million_elements() -> None:
    grad = torch.randn(100_000_000, device=CUDA)
    exact = math.sqrt(squares_of([grad]))
    assert float(memtools.grad_norm(parameters_of([grad]))) == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
def test_inf_and_nan_are_counted_and_named(dtype: torch.dtype) -> None:
    grads = [torch.ones(10, device=CUDA, dtype=dtype) for _ in range(3)]
    grads[1][[2, 5]] = math.inf
    grads[2][0] = math.nan
    found = Gradients(parameters_of(grads), ["a", "b", "c"]).measure()
    assert not bool(found.finite)
    assert (found.infs, found.nans, found.first_bad) == (2, 1, "b")


@pytest.mark.parametrize("on_device", [False, True])
def test_multiply_does_not_round_the_factor_to_16_bits(on_device: bool) -> None:
    grads = mixed()[:-1] if on_device else mixed()
    wanted = [(wide(grad) * 0.3).to(grad.dtype) for grad in grads]
    factor = torch.tensor(0.3, dtype=torch.float64, device=CUDA) if on_device else 0.3
    Gradients(parameters_of(grads)).multiply(factor)
    for grad, value in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, value, rtol=2e-7 if grad.itemsize > 2 else 0, atol=0)


def test_clip_is_torchs() -> None:
    grads = mixed()[:-1]
    theirs = parameters_of([grad.clone() for grad in grads])
    ours = parameters_of(grads)
    norm = memtools.clip_grad_norm_(ours, 0.5)
    wanted = nn.utils.clip_grad_norm_(theirs, 0.5)
    assert norm.device.type == "cuda"
    torch.testing.assert_close(norm, wanted.to(norm.dtype), rtol=1e-2, atol=0)  # theirs has bf16
    exact = math.sqrt(squares_of(grads))
    assert exact == pytest.approx(0.5, rel=1e-3)


# --- nothing waits --------------------------------------------------------------------------------


def test_measuring_and_clipping_do_not_wait() -> None:
    grads = [torch.ones(1_000, device=CUDA, dtype=dtype) for dtype in FLOATS]
    gradients = Gradients(parameters_of(grads))
    for _ in range(2):  # the first time kernels are loaded, which waits
        torch.cuda.synchronize()
        behind = busy()
        found = gradients.measure()
        gradients.multiply(torch.ones((), device=CUDA))
        gradients.multiply(0.999)
        memtools.clip_grad_norm_(gradients.parameters, 1.0)
        waited = behind.query()
    assert not waited
    assert bool(found.finite)


# --- sums in fp32 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta"])
def test_gradients_in_fp32_of_16_bit_parameters(kind: str) -> None:
    torch.manual_seed(1)
    model = nn.Linear(64, 32, device=CUDA, dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.5)
    acc = memtools.GradAccumulator(model, optimizer, 5)
    before = [p.detach().clone() for p in model.parameters()]
    wanted = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for _ in range(5):
        x = torch.randn(16, 64, device=CUDA, dtype=torch.bfloat16)
        alone = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        for total, grad in zip(wanted, alone, strict=True):
            total += grad
        with acc.micro_batch():
            acc.backward(model(x).sum(), weight=1)
    report = acc.report().last
    assert report is not None
    assert report.norm == pytest.approx(math.sqrt(squares_of(wanted)) / 5, rel=1e-5)
    assert not any(map(torch.equal, model.parameters(), before))
