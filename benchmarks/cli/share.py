"""What part of a program's processor time `memtools run` takes, by the clocks of its threads.

    python -m benchmarks.cli.share            # two minutes; writes results/run_share.json
    python -m benchmarks.cli.share --quick    # 20 seconds, to look at

Five runs of each of two programs, which train and which only compute: there, calls of modules are
heard throughout. Beside another load a program gets less of a processor while the sampling thread
goes on by the clock on the wall, so the parts are larger then. What hearing a call takes is timed
in one process, beside torch's own hooks.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.kit.harness import Json, Samples, arguments, environment, interleave, timing_table
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools import _core

RUNS, DEPTH = 5, 200
SCRIPT = """
import json, sys, time
import torch
from memtools._monitor import inprocess
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(24)))
batch = torch.randn(64, 256)
trains, seconds = sys.argv[1] == "training", float(sys.argv[2])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
monitor, in_step = inprocess._running[0], 0
step = monitor.step

def timed(n=1):
    global in_step
    begin = time.thread_time_ns()
    step(n)
    in_step += time.thread_time_ns() - begin

monitor.step = timed
sampler = monitor._last.sampler
steps, own, used = 0, sampler.cpu_ns, time.process_time_ns()
end = time.monotonic() + seconds
while time.monotonic() < end:
    steps += 1
    if trains:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    else:
        with torch.no_grad():
            model(batch)
used = time.process_time_ns() - used
print(json.dumps({"steps": steps, "sampler": (sampler.cpu_ns - own) / used, "step": in_step / used,
                  "us": used / steps / 1e3}))
"""


def run_once(kind: str, seconds: float) -> Json:
    """The parts of the program's processor time, and how long a step is in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "memtools", "run", "--quiet", "train.py"]
        done = subprocess.run(
            [*command, kind, str(seconds)], cwd=folder, check=True, capture_output=True
        )
    found: Json = json.loads(done.stdout)
    return found | {"all": found["sampler"] + found["step"]}


class Nothing(torch.nn.Module):
    def forward(self, x: int) -> int:
        return x


def calls(seconds: float) -> Samples:
    """A call of a module, in a model of 200: as it is, heard, and with torch's hooks."""
    layers = [Nothing() for _ in range(DEPTH)]
    every = torch.nn.modules.module

    class Model(torch.nn.Module):
        def forward(self, x: int) -> int:
            for layer in layers:
                x = layer(x)
            return x

    model = Model()

    def runner(begin: Callable[[], Callable[[], object]]) -> Callable[[int], float]:
        def run(n: int) -> float:
            end = begin()
            took = statement(n)
            end()
            return took / DEPTH

        return run

    def statement(n: int) -> float:
        begun = time.perf_counter_ns()
        for _ in range(n):
            model(1)
        return time.perf_counter_ns() - begun

    def heard() -> Callable[[], object]:
        main = threading.get_ident()
        _core._hear_calls(torch.nn.Module.__call__, lambda module: None, main)
        return lambda: _core._hear_calls(None, None, 0)

    def hooked() -> Callable[[], object]:
        handles = [
            every.register_module_forward_pre_hook(lambda module, args: None),
            every.register_module_forward_hook(lambda module, args, out: None, always_call=True),
        ]

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    ways = {"plain": lambda: lambda: None, "heard": heard, "torch's hooks": hooked}
    runners = {name: runner(begin) for name, begin in ways.items()}
    return interleave(runners, 5, seconds=seconds)


def limits(sections: Json) -> list[Limit]:
    rows = []
    for kind in ("training", "inference"):
        for part, name, allowed in (("sampler", "the sampling thread", 1), ("all", "all of it", 2)):
            shares = [100 * found[part] for found in sections[kind]]
            least, median = min(shares), statistics.median(shares)
            rows.append(number_limit(f"{kind}: {name}", allowed, "%", least, median))
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = environment(options.threads)
    seconds = 2.0 if options.quick else 10.0
    sections: Json = {
        kind: [run_once(kind, options.seconds or seconds) for _ in range(RUNS)]
        for kind in ("training", "inference")
    }
    rows = calls(seconds).summary("plain")
    print(f"a call of a module\n{timing_table(rows, 'plain')}\n", flush=True)
    sections["a call of a module"] = rows
    finish("run_share", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
