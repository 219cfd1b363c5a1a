"""What all looks of a monitor take, in the first 512 steps of a loop that leaks and after them.

    python -m benchmarks.census.looks           # about two minutes; writes results/looks.json
    python -m benchmarks.census.looks --quick

The process holds torch and records in plain Python, 166,000 objects of the collector or more, and a
list gains 16 KiB a step, so each look walks the heap. The time of a look is the CPU time of the
thread in LeakWatch.look(): readings, the walk, names, findings.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from benchmarks.kit.harness import Json, arguments, environment, repeated, write_json
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import MemoryMonitor
from memtools._monitor.leakwatch import LeakWatch

OBJECTS = 166_000
GRACE_STEPS, GRACE = 512, 1.5  # the seconds of CPU that all looks of the first steps may take
SHARE = 1.0  # percent of the run's time that they may take beyond that
STEPS, STEP = 6_000, 0.004  # of the loop, and seconds of work in each
LEAK = 1 << 14


def heap() -> list[Any]:
    """Brings the process to at least OBJECTS tracked objects."""
    gc.collect()
    lacking = max(0, OBJECTS - len(gc.get_objects()))
    return records(lacking)


def records(objects: int) -> list[Any]:
    """Dicts, tuples and lists, as many as the collector tracks so many objects of."""
    return [{"tokens": [i], "at": (i, [])} for i in range(objects // 4)]


class Looks:
    """The CPU time of looks, in seconds, by their step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self._look = LeakWatch.look
        looks = self

        def timed(watch: LeakWatch, step: int) -> None:
            begun = time.thread_time()
            try:
                looks._look(watch, step)
            finally:
                looks.steps.append(step)
                looks.seconds.append(time.thread_time() - begun)

        LeakWatch.look = timed  # type: ignore[assignment,method-assign]

    def until(self, step: int) -> float:
        return sum(s for at, s in zip(self.steps, self.seconds, strict=True) if at <= step)


def work(seconds: float) -> None:
    """Use so much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def measure(steps: int) -> Json:
    kept, looks, history = heap(), Looks(), list[torch.Tensor]()
    objects = len(gc.get_objects())
    begun = time.monotonic()
    with MemoryMonitor() as monitor:
        for _ in range(steps):
            history.append(torch.zeros(LEAK // 4))
            work(STEP)
            monitor.step()
        found = [str(finding) for finding in monitor.findings()]
    wall = time.monotonic() - begun
    total = looks.until(steps)
    return {
        "objects": objects,
        "kept": len(kept),
        "first_seconds": looks.until(GRACE_STEPS),
        "seconds": total,
        "wall_seconds": wall,
        "beyond_percent": 100 * max(0.0, total - GRACE) / wall,
        "percent": 100 * total / wall,
        "longest_ms": 1e3 * max(looks.seconds),
        "found": found,
    }


def limits(rows: list[Json]) -> list[Limit]:
    first = sorted(row["first_seconds"] for row in rows)
    beyond = sorted(row["beyond_percent"] for row in rows)
    middle = len(rows) // 2
    return [
        number_limit(
            f"CPU of all looks in {GRACE_STEPS} steps", GRACE, "s", first[0], first[middle]
        ),
        number_limit(f"and beyond {GRACE} s, of the run", SHARE, "%", beyond[0], beyond[middle]),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, measure(int(options.seconds)))
        return
    steps = STEPS // 4 if options.quick else STEPS
    given = ["--seconds", str(steps), "--threads", str(options.threads)]
    rows = repeated(__file__, "all", given, 1 if options.quick else 3)
    for row in rows:
        print(
            f"{row['objects']:,} objects, {row['wall_seconds']:.1f} s: looks {row['seconds']:.2f} s"
            f" ({row['percent']:.1f} %), in the first {GRACE_STEPS} steps"
            f" {row['first_seconds']:.2f} s, the longest {row['longest_ms']:.0f} ms;"
            f" {row['found'][0]}"
        )
    finish("looks", options, environment(options.threads), {"rows": rows}, limits(rows))


if __name__ == "__main__":
    main()
