"""The ranks of a training job, as gradient accumulation sees them.

        rank 0   |-- micro --|-- micro --|-- micro --|-- micro --|
        rank 1   |-- micro --|-- micro --|-- flush()             |
                     no rank waits for another here              | table, then gradients
                                                                 | one step, the same on all

Until the end of the window a rank works alone: forward and backward passes have no collective, so
that a rank may run out of memory, halve its rows and go on, or have fewer batches. At the end the
ranks exchange how many units they have and whether one has failed. Only if none has failed, the
gradients are summed. This file has what all ways share, and the way of one process; the others are
in `ranks_ddp` and `ranks_fsdp`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memtools._base import torch as bridge
from memtools._grad.ranks_wire import Table, Wire

if TYPE_CHECKING:
    import torch

RUNNING, FLUSHING, FAILED = 0.0, 1.0, 2.0
#: The length of a rank's row in the table.
WIDTH: Final = 7
_CODE, _COUNT, _WEIGHT, _GUESS, _WEIGHTED, _SCALE, _HAVING = range(WIDTH)
_ALONE: Final = nullcontext()


class Reduced(NamedTuple):
    """A window over all ranks.

    Attributes:
        weight: the units of all ranks.
        counts: the micro-batches of each rank.
        guess: the guess that is now in the gradients of every rank; 0.0 if no rank had a loss.
        divided: the gradients are the sum over the ranks divided by this. Multiplied by
            divided / (loss scale * guess * weight) they are those of the mean.
        finished: whether every rank has flushed.
    """

    weight: float
    counts: tuple[int, ...]
    guess: float
    divided: float = 1.0
    finished: bool = True


class WrapperError(ValueError):
    """A model is in a wrapper, or is sharded, in a way that is not supported.

    Attributes:
        fact: why it is not, as a clause without a remedy.
    """

    def __init__(self, fact: str, remedy: str) -> None:
        super().__init__(f"{fact}: {remedy}")
        self.fact = fact


class RankError(RuntimeError):
    """Another rank could not end its window. Nothing was reduced, and no rank has stepped."""


class Ranks:
    """One process, which agrees with itself. The base class of the other ways.

    Attributes:
        world: the number of ranks.
        rank: the number of this rank.
        no_retry: why a micro-batch cannot be tried again; "" if it can.
        finished: whether every rank had flushed at the end of the last window.
        sharded: whether each rank has parts of the parameters, and runs each micro-batch together
            with the others.
        reduces: whether the end of a window calls reduce().
        surrounds: whether the passes of a micro-batch run inside forward(). This holds for DDP and
            fully_shard in a job of one rank too, as they reduce there as well.
    """

    surrounds = False
    world = 1
    rank = 0
    no_retry = ""
    finished = True
    sharded = False
    reduces = False

    def attach(self) -> None:
        """Put hooks on the model, which now belongs to the accumulator."""

    def close(self) -> None:
        """Restore the model from before attach(). May be called again."""

    def begin(self) -> None:
        """Begin a batch: make the model's parameters those that get gradients."""

    def forward(self, last: bool) -> Any:
        """Return a context manager for the forward and backward pass of a micro-batch."""
        return _ALONE

    def guess(self, own: float) -> float:
        """Return the guess of this window for that of this rank. It is called at the first backward
        pass of a window."""
        return own

    def agree(self, failed: str) -> str:
        """Return why a micro-batch has to be tried again, or "", for why it failed here. If ranks
        are sharded, it is a collective that every rank calls after every micro-batch."""
        return failed

    @property
    def in_step(self) -> bool:
        """Whether all ranks run each micro-batch together, and need the same number of them."""
        return self.world > 1 and (self.sharded or bool(self.no_retry))

    def share(self, number: float) -> list[float]:
        """Return the numbers of all ranks. A collective."""
        return [number]

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which are pickled. Two collectives, the first of which
        raises RankError if another rank has failed."""
        return [value]

    def least(self, size: float) -> float:
        """Return the smallest size of all ranks. If ranks are in step and have monitors, it is a
        collective that every rank calls before each micro-batch."""
        return size

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        """Sum the gradients over the ranks at the end of a window, if `reduces` is set.

        Args:
            gradients: the gradients of this rank.
            window: the numbers of this rank; empty if its loader has ended.
            flushing: whether this rank has no more batches.
            problem: the exception of this rank, which is raised here after the others know.
        """
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Report that this rank cannot end its window. The others raise RankError at the end of
        theirs. Waits for them."""

    def abort(self, error: BaseException, window: Any) -> None:
        """Handle an exception in a micro-batch: call fail() if the window cannot go on."""

    def measure(self, measure: Any) -> Any:
        """Return the measure of the whole gradient for that of this rank's part. It is called if
        ranks are sharded."""
        raise NotImplementedError


class SummingRanks(Ranks):
    """Several processes that have a copy of the model each, and sum the gradients.

    Attributes:
        left_out: the ids of parameters whose gradients are not summed.
    """

    reduces = True

    def __init__(self, group: Any, left_out: frozenset[int] = frozenset()) -> None:
        self._wire = Wire(group)
        self.world, self.rank = self._wire.world, self._wire.rank
        self.left_out = left_out

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        """Exchange a small table, a second one if the ranks have gradients of different parameters,
        and the gradients."""
        code = FAILED if problem is not None else FLUSHING if flushing else RUNNING
        holders = [p for p in gradients.parameters if id(p) not in self.left_out]
        having = [p.grad is not None for p in holders]
        table = self._wire.table(row(window, code, _digest(having)))
        if problem is not None:
            raise problem
        check(table, self.rank)
        reduced = total(table)
        self.finished = reduced.finished
        if reduced.guess and reduced.weight > 0:
            if len(set(table.column(_HAVING))) > 1:
                having = [n > 0 for n in self._wire.table([], having).counts]
            held = [p for p, has in zip(holders, having, strict=True) if has]
            self._sum(held, reduced.guess / (window.guess or reduced.guess))
        return reduced

    def least(self, size: float) -> float:
        if not self.in_step:
            return size
        return min(self.share(size))

    def share(self, number: float) -> list[float]:
        table = self._wire.table([RUNNING, number] + [0.0] * (WIDTH - 2))
        check(table, self.rank)
        return table.column(1)

    def exchange(self, value: Any) -> list[Any]:
        self.share(0.0)
        return self._wire.objects(value)

    def abort(self, error: BaseException, window: Any) -> None:
        if window.torn:  # Else the window can go on with another micro-batch.
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # Ctrl-C does not wait for other ranks.
            report_failure(self._wire, error)

    def _sum(self, holders: list[Any], factor: float) -> None:
        """Sum the gradients. The factor converts this rank's guess to the common one: a power of
        two, except for means of losses in 16 bits."""
        torch = bridge.connect().torch
        for holder in holders:
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder, dtype=holder.grad_dtype)
        self._wire.sum([holder.grad for holder in holders], factor)


def report_failure(wire: Wire, error: Exception) -> None:
    """Report to the other ranks that this one cannot go on."""
    try:
        wire.table([FAILED] + [0.0] * (WIDTH - 1))
    except RuntimeError as failed:
        error.add_note(f"this could not be reported to the other ranks: {failed}")


def row(window: Any, code: float, having: float = 0.0) -> list[float]:
    """Return this rank's row of the table. Without a loss it has no guess and no scale."""
    if code == FAILED or window.empty:
        return [code] + [0.0] * _SCALE + [having]
    weighted = 1.0 if window.weighted else 0.0
    return [code, window.count, window.total(), window.guess, weighted, window.scale, having]


def _digest(having: list[bool]) -> float:
    """Return a hash of 48 bits, which is exact in a float64."""
    return float(int.from_bytes(hashlib.blake2b(bytes(having), digest_size=6).digest()))


def check(table: Table, rank: int) -> None:
    """Raise the same error on all ranks if they cannot end this window together."""
    failed = [i for i, code in enumerate(table.column(_CODE)) if code == FAILED]
    if failed:
        raise RankError(
            f"rank {', '.join(map(str, failed))} failed in this window, its own error says how; "
            f"rank {rank} has not stepped: reset() drops the window of a GradAccumulator"
        )
    losses = [row for row in table.rows if row[_GUESS]]
    if len({row[_WEIGHTED] for row in losses}) > 1:
        raise ValueError(
            "some ranks passed a weight with their losses and others none: pass it on all ranks or "
            "on none"
        )
    if len({row[_SCALE] for row in losses}) > 1:
        raise ValueError(
            f"the ranks have different loss scales, {sorted(table.column(_SCALE))}: make the "
            "GradAccumulator with the same arguments on all ranks, and load the same state"
        )


def total(table: Table, divided: float = 1.0) -> Reduced:
    """Return the window over all ranks. It takes the smallest guess, with which a sum of fp16
    gradients does not overflow."""
    guesses = [guess for guess in table.column(_GUESS) if guess]
    return Reduced(
        weight=sum(table.column(_WEIGHT)),
        counts=tuple(int(count) for count in table.column(_COUNT)),
        guess=min(guesses, default=0.0),
        divided=divided,
        finished=all(code == FLUSHING for code in table.column(_CODE)),
    )


def find_ranks(
    model: Any, parameters: Sequence[torch.Tensor], ranks: Any = None, overlap: bool = False
) -> Ranks:
    """Return how the ranks of this model work together.

    Args:
        model: the module to train.
        parameters: those of its optimizer.
        ranks, overlap: as in GradAccumulator.

    Raises WrapperError, which is a ValueError, if the wrapper of the model is not supported;
    ValueError for `overlap` without DDP.
    """
    wrappers: set[str] = set()
    if ranks is None and bridge.process_group() is not None:
        classes = (kind for module in model.modules() for kind in type(module).__mro__)
        wrappers = {kind.__name__ for kind in classes}
    if "FullyShardedDataParallel" in wrappers:
        raise WrapperError(
            "FullyShardedDataParallel is not supported",
            "shard the model with torch.distributed.fsdp.fully_shard",
        )
    sharded = "FSDPModule" in wrappers
    if overlap and (sharded or "DistributedDataParallel" not in wrappers):
        raise ValueError("overlap=True is for models in DistributedDataParallel; leave it out")
    if ranks is not None and ranks is not False:
        from memtools._grad.ranks_ddp import PlainRanks

        return PlainRanks(model, None if ranks is True else ranks)
    if sharded:
        from memtools._grad.ranks_fsdp import ShardedRanks

        return ShardedRanks(model, parameters)
    if "DistributedDataParallel" in wrappers:
        from memtools._grad.ranks_ddp import DataParallelRanks

        return DataParallelRanks(model, overlap)
    return Ranks()


def check_together(
    ranks: Ranks, parameters: Sequence[torch.Tensor], overlap: bool, has_monitor: bool = False
) -> None:
    """Raise ValueError if only some of the ranks that run each micro-batch together have a monitor,
    or if the backward pass would refuse gradients of another dtype than the parameters."""
    if ranks.in_step and 0 < sum(ranks.share(float(has_monitor))) < ranks.world:
        raise ValueError(
            "some ranks have a monitor and others none, and all of them run each micro-batch "
            "together: pass monitor on all ranks, or on none"
        )
    if not (overlap or ranks.sharded) or all(p.grad_dtype in (None, p.dtype) for p in parameters):
        return
    if overlap:
        raise ValueError(
            "overlap=True reduces the gradients of the last backward pass in the dtype of the "
            "parameters, and grad_dtype gives them another one: leave one of them out"
        )
    raise ValueError(
        "grad_dtype does not work with fully_shard, which reduces each micro-batch: leave it out, "
        "and pass fully_shard mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
    )
