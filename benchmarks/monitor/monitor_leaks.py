"""Live training loops under MemoryMonitor: which leaks it finds, how fast they are, who holds them.

    python -m benchmarks.monitor.monitor_leaks    # two minutes; writes results/monitor_leaks.json
    python -m benchmarks.monitor.monitor_leaks --only varlen

Each loop runs in a process of its own, forked from one that has imported torch. The true rate is
that of the same loop without a monitor, in another process: the signal that tells, read at the
beginning and at the end of its last 1,200 steps. docs/guides/monitor.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.kit.harness import RESULTS, Json, environment, table, write_json
from benchmarks.leak.loops import CLEAN, LEAKS
from memtools import MemoryMonitor, _core

STEPS = 3600
WARM, TRUTH = 600, 1200  # steps before, and of, the measurement of the true rate
AROUND = 25  # readings at each end of it


def truth_of(signal: str) -> Callable[[], int]:
    probe = _core.Probe()
    reads = {
        "heap": lambda: probe.read(32).heap_used or 0,
        "python": lambda: 64 * sys.getallocatedblocks(),
        "children": lambda: probe.read(64).children_private or 0,
    }
    return reads[signal]


def true_rate(loop: Iterator[None], signal: str, onset: int) -> Json:
    read, early, late = truth_of(signal), list[int](), list[int]()
    for step in range(onset + WARM + TRUTH + AROUND):
        next(loop)
        if 0 <= step - onset - WARM < AROUND:
            early.append(read())
        if step >= onset + WARM + TRUTH:
            late.append(read())
    return {"true_rate": (sum(late) - sum(early)) / AROUND / TRUTH}


def run(loop: Iterator[None], steps: int) -> Json:
    """One loop, monitored."""
    begin, first = time.perf_counter(), None
    with tempfile.TemporaryDirectory() as folder:
        monitor = MemoryMonitor(Path(folder, "run.mem"))
        with monitor:
            for step in range(steps):
                next(loop)
                monitor.step()
                if first is None and monitor.leaks().kind == "leak":
                    first = step
            verdict, holders = monitor.leaks(), monitor.holders()
    return {
        "kind": verdict.kind,
        "line": str(verdict),
        "signal": verdict.signal,
        "rate": verdict.rate_bytes_per_step,
        "first_leak": first,
        "holder": str(holders[0].path) if holders else None,
        "seconds": time.perf_counter() - begin,
        "thread_share": monitor.overhead[1],
    }


def in_child(work: Callable[[], Json]) -> Json:
    """What `work` returns, from a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writing, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    if not text:
        raise SystemExit("a loop ended without a result; its error is above")
    return dict(json.loads(text))


def leaking(only: str, steps: int) -> list[Json]:
    rows = []
    for name, (loop, signal, holder, onset) in LEAKS.items():
        if only not in name:
            continue
        row = in_child(lambda: run(loop(), steps + onset))  # noqa: B023 - called at once
        row |= in_child(lambda: true_rate(loop(), signal, onset))  # noqa: B023
        row |= {"name": name, "tells": signal, "holder_wanted": holder}
        row["found"] = row["kind"] == "leak" and row["signal"] == signal
        row["rate_error"] = row["rate"] / row["true_rate"] - 1
        row["named"] = row["holder"] is None if holder is None else holder in (row["holder"] or "")
        rows.append(row)
    return rows


def clean(only: str, steps: int) -> list[Json]:
    rows = []
    for name, loop in CLEAN.items():
        if only in name:
            row = in_child(lambda: run(loop(), steps))  # noqa: B023 - called at once
            rows.append({"name": name, **row, "called_leak": row["first_leak"] is not None})
    return rows


def printed(leaks: list[Json], free: list[Json]) -> str:
    def cell(row: Json, key: str) -> str:
        return {True: "yes", False: "NO", None: "-"}.get(row[key], str(row[key]))

    first = table(
        ("leaking loop", "grade", "in", "leak at", "KiB/step", "true", "error", "named", "holder"),
        (
            (
                row["name"],
                row["kind"],
                str(row["signal"]),
                cell(row, "first_leak"),
                f"{row['rate'] / 1024:.2f}",
                f"{row['true_rate'] / 1024:.2f}",
                f"{100 * row['rate_error']:+.1f}%",
                cell(row, "named"),
                str(row["holder"])[:50],
            )
            for row in leaks
        ),
    )
    second = table(
        ("leak-free loop", "grade", "ever a leak", "says"),
        ((r["name"], r["kind"], "YES" if r["called_leak"] else "no", r["line"][:90]) for r in free),
    )
    return f"{first}\n\n{second}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="loops with this in their name")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--quick", action="store_true", help="is the same: it takes two minutes")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    facts = environment(1)
    begin = time.perf_counter()
    leaks, free = leaking(args.only, args.steps), clean(args.only, args.steps)
    print(printed(leaks, free))
    result: dict[str, Any] = {
        "environment": facts,
        "steps": args.steps,
        "seconds": time.perf_counter() - begin,
        "leaking": leaks,
        "leak_free": free,
    }
    print(
        f"\nfound {sum(r['found'] for r in leaks)} of {len(leaks)}, "
        f"rate within 10 % in {sum(abs(r['rate_error']) <= 0.1 for r in leaks)}, "
        f"holder right in {sum(r['named'] for r in leaks)}; "
        f"leak-free loops called a leak: {sum(r['called_leak'] for r in free)} of {len(free)}; "
        f"{result['seconds']:.0f} s"
    )
    if not args.only:
        write_json(RESULTS / "monitor_leaks.json", result)


if __name__ == "__main__":
    main()
