"""Pages: what a short prompt with many samples occupies, what later generations take, and whether
10,000 of them leave anything behind."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import DynamicCache, StaticCache

from benchmarks.kit.harness import Json
from benchmarks.kv.common import NANO, TINY, Geometry, Pair, append, filled, views
from benchmarks.kv.memory import Memory, map_lines, memory, minor_faults
from benchmarks.kv.update import config
from memtools import KVLease, KVPool

# --- a prompt of 128 tokens and 16 samples --------------------------------------------------------

PROMPT, SAMPLES = 128, 16


class Held(NamedTuple):
    """A cache that holds the prompt for all samples: how it appends, and what it counts itself."""

    append: Callable[[Pair], object]
    physical: Callable[[], int | None]
    keep: Any


def hold_fork(prompt: Pair) -> Held:
    pool = NANO.pool(4096, SAMPLES)
    parent = filled(pool, prompt)
    lease = parent.fork(SAMPLES)
    return Held(lambda new: append(lease, new), lambda: pool.stats().physical_bytes, parent)


def hold_rows(prompt: Pair) -> Held:
    """Without sharing: every sample has its own prompt."""
    pool = NANO.pool(4096, SAMPLES)
    lease = filled(pool, repeated(prompt))
    return Held(lambda new: append(lease, new), lambda: pool.stats().physical_bytes, pool)


def hold_transformers(cache: Any, prompt: Pair) -> Held:
    def add(new: Pair) -> None:
        for layer in range(NANO.layers):
            cache.update(*new, layer)

    add(repeated(prompt))
    return Held(add, lambda: None, cache)


def hold_slices(prompt: Pair) -> Held:
    """torch.empty for 4,096 tokens, of which the system gives the pages that are written."""
    caches, end = NANO.empty(SAMPLES, 4096), 0

    def add(new: Pair) -> None:
        nonlocal end
        count = new[0].shape[2]
        for keys, values in caches:
            keys[:, :, end : end + count] = new[0]
            values[:, :, end : end + count] = new[1]
        end += count

    add(repeated(prompt))
    return Held(add, lambda: None, caches)


def repeated(prompt: Pair) -> Pair:
    """One prompt as all samples' own, without memory of its own."""
    k, v = prompt
    return k.expand(SAMPLES, -1, -1, -1), v.expand(SAMPLES, -1, -1, -1)


HOLDERS: dict[str, Callable[[Pair], Held]] = {
    "KVPool, fork(16)": hold_fork,
    "KVPool, 16 rows": hold_rows,
    "transformers StaticCache": lambda p: hold_transformers(
        StaticCache(config=config(), max_cache_len=4096), p
    ),
    "transformers DynamicCache": lambda p: hold_transformers(DynamicCache(config=config()), p),
    "torch.empty, slices": hold_slices,
}


def footprint(name: str, _seconds: float) -> Json:
    """Bytes above those before, after the prompt, the first token, and 64 tokens of each sample."""
    hold = HOLDERS[name]
    warm = hold(NANO.random(1, 1))  # code and tables that are loaded at first use
    warm.append(NANO.random(SAMPLES, 1))
    del warm
    prompt, one = NANO.random(1, PROMPT), NANO.random(SAMPLES, 1)
    gc.collect()
    before = memory()
    held, result = hold(prompt), list[Json]()
    for total in (0, 1, 64):
        for _ in range(total - (result[-1]["new_tokens"] if result else 0)):
            held.append(one)
        result.append({"new_tokens": total, **grown(before), "own_count_bytes": held.physical()})
    return {"at": result, "prompt_bytes": PROMPT * NANO.token_bytes}


def grown(before: Memory) -> Json:
    return {f"{name}_bytes": value for name, value in memory().less(before)._asdict().items()}


# --- generations of one shape ---------------------------------------------------------------------


def plain_generation(pool: KVPool, prompt: Pair, one: Pair, tokens: int) -> None:
    """16 rows of their own."""
    with filled(pool, prompt) as lease:
        for _ in range(tokens):
            append(lease, one)


def forked_generation(pool: KVPool, prompt: Pair, one: Pair, tokens: int) -> None:
    """16 samples of one prompt."""
    with filled(pool, prompt) as parent, parent.fork(SAMPLES) as lease:
        for _ in range(tokens):
            append(lease, one)


def sliced_generation(prompt: Pair, one: Pair, tokens: int) -> None:
    """What people write: caches made for this generation, and dropped after it."""
    rows, count = one[0].shape[0], prompt[0].shape[2]
    for at, new in enumerate([prompt] + [one] * tokens):
        if at == 0:
            caches, end = NANO.empty(rows, count + tokens), 0
        for keys, values in caches:
            keys[:, :, end : end + new[0].shape[2]] = new[0]
            values[:, :, end : end + new[0].shape[2]] = new[1]
        end += new[0].shape[2]


def generations(kind: str, _seconds: float) -> Json:
    """Ten generations, 16 x 64 tokens after 1,024, of the cache alone: pages, faults, maps."""
    tokens, prompt, one = 64, NANO.random(1, 1024), NANO.random(SAMPLES, 1)
    whole, lengths = repeated(prompt), random.Random(0)
    with NANO.pool(4096, SAMPLES) as pool:
        runs: dict[str, Callable[[], None]] = {
            "plain": lambda: plain_generation(pool, whole, one, tokens),
            "fork": lambda: forked_generation(pool, prompt, one, tokens),
            "fork, 512 to 1,024 tokens": lambda: forked_generation(
                pool, cut(prompt, 1, lengths.randint(512, 1024)), one, tokens
            ),
            "torch.empty": lambda: sliced_generation(whole, one, tokens),
        }
        rows = [counted(pool, runs[kind]) for _ in range(10)]
    later = {f"later_{k}": statistics.median(r[k] for r in rows[2:]) for k in rows[0]}
    most = {f"later_most_{k}": max(r[k] for r in rows[1:]) for k in rows[0]}
    return {"kind": kind, "generations": rows, **later, **most}


def counted(pool: KVPool, generation: Callable[[], None]) -> Json:
    """What one generation took."""
    before, faults = pool.stats(), minor_faults()
    start, cpu = time.perf_counter_ns(), time.thread_time_ns()
    generation()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - start
    faults, after = minor_faults() - faults, pool.stats()
    return {
        "ns": wall,
        "cpu_ns": cpu,
        "minor_faults": faults,
        "blocks_taken": after.taken - before.taken,
        "map_calls": after.map_calls - before.map_calls,
        "physical_bytes": after.physical_bytes,
    }


# --- 10,000 cycles --------------------------------------------------------------------------------


class Group(NamedTuple):
    """A prompt and samples forked from it; live blocks by arithmetic, not by the pool's count."""

    parent: KVLease
    lease: KVLease
    prompt: int
    total: int

    def blocks(self, geometry: Geometry) -> int:
        each = geometry.block_tokens
        own = -(-self.total // each) - self.prompt // each
        return -(-self.prompt // each) + self.lease.batch_size * own

    def release(self, first_parent: bool) -> None:
        for lease in (self.parent, self.lease)[:: 1 if first_parent else -1]:
            lease.release()


def cycles(count: int, _seconds: float) -> Json:
    """Acquire, prefill, fork, append, release, with random sizes; two groups alive at a time."""
    rng, source = random.Random(0), TINY.random(1, 512)
    samples = TINY.random(8, 64)
    most_live = most_physical = 0
    marks = []
    alive: list[Group] = []
    start = time.perf_counter()
    with TINY.pool(1024, 8) as pool:
        for cycle in range(count + 1):
            if cycle % (count // 10) == 0:
                marks.append(mark(cycle, pool))
            group = generated(pool, rng, source, samples)
            alive.append(group)
            most_live = max(most_live, sum(g.blocks(TINY) for g in alive) * TINY.block_bytes)
            most_physical = max(most_physical, pool.stats().physical_bytes)
            if len(alive) == 2:
                alive.pop(rng.randrange(2)).release(rng.random() < 0.5)
        while alive:
            alive.pop().release(True)
        stats = pool.stats()
    return {
        "cycles": count,
        "seconds": time.perf_counter() - start,
        "most_live_bytes": most_live,
        "most_physical_bytes": most_physical,
        "peak_by_stats_bytes": stats.peak_bytes,
        "live_bytes_at_the_end": stats.live_bytes,
        "blocks_taken": stats.taken,
        "blocks_dropped": stats.dropped,
        "blocks_recycled": stats.recycled,
        "marks": marks,
    }


def mark(cycle: int, pool: KVPool) -> Json:
    now = memory()
    return {
        "cycle": cycle,
        "resident_bytes": now.resident,
        "anonymous_bytes": now.anonymous,
        "memory_file_bytes": now.memory_files,
        "page_table_bytes": now.page_tables,
        "map_lines": map_lines(),
        "physical_bytes": pool.stats().physical_bytes,
    }


def generated(pool: KVPool, rng: random.Random, source: Pair, samples: Pair) -> Group:
    """A prompt of up to 512 tokens with up to 8 samples of up to 128, appended in pieces."""
    prompt, rows = rng.randint(1, 512), rng.randint(1, 8)
    parent = filled(pool, cut(source, 1, prompt))
    lease, total = parent.fork(rows), prompt
    for _ in range(rng.randint(1, 4)):
        piece = rng.choice((1, 1, 2, 7, 32))
        append(lease, cut(samples, rows, piece))
        total += piece
    if rng.random() < 0.2:
        views(lease)
    return Group(parent, lease, prompt, total)


def cut(pair: Pair, rows: int, tokens: int) -> Pair:
    return pair[0][:rows, :, :tokens], pair[1][:rows, :, :tokens]
