"""What a record shows about the peak of a step: what filled memory, over the step and at the peak,
the largest blocks, and what to do.

The advice depends on the moment of the peak: what filled memory there must become less. Only some
steps of a run are recorded, so the text says which of them has the highest peak. In a run that
leaks, the advice is about the leak.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from memtools._base.peak import (
    AFTER,
    BACKWARD,
    BACKWARDS,
    BUFFERS,
    FORWARD,
    GRADIENTS,
    INTERVALS,
    OLDER,
    OPTIMIZER,
    OPTIMIZERS,
    OTHERS,
    PARAMETERS,
    SAVED,
    STATE,
    UNSEEN,
    Large,
    Layer,
    Lowered,
    Span,
)
from memtools._base.size import format_bytes
from memtools._base.text import count, percent, shown
from memtools._base.trainers import option_of
from memtools._leak.finding import is_call
from memtools._record.events import events_of
from memtools._record.kinds import Peak

if TYPE_CHECKING:
    from memtools._record.figures import Figures
    from memtools._record.record import Record

#: Advice is about parts that take at least this share of the peak.
OF_OPTIMIZER, OF_LOGITS, OF_SAVED, OF_GRAPH, OF_OTHERS = 0.1, 0.25, 0.25, 0.25, 0.25
OF_OLD_GRADIENTS, OF_OLDER = 0.1, 0.5
LOOP = 8  # A line that runs at least so often for each layer runs in a loop.
SAVERS = 3  # that are listed, at most
WORTH = 16 << 20  # There is no advice about a peak of fewer bytes.
#: In a run that ended well, there is no advice about tensors from before the step that take less
#: than this share of the process's peak.
OF_PROCESS = 0.1
#: Blocks that are too small for the list get a line if they take this share of the peak.
OF_SMALL = 0.1
#: explanations of PARTS that are not words of PyTorch
MEANINGS = {
    AFTER: "made in the forward pass and not freed by the backward pass, because the program or "
    "retain_graph=True keeps it; the backward pass may need it, too",
    OLDER: "allocated before the step began, and not part of the model, its gradients or the "
    "optimizer",
    UNSEEN: "used inside an operator, by no tensor",
}


def peak_of(record: Record) -> Peak | None:
    """The recorded step with the highest peak; None if no step was recorded."""
    return max(recorded_steps(record), key=lambda peak: peak.peak_bytes, default=None)


def recorded_steps(record: Record) -> list[Peak]:
    """The peaks of all recorded steps, in the order of the steps; those of phases come last."""
    found: dict[tuple[str, int], Peak] = {}
    for peak in events_of(record, Peak):  # the newest first: it knows what was held in vain
        if peak.peak_bytes > 0:
            found.setdefault((peak.of, peak.step), peak)
    return [found[key] for key in sorted(found)]


class Stack(NamedTuple):
    """The bytes of each part in each interval of a step, the phases of the intervals, and the
    number of the interval that has the peak."""

    rows: tuple[tuple[str, tuple[int, ...]], ...]
    spans: tuple[Span, ...]
    highest: int


def stack_of(peak: Peak) -> Stack | None:
    """The recorded step over time; None if the record does not have it, or has impossible
    numbers."""
    return stack_from(peak.layers, peak.spans)


def stack_from(layers: tuple[Layer, ...], spans: tuple[Span, ...]) -> Stack | None:
    """A step over time, from its layers and its phases; None for impossible numbers."""
    count = sum(span.intervals for span in spans)
    if not layers or not 0 < count <= INTERVALS or min(spans, key=_length).intervals < 1:
        return None
    rows = tuple((layer.what, tuple(itertools.accumulate(layer.changes))) for layer in layers)
    if any(len(row) != count or min(row) < 0 for _, row in rows):
        return None
    sums = [sum(each) for each in zip(*(row for _, row in rows), strict=True)]
    return Stack(rows, spans, sums.index(max(sums)))


def _length(span: Span) -> int:
    return span.intervals


def why_not(record: Record) -> str:
    """Why no step was recorded, in words; "" if one was, or if it is not known."""
    if peak_of(record) is not None:
        return ""
    return next((shown(peak.why) for peak in events_of(record, Peak) if peak.why), "")


def as_json(figures: Figures) -> dict[str, Any] | None:
    """The highest peak as plain types with stable keys, in bytes; None if none was recorded."""
    peak = peak_of(figures.record)
    if peak is None:
        return None
    return {
        "step": peak.step,
        "step_of": shown(peak.of),
        "steps_looked_at": [
            one.step for one in recorded_steps(figures.record) if one.of == peak.of
        ],
        "peak_bytes": peak.peak_bytes,
        "phase": shown(peak.phase),
        "operator": shown(peak.operator),
        "line": shown(peak.line),
        "parts": {shown(part.what): part.bytes for part in peak.parts},
        "saved_by": [{**one._asdict(), "where": shown(one.where)} for one in peak.saved],
        "largest": [
            {name: shown(value) if isinstance(value, str) else value
             for name, value in one._asdict().items()}
            for one in peak.largest
        ],
        "lost_blocks": peak.lost,
        "held_in_vain": _in_vain_json(peak),
        "changes": _changes_json(peak),
        "advice": _advice_in(figures, peak),
    }  # fmt: skip


def _in_vain_json(peak: Peak) -> dict[str, Any] | None:
    found = peak.traced
    if found is None:
        return None
    return {
        "bytes": found.bytes,
        "traced_peak_bytes": found.peak_bytes,
        "lowered_peak_bytes": found.lowered_bytes,
        "held": [{"name": shown(one.name), "bytes": one.bytes, "line": shown(one.line)}
                 for one in found.held],
        "to_write": [{"text": shown(one.text), "place": shown(one.place)}
                     for one in found.remedies],
        "why_not": shown(found.why),
    }  # fmt: skip


def _changes_json(peak: Peak) -> list[dict[str, Any]]:
    return [
        {"change": shown(one.change), "peak_bytes": one.peak_bytes, "name": shown(one.name),
         "phase": shown(one.phase), "line": shown(one.line), "again_ms": one.again_ms or None}
        for one in _options(peak)
    ]  # fmt: skip


def headline(figures: Figures, peak: Peak) -> str:
    """`Peak of step 129, the highest of the 9 steps that were looked at (3 to 129 of 450): 115.5
    MiB of tensors, in the optimizer's step (...): ...`. If a leak goes on after that step, the text
    says that what it keeps comes on top."""
    recorded = recorded_steps(figures.record)
    steps = [one.step for one in recorded if one.of == peak.of]
    of = "" if figures.steps is None or peak.of else f" of {figures.steps:,}"
    looked = f"the only step{of} that was recorded"
    if len(steps) > 1:
        looked = f"the highest of {len(steps):,} recorded steps "
        looked += f"({steps[0]:,} to {steps[-1]:,}{of})"
    text = f"Peak of {peak.name()}, {looked}: {shown(peak.contents())}"
    if _leaks(figures) and not peak.of and peak.step < (figures.steps or 0):
        text += " (the leak has added more since)"
    return text


def lines(figures: Figures) -> list[str]:
    """All that is known about the highest peak, for `memtools explain`; empty without one."""
    peak = peak_of(figures.record)
    if peak is None:
        return []
    found = [headline(figures, peak)]
    if peak.saved and _share(peak, SAVED) >= OF_SAVED / 2:
        savers = (f"{shown(one.where)} {format_bytes(one.bytes)}" for one in peak.saved[:SAVERS])
        found.append(f"saved for backward by: {', '.join(savers)}")
    if peak.largest:
        found.append("largest:")
        for text, alike in Counter(map(_of_block, peak.largest)).items():
            found.append(f"  {text}" if alike == 1 else f"  {alike} x {text}")
        found += [f"  {text}" for text in smaller(peak)]
    return found + in_vain(peak) + _changes(peak) + meanings(peak)


def in_vain(peak: Peak) -> list[str]:
    """`At the peak 62.5 of 276.5 MiB are held though nothing reads them again: ...`, or why that is
    not known; empty if nothing was held in vain."""
    if peak.traced is None:
        return []
    if peak.traced.why:
        return [f"memory held in vain at the peak is unknown: {shown(peak.traced.why)}"]
    text = shown(peak.traced.sentence())
    return [f"{text[:1].upper()}{text[1:]}"] if text else []


def changes(peak: Peak) -> list[tuple[str, str, str, str]]:
    """(the peak with it, its name, where that peak is, the change of the program with the time it
    costs), the one that lowers the peak most first."""
    return [
        (format_bytes(one.peak_bytes), shown(one.name), shown(one.where()), shown(one.text()))
        for one in _options(peak)
    ]


def _options(peak: Peak) -> list[Lowered]:
    """The changes, by the options of the trainer that has made the step, where it has them. An
    option that stands for several changes counts as that which lowers the peak most."""
    known = dict[str, Lowered]()
    for one in () if peak.traced is None else peak.traced.changes:
        change = option_of(peak.trainer, one.name) or one.change
        known.setdefault(change, one._replace(change=change))
    return list(known.values())


def _changes(peak: Peak) -> list[str]:
    """`With one change of the program, the peak of step 5, 276.5 MiB, becomes:`, and a line for
    each change with its name; empty if none is known that lowers it. It may differ from that of the
    recorded step, which came before."""
    rows = changes(peak)
    if peak.traced is None or not rows:
        return []
    width, wide, far = (max(len(row[i]) for row in rows) for i in range(3))
    total = format_bytes(peak.traced.peak_bytes)
    return [
        f"With one change of the program, the peak of step {peak.traced.step}, {total}, becomes:",
        *(
            f"  {size:>{width}}  {name:{wide}}  {where:{far}}  {change}"
            for size, name, where, change in rows
        ),
    ]


def smaller(peak: Peak) -> list[str]:
    """`older than the step: 16.7 MiB in 3,482 blocks, none larger than these`: parts that take much
    of the peak in blocks that are too small for the list."""
    if not peak.largest:
        return []
    listed, least = {one.what for one in peak.largest}, peak.largest[-1].bytes
    return [
        f"{shown(part.what)}: {format_bytes(part.bytes)} in {count(part.blocks, 'block')}, none "
        "larger than these"
        for part in peak.parts
        if part.what not in listed
        and OF_SMALL * peak.peak_bytes <= part.bytes <= part.blocks * least
    ]


def meanings(peak: Peak) -> list[str]:
    """`"older than the step" means: there before ...`: explanations of the parts of this peak that
    are not words of PyTorch."""
    used = {part.what for part in peak.parts if 100 * part.bytes >= peak.peak_bytes}
    used |= {one.what for one in peak.largest}
    return [f'"{what}" means: {meaning}' for what, meaning in MEANINGS.items() if what in used]


def _of_block(one: Large) -> str:
    """`15.6 MiB float32 [8, 2000]: saved for backward, aten::_log_softmax, train.py:31 in loss`."""
    size = f"{format_bytes(one.bytes)} {one.dtype} {list(one.shape) if one.shape else ''}"
    where = [one.what, one.name] if one.name else [one.what, one.operator, one.line]
    return shown(f"{' '.join(size.split())}: {', '.join(part for part in where if part)}")


def to_do(figures: Figures) -> list[str]:
    """The advice about the highest peak; empty for a small one."""
    peak = peak_of(figures.record)
    text = "" if peak is None or peak.peak_bytes < WORTH else _advice_in(figures, peak)
    return [text] if text else []


def _leaks(figures: Figures) -> bool:
    """Whether a finding about the process's own memory is called a leak."""
    return any(is_call(one.grade) and one.part == "use" for one in figures.verdict.findings)


def _advice_in(figures: Figures, peak: Peak) -> str:
    """The advice, if it holds for the run. A leak with a holder has advice of its own, which comes
    first. If a holder is known, tensors from before the step are not mentioned here."""
    named = [one for one in figures.verdict.findings if one.holder and one.part == "use"]
    if any(is_call(one.grade) for one in named):
        return ""
    if peak.of and any(one.holder and one.phase == peak.of for one in figures.verdict.in_phases):
        return ""
    is_worth = peak.bytes_of(OLDER) >= OF_PROCESS * (figures.peak_bytes or 0)
    is_clean = figures.ending.kind == "clean" and not _leaks(figures)
    return advice(peak, older=not named and (is_worth or not is_clean))


def advice(peak: Peak, *, older: bool = True) -> str:
    """How to make this peak lower, in one sentence; "" if that is not known. `older`: whether
    tensors from before the step are mentioned."""
    most = format_bytes
    if peak.phase == OPTIMIZER and _share(peak, OPTIMIZERS) >= OF_OPTIMIZER:
        size = most(peak.bytes_of(OPTIMIZERS))
        return (
            f"the peak is in the optimizer's step, whose temporaries take {size}: "
            + (option_of(peak.trainer, "fused") or "pass fused=True to it")
            + ", which makes none (Adam, AdamW, SGD and Adagrad have it)"
        )
    old = peak.old_gradients_bytes
    if peak.phase != OPTIMIZER and old >= max(1, OF_OLD_GRADIENTS * peak.peak_bytes):
        return (
            f"gradients of the previous step were still alive and took {most(old)}: call "
            "optimizer.zero_grad() right after optimizer.step(), not between the forward pass and "
            "backward()"
        )
    if older and _share(peak, OLDER) >= OF_OLDER:
        return (
            "tensors from before the step that are not part of the model take "
            f"{most(peak.bytes_of(OLDER))} (a data set, a cache, a list): if that is more than "
            "you expected, memtools.census() shows what holds them"
        )
    graph = peak.bytes_of(OTHERS)
    is_much = graph >= OF_GRAPH * peak.peak_bytes and peak.repeats >= LOOP
    if is_much and not peak.backward and not peak.of:
        return (
            f"{most(graph)} were kept, and this step had no backward pass: run it under "
            "torch.no_grad(), or detach() what it keeps"
        )
    if peak.phase != OPTIMIZER and peak.logits_bytes >= OF_LOGITS * peak.peak_bytes:
        return (
            f"logits and the temporaries of their loss take {most(peak.logits_bytes)}: "
            f"{_remedy(peak, 'chunks')}, or {_smaller_batches(peak)}"
        )
    saved, after = _share(peak, SAVED), _share(peak, AFTER)
    if peak.phase in (FORWARD, BACKWARD) and max(saved, after) >= OF_SAVED:
        return _about_saved(peak) if saved >= after else _about_what_lives_after(peak)
    own = BACKWARDS if peak.phase == BACKWARD else OTHERS
    if peak.phase in (FORWARD, BACKWARD) and _share(peak, own) >= OF_OTHERS:
        return (
            f"the {peak.phase} pass's own temporaries take {most(peak.bytes_of(own))}: "
            f"{_smaller_batches(peak, says_how=True)}"
        )
    return _about_the_model(peak)


#: What to do in a loop of the program's own, by the kind of change.
_REMEDIES = {
    "chunks": "compute the loss in smaller chunks of rows",
    "checkpoint": "recompute it with torch.utils.checkpoint",
}


def _remedy(peak: Peak, kind: str) -> str:
    """What to do, by the trainer's option where it has one."""
    option = option_of(peak.trainer, kind)
    return f"use {option}" if option else _REMEDIES[kind]


def _smaller_batches(peak: Peak, *, says_how: bool = False) -> str:
    if peak.of:
        option = option_of(peak.trainer, "evaluate")
        return f"use {option or f'smaller batches in {shown(peak.of)}'}"
    return f"use {smaller_micro_batches(peak.trainer, says_how=says_how)}"


def smaller_micro_batches(trainer: str, *, says_how: bool = True) -> str:
    """Smaller micro-batches in the words of a trainer; "" for a loop of the program's own."""
    how = " (memtools accumulates the gradient)" if says_how else ""
    return option_of(trainer, "micro-batches") or f"smaller micro-batches{how}"


_DETACH = (
    "detach() what is kept or passed on from one to the next, or run passes that need no gradient "
    "under torch.no_grad()"
)


def _about_saved(peak: Peak) -> str:
    size = format_bytes(peak.bytes_of(SAVED))
    where = shown(peak.saved[0].where) if peak.saved else "the module"
    if peak.repeats >= LOOP:
        return (
            f"{size} are saved for the backward pass by passes that repeat, most of it by "
            f"{where}: {_DETACH}"
        )
    return (
        f"{size} are saved for the backward pass, most of it by {where}: "
        f"{_remedy(peak, 'checkpoint')}, or {_smaller_batches(peak)}"
    )


def _about_what_lives_after(peak: Peak) -> str:
    lines = (one.line for one in peak.largest if one.what == AFTER and one.line)
    line = next((f", the largest from {shown(line)}" for line in lines), "")
    text = f"{format_bytes(peak.bytes_of(AFTER))} are alive after the backward pass{line}: "
    if peak.repeats >= LOOP:
        return f"{text}{_DETACH}"
    return (
        f"{text}del or detach() what the program keeps, call backward() without "
        f"retain_graph=True, or {_smaller_batches(peak)}"
    )


def _about_the_model(peak: Peak) -> str:
    each = {what: peak.bytes_of(what) for what in (PARAMETERS, BUFFERS, GRADIENTS, STATE)}
    total = sum(each.values())
    if not peak.peak_bytes or total < 0.5 * peak.peak_bytes:
        return ""
    return (
        "the model, its gradients and the optimizer's state take "
        f"{percent(total, peak.peak_bytes)} of the peak, and each step needs them: use fewer "
        "parameters, lower precision or an optimizer with less state"
    )


def _share(peak: Peak, what: str) -> float:
    return peak.bytes_of(what) / peak.peak_bytes if peak.peak_bytes else 0.0
