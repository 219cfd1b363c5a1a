"""What the KV-cache pool costs and saves, beside caches people write and those of transformers.

    python -m benchmarks.kv.kv_cache           # some minutes; writes results/kv_cache.json
    python -m benchmarks.kv.kv_cache --quick      # a minute or two, to look at
    python -m benchmarks.kv.kv_cache --only update

docs/internals/performance.md says what the figures mean and which limits they are held against.
Needs transformers, and 10 GiB of memory.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
from benchmarks.kv.attention import KINDS, forks, over_a_fork, over_views
from benchmarks.kv.limits import limits
from benchmarks.kv.pages import HOLDERS, cycles, footprint, generations
from benchmarks.kv.rollout import OURS as GROUP
from benchmarks.kv.rollout import PLAIN, WAYS, rollout
from benchmarks.kv.update import update

MS = 1e6
ROLLOUTS = 2  # processes of each way


class Section(NamedTuple):
    """A part of the benchmark; `run` is given seconds and returns what one process found."""

    run: Callable[[float], Json]
    seconds: float = 0
    quick: bool = True  # part of a quick run


SECTIONS = {
    **{
        f"update, {rows} rows at {at}": Section(partial(update, rows, at), 5, quick=rows == 4)
        for rows in (4, 16)
        for at in (1024, 4000)
    },
    **{
        f"attention, {tokens} tokens, {kind}": Section(
            partial(over_views, tokens, kind), 5, quick=tokens == 512 and "float32" not in kind
        )
        for kind in KINDS
        for tokens in (512, 2048, 4096)
        if not KINDS[kind].read
        if tokens == 2048 or not (KINDS[kind].eager or (tokens == 4096 and "float32" in kind))
    },
    **{
        f"fork attention, {kind}": Section(partial(over_a_fork, kind), 5, quick="GQA" not in kind)
        for kind in KINDS
    },
    "forks": Section(forks, 5),
    **{f"footprint: {name}": Section(partial(footprint, name)) for name in HOLDERS},
    **{
        f"generations: {kind}": Section(partial(generations, kind))
        for kind in ("plain", "fork", "fork, 512 to 1,024 tokens", "torch.empty")
    },
    "cycles": Section(partial(cycles, 10_000), quick=False),
    **{
        f"rollout: {name}": Section(partial(rollout, name), quick=name in (PLAIN, GROUP))
        for name in WAYS
    },
}


def chosen(only: str, quick: bool) -> list[str]:
    """The sections to run; the ways of a rollout take turns ROLLOUTS times."""
    names = [n for n, s in SECTIONS.items() if n.startswith(only) and (s.quick or not quick)]
    turns = [n for n in names if n.startswith("rollout")]
    rest = [n for n in names if n not in turns]
    return rest + turns * (1 if quick else ROLLOUTS)


def found(name: str, threads: int, quick: bool) -> Json:
    """What a process of its own found."""
    seconds = SECTIONS[name].seconds / (6 if quick else 1)
    options = ["--threads", str(threads), "--seconds", str(seconds)]
    return repeated(__file__, name, options, 1)[0]


def summary(result: Json) -> Any:
    """A section's content of the JSON file."""
    if "turns" not in result:
        return result
    samples = Samples(result.pop("turns"))
    rows = samples.summary(next(iter(samples.turns)))
    return {**result, "rows": rows} if result else rows


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
    """A section as a table: timings beside the first, or a line for each figure."""
    if isinstance(content, list) and "median_ratio" in content[0]:
        return timing_table(content, content[0]["name"])
    if isinstance(content, list):
        return table([*content[0]], ([readable(v) for v in row.values()] for row in content))
    parts = [shown(v) for v in content.values() if isinstance(v, list) and v]
    cells = [(k, readable(v)) for k, v in content.items() if not isinstance(v, list)]
    return "\n".join([*parts, *([table(("", ""), cells)] if cells else [])])


def readable(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, SECTIONS[options.child].run(options.seconds))
        return
    facts = {**environment(options.threads), "transformers": transformers.__version__}
    sections: Json = {}
    rollouts: dict[str, list[Json]] = {}
    for name in chosen(options.only or "", options.quick):
        result = found(name, options.threads, options.quick)
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
