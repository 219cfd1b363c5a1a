"""Live training loops under MemoryMonitor: when it says that they leak, how fast, who holds it.

    python -m benchmarks.monitor.monitor_leaks    # two minutes; writes results/monitor_leaks.json
    python -m benchmarks.monitor.monitor_leaks --only varlen

Each loop runs in a process of its own, forked from one that has imported torch. The true rate is
that of the same loop without a monitor, in another process: the signal that tells, read at the
beginning and at the end of its last 1,200 steps. What is said is what a user is told: the findings
of the monitor, as on_leak() hears them on the way and as they stand at the end; beside them the
step from which on the leak test by itself is certain of a `leak`. docs/guides/leak_test.md has the
figures.
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
from memtools import LeakFinding, MemoryMonitor, _core
from memtools._leak.finding import is_call

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
    told: list[tuple[int, str, str]] = []  # step, grade, holder
    with tempfile.TemporaryDirectory() as folder:
        monitor = MemoryMonitor(Path(folder, "run.mem"))

        def hear(finding: LeakFinding) -> None:
            if not finding.over:
                told.append((monitor.step_count, finding.grade, finding.holder))

        monitor.on_leak(hear)
        with monitor:
            for step in range(steps):
                next(loop)
                monitor.step()
                if first is None and any(f.grade == "leak" for f in monitor.findings()):
                    first = step
            findings = monitor.findings()
    worst = findings[0] if findings else LeakFinding("quiet")
    same = [one for one in findings if one.key[1] == worst.key[1]]  # in several workers
    calls = [step for step, grade, _ in told if is_call(grade)]
    return {
        "kind": worst.grade,
        "line": str(worst.without_forecast()),
        "part": worst.part,
        "rate": sum(one.rate_bytes for one in same),
        "holder": worst.holder or worst.kind or None,
        "first_word": told[0][0] if told else None,
        "first_call": calls[0] if calls else None,
        "first_leak": first,
        "told": told,
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
        row["found"] = is_call(row["kind"]) and row["part"] == LeakFinding("leak", signal).part
        row["rate_error"] = row["rate"] / row["true_rate"] - 1
        row["named"] = holder in (row["holder"] or "")
        rows.append(row)
    return rows


def clean(only: str, steps: int) -> list[Json]:
    rows = []
    for name, loop in CLEAN.items():
        if only in name:
            row = in_child(lambda: run(loop(), steps))  # noqa: B023 - called at once
            called = row["first_leak"] is not None or any(g == "leak" for _, g, _ in row["told"])
            rows.append({"name": name, **row, "called_leak": called})
    return rows


def printed(leaks: list[Json], free: list[Json]) -> str:
    def cell(row: Json, key: str) -> str:
        return {True: "yes", False: "NO", None: "-"}.get(row[key], str(row[key]))

    first = table(
        (
            "leaking loop",
            "grade",
            "first word",
            "call",
            "leak test",
            "KiB/step",
            "true",
            "error",
            "named",
            "holder",
        ),
        (
            (
                row["name"],
                row["kind"],
                cell(row, "first_word"),
                cell(row, "first_call"),
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
        ("leak-free loop", "grade", "ever a leak", "heard of", "says"),
        (
            (
                row["name"],
                row["kind"],
                "YES" if row["called_leak"] else "no",
                ", ".join(f"{grade} at {step}" for step, grade, _ in row["told"][:4]) or "-",
                row["line"][:90],
            )
            for row in free
        ),
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
