"""An optimizer's state is made before its first step: all of it, or nothing.

Most of torch's optimizers make their state in the first step(), group by group, between updates. An
out-of-memory error there leaves parameters of which some have moved, and state of which a part is
missing, so that the next step raises KeyError. Here the state is made before any parameter moves:

    no state yet ─► make it ─► room for the step's own tensors? ─► step()
                      │ out of memory            │
                      ▼                          ▼
            drop what was made, give idle memory back, once more; then the error
"""

from __future__ import annotations

import inspect
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from memtools._base import torch as bridge
from memtools._base.oom import is_out_of_memory

if TYPE_CHECKING:
    import torch

    from memtools.grad.main_grads import MainGrads
    from memtools.grad.retry import Retry

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


def make_state(
    optimizer: Any, window: int, micro_batches: int, main: MainGrads | None = None
) -> list[Retry]:
    """Make the state that an optimizer of torch would make in its next step, for parameters that
    have a gradient and no state.

    Args:
        optimizer: of any class; nothing is done for those that are not torch's own.
        window, micro_batches: what a retry's line says of the place.
        main: what keeps gradients of its parameters elsewhere until the step.

    Returns one retry where memory ran out and sufficed after idle memory was given back, else none.

    Raises the second out-of-memory error; then state and parameters are as they were.
    """
    if not _may_lack_state(optimizer):
        return []
    with nullcontext() if main is None else main.stand_ins(optimizer.state):
        new = _without_state(optimizer)
        return _made(optimizer, new, window, micro_batches) if new else []


def _made(optimizer: Any, new: list[torch.Tensor], window: int, micro_batches: int) -> list[Retry]:
    began = time.perf_counter()
    failed = _try(optimizer, new)
    if failed is None:
        return []
    failed.clear()
    changed = failed.give_back(thorough=True)
    retry = _retry(failed, window, micro_batches, changed, 1e3 * (time.perf_counter() - began))
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


def _may_lack_state(optimizer: Any) -> bool:
    """Costs a length where all parameters have theirs."""
    groups, state = optimizer.param_groups, getattr(optimizer, "state", {})  # a wrapper has none
    if len(state) >= sum(len(group["params"]) for group in groups):
        return False
    kind = type(optimizer)
    if kind is not getattr(bridge.connect().torch.optim, kind.__name__, None):
        return False
    if kind.__name__ == "SGD":
        return any(group["momentum"] for group in groups)
    return kind.__name__ not in _NONE_IN_INIT_GROUP and hasattr(kind, "_init_group")


def _without_state(optimizer: Any) -> list[torch.Tensor]:
    """Parameters whose state the next step makes."""
    state, groups = optimizer.state, optimizer.param_groups
    if type(optimizer).__name__ == "SGD":
        groups = [group for group in groups if group["momentum"]]
    return [p for group in groups for p in group["params"] if p.grad is not None and p not in state]


def _try(optimizer: Any, new: list[torch.Tensor]) -> Any:
    """Makes it; what failed, with nothing made."""
    from memtools.grad.retry import Failed

    try:
        _make(optimizer, new)
    except BaseException as error:
        for p in new:
            optimizer.state.pop(p, None)
        if not (isinstance(error, Exception) and is_out_of_memory(error)):
            raise
        return Failed(error, False)
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


def _retry(failed: Any, window: int, index: int, changed: str, ms: float) -> Retry:
    from memtools.grad.retry import Retry

    return Retry(
        window=window,
        micro_batch=index,
        rows=None,
        phase="optimizer",
        error=failed.line,
        asked=failed.asked,
        restored="its state",
        next_rows=0,
        probing=False,
        ms=ms,
        changed=changed,
    )
