"""The ranks of a training job, as gradient accumulation sees them.

        rank 0   |-- micro --|-- micro --|-- micro --|-- micro --|
        rank 1   |-- micro --|-- micro --|-- flush()             |
                     nobody waits for anybody here               | table, then gradients
                                                                 | one step, the same on all

Until the window's end a rank works alone: no collective lies in a forward or backward pass, so a
rank may run out of memory, halve and go on, or have fewer batches, without the others. Then the
ranks tell each other how many units they have, and whether one has failed; only if none has, the
gradients are summed. This file is the way of one process; `_gradranks_ddp` and
`_gradranks_fsdp` are the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools import _bridge
from memtools._gradwire import Table, Wire

if TYPE_CHECKING:
    import torch

RUNNING, FLUSHING, FAILED = 0.0, 1.0, 2.0
_CODE, _COUNT, _WEIGHT, _GUESS, _WEIGHTED, _SCALE = range(6)
_ALONE: Final = nullcontext()


class Totals(NamedTuple):
    """A window over all ranks.

    Attributes:
        weight: units of all ranks.
        counts: micro-batches of each rank.
        guess: what every rank's gradients are in units of now, where the ranks had different
            guesses; 0.0 where no rank had a loss.
        divided: the gradients are the sum over the ranks divided by this.
        finished: whether every rank has flushed.
    """

    weight: float
    counts: tuple[int, ...]
    guess: float
    divided: float = 1.0
    finished: bool = True


class RankError(RuntimeError):
    """Another rank could not end its window; nothing was reduced and no rank has stepped."""


class Ranks:
    """One process: nothing to agree on.

    Attributes:
        world: how many ranks there are.
        rank: which of them this is.
        no_retry: why a micro-batch cannot be tried again on one rank alone; "" where it can.
    """

    world = 1
    rank = 0
    no_retry = ""

    def forward(self, last: bool) -> Any:
        """A context for a micro-batch's forward and backward pass."""
        return _ALONE

    def guess(self, own: float) -> float:
        """The guess of this window, given this rank's; called at its first backward pass."""
        return own

    def agree(self, failed: str) -> str:
        """Whether a micro-batch is to be tried again: "" or why. Every rank calls it after every
        micro-batch, where that is a collective; where it is not, each decides for itself."""
        return failed

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Totals:
        """Sums the gradients over the ranks, at the window's end.

        Args:
            gradients: where the gradients lie.
            window: this rank's numbers; empty where its loader has ended.
            flushing: this rank has no more batches; others may have.
            problem: the exception by which this rank failed, raised here after the others know.
        """
        if problem is not None:
            raise problem
        return Totals(window.total(), (window.count,), window.guess)

    def fail(self, error: BaseException) -> None:
        """This rank cannot end its window: tells the others, who raise RankError at theirs."""

    def measure(self, measure: Any) -> Any:
        """The measure of the whole gradient, given that of this rank's part."""
        return measure


class SummingRanks(Ranks):
    """Several processes with a copy of the model each; gradients are summed by hand."""

    def __init__(self, group: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._wire = Wire(group)
        self._parameters = list(parameters)
        self.world, self.rank = self._wire.world, self._wire.rank

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Totals:
        code = FAILED if problem is not None else FLUSHING if flushing else RUNNING
        table = self._wire.table(self._row(window, code), self._present(code))
        if problem is not None:
            raise problem
        check(table, self.rank)
        totals = total(table)
        if totals.guess:
            self._sum(table, totals.guess / window.guess if window.guess else 1.0)
        return totals

    def fail(self, error: BaseException) -> None:
        self._wire.table([FAILED] + [0.0] * _SCALE, [0.0] * len(self._parameters))

    def _row(self, window: Any, code: float) -> list[float]:
        """Without a loss the window has no scale to compare and no guess."""
        if code == FAILED or window.empty:
            return [code] + [0.0] * _SCALE
        weighted = 1.0 if window.weighted else 0.0
        return [code, window.count, window.total(), window.guess, weighted, window.scale]

    def _present(self, code: float) -> list[float]:
        if code == FAILED:
            return [0.0] * len(self._parameters)
        return [float(p.grad is not None) for p in self._parameters]

    def _sum(self, table: Table, factor: float) -> None:
        """Of each parameter that has a gradient anywhere. A factor is a power of two, from this
        rank's guess to the common one."""
        torch = _bridge.connect().torch
        having = [p for p, n in zip(self._parameters, table.counts, strict=True) if n]
        for parameter in having:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._wire.sum([p.grad for p in having if p.grad is not None], factor)


def check(table: Table, rank: int) -> None:
    """Raises where the ranks cannot end this window together, on all of them alike."""
    failed = [i for i, code in enumerate(table.column(_CODE)) if code == FAILED]
    if failed:
        raise RankError(
            f"rank {', '.join(map(str, failed))} failed in this window, its own error says how; "
            f"rank {rank} has not stepped: reset() drops its window"
        )
    losses = [row for row in table.rows if row[_GUESS]]
    if len({row[_WEIGHTED] for row in losses}) > 1:
        raise ValueError(
            "some ranks gave their losses a weight and others none; give one on all ranks or none"
        )
    if len({row[_SCALE] for row in losses}) > 1:
        raise ValueError(
            f"the ranks have different loss scales, {sorted(table.column(_SCALE))}; make "
            "GradAccumulator alike on all ranks and load the same state"
        )


def total(table: Table, divided: float = 1.0) -> Totals:
    """The least guess of all, so that a sum of fp16 gradients does not overflow by it."""
    guesses = [guess for guess in table.column(_GUESS) if guess]
    return Totals(
        weight=sum(table.column(_WEIGHT)),
        counts=tuple(int(count) for count in table.column(_COUNT)),
        guess=min(guesses, default=0.0),
        divided=divided,
        finished=all(code == FLUSHING for code in table.column(_CODE)),
    )


def find_ranks(
    model: Any, parameters: Sequence[torch.Tensor], ranks: Any = None, overlap: bool = False
) -> Ranks:
    """How this model's ranks work together.

    Args:
        ranks: None looks for DistributedDataParallel and fully_shard in the model; False for one
            process in any case; True for all ranks of the job, or a process group: the model is
            a plain one, and starts as it is on the group's first rank.
        overlap: DistributedDataParallel reduces in the backward pass of the last micro-batch.

    Raises:
        ValueError: the model is wrapped in what is not supported, or `overlap` without DDP.
    """
    if ranks is not None and ranks is not False:
        from memtools._gradranks_ddp import PlainRanks

        _no_overlap(overlap)
        return PlainRanks(model, parameters, None if ranks is True else ranks)
    if ranks is None and _distributed():
        found = _wrapped(model, parameters, overlap)
        if found is not None:
            return found
    _no_overlap(overlap)
    return Ranks()


def _wrapped(model: Any, parameters: Sequence[torch.Tensor], overlap: bool) -> Ranks | None:
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise ValueError(
            "FullyShardedDataParallel is not supported; shard the model with "
            "torch.distributed.fsdp.fully_shard"
        )
    if "FSDPModule" in kinds:
        from memtools._gradranks_fsdp import ShardedRanks

        _no_overlap(overlap)
        return ShardedRanks(model, parameters)
    if "DistributedDataParallel" in kinds:
        from memtools._gradranks_ddp import DataParallelRanks

        return DataParallelRanks(model, parameters, overlap)
    return None


def _distributed() -> bool:
    dist = _bridge.connect().torch.distributed
    return bool(dist.is_available() and dist.is_initialized())


def _no_overlap(overlap: bool) -> None:
    if overlap:
        raise ValueError("overlap=True is for models in DistributedDataParallel; leave it out")
