"""When a leak is named beside a heap of many objects, and what all looks take until then and later.

    python -m benchmarks.census.heaps           # some minutes; writes results/heaps.json
    python -m benchmarks.census.heaps --quick

A list gains 139 KiB a step, beside dicts, tuples and lists of 0 to 1.5 million objects of the
collector. Each program runs alone and beside two processes that compute all the time.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time

from benchmarks.census.looks import GRACE, GRACE_STEPS, Looks, records, work
from benchmarks.kit.harness import Json, arguments, environment, repeated, write_json
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import LeakFinding, MemoryMonitor

HEAPS = (0, 100_000, 600_000, 1_500_000)  # objects
BUSY = (0, 2)  # processes beside the program
STEPS, STEP = 1_500, 0.004  # of the loop, and seconds of work in each
LEAK = 139 << 10
NAMED_BY, RATE, SHARE = 128, 0.20, 2.0  # step, share of the true rate, percent of the run's time


def measure(objects: int, busy: int, steps: int) -> Json:
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(busy)]
    try:
        return {"objects": objects, "busy": busy, **_run(objects, steps)}
    finally:
        for other in others:
            other.kill()
            other.wait()


def _run(objects: int, steps: int) -> Json:
    kept = records(objects)
    gc.collect()
    looks, named, history = Looks(), list[int](), list[bytes]()

    def note(finding: LeakFinding) -> None:
        if "history" in (finding.holder or ""):
            named.append(step)

    step, begun = 0, time.monotonic()
    with MemoryMonitor() as monitor:
        monitor.on_leak(note)
        for step in range(1, steps + 1):
            history.append(bytes([1 + step % 255]) * LEAK)
            work(STEP)
            monitor.step()
        rates = [one.rate_bytes for one in monitor.findings() if "history" in (one.holder or "")]
    wall, total = time.monotonic() - begun, looks.until(steps)
    return {
        "kept": len(kept),
        "named_at": min(named, default=None),
        "rate": rates[0] / LEAK if rates else None,
        "first_seconds": looks.until(GRACE_STEPS),
        "beyond_percent": 100 * max(0.0, total - GRACE) / wall,
    }


def limits(rows: list[Json]) -> list[Limit]:
    never = float("inf")
    named = [never if row["named_at"] is None else row["named_at"] for row in rows]
    off = [never if row["rate"] is None else abs(row["rate"] - 1) for row in rows]
    first = [row["first_seconds"] for row in rows]
    beyond = [row["beyond_percent"] for row in rows]
    return [
        number_limit("named by step, the latest", NAMED_BY, "", max(named), max(named)),
        number_limit("error of the rate, the largest", RATE, "", max(off), max(off)),
        number_limit(
            f"CPU of all looks in {GRACE_STEPS} steps", GRACE, "s", max(first), max(first)
        ),
        number_limit(f"and beyond {GRACE} s, of the run", SHARE, "%", max(beyond), max(beyond)),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    if options.child:
        objects, busy, steps = map(int, options.child.split(","))
        write_json(options.out, measure(objects, busy, steps))
        return
    steps = STEPS // 3 if options.quick else STEPS
    given = ["--threads", str(options.threads)]
    rows = []
    for busy in BUSY:
        for objects in HEAPS:
            rows += repeated(__file__, f"{objects},{busy},{steps}", given, 1)
            row = rows[-1]
            rate = "-" if row["rate"] is None else f"{row['rate']:.2f} x"
            print(
                f"{objects:>9,} objects, {busy} busy: named at step {row['named_at']}, rate {rate},"
                f" looks {row['first_seconds']:.2f} s, beyond {row['beyond_percent']:.1f} %",
                flush=True,
            )
    finish("heaps", options, environment(options.threads), {"rows": rows}, limits(rows))


if __name__ == "__main__":
    main()
