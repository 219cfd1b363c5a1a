"""What part of a program's processor time `memtools run` takes, by the clocks of its threads.

    python -m benchmarks.cli.share            # one minute; writes results/run_share.json
    python -m benchmarks.cli.share --quick    # 10 seconds; writes no JSON

Five runs of a program that trains. Beside another load the program gets less of a processor, while
the sampling thread continues by the clock on the wall: both shares are larger then.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.kit.harness import Json, arguments, environment
from benchmarks.kit.limits import Limit, finish, number_limit

RUNS = 5
SCRIPT = """
import json, sys, time
import torch
from memtools._monitor import inprocess
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(24)))
batch = torch.randn(64, 256)
seconds = float(sys.argv[1])
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
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
used = time.process_time_ns() - used
print(json.dumps({"steps": steps, "sampler": (sampler.cpu_ns - own) / used, "step": in_step / used,
                  "us": used / steps / 1e3}))
"""


def run_once(seconds: float) -> Json:
    """The parts of the program's processor time, and how long a step is in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(SCRIPT)
        command = [sys.executable, "-m", "memtools", "run", "--quiet", "train.py"]
        done = subprocess.run([*command, str(seconds)], cwd=folder, check=True, capture_output=True)
    found: Json = json.loads(done.stdout)
    return found | {"all": found["sampler"] + found["step"]}


def limits(sections: Json) -> list[Limit]:
    rows = []
    for part, name, allowed in (("sampler", "the sampling thread", 1), ("all", "all of it", 2)):
        shares = [100 * found[part] for found in sections["training"]]
        least, median = min(shares), statistics.median(shares)
        rows.append(number_limit(f"training: {name}", allowed, "%", least, median))
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = environment(options.threads)
    seconds = 2.0 if options.quick else 10.0
    sections: Json = {"training": [run_once(options.seconds or seconds) for _ in range(RUNS)]}
    finish("run_share", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
