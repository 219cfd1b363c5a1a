"""memtools._core.GradSet: gradients of every dtype and layout against torch in float64, by the shim
and without it."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch

from memtools import _core

pytestmark = pytest.mark.usefixtures("either_way")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def with_gradient(grad: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def random_gradient(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def mixed_layouts(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of many sizes and orders of dimensions, all without gaps."""
    return [
        random_gradient(300, 257, dtype=dtype, seed=1),
        random_gradient(5, 70_001, dtype=dtype, seed=2).t(),
        random_gradient(2, 3, 4, 5, dtype=dtype, seed=3).to(memory_format=torch.channels_last),
        random_gradient(2, 1, 9, dtype=dtype, seed=4).permute(2, 0, 1),
        random_gradient(1, dtype=dtype, seed=5)[0],
        random_gradient(0, 7, dtype=dtype),
        random_gradient(4, 100, dtype=dtype, seed=6)[1:3],
    ]


def squares(gradients: list[torch.Tensor]) -> float:
    return sum(float(g.double().square().sum()) for g in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_measures_every_dtype_and_layout_like_float64(dtype):
    gradients = mixed_layouts(dtype)
    found = _core.GradSet([with_gradient(g) for g in gradients]).measure()
    assert found.sum_squares == pytest.approx(squares(gradients), rel=1e-7)
    assert found[1:] == (len(gradients), 0, 0, -1, ())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_multiplies_as_torch_does(dtype):
    gradients = mixed_layouts(dtype)
    parameters = [with_gradient(g.clone()) for g in gradients]
    assert _core.GradSet(parameters).multiply(0.3) == ()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for parameter, before in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        expected = (before.to(wide) * 0.3).to(dtype)
        assert torch.equal(parameter.grad, expected)
        assert parameter.grad.stride() == before.stride()


def test_counts_what_is_not_finite_and_names_the_first():
    gradients = [random_gradient(50, seed=i) for i in range(5)]
    gradients[2][7] = math.inf
    gradients[2][9] = -math.inf
    gradients[4][0] = math.nan
    gradient_set = _core.GradSet(
        [torch.nn.Parameter(torch.zeros(2)), *map(with_gradient, gradients)]
    )
    found = gradient_set.measure()
    assert (found.infs, found.nans, found.first_bad, found.tensors) == (2, 1, 3, 5)
    assert math.isnan(found.sum_squares)
    gradients[4][0] = 0
    assert gradient_set.measure().sum_squares == math.inf


def test_finite_values_whose_squares_overflow_float32_are_not_bad():
    found = _core.GradSet([with_gradient(torch.full((5000,), 1e25))]).measure()
    assert found.sum_squares == pytest.approx(5000 * 1e50, rel=1e-6)
    assert (found.infs, found.nans, found.first_bad) == (0, 0, -1)


def others() -> dict[str, torch.nn.Parameter]:
    sparse = torch.nn.Parameter(torch.zeros(5, 5))
    sparse.grad = torch.eye(5).to_sparse()
    gaps = with_gradient(torch.ones(5, 5))
    gaps.grad = torch.ones(5, 10)[:, ::2]
    expanded = with_gradient(torch.ones(5, 5))
    expanded.grad = torch.ones(1).expand(5, 5)
    negative = with_gradient(torch.ones(5, 5))
    negative.grad = torch._neg_view(torch.ones(5, 5))
    meta = torch.nn.Parameter(torch.zeros(5, 5, device="meta"))
    meta.grad = torch.zeros(5, 5, device="meta")
    unaligned = torch.frombuffer(bytearray(101), dtype=torch.float32, offset=1)
    wrapped = with_gradient(torch.ones(5))
    wrapped.grad = Wrapper(torch.ones(5))
    return {
        "sparse": sparse,
        "gaps": gaps,
        "expanded": expanded,
        "negative": negative,
        "meta": meta,
        "complex": with_gradient(torch.ones(5, dtype=torch.complex64)),
        "float8": with_gradient(torch.ones(5).to(torch.float8_e5m2)),
        "unaligned": with_gradient(unaligned),
        "wrapper": wrapped,
    }


class Wrapper(torch.Tensor):
    """A tensor whose values are not in its own memory, as a DTensor's are not."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


@pytest.mark.parametrize("name", list(others()))
def test_leaves_what_it_cannot_read_to_the_caller(name):
    other, plain = others()[name], with_gradient(torch.ones(3))
    gradient_set = _core.GradSet([torch.nn.Parameter(torch.zeros(1)), other, plain])
    before = copy.deepcopy(other.grad) if name not in ("wrapper", "unaligned") else None
    found = gradient_set.measure()
    assert (found.sum_squares, found.tensors, found.left) == (3, 1, (1,))
    assert gradient_set.multiply(0.5) == (1,)
    assert torch.equal(plain.grad, torch.full((3,), 0.5))
    assert other.grad._version == 0
    if before is not None and not before.is_meta:
        assert torch.equal(other.grad.to_dense(), before.to_dense())


def test_a_gradient_that_two_parameters_share_is_multiplied_once_and_left_once():
    first, second = with_gradient(torch.ones(9)), with_gradient(torch.ones(9))
    second.grad = first.grad
    gradient_set = _core.GradSet([first, with_gradient(torch.ones(2)), second])
    assert gradient_set.multiply(0.5) == (2,)
    assert torch.equal(first.grad, torch.full((9,), 0.5))
    assert gradient_set.measure().sum_squares == 2 * 9 * 0.25 + 2 * 0.25  # read, twice


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_gradient_with_a_graph_of_its_own_is_data_like_any_other():
    parameter = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    parameter.pow(3).sum().backward(create_graph=True)
    assert parameter.grad is not None
    assert parameter.grad.requires_grad
    gradient_set = _core.GradSet([parameter])
    assert gradient_set.measure().sum_squares == 12**2 + 27**2
    gradient_set.multiply(0.5)
    assert parameter.grad.tolist() == [6, 13.5]
    parameter.grad = None  # ends the cycle that torch warns of


def test_autograd_hears_of_what_was_written():
    parameter = with_gradient(torch.ones(4))
    assert parameter.grad is not None
    gradient_set = _core.GradSet([parameter])
    gradient_set.measure()
    gradient_set.multiply(1)
    assert parameter.grad._version == 0  # nothing was
    gradient_set.multiply(0.5)
    assert parameter.grad._version == 1
    weight = torch.ones(4, requires_grad=True)
    product = (weight * parameter.grad).sum()  # backward needs the gradient as it is now
    gradient_set.multiply(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_memory_that_is_shared_until_written_is_not_written():
    source = torch.ones(100)
    parameter = with_gradient(torch.zeros(100))
    parameter.grad = torch._lazy_clone(source)
    _core.GradSet([parameter]).multiply(0.5)
    assert torch.equal(source, torch.ones(100))
    assert torch.equal(parameter.grad, torch.full((100,), 0.5))


def test_a_tensor_of_inference_mode_is_left_when_it_would_be_written():
    with torch.inference_mode():
        frozen = torch.ones(4)
    parameter = with_gradient(torch.ones(4))
    parameter.grad = frozen
    assert _core.GradSet([parameter]).multiply(0.5) == (0,)
    assert torch.equal(frozen, torch.ones(4))


def test_gradients_are_looked_up_at_each_call():
    parameters = [with_gradient(torch.ones(70_000)), with_gradient(torch.ones(5))]
    gradient_set = _core.GradSet(parameters)
    assert gradient_set.tensors == 0
    assert gradient_set.measure().sum_squares == 70_005
    assert gradient_set.tensors == 2
    parameters[0].grad = None
    assert gradient_set.measure().sum_squares == 5
    assert gradient_set.tensors == 1
    assert gradient_set.parameters == tuple(parameters)


def test_no_gradient_at_all_is_zero():
    assert _core.GradSet([]).measure() == (0.0, 0, 0, 0, -1, ())
    assert _core.GradSet([torch.nn.Parameter(torch.ones(3))]).measure()[:3] == (0.0, 0, 0)
    assert _core.GradSet(iter([torch.ones(3)])).multiply(2) == ()


def uses_of_memory(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_nothing_is_held_after_a_call():
    parameter = with_gradient(torch.ones(64))
    grad = parameter.grad
    gradient_set = _core.GradSet([parameter])
    before = sys.getrefcount(grad)
    for _ in range(3):
        gradient_set.measure()
        gradient_set.multiply(0.5)
    assert sys.getrefcount(grad) == before
    assert uses_of_memory(grad) == uses_of_memory(torch.ones(64))
