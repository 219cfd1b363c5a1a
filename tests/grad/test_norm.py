"""memtools.clip_grad_norm_ and grad_norm beside torch's own and beside float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

import memtools
from memtools._grad.gradients import Gradients, Measure
from tests.grad.test_gradients import mixed, parameters_of, squares_of

Grads = list[torch.Tensor | None]
BOTH = [torch.float32, torch.float64]


def copies(grads: Grads) -> Grads:
    return [None if grad is None else grad.clone() for grad in grads]


def small(dtype: torch.dtype = torch.float32) -> Grads:
    return [torch.randn(5, 3).to(dtype), None, torch.randn(7).to(dtype), torch.randn(()).to(dtype)]


# --- as torch's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2, 2.0, 1.0, 0.5, 3.0, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 1e6, math.inf])
@pytest.mark.parametrize("dtype", BOTH)
def test_same_norm_and_same_gradients_as_torch(
    norm_type: float, max_norm: float, dtype: torch.dtype
) -> None:
    ours, theirs = parameters_of(small(dtype)), parameters_of([])
    theirs = parameters_of(copies([p.grad for p in ours]))
    asked = memtools.grad_norm(ours, norm_type)
    norm = memtools.clip_grad_norm_(ours, max_norm, norm_type)
    wanted = clip_grad_norm_(theirs, max_norm, norm_type)
    assert (norm.dtype, norm.shape) == (wanted.dtype, wanted.shape)
    torch.testing.assert_close(norm, wanted, rtol=1e-6, atol=0)
    assert torch.equal(asked, norm)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_norm_that_is_not_finite_does_as_torch(bad: float, foreach: bool | None) -> None:
    grads: Grads = [torch.tensor([1.0, bad]), torch.tensor([2.0])]
    theirs = parameters_of(copies(grads))
    ours = parameters_of(grads)
    norm = memtools.clip_grad_norm_(ours, 1.0, foreach=foreach)
    torch.testing.assert_close(norm, clip_grad_norm_(theirs, 1.0), equal_nan=True)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, equal_nan=True)


def test_one_tensor_is_taken_for_a_list_of_it() -> None:
    (parameter,) = parameters_of([torch.tensor([3.0, 4.0])])
    assert memtools.grad_norm(parameter) == 5.0
    assert memtools.clip_grad_norm_(parameter, 1.0) == 5.0
    assert memtools.grad_norm(iter([parameter])) == pytest.approx(1.0)


def test_a_parameter_that_is_given_twice_counts_once() -> None:
    (parameter,) = parameters_of([torch.tensor([3.0, 4.0])])
    assert memtools.clip_grad_norm_([parameter, parameter], 2.5) == 5.0
    assert memtools.grad_norm([parameter, parameter]) == pytest.approx(2.5)


def test_without_gradients_the_norm_is_zero() -> None:
    for parameters in ([], parameters_of([None, None])):
        for norm in (memtools.grad_norm(parameters), memtools.clip_grad_norm_(parameters, 1.0)):
            assert (norm.item(), norm.dtype, norm.shape) == (0.0, torch.float32, torch.Size([]))


def test_an_empty_generator_is_told_as_torch_tells_it() -> None:
    def used_up() -> object:
        return (p for p in list[torch.Tensor]())

    with pytest.warns(UserWarning, match="empty generator"):
        memtools.clip_grad_norm_(used_up(), 1.0)  # type: ignore[arg-type]


def test_model_parameters_are_taken_as_they_come() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model(torch.randn(16, 4)).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    wanted = get_total_norm(grads)
    torch.testing.assert_close(memtools.clip_grad_norm_(model.parameters(), 0.5), wanted)
    assert float(get_total_norm(grads)) == pytest.approx(0.5, rel=1e-5)


def test_a_gradient_with_a_graph_is_clipped_as_data() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)[0]
    assert weight.grad.requires_grad
    norm = memtools.clip_grad_norm_([weight], 1.0)
    assert not norm.requires_grad
    assert float(weight.grad.detach().norm()) == pytest.approx(1.0, rel=1e-5)
    weight.grad = None  # a cycle of tensor and graph otherwise


# --- where torch's is wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("every", [1, 2])
def test_norm_of_a_large_tensor_is_right(dtype: torch.dtype, every: int) -> None:
    """Those that are not contiguous are read, and in 16 bits multiplied, in pieces."""
    grad = torch.randn(1100, 2000, dtype=dtype)[:, ::every]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    exact = float(grad.to(wide).norm().abs())
    (parameter,) = parameters_of([grad])
    norm = memtools.clip_grad_norm_(parameter, exact / 2)
    assert float(norm) == pytest.approx(exact, rel=1e-7)
    assert float(grad.to(wide).norm().abs()) == pytest.approx(exact / 2, rel=1e-4)


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_norm_of_huge_and_tiny_values_is_right(size: float) -> None:
    grads: Grads = [torch.randn(5_000) * size]
    parameters = parameters_of(grads)
    exact = math.sqrt(squares_of(grads))
    assert float(memtools.grad_norm(parameters)) == pytest.approx(exact, rel=1e-7)
    memtools.clip_grad_norm_(parameters, exact / 2)
    # torch adds 1e-6 to the norm, which is all there is of the small one
    left = exact * min(1.0, exact / 2 / (exact + 1e-6))
    assert float(memtools.grad_norm(parameters)) == pytest.approx(left, rel=1e-5, abs=1e-40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norm_of_16_bit_gradients_is_fp32(dtype: torch.dtype) -> None:
    grads = small(dtype)
    norm = memtools.grad_norm(parameters_of(grads))
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(math.sqrt(squares_of(grads)), rel=1e-7)


def test_mixed_gradients_have_one_norm() -> None:
    grads = mixed()
    norm = memtools.clip_grad_norm_(parameters_of(grads), 1.0)
    assert norm.dtype == torch.float64
    assert float(norm) > 10
    assert math.sqrt(squares_of(grads)) == pytest.approx(1.0, rel=1e-3)


# --- refused --------------------------------------------------------------------------------------

Call = Callable[[list[torch.Tensor]], object]
CALLS: list[Call] = [
    lambda p: memtools.clip_grad_norm_(p, 1.0, error_if_nonfinite=True),
    lambda p: memtools.grad_norm(p, error_if_nonfinite=True),
]


@pytest.mark.parametrize("call", CALLS)
def test_error_if_nonfinite_tells_what_is_bad_and_changes_nothing(call: Call) -> None:
    grads: Grads = [torch.ones(2), torch.tensor([1.0, math.inf, math.nan, math.inf])]
    before = copies(grads)
    with pytest.raises(RuntimeError, match=r"2 inf and 1 nan elements, the first of parameter 1"):
        call(parameters_of(grads))
    for grad, was in zip(grads, before, strict=True):
        torch.testing.assert_close(grad, was, equal_nan=True)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_max_norm_is_no_less_than_zero(max_norm: float) -> None:
    grads: Grads = [torch.ones(2)]
    with pytest.raises(ValueError, match="max_norm must be 0 or more"):
        memtools.clip_grad_norm_(parameters_of(grads), max_norm)
    assert torch.equal(grads[0], torch.ones(2))  # type: ignore[arg-type]


def test_sparse_gradients_are_refused() -> None:
    parameters = parameters_of([torch.eye(3).to_sparse()])
    with pytest.raises(TypeError, match=r"gradient of parameter 0 \[3, 3\] is sparse"):
        memtools.clip_grad_norm_(parameters, 1.0)


# --- devices and shards ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_gradients_never_grow(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_device:  # whose measure is tensors
        measured = Measure(torch.tensor(25.0).double(), 1, finite=torch.tensor(True))
        monkeypatch.setattr(Gradients, "measure", lambda self: measured)
    grad = torch.tensor([3.0, 4.0])
    norm = memtools.clip_grad_norm_(parameters_of([grad]), 7.5)
    assert (norm, grad.tolist()) == (5.0, [3.0, 4.0])


def test_clipping_on_a_device_does_not_wait_for_it() -> None:
    grads: Grads = [torch.ones(4, device="meta"), torch.ones(4, device="meta").bfloat16()]
    norm = memtools.clip_grad_norm_(parameters_of(grads), 1.0)
    assert (norm.device.type, norm.dtype, norm.shape) == ("meta", torch.float32, torch.Size([]))


def test_dtensors_are_left_to_torch() -> None:
    from torch import distributed
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            parameter = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)])
            parameter.grad = DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
            norm = memtools.clip_grad_norm_([parameter], 1.0)
            assert isinstance(norm, DTensor)
            assert norm.full_tensor() == 5.0
            assert parameter.grad.full_tensor().norm() == pytest.approx(1.0, rel=1e-5)
            ours = Gradients([parameter], ["w"])
            assert ours.sharded() == ["w"]
            assert ours.measure().sum_squares == pytest.approx(1.0, rel=1e-5)
        finally:
            distributed.destroy_process_group()


def test_an_int_beyond_the_largest_float_is_an_infinite_limit():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 4.0)
    memtools.clip_grad_norm_([parameter], 10**400)
    assert parameter.grad.tolist() == [4.0] * 3
    assert memtools.grad_norm([parameter], norm_type=10**400) == 4.0
    with pytest.raises(ValueError, match="max_norm must be 0 or more, got -inf"):
        memtools.clip_grad_norm_([parameter], -(10**400))
