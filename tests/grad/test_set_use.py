"""memtools._core.GradSet in use: threads, refusals that change nothing, and its life."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memtools import _core
from tests.grad.test_set import random_gradient, with_gradient

ONES = [torch.ones(4), torch.ones(3, 2)]


@pytest.fixture
def parameters() -> list[torch.nn.Parameter]:
    return [with_gradient(ones.clone()) for ones in ONES]


def several_kinds() -> list[torch.nn.Parameter]:
    sizes = [(400_000, torch.float32), (3, torch.float32), (500_001, torch.bfloat16)]
    return [
        with_gradient(random_gradient(n, dtype=dtype, seed=i)) for i, (n, dtype) in enumerate(sizes)
    ]


def test_any_number_of_threads_gives_the_same_bits():
    before = torch.get_num_threads()
    try:
        parameters = several_kinds()
        gradient_set, sums = _core.GradSet(parameters), set()
        for threads in (1, 2, 3, 4, 9):
            torch.set_num_threads(threads)
            sums.add(gradient_set.measure())
        assert len(sums) == 1
    finally:
        torch.set_num_threads(before)


def test_several_threads_multiply_every_element_once():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        parameters = several_kinds()
        expected = [(p.grad.float() * 0.7).to(p.dtype) for p in parameters]
        assert _core.GradSet(parameters).multiply(0.7) == ()
        for parameter, product in zip(parameters, expected, strict=True):
            assert torch.equal(parameter.grad, product)
    finally:
        torch.set_num_threads(before)


class Telling(torch.Tensor):
    """Its gradient is what `tell` returns."""

    @property
    def grad(self):
        return self.tell()


def test_a_gradient_that_nobody_else_holds_lasts_until_the_pass_is_over(without_shim):
    tensors = [torch.ones(100_000).as_subclass(Telling) for _ in range(3)]
    for tensor in tensors:
        tensor.tell = lambda: torch.full((100_000,), 2.0)
    with without_shim():
        for _ in range(3):
            assert _core.GradSet(tensors).measure().sum_squares == 3 * 100_000 * 4


def test_a_call_in_the_middle_of_a_call_is_refused(without_shim):
    tensor = torch.ones(3).as_subclass(Telling)
    gradient_set = _core.GradSet([tensor])
    tensor.tell = gradient_set.measure
    with without_shim():
        for call in (gradient_set.measure, lambda: gradient_set.multiply(2)):
            with pytest.raises(RuntimeError, match="another thread is in a call"):
                call()
        tensor.tell = lambda: torch.ones(3)
        assert gradient_set.measure().sum_squares == 3


def test_an_error_of_a_gradient_is_passed_on(without_shim, parameters):
    tensor = torch.ones(3).as_subclass(Telling)
    gradient_set = _core.GradSet([*parameters, tensor])

    def tell() -> None:
        raise KeyError("mine")

    tensor.tell = tell
    with without_shim():
        with pytest.raises(KeyError, match="mine"):
            gradient_set.multiply(2)
        assert [torch.equal(p.grad, x) for p, x in zip(parameters, ONES, strict=True)] == [True] * 2
        tensor.tell = lambda: None
        assert gradient_set.measure().sum_squares == 10


def test_writing_fails_before_anything_is_written(without_shim, parameters, monkeypatch):
    def written(tensors: list[torch.Tensor]) -> None:
        raise OSError(f"{len(tensors)} tensors")

    monkeypatch.setattr("memtools._base.torch.written", written)
    with without_shim(), pytest.raises(OSError, match="2 tensors"):
        _core.GradSet(parameters).multiply(2)
    assert [p.grad.sum() for p in parameters] == [4, 6]


REFUSED = {
    "argument of measure": (lambda s: s.measure(1), TypeError, "no arguments"),
    "no factor": (lambda s: s.multiply(), TypeError, "multiply"),
    "factor of text": (lambda s: s.multiply("2"), TypeError, "real number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_and_changes_nothing(name, parameters, either_way):
    call, error, text = REFUSED[name]
    parameter = parameters[1]
    gradient_set = _core.GradSet([parameter])
    with pytest.raises(error, match=text):
        call(gradient_set)
    assert torch.equal(parameter.grad, ONES[1])
    assert parameter.grad._version == 0
    assert gradient_set.measure().sum_squares == 6


@pytest.mark.parametrize(
    ("parameters", "error", "text"),
    [
        ([1], TypeError, r"parameters\[0\] must be a torch.Tensor, got int"),
        (None, TypeError, "not iterable"),
        ([ONES[0], ONES[1], ONES[0]], ValueError, "1 of 3 parameters are given more than once"),
    ],
)
def test_parameters_that_are_none(parameters, error, text):
    with pytest.raises(error, match=text):
        _core.GradSet(parameters)


@pytest.mark.slow
def test_is_collected_with_the_cycle_it_is_in():
    parameter = with_gradient(torch.ones(3))
    parameter.mine = _core.GradSet([parameter])
    parameter.mine.measure()
    gone = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert gone() is None
