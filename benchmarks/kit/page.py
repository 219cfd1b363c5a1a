"""The page of all limits, docs/internals/limits.md, out of the results of the last runs.

python -m benchmarks.kit.page     # writes it; `make bench` does so at its end
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kit.harness import HERE, RESULTS, Json
from benchmarks.kit.limits import RUNS, Limit, reached

PAGE = HERE.parent / "docs" / "internals" / "limits.md"
#: the benchmarks whose results have another name
BENCHES = {"run_share": "share"}
HEAD = f"""# Limits, run by run

<!-- Written by `python -m benchmarks.kit.page` out of benchmarks/results. -->

Every benchmark that has limits, with what each of its last {RUNS} runs found. A figure is
`least / median` of many turns; where one figure stands alone, both are the same or there is only
one. "yes" means that the least and the median of every run are within the limit.
[How the figures were made](performance.md) says what was measured, and beside what.
"""


def page(results: Path = RESULTS) -> str:
    """The text of the page."""
    parts = [HEAD]
    for path in sorted(results.glob("*.json")):
        content = json.loads(path.read_text())
        if runs := [run for run in content.get("runs", []) if run["limits"]]:
            parts.append("\n".join(_section(path.stem, content["environment"], runs)))
    return "\n".join(parts)


def _section(name: str, facts: Json, runs: list[Json]) -> Iterator[str]:
    yield f"## {name}\n"
    machine = f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}"
    yield f"`make bench BENCHES={BENCHES.get(name, name)}` on {machine}.\n"
    for number, run in enumerate(runs, 1):
        when, load = run["date"][:16], run["load_average"][0]
        yield f"- Run {number}: revision {run['revision']}, {when}, load {load:.1f} when it began"
    columns = " | ".join(f"run {number}" for number in range(1, len(runs) + 1))
    yield f"\n| limit | allowed | {columns} | reached |"
    yield "| --- " * (len(runs) + 3) + "|"
    found = [{row["limit"]: Limit(**row) for row in run["limits"]} for run in runs]
    for limit, newest in found[-1].items():
        rows = [run.get(limit) for run in found]
        verdict = reached(row for row in rows if row)
        cells = [limit, newest.allowed, *map(_figures, rows), verdict.replace("NO", "**no**")]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _figures(row: Limit | None) -> str:
    if row is None:
        return "not measured"
    return row.by_min if row.by_min == row.by_median else f"{row.by_min} / {row.by_median}"


if __name__ == "__main__":
    PAGE.write_text(page())
