"""How early the leak test speaks of growth in exact signals, and whether it is quiet again.

A signal is read at each step, or at looks alone: at steps 16, 24, 32, 48, 64 and so on.
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
RATES = {"1 KiB": KIB, "30 KiB": 30 * KIB, "1 MiB": MIB, "6 MiB": 6 * MIB, "100 MiB": 100 * MIB}
#: signal, how it is read, what lies on it: bytes, and whether that is noise, garbage that is
#: collected every 15 to 40 steps, or batches of all lengths; and the steps that are wanted
CASES = (
    ("heap", "looks", 0, "exact", {"1 KiB": 64, "30 KiB": 64, "6 MiB": 64}),
    ("heap", "looks", 16 * KIB, "garbage", {"30 KiB": 64, "6 MiB": 64}),
    ("heap", "looks", 256 * KIB, "batches", {"6 MiB": 64}),
    ("heap", "each step", 2 * KIB, "noise", {"1 KiB": 64, "30 KiB": 32, "6 MiB": 24}),
    ("heap", "each step", 256 * KIB, "batches", {"30 KiB": 64, "6 MiB": 24}),
    ("python", "each step", 8 * KIB, "noise", {"30 KiB": 32}),
    ("tensors", "looks", 0, "exact", {"1 KiB": 64, "6 MiB": 64}),
    ("device", "each step", 8 * MIB, "batches", {"6 MiB": 64, "100 MiB": 24}),
    ("device", "each step", 64 * MIB, "batches", {"6 MiB": 64, "100 MiB": 24}),
    ("children", "each step", 512 * KIB, "noise", {"1 MiB": 32}),
    ("children", "looks", 512 * KIB, "noise", {"6 MiB": 64}),
    ("shm", "looks", 0, "exact", {"1 KiB": 64, "6 MiB": 64}),
)


def looks(n: int) -> list[int]:
    """16, 24, 32, 48, 64, 96 ... below n."""
    found, step = [16, 24], 32
    while step < n:
        found += [step, step * 3 // 2]
        step *= 2
    return [step for step in found if step < n]


def kinds(signal: str, sizes: NDArray[np.float64], read: str) -> list[tuple[int, str]]:
    """The changes of the kind."""
    detector = LeakDetector()
    if read == "each step":
        return detector.update_many(0, **{signal: sizes})
    found = [(0, detector.kind)]
    for step in looks(len(sizes)):
        detector.update(step, **{signal: int(sizes[step])})
        if detector.kind != found[-1][1]:
            found.append((step, detector.kind))
    return found


def first(changes: list[tuple[int, str]], grade: str) -> float:
    at = (step for step, kind in changes if RANK[kind] >= RANK[grade])
    return next(at, float("inf"))


# --- how early ------------------------------------------------------------------------------------


def grown(rate: float, size: float, what: str, rng: np.random.Generator) -> NDArray[np.float64]:
    """A thousand steps of a leak, with what lies on it."""
    t = np.arange(1025)
    beside = size * rng.standard_normal(len(t)) if what == "noise" else np.zeros(len(t))
    if what == "garbage":
        period = rng.integers(15, 40)
        beside = size * ((t + rng.integers(period)) % period) / period
    elif what == "batches":
        beside = size * rng.random(len(t))
    whole: NDArray[np.float64] = np.round(300 * MIB + rate * t + beside)
    return whole


def first_words(seed: int, each: int) -> list[Json]:
    """The step, in nine of ten runs at the latest, of the first `suspect`; and of `growing` where a
    leak takes 1 MiB a step."""
    rows = []
    for signal, read, size, what, wanted in CASES:
        row: Json = {"signal": signal, "read": read, "noise": f"{size // KIB} KiB of {what}"}
        for name, rate in RATES.items():
            series = [
                grown(rate, size, what, np.random.default_rng([seed, i])) for i in range(each)
            ]
            told = [kinds(signal, y, read) for y in series]
            row[name] = float(
                np.quantile([first(t, "suspect") for t in told], 0.9, method="higher")
            )
            if name == "1 MiB":
                steps = [first(t, "growing") for t in told]
                row["growing, 1 MiB"] = float(np.quantile(steps, 0.9, method="higher"))
        rows.append({**row, "wanted": wanted})
    return rows


# --- whether it is over ---------------------------------------------------------------------------


def settled(family: str, seed: int, number: int) -> int:
    """The step from which on the series of that number rises no more: after the last step up, or
    after the second tooth, with 64 steps or 10 % to see it."""
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
    """% of series with a grade at any step: of flat, sawtooth and step series after their last
    rise, of the other families at all; and at the end."""
    rows = []
    for family in synthetic.FAMILIES:
        for read in ("each step", "looks"):
            flags: dict[str, list[bool]] = {}
            for number in range(each):
                y = synthetic.leak_free(family, seed, number).bytes
                start = settled(family, seed, number)
                changes = kinds("heap", y, read)
                before = [kind for step, kind in changes if step <= start]
                after = [RANK[k] for k in before[-1:] + [k for s, k in changes if s > start]]
                most, last = max(after, default=0), RANK[changes[-1][1]] if changes else 0
                for grade in ("suspect", "growing", "likely", "leak"):
                    flags.setdefault(grade, []).append(most >= RANK[grade])
                flags.setdefault("growing at the end", []).append(last >= RANK["growing"])
            shares = {grade: round(100 * float(np.mean(f)), 2) for grade, f in flags.items()}
            rows.append({"family": family, "read": read, **shares})
    return rows
