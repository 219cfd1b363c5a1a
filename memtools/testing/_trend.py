"""Does a short series of memory readings grow, and by how much a step? Arithmetic alone.

    readings, one a step      ▁▃▁▂▄▂▃▃▅▄ ...
      │ floors: the least of each of up to 24 blocks of steps
      │ kept: the least of this block and all later ones; what rises there is never given back
      ▼
    rises from block to block ──► without single lumps (an import, a table that doubles)
      │                           ──► is what is left spread over the run, steady, there at the end,
      ▼                               and more than the noise?
    bytes a step, or 0

What a program takes and gives back within the run is no growth, whatever its size: garbage that
waits for the collector, batches of different sizes, caches that are emptied. What it takes once
is a lump: one, two or three of them are left out. What fills slows down or ends, and is left out
where that is seen. A leak that comes every n-th step is a row of equal lumps at equal distances,
and three of them are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

#: readings without which nothing can be said
LEAST_READINGS = 16
_MOST_BLOCKS = 24
_LUMPS = 3  # single ones that are left out
_LUMP = 3.0  # a rise that is so many times the next but one
_DENSE = 6.0  # rises that count, from which on they need not be even
_EVEN_SIZES, _EVEN_GAPS = 2.0, 1.35  # of the others: the largest by the smallest
_SLOWS = 0.75  # a third of the run whose growth is below that of the third before, twice
_ENDS = 0.4  # the growth of the last third, or fifth, by the mean: below, it has ended
_STEADY = 0.25  # the median of rises by their mean: from there on it grows in nearly all blocks
_OVER_NOISE = 8.0  # what is kept rises by so many times what floors scatter above it


def growth_of(sizes: Sequence[float], steps: Sequence[int] | None = None) -> float:
    """Bytes a step that stay, over the whole of the series; 0 where nothing shows that it grows.

    Args:
        sizes: bytes, one reading for each step, read at the same point of it.
        steps: the numbers of those steps, which rise; None, the default: one after the other.
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
    """The same of a few levels without noise, such as those after collections of garbage: of each
    (step, bytes). All have to rise by about the same a step."""
    rates = [(b - a) / (t - s) for (s, a), (t, b) in pairwise(levels)]
    if len(rates) < 3 or min(rates) <= 0 or max(rates) > _EVEN_SIZES * min(rates):
        return 0.0
    return (levels[-1][1] - levels[0][1]) / (levels[-1][0] - levels[0][0])


def _without_lumps(rises: list[float]) -> list[float]:
    """The rises, with what lies beside them in the place of single large ones."""
    rises = list(rises)
    for _ in range(_LUMPS):
        order = sorted(range(len(rises)), key=rises.__getitem__, reverse=True)
        if len(order) < 4 or rises[order[0]] <= _LUMP * rises[order[2]]:
            break
        beside = rises[max(0, order[0] - 1) : order[0]] + rises[order[0] + 1 : order[0] + 2]
        rises[order[0]] = sum(beside) / len(beside)
    return rises


def _is_spread(rises: Sequence[float]) -> bool:
    """Whether many blocks have a part in the growth, or a few even lumps at even distances."""
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
    """Whether it grows from the first half on, does not slow down, and is there at the end."""
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
    usual = [median(third) for third in thirds]  # beside lumps that were not left out
    return usual[2] >= 0.1 * median(rises) and not _slows(usual)


def _slows(thirds: Sequence[float]) -> bool:
    first, second, third = thirds
    return second < _SLOWS * first and third < _SLOWS * second


def _effective(rises: Sequence[float]) -> float:
    """How many rises count: all of them where they are even, one where it is far above the rest."""
    total = sum(rises)
    return total * total / sum(rise * rise for rise in rises)
