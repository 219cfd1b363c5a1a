"""What the KV-cache pool costs and saves, beside caches people write and those of transformers.

    python -m benchmarks.kv.kv_cache           # some minutes; writes results/kv_cache.json
    python -m benchmarks.kv.kv_cache --quick   # a minute or two; writes no JSON
    python -m benchmarks.kv.kv_cache --only update

docs/internals/performance.md says what the figures mean and which limits they have.
Needs transformers, and 10 GiB of memory.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not spin
import torch
import transformers

from benchmarks.kit.harness import (
    Json,
    Samples,
    arguments,
    environment,
    repeated,
    table,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import finish
from benchmarks.kv.attention import ATTENTION, forks
from benchmarks.kv.limits import limits
from benchmarks.kv.pages import HOLDERS, footprint
from benchmarks.kv.rollout import OURS as GROUP
from benchmarks.kv.rollout import PLAIN, WAYS, rollout
from benchmarks.kv.update import START, update

ROLLOUTS = 2  # processes of each way

SECTIONS: dict[str, Callable[[float], Json]] = {
    **{f"update, {rows} rows at {START}": partial(update, rows) for rows in (4, 16)},
    **ATTENTION,
    "forks": forks,
    **{f"footprint: {name}": partial(footprint, name) for name in HOLDERS},
    **{f"rollout: {name}": partial(rollout, name) for name in WAYS},
}


def chosen(only: str, quick: bool) -> list[str]:
    """The sections to run; the ways of a rollout take turns ROLLOUTS times."""
    names = [name for name in SECTIONS if name.startswith(only)]
    turns = [name for name in names if name.startswith("rollout")]
    rest = [name for name in names if name not in turns]
    if quick:
        return rest + [name for name in turns if name.endswith((PLAIN, GROUP))]
    return rest + turns * ROLLOUTS


def summary(result: Json) -> Any:
    """A section's content of the JSON file."""
    if "turns" not in result:
        return result
    samples = Samples(result["turns"])
    return samples.summary(next(iter(samples.turns)))


def rollout_rows(results: dict[str, list[Json]]) -> list[Json]:
    """The processes of each way pooled: CPU time, elapsed time and the largest peak."""
    return [
        {
            "name": name.removeprefix("rollout: "),
            "turns": len(runs),
            "min_ns": min(run["cpu_ns"] for run in runs),
            "median_ns": statistics.median(run["cpu_ns"] for run in runs),
            "wall_min_ns": min(run["wall_ns"] for run in runs),
            "above_bytes": max(run["above_bytes"] for run in runs),
            "least_above_bytes": min(run["above_bytes"] for run in runs),
            "answers": " ".join(sorted({run["answers"] for run in runs})),
        }
        for name, runs in results.items()
    ]


def shown(content: Any) -> str:
    """A section as a table: timings beside the first, or the figures of each row."""
    rows = content if isinstance(content, list) else content["at"]
    if "median_ratio" in rows[0]:
        return timing_table("", rows)
    return table([*rows[0]], ([f"{value:,}" if type(value) is int else str(value)
                               for value in row.values()] for row in rows))  # fmt: skip


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, SECTIONS[options.child](options.seconds))
        return
    facts = {**environment(options.threads), "transformers": transformers.__version__}
    sections: Json = {}
    rollouts: dict[str, list[Json]] = {}
    given = ["--threads", str(options.threads), "--seconds", "1" if options.quick else "5"]
    for name in chosen(options.only or "", options.quick):
        result = repeated(__file__, name, given, 1)[0]
        if name.startswith("rollout"):
            rollouts.setdefault(name, []).append(result)
            print(f"{name}: {result}\n", flush=True)
            continue
        sections[name] = summary(result)
        print(f"{name}\n{shown(sections[name])}\n", flush=True)
    if rows := rollout_rows(rollouts):
        sections["rollout"] = rows
        print(f"rollout\n{shown(rows)}\n")
    finish("kv_cache", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
