"""fitted: the trace of a step in a setting that did not run, from real steps in smaller ones.

    batch=8     [8, 64]   [23, 128]   [64, 64]    the same storage in each: of the same operator,
    batch=16    [16, 64]  [45, 128]   [64, 64]    line and module
    batch=64    [64, 64]  [177, 128]  [64, 64]    each dimension on a line ──► trace ──► peak

Why: a step that makes shapes of values (`nonzero`, `x[mask]`) cannot run without values. The peaks
themselves lie on no line: with a larger batch the peak moves from the optimizer to the backward
pass. The storages do. What the values are is chance, so each size runs with several seeds, and the
peak has an interval.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from memtools._base.peak import PARAMETERS
from memtools._blocks.lifetimes import MARKED, Life, Trace

SEEDS = 4  # Each size runs so many times.
DEVIATIONS = 3  # The interval has so many standard deviations of the fits of single seeds
LEAST_SHARE = 0.01  # on each side of the peak, and at least this share of it.


class Fitted(NamedTuple):
    """A trace in the wanted setting, and the interval of the peak of its last step."""

    trace: Trace
    low_bytes: int
    high_bytes: int


def fitted(runs: Mapping[int, Sequence[Trace]], wanted: int) -> Fitted:
    """The trace in a size that did not run.

    Args:
        runs: traces of the same step in two or more sizes, for each one trace a seed.
        wanted: the size that did not run.

    Raises ValueError, with a text that goes on from "the steps with batch", if the steps of the
    largest size do not run the same operators.
    """
    largest = max(runs)
    counts = sorted(len(trace.ops) for trace in runs[largest])
    if counts[0] != counts[-1] or len({len(trace.lives) for trace in runs[largest]}) > 1:
        raise ValueError(
            f"{largest} run {counts[0]:,} to {counts[-1]:,} operators, by what the values are, "
            "so that there is nothing to fit: measure larger ones"
        )
    found, peaks = list[Trace](), list[int]()
    for size in sorted(runs)[:-1]:
        by_all, *by_each = _extended(runs[size], runs[largest], (size, largest), wanted)
        found.append(by_all)
        peaks += map(_peak, by_each)
    peak = _peak(found[0])
    half = max(DEVIATIONS * statistics.pstdev(peaks), LEAST_SHARE * peak)
    return Fitted(found[0], int(peak - half), int(peak + half))


def _peak(trace: Trace) -> int:
    return trace.peak(trace.steps[-1])[1]


def _extended(
    small: Sequence[Trace], large: Sequence[Trace], sizes: tuple[int, int], wanted: int
) -> list[Trace]:
    """The first of the large traces, with the storages that it has in the wanted size: by the means
    over the seeds, then by each seed."""
    first, times = large[0], wanted / sizes[1]
    partners = [_partners(one, first) for one in small]
    constant = {life.shape for life in first.lives if life.category == PARAMETERS}
    found: list[list[Life]] = [[] for _ in range(1 + len(large))]
    for at, life in enumerate(first.lives):
        before = [one[life.id] for one in partners if life.id in one]
        after = [trace.lives[at] for trace in large]
        if before:
            axes = [
                _fit([one.shape[axis] for one in before], [one.shape[axis] for one in after], sizes,
                     wanted)
                for axis in range(len(life.shape))
            ]  # fmt: skip
            sums = _fit([one.bytes for one in before], [one.bytes for one in after], sizes, wanted)
            elements = math.prod(life.shape)
            for number, lives in enumerate(found):
                shape = [axis[number] for axis in axes]
                nbytes = life.bytes * math.prod(shape) / elements if elements else sums[number]
                lives.append(life._replace(shape=tuple(map(round, shape)), bytes=round(nbytes)))
            continue
        if life.category not in MARKED and life.shape not in constant:
            life = life._replace(bytes=round(life.bytes * times))
        for lives in found:
            lives.append(life)
    ops = tuple(
        op._replace(scratch=round(op.scratch * times)) if op.scratch else op for op in first.ops
    )
    return [replace(first, lives=tuple(lives), ops=ops) for lives in found]


def _fit(
    first: Sequence[int], second: Sequence[int], sizes: tuple[int, int], wanted: int
) -> list[float]:
    """What is at the wanted size, by the means over the seeds, then by each seed. It lies on a
    line; if it varies from seed to seed, and as many for one of a size are within chance in both
    sizes, on one through 0, of which less is left to chance."""
    means = statistics.fmean(first), statistics.fmean(second)
    each = [*first, *(means[0] for _ in second[len(first) :])]  # Some seeds may have no partner.
    rates = means[0] / sizes[0], means[1] / sizes[1]
    chance = math.hypot(
        statistics.pstdev(first) / sizes[0] / math.sqrt(len(first)),
        statistics.pstdev(second) / sizes[1] / math.sqrt(len(second)),
    )
    pairs = [means, *zip(each, second, strict=True)]
    if 0 < abs(rates[1] - rates[0]) <= DEVIATIONS * chance:
        return [(a + b) / sum(sizes) * wanted for a, b in pairs]
    share = (wanted - sizes[0]) / (sizes[1] - sizes[0])
    return [max(0.0, a + (b - a) * share) for a, b in pairs]


def _partners(small: Trace, large: Trace) -> dict[int, Life]:
    """The lives of the small trace by the ids of those that are the same in the large one: made by
    the same operator in the same line and module, and both have as many of them. What was made more
    often in one of them, by an expert that got rows there alone, has none."""
    found, others = dict[int, Life](), _by_maker(small)
    for maker, lives in _by_maker(large).items():
        same = others.get(maker, [])
        if len(same) == len(lives):
            found |= {life.id: other for life, other in zip(lives, same, strict=True)}
    return found


def _by_maker(trace: Trace) -> dict[tuple[object, ...], list[Life]]:
    found: dict[tuple[object, ...], list[Life]] = {}
    for life in trace.lives:
        maker = (
            *(bisect_right(trace.steps, life.birth), life.phase, life.operator, life.module),
            *(life.made[:1], life.dtype, len(life.shape)),
        )
        found.setdefault(maker, []).append(life)
    return found
