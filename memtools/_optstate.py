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
import time
from typing import TYPE_CHECKING, Any, Final

from memtools import _bridge
from memtools._oomforms import is_out_of_memory

if TYPE_CHECKING:
    import torch

    from memtools._retry import Retry

#: These make no state in `_init_group`: SGD makes its momentum while it steps.
_NONE_IN_INIT_GROUP: Final = ("SGD", "SparseAdam")
#: Tensors as large as the largest parameter that a step makes for itself, as Adam does.
_OF_A_STEP: Final = 2


def make_state(optimizer: Any, window: int, micro_batches: int) -> list[Retry]:
    """Make the state that an optimizer of torch would make in its next step, for parameters that
    have a gradient and no state.

    Args:
        optimizer: of any class; nothing is done for those that are not torch's own.
        window, micro_batches: what a retry's line says of the place.

    Returns one retry where memory ran out and sufficed after idle memory was given back, else none.

    Raises the second out-of-memory error; then state and parameters are as they were.
    """
    new = _without_state(optimizer)
    if not new:
        return []
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


def _without_state(optimizer: Any) -> list[torch.Tensor]:
    """Parameters whose state the next step makes. Costs a length where all have one."""
    groups, state = optimizer.param_groups, getattr(optimizer, "state", {})  # a wrapper has none
    if len(state) >= sum(len(group["params"]) for group in groups):
        return []
    kind = type(optimizer)
    if kind is not getattr(_bridge.connect().torch.optim, kind.__name__, None):
        return []
    if kind.__name__ == "SGD":
        groups = [group for group in groups if group["momentum"]]
    elif kind.__name__ in _NONE_IN_INIT_GROUP or not hasattr(kind, "_init_group"):
        return []
    return [p for group in groups for p in group["params"] if p.grad is not None and p not in state]


def _try(optimizer: Any, new: list[torch.Tensor]) -> Any:
    """Makes it; what failed, with nothing made."""
    from memtools._retry import Failed

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
    torch = _bridge.connect().torch
    if type(optimizer).__name__ in _NONE_IN_INIT_GROUP:
        kept = [torch.empty_like(p) for p in new]  # as much as its momentum will take
    else:
        kept = []
        lists = len(inspect.signature(optimizer._init_group).parameters) - 1
        for group in optimizer.param_groups:
            optimizer._init_group(group, *([] for _ in range(lists)))
    largest = max(new, key=lambda p: p.numel())
    kept += [torch.empty_like(largest) for _ in range(_OF_A_STEP)]


def _retry(failed: Any, window: int, index: int, changed: str, ms: float) -> Retry:
    from memtools._retry import Retry

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
