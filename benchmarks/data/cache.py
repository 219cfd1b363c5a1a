"""ByteCache beside functools.lru_cache and cachetools: a hit, a miss that evicts, the limit in
workers.

    python -m benchmarks.data.cache [--quick] [--only hit|miss|limit] [--out FILE]

The functions do nothing, so that only the cache's own time is measured. functools.lru_cache bounds
entries and no bytes; cachetools' LRUCache with getsizeof bounds bytes. ByteCache and cachetools are
written in Python. The limit: four forked workers fill caches of their own with arrays of random
sizes, and the sizes of the arrays in the cache are added up by hand.
"""

from __future__ import annotations

import functools
import multiprocessing
import random
import sys
from collections.abc import Callable
from typing import Any

import cachetools
import numpy as np

from benchmarks.kit.harness import (
    Json,
    Runner,
    arguments,
    environment,
    interleave,
    statement,
    table,
    timing_table,
)
from benchmarks.kit.limits import Limit, finish, number_limit
from memtools.data import ByteCache

OURS, LRU, TOOLS = "ByteCache", "functools.lru_cache", "cachetools, getsizeof"
MIB = 1 << 20
KEYS = 512
#: what a call of each shape looks like, and one such call's arguments for the i-th key
SHAPES: dict[str, tuple[str, Callable[[int], tuple[Any, ...]]]] = {
    "one str": ("f(k)", lambda i: (f"clips/episode_{i:06d}.h5",)),
    "str and int": ("f(k[0], k[1])", lambda i: (f"clips/episode_{i % 20:06d}.h5", i)),
    "a keyword": ("f(k, frame=3)", lambda i: (f"clips/episode_{i:06d}.h5",)),
}


def cached(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The function under each cache, none of which is ever full."""
    tools: Any = cachetools.LRUCache(1 << 30, getsizeof=sys.getsizeof)
    return {
        LRU: functools.lru_cache(10**6)(function),
        OURS: ByteCache("1 GiB")(function),
        TOOLS: cachetools.cached(tools)(function),
    }


def hits(shape: str, seconds: float) -> list[Json]:
    """One call of a cached function whose result is in the cache; the keys take turns."""
    call, key = SHAPES[shape]
    keys = [key(i) for i in range(KEYS)]
    plain = [k if len(k) > 1 else k[0] for k in keys]
    runners: dict[str, Runner] = {}
    for name, function in cached(lambda *args, **kwargs: 1).items():
        for k in keys:
            function(*k, **({"frame": 3} if "frame" in call else {}))
        loop = f"for k in keys: {call}"
        timed = statement(loop, f=function, keys=plain)
        runners[name] = lambda n, timed=timed: timed(n // KEYS)  # type: ignore[misc]
    samples = interleave(runners, KEYS * 8, seconds=seconds, warm=KEYS, first=KEYS)
    return samples.summary(LRU)


def misses(seconds: float) -> list[Json]:
    """A call whose result is not in the cache, which is full and evicts the oldest one."""
    frame = np.zeros((64, 64), np.uint8)
    limit = 100 * sys.getsizeof(frame)

    def load(index: int) -> Any:
        return frame.copy()

    tools: Any = cachetools.LRUCache(limit, getsizeof=sys.getsizeof)
    functions = {
        OURS: ByteCache(limit)(load),
        TOOLS: cachetools.cached(tools)(load),
        "no cache": load,
    }
    counter = iter(range(10**12))
    runners = {
        name: statement("f(next(n))", f=function, n=counter) for name, function in functions.items()
    }
    samples = interleave(runners, 2000, seconds=seconds, warm=200, first=200)
    return samples.summary("no cache")


# --- the limit in four workers --------------------------------------------------------------------


def fill(seed: int, limit: int, values: int, queue: Any) -> None:
    """One worker: the most bytes that the arrays in its cache took at any time."""
    draw, most = random.Random(seed), 0
    for n in range(values):
        SHARED.put(draw.randrange(400), np.zeros(draw.randrange(1, limit // 8), np.uint8))
        if n % 10 == 0:
            most = max(most, sum(array.nbytes for array in SHARED.values()))
    queue.put(most)


SHARED = ByteCache(16 * MIB)


def in_workers(values: int) -> list[Json]:
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()
    processes = [
        context.Process(target=fill, args=(seed, 16 * MIB, values, queue)) for seed in range(4)
    ]
    for process in processes:
        process.start()
    rows = [{"limit": 16 * MIB, "most bytes of the arrays": queue.get()} for _ in processes]
    for process in processes:
        process.join()
    return rows


def limits(sections: Json) -> list[Limit]:
    rows = []
    for name, section in sections.items():
        if name.startswith("hit: "):
            ours = next(row for row in section if row["name"] == OURS)
            least, median = ours["min_ns"] / 1000, ours["median_ns"] / 1000
            rows.append(number_limit(f"a hit, {name[5:]}", 1.0, "us", least, median))
    if "limit" in sections:
        most = max(row["most bytes of the arrays"] / row["limit"] for row in sections["limit"])
        rows.append(
            number_limit("bytes in the caches of 4 workers", 1.0, "of the limit", most, most)
        )
    return rows


def main() -> None:
    options = arguments(__doc__).parse_args()
    facts = environment(options.threads)
    seconds = 0.5 if options.quick else 3.0
    makers: dict[str, Callable[[], list[Json]]] = {
        f"hit: {shape}": functools.partial(hits, shape, seconds) for shape in SHAPES
    }
    makers["miss"] = lambda: misses(seconds)
    makers["limit"] = lambda: in_workers(500 if options.quick else 2000)
    sections: Json = {}
    for name, make in makers.items():
        if options.only and not name.startswith(options.only):
            continue
        rows = sections[name] = make()
        if name == "limit":
            print(table(list(rows[0]), ([f"{value:,}" for value in row.values()] for row in rows)))
        else:
            print(timing_table(name, rows))
    finish("cache", options, facts, sections, limits(sections))


if __name__ == "__main__":
    main()
