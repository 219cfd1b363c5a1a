"""What recording gates costs, against memcpy, torch, and the lists and rings people write.

    python -m benchmarks.gate.gate_history         # 3 minutes; writes results/gate_history.json
    python -m benchmarks.gate.gate_history --quick      # 20 seconds, to look at
    python -m benchmarks.gate.gate_history --only record

docs/internals/performance.md says what the figures mean and which limits they are held against.
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
from benchmarks.gate.process import LAYERS, MEMORY, import_time, memory, update, update_summary
from benchmarks.gate.timing import added, added_summary, record
from benchmarks.kit.harness import (
    Json,
    Samples,
    arguments,
    environment,
    pooled,
    repeated,
    table,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import finish

# --- the whole -----------------------------------------------------------------------------------


class Section(NamedTuple):
    """A part of the benchmark; `run` is given seconds and returns what one process found."""

    run: Callable[[float], Json]
    seconds: float
    processes: int = 1


SECTIONS = {
    "record_512x8": Section(partial(record, SMALL, False), 5, 3),
    "record_512x8_cached": Section(partial(record, SMALL, True), 2, 3),
    "record_2048x64": Section(partial(record, LARGE, False), 5, 3),
    "statistics_512x8": Section(partial(added, SMALL), 4, 3),
    "statistics_2048x64": Section(partial(added, LARGE), 5, 3),
    **{f"memory: {variant}": Section(partial(memory, variant), 0) for variant in MEMORY},
    **{f"update_{layers}": Section(partial(update, layers), 4) for layers in LAYERS},
    "import": Section(import_time, 2),
}


def chosen(only: str, quick: bool) -> dict[str, Section]:
    """The sections to run; a quick run leaves out most of those that take a process each."""
    left_out = {f"memory: {variant}" for variant in (MEMORY[1], *MEMORY[3:])} if quick else set()
    return {
        name: section
        for name, section in SECTIONS.items()
        if name.startswith(only) and name not in left_out
    }


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
    rows = samples.summary(next(iter(samples.turns)))
    if name.startswith("record"):
        for row in rows:
            row["median_excess_ns"] = statistics.median(excess(samples, row["name"]))
    return rows


def excess(samples: Samples, name: str) -> list[float]:
    """Turn by turn, what a way of recording takes beyond 1.1 x memcpy."""
    both = zip(samples.turns[name], samples.turns[MEMCPY], strict=True)
    return [taken - 1.1 * memcpy for taken, memcpy in both]


def shown(content: Any) -> str:
    """A section as a table: rows that are alike as rows, otherwise a line for each figure."""
    if isinstance(content, dict):
        content = [content]
    elif "median_ratio" in content[0]:
        return timing_table(content, content[0]["name"])
    if len(content) > len(MEMORY):
        return table([*content[0]], ([readable(v) for v in row.values()] for row in content))
    cells = [[key, *(readable(row[key]) for row in content)] for key in content[0]]
    return table(cells[0], cells[1:])


def readable(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else "" if value is None else str(value)


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
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
