"""fp32 gradients of bf16 and fp16 parameters, added up over a window and rounded once.

    backward of a micro-batch          end of the window
    p.grad (bf16) ──► fp32 sum         measure, multiply   ──► p.grad, rounded once ──► optimizer
       freed at once, by a hook        (in fp32)                 or fp32 where it takes that

Each micro-batch that is added in bf16 rounds the sum to 8 bits: small gradients vanish beside a
large sum. The fp32 sum costs 4 bytes a parameter during the window, less the 2 that p.grad took.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memtools import _core
from memtools._base import torch as bridge
from memtools.grad.gradients import Gradients, Measure, exact_sum, sparse_error

if TYPE_CHECKING:
    import torch

# They step a 16-bit parameter by an fp32 gradient, and none of their state takes the gradient's
# dtype, which a saved state would lose. SGD's momentum does, and a centered RMSprop mixes none.
_TAKES_FP32 = {"SGD", "Adagrad", "RMSprop", "Adadelta"}


class MainGrads(Gradients):
    """Gradients of which those of 16-bit parameters are fp32 sums, kept here and not at them.

    All of Gradients works on the sums. With `hooks`, each gradient is added and freed as soon as
    backward has made it; otherwise absorb() does that for all after a backward, so that a failed
    one can still be dropped. Other parameters keep the gradients that torch gives them.
    """

    sums_apart = True

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        names: Sequence[str] | None = None,
        hooks: bool = True,
    ) -> None:
        torch = bridge.connect().torch
        trained = list(parameters)
        self._sums = {
            i: _Sum(torch, parameter)
            for i, parameter in enumerate(trained)
            if parameter.dtype in (torch.bfloat16, torch.float16)
        }
        held = {i: found.holder for i, found in self._sums.items()}
        super().__init__((held.get(i, p) for i, p in enumerate(trained)), names)
        self.trained, self.watched = trained, _core.GradSet([*trained, *held.values()])
        self._measuring = False
        self._given: list[int] = []  # parameters that have an fp32 gradient now
        self._handles: list[Any] = []
        self._finalizer: Any = None
        if hooks:
            self.hook()

    def drop(self) -> None:
        super().drop()
        self.clear()

    def hook(self) -> None:
        """From now on each gradient is added as soon as backward has made it."""
        # Weakly: a parameter's hook would keep all parameters alive, where no gc looks.
        this = weakref.ref(self)
        for i in self._sums:
            hook = functools.partial(_hook, this, i)
            add = self.trained[i].register_post_accumulate_grad_hook
            self._handles.append(add(hook))  # type: ignore[no-untyped-call]
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self._finalizer.atexit = False

    def measure_next(self) -> None:
        """To be called before the last backward of a window: its sums are measured as they are
        added, in the same pass, and measure() then reads only what that backward left."""
        self._measuring = True

    def absorb(self) -> None:
        """Adds the gradients that are at the 16-bit parameters to their sums, and frees them."""
        for i in self._sums:
            self._absorb(i)

    def _absorb(self, index: int) -> None:
        parameter = self.trained[index]
        if parameter.grad is not None:
            self._sums[index].add(parameter, self._measuring)
            parameter.grad = None

    def tensors(self) -> list[torch.Tensor]:
        self.forget_measures()  # whoever asks for them may change them
        return super().tensors()

    def multiply(self, factor: float | torch.Tensor, limit: float = math.inf) -> None:
        self.forget_measures()
        super().multiply(factor, limit)

    def forget_measures(self) -> None:
        for found in self._sums.values():
            found.measured = None

    def measure(self) -> Measure:
        known = {i: found.measured for i, found in self._sums.items() if found.measured is not None}
        if not known:
            return super().measure()
        rest = [i for i in range(len(self.parameters)) if i not in known]
        names = None if self._names is None else [self._names[i] for i in rest]
        part = Gradients((self.parameters[i] for i in rest), names).measure()
        squares = exact_sum([found.sum_squares for found in known.values()])
        count = part.count + len(known)
        fine = not any(found.infs or found.nans for found in known.values())
        if isinstance(part.finite, bool):
            fine = fine and part.finite
            bad = (0, 0, None) if fine else self.bad()
            return Measure(part.sum_squares + squares, count, fine, bad)
        finite = part.finite if fine else part.finite.new_zeros(())
        return Measure(part.sum_squares + squares, count, finite, _uncounted=self)

    def give(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the gradients where the optimizer looks for them, and frees the sums as it goes.

        torch's Adagrad, RMSprop that is not centered, Adadelta and SGD without momentum, unless
        fused, get them in fp32. All other optimizers need the parameter's own dtype: rounded once,
        to nearest.
        """
        torch = bridge.connect().torch
        as_fp32 = takes_fp32(optimizer)
        for i, found in self._sums.items():
            parameter = self.trained[i]
            if (grad := found.take()) is None:
                continue
            parameter.grad = None
            if as_fp32:
                parameter.grad_dtype = torch.float32
                self._given.append(i)
            with torch.no_grad():
                parameter.grad = grad if as_fp32 else grad.to(parameter.dtype)

    @contextmanager
    def stand_ins(self, but: Container[torch.Tensor]) -> Iterator[None]:
        """Lets the optimizer see which parameters will be given a gradient: those with a sum, but
        for those in `but`, have a zero of one element's memory as their gradient."""
        torch, lent = bridge.connect().torch, []
        try:
            for i, found in self._sums.items():
                p = self.trained[i]
                if found.holder.grad is not None and p.grad is None and p not in but:
                    lent.append(p)
                    p.grad = torch.zeros(1, dtype=p.dtype, device=p.device).expand(p.shape)
            yield
        finally:
            for p in lent:
                p.grad = None

    def clear(self) -> None:
        """Drops sums and given gradients: after a step, a skipped one, or a window given up."""
        for found in self._sums.values():
            found.take()
        for i in self._given:
            parameter = self.trained[i]
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype
        self._given.clear()
        self._measuring = False

    def unhook(self) -> None:
        """From now on absorb() adds them."""
        _remove(self._handles)
        if self._finalizer is not None:
            self._finalizer.detach()

    def close(self) -> None:
        """Removes the hooks and drops the sums. May be called again."""
        self.clear()
        self.unhook()


class _Sum:
    """One parameter's fp32 sum. The holder is a tensor that has it as its .grad: so Gradients reads
    it as it reads any other. It has the parameter's shape and the memory of one element."""

    __slots__ = ("_added", "holder", "measured")

    def __init__(self, torch: Any, parameter: torch.Tensor) -> None:
        one = torch.empty(1, dtype=torch.float32, device=parameter.device)
        self.holder: torch.Tensor = one.expand(parameter.shape)
        self.measured: _core.GradMeasure | None = None
        self._added = _core.GradSet([parameter])

    def add(self, parameter: torch.Tensor, measure: bool) -> None:
        """Add the parameter's gradient; `measure` says whether the sum is measured meanwhile, which
        is done where both are dense and on the CPU."""
        torch = bridge.connect().torch
        grad, total = parameter.grad, self.holder.grad
        assert grad is not None
        if grad.layout is not torch.strided:
            raise sparse_error(f"a parameter of shape {list(parameter.shape)}")
        first, found = total is None, None
        if total is None:
            total = torch.empty_like(grad, dtype=torch.float32, requires_grad=False)
        if total.stride() == grad.stride():
            found = self._added.add_to(total, first=first, measure=measure)
        if not found:
            with torch.no_grad():
                total.copy_(grad) if first else total.add_(grad)
        self.measured = found if isinstance(found, _core.GradMeasure) else None
        self.holder.grad = total

    def take(self) -> torch.Tensor | None:
        grad: torch.Tensor | None = self.holder.grad
        self.holder.grad = self.measured = None
        return grad


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _hook(main: weakref.ref[MainGrads], index: int, parameter: torch.Tensor) -> None:
    if (found := main()) is not None:
        found._absorb(index)


def takes_fp32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer steps 16-bit parameters by fp32 gradients."""
    torch = bridge.connect().torch
    kind, groups = type(optimizer), optimizer.param_groups
    return (
        kind.__name__ in _TAKES_FP32
        and kind is getattr(torch.optim, kind.__name__)
        and hasattr(torch.Tensor, "grad_dtype")
        and not any(group.get("fused") or group.get("centered") for group in groups)
        and not (kind.__name__ == "SGD" and any(group["momentum"] for group in groups))
    )
