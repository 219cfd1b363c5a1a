"""changes_of: what each change of a program makes of the peak of its step, from one traced step.

    Trace ──► replay(trace, [change]) ──► peak ──► Lowered("4 micro-batches: ...", 45.1 MiB)

Nothing runs again: replay.py applies each change to the lives of the trace. What does not lower
the peak is not offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memtools._base.peak import INPUTS, Lowered, TracedPeak
from memtools._base.text import shown
from memtools._blocks.lifetimes import Trace
from memtools._blocks.replay import (
    Change,
    checkpointed,
    gradients_end_with_the_step,
    in_micro_batches,
    repeated_blocks,
    replay,
    without_optimizers_temporaries,
)

WORTH = 0.01  # A change is offered if it lowers the peak by this share of it at least.
PARTS = (2, 4, 8)  # micro-batches


class Changed(NamedTuple):
    """A change that lowers the peak, and the trace with it."""

    lowered: Lowered
    trace: Trace


def changes_of(trace: Trace, in_vain: TracedPeak) -> list[Lowered]:
    """The changes that lower the peak of the last traced step, those that do most first.

    Args:
        trace: of at least one step.
        in_vain: what the same trace holds in vain.
    """
    found = [one.lowered for one in changed(trace)]
    if in_vain.remedies:
        found.append(Lowered(in_vain.to_write(), in_vain.lowered_bytes))
    return sorted(found, key=lambda one: one.peak_bytes)


def changed(trace: Trace) -> list[Changed]:
    """The same with the changed traces, without `del`."""
    begin = trace.steps[-1]
    most, found = (1 - WORTH) * trace.peak(begin)[1], list[Changed]()
    for text, change in _offered(trace):
        after = replay(trace, [change])
        peak_bytes = after.peak(begin)[1]
        if peak_bytes <= most:
            found.append(Changed(Lowered(text, peak_bytes), after))
    return sorted(found, key=lambda one: one.lowered.peak_bytes)


def _offered(trace: Trace) -> Iterator[tuple[str, Change]]:
    rows = _rows(trace)
    for parts in PARTS:
        if parts <= rows:
            text = f"{parts} micro-batches, whose gradients are summed (memtools.GradAccumulator)"
            yield text, in_micro_batches(parts)
    yield ("zero_grad(set_to_none=True) right after the optimizer's step",
           gradients_end_with_the_step)  # fmt: skip
    yield "an optimizer with fused=True", without_optimizers_temporaries
    for path in repeated_blocks(trace):
        what = f"each of {shown(path)}" if path else "each module of the model"
        yield (f"torch.utils.checkpoint around {what}: its forward pass runs twice",
               checkpointed(path))  # fmt: skip


def _rows(trace: Trace) -> int:
    """The size of a batch: the first dimension of the largest input of the last step."""
    begin = trace.steps[-1]
    inputs = [
        life
        for life in trace.lives
        if life.category == INPUTS and life.shape and (life.death is None or life.death > begin)
    ]
    return max(inputs, key=lambda one: one.bytes).shape[0] if inputs else 0
