"""Whether a program that is killed at a limit was killed when the last forecast said so.

    python -m benchmarks.leak.forecast_kill                 # all loops, 20 minutes; needs root
    python -m benchmarks.leak.forecast_kill --only notebook --keep /tmp/kills

Each loop runs under `memtools run` in a control group of its own, with a limit that it meets within
2,000 steps, and the kernel kills it there. The last forecast is the newest one in the record that
was made before the last twentieth of the steps. The loops of the leak set (benchmarks/leakset) run
twice for 2,000 steps: without a limit to learn what they take, and in the limit that they pass at
70 % of that run.
The program needs a control group of memory that it may divide, of version 1 or 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import memtools
from benchmarks.kit.harness import RESULTS, environment, table, write_json
from benchmarks.leakset.running import SCRIPTS
from memtools._record.figures import figures_of

MIB, GIB = 2**20, 2**30
LATE = 0.95  # Forecasts in the last twentieth of a run come too late to act on.
STEPS = 2000  # of a loop of the set
SHARE = 0.7  # of what it takes without a limit
LEAST = 16 * MIB  # A loop grows by so much between a quarter of that and then.
SECONDS = 300

NOTEBOOK = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
optimizer = torch.optim.AdamW(model.parameters())
predictions = []
for step in range(6000):
    batch = torch.randn(256, 64)
    prediction = model(batch)
    loss = (prediction - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    predictions.append(prediction)
"""
#: an agent that learns: a step of the optimizer is an episode, and episodes become longer
EPISODES = """
import torch
torch.manual_seed(0)
policy = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
history = []
for episode in range(4000):
    actions = []
    for _ in range(10 + episode // 6):
        chosen = torch.distributions.Categorical(logits=policy(torch.randn(8)))
        actions.append(chosen.log_prob(chosen.sample()))
    optimizer.zero_grad()
    (-torch.stack(actions).mean()).backward()
    optimizer.step()
    history.append(actions)
"""
#: a buffer that is allocated at once and written row by row
REPLAY = """
import numpy, torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
rows = numpy.zeros((8000, 2**18), numpy.uint8)
for step in range(8000):
    rows[step] = 1
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OWN = {
    "notebook": (NOTEBOOK, GIB),
    "episodes": (EPISODES, GIB),
    "replay": (REPLAY, 700 * MIB),
}
LEAKS = [name for name, truth in json.loads((SCRIPTS.parent / "index.json").read_text()).items()
         if truth["leaks"]]  # fmt: skip


@dataclass
class Killed:
    """One loop: when it was killed, and what the last forecast before had said."""

    name: str
    limit_bytes: int
    killed: int | None = None
    at: int | None = None
    low: float | None = None
    high: float | None = None
    forecasts: int = 0
    text: str = ""

    @property
    def is_inside(self) -> bool:
        """Whether the kill lies inside the forecast."""
        if None in (self.killed, self.at, self.low, self.high):
            return False
        return self.low <= self.killed - self.at <= self.high + 1  # type: ignore[operator]

    @property
    def ratio(self) -> float | None:
        """The steps that were left by the middle of the forecast, by those that were."""
        if None in (self.killed, self.at, self.low, self.high):
            return None
        return (self.low + self.high) / 2 / max(1, self.killed - self.at)  # type: ignore[operator]


# --- the group ------------------------------------------------------------------------------------


@contextlib.contextmanager
def group(limit: int | None) -> Iterator[Path]:
    """A control group below the one of this process, with a limit of memory."""
    root = Path("/sys/fs/cgroup")
    is_first = (root / "memory").is_dir()
    path = (root / "memory" if is_first else root) / f"forecast-{os.getpid()}"
    path.mkdir()
    try:
        if limit is not None:
            name = "memory.limit_in_bytes" if is_first else "memory.max"
            (path / name).write_text(f"{limit}\n")
        yield path
    finally:
        while left := (path / "cgroup.procs").read_text().split():  # workers of a killed program
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)
        path.rmdir()


def run(script: Path, record: Path, limit: int | None) -> None:
    """`memtools run` of a script in a group of its own, until it ends or is killed."""
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "memtools", "run", "--log", str(record), str(script)]
    command += ["--steps", str(STEPS)] if script.parent == SCRIPTS else []
    with group(limit) as path, tempfile.TemporaryDirectory() as folder:
        join = f'echo $$ > {path}/cgroup.procs; exec "$@"'
        subprocess.run(
            ["/bin/sh", "-c", join, "sh", *command],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
            timeout=SECONDS,
            check=False,
            stdout=record.with_suffix(".log").open("wb"),
            stderr=subprocess.STDOUT,
        )


def limit_of(name: str, out: Path) -> int | None:
    """The bytes that a loop of the leak set takes at 70 % of its steps; None if it grows by so
    little that what differs from run to run decides when it is killed."""
    record = out / f"{name}-free.mem"
    run(SCRIPTS / f"{name}.py", record, None)
    figures = figures_of(memtools.read_record(record))
    line = figures.line
    steps = figures.steps or 0
    known = list(zip(line.most["step"], line.most["cgroup_used"], strict=True))

    def until(share: float) -> int:
        return max(used for step, used in known if step <= share * steps and used < 2**62)

    limit = until(SHARE)
    return limit if limit - until(SHARE / 4) >= LEAST else None


# --- the forecast ---------------------------------------------------------------------------------


def judged(name: str, record: Path, limit: int) -> Killed:
    found = Killed(name, limit)
    read = memtools.read_record(record)
    figures = figures_of(read)
    if not figures.ending.by_memory(near=figures.near_limit):
        return found
    found.killed = figures.steps or 0
    for event in read.events:
        left = getattr(event.data, "steps_left", None)
        if event.kind != "finding" or not left or getattr(event.data, "over", True):
            continue
        if event.step is None or event.step > LATE * found.killed:
            continue
        found.forecasts += 1
        found.at, (found.low, found.high), found.text = event.step, left, event.text
    return found


HEADER = ("loop", "limit", "killed at", "last forecast", "at step", "of", "inside", "middle/true")


def row(one: Killed) -> list[str]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}"

    left = "-" if one.low is None else f"{number(one.low)} to {number(one.high)}"
    ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
    inside = "yes" if one.is_inside else "no"
    return [one.name, f"{one.limit_bytes / MIB:.0f} MiB", number(one.killed), left,
            number(one.at), str(one.forecasts), inside, ratio]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[*OWN, *LEAKS], metavar="NAME")
    parser.add_argument("--keep", type=Path, help="a folder for records and logs")
    parser.add_argument("--out", type=Path, help="where the JSON goes; by default results/")
    options = parser.parse_args()
    results = list[Killed]()
    with tempfile.TemporaryDirectory() as folder:
        out: Path = options.keep or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        for name in options.only or [*OWN, *LEAKS]:
            script, limit = SCRIPTS / f"{name}.py", None
            if name in OWN:
                text, limit = OWN[name]
                script = out / f"{name}.py"
                script.write_text(text)
            limit = limit or limit_of(name, out)
            if limit is None:
                print(f"{name}: grows by too little", file=sys.stderr, flush=True)
                continue
            run(script, out / f"{name}.mem", limit)
            results.append(judged(name, out / f"{name}.mem", limit))
            print("  ".join(row(results[-1])), file=sys.stderr, flush=True)
    print(table(HEADER, map(row, results)))
    killed = [one for one in results if one.killed is not None]
    inside = sum(one.is_inside for one in killed)
    longest = max((one.ratio or 0.0 for one in killed), default=0.0)
    print(f"inside: {inside} of {len(killed)}; longest: {longest:.2f} times the truth")
    path = options.out or (None if options.only else RESULTS / "forecast_kill.json")
    if path:
        write_json(path, {"environment": environment(1), "loops": [asdict(x) for x in results]})


if __name__ == "__main__":
    main()
