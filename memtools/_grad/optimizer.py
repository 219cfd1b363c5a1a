"""The optimizer at the end of a window: its owner, its state, and its step.

Ownership    the accumulator that the optimizer belongs to, and who may step it
make_state   before the first step, makes all of the optimizer's state or none of it
Finish       applies one factor, 1 / (constant * weight) * clip coefficient, and steps. The factor
             is not applied if it is 1, handed to a fused optimizer as `grad_scale`, which divides
             while it reads the gradients, and multiplied into the gradients otherwise.
"""

from __future__ import annotations

import inspect
import math
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from memtools._base import torch as bridge
from memtools._base.notice import notice
from memtools._base.oom import shortage
from memtools._grad.backoff import Failed
from memtools._grad.gradients import Gradients
from memtools._grad.report import Retry

if TYPE_CHECKING:
    import torch

    from memtools._grad.settings import Settings
    from memtools._grad.window import Window, WindowRunner


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


# --- the step ---

_ONE: Final = struct.pack("f", 1.0)
#: The reciprocal of a factor between these is a normal float32.
_FOLDABLE: Final = (1e-37, 1e37)


class Finish:
    """Averages and clips gradients, and steps the optimizer.

    Args:
        optimizer: the optimizer to step.
        settings: has `max_norm` and `clip`.
    """

    __slots__ = ("_clip", "_max_norm", "_optimizer", "_torch")

    def __init__(self, optimizer: Any, settings: Settings) -> None:
        self._optimizer, self._clip = optimizer, settings.clip
        self._torch = bridge.connect().torch
        self._max_norm = settings.max_norm

    def step(
        self, gradients: Gradients, sum_squares: float, average: float
    ) -> tuple[float, float, str]:
        """Apply one factor to the gradients and step the optimizer.

        Args:
            gradients: the gradients of the optimizer's parameters.
            sum_squares: the sum of their squares.
            average: the factor that makes them the average, before clipping.

        Returns the norm to report, the clip coefficient, and how the factor was applied: "nothing",
        "folded" or "multiplied".
        """
        norm, coefficient = math.sqrt(sum_squares) * average, 1.0
        if self._max_norm is not None:
            coefficient = min(1.0, self._max_norm / (norm + 1e-6))  # as in torch
        factor = average * coefficient
        changes = struct.pack("f", factor) != _ONE  # as a float32
        # fp32 sums of 16-bit gradients are averaged before they are rounded: none overflows then.
        wide = [] if takes_fp32(self._optimizer) else gradients.wide()
        if changes and not wide and self._folds(factor):
            self._step_folded(factor)
            return norm, coefficient, "folded"
        applied = "nothing"
        if changes:
            gradients.multiply(factor)
            applied = "multiplied"
        with _rounded(wide):
            if self._clip is not None:
                returned = self._clip(gradients.parameters)
                norm = norm if returned is None else float(returned)
            self._optimizer.step()
        return norm, coefficient, applied

    def _folds(self, factor: float) -> bool:
        """Whether the optimizer takes a divisor, and no other code sees the gradients."""
        optimizer = self._optimizer
        if self._clip is not None:
            return False
        if not _FOLDABLE[0] < factor < _FOLDABLE[1]:
            return False
        # A wrapper, as trainers use, has the attributes of the optimizer that steps.
        if hasattr(getattr(optimizer, "optimizer", None), "param_groups"):
            return False
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        if not all(group.get("fused") is True for group in optimizer.param_groups):
            return False
        # Hooks before the step may read the gradients.
        module = sys.modules[self._torch.optim.Optimizer.__module__]
        if getattr(module, "_global_optimizer_pre_hooks", None):
            return False
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or {}
        return all(isinstance(hook, Ownership) for hook in hooks.values())

    def _step_folded(self, factor: float) -> None:
        """Step with the divisor as an attribute of the optimizer, as GradScaler does."""
        torch, optimizer = self._torch, self._optimizer
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        optimizer.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale


# --- gradients in fp32 of 16-bit parameters ---

#: Optimizers of torch that step a 16-bit parameter by an fp32 gradient, and whose state does not
#: take the dtype of the gradient, which a saved state would lose. The momentum of SGD takes it, and
#: a centered RMSprop refuses two dtypes.
_TAKE_FP32: Final = ("SGD", "Adagrad", "RMSprop", "Adadelta")


def takes_fp32(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer steps 16-bit parameters by fp32 gradients."""
    kind, groups = type(optimizer), optimizer.param_groups
    return (
        kind.__name__ in _TAKE_FP32
        and kind is getattr(bridge.connect().torch.optim, kind.__name__)
        and not any(group.get("fused") or group.get("centered") for group in groups)
        and not (kind.__name__ == "SGD" and any(group["momentum"] for group in groups))
    )


@contextmanager
def _rounded(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Round gradients to the dtype of their parameters, and free the wide ones. At the end the
    parameters have no gradients."""
    before = [p.grad_dtype for p in parameters]
    try:
        for p in parameters:
            assert p.grad is not None
            rounded = p.grad.to(p.dtype)
            p.grad, p.grad_dtype = None, p.dtype
            p.grad = rounded
        yield
    finally:
        for p, dtype in zip(parameters, before, strict=True):
            p.grad, p.grad_dtype = None, dtype


@contextmanager
def _stand_ins(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace gradients by zeros in the dtype of the parameters, which take the memory of one
    element."""
    before = [(p, p.grad, p.grad_dtype) for p in parameters]
    try:
        for p in parameters:
            p.grad, p.grad_dtype = None, p.dtype
            p.grad = p.new_zeros(1).expand(p.shape)
        yield
    finally:
        for p, grad, dtype in before:
            p.grad, p.grad_dtype = None, dtype
            p.grad = grad


# --- the owner ---
#
#   optimizer ──► Ownership, a hook before optimizer.step() ──(weakly)──► WindowRunner
#                     └ ended by close(), by a newer accumulator, or with the accumulator
#
# In the middle of a window the gradients are sums that are not averaged yet. If the program called
# optimizer.step(), it would train on them, so the hook refuses that call.

#: The attribute of an optimizer with its Ownership.
_OWNER: Final = "_memtools_accumulator"


class Ownership:
    """Binds an optimizer to the newest accumulator of it. The optimizer calls it before each step.

    Attributes:
        window: the current window, which is needed after the accumulator is gone.
        saved: the window and its count at the last state_dict() with gradients.
        ended: why the optimizer no longer belongs to the accumulator; "" while it does.
        stepping: whether the accumulator itself is stepping the optimizer.
    """

    window: Window

    def __init__(self, runner: WindowRunner) -> None:
        self._runner = weakref.ref(runner)
        self._handle: Any = None
        self._finalizer: Any = None
        self._process = os.getpid()
        self.saved: tuple[Window | None, int] = (None, 0)
        self.ended = ""
        self.stepping = False

    def take(self, optimizer: Any) -> None:
        """Take the optimizer, and close the accumulator that had it."""
        # Trainers wrap optimizers: use the innermost one.
        while hasattr(inner := getattr(optimizer, "optimizer", None), "param_groups"):
            optimizer = inner
        before: Ownership | None = getattr(optimizer, _OWNER, None)
        runner = self._runner()
        assert runner is not None
        if before is not None and (other := before._runner()) is not None:
            other.release("a newer GradAccumulator has its optimizer")
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self._handle = optimizer.register_step_pre_hook(self)
        setattr(optimizer, _OWNER, self)
        self._finalizer = weakref.finalize(runner, self.end, "it is gone")

    def end(self, why: str) -> None:
        """Release the optimizer. Warns if an unfinished window gets no update."""
        if self.ended:
            return
        self.ended = why
        if self._handle is not None:
            self._handle.remove()
        if self._finalizer is not None:
            self._finalizer.detach()  # A finalizer would swallow a Ctrl-C.
        if os.getpid() == self._process:  # A forked child that ends does not warn.
            self._warn()

    def _warn(self) -> None:
        window = self.window
        if window.count == 0 or window.torn or self.saved == (window, window.count):
            return
        # If the program ends by an exception, its traceback is enough.
        if hasattr(sys, "last_value") and not threading.main_thread().is_alive():
            return
        many = f"{window.count:,} micro-batch{'es' * (window.count != 1)}"
        units = f" of weight {window.weight:,.6g}" if window.on_device is None else ""
        notice(
            f"{many}{units} got no update, as their GradAccumulator ended in the middle of a "
            f"window ({self.ended}): call acc.flush() after the loop, or acc.reset() to drop them"
        )

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError if the program steps in the middle of a window."""
        if self.ended or self.stepping:
            return
        runner = self._runner()
        if runner is None or runner.window.empty:
            return
        raise RuntimeError(
            f"optimizer.step() after {runner.window.count} of {runner.steps} micro-batches of a "
            "window, whose gradients are not averaged yet: leave it out, as GradAccumulator steps "
            "the optimizer at the end of a window; flush() ends this one early, reset() drops it"
        )


# --- its state ---
#
# Most optimizers of torch make their state in the first step(), group by group, between updates. An
# out-of-memory error there leaves some parameters changed and a part of the state missing, so that
# the next step raises KeyError. Here the state is made before any parameter changes:
#
#   no state yet ─► make it ─► room for the step's own tensors? ─► step()
#                     │ out of memory            │
#                     ▼                          ▼
#           drop it, give idle memory back, try once more; then raise the error

#: These make no state in `_init_group`: SGD makes its momentum while it steps.
_NONE_IN_INIT_GROUP: Final = ("SGD", "SparseAdam")
#: The number of temporary tensors of a step, as measured: of the size of the largest parameter in a
#: step that goes from one to the next; for each parameter of a group with `foreach`; and how many
#: more there with weight decay or `maximize`. A fused step needs none.
_OF_A_STEP: Final = {
    "SGD": (0, 0, 1),
    "ASGD": (0, 1, 0),
    "Adamax": (1, 1, 0),
    "RMSprop": (2, 1, 1),
    "RAdam": (2, 1, 0),
    "Adafactor": (2, 1, 0),
    "NAdam": (3, 1, 1),
    "Adadelta": (3, 2, 1),
    "Muon": (4, 0, 0),
}
_OF_ANOTHER_STEP: Final = (3, 1, 0)
#: Their weight decay does not change the gradient.
_DECOUPLED: Final = ("Adafactor", "Muon")


def make_state(optimizer: Any, window: int, micro_batches: int) -> list[Retry]:
    """Make the state that an optimizer of torch would make in its next step, for parameters that
    have a gradient and no state.

    Args:
        optimizer: an optimizer of any class. Only for those of torch something is done.
        window, micro_batches: the place for the line of a retry.

    Returns one retry if memory ran out, and was enough after idle memory was given back; else none.

    Raises the second out-of-memory error, with state and parameters unchanged.
    """
    groups, state = optimizer.param_groups, getattr(optimizer, "state", {})  # A wrapper has none.
    if len(state) >= sum(map(len, map(itemgetter("params"), groups))):
        return []
    kind = type(optimizer)
    if kind.__name__ == "SGD" and not any(map(itemgetter("momentum"), groups)):
        return []
    if kind is not getattr(bridge.connect().torch.optim, kind.__name__, None):
        return []
    if kind.__name__ != "SGD" and (
        kind.__name__ in _NONE_IN_INIT_GROUP or not hasattr(kind, "_init_group")
    ):
        return []
    new = _without_state(optimizer)
    if not new:
        return []
    wide = [p for p in new if p.grad is not None and p.grad.dtype is not p.dtype]
    with _stand_ins([] if takes_fp32(optimizer) else wide):
        return _made(optimizer, new, window, micro_batches)


def _made(optimizer: Any, new: list[torch.Tensor], window: int, micro_batches: int) -> list[Retry]:
    began = time.perf_counter()
    failed = _try(optimizer, new)
    if failed is None:
        return []
    failed.clear()
    changed = failed.give_back(thorough=True)
    retry = Retry(
        window=window,
        micro_batch=micro_batches,
        rows=None,
        phase="optimizer",
        error=failed.shortage.line,
        asked=failed.shortage.asked,
        restored="its state",
        next_rows=0,
        probing=False,
        ms=1e3 * (time.perf_counter() - began),
        changed=changed,
    )
    del failed
    again = _try(optimizer, new)
    if again is None:
        return [retry]
    assert again.error is not None
    again.error.add_note(
        "memtools: the optimizer's state did not fit before its first step, even after idle memory "
        f"was given back; no parameter moved and no state was made; {again.remedy()}"
    )
    raise again.error


def _without_state(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters whose state the next step makes."""
    state, groups = optimizer.state, optimizer.param_groups
    if type(optimizer).__name__ == "SGD":
        groups = [group for group in groups if group["momentum"]]
    return [p for group in groups for p in group["params"] if p.grad is not None and p not in state]


def _try(optimizer: Any, new: list[torch.Tensor]) -> Failed | None:
    """Make the state. Returns None, or the failure, after which there is no new state."""
    try:
        _make(optimizer, new)
    except BaseException as error:
        for p in new:
            optimizer.state.pop(p, None)
        if not isinstance(error, Exception) or (found := shortage(error)) is None:
            raise
        return Failed(error, found, touched=False)
    return None


def _make(optimizer: Any, new: list[torch.Tensor]) -> None:
    torch = bridge.connect().torch
    if type(optimizer).__name__ in _NONE_IN_INIT_GROUP:
        kept = [torch.empty_like(p) for p in new]  # as large as its momentum
    else:
        kept = []
        lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        for group in optimizer.param_groups:
            optimizer._init_group(group, *([] for _ in range(lists)))
    present = set(map(id, new))
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if id(p) in present]
        if parameters:
            _try_room(type(optimizer).__name__, group, parameters)
    del kept


def _try_room(kind: str, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
    """Allocate the temporary tensors of a step, and free them."""
    torch = bridge.connect().torch
    if group.get("fused"):
        return
    single, foreach, more = _OF_A_STEP.get(kind, _OF_ANOTHER_STEP)
    decoupled = kind in _DECOUPLED or group.get("decoupled_weight_decay")
    changes = bool(group.get("maximize") or (group.get("weight_decay") and not decoupled))
    if _takes_foreach(group):
        like = parameters * (foreach + more * changes)
    else:
        largest = max(parameters, key=lambda p: p.numel())
        like = [largest] * (single + changes + bool(group.get("nesterov") and kind == "SGD"))
    room = [torch.empty_like(p) for p in like]  # all at once
    del room


def _takes_foreach(group: dict[str, Any]) -> bool:
    """Whether torch steps all parameters of a group at once: on most devices, and on request."""
    asked = group.get("foreach", False)
    if asked is not None:
        return bool(asked)
    module = sys.modules[bridge.connect().torch.optim.Optimizer.__module__]
    default = getattr(module, "_default_to_fused_or_foreach", None)
    return default is not None and bool(default(group["params"], group.get("differentiable"))[1])
