"""Gradients read and changed by torch's own operations: those that the native pass leaves.

On the CPU that is exact and plain: float64 sums over pieces that bound what a copy takes. On a
device everything stays on it: the functions here launch kernels and return 0-d tensors, and nothing
waits for the device. A meta tensor has no values to wait for, so that a test can prove it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

PIECE = 1 << 20  # elements that are copied to float64 at a time: 8 MiB


class Sums(NamedTuple):
    """What one gradient on the CPU adds up to."""

    squares: float
    infs: int
    nans: int


class DeviceSums(NamedTuple):
    """What the gradients on one device add up to: 0-d tensors on it, float64 and bool."""

    squares: torch.Tensor
    finite: torch.Tensor


def local(grad: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor, or the gradient itself."""
    shard = getattr(grad, "_local_tensor", None)
    return grad if shard is None else shard


def _real(torch: Any, grad: torch.Tensor) -> torch.Tensor:
    """A complex gradient as pairs of real numbers: |z|^2 is the sum of their squares."""
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _pieces(grad: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the gradient, of PIECE elements or one row."""
    if grad.numel() <= PIECE:
        yield grad
        return
    longest = max(range(grad.dim()), key=grad.size)
    rows = max(1, PIECE * grad.size(longest) // grad.numel())
    for piece in grad.split(rows, longest):  # type: ignore[no-untyped-call]
        yield from _pieces(piece) if rows == 1 and piece.numel() > PIECE else (piece,)


def host_sums(torch: Any, grad: torch.Tensor) -> Sums:
    """The exact sum of squares of a gradient on the CPU, and how many of its elements are inf and
    nan. Needs no more than 16 MiB or one row beside it."""
    real = _real(torch, grad)
    squares = total([float(piece.double().square().sum()) for piece in _pieces(real)])
    if math.isfinite(squares):
        return Sums(squares, 0, 0)
    infs, nans = count_bad(torch, grad)
    return Sums(squares, infs, nans)


def total(squares: Sequence[float]) -> float:
    """Their exact sum; fsum refuses what overflows, and inf beside nan."""
    try:
        return math.fsum(squares)
    except (OverflowError, ValueError):
        return sum(squares)


def count_bad(torch: Any, grad: torch.Tensor) -> tuple[int, int]:
    """How many elements are inf and how many nan; waits for the device that they are on."""
    infs = nans = 0
    for piece in _pieces(_real(torch, grad)):
        infs += int(piece.isinf().sum())
        nans += int(piece.isnan().sum())
    return infs, nans


def host_multiply(grad: torch.Tensor, factor: float, limit: float) -> None:
    """grad = clamp(grad * factor, -limit, limit); 16-bit gradients are rounded once."""
    if grad.is_floating_point() and grad.element_size() < 4:
        for piece in _pieces(grad):
            piece.copy_(piece.float().mul_(factor).clamp_(-limit, limit))
        return
    grad.mul_(factor)
    if limit < math.inf:
        grad.clamp_(-limit, limit)


def device_sums(torch: Any, grads: Sequence[torch.Tensor]) -> DeviceSums:
    """The sum of squares of gradients of one device, added in float64: fp32, bf16 and fp16 neither
    overflow nor vanish in it, so it is finite where they all are."""
    real = [_real(torch, grad) for grad in grads]
    norms: list[torch.Tensor] = []
    finite: list[torch.Tensor] = []
    for alike in _by_dtype(real):
        found = torch._foreach_norm(alike, 2, dtype=torch.float64)
        norms += found
        # Squares of float64 may overflow: their largest elements tell whether they are finite.
        finite += found if alike[0].dtype != torch.float64 else _largest(torch, alike)
    squares = torch.stack(norms).square_().sum()
    return DeviceSums(squares, torch.stack(finite).isfinite().all())


def _largest(torch: Any, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    filled = [grad for grad in grads if grad.numel()]
    empty = [grad.new_zeros(()) for grad in grads[: len(grads) - len(filled)]]
    return empty + (list(torch._foreach_norm(filled, math.inf)) if filled else [])


def device_multiply(
    torch: Any, grads: Sequence[torch.Tensor], factor: float | torch.Tensor, limit: float
) -> None:
    """grad = clamp(grad * factor, -limit, limit) for gradients of one device, where the factor is
    too. 16-bit gradients go by an fp32 copy of one of them at a time where torch would round the
    factor to 16 bits first, which is everywhere but for a Python number on CUDA."""
    for alike in _by_dtype(grads):
        exact = torch.promote_types(alike[0].dtype, torch.float32)
        if exact != alike[0].dtype and (
            alike[0].device.type != "cuda" or not isinstance(factor, float)
        ):
            for grad in alike:
                grad.copy_(grad.to(exact).mul_(factor))
        elif isinstance(factor, float):
            torch._foreach_mul_(alike, factor)
        else:
            torch._foreach_mul_(alike, factor.to(exact.to_real()))
        if limit < math.inf:
            torch._foreach_clamp_min_(alike, -limit)
            torch._foreach_clamp_max_(alike, limit)


def _by_dtype(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """torch's foreach operations are fast for lists of one dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())
