"""memtools.grad.main_grads: fp32 sums of 16-bit gradients, beside float64 and beside torch's
own."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memtools.grad.gradients import Gradients
from memtools.grad.main_grads import MainGrads, takes_fp32

HALF = [torch.bfloat16, torch.float16]


def model_of(dtype: torch.dtype) -> nn.Sequential:
    """16-bit layers and a norm in fp32, as people train them."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype).append(Norm())


class Norm(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


def batches(dtype: torch.dtype, count: int) -> Iterator[torch.Tensor]:
    make = torch.Generator().manual_seed(2)
    return (torch.randn(16, 6, generator=make).to(dtype) for _ in range(count))


def losses(model: nn.Module, dtype: torch.dtype, count: int = 5) -> Iterator[torch.Tensor]:
    return (model(x).square().sum() for x in batches(dtype, count))


def reference(dtype: torch.dtype, count: int = 5) -> list[torch.Tensor]:
    """Each micro-batch's gradient by itself, added in float64."""
    model = model_of(dtype)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
    for loss in losses(model, dtype, count):
        model.zero_grad()
        loss.backward()
        for total, p in zip(sums, model.parameters(), strict=True):
            assert p.grad is not None
            total += p.grad
    return sums


def trained(dtype: torch.dtype, hooks: bool = True) -> tuple[nn.Module, MainGrads]:
    model = model_of(dtype)
    names = [name for name, _ in model.named_parameters()]
    main = MainGrads(model.parameters(), names, hooks=hooks)
    for i, loss in enumerate(losses(model, dtype)):
        if i == 4:
            main.measure_next()
        loss.backward()
        if not hooks:
            main.absorb()
    return model, main


def bytes_of_sums(main: MainGrads) -> int:
    grads = (found.holder.grad for found in main._sums.values())
    return sum(grad.nbytes for grad in grads if grad is not None)


# --- sums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_sums_are_fp32_sums_of_the_micro_batches(dtype: torch.dtype, hooks: bool) -> None:
    model, main = trained(dtype, hooks)
    wanted = reference(dtype)
    for grad, value in zip(main.tensors(), wanted, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad.double(), value, rtol=1e-5, atol=1e-6)
    assert [p.grad is None for p in model.parameters()] == [True] * 4 + [False] * 2
    assert bytes_of_sums(main) == 4 * (6 * 8 + 8 + 8 * 4 + 4)


def test_small_gradients_beside_a_large_sum_are_kept() -> None:
    """In bf16 256 + 1 is 256."""
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    main = MainGrads([weight])
    for scale in [256.0] + [1.0] * 100:
        (weight * scale).sum().backward()
    assert main.tensors()[0].tolist() == [356.0, 356.0]


@pytest.mark.parametrize("hooks", [True, False])
def test_measure_of_the_last_pass_is_that_of_the_sums(hooks: bool) -> None:
    _, main = trained(torch.bfloat16, hooks)
    known = main.measure()
    assert all(found.measured is not None for found in main._sums.values())
    read = Gradients.measure(main)
    assert known.sum_squares == pytest.approx(read.sum_squares, rel=1e-14)
    assert (known.count, known.finite, known.bad) == (6, True, (0, 0, None))
    exact = math.fsum(float(total.square().sum()) for total in reference(torch.bfloat16))
    assert known.sum_squares == pytest.approx(exact, rel=1e-5)


def test_measure_follows_what_is_done_to_the_sums_after_it() -> None:
    _, main = trained(torch.bfloat16)
    before = float(main.measure().sum_squares)
    main.multiply(0.5)
    assert main.measure().sum_squares == pytest.approx(before / 4, rel=1e-12)
    _, main = trained(torch.bfloat16)
    main.tensors()[0].zero_()
    assert float(main.measure().sum_squares) < before


def test_measure_reads_what_the_last_backward_left_alone() -> None:
    used, unused = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    main = MainGrads([used, unused])
    (used * 2 + unused * 3).sum().backward()
    main.measure_next()
    (used * 2).sum().backward()
    assert main.measure().sum_squares == 3 * 4**2 + 3 * 3**2


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_bad_elements_are_named_by_their_parameter(bad: float) -> None:
    first, second = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
    main = MainGrads([first, second], ["first", "second"])
    main.measure_next()
    (first.sum() + second.sum() * bad).backward()
    found = main.measure()
    wanted = (3, 0) if math.isinf(bad) else (0, 3)
    assert (found.bad, found.finite) == ((*wanted, "second"), False)


def test_a_gradient_with_other_strides_than_the_sum_is_added() -> None:
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    main = MainGrads([weight], hooks=False)
    for grad in (torch.ones(3, 2), torch.arange(6.0).view(2, 3).t()):
        weight.grad = grad.bfloat16()
        main.measure_next()
        main.absorb()
    assert main.tensors()[0].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert main.measure().sum_squares == 91


def test_a_first_gradient_of_one_elements_memory_is_added() -> None:
    """As a program may set one: it has strides of 0, which no sum has."""
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    main = MainGrads([weight], hooks=False)
    for _ in range(2):
        weight.grad = torch.full((1,), 2.0, dtype=torch.bfloat16).expand(3, 2)
        main.measure_next()
        main.absorb()
    assert main.tensors()[0].tolist() == [[4, 4]] * 3
    assert main.measure().sum_squares == 6 * 16


def test_a_parameter_that_is_used_twice_is_added_once() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    main = MainGrads([weight])
    (weight * 2 + weight * 3).sum().backward()
    assert main.tensors()[0].tolist() == [5.0, 5.0]


# --- what the optimizer gets ----------------------------------------------------------------------


def stepped(optimizer: torch.optim.Optimizer, main: MainGrads) -> None:
    main.give(optimizer)
    optimizer.step()
    optimizer.zero_grad()
    main.clear()


@pytest.mark.parametrize("fused", [False, True])
def test_others_get_them_rounded_once(fused: bool) -> None:
    model, main = trained(torch.bfloat16)
    wanted = [grad.to(p.dtype) for grad, p in zip(main.tensors(), model.parameters(), strict=True)]
    adam = torch.optim.AdamW(model.parameters(), fused=fused)
    main.give(adam)
    assert bytes_of_sums(main) == 0
    for p, grad in zip(model.parameters(), wanted, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad)
    adam.step()
    main.clear()
    assert {state["exp_avg"].dtype for state in adam.state.values()} == {
        torch.bfloat16,
        torch.float32,
    }


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "Adadelta"])
def test_those_that_can_get_them_in_fp32(kind: str, foreach: bool) -> None:
    """The step is the one that torch makes of the same fp32 gradients, and the state keeps the
    parameter's dtype, so that a saved one resumes the same."""
    model, main = trained(torch.bfloat16)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, foreach=foreach)
    before = [p.detach().clone() for p in model.parameters()]
    main.give(optimizer)
    for p, was, value in zip(model.parameters(), before, reference(torch.bfloat16), strict=True):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.double(), value, rtol=1e-5, atol=1e-6)
        if kind == "SGD":
            was.sub_(p.grad, alpha=0.1)
    optimizer.step()
    main.clear()
    for p, was in zip(model.parameters(), before, strict=True):
        assert p.grad_dtype == p.dtype
        assert torch.equal(p, was) == (kind == "SGD")
        states = {k: v for k, v in optimizer.state[p].items() if k != "step"}
        assert {value.dtype for value in states.values()} <= {p.dtype}
    next(losses(model, torch.bfloat16)).backward()  # and the next window begins as ever
    assert main.tensors()[0].dtype == torch.float32


SETTINGS: list[tuple[str, dict[str, float]]] = [
    ("SGD", {"weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"weight_decay": 0.1, "lr_decay": 0.1, "maximize": True}),
    ("Adadelta", {"weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
def test_with_all_their_settings_they_step(
    kind: str, settings: dict[str, float], foreach: bool
) -> None:
    model, main = trained(torch.bfloat16)
    optimizer = getattr(torch.optim, kind)(model.parameters(), foreach=foreach, **settings)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        next(losses(model, torch.bfloat16)).backward()
        main.give(optimizer)
        optimizer.step()
        main.clear()
    for p, was in zip(model.parameters(), before, strict=True):
        assert not torch.equal(p, was)
        states = {k: v for k, v in optimizer.state[p].items() if k != "step"}
        assert {value.dtype for value in states.values()} <= {p.dtype}


def test_which_optimizers_take_fp32() -> None:
    class Own(torch.optim.SGD):
        pass

    weights = [nn.Parameter(torch.ones(2))]
    assert takes_fp32(torch.optim.SGD(weights))
    assert not takes_fp32(torch.optim.SGD(weights, momentum=0.9))
    assert not takes_fp32(torch.optim.SGD(weights, fused=True))
    assert not takes_fp32(torch.optim.AdamW(weights))
    assert takes_fp32(torch.optim.RMSprop(weights))
    assert not takes_fp32(torch.optim.RMSprop(weights, centered=True))
    assert not takes_fp32(Own(weights))


def test_the_next_window_starts_from_nothing() -> None:
    model, main = trained(torch.bfloat16)
    stepped(torch.optim.SGD(model.parameters(), lr=0.0), main)
    assert (main.tensors(), bytes_of_sums(main)) == ([], 0)
    for loss in losses(model, torch.bfloat16):
        loss.backward()
    for grad, value in zip(main.tensors(), reference(torch.bfloat16), strict=True):
        torch.testing.assert_close(grad.double(), value, rtol=1e-5, atol=1e-6)


# --- life -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hooks_keep_nothing_alive_and_go_with_close() -> None:
    model, main = trained(torch.bfloat16)
    weight = weakref.ref(next(model.parameters()))
    gone = weakref.ref(main)
    del main
    assert gone() is None
    next(losses(model, torch.bfloat16)).backward()  # whose hooks find nobody
    assert next(model.parameters()).grad is not None
    del model
    gc.collect()
    assert weight() is None


def test_close_removes_the_hooks() -> None:
    model, main = trained(torch.bfloat16)
    main.close()
    main.close()
    next(losses(model, torch.bfloat16)).backward()
    assert bytes_of_sums(main) == 0
    assert next(model.parameters()).grad is not None


def test_sparse_gradients_are_refused_in_backward() -> None:
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    main = MainGrads(table.parameters(), ["table.weight"])
    with pytest.raises(TypeError, match="is sparse; use a layer with sparse=False"):
        table(torch.tensor([1])).sum().backward()
    assert bytes_of_sums(main) == 0


def test_sums_on_a_device_wait_for_nothing() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16, device="meta"))
    main = MainGrads([weight, nn.Parameter(torch.ones(2, device="meta"))])
    for _ in range(2):
        main.measure_next()
        (weight * 2).sum().backward()
    main.multiply(0.5)
    found = main.measure()
    assert isinstance(found.finite, torch.Tensor)
    assert (main.tensors()[0].dtype, main.tensors()[0].device.type) == (torch.float32, "meta")
    main.give(torch.optim.AdamW([weight]))
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
