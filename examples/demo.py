"""The demo: each example trains as such loops are usually written, and then with memtools.

    python examples/demo.py                         at most 12 minutes on two cores
    python examples/demo.py --full                  longer runs, all layers, and one more example
    python examples/demo.py --only llm_grpo         one example; after -- come more options for it

Each run has its own process and the same stated limit. The demo prints the result of each run,
compares every loss and sample bit for bit, and writes a report of all records. The exit code is 1
if an example fails for another reason than memory, if a run with memtools does not finish, or if
its losses or samples differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memtools

EXAMPLES = Path(__file__).resolve().parent
# By its file: under -m the current folder would be searched for memtools first.
MEMTOOLS = [sys.executable, str(Path(memtools.__file__).parent / "__main__.py")]
UPDATE = re.compile(r"update (\d+) of (\d+), .*")
#: growth that reaches the limit later than this many times the updates of the run does not count
HORIZON = 20
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Way:
    """One way through an example: its options, and what people call it. One that is `free` runs
    without the limit that the others are under."""

    options: tuple[str, ...]
    label: str
    free: bool = False


@dataclass(frozen=True)
class Case:
    """An example and the ways through it; the first is what the others are compared with.

    `limit` is what counts as full. It is stated, not enforced, unless `enforced` names a limit that
    the example itself sets. Runs that finish must have the same losses if they are `compared`.
    `full` are more options for the long run, and `full_limit` is its limit, if that is another.
    With `workers` the memory of a run is that of all its processes. `prepare` is a program that
    runs before them, so that no run has more to do than the others.
    """

    name: str
    title: str
    intro: str
    limit: str
    ways: dict[str, Way]
    enforced: str = ""
    compared: bool = True
    workers: bool = False
    full: tuple[str, ...] = ()
    full_limit: str = ""
    only_full: bool = False
    prepare: str = ""
    model: bool = False  # whether it takes the language model out of its package


CASES = (
    Case(
        "moe_world_model",
        "A history of gates that grows",
        "A world model with mixture-of-experts layers learns to walk in a simulation. Every layer "
        "keeps the gates of each forward pass, for statistics.",
        "768 MiB",
        {
            "list": Way(("--history", "list"), "a Python list"),
            "memtools": Way(("--history", "memtools"), "GateHistory"),
        },
        full=("--updates", "1500"),
    ),
    Case(
        "llm_grpo",
        "Sixteen answers to each question",
        "A pretrained language model of 135 million parameters answers each question 16 times, and "
        "learns from the answers that are right (GRPO).",
        "1.2 GiB",
        {
            "naive": Way(("--cache", "naive"), "model.generate"),
            "by-hand": Way(("--cache", "by-hand"), "prompt computed once, its cache copied"),
            "memtools": Way(("--cache", "memtools"), "generate_group"),
        },
        full=("--updates", "8", "--train-layers", "0"),
        full_limit="4 GiB",  # AdamW's state of all layers is larger than any cache here
        model=True,
    ),
    Case(
        "motion_grpo",
        "A rollout that is kept for three epochs",
        "A diffusion policy that was trained on motion capture makes 8 motions in 50 steps, and "
        "learns from all 51 states of them three times (GRPO). A list of states keeps the graph of "
        "the whole rollout. The loss detaches the states: without that, the updates would train "
        "through the rollout.",
        "896 MiB",
        {
            "published": Way(("--rollout", "published"), "a list of states"),
            "by-hand": Way(("--rollout", "by-hand"), "a list of detached states"),
            "memtools": Way(("--rollout", "memtools"), "TrajectoryStore"),
        },
        full=("--updates", "8"),
        prepare="motion_policy.py",
    ),
    Case(
        "rl_generation",
        "A cache as long as the longest sequence",
        "A small model of bytes is pretrained on prose and then learns to spell (GRPO), with 16 "
        "samples for each passage.",
        "768 MiB",
        {
            "naive": Way(("--cache", "naive"), "a cache of maximum length"),
            "memtools": Way(("--cache", "pool"), "KVPool"),
        },
        only_full=True,
    ),
    Case(
        "molecule_gnn",
        "One molecule that does not fit",
        "A graph network learns from molecules of any size. One of 1,300 takes as much memory as "
        "75 usual ones.",
        "1 GiB",
        {
            "naive": Way(("--memory", "naive"), "the usual loop"),
            "memtools": Way(("--memory", "memtools"), "GradAccumulator"),
        },
        enforced="a limit of 128 MiB for training",
        compared=False,  # an atom counts once with memtools, and as its batch has it without
    ),
    Case(
        "imitation",
        "Decoded frames that fill the host",
        "A two-arm robot learns from camera images and joint angles to hand over a cube. Two "
        "workers read and decode the frames.",
        "2 GiB",
        {
            "free": Way(("--data", "usual", "--limit", "none"), "lru_cache, no limit", free=True),
            "usual": Way(("--data", "usual"), "lru_cache of 1,024 frames"),
            "by-hand": Way(("--data", "by-hand"), "numbers worked out by hand"),
            "memtools": Way(("--data", "memtools"), "H5Episodes and bounded"),
        },
        enforced="a limit of 640 MiB for training",
        workers=True,
        prepare="aloha.py",
    ),
)


# --- running --------------------------------------------------------------------------------------


@dataclass
class Ran:
    """One run: what the example wrote as JSON (None if it wrote nothing), the facts of its record
    (None if it left none), its exit status, the last line that it wrote to stderr, and the last
    update that it reported."""

    result: dict[str, Any] | None
    facts: dict[str, Any] | None
    status: int
    last_line: str
    update: int


def run(command: list[str], record: Path, limit: str) -> Ran:
    """Run an example to its end under `memtools run`, and pass on what it prints."""
    # Without the keys that would switch the monitor off or set it otherwise.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMTOOLS")}
    environment["OMP_WAIT_POLICY"] = "passive"
    watched = [*MEMTOOLS, "run", "--quiet", "--log", str(record), "--limit", limit, *command]
    update = sixth = 0
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "result.json"), Path(folder, "stderr")
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [*watched, "--progress", "--json", str(out)],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
            for line in process.stdout or ():
                match = UPDATE.fullmatch(line.rstrip())
                update = int(match[1]) if match else update
                if match is None or 6 * update // int(match[2]) > sixth:
                    print(f"  {record.stem:<24} {line.rstrip()}", flush=True)
                    sixth = 6 * update // int(match[2]) if match else sixth
            process.wait()
        said = errors.read_text(errors="replace")
        sys.stderr.write(said)
        lines = [line for line in said.splitlines() if line.strip()]
        result = json.loads(out.read_text()) if out.exists() else None
    facts = None
    if record.exists():
        explain = [*MEMTOOLS, "explain", "--json", str(record)]
        facts = json.loads(subprocess.check_output(explain, env=environment))
    return Ran(result, facts, process.returncode, lines[-1] if lines else "", update)


def passed_after(record: Path, limit: int) -> float | None:
    """Seconds from the record's start until the process passed the limit; None if it never did."""
    read = memtools.read_record(record)
    times, used = read.buckets.first_ns, read.buckets.most["rss"]
    over = (ns for ns, n in zip(times, used, strict=True) if limit < n < 2**63)  # above: no reading
    first = next(over, None)
    return None if first is None else (first - read.clock_ns) / 1e9


# --- words ----------------------------------------------------------------------------------------


def size(n: float) -> str:
    return f"{n / GIB:.2f} GiB" if n >= GIB else f"{n / MIB:.1f} MiB"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{seconds:.1f} s"


@dataclass(frozen=True)
class Outcome:
    """What happened to one run. Sizes are in bytes, times in seconds.

    `ended` is "finished", or how memory ended it, such as "out of memory in update 16". `failed`
    says how and why the example failed otherwise; then there are no other facts. `same` is "yes",
    where two runs differ, or "" if they are not compared. `growth` is per 1,000 updates.
    """

    case: Case
    way: Way
    ended: str = "finished"
    failed: str = ""
    updates: int = 0
    seconds: float = 0.0
    pace: float = 0.0
    peak: int = 0
    limit: int = 0
    growth: float | None = None
    passed_after: float | None = None
    generation_peak: int | None = None
    generation_cpu: float | None = None
    same: str = ""
    remark: str = ""

    @property
    def reaches_at(self) -> int | None:
        """The update in which growth reaches the limit; None if it does not grow that fast."""
        if self.growth is None or self.growth <= 0 or self.updates < 1:
            return None
        update = self.updates + round(1000 * max(0, self.limit - self.peak) / self.growth)
        return update if update <= HORIZON * self.updates else None

    def sentences(self) -> str:
        same = f"The losses are NOT the same: {self.same}." if self.same else ""
        same = "The losses are the same to the last bit." if self.same == "yes" else same
        generation = ""
        if self.generation_peak is not None and self.generation_cpu is not None:
            generation = f"Generation peaked at {size(self.generation_peak)} and took "
            generation += f"{duration(self.generation_cpu)} of processor time."
        return " ".join(filter(None, [self._fate(), generation, self.remark, same]))

    def _fate(self) -> str:
        if self.failed:
            return self.failed
        enforced, limit = self.case.enforced, size(self.limit)
        if self.ended != "finished":
            under = f", under {enforced}" if enforced else ""
            return f"{self.ended.capitalize()}{under}, after {duration(self.seconds)}."
        if self.passed_after is not None:
            peaked = "" if self.generation_peak else f" and peaked at {size(self.peak)}"
            return (
                f"Passed the limit of {limit} after {duration(self.passed_after)}{peaked}: where "
                "that limit is enforced, the run is killed there."
            )
        if self.reaches_at is not None and self.growth is not None:
            after = self.seconds + (self.reaches_at - self.updates) * self.pace
            return (
                f"Grows by {size(self.growth)} per 1,000 updates and held {size(self.peak)} after "
                f"{self.updates} updates. At that rate it reaches the limit of {limit} in update "
                f"{self.reaches_at:,}, {duration(after)} after its start (extrapolated)."
            )
        under = f" under {enforced}" if enforced else ""
        under = " without the limit" if self.way.free else under
        most = f"{size(self.peak)}{' in all processes' if self.case.workers else ''}"
        of = "" if enforced else f" of the {limit}"
        steady = "" if self.growth is None else ", and does not grow towards it"
        return f"Finished all {self.updates} updates{under} with at most {most}{of}{steady}."


def outcome(case: Case, way: Way, ran: Ran, record: Path, first: dict[str, Any] | None) -> Outcome:
    """The outcome of a run. `first`: the result that its own is compared with."""
    result, facts = ran.result, ran.facts
    by_memory = ""
    if facts is not None and (ran.status == -9 or case.enforced):
        ending = facts["ending"]
        worker = re.search("DataLoader worker .*(killed|exited unexpectedly)", ending["text"])
        by_memory = "out of memory" if ending["out_of_memory"] else ""
        by_memory = "a worker was killed" if worker else by_memory
        by_memory = "killed" if ran.status == -9 else by_memory
    if result is None and by_memory:
        result = {"ended": f"{by_memory} in update {ran.update + 1}", "losses": []}
    elif result is None or facts is None or (ran.status != 0 and not case.enforced):
        why = f": {ran.last_line}" if ran.last_line else ""
        failed = f"Failed with exit status {ran.status}{why}".rstrip(".") + "."
        return Outcome(case, way, ended="failed", failed=failed)
    assert facts is not None
    ended, updates = result.get("ended", "finished"), len(result["losses"])
    held = result.get("samples", {}).get("held_bytes", []) if case.workers else []
    process = facts["process"]["peak_bytes"] if facts["process"] else 0
    peak = facts["job_peak_bytes"] or 0 if case.workers else process
    phases = {phase["name"]: phase["peak_bytes"] for phase in facts["phases"]}
    compared = case.compared and first is not None and ended == "finished"
    limit = facts["used"]["limit_bytes"]
    return Outcome(
        case,
        way,
        ended,
        updates=updates,
        seconds=facts["seconds"],
        pace=result.get("seconds", facts["seconds"]) / max(1, updates),
        peak=max([peak, *held]),  # the monitor reads workers rarely, the example all the time
        limit=limit,
        growth=None if case.enforced else result.get("growth_bytes_per_1000_updates"),
        passed_after=None if case.enforced else passed_after(record, limit),
        generation_peak=phases.get("generation"),
        generation_cpu=result.get("sampling_cpu_seconds"),
        same=same(first, result) if compared and first is not None else "",
        remark=result.get("remark", ""),
    )


def same(one: dict[str, Any], other: dict[str, Any]) -> str:
    """ "yes", or where two runs differ; only models that sample have "tokens"."""
    if one["losses"] == other["losses"]:
        return "yes" if one.get("tokens") == other.get("tokens") else "the samples differ"
    pairs = list(zip(one["losses"], other["losses"], strict=False))
    update = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), len(pairs) + 1)
    return f"they differ from update {update}"


# --- the demo -------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The examples, with and without memtools.")
    parser.add_argument("--full", action="store_true", help="longer runs, and one more example")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="run one example")
    parser.add_argument("--updates", type=int, help="of each run; default: each example's own")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers; default 0")
    parser.add_argument("--report", type=Path, default=Path("report.html"), help="the page")
    parser.add_argument("--records", type=Path, help="keep the records in this folder")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("extra", nargs="*", help="after --: more options for one example")
    args = parser.parse_args()
    if args.extra and args.only is None:
        parser.error("options after -- are for one example: name it with --only")
    if importlib.util.find_spec("jinja2") is None:
        parser.error("the report needs jinja2, which is not installed: pip install jinja2")
    return args


def main() -> int:
    args = arguments()
    cases = [c for c in CASES if c.name == args.only or not (args.only or c.only_full > args.full)]
    results: dict[str, dict[str, Any]] = {}
    good, records = True, []
    with tempfile.TemporaryDirectory() as temporary:
        kept = args.records or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(cases, start=1):
            head = f"{number} of {len(cases)}: {case.title} ({case.name}.py, seed {args.seed})"
            print(f"{head}\n{case.intro}", flush=True)
            options = ["--seed", str(args.seed), *(case.full if args.full else ()), *args.extra]
            if args.updates is not None:
                options += ["--updates", str(args.updates)]
            if case.model and "--model" not in args.extra:
                options += ["--model", str(Path(temporary, "model"))]  # the first run makes it
            if case.prepare:  # if it fails, so do the runs, which say why
                subprocess.run([sys.executable, str(EXAMPLES / case.prepare)], check=False)
            limit = (args.full and case.full_limit) or case.limit
            results[case.name] = {}
            first = None
            stated = "" if case.enforced else f" (the stated limit is {limit})"
            lines = [f"{case.title}{stated}:"]
            for name, way in case.ways.items():
                record = kept / f"{case.name}-{name}.mem"
                command = [str(EXAMPLES / f"{case.name}.py"), *way.options, *options]
                ran = run(command, record, limit)
                done = outcome(case, way, ran, record, first)
                if first is None and not done.failed:
                    first = ran.result
                results[case.name][name] = ran.result
                records += [] if ran.facts is None else [memtools.read_record(record)]
                lines.append(f"  {way.label}: {done.sentences()}")
                good = good and not done.failed
            good = good and done.ended == "finished" and done.same in ("yes", "")
            print("\n" + "\n".join(lines) + "\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results))
    if records:
        from memtools.report import write_report

        written = write_report(
            records, args.report, title="The examples, with and without memtools"
        )
        print(f"Wrote {args.report} ({size(written)})")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
