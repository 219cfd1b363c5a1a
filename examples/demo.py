"""What `make demo` runs: every example twice, once as people write it and once with memtools.

Each variant trains in its own process from the same seed, under `memtools run` with the same stated
limit, which leaves a record of its memory. A table for each example says what its variants cost and
whether the losses (and what a model sampled) are the same, compared bit for bit; if they are not,
the exit status is 1. The last example is about who gets to the end under a limit that its allocator
meets; there the status is 1 if memtools does not. One page, report.html, shows all records.

    python examples/demo.py
    python examples/demo.py --only moe_world_model --updates 100 -- --env Pendulum-v1
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 2**20
UPDATE = re.compile(r"update (\d+) of (\d+), (.*)")
Result = dict[str, Any]
Show = Callable[[str], None]  # takes each line that a running example prints


@dataclass(frozen=True)
class Case:
    """An example and its variants; the first is what the others are compared with."""

    name: str
    holds: str  # what its result's held_bytes are of
    limit: str  # what counts as full: the monitor's percent and forecasts are of it
    variants: dict[str, list[str]]
    survival: bool = False  # a variant may run out of memory, and losses may differ

    @property
    def script(self) -> str:
        return f"{self.name}.py"


CASES = [
    Case(
        "moe_world_model",
        "gates",
        "768 MiB",
        {"list": ["--history", "list"], "memtools": ["--history", "memtools"]},
    ),
    Case(
        "rl_generation",
        "cache",
        "768 MiB",
        {"naive": ["--cache", "naive"], "memtools": ["--cache", "pool"]},
    ),
    Case(
        "molecule_gnn",
        "activations",
        "1 GiB",
        {"naive": ["--memory", "naive"], "memtools": ["--memory", "memtools"]},
        survival=True,
    ),
]


def run(case: Case, variant: str, arguments: list[str], show: Show, record: Path) -> Result:
    """Runs one variant to its end in a process of its own, which writes a record."""
    script = Path(__file__).with_name(case.script)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        options = [*case.variants[variant], "--progress", "--json", str(out), *arguments]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        monitor = ["-m", "memtools", "run", "--quiet", "--log", str(record), "--limit", case.limit]
        with subprocess.Popen(
            [sys.executable, *monitor, str(script), *options],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        ) as process:
            for line in process.stdout or ():
                show(line.rstrip())
        if process.returncode != 0 and not (case.survival and out.exists()):
            sys.exit(f"{case.script} ({variant}) failed with exit status {process.returncode}")
        result: Result = json.loads(out.read_text())
    return result


@contextmanager
def progress(variant: str) -> Iterator[Show]:
    """A live bar on a terminal where rich is installed, otherwise plain lines."""
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        plain = True
    else:
        plain = not sys.stdout.isatty()
    if plain:
        yield plain_lines(variant)
        return
    columns = (TextColumn("{task.fields[variant]:<10}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=None, variant=variant)

        def show(line: str) -> None:
            if match := UPDATE.fullmatch(line):
                done, total, state = match.groups()
                bar.update(task, completed=int(done), total=int(total), description=state)
            else:
                bar.console.print(f"  {line}", markup=False, highlight=False)

        yield show


def plain_lines(variant: str) -> Show:
    """Passes every line on, except the updates that do not reach another sixth of the run."""
    shown = 0

    def show(line: str) -> None:
        nonlocal shown
        if match := UPDATE.fullmatch(line):
            sixth = 6 * int(match[1]) // int(match[2])
            if sixth == shown:
                return
            shown = sixth
        print(f"  {variant:<10} {line}", flush=True)

    return show


def first_difference(one: Result, other: Result) -> int | None:
    """The first update, from 1, whose losses differ in any bit."""
    pairs = zip(one["losses"], other["losses"], strict=False)
    for update, (a, b) in enumerate(pairs, start=1):
        if a != b:
            return update
    lengths = len(one["losses"]), len(other["losses"])
    return None if lengths[0] == lengths[1] else min(lengths) + 1


def same(one: Result, other: Result) -> str:
    """Says yes, or where the two went apart; only models that sample have "tokens"."""
    update = first_difference(one, other)
    if update is not None:
        return f"NO, from update {update}"
    return "yes" if one.get("tokens") == other.get("tokens") else "NO, other samples"


def table(results: dict[str, Result], holds: str) -> str:
    costs = ("peak RSS MiB", f"{holds} MiB", "growth MiB/1,000 updates", "seconds")
    reference = next(iter(results.values()))
    rows = [("variant", *costs, "final loss", "same losses?")]
    for variant, result in results.items():
        rows.append(
            (
                variant,
                f"{result['peak_rss_bytes'] / MIB:.1f}",
                f"{max(result['samples']['held_bytes']) / MIB:.1f}",
                f"{result['growth_bytes_per_1000_updates'] / MIB:+.1f}",
                f"{result['seconds']:.1f}",
                f"{result['final_loss']:.6f}",
                "(reference)" if result is reference else same(reference, result),
            )
        )
    return aligned(rows)


def survival_table(results: dict[str, Result]) -> str:
    """Who got to the end, and what an update consisted of: `scale` is what the weights of its
    atoms add up to, and `spread` how many times as much one counts as another."""
    batch = ("molecules an update", "last one's scale", "spread of weights")
    rows = [("variant", "peak RSS MiB", "ended", *batch, "seconds", "validation loss")]
    for variant, result in results.items():
        made_of, loss = result["made_of"], result["valid_loss"]
        rows.append(
            (
                variant,
                f"{result['peak_rss_bytes'] / MIB:.1f}",
                result["ended"],
                str(made_of[0]["molecules"] if made_of else 0),
                f"{made_of[-1]['scale']:.2f}" if result["ended"] == "finished" else "-",
                f"{max((update['spread'] for update in made_of), default=1):.1f}",
                f"{result['seconds']:.1f}",
                "-" if loss is None else f"{loss:.4f}",
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """The first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def good(case: Case, results: dict[str, Result]) -> bool:
    """Whether memtools did what it is there for."""
    if case.survival:
        return bool(results["memtools"]["ended"] == "finished")
    return all_same(results)


def all_same(results: dict[str, Result]) -> bool:
    reference, *others = results.values()
    return all(same(reference, other) == "yes" for other in others)


def write_report(records: list[Path], page: Path) -> None:
    """One page of all records, by `memtools report`; its last line says what it wrote."""
    command = [sys.executable, "-m", "memtools", "report", *map(str, records), "-o", str(page)]
    if subprocess.run(command).returncode != 0:
        sys.exit(f"{page} could not be written")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, help="run this example alone")
    parser.add_argument("--updates", type=int, help="default: each example's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write all results there")
    parser.add_argument("--report", metavar="PATH", default="report.html", type=Path)
    parser.add_argument("--records", metavar="FOLDER", type=Path, help="keep the records there")
    parser.add_argument("extra", nargs="*", help="after --: options for the example")
    options = parser.parse_args()
    if options.extra and options.only is None:
        parser.error("options after -- are those of one example: say which by --only")
    arguments = ["--seed", str(options.seed), *options.extra]
    if options.updates is not None:
        arguments += ["--updates", str(options.updates)]

    everything: dict[str, dict[str, Result]] = {}
    records: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = options.records or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        for case in CASES:
            if options.only not in (None, case.name):
                continue
            print(f"{case.name}, seed {options.seed}, limit {case.limit}:", flush=True)
            results = everything[case.name] = {}
            for variant in case.variants:
                records.append(kept / f"{case.name}-{variant}.mem")
                with progress(variant) as show:
                    results[variant] = run(case, variant, arguments, show, records[-1])
            told = survival_table(results) if case.survival else table(results, case.holds)
            print(f"\n{told}\n", flush=True)
        write_report(records, options.report)
    if options.json:
        Path(options.json).write_text(json.dumps(everything))
    fine = [good(case, everything[case.name]) for case in CASES if case.name in everything]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
