"""Measures gradients in one pass, and multiplies them in one pass.

    gradients on the CPU    memtools._core.GradSet: one native pass over all of them
    others on the CPU       torch's operations in float64, at the end of this file
    gradients on a device   torch's foreach operations, without waiting for the device

The caller combines the loss scale, the weights, the ranks and the clip coefficient into one factor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools import _core
from memtools._base import torch as bridge

if TYPE_CHECKING:
    import torch

    Left = list[tuple[int, torch.Tensor]]


_LEAVE_OUT: Final = "remove that call: GradAccumulator drops the gradients at the end of a window"
_MEASURE_OR_KEEP_OUT: Final = (
    "memtools.grad_norm() measures them without writing, while torch's clip_grad_norm_ writes even "
    "with max_norm=inf; requires_grad_(False) on this model keeps out the backward pass of another "
    "model that goes through it, such as a GAN's generator"
)


# The return values of GradSet.changed().
_WRITTEN: Final = 1
_REPLACED: Final = 2
_DROPPED: Final = 3


class Change(NamedTuple):
    """What other code did to gradients, and what to do instead, in words."""

    what: str
    remedy: str


@dataclass(slots=True, eq=False)
class Measure:
    """The sum of squares of gradients, and whether they are finite."""

    #: a float, or a 0-d float64 tensor on the device if some gradients are on one
    sum_squares: float | torch.Tensor
    #: the number of parameters that have a gradient
    count: int
    #: whether no element is inf or nan: a bool, or a 0-d bool tensor on the device
    finite: bool | torch.Tensor
    _bad: tuple[int, int, str | None] = (0, 0, None)
    #: the gradients whose inf and nan elements `bad` has to count first
    _uncounted: Gradients | None = None

    @property
    def norm(self) -> float | torch.Tensor:
        """The 2-norm: a float, or a 0-d float64 tensor on the device."""
        squares = self.sum_squares
        return math.sqrt(squares) if isinstance(squares, float) else squares.sqrt()

    @property
    def bad(self) -> tuple[int, int, str | None]:
        """The number of inf elements, that of nan elements, and the name of the first parameter
        that has one, or None. If gradients are on a device, the first read counts them, which waits
        for the device; the gradients must still be there."""
        if self._uncounted is not None:
            gradients, self._uncounted = self._uncounted, None
            if not bool(self.finite):
                self._bad = gradients.bad()
        return self._bad


class Gradients:
    """The gradients of some parameters, which each call looks up.

    Measuring reads each gradient once. Multiplying changes it in place, like an in-place operation
    of torch. Dtypes, devices and layouts may be mixed. Of a DTensor the local shard is used.

    Attributes:
        parameters: the tensors with these gradients.
        remembered: whether remember() was called since the last backward pass.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], names: Sequence[str] | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._torch = bridge.connect().torch
        self._native = _core.GradSet(self.parameters)
        self._names = None if names is None else list(names)
        half = (self._torch.bfloat16, self._torch.float16)
        self._of_16_bits = [p for p in self.parameters if p.dtype in half]
        self.forget()

    def name(self, index: int) -> str:
        """Return a name for messages: the parameter's own, or its index and shape."""
        if self._names is not None:
            return self._names[index]
        return f"parameter {index} {list(self.parameters[index].shape)}"

    def tensors(self) -> list[torch.Tensor]:
        """Return the existing gradients, in the order of the parameters."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def sparse(self) -> str | None:
        """Return the name of the first parameter whose gradient is sparse, or None."""
        for index in self._native.multiply(1.0):  # those that the native pass cannot read
            if (grad := self.parameters[index].grad) is not None and _is_sparse(grad):
                return self.name(index)
        return None

    def sharded(self) -> list[str]:
        """Return the names of parameters that are DTensors."""
        found = enumerate(self.parameters)
        return [self.name(i) for i, parameter in found if hasattr(parameter, "_local_tensor")]

    def measure(self) -> Measure:
        """Read all gradients once. Raises TypeError if one is sparse."""
        found = self._native.measure()
        if not found.left:
            first = None if found.first_bad < 0 else self.name(found.first_bad)
            bad = (found.infs, found.nans, first)
            return Measure(found.sum_squares, found.tensors, first is None, bad)
        torch = self._torch
        with torch.no_grad():
            left = self._left(found.left)
            return self._with_devices(torch, self._with_left(torch, found, left), left)

    def _with_left(self, torch: Any, native: _core.GradMeasure, left: Left) -> Measure:
        """Add the gradients on the CPU that were not read natively."""
        host = [grad for _, grad in left if grad.device.type == "cpu"]
        squares = [host_squares(torch, grad) for grad in host]
        # The squares of finite float64 may overflow, so that their elements have to be counted.
        odd = [grad for grad, sum_ in zip(host, squares, strict=True) if not math.isfinite(sum_)]
        fine = not (native.infs or native.nans or any(sum(count_bad(torch, g)) for g in odd))
        only = len(host) == len(left)  # Nothing is on a device for which counting would wait.
        bad = self.bad() if only and not fine else (0, 0, None)
        total = exact_sum([native.sum_squares, *squares])
        return Measure(total, native.tensors + len(left), fine, bad)

    def _with_devices(self, torch: Any, host: Measure, left: Left) -> Measure:
        """Add the gradients on devices. The sums are on the first of these."""
        groups = _by_device(left)
        if not groups:
            return host
        sums = [device_sums(torch, grads) for grads in groups.values()]
        device = next(iter(groups))
        squares, finite = sums[0]
        for more in sums[1:]:
            squares = squares + more.squares.to(device, non_blocking=True)
            finite = finite & more.finite.to(device, non_blocking=True)
        if not host.finite:
            finite = torch.zeros_like(finite)
        return Measure(squares + host.sum_squares, host.count, finite, _uncounted=self)

    def multiply(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient in one pass.

        A factor may be a tensor on a device. The call waits for it only if other gradients are on
        the CPU. A factor of 1.0 changes nothing.

        Raises TypeError if a gradient is sparse, and changes nothing then.
        """
        torch = self._torch
        if not isinstance(factor, torch.Tensor):
            factor = float(factor)
            if factor == 1.0:
                return
        unread = self._native.multiply(1.0)  # This writes nothing.
        left = self._left(unread) if unread else []
        if self._native.tensors:
            self._native.multiply(float(factor))
        if not left:
            return
        with torch.no_grad():
            for _, grad in left:
                if grad.device.type == "cpu":
                    host_multiply(grad, float(factor))
            for device, grads in _by_device(left).items():
                near = factor if isinstance(factor, float) else factor.to(device)
                device_multiply(torch, grads, near)

    def bad(self) -> tuple[int, int, str | None]:
        """Count inf and nan elements of all gradients, and return the name of the first parameter
        that has one. Waits for devices."""
        torch = bridge.connect().torch
        found = self._native.measure()
        infs, nans = found.infs, found.nans
        first = len(self.parameters) if found.first_bad < 0 else found.first_bad
        with torch.no_grad():
            for index, grad in self._left(found.left):
                more = count_bad(torch, grad)
                first = min(first, index) if any(more) else first
                infs, nans = infs + more[0], nans + more[1]
        return infs, nans, self.name(first) if infs + nans else None

    # --- changes by other code ---

    def remember(self) -> None:
        """Remember the gradient tensors and how often each was written to. Until the next
        micro-batch nothing may change them."""
        self._before = None
        if not self._native.remember():  # There is no shim.
            before = self._before = [p.grad for p in self.parameters]
            self._versions = [grad._version for grad in before if grad is not None]
        self.remembered = True

    def forget(self) -> None:
        """Discard what remember() saved: a backward pass begins, or the gradients are dropped."""
        self._before, self._versions, self.remembered = None, [], False

    def changed(self) -> Change | None:
        """Return what happened to the gradients since remember(), or None."""
        found = self._native.changed() if self._before is None else self._compared(self._before)
        if found == _DROPPED:
            return Change("set to None, as by zero_grad()", _LEAVE_OUT)
        if found == _REPLACED:
            what = "added to or replaced"
        elif found == _WRITTEN:
            what = "written to, as by zero_grad(set_to_none=False), clipping or a backward()"
        else:
            return None
        return Change(what, f"{_LEAVE_OUT}; {_MEASURE_OR_KEEP_OUT}")

    def _compared(self, before: list[Any]) -> int:
        """Do what GradSet.changed() does, in Python."""
        grads = [p.grad for p in self.parameters]
        if not all(map(operator.is_, grads, before)):
            pairs = zip(grads, before, strict=True)
            dropped = any(new is None and old is not None for new, old in pairs)
            return _DROPPED if dropped else _REPLACED
        versions = [grad._version for grad in grads if grad is not None]
        return _WRITTEN if versions != self._versions else 0

    # --- in a window ---

    def drop(self) -> None:
        """Drop all gradients."""
        self.forget()
        for parameter in self.parameters:
            parameter.grad = None

    def wide(self) -> list[torch.Tensor]:
        """Return the 16-bit parameters whose gradients are in fp32 because of `grad_dtype`."""
        found = self._of_16_bits
        return [p for p in found if p.grad is not None and p.grad.dtype != p.dtype]

    def _left(self, indices: Iterable[int]) -> Left:
        """Return the gradients that are not read natively, of a DTensor the local shard."""
        left = []
        for index in indices:
            if (grad := self.parameters[index].grad) is None:
                continue
            if _is_sparse(grad):
                raise sparse_error(self.name(index))
            left.append((index, getattr(grad, "_local_tensor", grad)))
        return left


def sparse_error(name: str) -> TypeError:
    """Return the error for a sparse gradient of the parameter `name`."""
    return TypeError(
        f"the gradient of {name} is sparse; use a layer with sparse=False, such as "
        "torch.nn.Embedding(..., sparse=False)"
    )


def _is_sparse(grad: torch.Tensor) -> bool:
    return bool(grad.layout != bridge.connect().torch.strided)


def _by_device(left: Left) -> dict[torch.device, list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for _, grad in left:
        if grad.device.type != "cpu":
            groups.setdefault(grad.device, []).append(grad)
    return groups


# --- torch's operations, for gradients that are not read natively ---

#: So many elements are copied to float64 at a time: 8 MiB.
PIECE = 1 << 20


class DeviceSums(NamedTuple):
    """The sums over the gradients on one device: 0-d tensors on it, float64 and bool."""

    squares: torch.Tensor
    finite: torch.Tensor


def _real(torch: Any, grad: torch.Tensor) -> torch.Tensor:
    """Return a complex gradient as pairs of real numbers: |z|^2 is the sum of their squares."""
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


def _pieces(grad: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views that together are the gradient, of PIECE elements or one row."""
    if grad.numel() <= PIECE:
        yield grad
        return
    longest = max(range(grad.dim()), key=grad.size)
    rows = max(1, PIECE * grad.size(longest) // grad.numel())
    for piece in grad.split(rows, longest):  # type: ignore[no-untyped-call]
        yield from _pieces(piece) if rows == 1 and piece.numel() > PIECE else (piece,)


def host_squares(torch: Any, grad: torch.Tensor) -> float:
    """Return the exact sum of squares of a gradient on the CPU. Needs up to 16 MiB, or one row."""
    pieces = _pieces(_real(torch, grad))
    return exact_sum([float(piece.double().square().sum()) for piece in pieces])


def exact_sum(squares: Sequence[float]) -> float:
    """Return the exact sum. fsum refuses an overflow, and inf beside nan."""
    try:
        return math.fsum(squares)
    except (OverflowError, ValueError):
        return sum(squares)


def count_bad(torch: Any, grad: torch.Tensor) -> tuple[int, int]:
    """Return the numbers of inf and of nan elements. Waits for their device."""
    infs = nans = 0
    for piece in _pieces(_real(torch, grad)):
        infs += int(piece.isinf().sum())
        nans += int(piece.isnan().sum())
    return infs, nans


def host_multiply(grad: torch.Tensor, factor: float) -> None:
    """Multiply a gradient in place. 16-bit gradients are rounded once."""
    if grad.is_floating_point() and grad.element_size() < 4:
        for piece in _pieces(grad):
            piece.copy_(piece.float().mul_(factor))
        return
    grad.mul_(factor)


def device_sums(torch: Any, grads: Sequence[torch.Tensor]) -> DeviceSums:
    """Return the sum of squares of gradients on one device, in float64: squares of fp32, bf16 and
    fp16 neither overflow nor vanish, so that the sum is finite if all elements are."""
    real = [_real(torch, grad) for grad in grads]
    norms: list[torch.Tensor] = []
    finite: list[torch.Tensor] = []
    for alike in _by_dtype(real):
        found = torch._foreach_norm(alike, 2, dtype=torch.float64)
        norms += found
        # Squares of float64 may overflow. The largest element says whether all are finite.
        finite += found if alike[0].dtype != torch.float64 else _largest(torch, alike)
    squares = torch.stack(norms).square_().sum()
    return DeviceSums(squares, torch.stack(finite).isfinite().all())


def _largest(torch: Any, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    filled = [grad for grad in grads if grad.numel()]
    empty = [grad.new_zeros(()) for grad in grads[: len(grads) - len(filled)]]
    return empty + (list(torch._foreach_norm(filled, math.inf)) if filled else [])


def device_multiply(
    torch: Any, grads: Sequence[torch.Tensor], factor: float | torch.Tensor
) -> None:
    """Multiply gradients on one device in place by a factor on the same device. torch would first
    round the factor to the 16 bits of a gradient, except a Python number on CUDA: these gradients
    are multiplied as fp32 copies, one at a time."""
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


def _by_dtype(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group gradients, as torch's foreach operations are fast for lists of one dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())
