"""Optimizer-in-backward: the last backward of a window steps each parameter and frees its gradient.

    last backward:   layer n ──► gradient ──► step ──► freed
                     layer n-1 ──► gradient ──► step ──► freed ...

With one micro-batch to a window the gradients are never all there at once. With more, the earlier
micro-batches have made all of them already: then only their time is shorter, and the peak is lower
by what the optimizer's own step would take for all parameters together.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from memtools._base import torch as bridge
from memtools.grad.gradients import Gradients

if TYPE_CHECKING:
    import torch


def refuse_settings(
    *, precision: str | None, max_norm: float | None, clip: object, main_grads: bool = False
) -> None:
    """Raises ValueError for what needs all gradients before the first parameter is stepped."""
    fault = None
    if precision == "fp16":
        fault = "precision='fp16' skips an update when any gradient is not finite; use 'bf16'"
    elif max_norm is not None:
        fault = "max_norm needs the norm of all gradients; clip by max_value"
    elif clip is not None:
        fault = "clip= gets all gradients; clip by max_value"
    elif main_grads:
        fault = "main_grads=True keeps them all until they are rounded; leave it out"
    if fault is not None:
        raise ValueError(
            f"in_backward=True steps each parameter as soon as it has its gradient, and {fault}"
        )


class InBackward:
    """Steps an optimizer's parameters one by one while the armed backward runs.

        inside.arm(factor)          # what each gradient is multiplied by
        loss.backward()             # of the window's last micro-batch
        inside.finish()             # steps the parameters that it did not reach

    The optimizer stays one: its state, its groups and schedulers are used as they are, and its
    step() is called once a window, by finish(), for hooks and schedulers that count it. It must
    treat each parameter by itself, as torch's own optimizers do, all but LBFGS. What a window's end
    usually decides cannot be decided: a parameter is stepped before the gradients of others are
    known, so that nothing is skipped for inf or nan.

    Raises TypeError for an optimizer that needs a closure, ValueError for a parameter that the
    optimizer does not have.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(optimizer, bridge.connect().torch.optim.LBFGS):
            raise TypeError("LBFGS steps all parameters together; it cannot run in backward")
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._one = [Gradients([p], None if names is None else [names[i]]) for i, p in self._all()]
        self._factor: float | torch.Tensor = 1.0
        self._limit = math.inf
        self._armed = False
        self._stepped: set[int] = set()
        self._had: set[int] = set()
        self._total = self._alive = self._most = 0
        self._groups = self._find_groups()
        # Weakly: a parameter's hook would keep all parameters alive, where no gc looks.
        this = weakref.ref(self)
        self._handles: list[Any] = []
        for i, parameter in self._all():
            if parameter.requires_grad:
                add: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(add(functools.partial(_hook, this, i)))
        self._finalizer = weakref.finalize(self, _remove, self._handles)
        self._finalizer.atexit = False

    def _all(self) -> Iterable[tuple[int, torch.Tensor]]:
        return enumerate(self._parameters)

    def _find_groups(self) -> list[dict[str, Any] | None]:
        """Of each parameter. Looked up for each window: load_state_dict() makes new groups."""
        found = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        groups = [found.get(id(p)) for p in self._parameters]
        for i, parameter in self._all():
            if parameter.requires_grad and groups[i] is None:
                raise ValueError(
                    f"the optimizer does not have {self._one[i].name(0)}; give it all parameters "
                    "that require gradients, or freeze that one"
                )
        return groups

    @property
    def armed(self) -> bool:
        return self._armed

    @property
    def stepped(self) -> int:
        """How many parameters the armed backward has stepped: once there is one, the window cannot
        be undone."""
        return len(self._stepped)

    def arm(self, factor: float | torch.Tensor = 1.0, limit: float = math.inf) -> None:
        """From now on each gradient is multiplied, clamped to +-limit, stepped and freed.

        Raises RuntimeError when it is armed already, ValueError for a limit that is not positive.
        """
        if self._armed:
            raise RuntimeError("the optimizer is armed already; finish() or disarm() comes first")
        if not limit > 0:
            raise ValueError(f"limit is a positive number, got {limit}")
        self._groups = self._find_groups()
        self._factor, self._limit = factor, limit
        self._stepped.clear()
        there = {i: p.grad.nbytes for i, p in self._all() if p.grad is not None}
        self._had = set(there)
        self._total = self._alive = self._most = sum(there.values())
        self._armed = True

    def _take(self, index: int) -> None:
        """What a hook does: the parameter's gradient is complete."""
        if not self._armed:
            return
        if index in self._stepped:
            raise RuntimeError(
                f"{self._one[index].name(0)} got a second gradient after it was stepped: one "
                "backward() ends a window, and reentrant checkpointing makes several; use "
                "checkpoint(..., use_reentrant=False)"
            )
        grad = self._parameters[index].grad
        assert grad is not None
        if index not in self._had:
            self._total += grad.nbytes
            self._alive += grad.nbytes
            self._most = max(self._most, self._alive)
        self._step(index)
        self._alive -= grad.nbytes

    def _step(self, index: int) -> None:
        parameter = self._parameters[index]
        self._one[index].multiply(self._factor, self._limit)
        group = self._groups[index]
        assert group is not None
        self._stepped.add(index)
        _view(self._optimizer, {**group, "params": [parameter]}).step()
        parameter.grad = None

    def finish(self) -> int:
        """Steps the parameters that only earlier micro-batches gave a gradient, and disarms.

        Returns the bytes of gradients that were never there together with the others: all gradients
        of the window less the most that was alive at once during its last backward.
        """
        if not self._armed:
            raise RuntimeError("finish() comes after arm() and backward()")
        for i, parameter in self._all():
            if parameter.grad is not None and parameter.requires_grad:
                self._step(i)
        self._armed = False
        self._optimizer.step()  # which has nothing left, for its hooks and its schedulers
        return self._total - self._most

    def disarm(self) -> None:
        """Lets the gradients be after a backward that failed; what was stepped stays stepped."""
        self._armed = False

    def close(self) -> None:
        """Removes the hooks. Again is no error."""
        self._armed = False
        _remove(self._handles)
        self._finalizer.detach()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _view(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """The same optimizer with one parameter: its class, settings and state, none of its hooks, nor
    the step() that a scheduler puts in its place to count. copy() would look at all the state."""
    view = object.__new__(type(optimizer))
    view.__dict__.update(optimizer.__dict__, param_groups=[group])
    view.__dict__.pop("step", None)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        view.__dict__[name] = OrderedDict()
    return view


def _hook(inside: weakref.ref[InBackward], index: int, parameter: torch.Tensor) -> None:
    if (found := inside()) is not None:
        found._take(index)
