"""`memtools demo`: one training loop that leaks, twice under a real limit of memory."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtools import MemtoolsError
from memtools._base.size import format_bytes
from memtools._base.text import aligned, sentence, shown

if TYPE_CHECKING:
    from memtools._record.figures import Figures

MIB = 2**20
WIDTH = 100
LOOP = '''\
"""Train a small autoencoder. The outputs of every step are kept: 1 MiB a step."""

import collections

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 512))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.outputs = []

    def training_step(self, inputs):
        outputs = self.model(inputs)
        loss = nn.functional.mse_loss(outputs, inputs)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.outputs.append(outputs.detach())
        return loss.item()


torch.manual_seed(0)
torch.set_num_threads(1)
trainer = Trainer()
for step in range(1, 251):
    loss = trainer.training_step(torch.randn(512, 512))
    if step % 20 == 0:
        print(f"step {step}: loss {loss}", flush=True)
'''
LEAKY, FIXED = "self.outputs = []", "self.outputs = collections.deque(maxlen=10)"
#: What the loop may take beyond the import of torch; without a leak it takes some 120 MiB. A group
#: counts resident memory (RssAnon), RLIMIT_DATA counts allocated memory (VmData).
ROOM = 224 * MIB
IMPORT = """\
import re, torch
sizes = re.findall(r"(RssAnon|VmData):\\s+(\\d+)", open("/proc/self/status").read())
print(torch.__version__, *(1024 * int(kib) for _, kib in sorted(sizes)))
"""


class Demo:
    """See a training loop run out of memory, and the same loop with the fix.

    It runs a loop that leaks under `memtools run`, and under a limit that the kernel enforces: a
    control group if one can be made, else RLIMIT_DATA. Then it runs the loop with the fix that the
    finding names. This takes half a minute and needs only torch. The loops, their records and a
    page with both curves are written to a folder. At the end it prints how five larger examples
    ended on the authors' machine.
    """

    name = "demo"

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "-o",
            "--output",
            type=Path,
            default=Path("memtools-demo"),
            metavar="FOLDER",
            help="where loops, records and the page are written (default: memtools-demo)",
        )

    def run(self, args: argparse.Namespace) -> int:
        from memtools._cli.limited import interrupt_on_signals

        interrupt_on_signals()
        folder: Path = args.output
        by, limit = _limit()
        _write_loops(folder)
        return int(not _show(folder, by, limit))


# --- the two runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """A run of the loop: its exit status, the lines that it printed, the figures of its record."""

    status: int
    lines: list[str]
    figures: Figures


def _limit() -> tuple[str, int]:
    """Return what enforces the limit, and the limit in bytes: what torch takes, and some more.
    Raises MemtoolsError without torch, or where so much memory is not there."""
    from memtools._base.limits import left_of, limits_of_process, nearest_limit
    from memtools._cli.limited import GROUP, enforced_by
    from memtools._core import Probe

    if util.find_spec("torch") is None:
        raise MemtoolsError(
            "the demo trains with torch, which is not installed; run pip install 'torch>=2.11'"
        )
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise MemtoolsError(f"torch cannot be imported: {why}")
    version, resident, data = done.stdout.split()
    by = enforced_by()
    limit = int(resident) + ROOM if by == GROUP else int(data) + ROOM
    limit = -(-limit // (64 * MIB)) * 64 * MIB
    lefts = [left_of(*nearest_limit(Probe("/", True).host()))]
    lefts += [limit - used for used, limit in limits_of_process().values()]
    left = min(left for left in lefts if left is not None)
    if left < limit:
        raise MemtoolsError(
            f"the demo needs {format_bytes(limit)} of memory, only {format_bytes(left)} are left"
        )
    _say(f"torch {version}; a limit of {format_bytes(limit)}, enforced by {by}")
    return by, limit


def _write_loops(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
        for name, text in (("leaky", LOOP), ("fixed", LOOP.replace(LEAKY, FIXED))):
            (folder / f"{name}.py").write_text(text)
            (folder / f"{name}.mem").unlink(missing_ok=True)
    except OSError as error:
        raise MemtoolsError(
            f"{error.filename} cannot be written: {error.strerror}; "
            "name another folder: memtools demo -o FOLDER"
        ) from None


def _run(folder: Path, name: str, limit: int) -> Ran:
    """Run a loop under `memtools run` and the limit, and pass on what it prints."""
    from memtools._cli.limited import limited
    from memtools._cli.records import read
    from memtools._record.figures import figures_of

    # Without the keys that would switch the monitor off or set it otherwise.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMTOOLS")}
    command = [sys.executable, "-m", "memtools", "run", "-o", f"{name}.mem", f"{name}.py"]
    lines = []
    with limited(command, limit, cwd=folder, env=environment, stdout=subprocess.PIPE) as process:
        print(f"\n$ memtools run -o {name}.mem {name}.py", flush=True)
        for line in process.stdout or ():
            lines.append(line.rstrip("\n"))
            print(lines[-1], flush=True)
        status = process.wait()
        # While its control group is there, whose counters say what killed it.
        return Ran(status, lines, figures_of(read(str(folder / f"{name}.mem"))))


def _show(folder: Path, by: str, limit: int) -> bool:
    """Run both loops, and say what happened; return whether it was what the demo promises."""
    print(f"\n$ cd {shown(str(folder))}")
    leaky = _run(folder, "leaky", limit)
    said = _first_finding(leaky.figures)
    killed = leaky.status == -signal.SIGKILL
    ran_out = killed or leaky.figures.ending.out_of_memory is not None
    how = "Killed" if killed else "Out of memory" if ran_out else f"Exit status {leaky.status}"
    steps, found = leaky.figures.steps or 0, ""
    if said is not None:
        before = steps - said[0]
        found = f", {before:,} steps after memtools named {said[1]} (step {said[0]})"
    _say(f"{how} after step {steps:,}{found}.")
    print("\n$ memtools explain leaky.mem")
    _say(sentence(leaky.figures.headline()))
    print(f"...\n\nThe fix:\n-        {LEAKY}\n+        {FIXED}")
    fixed = _run(folder, "fixed", limit)
    same = fixed.lines[: len(leaky.lines)] == leaky.lines
    finished = fixed.status == 0
    figures = fixed.figures
    used = figures.used if figures.used and figures.used.source == "cgroup" else figures.process
    peak = "" if used is None else f", with at most {format_bytes(used.peak_bytes)}"
    end = "Finished all" if finished else f"Exit status {fixed.status} after"
    _say(
        f"{end} {figures.steps:,} steps under the same limit of {format_bytes(limit)}{peak}. The "
        f"{len(leaky.lines)} losses that both printed are {'' if same else 'NOT '}the same to the "
        "last digit."
    )
    _write_page(folder, [leaky, fixed], by, limit)
    print("\n" + "\n".join(table(json.loads(rescues()))))
    _say("To run them on this machine, in a clone: make demo FULL=1")
    return ran_out and said is not None and finished and same


def _first_finding(figures: Figures) -> tuple[int, str] | None:
    """The step of the first finding that names a holder, and the holder."""
    from memtools._leak.finding import LeakFinding

    for event in figures.record.events:
        if isinstance(event.data, LeakFinding) and event.data.holder and event.step is not None:
            return event.step, event.data.holder
    return None


def _write_page(folder: Path, runs: list[Ran], by: str, limit: int) -> None:
    from memtools._cli.limited import GROUP
    from memtools.report import write_report

    path = folder / "demo.html"
    path.unlink(missing_ok=True)
    title = f"One training loop twice in {format_bytes(limit)}"
    try:
        size = write_report([ran.figures.record for ran in runs], path, title=title)
    except MemtoolsError as error:  # without jinja2
        _say(f"No picture: {error}.")
    else:
        drawn = "both curves and the limit" if by == GROUP else "both curves"
        print(f"\nWrote {shown(str(path))} ({format_bytes(size)}): {drawn}")


def _say(text: str) -> None:
    import textwrap

    width = min(WIDTH, shutil.get_terminal_size().columns)
    print("\n" + textwrap.fill(shown(text), width, break_on_hyphens=False), flush=True)


# --- the table of rescues -------------------------------------------------------------------------


def rescues() -> str:
    """Return the outcomes of the last full run of examples/demo.py, which wrote them, as JSON."""
    return (resources.files("memtools._cli") / "rescues.json").read_text(encoding="utf-8")


def table(run: dict[str, Any]) -> Iterator[str]:
    """The lines of a table of rescues, at most 60 columns wide.

    Args:
        run: the date, torch's version, and the `rescues`: title, limit, and how each way ended.
    """
    yield "Five larger examples on the authors' machine,"
    yield f"{run['date']} (torch {run['torch']}, {run['cores']} cores):"
    for rescue in run["rescues"]:
        yield f"\n{rescue['title']} ({rescue['limit']})"
        rows = []
        for way in rescue["ways"]:
            peak = way["peak_bytes"]
            rows.append((way["label"], way["ended"], "" if peak is None else format_bytes(peak)))
        yield from aligned(rows, right=[2])
