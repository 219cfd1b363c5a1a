"""Does a short series of memory readings grow, and by how much a step?

    readings, one a step      ▁▃▁▂▄▂▃▃▅▄ ...
      │ floors: the minimum of each of up to 24 blocks of steps
      │ kept: the minimum of this block and all later ones; what rises there is never given back
      ▼
    rises from block to block ──► without single lumps (an import, a table that doubles)
      │                           ──► is what is left spread over the run, steady, there at the end,
      ▼                               and more than the noise?
    bytes a step, or 0

Memory that a program takes and gives back within the run is not growth, whatever its size: garbage
that waits for the collector, batches of different sizes, caches that are emptied. Memory that it
takes once is a lump: up to three of them are left out. Growth that slows down or ends is something
that fills, and is left out. A leak that comes every n-th step is a row of equal lumps at equal
distances; at least three of them are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

#: Fewer readings than these are not judged.
LEAST_READINGS = 16
_MOST_BLOCKS = 24
_LUMPS = 3  # Up to so many single lumps are left out.
_LUMP = 3.0  # A lump is a rise of more than so many times the third largest one.
_DENSE = 6.0  # From so many rises on, they need not be even.
_EVEN_SIZES, _EVEN_GAPS = 2.0, 1.35  # Otherwise the largest may be so many times the smallest.
_SLOWS = 0.75  # Growth slows down if each third has less than this share of the one before.
_ENDS = 0.4  # Growth has ended if the last third, or fifth, is below this share of the mean.
_STEADY = 0.25  # It grows in nearly all blocks if the median rise is this share of the mean.
_OVER_NOISE = 8.0  # The kept minimum must rise by so many times the scatter of the floors.


def growth_of(sizes: Sequence[float], steps: Sequence[int] | None = None) -> float:
    """Return by how many bytes a step a series grows; 0 if nothing shows that it grows.

    Args:
        sizes: the readings in bytes, each at the same point of a step.
        steps: the numbers of the steps, which rise; None, the default: consecutive steps.
    """
    count = len(sizes)
    if count < LEAST_READINGS:
        return 0.0
    apart = 1.0 if steps is None else (steps[-1] - steps[0]) / (count - 1)
    blocks = min(_MOST_BLOCKS, count // 2)
    cuts = [count * block // blocks for block in range(blocks + 1)]
    floors = [min(sizes[begin:end]) for begin, end in pairwise(cuts)]
    kept = list(accumulate(reversed(floors), min))[::-1]
    rises = _without_lumps([after - before for before, after in pairwise(kept)])
    total = sum(rises)
    if total <= 0 or not _is_spread(rises) or not _goes_on(rises):
        return 0.0
    above = math.sqrt(sum((m - f) ** 2 for m, f in zip(floors, kept, strict=True)) / blocks)
    if total < _OVER_NOISE * above:
        return 0.0
    return total / (cuts[-2] * apart)  # from the first floor to the last


def growth_of_levels(levels: Sequence[tuple[int, float]]) -> float:
    """The same for a few (step, bytes) without noise, such as those after collections of garbage.
    They must all rise by about the same a step."""
    rates = [(b - a) / (t - s) for (s, a), (t, b) in pairwise(levels)]
    if len(rates) < 3 or min(rates) <= 0 or max(rates) > _EVEN_SIZES * min(rates):
        return 0.0
    return (levels[-1][1] - levels[0][1]) / (levels[-1][0] - levels[0][0])


def _without_lumps(rises: list[float]) -> list[float]:
    """The rises, with single large ones replaced by the mean of their neighbours."""
    rises = list(rises)
    for _ in range(_LUMPS):
        order = sorted(range(len(rises)), key=rises.__getitem__, reverse=True)
        if len(order) < 4 or rises[order[0]] <= _LUMP * rises[order[2]]:
            break
        beside = rises[max(0, order[0] - 1) : order[0]] + rises[order[0] + 1 : order[0] + 2]
        rises[order[0]] = sum(beside) / len(beside)
    return rises


def _is_spread(rises: Sequence[float]) -> bool:
    """Whether many blocks grow, or a few by even lumps at even distances."""
    effective = _effective(rises)
    if effective >= _DENSE:
        return True
    if effective < 2.5:
        return False
    least = 0.1 * max(rises)
    at = [n for n, rise in enumerate(rises) if rise > least]
    gaps = [b - a for a, b in pairwise(at)]
    sizes = [rises[n] for n in at]
    if len(at) < 3 or min(gaps) < 2:
        return False
    return max(sizes) <= _EVEN_SIZES * min(sizes) and max(gaps) <= _EVEN_GAPS * min(gaps)


def _goes_on(rises: Sequence[float]) -> bool:
    """Whether it grows from the first half on, does not slow down, and has not ended."""
    count, mean = len(rises), sum(rises) / len(rises)
    at = [n for n, rise in enumerate(rises) if rise > 0.1 * mean]
    if not at or at[0] >= count // 2:
        return False
    pause = max((b - a for a, b in pairwise(at)), default=1) - 1
    if count - 1 - at[-1] > 1.5 * pause + 1:
        return False
    newest = rises[count - max(1, count // 5) :]
    if _effective(rises) >= _DENSE and sum(newest) < _ENDS * mean * len(newest):
        return False
    thirds = [rises[count * k // 3 : count * (k + 1) // 3] for k in range(3)]
    means = [sum(third) / len(third) for third in thirds]
    if means[2] < _ENDS * mean or _slows(means):
        return False
    if median(rises) < _STEADY * mean:
        return True
    usual = [median(third) for third in thirds]  # Medians ignore lumps that were not left out.
    return usual[2] >= 0.1 * median(rises) and not _slows(usual)


def _slows(thirds: Sequence[float]) -> bool:
    first, second, third = thirds
    return second < _SLOWS * first and third < _SLOWS * second


def _effective(rises: Sequence[float]) -> float:
    """How many rises count: all if they are even, one if it is far above the rest."""
    total = sum(rises)
    return total * total / sum(rise * rise for rise in rises)
