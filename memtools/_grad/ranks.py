"""The ranks of a training job, as gradient accumulation sees them.

        rank 0   |-- micro --|-- micro --|-- micro --|-- micro --|
        rank 1   |-- micro --|-- micro --|-- flush()             |
                     nobody waits for anybody here               | table, then gradients
                                                                 | one step, the same on all

Until the window's end a rank works alone: no collective lies in a forward or backward pass, so a
rank may run out of memory, halve and go on, or have fewer batches, without the others. Then the
ranks tell each other how many units they have, and whether one has failed; only if none has, the
gradients are summed. This file is the way of one process; `ranks_ddp` and
`ranks_fsdp` are the others.
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
WIDTH: Final = 7  # numbers that a rank gives of its window
_CODE, _COUNT, _WEIGHT, _GUESS, _WEIGHTED, _SCALE, _HAVING = range(WIDTH)
_ALONE: Final = nullcontext()


class Reduced(NamedTuple):
    """A window over all ranks.

    Attributes:
        weight: units of all ranks.
        counts: micro-batches of each rank.
        guess: what every rank's gradients are in units of now, where the ranks had different
            guesses; 0.0 where no rank had a loss.
        divided: the gradients are the sum over the ranks divided by this: times
            divided / (loss scale * guess * weight) they are those of the mean.
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
        no_retry: why a micro-batch cannot be tried again; "" where it can.
        finished: whether every rank had flushed at the last window's end.
        sharded: each rank has parts of the parameters, and runs each micro-batch with the others.
        reduces: a window's end reduces over the ranks; where it does not, the gradients and the
            numbers of this process are all there are.
        surrounds: a micro-batch's passes run within forward(), in a job of one rank too: DDP and
            fully_shard reduce there as well.
    """

    surrounds = False
    world = 1
    rank = 0
    no_retry = ""
    finished = True
    sharded = False
    reduces = False

    def attach(self) -> None:
        """From now on the accumulator has the model: what is put on it, is put on it here."""

    def close(self) -> None:
        """Leave the model as attach() found it. May be called again."""

    def forward(self, last: bool) -> Any:
        """A context for a micro-batch's forward and backward pass."""
        return _ALONE

    def guess(self, own: float) -> float:
        """The guess of this window, given this rank's; called at its first backward pass."""
        return own

    def agree(self, failed: str) -> str:
        """Return why a micro-batch is to be tried again, or "", given why it failed here. Where
        ranks are sharded, it is a collective that every rank calls after every micro-batch."""
        return failed

    @property
    def in_step(self) -> bool:
        """Whether all ranks go through each micro-batch together, and so need as many of them."""
        return self.world > 1 and (self.sharded or bool(self.no_retry))

    def share(self, number: float) -> list[float]:
        """Return the number that each rank gave. A collective."""
        return [number]

    def least(self, size: float) -> float:
        """Return the smallest size of all ranks. A collective, which every rank calls before each
        micro-batch where they are in step and each has a monitor."""
        return size

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        """Sum the gradients over the ranks, at the window's end. It is called where `reduces` is
        set.

        Args:
            gradients: where the gradients lie.
            window: this rank's numbers; empty where its loader has ended.
            flushing: this rank has no more batches; others may have.
            problem: the exception by which this rank failed, raised here after the others know.
        """
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """This rank cannot end its window: tells the others, who raise RankError at theirs. Waits
        for them."""

    def abort(self, error: BaseException, window: Any) -> None:
        """An exception left a micro-batch's block: fails where the window cannot go on."""

    def measure(self, measure: Any) -> Any:
        """Return the measure of the whole gradient, given that of this rank's part. It is called
        where ranks are sharded."""
        raise NotImplementedError


class SummingRanks(Ranks):
    """Several processes with a copy of the model each; gradients are summed by hand.

    Attributes:
        left_out: ids of parameters whose gradients stay each rank's own.
    """

    reduces = True

    def __init__(self, group: Any, left_out: frozenset[int] = frozenset()) -> None:
        self._wire = Wire(group)
        self.world, self.rank = self._wire.world, self._wire.rank
        self.left_out = left_out

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        """One small table, one more of the parameters where not all ranks have gradients of the
        same, and the gradients."""
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
        return self._wire.table([RUNNING, number] + [0.0] * (WIDTH - 2)).column(1)

    def abort(self, error: BaseException, window: Any) -> None:
        if window.torn:  # else the window can go on with another micro-batch
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # ctrl-C does not wait for anybody
            report_failure(self._wire, error)

    def _sum(self, holders: list[Any], factor: float) -> None:
        """A factor goes from this rank's guess to the common one: a power of two, but for means of
        losses in 16 bits."""
        torch = bridge.connect().torch
        for holder in holders:
            if holder.grad is None:
                holder.grad = torch.zeros_like(holder, dtype=holder.grad_dtype)
        self._wire.sum([holder.grad for holder in holders], factor)


def report_failure(wire: Wire, error: Exception) -> None:
    """Tell the other ranks that this one cannot go on."""
    try:
        wire.table([FAILED] + [0.0] * (WIDTH - 1))
    except RuntimeError as unheard:
        error.add_note(f"the other ranks could not be told of this: {unheard}")


def row(window: Any, code: float, having: float = 0.0) -> list[float]:
    """What this rank gives of its window, which without a loss has no guess and no scale to
    compare."""

    if code == FAILED or window.empty:
        return [code] + [0.0] * _SCALE + [having]
    weighted = 1.0 if window.weighted else 0.0
    return [code, window.count, window.total(), window.guess, weighted, window.scale, having]


def _digest(having: list[bool]) -> float:
    """48 bits: exact in a float64."""
    return float(int.from_bytes(hashlib.blake2b(bytes(having), digest_size=6).digest()))


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


def total(table: Table, divided: float = 1.0) -> Reduced:
    """The least guess of all, so that a sum of fp16 gradients does not overflow by it."""
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
    """How this model's ranks work together.

    Args:
        ranks: None looks for DistributedDataParallel and fully_shard in the model; False for one
            process in any case; True for all ranks of the job, or a process group: the model is
            a plain one, and starts as it is on the group's first rank.
        overlap: DistributedDataParallel reduces in the backward pass of the last micro-batch.

    Raises:
        ValueError: the model is wrapped in what is not supported, or `overlap` without DDP.
    """
    wrappers: set[str] = set()
    if ranks is None and bridge.process_group() is not None:
        classes = (kind for module in model.modules() for kind in type(module).__mro__)
        wrappers = {kind.__name__ for kind in classes}
    if "FullyShardedDataParallel" in wrappers:
        raise ValueError(
            "FullyShardedDataParallel is not supported; shard the model with "
            "torch.distributed.fsdp.fully_shard"
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
    """Raises ValueError where gradients of another dtype than the parameters' would be refused in
    the backward pass, or where ranks that go through each micro-batch together do not all have a
    monitor."""
    if ranks.in_step and 0 < sum(ranks.share(float(has_monitor))) < ranks.world:
        raise ValueError(
            "some ranks have a monitor and others none, and all of them go through each "
            "micro-batch together: pass monitor on all ranks, or on none"
        )
    if not (overlap or ranks.sharded) or all(p.grad_dtype in (None, p.dtype) for p in parameters):
        return
    if overlap:
        raise ValueError(
            "overlap=True reduces the gradients of the last backward pass in the dtype of the "
            "parameters, and grad_dtype gives them another one: pick one"
        )
    raise ValueError(
        "grad_dtype is not for fully_shard, which reduces each micro-batch: leave it out, and give "
        "fully_shard MixedPrecisionPolicy(reduce_dtype=torch.float32)"
    )
