"""What `memtools run` costs an unchanged training script, beside plain Python.

    python -m benchmarks.cli.run           # two minutes; writes results/run.json
    python -m benchmarks.cli.run --quick   # 40 seconds; writes no JSON

The same script runs in three processes at once. They take turns: each trains a few steps of about
10 ms and writes how long they took, so that other work of the machine affects all three alike. Five
sets of processes are pooled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.kit.harness import Json, Samples, arguments, environment, interleave, timing_table
from benchmarks.kit.limits import Limit, finish

STEPS, STARTS, SETS = 4, 5, 5
SCRIPT = """
import sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(160, 512)
for line in sys.stdin:
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    for step in range(int(line)):
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        optimizer.step()
    print(time.perf_counter_ns() - wall, time.process_time_ns() - cpu, flush=True)
"""


def ways(script: str) -> dict[str, list[str]]:
    run = [sys.executable, "-m", "memtools", "run", "--quiet"]
    return {
        "python": [sys.executable, script],
        "memtools run": [*run, script],
        "memtools run --": [*run, "--", sys.executable, script],
    }


def turn(process: subprocess.Popen[str], cpu: list[float]) -> Callable[[int], int]:
    """Has the process train n steps; ns by the wall clock. The CPU time of a step goes to `cpu`,
    with that of the sampling thread."""
    assert process.stdin is not None
    assert process.stdout is not None
    to, back = process.stdin, process.stdout

    def runner(n: int) -> int:
        print(n, file=to, flush=True)
        wall, used = map(int, back.readline().split())
        cpu.append(used / n)
        return wall

    return runner


def steps(seconds: float) -> tuple[Samples, Samples]:
    """Times of a step by the wall clock, and CPU time of the process."""
    cpu: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        pipe = subprocess.PIPE
        started = {
            name: subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True)
            for name, command in ways("train.py").items()
        }
        runners = {name: turn(p, cpu.setdefault(name, [])) for name, p in started.items()}
        wall = interleave(runners, STEPS, seconds=seconds, first=20)
        for process in started.values():
            process.communicate()
    return wall, Samples({name: turns[1:] for name, turns in cpu.items()})  # less `first`


def starts() -> Samples:
    """An empty program, from its start to its end."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "empty.py").write_text("")

        def runner(command: list[str]) -> Callable[[int], int]:
            def run(n: int) -> int:
                begun = time.perf_counter_ns()
                for _ in range(n):
                    subprocess.run(command, cwd=folder, check=True)
                return time.perf_counter_ns() - begun

            return run

        runners = {name: runner(command) for name, command in ways("empty.py").items()}
        return interleave(runners, 1, seconds=0, least=STARTS)


def limits(wall: list[Json]) -> list[Limit]:
    rows = []
    for row in wall:
        if row["name"] == "python":
            continue
        least, median = row["ratio_of_mins"] - 1, row["median_ratio"] - 1
        by_min, by_median = (f"{100 * share:+.2f} %" for share in (least, median))
        name = f"{row['name']}: what it adds to a step"
        rows.append(Limit(name, "<= +1 %", by_min, by_median, least <= 0.01, median <= 0.01))
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = environment(options.threads)
    seconds = 25.0 if options.quick else 90.0
    wall, cpu = Samples({}), Samples({})
    # The addresses of a process may make its steps up to 10 % longer, in any of the three.
    for _ in range(SETS):
        for pool, more in zip((wall, cpu), steps(options.seconds or seconds / SETS), strict=True):
            pool.extend(more)
    found = {"step, wall clock": wall, "step, CPU time": cpu, "an empty program": starts()}
    sections: Json = {name: samples.summary("python") for name, samples in found.items()}
    for name, rows in sections.items():
        print(timing_table(name, rows), flush=True)
    held = limits(sections["step, wall clock"])
    finish("run", options, facts, sections, held)


if __name__ == "__main__":
    main()
