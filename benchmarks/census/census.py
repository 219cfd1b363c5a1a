"""What a census costs beside the ways people look for what grew.

    python -m benchmarks.census.census           # about two minutes; writes results/census.json
    python -m benchmarks.census.census --quick

The process holds torch, transformers, a small BERT and records in plain Python: some 450,000
objects of the collector. Each way is timed on that same heap in turns, one look a turn. Needs
transformers, objgraph and pympler.
"""

from __future__ import annotations

import gc
import io
import itertools
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import objgraph
import torch
import transformers
from pympler import muppy, summary

import memtools
from benchmarks.kit.harness import (
    Json,
    arguments,
    environment,
    interleave,
    pooled,
    repeated,
    statement,
    timing_table,
    write_json,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools._census.growth import GrowthCensus

OBJECTS = 450_000
OURS, FILTER = "memtools.census()", "gc.get_objects() + isinstance"
GROWTH = "GrowthCensus.look()"
ARRAYS = 600  # of NumPy, beside the objects
MS = 1e6
HISTORY = 2_000  # tensors in a list, as in a leak


class MoEBlock:
    def __init__(self) -> None:
        self.gate_history = [torch.empty(16, 8) for _ in range(HISTORY)]


def heap() -> list[Any]:
    """Brings the process to OBJECTS tracked objects."""
    bert = transformers.BertModel(transformers.BertConfig(num_hidden_layers=2))
    kept: list[Any] = [bert, MoEBlock()]
    gc.collect()
    lacking = OBJECTS - len(gc.get_objects())
    kept.append([{"tokens": [i], "at": (i, [])} for i in range(lacking // 4)])
    kept.append([np.zeros(2000) for _ in range(ARRAYS)])
    return kept


def by_isinstance() -> dict[Any, int]:
    """The loop of the forums."""
    found: dict[Any, int] = {}
    for obj in gc.get_objects():
        if isinstance(obj, torch.Tensor):
            key = tuple(obj.shape), obj.dtype, obj.device
            found[key] = found.get(key, 0) + 1
    return found


def by_objgraph() -> None:
    with redirect_stdout(io.StringIO()):
        objgraph.show_growth(limit=10)


def by_pympler() -> None:
    summarize: Callable[[object], object] = summary.summarize
    get_objects: Callable[[], object] = muppy.get_objects
    summarize(get_objects())


GROWTH_CENSUS, STEPS = GrowthCensus(least_rate=1024), itertools.count()


def by_growth() -> None:
    """One more look of the census that names what gains."""
    GROWTH_CENSUS.look(next(STEPS))


WAYS: dict[str, Callable[[], Any]] = {
    OURS: memtools.census,
    GROWTH: by_growth,
    FILTER: by_isinstance,
    "objgraph.show_growth()": by_objgraph,
}


def measure(seconds: float) -> Json:
    warnings.simplefilter("ignore")
    kept = heap()
    objects = memtools.census().objects
    runners = {name: statement("look()", look=look) for name, look in WAYS.items()}
    turns = interleave(runners, 1, seconds=seconds).turns
    slow = interleave({"pympler summary": statement("look()", look=by_pympler)}, 1,
                      seconds=0, least=2).turns  # fmt: skip
    before = memtools.census()
    kept[1].gate_history += [torch.empty(16, 8) for _ in range(300)]
    growth = memtools.census().diff(before)
    holders = interleave({"Growth.holders()": statement("look()", look=growth.holders)}, 1,
                         seconds=0, least=5).turns  # fmt: skip
    return {"turns": turns, "slow": slow | holders, "objects": objects}


def limits(samples: Any) -> list[Limit]:
    own = samples.least(OURS) / MS, samples.median(OURS) / MS
    growth = samples.least(GROWTH) / MS, samples.median(GROWTH) / MS
    return [
        number_limit(f"census of {OBJECTS:,} objects", 60.0, "ms", *own),
        number_limit(f"look at {OBJECTS:,} objects and {ARRAYS} arrays", 120.0, "ms", *growth),
    ]


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    if options.child:
        write_json(options.out, measure(options.seconds))
        return
    seconds = 5 if options.quick else 30
    given = ["--seconds", str(seconds), "--threads", str(options.threads)]
    results = repeated(__file__, "all", given, 1 if options.quick else 2)
    fast, slow = pooled(r["turns"] for r in results), pooled(r["slow"] for r in results)
    sections: Json = {
        "objects": [r["objects"] for r in results],
        "rows": fast.summary(FILTER),
        "slow": [
            {"name": name, "min_ns": slow.least(name), "median_ns": slow.median(name)}
            for name in slow.turns
        ],
    }
    print(timing_table(f"{results[0]['objects']:,} objects", sections["rows"]))
    print(timing_table("slow", sections["slow"]))
    finish("census", options, environment(options.threads), sections, limits(fast))


if __name__ == "__main__":
    main()
