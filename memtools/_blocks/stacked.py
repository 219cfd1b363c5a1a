"""stacked: a traced step from its beginning to its end, as layers of what there was.

    operators of the last step  ││││││││││││││││   in at most INTERVALS columns; of each the
                                └──┴──┴──┴──┴──┘   operator at which most was in use

They are the same parts in the same order as those of a recorded step, so both are drawn alike, also
when the trace is that after a change of the program.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict

from memtools._base.peak import (
    BACKWARD,
    BETWEEN,
    FORWARD,
    INTERVALS,
    OLDER,
    PARTS,
    UNSEEN,
    Layer,
    Span,
)
from memtools._blocks.lifetimes import MARKED, Trace


def stacked(trace: Trace) -> tuple[tuple[Layer, ...], tuple[Span, ...]]:
    """The layers of the last step of a trace in the order of PARTS, and the phases of its columns.
    What was in use without a life, or was made in an earlier step, counts as older than the step;
    what operators used for themselves as not seen."""
    begin, end = trace.steps[-1], len(trace.ops)
    curve = trace.curve()
    count = min(INTERVALS, end - begin)
    edges = [begin + (end - begin) * i // count for i in range(count + 1)] if count else []
    columns = [
        max(range(first, last), key=curve.__getitem__) for first, last in itertools.pairwise(edges)
    ]
    sizes = {what: [0] * count for what in PARTS}
    changes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for life in trace.lives:
        is_older = life.birth < begin and life.category not in MARKED
        what = OLDER if is_older else life.category
        changes[max(life.birth, 0)][what] += life.bytes
        changes[end if life.death is None else life.death][what] -= life.bytes
    now, done = dict.fromkeys(PARTS, 0), 0
    for i, position in enumerate(columns):
        for at in range(done, position + 1):
            for what, more in changes.get(at, {}).items():
                now[what] += more
        done = position + 1
        for what, size in now.items():
            sizes[what][i] = size
        sizes[OLDER][i] += trace.ops[position].others
        sizes[UNSEEN][i] += trace.ops[position].scratch
    layers = tuple(
        Layer(what, tuple(map(operator.sub, row, [0, *row])))
        for what, row in sizes.items()
        if any(row)
    )
    return layers, _spans(trace, columns)


def _spans(trace: Trace, columns: list[int]) -> tuple[Span, ...]:
    """The phases of columns. What comes before the first forward pass counts as part of it, and the
    end of the optimizer's step before; what comes between phases later is of none."""
    phases, has_begun = list[str](), False
    for position in columns:
        phase = trace.ops[position].phase
        has_begun = has_begun or phase in (FORWARD, BACKWARD)
        if not has_begun:
            phase = FORWARD
        phases.append("" if phase == BETWEEN else phase)
    return tuple(Span(phase, len(list(same))) for phase, same in itertools.groupby(phases))
