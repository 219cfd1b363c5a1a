"""Ranks that hold a part of each parameter: torch.distributed.fsdp.fully_shard.

    forward    gather parameters of a layer  -> compute -> drop them       agree, then gather
    backward   gather them again             -> compute -> reduce, drop    agree, then reduce
    end        gradients are reduced already, each rank has its part of the mean; table only

Every collective waits for all ranks, and a rank that ran out of memory between two of them would
not come. So the ranks agree before each collective, by one word of each rank in host memory. A rank
that failed says so at the next agreement. All ranks leave the pass together, undo it, and may try
again with fewer rows. This costs an all_reduce of a few bytes before each collective of FSDP.

Loaders must be even, and batches must be cut into the same number of micro-batches on each rank, as
the ranks run all passes together.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from memtools._base import torch as bridge
from memtools._grad.gradients import Measure
from memtools._grad.ranks import (
    FAILED,
    FLUSHING,
    WIDTH,
    RankError,
    Ranks,
    Reduced,
    WrapperError,
    check,
    report_failure,
    row,
    total,
)
from memtools._grad.ranks_wire import Table, Wire

if TYPE_CHECKING:
    import torch

#: The codes inside a micro-batch, beside those of the end of a window.
_PASS, _FULL = 3.0, 4.0


class PeerMemoryError(MemoryError):
    """Another rank ran out of memory in this micro-batch. All try again with fewer rows."""


class ShardedRanks(Ranks):
    """A model of fully_shard, in one dimension or with replicas (HSDP)."""

    reduces = True
    sharded = True
    surrounds = True

    def __init__(self, model: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._names = {name: i for i, (name, _) in enumerate(model.named_parameters())}
        self._copies = _check_parameters(model, parameters)
        self._wire = Wire(_whole_group(parameters[0]))
        self.world, self.rank = self._wire.world, self._wire.rank
        self._pass = _Pass(model, self._before)
        self._reason = ""  # why this pass is tried again, as all ranks know
        if not self._pass.can_go_back:
            self.no_retry = "an interrupted pass of fully_shard can be undone from torch 2.13 on"

    def attach(self) -> None:
        self._pass.attach()

    def close(self) -> None:
        self._pass.close()

    def begin(self) -> None:
        reshard(self._pass.root)

    def forward(self, last: bool) -> Any:
        self._reason = ""
        return self._pass

    def guess(self, own: float) -> float:
        """FSDP sums the gradients unchanged, so that all ranks need the same guess."""
        table = self._agree([_PASS, 0.0, 0.0, own])
        return min(guess for guess in table.column(3) if guess)

    def share(self, number: float) -> list[float]:
        return self._agree([_PASS, number]).column(1)

    def exchange(self, value: Any) -> list[Any]:
        self.share(0.0)
        return self._wire.objects(value)

    def least(self, size: float) -> float:
        return min(self.share(size))

    def agree(self, failed: str) -> str:
        if not self._reason:
            with contextlib.suppress(PeerMemoryError):
                self._agree([_FULL if failed else _PASS])
        if self._reason:
            self._pass.take_back()
        return self._reason

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        if problem is not None:
            self.fail(problem)
            raise problem
        table = self._exchange(row(window, FLUSHING if flushing else 0.0))
        check(table, self.rank)
        reduced = total(table, divided=self._pass.divided(self.world))
        if flushing and not reduced.finished:
            raise self._uneven(table)
        return reduced

    def fail(self, error: BaseException) -> None:
        if isinstance(error, Exception) and not isinstance(error, RankError):
            report_failure(self._wire, error)
        self._pass.take_back()

    def abort(self, error: BaseException, window: Any) -> None:
        self.fail(error)  # The other ranks wait in the middle of this micro-batch.

    def measure(self, measure: Any) -> Any:
        """Sum over all shards. Replicas count once."""
        infs, nans, first_bad = measure.bad
        first = self._names.get(first_bad, -1)
        table = self._wire.table([float(measure.sum_squares), infs, nans, first])
        firsts = [int(found) for found in table.column(3) if found >= 0]
        infs, nans = (int(sum(table.column(i))) // self._copies for i in (1, 2))
        first_bad = list(self._names)[min(firsts)] if firsts else None
        squares = sum(table.column(0)) / self._copies
        return Measure(squares, measure.count, not (infs or nans), (infs, nans, first_bad))

    def _before(self) -> None:
        """Agree before a collective of FSDP inside a micro-batch."""
        self._agree([_PASS])

    def _agree(self, words: list[float]) -> Table:
        """Exchange words. Either all ranks go on, or all leave the pass."""
        table = self._exchange(words + [0.0] * (WIDTH - len(words)))
        codes = table.column(0)
        if _FULL in codes:
            ranks = ", ".join(str(i) for i, code in enumerate(codes) if code == _FULL)
            self._reason = f"out of memory on rank {ranks}"
            if words[0] != _FULL:
                raise PeerMemoryError(self._reason)
        return table

    def _exchange(self, words: list[float]) -> Table:
        """Return the words of all ranks. Raises RankError if some ranks are in a pass and others at
        the end of a window."""
        table = self._wire.table(words)
        codes = table.column(0)
        if FAILED in codes:
            check(table, self.rank)
        if any(code in (_PASS, _FULL) for code in codes) and any(
            code not in (_PASS, _FULL) for code in codes
        ):
            raise self._uneven(table)
        return table

    def _uneven(self, table: Table) -> RankError:
        kinds = {_PASS: "in a micro-batch", _FULL: "in a micro-batch", FLUSHING: "at flush()"}
        where = [kinds.get(code, "at a window's end") for code in table.column(0)]
        places = ", ".join(f"rank {i} is {place}" for i, place in enumerate(where))
        return RankError(
            f"the ranks do not have the same micro-batches: {places}. With fully_shard every rank "
            "needs the same number: drop the rest (drop_last=True), or use DistributedDataParallel"
        )


class _Pass:
    """A forward and backward pass. It calls `before` before each collective, and can be undone."""

    def __init__(self, model: Any, before: Callable[[], None]) -> None:
        kind = bridge.connect().torch.distributed.fsdp.FSDPModule
        modules = [module for module in model.modules() if isinstance(module, kind)]
        self.root: Any = modules[0]
        self.can_go_back = hasattr(self.root, "reset_iter_state")
        self._groups = [group for module in modules for group in _groups(module)]
        self._before, self._inside = before, False

    def attach(self) -> None:
        """Wrap methods of FSDP, in place of wrappers that an accumulator without close() left."""
        for group in self._groups:
            _unwrap(group)
            group.unshard = functools.partial(self._unshard, group, group.unshard)
            group.post_backward = functools.partial(self._reduce, group, group.post_backward)

    def close(self) -> None:
        for group in self._groups:
            if getattr(vars(group).get("unshard"), "func", None) == self._unshard:
                _unwrap(group)

    def divided(self, world: int) -> float:
        """Return the divisor that FSDP applies to a sum of gradients."""
        factors = {group.gradient_divide_factor or float(world) for group in self._groups}
        if len(factors) > 1:
            raise ValueError(
                f"parts of the model have different gradient divide factors, {sorted(factors)}: "
                "call set_gradient_divide_factor() with the same for all, or leave it out"
            )
        return float(factors.pop())

    def __enter__(self) -> Self:
        self.root.set_requires_gradient_sync(True)
        self._inside = True
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._inside = False

    def take_back(self) -> None:
        """Undo a pass that ended by an exception. Before the very first pass it does nothing."""
        if self.root._get_fsdp_state()._is_root is None or not self.can_go_back:
            return
        self.root.reset_iter_state()
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def _unshard(self, group: Any, original: Any, async_op: bool = False) -> None:
        if self._inside and not group.is_unsharded and group._all_gather_result is None:
            self._before()
        original(async_op)

    def _reduce(self, group: Any, original: Any, *unused: Any) -> None:
        if self._inside:
            self._before()
        original(*unused)


def reshard(model: Any) -> None:
    """Drop whole parameters that a forward pass without gradients, as of an evaluation, has left in
    the modules that are not resharded after it. Until then they hide those that get gradients."""
    kind = bridge.connect().torch.distributed.fsdp.FSDPModule
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()


def _unwrap(group: Any) -> None:
    """Restore the methods of the group's class."""
    for name, function in (("unshard", _Pass._unshard), ("post_backward", _Pass._reduce)):
        wrapper = vars(group).get(name)
        if getattr(getattr(wrapper, "func", None), "__func__", None) is function:
            delattr(group, name)


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _check_parameters(model: Any, parameters: Sequence[torch.Tensor]) -> int:
    """Return the number of replicas of each part. Raises WrapperError for a mixture of layouts."""
    names = {id(p): name for name, p in model.named_parameters()}
    layouts = {}
    for parameter in parameters:
        if not hasattr(parameter, "device_mesh"):
            raise WrapperError(
                f"{names.get(id(parameter), 'a parameter')} is not sharded",
                "apply fully_shard to the whole model, without ignored_params, before the "
                "optimizer is made",
            )
        mesh: Any = parameter.device_mesh
        placements: Any = parameter.placements  # type: ignore[attr-defined]
        copies = [mesh.size(i) for i, kind in enumerate(placements) if kind.is_replicate()]
        layouts[mesh, tuple(copies)] = names.get(id(parameter), "")
    if len(layouts) > 1:
        raise WrapperError(
            f"parameters are sharded in different ways, for example {sorted(layouts.values())}",
            "fully_shard with one mesh is supported, tensor parallelism is not",
        )
    (_, copies_of), = layouts  # fmt: skip
    return math.prod(copies_of)


def _whole_group(parameter: Any) -> Any:
    """Return the process group of all ranks of the mesh."""
    dist, mesh = bridge.connect().torch.distributed, parameter.device_mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    raise WrapperError(
        f"the mesh {tuple(mesh.shape)} of the model is a part of the {dist.get_world_size()} ranks "
        "of the job",
        "use a mesh of all ranks, or of one dimension",
    )
