"""Ranks with a whole model each: DistributedDataParallel, or a plain model and a process group.

DDP's own reduction is used with overlap=True only. It starts in a backward pass, where a rank that
runs out of memory or has no more batches would leave the others waiting. Three more things in DDP
wait for other ranks, with no_sync too:

    buffers       are broadcast in the first forward pass after a reduction. After an OOM in that
                  pass a rank would broadcast twice. Here they are broadcast at the end of a window,
                  so that every forward pass sees the same values.
    buckets       are rebuilt in the forward pass after the first reduction, and so never here.
    static_graph  reduces in the first backward pass in any case, and is refused.
"""

from __future__ import annotations

from typing import Any, Self

from memtools._base import torch as bridge
from memtools._grad.ranks import (
    FLUSHING,
    RUNNING,
    Reduced,
    SummingRanks,
    WrapperError,
    check,
    row,
    total,
)


class PlainRanks(SummingRanks):
    """A model without a wrapper. Parameters and buffers start with the values of the first rank."""

    def __init__(self, model: Any, group: Any) -> None:
        super().__init__(group)
        parameters = list(model.parameters())
        own = (float(len(parameters)), float(sum(p.numel() for p in parameters)))
        rows = self._wire.table(own).rows
        if set(rows) != {own}:
            raise ValueError(
                f"the ranks have different models: {[int(n) for _, n in rows]} elements"
            )
        self._buffers = list(model.buffers())
        self._wire.broadcast([*parameters, *self._buffers])
        self.no_retry = _sync_batch_norm(model)

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        reduced = super().reduce(gradients, window, flushing=flushing, problem=problem)
        if reduced.guess and reduced.weight > 0:
            self._wire.broadcast(self._buffers)
        return reduced


class DataParallelRanks(SummingRanks):
    """A model that is, or contains, a DistributedDataParallel."""

    surrounds = True

    def __init__(self, model: Any, overlap: bool) -> None:
        self._wrappers = _wrappers(model)
        self._overlap = overlap
        self._synced: list[bool] = []  # the wrappers' flags before attach()
        for wrapper in self._wrappers:
            _check_wrapper(wrapper, overlap)
        reduced = {id(p) for wrapper in self._wrappers for p in _reduced(wrapper)}
        others = frozenset(id(p) for p in model.parameters() if id(p) not in reduced)
        super().__init__(self._wrappers[0].process_group, others)
        self.no_retry = _sync_batch_norm(model)
        self._alone = _Forward(self._wrappers, sync=False)
        self._together = _Forward(self._wrappers, sync=True)

    def attach(self) -> None:
        self._synced = [wrapper.require_forward_param_sync for wrapper in self._wrappers]

    def close(self) -> None:
        for wrapper, synced in zip(self._wrappers, self._synced, strict=False):
            wrapper.require_forward_param_sync = synced
        self._synced = []

    def forward(self, last: bool) -> Any:
        return self._together if last and self._overlap else self._alone

    def guess(self, own: float) -> float:
        """With overlap DDP sums the gradients unchanged, so that all ranks need the same guess."""
        if not self._overlap:
            return own
        return min(self._wire.table([own]).column(0))

    def reduce(
        self, gradients: Any, window: Any, *, flushing: bool = False, problem: Any = None
    ) -> Reduced:
        if self._together.done:
            reduced = self._reduced_already(window, flushing, problem)
        else:
            reduced = super().reduce(gradients, window, flushing=flushing, problem=problem)
        if reduced.guess and reduced.weight > 0:
            self._wire.broadcast([b for wrapper in self._wrappers for b in _buffers(wrapper)])
        return reduced

    def fail(self, error: BaseException) -> None:
        self._together.done = False
        super().fail(error)

    def _reduced_already(self, window: Any, flushing: bool, problem: Any) -> Reduced:
        self._together.done = False
        if problem is not None:
            self.fail(problem)
            raise problem
        table = self._wire.table(row(window, FLUSHING if flushing else RUNNING))
        check(table, self.rank)
        reduced = total(table, divided=float(self.world))
        self.finished = reduced.finished
        return reduced


class _Forward:
    """Sets the flags of DDP for a forward and backward pass, and restores them."""

    __slots__ = ("_before", "_sync", "_wrappers", "done")

    def __init__(self, wrappers: list[Any], sync: bool) -> None:
        self._wrappers, self._sync = wrappers, sync
        self._before: list[bool] = []
        self.done = False

    def __enter__(self) -> Self:
        self._before = [wrapper.require_backward_grad_sync for wrapper in self._wrappers]
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = self._sync
            wrapper.require_forward_param_sync = False
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        for wrapper, before in zip(self._wrappers, self._before, strict=True):
            wrapper.require_backward_grad_sync = before
            wrapper.require_forward_param_sync = False
        self.done = self._sync and kind is None


def _wrappers(model: Any) -> list[Any]:
    kind = bridge.connect().torch.nn.parallel.DistributedDataParallel
    return [module for module in model.modules() if isinstance(module, kind)]


def _check_wrapper(wrapper: Any, overlap: bool) -> None:
    if not overlap and wrapper.static_graph:
        raise WrapperError(
            "DistributedDataParallel(static_graph=True) reduces in its first backward pass, even "
            "with no_sync()",
            "leave static_graph out, or pass overlap=True",
        )
    if not overlap and wrapper.mixed_precision is not None:
        raise WrapperError(
            "DistributedDataParallel(mixed_precision=...) casts gradients in its own reduction",
            'use precision="bf16", or pass overlap=True',
        )
    if not overlap and wrapper._comm_hooks:
        raise WrapperError(
            "the model has a communication hook of DistributedDataParallel, which runs only in "
            "DDP's own reduction",
            "pass overlap=True, or register no hook",
        )


def _reduced(wrapper: Any) -> list[Any]:
    left_out = getattr(wrapper, "parameters_to_ignore", ())
    return [p for name, p in wrapper.module.named_parameters() if name not in left_out]


def _buffers(wrapper: Any) -> list[Any]:
    if not wrapper.broadcast_buffers:
        return []
    left_out = getattr(wrapper, "parameters_to_ignore", ())
    return [b for name, b in wrapper.module.named_buffers() if name not in left_out]


def _sync_batch_norm(model: Any) -> str:
    """Return why no micro-batch can be tried again, if the model has a SyncBatchNorm, else ""."""
    kind = bridge.connect().torch.nn.SyncBatchNorm
    if not any(isinstance(module, kind) for module in model.modules()):
        return ""
    return "SyncBatchNorm waits for the other ranks in its forward pass"
