"""changes_of: what each change of a program makes of the peak of its step, from one traced step.
together: what several of them make of it.

    Trace ──► replay(trace, [change]) ──► peak ──► Lowered("4 micro-batches: ...", 45.1 MiB)

Nothing runs again: replay.py applies each change to the lives of the trace. What does not lower
the peak is not offered, but it may do so together with others: each change has a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from memtools._base.peak import FORWARD, INPUTS, Lowered, TracedPeak
from memtools._base.place import Place, name_of
from memtools._base.text import shown
from memtools._blocks.autocast import can_run_in_bfloat16, in_bfloat16
from memtools._blocks.lifetimes import Trace
from memtools._blocks.losses import (
    by_linear_cross_entropy,
    head_of,
    in_chunks,
    is_cross_entropy,
    logits_of,
)
from memtools._blocks.replay import (
    Change,
    calls_of,
    checkpointed,
    copies_for_caches,
    ended,
    gradients_end_with_the_step,
    in_micro_batches,
    repeated_blocks,
    replay,
    without_cache,
    without_optimizers_temporaries,
)

WORTH = 0.01  # A change is offered if it lowers the peak by this share of it at least.
PARTS = (2, 4, 8)  # micro-batches
CHUNKS = 8  # of rows of logits
DEL = "del"  # the name of that change


class Offer(NamedTuple):
    """A change that a program may make.

    Attributes:
        name: such as "micro-batches:4".
        text: what to write.
        change: what it makes of a trace.
    """

    name: str
    text: str
    change: Change


class Changed(NamedTuple):
    """A change that lowers the peak, and the trace with it."""

    lowered: Lowered
    trace: Trace


def changes_of(trace: Trace, in_vain: TracedPeak, deaths: Mapping[int, int]) -> list[Lowered]:
    """The changes that lower the peak of the last traced step, those that do most first.

    Args:
        trace: of at least one step that has run.
        in_vain: what the same trace holds in vain.
        deaths: where the remedies of that end which lives.
    """
    found = [
        one.lowered._replace(again_ms=_runs_again_ns(trace, one.lowered.name) / 1e6)
        for one in _each(trace)  # A changed trace takes as much memory as the trace.
    ]
    if in_vain.remedies:
        found.append(_lowered(in_vain.to_write(), DEL, replay(trace, [ended(deaths)])))
    return sorted(found, key=lambda one: one.peak_bytes)


def changed(trace: Trace, *, is_exact: bool = False) -> list[Changed]:
    """The same with the changed traces, without `del` and the times of real steps. A step that ran
    no operator has none.

    Args:
        trace: of at least one step.
        is_exact: whether what is only about right is left out.
    """
    return sorted(_each(trace, is_exact=is_exact), key=lambda one: one.lowered.peak_bytes)


def _each(trace: Trace, *, is_exact: bool = False) -> Iterator[Changed]:
    begin = trace.steps[-1]
    if not trace.ops[begin:]:
        return
    most = (1 - WORTH) * trace.peak(begin)[1]
    for name, text, change in offered(trace, is_exact=is_exact):
        after = replay(trace, [change])
        lowered = _lowered(text, name, after)
        if lowered.peak_bytes <= most:
            yield Changed(lowered, after)


def _lowered(text: str, name: str, after: Trace) -> Lowered:
    position, peak_bytes = after.peak(after.steps[-1])
    op = after.ops[position]
    line = name_of(Place(*op.frames[0][:2], "")) if op.frames else ""
    return Lowered(text, peak_bytes, name, op.phase, line)


def _runs_again_ns(trace: Trace, name: str) -> int:
    """The nanoseconds of the operators of the last step that run twice with a change."""
    kind, _, path = name.partition(":")
    begin = trace.steps[-1]
    if kind == "checkpoint":
        calls = [range(*one) for one in calls_of(trace, path) if one[0] >= begin]
        return sum(trace.ops[at].ns for call in calls for at in call)
    logits = logits_of(trace) if kind == "chunks" else set[int]()
    return sum(
        op.ns for op in trace.ops[begin:] if op.phase == FORWARD and not logits.isdisjoint(op.reads)
    )


def together(trace: Trace, names: Sequence[str], deaths: Mapping[int, int]) -> Trace:
    """The trace with several changes.

    Args:
        trace: of at least one step.
        names: those of the changes, in any order.
        deaths: where a `del` ends which lives; empty if nothing is held in vain.

    Raises ValueError, with one sentence, for a name that does not exist for this trace, and for two
    numbers of micro-batches.
    """
    known = known_changes(trace, deaths)
    for name in names:
        if name not in known:
            exist = ", ".join(known) or "none"
            raise ValueError(
                f"there is no change '{shown(name)}' of this step: the names are {exist}"
            )
    if sum(name.startswith("micro-batches:") for name in set(names)) > 1:
        raise ValueError("micro-batches may be given once: their number is that after the colon")
    # The order is that of `known`: parts of a batch come last, as all else is done in each of them.
    return replay(trace, [change for name, change in known.items() if name in names])


def known_changes(trace: Trace, deaths: Mapping[int, int]) -> dict[str, Change]:
    """All changes of a trace by their names, in the order in which they are made together."""
    found = {DEL: ended(deaths)} if deaths else {}
    return found | {one.name: one.change for one in offered(trace)}


def offered(trace: Trace, *, is_exact: bool = False) -> Iterator[Offer]:
    """The changes that exist for a trace, also those that alone bring nothing; with `is_exact` only
    those whose peaks are not "about" what is said."""
    if not is_exact and can_run_in_bfloat16(trace):  # The others change what this makes of a step.
        yield Offer(
            "autocast",
            f'with torch.autocast("{trace.device}", torch.bfloat16): around the forward pass '
            "and loss; the losses differ, and the peak is approximate",
            in_bfloat16,
        )
    if copies_for_caches(trace):
        yield Offer(
            "no-cache",
            "use_cache=False where the model is called: training needs no cache of keys and values",
            without_cache,
        )
    if logits_of(trace):
        head, body = head_of(trace)
        name, by = head or "head", f" by {head}" if head else ""
        hidden = f" of the hidden states that {body}(...) returns" if body else ""
        if is_cross_entropy(trace):
            yield Offer(
                "linear_cross_entropy",
                f"torch.nn.functional.linear_cross_entropy(hidden, {name}.weight, targets, "
                f"options=torch.nn.LinearCrossEntropyOptions()){hidden} instead of {name} and "
                "cross_entropy",
                by_linear_cross_entropy,
            )
        yield Offer(
            f"chunks:{CHUNKS}",
            f"logits and their loss in {CHUNKS} chunks of rows{hidden}, with "
            f"torch.utils.checkpoint around the function that makes a chunk of both{by}: the head "
            "runs twice",
            in_chunks(CHUNKS),
        )
    beside = " and use_cache=False" if copies_for_caches(trace) else ""
    for path in repeated_blocks(trace):
        what = f"each of {shown(path)}" if path else "each module of the model"
        yield Offer(
            f"checkpoint:{path}" if path else "checkpoint",
            f"torch.utils.checkpoint around {what}{beside}: its forward pass runs twice",
            checkpointed(path),
        )
    yield Offer(
        "zero_grad",
        "zero_grad(set_to_none=True) right after the optimizer's step",
        gradients_end_with_the_step,
    )
    yield Offer("fused", "an optimizer with fused=True", without_optimizers_temporaries)
    rows = _rows(trace)
    for parts in PARTS:
        if parts <= rows:
            yield Offer(
                f"micro-batches:{parts}",
                f"{parts} micro-batches, whose gradients are summed (memtools.GradAccumulator)",
                in_micro_batches(parts),
            )


def _rows(trace: Trace) -> int:
    """The size of a batch: the first dimension of the largest input of the last step."""
    begin = trace.steps[-1]
    inputs = [
        life
        for life in trace.lives
        if life.category == INPUTS and life.shape and (life.death is None or life.death > begin)
    ]
    return max(inputs, key=lambda one: one.bytes).shape[0] if inputs else 0
