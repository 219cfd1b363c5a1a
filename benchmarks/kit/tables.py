"""The tables of all limits and times, from the results of the last runs of each benchmark.

python -m benchmarks.kit.tables                  # of all
python -m benchmarks.kit.tables sampler cache    # of some

A figure is `least / median` of many turns; where one figure stands alone, both are the same or
there is only one. "yes" means that the least and the median of every run are within the limit.
"Beside" is the ratio of the least times, and the median of the ratios of turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit.harness import RESULTS, Json, timing_table
from benchmarks.kit.limits import Limit, reached

#: The benchmarks whose results have another name.
BENCHES = {"run_share": "share"}


def tables(name: str, results: Path = RESULTS) -> str:
    """The tables of one benchmark, by the name of its results."""
    content = json.loads((results / f"{name}.json").read_text())
    runs = [run for run in content.get("runs", []) if run["limits"]]
    found = ["\n".join(_limits(runs))] if runs else []
    found += _times(name, content.get("sections", {}))
    if not found:
        return ""
    return "\n".join(["\n".join(_head(name, content["environment"], content["runs"])), *found])


def _head(name: str, facts: Json, runs: list[Json]) -> Iterator[str]:
    yield f"## {name}\n"
    machine = f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}"
    yield f"`make bench BENCHES={BENCHES.get(name, name)}` on {machine}.\n"
    for number, run in enumerate(runs, 1):
        when, load = run["date"][:16], run["load_average"][0]
        yield f"- Run {number}: revision {run['revision']}, {when}, load {load:.1f} when it began"
    yield ""


def _limits(runs: list[Json]) -> Iterator[str]:
    columns = " | ".join(f"run {number}" for number in range(1, len(runs) + 1))
    yield f"| limit | allowed | {columns} | reached |"
    yield "| --- " * (len(runs) + 3) + "|"
    found = [{row["limit"]: Limit(**row) for row in run["limits"]} for run in runs]
    for limit, newest in found[-1].items():
        rows = [run.get(limit) for run in found]
        verdict = reached(row for row in rows if row)
        cells = [limit, newest.allowed, *map(_figures, rows), verdict.replace("NO", "**no**")]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _times(name: str, sections: Json) -> Iterator[str]:
    """A table for each section in which ways of doing a thing stand side by side."""
    for title, found in sections.items():
        rows = found.get("rows") if isinstance(found, dict) else found
        if isinstance(rows, list) and all(map(_is_timed, rows)):
            yield timing_table(name if title == "rows" else title, rows)


def _is_timed(row: object) -> bool:
    return isinstance(row, dict) and {"name", "min_ns", "median_ns"} <= row.keys()


def _figures(row: Limit | None) -> str:
    if row is None:
        return "not measured"
    return row.by_min if row.by_min == row.by_median else f"{row.by_min} / {row.by_median}"


if __name__ == "__main__":
    for each in sys.argv[1:] or sorted(path.stem for path in RESULTS.glob("*.json")):
        print(tables(each))
