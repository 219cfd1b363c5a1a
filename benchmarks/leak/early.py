"""How early the leak test reports growth of exact signals, and whether it is quiet again.

A signal is read at each step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.harness import Json
from memtools import LeakDetector
from memtools._leak.finding import RANK
from tests.traces import synthetic

STEPS = 8000
KIB, MIB = 2**10, 2**20
#: Bytes of noise on the memory of a made-up device; bytes a step, and the steps that are allowed
#: until the first `suspect`.
CASES = (
    (8 * MIB, {"6 MiB": (6 * MIB, 64), "100 MiB": (100 * MIB, 24)}),
    (64 * MIB, {"6 MiB": (6 * MIB, 64), "100 MiB": (100 * MIB, 24)}),
)
#: The families that rise and then stop.
RISING = ("flat", "saw", "steps")


def first(changes: list[tuple[int, str]], grade: str) -> float:
    at = (step for step, kind in changes if RANK[kind] >= RANK[grade])
    return next(at, float("inf"))


# --- how early ------------------------------------------------------------------------------------


def grown(rate: float, size: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A thousand steps of a leak, with batches of all lengths on it."""
    t = np.arange(1025)
    whole: NDArray[np.float64] = np.round(300 * MIB + rate * t + size * rng.random(len(t)))
    return whole


def first_words(seed: int, each: int) -> list[Json]:
    """The step, in nine of ten runs at the latest, of the first `suspect`."""
    rows = []
    for size, rates in CASES:
        row: Json = {
            "signal": "device",
            "read": "each step",
            "noise": f"{size // KIB} KiB of batches",
        }
        for name, (rate, _) in rates.items():
            steps = []
            for i in range(each):
                y = grown(rate, size, np.random.default_rng([seed, i]))
                steps.append(first(LeakDetector().update_many(0, device=y), "suspect"))
            row[name] = float(np.quantile(steps, 0.9, method="higher"))
        rows.append({**row, "wanted": {name: most for name, (_, most) in rates.items()}})
    return rows


# --- whether it is over ---------------------------------------------------------------------------


def settled(family: str, seed: int, number: int) -> int:
    """The step after which the series of that number rises no more: after the last step up, or
    after the second tooth, with 64 steps or 10 % to notice it."""
    rng = np.random.default_rng([seed, 0, list(synthetic.FAMILIES).index(family), number])
    changes = np.diff(synthetic.FAMILIES[family](rng, STEPS))
    at = 0
    if family == "steps":
        ups = np.flatnonzero(changes > 0)
        at = int(ups[-1]) if len(ups) else 0
    elif family == "saw":
        falls = np.flatnonzero(changes < -1)
        at = int(falls[1]) if len(falls) > 1 else STEPS
    return at + max(64, at // 10) if at else 0


def over(seed: int, each: int) -> list[Json]:
    """% of flat, sawtooth and step series that are `suspect` or above after their last rise."""
    rows = []
    for family in RISING:
        flags = []
        for number in range(each):
            y = synthetic.leak_free(family, seed, number).bytes
            start = settled(family, seed, number)
            changes = LeakDetector().update_many(0, heap=y)
            before = [kind for step, kind in changes if step <= start]
            after = [RANK[k] for k in before[-1:] + [k for s, k in changes if s > start]]
            flags.append(max(after, default=0) >= RANK["suspect"])
        share = round(100 * float(np.mean(flags)), 2)
        rows.append({"family": family, "read": "each step", "suspect": share})
    return rows
