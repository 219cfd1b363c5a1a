"""Five rescues: each example as such loops are usually written, and then with memtools.

    python examples/demo.py                         all five, in some 30 minutes on two cores
    python examples/demo.py --only llm_grpo         one of them; after -- come more options for it

Every run has its own process, under a limit of memory that the kernel enforces: the usual loop runs
out of it. Losses are compared to the last digit, as far as both runs got. The exit code is 1 if a
run with memtools does not finish or has other losses, or if an example fails for another reason.
The table at the end is also written to rescues.json in the folder of -o; `memtools demo` prints the
copy in memtools/_cli.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memtools
from memtools._base.size import parse_bytes
from memtools._base.text import duration
from memtools._cli.demo import rescues, table
from memtools._cli.limited import GROUP, RLIMIT, enforced_by, interrupt_on_signals, limited
from memtools._record.figures import Figures, figures_of

EXAMPLES = Path(__file__).resolve().parent
UPDATE = re.compile(r"update (\d+) of (\d+), RSS [\d.]+ MiB, (.*)")
LINES = 10  # of progress that are printed of a run, at most


@dataclass(frozen=True)
class Case:
    """An example and the ways through it: by the name of each, its options and its label.

    `limit` is that of all processes of a run, unless the example sets a limit `of_its_own`. With
    `workers` only a control group can enforce it. Runs have the same losses if they are `compared`.
    `prepare` is a program that runs before them, without a limit.
    """

    name: str
    title: str
    limit: str
    ways: dict[str, tuple[str, tuple[str, ...]]]
    of_its_own: bool = False
    workers: bool = False
    compared: bool = True
    prepare: tuple[str, ...] = ()


CASES = (
    Case(
        "moe_world_model",
        "A history of gates that grows",
        "640 MiB",
        {
            "list": ("list", ("--history", "list", "--updates", "1000")),
            "memtools": ("GateHistory", ("--history", "memtools", "--updates", "1000")),
        },
    ),
    Case(
        "llm_grpo",
        "16 answers to each question",
        "1.3 GiB",
        {
            "naive": ("generate", ("--cache", "naive")),
            "by-hand": ("copied cache", ("--cache", "by-hand")),
            "memtools": ("generate_group", ("--cache", "memtools")),
        },
        prepare=("smollm.py", "{folder}/model"),
    ),
    Case(
        "motion_grpo",
        "A rollout kept for three epochs",
        "896 MiB",
        {
            "published": ("list of states", ("--rollout", "published")),
            "by-hand": ("detached list", ("--rollout", "by-hand")),
            "memtools": ("TrajectoryStore", ("--rollout", "memtools")),
        },
        prepare=("motion_policy.py",),
    ),
    Case(
        "molecule_gnn",
        "One molecule too large",
        "128 MiB for training",
        {
            "naive": ("usual loop", ("--memory", "naive")),
            "memtools": ("GradAccumulator", ("--memory", "memtools")),
        },
        of_its_own=True,
        compared=False,  # an atom counts once with memtools, and as its batch has it without
    ),
    Case(
        "imitation",
        "Decoded frames that fill the host",
        "896 MiB",
        {
            "usual": ("lru_cache", ("--data", "usual")),
            "by-hand": ("sized by hand", ("--data", "by-hand")),
            "memtools": ("H5Episodes", ("--data", "memtools")),
        },
        workers=True,
        prepare=("aloha.py",),
    ),
)


@dataclass
class Outcome:
    """How a run ended, the highest use of memory if it finished, and its losses by update."""

    label: str
    ended: str
    seconds: float
    good: bool
    peak_bytes: int | None = None
    losses: dict[int, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"label": self.label, "ended": self.ended, "peak_bytes": self.peak_bytes,
                "seconds": round(self.seconds)}  # fmt: skip


class TimeLeft:
    """How long the runs that are left will take, from how long they took in the last full run."""

    def __init__(self, cases: list[Case]) -> None:
        last = {case["name"]: case["ways"] for case in json.loads(rescues())["rescues"]}
        self.expected = [
            float(way["seconds"])
            for case in cases
            for way in last.get(case.name, len(case.ways) * [{"seconds": 60}])
        ]
        self.done, self.began, self.this = 0, time.monotonic(), time.monotonic()

    def next_run(self) -> None:
        self.done, self.this = self.done + 1, time.monotonic()

    def __str__(self) -> str:
        before = sum(self.expected[: self.done])
        pace = (self.this - self.began) / before if before else 1.0
        left = pace * sum(self.expected[self.done :]) - (time.monotonic() - self.this)
        return f"about {duration(left)} left" if left > 0 else "slower than the last full run"


def run(case: Case, way: str, folder: Path, extra: list[str], left: TimeLeft) -> Outcome:
    """Run one way of an example to its end, and pass on what it prints."""
    label, options = case.ways[way]
    record, out = folder / f"{case.name}-{way}.mem", folder / f"{case.name}-{way}.json"
    for path in (record, out):
        path.unlink(missing_ok=True)
    # Without the keys that would switch the monitor off or set it otherwise.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMTOOLS")}
    command = [sys.executable, "-m", "memtools", "run", "-o", str(record)]
    # A limit of its own is narrow: what memtools takes to trace steps would not fit.
    command += ["--no-trace"] if case.of_its_own else []
    command += [str(EXAMPLES / f"{case.name}.py"), *options]
    if case.name == "llm_grpo":
        command += ["--model", str(folder / "model")]
    command += [*extra, "--progress", "--json", str(out)]
    limit = None if case.of_its_own else parse_bytes(case.limit, "the limit")
    began, last_line, drawn = time.monotonic(), "", -1
    losses: dict[int, str] = {}
    with limited(
        command,
        limit,
        cwd=folder,  # where there is no other memtools
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        for line in map(str.rstrip, process.stdout or ()):
            match = UPDATE.fullmatch(line)
            if match is None:
                if line and not line.startswith(("memtools:", " ")):
                    last_line = line
                print(f"  {line}", flush=True)
                continue
            losses[int(match[1])] = match[3]
            if LINES * int(match[1]) // int(match[2]) > drawn:
                drawn = LINES * int(match[1]) // int(match[2])
                print(f"  {label}: update {match[1]} of {match[2]}, {left}", flush=True)
        status = process.wait()
    seconds = time.monotonic() - began
    result = json.loads(out.read_text()) if out.exists() else {}
    figures = figures_of(memtools.read_record(record)) if record.exists() else None
    ended = out_of_memory(status, figures, result, max(losses, default=0) + 1)
    if ended:
        return Outcome(label, ended, seconds, False, losses=losses)
    if status != 0 or figures is None:
        return Outcome(label, f"failed: {last_line}", seconds, False)
    print("".join(f"  {label}: {text}\n" for text in [result.get("remark")] if text), end="")
    used = figures.used if figures.used and figures.used.source == "cgroup" else figures.process
    peak = None if used is None else used.peak_bytes
    return Outcome(label, "finished", seconds, True, peak, losses)


def out_of_memory(status: int, figures: Figures | None, result: dict[str, Any], update: int) -> str:
    """How memory ended a run; "" if it did not."""
    if result.get("ended", "finished") != "finished":
        return str(result["ended"])
    if status == -9:
        return f"killed in update {update}"
    text = "" if figures is None else figures.ending.text
    if re.search("DataLoader worker .*(killed|exited unexpectedly)", text):
        return f"worker killed in update {update}"
    if figures is not None and figures.ending.out_of_memory:
        return f"out of memory in update {update}"
    return ""


def compared(case: Case, outcomes: list[Outcome]) -> None:
    """Compare the losses of the last outcome with those of all before, as far as both got."""
    new = outcomes[-1]
    if not case.compared or not new.good:
        return
    pairs = [
        (new.losses[update], loss)
        for one in outcomes[:-1]
        for update, loss in one.losses.items()
        if update in new.losses
    ]
    if pairs:
        new.good = all(ours == theirs for ours, theirs in pairs)
        new.ended = f"finished, {'same' if new.good else 'OTHER'} losses"


def prepare(case: Case, folder: Path) -> None:
    """Make what all runs of an example need; if that fails, so do the runs, which say why."""
    if case.prepare and not (case.name == "llm_grpo" and (folder / "model/config.json").exists()):
        script, *words = (word.format(folder=folder) for word in case.prepare)
        subprocess.run([sys.executable, str(EXAMPLES / script), *words], check=False)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Five examples, with and without memtools.")
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("memtools-demo"), metavar="FOLDER",
        help="where records and rescues.json are written (default: memtools-demo)",
    )  # fmt: skip
    parser.add_argument("extra", nargs="*", help="after --: more options for one example")
    args = parser.parse_args()
    if args.extra and args.only is None:
        parser.error("options after -- are for one example: name it with --only")
    return args


def main() -> int:
    import torch

    args = arguments()
    interrupt_on_signals()
    by = enforced_by()
    cases = [case for case in CASES if args.only in (None, case.name)]
    for case in [case for case in cases if case.workers and by != GROUP]:
        print(f"{case.name} is left out: no control group can be made here, which limits workers")
        cases.remove(case)
    folder: Path = args.output.resolve()
    folder.mkdir(exist_ok=True)
    left, good = TimeLeft(cases), True
    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "cores": len(os.sched_getaffinity(0)),
        "rescues": [],
    }
    for number, case in enumerate(cases, start=1):
        limit = f"{case.limit}, {RLIMIT if case.of_its_own else by}"
        print(f"\n{number} of {len(cases)}: {case.title} ({case.name}.py; {limit})", flush=True)
        prepare(case, folder)
        outcomes: list[Outcome] = []
        for way in case.ways:
            outcomes.append(run(case, way, folder, args.extra, left))
            compared(case, outcomes)
            left.next_run()
            print(f"  {outcomes[-1].label}: {outcomes[-1].ended}", flush=True)
        good = good and outcomes[-1].good
        good = good and not any(one.ended.startswith("failed") for one in outcomes)
        ways = [one.as_json() for one in outcomes]
        rescue = {"name": case.name, "title": case.title, "limit": limit, "ways": ways}
        facts["rescues"].append(rescue)
        (folder / "rescues.json").write_text(json.dumps(facts, indent=1) + "\n")
    print("\n" + "\n".join(table(facts)))
    records = f"{args.output}/{args.only or cases[0].name}-*.mem" if cases else ""
    print(f"\nWrote {args.output}/rescues.json and the records; a page: memtools report {records}")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except (OSError, memtools.MemtoolsError) as error:
        sys.exit(f"examples/demo.py: {error}")
