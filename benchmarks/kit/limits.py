"""A limit that a figure is held against, the table of all of them, and how a benchmark ends."""

from __future__ import annotations

import argparse
import os
from typing import NamedTuple

from benchmarks.kit.harness import RESULTS, Json, table, write_json


class Limit(NamedTuple):
    """A limit, and whether it is reached by the least times and by the median ones."""

    limit: str
    allowed: str
    by_min: str
    by_median: str
    reached_by_min: bool
    reached_by_median: bool


def number_limit(what: str, allowed: float, unit: str, least: float, median: float) -> Limit:
    """A figure that is to be no larger than `allowed`."""
    text = [f"{value:.3g} {unit}" for value in (allowed, least, median)]
    return Limit(what, f"<= {text[0]}", text[1], text[2], least <= allowed, median <= allowed)


def at_least(what: str, allowed: float, least: float, median: float) -> Limit:
    """How many times better something is, that is to be no less than `allowed`."""
    text = [f"{value:.3g} x" for value in (least, median)]
    return Limit(what, f">= {allowed} x", text[0], text[1], least >= allowed, median >= allowed)


def limits_table(rows: list[Limit]) -> str:
    header = ("limit", "allowed", "by min", "by median", "reached?")
    verdicts = {(True, True): "yes", (False, False): "NO", (True, False): "by min only"}
    return table(
        header,
        ((*row[:4], verdicts.get((row[4], row[5]), "by median only")) for row in rows),
    )


def finish(
    name: str, options: argparse.Namespace, facts: Json, sections: Json, rows: list[Limit]
) -> None:
    """Prints the limits; writes all of it to results/<name>.json, or to where --out says. What ran
    with --only is a part, and what ran with --quick is to look at: they are written only when --out
    asks for it. A limit that is missed is printed and written, and is no error of the benchmark."""
    facts["load_average_after"] = os.getloadavg()
    print(f"{facts['cpu']}, torch {facts['torch']}")
    if rows:
        print(limits_table(rows))
    part = options.only or options.quick
    if out := options.out or (None if part else RESULTS / f"{name}.json"):
        content = {"environment": facts, "quick": options.quick, "sections": sections}
        write_json(out, {**content, "limits": [row._asdict() for row in rows]})
