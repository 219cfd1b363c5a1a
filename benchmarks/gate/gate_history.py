"""What recording gates costs, beside memcpy, torch, and the lists that people write.

    python -m benchmarks.gate.gate_history         # 3 minutes; writes results/gate_history.json
    python -m benchmarks.gate.gate_history --quick # 20 seconds; writes no JSON
    python -m benchmarks.gate.gate_history --only record

docs/internals/performance.md says what the figures mean and which limits they have.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
import torch

from benchmarks.gate.common import LARGE, MEMCPY, SMALL
from benchmarks.gate.limits import limits
from benchmarks.gate.process import MEMORY, import_time, memory, update, update_summary
from benchmarks.gate.timing import added, added_summary, record
from benchmarks.kit.harness import (
    Json,
    arguments,
    environment,
    pooled,
    repeated,
    table,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import finish


class Section(NamedTuple):
    """A part of the benchmark; `run` takes seconds and returns what one process found."""

    run: Callable[[float], Json]
    seconds: float
    processes: int = 1


SECTIONS = {
    "record_512x8": Section(record, 5, 3),
    "statistics_512x8": Section(partial(added, SMALL), 2, 3),
    "statistics_2048x64": Section(partial(added, LARGE), 5, 3),
    **{f"memory: {variant}": Section(partial(memory, variant), 0) for variant in MEMORY},
    "update_1": Section(update, 4),
    "import": Section(import_time, 2),
}


def chosen(only: str, quick: bool) -> list[str]:
    """The sections to run; a quick run leaves out most of those that take a process each."""
    left_out = {f"memory: {variant}" for variant in list(MEMORY)[1:]} if quick else set()
    return [name for name in SECTIONS if name.startswith(only) and name not in left_out]


def found(name: str, threads: int, quick: bool) -> list[Json]:
    """What the section's processes found. A quick run times in this process; memory never does."""
    section = SECTIONS[name]
    if quick and not name.startswith("memory"):
        return [section.run(section.seconds / 6)]
    options = ["--threads", str(threads), "--seconds", str(section.seconds)]
    return repeated(__file__, name, options, section.processes)


def summary(name: str, results: list[Json]) -> Any:
    """A section's rows for the JSON file, all its processes pooled."""
    if name.startswith("statistics"):
        kinds = list(results[0]["turns"])
        return [added_summary(k, pooled(r["turns"][k] for r in results)) for k in kinds]
    if "turns" not in results[0]:
        return results[0]
    samples = pooled(result["turns"] for result in results)
    if name.startswith("update"):
        return update_summary(samples)
    rows = samples.summary(MEMCPY)
    for row in rows:
        both = zip(samples.turns[row["name"]], samples.turns[MEMCPY], strict=True)
        excess = [taken - 1.1 * memcpy for taken, memcpy in both]
        row["median_excess_ns"] = statistics.median(excess)
    return rows


def shown(content: Any) -> str:
    """A section as a table: timings beside the first, or a line for each figure."""
    rows = content if isinstance(content, list) else [content]
    if "median_ratio" in rows[0]:
        return timing_table("", rows)
    cells = [[key, *(readable(row[key]) for row in rows)] for key in rows[0]]
    return table(cells[0], cells[1:])


def readable(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, SECTIONS[options.child].run(options.seconds))
        return
    facts = environment(options.threads)
    sections: Json = {}
    for name in chosen(options.only or "", options.quick):
        sections[name] = summary(name, found(name, options.threads, options.quick))
        print(f"{name}\n{shown(sections[name])}\n", flush=True)
    finish("gate_history", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
