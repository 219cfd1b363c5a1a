"""Live training loops under MemoryMonitor: whether it reports the leaks, how fast, who holds them.

    python -m benchmarks.monitor.monitor_leaks    # two minutes; writes results/monitor_leaks.json
    python -m benchmarks.monitor.monitor_leaks --only varlen

Each loop runs in a process of its own, forked from one that has imported torch. The true rate is
that of the same loop without a monitor, in another process: the signal that grows, read at the
beginning and at the end of its last 1,200 steps. What counts is what a user sees: the findings of
the monitor, as on_leak() receives them on the way and as they are at the end.
docs/internals/performance.md has the figures.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.kit.harness import RESULTS, Json, arguments, environment, table, write_json
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
    grades: list[tuple[int, str]] = []  # step and grade of each report on the way
    ever_leak = False
    with tempfile.TemporaryDirectory() as folder:
        monitor = MemoryMonitor(Path(folder, "run.mem"))

        def note(finding: LeakFinding) -> None:
            if not finding.over:
                grades.append((monitor.step_count, finding.grade))

        monitor.on_leak(note)
        with monitor:
            for _ in range(steps):
                next(loop)
                monitor.step()
                ever_leak = ever_leak or any(f.grade == "leak" for f in monitor.findings())
            findings = monitor.findings()
    worst = findings[0] if findings else LeakFinding("quiet")
    same = [one for one in findings if one.key[1] == worst.key[1]]  # in several workers
    return {
        "kind": worst.grade,
        "line": str(worst.without_forecast()),
        "part": worst.part,
        "rate": sum(one.rate_bytes for one in same),
        "holder": worst.holder or worst.kind or None,
        "grades": grades,
        "called_leak": ever_leak or any(grade == "leak" for _, grade in grades),
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


def leaking(only: str) -> list[Json]:
    rows = []
    for name, (loop, signal, holder, onset) in LEAKS.items():
        if only not in name:
            continue
        row = in_child(lambda: run(loop(), STEPS + onset))  # noqa: B023 - called at once
        row |= in_child(lambda: true_rate(loop(), signal, onset))  # noqa: B023
        row["found"] = is_call(row["kind"]) and row["part"] == LeakFinding("leak", signal).part
        row["rate_error"] = row["rate"] / row["true_rate"] - 1
        row["named"] = holder in (row["holder"] or "")
        rows.append({"name": name, **row})
    return rows


def leak_free(only: str) -> list[Json]:
    return [
        {"name": name, **in_child(lambda: run(loop(), STEPS))}  # noqa: B023 - called at once
        for name, loop in CLEAN.items()
        if only in name
    ]


def shown(leaks: list[Json], free: list[Json]) -> str:
    """The finding of each loop, and how much of it is right."""
    first = table(
        ("leaking loop", "true, KiB a step", "error", "holder right", "finding"),
        (
            (
                row["name"],
                f"{row['true_rate'] / 1024:.2f}",
                f"{100 * row['rate_error']:+.1f} %",
                "yes" if row["named"] else "NO",
                row["line"][:90],
            )
            for row in leaks
        ),
    )
    second = table(
        ("leak-free loop", "ever a leak", "finding"),
        ((row["name"], "YES" if row["called_leak"] else "no", row["line"][:90]) for row in free),
    )
    return (
        f"{first}\n\n{second}\n\nfound {sum(r['found'] for r in leaks)} of {len(leaks)}, "
        f"rate within 10 % in {sum(abs(r['rate_error']) <= 0.1 for r in leaks)}, "
        f"holder right in {sum(r['named'] for r in leaks)}; "
        f"leak-free loops called a leak: {sum(r['called_leak'] for r in free)} of {len(free)}"
    )


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    facts, only = environment(1), options.only or ""
    leaks, free = leaking(only), leak_free(only)
    print(shown(leaks, free))
    result = {"environment": facts, "steps": STEPS, "leaking": leaks, "leak_free": free}
    if out := options.out or (None if options.only else RESULTS / "monitor_leaks.json"):
        write_json(out, result)


if __name__ == "__main__":
    main()
