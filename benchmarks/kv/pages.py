"""The memory of a prompt of 128 tokens and 16 samples, in the pool and in other caches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import DynamicCache, LlamaConfig, StaticCache

from benchmarks.kit.harness import Json
from benchmarks.kv.common import NANO, Pair, append, filled
from benchmarks.kv.memory import Memory, memory

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


def config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=NANO.layers,
        num_attention_heads=NANO.heads,
        num_key_value_heads=NANO.heads,
        head_dim=NANO.dim,
        hidden_size=NANO.heads * NANO.dim,
    )


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
