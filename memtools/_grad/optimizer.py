"""What a window's end does with the optimizer: its state, one factor, its step; and whose it is.

Ownership    which accumulator the optimizer belongs to, and who may step it
make_state   before the first step: all of an optimizer's state, or nothing
Finish       one factor, 1 / (constant * weight) * clip coefficient, then the step; the factor is
                 not applied                      where it is 1
                 folded into `grad_scale`         of a fused optimizer, which divides as it reads
                 multiplied into the gradients    else
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
    """The parameters of all groups, in order."""
    return list(chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)))


# --- the step ---

_ONE: Final = struct.pack("f", 1.0)
_FOLDABLE: Final = (1e-37, 1e37)  # factors whose reciprocal is a normal float32


class Finish:
    """How one optimizer's gradients are averaged, clipped and stepped with.

    Args:
        optimizer: steps.
        settings: how gradients are clipped, if they are.
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
            sum_squares: of the gradients as they are.
            average: what they are multiplied with to be the average, before clipping.

        Returns the norm to report, the clip coefficient, and how the factor was applied: "nothing",
        "folded" or "multiplied".
        """
        norm, coefficient = math.sqrt(sum_squares) * average, 1.0
        if self._max_norm is not None:
            coefficient = min(1.0, self._max_norm / (norm + 1e-6))  # as torch has it
        factor = average * coefficient
        changes = struct.pack("f", factor) != _ONE  # a multiplication in float32 does something
        # Sums in fp32 are rounded last, so that none overflows: they are not folded.
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
        """Whether nobody but the optimizer sees the gradients, and it takes a divisor."""
        optimizer = self._optimizer
        if self._clip is not None:
            return False
        if not _FOLDABLE[0] < factor < _FOLDABLE[1]:
            return False
        # Not one that wraps another, as trainers do: it has the attributes of the one that steps.
        if hasattr(getattr(optimizer, "optimizer", None), "param_groups"):
            return False
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        if not all(group.get("fused") is True for group in optimizer.param_groups):
            return False
        # Hooks before the step may look at the gradients.
        module = sys.modules[self._torch.optim.Optimizer.__module__]
        if getattr(module, "_global_optimizer_pre_hooks", None):
            return False
        hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None) or {}
        return all(isinstance(hook, Ownership) for hook in hooks.values())

    def _step_folded(self, factor: float) -> None:
        """As GradScaler hands it over: attributes that are there during the step."""
        torch, optimizer = self._torch, self._optimizer
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        optimizer.grad_scale = torch.full((), 1.0 / factor, dtype=torch.float32, device=device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale


# --- gradients in fp32 of 16-bit parameters ---

#: torch's that step a 16-bit parameter by an fp32 gradient, and none of whose state takes the
#: gradient's dtype, which a saved state would lose. SGD's momentum does, and a centered RMSprop
#: mixes none.
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
    """Round gradients to the dtype of their parameters, and free the wide ones; in the end there
    are none."""
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
    """Show the optimizer gradients in the dtype of their parameters: zeros, with the memory of one
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


# --- whose it is ---
#
#   optimizer ──► Ownership, a hook before optimizer.step() ──(weakly)──► WindowRunner
#                     └ ended by close(), by a newer accumulator, or with the accumulator
#
# In the middle of a window the gradients are sums that nobody has averaged yet. A step() of the
# program's own would train on them, so the hook refuses it; the accumulator's own step is let
# through.

_OWNER: Final = "_memtools_accumulator"  # on the optimizer


class Ownership:
    """What binds an optimizer to the newest accumulator that was made with it. Called before each
    step of the optimizer.

    Attributes:
        window: the accumulator's, to be looked at when the accumulator is gone.
        saved: a window and its count when a state_dict() took its gradients along.
        ended: why the optimizer is not the accumulator's any more; "" while it is.
        stepping: whether a step comes from the accumulator.
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
        """Take the optimizer; the accumulator that had it is closed."""
        # The optimizer inside of those that wrap it, as trainers do.
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
        """Free the optimizer. Gives notice where that leaves a window without its update."""
        if self.ended:
            return
        self.ended = why
        if self._handle is not None:
            self._handle.remove()
        if self._finalizer is not None:
            self._finalizer.detach()  # what runs there would swallow a Ctrl-C
        if os.getpid() == self._process:  # not in a forked child that ends
            self._give_notice()

    def _give_notice(self) -> None:
        window = self.window
        if window.count == 0 or window.torn or self.saved == (window, window.count):
            return
        # Functions of atexit run when the main thread is over.
        if hasattr(sys, "last_value") and not threading.main_thread().is_alive():
            return  # the program ends by an exception, which says enough
        many = f"{window.count:,} micro-batch{'es' * (window.count != 1)}"
        units = f" of weight {window.weight:,.6g}" if window.on_device is None else ""
        notice(
            f"{many}{units} came to no update, as their GradAccumulator ended in the middle of a "
            f"window ({self.ended}): call acc.flush() after the loop, or acc.reset() to drop them"
        )

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise RuntimeError where the program steps in the middle of a window."""
        if self.ended or self.stepping:
            return
        runner = self._runner()
        if runner is None or runner.window.empty:
            return
        raise RuntimeError(
            f"optimizer.step() after {runner.window.count} of {runner.steps} micro-batches of a "
            "window, whose gradients are not averaged yet: leave it out, as GradAccumulator steps "
            "the optimizer where a window ends; flush() ends this one early, reset() drops it"
        )


# --- its state ---
#
# Most of torch's optimizers make their state in the first step(), group by group, between updates.
# An out-of-memory error there leaves parameters of which some have moved, and state of which a part
# is missing, so that the next step raises KeyError. Here the state is made before any parameter
# moves:
#
#   no state yet ─► make it ─► room for the step's own tensors? ─► step()
#                     │ out of memory            │
#                     ▼                          ▼
#           drop what was made, give idle memory back, once more; then the error

#: These make no state in `_init_group`: SGD makes its momentum while it steps.
_NONE_IN_INIT_GROUP: Final = ("SGD", "SparseAdam")
#: Tensors that a step holds for itself at a time, measured: as large as the largest parameter where
#: it goes from one to the next; for each parameter of a group with `foreach`, and how many more
#: there with weight decay or `maximize`. A fused step needs none.
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
#: Their weight decay leaves the gradient as it is, as that of a group with the key does.
_DECOUPLED: Final = ("Adafactor", "Muon")


def make_state(optimizer: Any, window: int, micro_batches: int) -> list[Retry]:
    """Make the state that an optimizer of torch would make in its next step, for parameters that
    have a gradient and no state.

    Args:
        optimizer: of any class; nothing is done for those that are not torch's own.
        window, micro_batches: what a retry's line says of the place.

    Returns one retry where memory ran out and sufficed after idle memory was given back, else none.

    Raises the second out-of-memory error; then state and parameters are as they were.
    """
    groups, state = optimizer.param_groups, getattr(optimizer, "state", {})  # a wrapper has none
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
        "memtools: the optimizer's state did not fit before its first step, also after idle memory "
        f"was given back; no parameter moved and no state was made; {again.remedy()}"
    )
    raise again.error


def _without_state(optimizer: Any) -> list[torch.Tensor]:
    """Parameters whose state the next step makes."""
    state, groups = optimizer.state, optimizer.param_groups
    if type(optimizer).__name__ == "SGD":
        groups = [group for group in groups if group["momentum"]]
    return [p for group in groups for p in group["params"] if p.grad is not None and p not in state]


def _try(optimizer: Any, new: list[torch.Tensor]) -> Failed | None:
    """Makes it; what failed, with nothing made."""
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
        kept = [torch.empty_like(p) for p in new]  # as much as its momentum will take
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
    """Whether what a step holds for itself can be had, too."""
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
    room = [torch.empty_like(p) for p in like]  # all at a time
    del room


def _takes_foreach(group: dict[str, Any]) -> bool:
    """Whether torch steps all parameters of a group at once: on most devices, and where asked."""
    asked = group.get("foreach", False)
    if asked is not None:
        return bool(asked)
    module = sys.modules[bridge.connect().torch.optim.Optimizer.__module__]
    default = getattr(module, "_default_to_fused_or_foreach", None)
    return default is not None and bool(default(group["params"], group.get("differentiable"))[1])
