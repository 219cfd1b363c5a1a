"""What `memtools run` costs an unchanged training script, beside plain Python.

    python benchmarks/run.py              # two minutes; writes results/run.json
    python benchmarks/run.py --quick      # 40 seconds, to look at

Both run the same script, one after the other in processes of their own, in changing order. The
script trains in steps of about 10 ms and times its own steps; what starting costs is told apart.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import Json, Samples, arguments, environment, timing_table
from _limits import Limit, finish

STEPS, WARM = 150, 20
SCRIPT = f"""
import sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(160, 512)
times = []
for step in range({STEPS + WARM}):
    begun, cpu = time.perf_counter_ns(), time.process_time_ns()
    optimizer.zero_grad()
    (model(batch) - batch).square().mean().backward()
    optimizer.step()
    times.append((time.perf_counter_ns() - begun, time.process_time_ns() - cpu))
for wall, cpu in times[{WARM}:]:
    print(wall, cpu)
"""


def one(command: list[str], folder: str) -> tuple[list[int], list[int], float]:
    """Of each step: wall and CPU time of the process in ns; and the seconds of the whole run."""
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begun
    pairs = [line.split() for line in done.stdout.splitlines()]
    return [int(wall) for wall, _ in pairs], [int(cpu) for _, cpu in pairs], seconds


def measure(seconds: float) -> tuple[Samples, Samples, Json]:
    """Turns of steps by wall clock and by CPU time; start and end by the whole run's seconds."""
    wall, cpu, whole = Samples({}), Samples({}), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        run = [sys.executable, "-m", "memtools", "run", "--quiet"]
        ways = {
            "python": [sys.executable, str(script)],
            "memtools run": [*run, str(script)],
            "memtools run --": [*run, "--", sys.executable, str(script)],
        }
        order, shuffle = list(ways), random.Random(0).shuffle
        end, rounds = time.perf_counter() + seconds, 0
        while rounds < 3 or time.perf_counter() < end:
            shuffle(order)
            for name in order:
                walls, cpus, took = one(ways[name], folder)
                wall.turns.setdefault(name, []).append(statistics.median(walls))
                cpu.turns.setdefault(name, []).append(statistics.fmean(cpus))
                whole.setdefault(name, []).append(took)
            rounds += 1
    starts = {
        name: {"min_s": min(times), "median_s": statistics.median(times)}
        for name, times in whole.items()
    }
    return wall, cpu, {"rounds": rounds, "whole run": starts}


def limits(wall: list[Json], cpu: list[Json]) -> list[Limit]:
    rows = []
    for what, found in (("step, wall clock", wall), ("step, CPU time of the process", cpu)):
        for row in found:
            if row["name"] == "python":
                continue
            least, median = row["ratio_of_mins"] - 1, row["median_ratio"] - 1
            by_min, by_median = (f"{100 * share:+.2f} %" for share in (least, median))
            name = f"{row['name']}: {what}"
            reached = least <= 0.01, median <= 0.01
            rows.append(Limit(name, "<= +1 %", by_min, by_median, reached[0], reached[1]))
    return rows


def main() -> int:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = environment(options.threads)
    wall, cpu, rest = measure(options.seconds or (40.0 if options.quick else 110.0))
    sections: Json = {"wall": wall.summary("python"), "cpu": cpu.summary("python"), **rest}
    for name in ("wall", "cpu"):
        print(f"a step, {name}\n{timing_table(sections[name], 'python')}\n", flush=True)
    print(rest)
    rows = limits(sections["wall"], sections["cpu"])
    finish("run", options, facts, sections, rows)
    return 0 if all(row.reached_by_min for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
