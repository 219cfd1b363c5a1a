"""assert_flat: how often it fails a flat loop, how often it finds a leak, what it costs; beside an
assert on resident memory in the same runs.

    python -m benchmarks.testing.flat [--quick] [--only traces|real] [--out FILE]

Traces: 200 steps cut from recorded loops that leak nothing; and the same with up to six things laid
on them at random that a test may meet, where two that happen to follow each other look like growth.
Real runs: loops of this process, a seed each, under both asserts. Every figure is a count of runs.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.harness import Json, environment, table
from benchmarks.kit.limits import Limit, finish
from memtools import _core
from memtools.testing._growth import GrowthTest
from memtools.testing._trend import growth_of
from tests.traces import record

STEPS, WARMUP, ALLOWED = 200, 25, 1024
MIB = 1 << 20
Array = NDArray[np.float64]
#: loops that leak nothing, the signals that are summed, the step from which on they are settled
TRACES = (
    ("plain", ("heap", "python"), 0),
    ("varlen", ("heap", "python"), 0),
    ("workers", ("heap", "python"), 0),
    ("workers", ("children",), 0),
    ("replay_buffer", ("heap", "python"), 1500),
)


# --- traces ---------------------------------------------------------------------------------------


def beside(rng: np.random.Generator) -> Array:
    """What a test meets beside its loop: noise, an import, a table that doubles, a cache that
    fills within the run, a warm-up that fades."""
    t, found = np.arange(STEPS), np.zeros(STEPS)
    found += rng.choice([0, 100, 10_000, MIB]) * rng.standard_normal(STEPS)
    for _ in range(rng.integers(0, 4)):
        found += rng.exponential(MIB) * (t >= rng.integers(STEPS))
    if rng.random() < 0.3:
        found += 100 * 2 ** np.ceil(np.log2(t + 1))
    if rng.random() < 0.3:
        found += rng.exponential(8192) * np.minimum(t, rng.integers(5, 170))
    if rng.random() < 0.3:
        found += rng.exponential(8 * MIB) * (1 - np.exp(-t / rng.uniform(1, 30)))
    if rng.random() < 0.2:
        found += rng.exponential(65_536) * (t % rng.integers(2, 60))
    return found


def flat_traces(seed: int, runs: int) -> list[Json]:
    """False failures by loop, as recorded and with more beside it."""
    rows = []
    for number, (loop, signals, since) in enumerate(TRACES):
        data = record.load(loop)
        sizes = np.sum([data[name] for name in signals], axis=0)[since:].astype(float)
        rss = data["rss"][since:].astype(float)
        rng = np.random.default_rng([seed, number])
        alone = mixed = by_rss = 0
        for _ in range(runs // len(TRACES)):
            at = int(rng.integers(len(sizes) - STEPS))
            cut = sizes[at : at + STEPS]
            alone += growth_of(list(cut[WARMUP:])) > ALLOWED
            mixed += growth_of(list((cut + beside(rng))[WARMUP:])) > ALLOWED
            window = rss[at + WARMUP : at + STEPS]
            by_rss += window[-1] - window[0] > ALLOWED * (STEPS - WARMUP)
        rows.append({"loop": f"{loop} ({'+'.join(signals)})", "runs": runs // len(TRACES),
                     "false": int(alone), "false, more beside it": int(mixed),
                     "rss assert": int(by_rss)})  # fmt: skip
    return rows


def leaking_traces(seed: int, runs: int) -> list[Json]:
    """Leaks that are found on recorded loops: 2 KiB a step at 1 KiB, and 1 KiB at 512 B."""
    rows = []
    for rate, allowed in ((2048, 1024), (1024, 512)):
        for every in (1, 7, 20, 50):
            rng = np.random.default_rng([seed, rate, every])
            found = 0
            for n in range(runs):
                loop, signals, since = TRACES[(0, 2, 4)[n % 3]]
                data = record.load(loop)
                sizes = np.sum([data[name] for name in signals], axis=0)[since:].astype(float)
                at, phase = int(rng.integers(len(sizes) - STEPS)), int(rng.integers(every))
                lumps = ((np.arange(STEPS) + phase) % every == 0) * rate * every
                cut = sizes[at : at + STEPS] + np.cumsum(lumps)
                found += growth_of(list(cut[WARMUP:])) > allowed
            rows.append({"leak": f"{rate} B a step", "allowed": f"{allowed} B",
                         "each n-th step": every, "runs": runs,
                         "found %": round(100 * int(found) / runs, 1)})  # fmt: skip
    return rows


# --- real runs ------------------------------------------------------------------------------------


def loops(rng: random.Random) -> dict[str, Callable[[], object]]:
    """Steps that leak nothing: of the interpreter, of NumPy and of torch."""
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    adam = torch.optim.AdamW(net.parameters())
    ring: dict[int, bytes] = {}
    calls = iter(range(1 << 30))

    def train(rows: int = 16) -> None:
        x = torch.randn(rows, 32)
        (net(x) - x).square().mean().backward()
        adam.step()
        adam.zero_grad()

    def cycles() -> None:
        cycle: list[object] = [bytes(rng.randrange(20_000))]
        cycle.append(cycle)

    def fills() -> None:
        n = next(calls)
        ring[n % 60] = bytes(4000)

    return {
        "objects": lambda: [{"a": [n], "b": str(n)} for n in range(rng.randrange(300))],
        "arrays": lambda: np.ones(rng.randrange(1, 50_000)).sum(),
        "cycles": cycles,
        "fills": fills,
        "train": train,
        "batches": lambda: train(rng.randrange(1, 400)),
    }


def judged(step: Callable[[], object], allowed: int = ALLOWED) -> tuple[bool, bool, float]:
    """(assert_flat fails, an assert on resident memory fails, own seconds of the first)."""
    probe = _core.Probe()
    test = GrowthTest(allowed, f"{allowed} B", steps=STEPS)
    own, first = 0.0, 0
    for n in range(STEPS):
        step()
        begin = time.thread_time()
        test.step()
        own += time.thread_time() - begin
        if n == WARMUP:
            first = probe.rss() or 0
    last = probe.rss() or 0
    begin = time.thread_time()
    fails = bool(test.end())
    test.close()
    own += time.thread_time() - begin
    return fails, last - first > allowed * (STEPS - WARMUP), own


def flat_runs(seed: int, runs: int) -> list[Json]:
    """False failures over real loops."""
    rows = []
    names = list(loops(random.Random(seed)))
    for name in names:
        wrong = by_rss = 0
        most = 0.0
        for n in range(runs // len(names)):
            gc.collect()
            fails, rss, own = judged(loops(random.Random(seed + n))[name])
            wrong, by_rss, most = wrong + fails, by_rss + rss, max(most, own)
        rows.append({"loop": name, "runs": runs // len(names), "false": wrong,
                     "rss assert": by_rss, "own seconds, at most": round(most, 3)})  # fmt: skip
    return rows


def leaking_runs(seed: int, runs: int, size: int, allowed: int) -> list[Json]:
    """Leaks of so many bytes a step that are found in real loops."""
    rows = []
    for name in loops(random.Random(seed)):
        found = by_rss = 0
        most = 0.0
        for n in range(runs):
            kept: list[bytes] = []
            plain = loops(random.Random(seed + n))[name]

            def step(plain: Callable[[], object] = plain, kept: list[bytes] = kept) -> None:
                plain()
                kept.append(bytes(size))

            gc.collect()
            fails, rss, own = judged(step, allowed)
            found, by_rss, most = found + fails, by_rss + rss, max(most, own)
        rows.append({"loop": name, "leak": f"{size} B", "allowed": f"{allowed} B", "runs": runs,
                     "found": found, "by rss assert": by_rss,
                     "own seconds, at most": round(most, 3)})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs, to look at")
    parser.add_argument("--only", choices=("traces", "real"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    facts, part = environment(1), 10 if options.quick else 1
    sections: Json = {}
    limits: list[Limit] = []
    if options.only in (None, "traces"):
        rows = sections["flat traces"] = flat_traces(options.seed, 10_000 // part)
        sections["leaking traces"] = leaking_traces(options.seed, 300 // part)
        runs = sum(row["runs"] for row in rows)
        wrong = 100 * sum(row["false"] for row in rows) / runs
        limits.append(_at_most("false failures on traces, %", 0.1, wrong))
    if options.only in (None, "real"):
        rows = sections["flat runs"] = flat_runs(options.seed, 300 // part)
        leaks = sections["leaking runs"] = [
            *leaking_runs(options.seed, max(2, 5 // part), 2048, 1024),
            *leaking_runs(options.seed, max(2, 5 // part), 1024, 512),
        ]
        runs = sum(row["runs"] for row in rows)
        wrong = 100 * sum(row["false"] for row in rows) / runs
        limits.append(_at_most("false failures of real runs, %", 1, wrong))
        share = 100 * sum(row["found"] for row in leaks) / sum(row["runs"] for row in leaks)
        limits.append(Limit("leaks found in real runs, %", ">= 99", f"{share:.3g}",
                            f"{share:.3g}", share >= 99, share >= 99))  # fmt: skip
        most = max(row["own seconds, at most"] for row in (*rows, *leaks))
        limits.append(_at_most("own cost, s", 1, most))
    for name, found in sections.items():
        print(f"\n{name}")
        print(table(tuple(found[0]), (tuple(map(str, row.values())) for row in found)))
    finish("flat", options, facts, sections, limits)


def _at_most(what: str, allowed: float, value: float) -> Limit:
    return Limit(what, f"<= {allowed}", f"{value:.3g}", f"{value:.3g}", value <= allowed,
                 value <= allowed)  # fmt: skip


if __name__ == "__main__":
    main()
