"""What a window's end does to gradients: measure them in one pass, and multiply them at most once.

    gradients on the CPU    memtools._core.GradSet: one native pass over all of them
    what that leaves        torch's operations in float64, further down
    gradients on a device   torch's foreach operations there, and nothing waits for the device

Nothing here decides anything: the caller makes one factor of the loss scale, the weights, the ranks
and the clip coefficient, and may not multiply at all.
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


_LEAVE_OUT: Final = (
    "leave that call out, as GradAccumulator drops the gradients where a window ends"
)
_MEASURE_OR_KEEP_OUT: Final = (
    "memtools.grad_norm() measures them and writes nothing, where torch's clip_grad_norm_ writes "
    "with max_norm=inf too; requires_grad_(False) on this model keeps out the backward pass of "
    "another one that goes through it, as that of a GAN's generator does"
)


_WRITTEN: Final = 1  # as GradSet.changed() tells them
_REPLACED: Final = 2
_DROPPED: Final = 3


class Change(NamedTuple):
    """What somebody did to gradients, and what to do instead, in words."""

    what: str
    remedy: str


@dataclass(slots=True, eq=False)
class Measure:
    """What gradients add up to."""

    #: a float, or a 0-d float64 tensor on the device where some gradients are on one
    sum_squares: float | torch.Tensor
    #: how many parameters have a gradient
    count: int
    #: whether no element is inf or nan: a bool, or a 0-d bool tensor on the device
    finite: bool | torch.Tensor
    _bad: tuple[int, int, str | None] = (0, 0, None)
    _uncounted: Gradients | None = None  # where inf and nan are counted when they are asked for

    @property
    def norm(self) -> float | torch.Tensor:
        """The 2-norm: a float, or a 0-d float64 tensor on the device."""
        squares = self.sum_squares
        return math.sqrt(squares) if isinstance(squares, float) else squares.sqrt()

    @property
    def bad(self) -> tuple[int, int, str | None]:
        """Elements that are inf, those that are nan, and the name of the first parameter that has
        one, or None. Those of gradients on a device are counted when they are first asked for,
        which waits for the device, and the gradients must still be there."""
        if self._uncounted is not None:
            gradients, self._uncounted = self._uncounted, None
            if not bool(self.finite):
                self._bad = gradients.bad()
        return self._bad


class Gradients:
    """The gradients of some parameters, whatever they are on. They are looked up at each call.

    Measuring reads each gradient once. Multiplying changes it in place, as an in-place operation of
    torch does. Dtypes, devices and layouts may be mixed; of a DTensor it is this process's shard.

    Attributes:
        parameters: the tensors whose `.grad` is measured and multiplied.
        remembered: whether remember() was called since the last backward pass.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], names: Sequence[str] | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._torch = bridge.connect().torch
        self._native = _core.GradSet(self.parameters)
        self._names = None if names is None else list(names)
        if self._names is not None and len(self._names) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} parameters and {len(self._names)} names")
        half = (self._torch.bfloat16, self._torch.float16)
        self._of_16_bits = [p for p in self.parameters if p.dtype in half]
        self.forget()

    def name(self, index: int) -> str:
        """What a message calls the parameter: by its name, or by its place and shape."""
        if self._names is not None:
            return self._names[index]
        return f"parameter {index} {list(self.parameters[index].shape)}"

    def tensors(self) -> list[torch.Tensor]:
        """The gradients that there are, in the order of the parameters."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def sparse(self) -> str | None:
        """The name of the first parameter whose gradient is sparse, or None."""
        for index in self._native.multiply(1.0):  # those that the native pass leaves
            if (grad := self.parameters[index].grad) is not None and _is_sparse(grad):
                return self.name(index)
        return None

    def sharded(self) -> list[str]:
        """The names of parameters that are DTensors: a measure has their local shards only."""
        found = enumerate(self.parameters)
        return [self.name(i) for i, parameter in found if hasattr(parameter, "_local_tensor")]

    def measure(self) -> Measure:
        """One read pass. Raises TypeError for a sparse gradient, before anything is read."""
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
        """The measure with what is on the CPU, but was not read natively."""
        host = [grad for _, grad in left if grad.device.type == "cpu"]
        squares = [host_squares(torch, grad) for grad in host]
        # The squares of finite float64 may overflow: only a count tells.
        odd = [grad for grad, sum_ in zip(host, squares, strict=True) if not math.isfinite(sum_)]
        fine = not (native.infs or native.nans or any(sum(count_bad(torch, g)) for g in odd))
        only = len(host) == len(left)  # nothing is on a device, so that counting waits for none
        bad = self.bad() if only and not fine else (0, 0, None)
        total = exact_sum([native.sum_squares, *squares])
        return Measure(total, native.tensors + len(left), fine, bad)

    def _with_devices(self, torch: Any, host: Measure, left: Left) -> Measure:
        """The measure with what is on devices, on the first of them."""
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
        """Multiply every gradient, in one pass.

        A factor that is a tensor on a device is used there; gradients on the CPU beside it make the
        call wait for it. With factor 1.0 nothing is touched.

        Raises TypeError for a sparse gradient; then nothing was changed.
        """
        torch = self._torch
        if not isinstance(factor, torch.Tensor):
            factor = float(factor)
            if factor == 1.0:
                return
        unread = self._native.multiply(1.0)  # by 1 it only looks
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
        """Counts inf and nan elements in all gradients, and names the first parameter that has
        one. Waits for devices."""
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

    # --- whether somebody else changes them ---

    def remember(self) -> None:
        """Remember the gradients as they are now: the tensors, and how often each was written to.
        From now on nobody but the next micro-batch may change them."""
        self._before = None
        if not self._native.remember():  # there is no shim
            before = self._before = [p.grad for p in self.parameters]
            self._versions = [grad._version for grad in before if grad is not None]
        self.remembered = True

    def forget(self) -> None:
        """Forget what remember() saw: a backward pass begins, or the gradients are dropped."""
        self._before, self._versions, self.remembered = None, [], False

    def changed(self) -> Change | None:
        """What happened to the gradients since remember(); None for nothing."""
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
        """The same as GradSet.changed(), by Python."""
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
        """The 16-bit parameters whose gradients are in fp32, as their `grad_dtype` asks for."""
        found = self._of_16_bits
        return [p for p in found if p.grad is not None and p.grad.dtype != p.dtype]

    def _left(self, indices: Iterable[int]) -> Left:
        """The gradients that are not read natively, of a DTensor the shard that is here."""
        left = []
        for index in indices:
            if (grad := self.parameters[index].grad) is None:
                continue
            if _is_sparse(grad):
                raise sparse_error(self.name(index))
            left.append((index, getattr(grad, "_local_tensor", grad)))
        return left


def sparse_error(name: str) -> TypeError:
    """What to raise where the gradient of the parameter `name` is sparse."""
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


# --- torch's own operations, for what the native pass leaves ---

PIECE = 1 << 20  # elements that are copied to float64 at a time: 8 MiB


class DeviceSums(NamedTuple):
    """What the gradients on one device add up to: 0-d tensors on it, float64 and bool."""

    squares: torch.Tensor
    finite: torch.Tensor


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


def host_squares(torch: Any, grad: torch.Tensor) -> float:
    """The exact sum of squares of a gradient on the CPU. Needs no more than 16 MiB or one row
    beside it."""
    pieces = _pieces(_real(torch, grad))
    return exact_sum([float(piece.double().square().sum()) for piece in pieces])


def exact_sum(squares: Sequence[float]) -> float:
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


def host_multiply(grad: torch.Tensor, factor: float) -> None:
    """grad *= factor; 16-bit gradients are rounded once."""
    if grad.is_floating_point() and grad.element_size() < 4:
        for piece in _pieces(grad):
            piece.copy_(piece.float().mul_(factor))
        return
    grad.mul_(factor)


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
    torch: Any, grads: Sequence[torch.Tensor], factor: float | torch.Tensor
) -> None:
    """grad *= factor for gradients of one device, where the factor is too. 16-bit gradients go by
    an fp32 copy of one of them at a time where torch would round the factor to 16 bits first, which
    is everywhere but for a Python number on CUDA."""
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
    """torch's foreach operations are fast for lists of one dtype."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for grad in grads:
        groups.setdefault(grad.dtype, []).append(grad)
    return list(groups.values())
