"""The processes that train one model together, for trainers whose batches run in parts.

    DistributedDataParallel   rank 0  |-- part --|-- part --|             no rank waits in a part;
                              rank 1  |-- part --|-- part --|-- part --|  gradients are summed at
                                                                          the end of an update
    fully_shard (FSDP2)       rank 0  |-- part --|-- part --|-- part --|  all ranks run each part
                              rank 1  |-- part --|-- part --|- filler -|  and each look together

A filler is a pass over a row whose loss counts 0 times. How ranks agree, and what they do after an
out-of-memory error of one, is in `memtools._grad.ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from memtools._base.torch import connect
from memtools._grad.ranks import Ranks, WrapperError, find_ranks
from memtools._grad.ranks_fsdp import PeerMemoryError, reshard
from memtools.integrations._rows import UncuttableError

if TYPE_CHECKING:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    torch = connect().torch
    TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

#: What ranks in step say to each other before a look, and after the last one.
_WHOLE, _CUT, _LOOKING = 0.0, 1.0, 2.0
_GATHERING: Final = ("gather", "gather_for_metrics", "reduce")


def ranks_of(model: Any, processes: int) -> tuple[Ranks, str]:
    """Return how the ranks of this model run a batch in parts, and why they cannot, as a clause: ""
    if they can. The first call for a model is a collective if there are several processes.

    Args:
        model: the model as the trainer calls it, in its wrapper.
        processes: those of the trainer, at least 1.
    """
    if processes == 1:
        return Ranks(), ""
    if any(kind.__name__ == "FSDPModule" for kind in _kinds(model)):
        reshard(model)
    try:
        ranks = find_ranks(model, [p for p in model.parameters() if p.requires_grad])
    except WrapperError as error:
        return Ranks(), error.fact
    if ranks.world != processes:
        return Ranks(), (
            f"it trains on {processes} processes, and the gradients of its model are reduced over "
            f"{ranks.world} of them by DistributedDataParallel or fully_shard"
        )
    if ranks.no_retry and not ranks.sharded:
        return Ranks(), ranks.no_retry
    ranks.attach()
    return ranks, ""


def held_back(batches: int) -> str:
    """Say how many batches ran whole that this process could have cut."""
    were = "1 batch" if batches == 1 else f"{batches:,} batches"
    return f"{were} ran whole, as another process could not cut its own, which had one row."


def is_sharded(model: Any) -> bool:
    """Whether each rank has parts of the parameters, so that a forward pass is a collective."""
    names = {kind.__name__ for kind in _kinds(model)}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def will_shard(trainer: Any) -> bool:
    """Whether a transformers.Trainer trains a model of which each process has a part. Its wrapper
    may be made in train() only."""
    at_load = getattr(trainer, "is_distributed_loading_by_transformers", False)
    return bool(at_load or getattr(trainer, "is_fsdp_enabled", False))


def _kinds(model: Any) -> set[type]:
    """The classes of the model's modules, and their bases."""
    return {kind for module in model.modules() for kind in type(module).__mro__}


class Looks:
    """The looks at the losses of a few rows, by which the ranks find how to cut their batches.

    Ranks in step look together: while one still looks, the others run the same forward pass with
    rows of their own. Other ranks look alone, and a loss that waits for other ranks is not cut.

    Args:
        ranks: those of the model.
        loss_of: returns the loss of a few rows, and changes nothing.
    """

    def __init__(self, ranks: Ranks, loss_of: Callable[[Any], float]) -> None:
        self._ranks, self._loss_of = ranks, loss_of

    def look(self, rows: Any) -> float:
        """Return the loss of a few rows.

        Raises what their forward pass raises; UncuttableError if it calls a collective in a model
        that no other rank runs at the same time.
        """
        if not self._ranks.in_step:
            if self._ranks.world == 1:
                return self._loss_of(rows)
            with self._ranks.forward(False), _Alone():  # type: ignore[no-untyped-call]
                return self._loss_of(rows)
        while True:
            self._ranks.share(_LOOKING)
            loss, error = self._together(rows)
            if error is not None:
                raise error
            if loss is not None:
                return loss

    def agree(self, is_cut: bool, rows: Any) -> bool:
        """Return whether all ranks in step cut the batch whose looks have ended here. Until they
        have ended on every rank, it looks at `rows` with the others."""
        if not self._ranks.in_step:
            return is_cut
        while True:
            found = self._ranks.share(_CUT if is_cut else _WHOLE)
            if _LOOKING not in found:
                return _WHOLE not in found
            _, error = self._together(rows)
            if error is not None:
                raise error

    def _together(self, rows: Any) -> tuple[float | None, Exception | None]:
        """Return the loss of rows, or the error, of a forward pass that all ranks run; neither if
        another rank has left it."""
        loss, failed = None, None
        with self._ranks.forward(False):
            try:
                loss = self._loss_of(rows)
            except PeerMemoryError:
                pass
            except Exception as error:
                failed = error
        if self._ranks.agree("" if failed is None else str(failed) or type(failed).__name__):
            loss = None
        return loss, failed


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses collectives, for which the other ranks would not come."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "namespace", "") == "c10d":
            raise UncuttableError(
                f"its loss exchanges values with other processes ({function.overloadpacket})"
            )
        return function(*args, **(kwargs or {}))


@contextmanager
def gathering_nothing(accelerator: Any) -> Iterator[None]:
    """Values that are gathered or reduced over the processes are those of this one only. For the
    parts of a batch, of which the processes may have different numbers."""
    for name in _GATHERING:
        setattr(accelerator, name, lambda value, *args, **kwargs: value)
    try:
        yield
    finally:
        for name in _GATHERING:
            delattr(accelerator, name)
