"""Attention of one query over the pool's views, and a prompt forked for eight samples.

Contiguous copies of the very same tokens are the measure. Turns are taken by turns, one pass over
all layers each, so that no cache outlives a pass; ratios are taken turn by turn.
"""

from __future__ import annotations

import ctypes
import functools
import time
import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kit.harness import Json, Runner, Samples, compiled, interleave
from benchmarks.kv.common import NANO, NANO32, Geometry, Pair, append, clones, filled, views
from memtools import KVLease, KVPool

OURS, CONTIGUOUS = "KVPool's views", "contiguous"
RESERVED, TOKEN_MAJOR = "slices of [B, H, 4096, D]", "slices of [B, 4096, H, D]"
PROMPT, SAMPLES = 2048, 8


class Kind(NamedTuple):
    """A dtype, and what computes attention."""

    geometry: Geometry
    queries_per_head: int = 1
    eager: bool = False  # matmul, softmax, matmul instead of scaled_dot_product_attention
    read: bool = False  # no attention: a loop in C that reads K and V


KINDS = {
    "bfloat16": Kind(NANO),
    "bfloat16, GQA 4": Kind(NANO, 4),
    "float32": Kind(NANO32),
    "float32, GQA 4": Kind(NANO32, 4),
    "bfloat16, by matmul": Kind(NANO, eager=True),
    "bfloat16, only read": Kind(NANO, read=True),
}

READ_SOURCE = r"""
#include <stddef.h>

/* The exclusive or of `rows` x `heads` runs of `words` words. */
unsigned long
read_words(const char *at, size_t rows, size_t row_stride, size_t heads, size_t head_stride,
           size_t words)
{
    unsigned long all = 0;
    for (size_t row = 0; row < rows; row++)
        for (size_t head = 0; head < heads; head++) {
            const unsigned long *from = (const void *)(at + row * row_stride + head * head_stride);
            for (size_t i = 0; i < words; i++)
                all ^= from[i];
        }
    return all;
}
"""


def read(_query: Tensor, *pair: Tensor, **_options: Any) -> None:
    """K and V read once in C: what a kernel that waits for nothing but memory would take."""
    for t in pair:
        size = t.element_size()
        rows, heads, tokens, dim = t.shape
        strides = t.stride(0) * size, t.stride(1) * size
        numbers = rows, strides[0], heads, strides[1], tokens * dim * size // 8
        compiled(READ_SOURCE).read_words(
            ctypes.c_void_p(t.data_ptr()), *map(ctypes.c_size_t, numbers)
        )


def by_matmul(query: Tensor, k: Tensor, v: Tensor, **_options: Any) -> Tensor:
    weights = torch.matmul(query, k.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(weights, -1), v)


def attention(pairs: list[Pair], kind: Kind) -> Runner:
    """A pass over all layers, in CPU time: passes are so long that others get a turn within one."""
    rows, heads, _, dim = pairs[0][0].shape
    grouped = kind.queries_per_head > 1
    query = torch.randn(rows, heads * kind.queries_per_head, 1, dim, dtype=kind.geometry.dtype)
    attend: Callable[..., object] = scaled_dot_product_attention
    attend = by_matmul if kind.eager else read if kind.read else attend

    def step() -> None:
        for k, v in pairs:
            attend(query, k, v, enable_gqa=grouped)

    timer = timeit.Timer(step, timer=time.thread_time)
    return lambda n: timer.timeit(n) * 1e9


def reserved(pairs: list[Pair], geometry: Geometry) -> list[Pair]:
    """The tokens as slices of caches of 4,096."""
    rows, _, count, _ = pairs[0][0].shape
    result = []
    for (k, v), (keys, values) in zip(pairs, geometry.empty(rows, 4096), strict=True):
        keys[:, :, :count] = k
        values[:, :, :count] = v
        result.append((keys[:, :, :count], values[:, :, :count]))
    return result


def token_major(pairs: list[Pair]) -> list[Pair]:
    """The tokens as [B, T, H, D] in memory, seen as [B, H, T, D]."""
    turned = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in pairs]
    return [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in clones(turned)]


def over_views(tokens: int, name: str, seconds: float) -> Json:
    """4 rows of so many tokens."""
    kind = KINDS[name]
    geometry = kind.geometry
    with geometry.pool(4096, 4) as pool, filled(pool, geometry.random(4, tokens)) as lease:
        ours = views(lease)
        every = {CONTIGUOUS: clones(ours), OURS: ours}
        if tokens == 2048 and kind.queries_per_head == 1:  # the others for comparison
            every |= {RESERVED: reserved(ours, geometry), TOKEN_MAJOR: token_major(ours)}
        runners = {name: attention(pairs, kind) for name, pairs in every.items()}
        return {"turns": interleave(runners, 1, seconds=seconds, least=9).turns}


def over_a_fork(name: str, seconds: float) -> Json:
    """8 rows that share a prompt of 2,048 tokens and have one more each."""
    kind = KINDS[name]
    geometry = kind.geometry
    prompt = geometry.random(1, PROMPT)
    with geometry.pool(4096, SAMPLES) as pool, filled(pool, prompt) as parent:
        with parent.fork(SAMPLES) as lease:
            append(lease, geometry.random(SAMPLES, 1))
            ours = views(lease)
            runners = {"8 contiguous copies": attention(clones(ours), kind)}
            runners |= {"fork(8)": attention(ours, kind)}
            turns = interleave(runners, 1, seconds=seconds, least=9).turns
            del ours, runners
        return {"turns": turns}


# --- forking -------------------------------------------------------------------------------------


class Clock:
    """CPU time by name, for what happens once; lap(name) is the time since the lap before."""

    def __init__(self) -> None:
        self.samples, self.last = Samples(), time.thread_time_ns()

    def start(self) -> None:
        self.last = time.thread_time_ns()

    def lap(self, name: str) -> None:
        now = time.thread_time_ns()
        self.samples.turns.setdefault(name, []).append(now - self.last)
        self.last = time.thread_time_ns()


def forked(clock: Clock, prompt: KVLease, one: Pair, which: str) -> None:
    """A fork, two tokens of its rows, and one pass of attention."""
    query = torch.randn(SAMPLES, NANO.heads, 1, NANO.dim, dtype=NANO.dtype)
    clock.start()
    lease = prompt.fork(SAMPLES)
    clock.lap(f"fork(8){which}")
    append(lease, one)
    clock.lap(f"its first token{which}")
    append(lease, one)
    clock.lap(f"its second token{which}")
    for k, v in views(lease):
        scaled_dot_product_attention(query, k, v)
    clock.lap(f"its first attention{which}")
    del k, v  # views keep their pages
    lease.release()
    clock.lap(f"its release{which}")


def in_a_new_pool(clock: Clock, tokens: Pair, one: Pair) -> None:
    with NANO.pool(4096, SAMPLES) as pool, filled(pool, tokens) as prompt:
        forked(clock, prompt, one, "")


def repeat(clock: Clock, pairs: list[Pair]) -> None:
    """What transformers' batch_repeat_interleave does."""
    clock.start()
    copied = [(k.repeat_interleave(SAMPLES, 0), v.repeat_interleave(SAMPLES, 0)) for k, v in pairs]
    clock.lap("8 copies, repeat_interleave")
    del copied


def copy_over(clock: Clock, pairs: list[Pair], kept: list[Pair]) -> None:
    """The same into caches that are kept from generation to generation."""
    clock.start()
    for (k, v), (keys, values) in zip(pairs, kept, strict=True):
        keys[:, :, :PROMPT] = k
        values[:, :, :PROMPT] = v
    clock.lap("8 copies into caches that are kept")


def forks(seconds: float) -> Json:
    """fork(8) of a prompt of 2,048 tokens, in a new pool and again, beside copies of it."""
    tokens, one, clock = NANO.random(1, PROMPT), NANO.random(SAMPLES, 1), Clock()
    kept = NANO.empty(SAMPLES, PROMPT + 64)
    pairs = clones([tokens] * NANO.layers)
    with (
        NANO.pool(4096, SAMPLES) as pool,
        filled(pool, tokens) as prompt,
        filled(pool, tokens) as other,
    ):
        ways: list[Callable[[], Any]] = [
            functools.partial(in_a_new_pool, clock, tokens, one),
            functools.partial(forked, clock, prompt, one, ", again"),
            functools.partial(forked, Clock(), other, one, ""),  # addresses now show the other
            functools.partial(forked, clock, prompt, one, ", other prompt before"),
            functools.partial(repeat, clock, pairs),
            functools.partial(copy_over, clock, pairs, kept),
        ]
        forked(Clock(), prompt, one, "")  # that is no longer the first in this pool
        copy_over(Clock(), pairs, kept)
        end, rounds = time.perf_counter() + seconds, 0
        while time.perf_counter() < end or rounds < 7:
            for way in ways:
                way()
            rounds += 1
        turns = clock.samples.turns
        stats = prompt_stats(pool, prompt, one)
    return {"turns": turns, **stats}


def prompt_stats(pool: KVPool, prompt: KVLease, one: Pair) -> Json:
    """What a fork maps and copies, the second time."""
    before = pool.stats()
    with prompt.fork(SAMPLES) as lease:
        append(lease, one)
        after = pool.stats()
    return {
        "map_calls_again": after.map_calls - before.map_calls,
        "taken_again": after.taken - before.taken,
        "copied_again": after.copied - before.copied,
        "maps": after.maps,
    }
