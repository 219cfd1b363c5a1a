"""Kernels: what kernels of the CPU need for themselves, measured on a part of the batch.

    plan, 256 rows   aten.convolution(x [256, 64, 32, 32], w [128, 64, 3, 3])    a fake one
    for real         the same with 16 and 24 rows of x ──► 4.2 and 6.2 MiB ──► a line ──► 64.4 MiB

Why: fake tensors show what operators make. A convolution of oneDNN besides copies its arguments
into blocked layouts, with channels padded to 8 or 16, by torch's own allocator, and frees them
before it returns. How many, and which, is decided by oneDNN for a shape and a processor, so there
is no formula; but the bytes lie on a line over the rows of a batch. From 16 rows on torch's own
choice of a kernel is the same.

Kernels of a GPU are others. So this is for the CPU alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from memtools import _core
from memtools._base import torch as bridge
from memtools._blocks.dispatch import Operators
from memtools._blocks.lifetimes import Trace
from memtools._blocks.reports import HostBlocks

#: Operators whose kernels need much, and which of their arguments have the rows of a batch.
ROWS = {
    "aten.convolution.default": (0,),
    "aten.convolution_backward.default": (0, 1),
    "aten.native_batch_norm_backward.default": (0, 1),
}
MOST_ROWS, LEAST_ROWS = 24, 2  # They run with so many rows of a batch at most, and at least,
MOST_BYTES = 128 << 20  # and about so many bytes of them.
UNKNOWN = "convolution kernels need no workspace (they do, but its size is unknown)"
MEASURED = (
    "convolution kernels need the workspace that they took on this processor with a part of the "
    "batch, scaled up"
)


class _Shape(NamedTuple):
    """A tensor without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any


_Call = tuple[Any, tuple[Any, ...]]  # an operator, and its arguments with shapes for tensors


class Kernels:
    """Notes the calls of such operators on this thread while it is entered."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._operators = Operators(self._ran)

    def __enter__(self) -> Kernels:
        self._operators.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._operators.end()

    def _ran(self, func: Any, arguments: Iterable[Any], _: Any, frame: FrameType | None) -> None:
        if str(func) in ROWS:
            torch, (given, _more) = bridge.connect().torch, arguments
            shapes = tuple(
                _Shape(tuple(one.shape), one.stride(), one.dtype)
                if isinstance(one, torch.Tensor)
                else (tuple(one) if isinstance(one, list) else one)
                for one in given
            )
            self._calls.append((func, shapes))

    def measured(self, trace: Trace) -> tuple[Trace, bool]:
        """The trace of the same operators with what their kernels need for themselves, and whether
        that could be measured for all of them."""
        reports, needs = HostBlocks(), dict[_Call, int | None]()
        reports.join()
        try:
            for call in self._calls:
                if call not in needs:
                    needs[call] = _needs(*call, reports.blocks)
        finally:
            reports.leave()
        calls = iter(self._calls)
        ops = tuple(
            op._replace(scratch=needs[next(calls)] or 0) if op.name in ROWS else op
            for op in trace.ops
        )
        return replace(trace, ops=ops), None not in needs.values()


def _needs(func: Any, given: tuple[Any, ...], blocks: _core.Blocks) -> int | None:
    """The bytes that the kernel of a call needs; None if they cannot be measured."""
    scaled = [given[at] for at in ROWS[str(func)]]
    rows = scaled[0].size[0]
    of_a_row = sum(math.prod(one.size[1:]) for one in scaled)
    most: int = min(rows, MOST_ROWS, MOST_BYTES // max(4 * of_a_row, 1))
    if not blocks.is_on or (rows > most and most < LEAST_ROWS):
        return None
    less = 2 * most // 3
    try:
        at_most = _taken(func, given, most, blocks)
        at_less = at_most if rows == most else _taken(func, given, less, blocks)
    except RuntimeError:  # no kernel for this dtype, no memory
        return None
    return max(0, at_most + (at_most - at_less) * int(rows - most) // max(most - less, 1))


def _taken(func: Any, given: tuple[Any, ...], rows: int, blocks: _core.Blocks) -> int:
    """The bytes that the kernel takes beside its results, in a real call with so many rows."""
    torch, arguments = bridge.connect().torch, list(given)
    for at, one in enumerate(given):
        if isinstance(one, _Shape):
            size = (rows, *one.size[1:]) if at in ROWS[str(func)] else one.size
            arguments[at] = torch.empty_strided(size, one.stride, dtype=one.dtype).zero_()
    blocks.highest()
    result = func(*arguments)
    highest, in_use = blocks.highest()
    del result
    return int(highest - in_use)
