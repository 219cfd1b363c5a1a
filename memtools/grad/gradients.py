"""What a window's end does to gradients: measure them in one pass, and multiply them at most once.

    gradients on the CPU    memtools._core.GradSet: one native pass over all of them
    what that leaves        torch's operations in float64 (memtools.grad.torch_ops)
    gradients on a device   torch's foreach operations there, and nothing waits for the device

Nothing here decides anything: the caller makes one factor of the loss scale, the weights, the ranks
and the clip coefficient, and may not multiply at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from memtools import _core
from memtools._base import torch as bridge
from memtools.grad import torch_ops

if TYPE_CHECKING:
    import torch

    Left = list[tuple[int, torch.Tensor]]


class Measure:
    """What gradients add up to.

    `sum_squares` is a float, or a 0-d float64 tensor on the device where some gradients are on one;
    `finite` is a bool or a 0-d bool tensor likewise. `count` is how many parameters have a
    gradient. `infs` and `nans` count elements and `first_bad` names the first parameter that has
    one, or is None: of gradients on a device they are counted when they are first asked for, which
    waits for the device, and the gradients must still be there.
    """

    __slots__ = ("_bad", "_where", "count", "finite", "sum_squares")

    def __init__(
        self,
        sum_squares: float | torch.Tensor,
        count: int,
        bad: tuple[int, int, str | None] = (0, 0, None),
        finite: bool | torch.Tensor | None = None,
        where: Gradients | None = None,
    ) -> None:
        self.sum_squares = sum_squares
        self.count = count
        self.finite: bool | torch.Tensor = bad[:2] == (0, 0) if finite is None else finite
        self._bad = bad
        self._where = where  # the gradients that are yet to be counted

    @property
    def norm(self) -> float | torch.Tensor:
        """The 2-norm: a float, or a 0-d float64 tensor on the device."""
        squares = self.sum_squares
        return math.sqrt(squares) if isinstance(squares, float) else squares.sqrt()

    @property
    def infs(self) -> int:
        return self._counted()[0]

    @property
    def nans(self) -> int:
        return self._counted()[1]

    @property
    def first_bad(self) -> str | None:
        return self._counted()[2]

    def _counted(self) -> tuple[int, int, str | None]:
        if self._where is not None:
            where, self._where = self._where, None
            if not bool(self.finite):
                self._bad = where.bad()
        return self._bad


class Gradients:
    """The gradients of some parameters, whatever they are on. They are looked up at each call.

    Measuring reads each gradient once. Multiplying changes it in place, as an in-place operation of
    torch does. Dtypes, devices and layouts may be mixed; of a DTensor it is this process's shard.
    """

    __slots__ = ("_names", "_native", "parameters")

    def __init__(
        self, parameters: Iterable[torch.Tensor], names: Sequence[str] | None = None
    ) -> None:
        self.parameters = list(parameters)
        self._native = _core.GradSet(self.parameters)
        self._names = None if names is None else list(names)
        if self._names is not None and len(self._names) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} parameters and {len(self._names)} names")

    def name(self, index: int) -> str:
        """What a message calls the parameter: by its name, or by its place and shape."""
        if self._names is not None:
            return self._names[index]
        return f"parameter {index} {list(self.parameters[index].shape)}"

    @property
    def watched(self) -> _core.GradSet:
        """Those that nobody else may change in the middle of a window."""
        return self._native

    def tensors(self) -> list[torch.Tensor]:
        """The gradients that there are, in the order of the parameters."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def empty(self) -> bool:
        """Whether no parameter has a gradient."""
        return all(p.grad is None for p in self.parameters)

    def sparse(self) -> str | None:
        """The name of the first parameter whose gradient is sparse, or None."""
        for index in self._unread():
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
        first = None if found.first_bad < 0 else self.name(found.first_bad)
        if not found.left:
            return Measure(found.sum_squares, found.tensors, (found.infs, found.nans, first))
        torch = bridge.connect().torch
        with torch.no_grad():
            left = self._left(found.left)
            return self._with_devices(torch, self._with_left(torch, found, left), left)

    def _with_left(self, torch: Any, native: _core.GradMeasure, left: Left) -> Measure:
        """The measure with what is on the CPU, but was not read natively."""
        sums = [torch_ops.host_sums(torch, grad) for _, grad in left if grad.device.type == "cpu"]
        squares = torch_ops.total([native.sum_squares, *(found.squares for found in sums)])
        fine = not (native.infs or native.nans or any(found.infs or found.nans for found in sums))
        only = len(sums) == len(left)  # nothing is on a device, so that counting waits for none
        bad = self.bad() if only and not fine else (0, 0, None)
        return Measure(squares, native.tensors + len(left), bad, fine)

    def _with_devices(self, torch: Any, host: Measure, left: Left) -> Measure:
        """The measure with what is on devices, on the first of them."""
        groups = _by_device(left)
        if not groups:
            return host
        sums = [torch_ops.device_sums(torch, grads) for grads in groups.values()]
        device = next(iter(groups))
        squares, finite = sums[0]
        for more in sums[1:]:
            squares = squares + more.squares.to(device, non_blocking=True)
            finite = finite & more.finite.to(device, non_blocking=True)
        both = finite if host.finite else torch.zeros_like(finite)
        return Measure(squares + host.sum_squares, host.count, finite=both, where=self)

    def multiply(self, factor: float | torch.Tensor, limit: float = math.inf) -> None:
        """Every gradient becomes clamp(gradient * factor, -limit, limit), in one pass.

        A factor that is a tensor on a device is used there; gradients on the CPU beside it make the
        call wait for it. With factor 1.0 and no limit nothing is touched.

        Raises ValueError for a limit that is no positive number and TypeError for a sparse
        gradient, or a complex one with a limit; then nothing was changed.
        """
        torch = bridge.connect().torch
        if not limit > 0:
            raise ValueError(f"limit is a positive number, got {limit}")
        if not isinstance(factor, torch.Tensor):
            factor = float(factor)
            if factor == 1.0 and limit == math.inf:
                return
        left = self._left(self._unread())
        self._refuse_complex(left, limit)
        if self._native.tensors:
            self._native.multiply(float(factor), limit)
        with torch.no_grad():
            for _, grad in left:
                if grad.device.type == "cpu":
                    torch_ops.host_multiply(grad, float(factor), limit)
            for device, grads in _by_device(left).items():
                there = factor if isinstance(factor, float) else factor.to(device)
                torch_ops.device_multiply(torch, grads, there, limit)

    def _refuse_complex(self, left: Left, limit: float) -> None:
        for index, grad in left:
            if limit < math.inf and grad.is_complex():
                raise TypeError(
                    f"the gradient of {self.name(index)} is complex and cannot be clipped by "
                    "value; clip by norm"
                )

    def add_to(
        self, into: Sequence[torch.Tensor | None], first: bool = False, measure: bool = False
    ) -> Measure | None:
        """Adds each gradient to the tensor of its parameter in `into`, fp32 of the same shape and
        strides; `first` overwrites. Parameters without a gradient add nothing, and may have None
        there.

        With `measure`, the measure of what is then in `into`: for dense gradients on the CPU in the
        same pass. Raises ValueError for another shape or a tensor that is missing; then nothing was
        changed.
        """
        torch = bridge.connect().torch
        if len(into) != len(self.parameters):
            raise ValueError(f"{len(self.parameters)} parameters and {len(into)} tensors to add to")
        left = self._left(self._unread())
        for index, grad in left:
            self._check_target(index, grad, into[index])
        targets = [torch.empty(0) if target is None else target for target in into]
        found = self._native.add_to(targets, first=first, measure=measure)
        with torch.no_grad():
            for index, grad in left:
                local = torch_ops.local(targets[index])
                local.copy_(grad) if first else local.add_(grad)
        if not isinstance(found, _core.GradMeasure):
            return None
        there = sum(target is not None for target in into)
        if found.tensors < there or not math.isfinite(found.sum_squares):
            return holding(into, self._names).measure()
        return Measure(found.sum_squares, there)

    def _check_target(self, index: int, grad: torch.Tensor, target: torch.Tensor | None) -> None:
        local = None if target is None else torch_ops.local(target)
        if local is None or local.shape != grad.shape or local.device != grad.device:
            found = "None" if local is None else f"{list(local.shape)} on {local.device}"
            raise ValueError(
                f"the gradient of {self.name(index)} is {list(grad.shape)} on {grad.device}, "
                f"and what it is to be added to is {found}"
            )

    def bad(self) -> tuple[int, int, str | None]:
        """Counts inf and nan elements in all gradients, and names the first parameter that has
        one. Waits for devices."""
        torch = bridge.connect().torch
        found = self._native.measure()
        infs, nans = found.infs, found.nans
        first = len(self.parameters) if found.first_bad < 0 else found.first_bad
        with torch.no_grad():
            for index, grad in self._left(found.left):
                more = torch_ops.count_bad(torch, grad)
                first = min(first, index) if any(more) else first
                infs, nans = infs + more[0], nans + more[1]
        return infs, nans, self.name(first) if infs + nans else None

    def _unread(self) -> tuple[int, ...]:
        """The parameters whose gradients are not for the native passes: by 1 they only look."""
        return self._native.multiply(1.0)

    def _left(self, indices: Iterable[int]) -> Left:
        """The gradients that are not read natively, of a DTensor the shard that is here."""
        left = []
        for index in indices:
            if (grad := self.parameters[index].grad) is None:
                continue
            if _is_sparse(grad):
                raise TypeError(
                    f"the gradient of {self.name(index)} is sparse; use a layer with sparse=False, "
                    "such as torch.nn.Embedding(..., sparse=False)"
                )
            left.append((index, torch_ops.local(grad)))
        return left


def _is_sparse(grad: torch.Tensor) -> bool:
    return bool(grad.layout != bridge.connect().torch.strided)


def _by_device(left: Left) -> dict[torch.device, list[torch.Tensor]]:
    groups: dict[torch.device, list[torch.Tensor]] = {}
    for _, grad in left:
        if grad.device.type != "cpu":
            groups.setdefault(grad.device, []).append(grad)
    return groups


def holding(grads: Sequence[torch.Tensor | None], names: Sequence[str] | None = None) -> Gradients:
    """Gradients that are in a list and not at parameters: each is held by a tensor of its shape
    that shares its memory."""
    torch = bridge.connect().torch
    holders = []
    for grad in grads:
        holder = torch.empty(0) if grad is None else grad.detach()
        holder.grad = grad
        holders.append(holder)
    return Gradients(holders, names)
