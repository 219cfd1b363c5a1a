"""The limits that figures are compared with, their table, and how a benchmark ends.

A run reaches a limit if both the least and the median of its times are within it. A limit is
reached if each of the last RUNS runs reaches it. A missed limit is a result and not a failure: the
exit status of a benchmark only shows whether it could measure.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.kit.harness import RESULTS, Json, table, write_json

#: A results file keeps the limits of so many runs.
RUNS = 3


class Limit(NamedTuple):
    """A limit, and whether the least times and the median ones reach it."""

    limit: str
    allowed: str
    by_min: str
    by_median: str
    reached_by_min: bool
    reached_by_median: bool


def number_limit(what: str, allowed: float, unit: str, least: float, median: float) -> Limit:
    """A figure that must be at most `allowed`."""
    text = [f"{value:.3g} {unit}" for value in (allowed, least, median)]
    return Limit(what, f"<= {text[0]}", text[1], text[2], least <= allowed, median <= allowed)


def at_least(what: str, allowed: float, least: float, median: float) -> Limit:
    """How many times better something is, which must be at least `allowed`."""
    text = [f"{value:.3g} x" for value in (least, median)]
    return Limit(what, f">= {allowed} x", text[0], text[1], least >= allowed, median >= allowed)


def reached(runs: Iterable[Limit]) -> str:
    """The verdict on one limit in one run, or in several."""
    found = list(runs)
    both = [row.reached_by_min and row.reached_by_median for row in found]
    if all(both):
        return "yes"
    if any(both):
        return f"in {sum(both)} of {len(both)} runs"
    for word, sides in (
        ("by min only", [row.reached_by_min for row in found]),
        ("by median only", [row.reached_by_median for row in found]),
    ):
        if all(sides):
            return word
    return "NO"


def limits_table(rows: list[Limit]) -> str:
    header = ("limit", "allowed", "by min", "by median", "reached?")
    return table(header, ((*row[:4], reached([row])) for row in rows))


def runs_in(path: Path) -> list[Json]:
    """The limits of the last runs in a results file, the oldest first; [] without a file."""
    return list(json.loads(path.read_text()).get("runs", [])) if path.exists() else []


def finish(
    name: str, options: argparse.Namespace, facts: Json, sections: Json, rows: list[Limit]
) -> None:
    """Prints the limits, and writes everything to results/<name>.json, or to the file of --out.
    Runs with --only or --quick are written only with --out. The file has the sections of this run,
    and the limits of the last RUNS runs."""
    facts["load_average_after"] = os.getloadavg()
    print(f"{facts['cpu']}, torch {facts['torch']}")
    if rows:
        print(limits_table(rows))
    part = options.only or options.quick
    if out := options.out or (None if part else RESULTS / f"{name}.json"):
        limits = [row._asdict() for row in rows]
        when = {key: facts[key] for key in ("revision", "date", "load_average")}
        content = {"environment": facts, "quick": options.quick, "sections": sections}
        write_json(out, {**content, "runs": [*runs_in(out), {**when, "limits": limits}][-RUNS:]})
