"""Attention of one query over the pool's views, and a prompt forked for eight samples.

Contiguous copies of the same tokens are the baseline. A turn is one pass over all layers, so that
no cache outlives a pass, and ratios are taken turn by turn.
"""

from __future__ import annotations

import ctypes
import functools
import time
import timeit
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kit.harness import Json, Runner, Samples, compiled, interleave
from benchmarks.kv.common import NANO, Pair, append, clones, filled, views
from memtools import KVLease

OURS, CONTIGUOUS = "KVPool's views", "contiguous"
PROMPT, SAMPLES = 2048, 8
Attend = Callable[[Tensor, Tensor, Tensor], object]

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


def only_read(_query: Tensor, *pair: Tensor) -> None:
    """Reads K and V once in C, which is the least time that any kernel could take."""
    for t in pair:
        size = t.element_size()
        rows, heads, tokens, dim = t.shape
        strides = t.stride(0) * size, t.stride(1) * size
        numbers = rows, strides[0], heads, strides[1], tokens * dim * size // 8
        compiled(READ_SOURCE).read_words(
            ctypes.c_void_p(t.data_ptr()), *map(ctypes.c_size_t, numbers)
        )


def by_matmul(query: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.matmul(query, k.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return torch.matmul(torch.softmax(weights, -1), v)


def attention(pairs: list[Pair], attend: Attend) -> Runner:
    """A pass over all layers, in CPU time: a pass is so long that other processes interrupt it."""
    rows, heads, _, dim = pairs[0][0].shape
    query = torch.randn(rows, heads, 1, dim, dtype=NANO.dtype)

    def step() -> None:
        for k, v in pairs:
            attend(query, k, v)

    timer = timeit.Timer(step, timer=time.thread_time)
    return lambda n: timer.timeit(n) * 1e9


def over_views(attend: Attend, seconds: float) -> Json:
    """Attention over 4 rows of 2,048 tokens."""
    with NANO.pool(4096, 4) as pool, filled(pool, NANO.random(4, PROMPT)) as lease:
        ours = views(lease)
        runners = {CONTIGUOUS: attention(clones(ours), attend), OURS: attention(ours, attend)}
        return {"turns": interleave(runners, 1, seconds=seconds, least=9).turns}


def over_a_fork(attend: Attend, seconds: float) -> Json:
    """Attention over 8 rows that share a prompt of 2,048 tokens and have one more each."""
    prompt = NANO.random(1, PROMPT)
    with NANO.pool(4096, SAMPLES) as pool, filled(pool, prompt) as parent:
        with parent.fork(SAMPLES) as lease:
            append(lease, NANO.random(SAMPLES, 1))
            ours = views(lease)
            runners = {"8 contiguous copies": attention(clones(ours), attend)}
            runners |= {"fork(8)": attention(ours, attend)}
            turns = interleave(runners, 1, seconds=seconds, least=9).turns
            del ours, runners
        return {"turns": turns}


ATTENTION: dict[str, Callable[[float], Json]] = {
    "attention, 2048 tokens, bfloat16, by matmul": functools.partial(over_views, by_matmul),
    "fork attention, bfloat16": functools.partial(over_a_fork, scaled_dot_product_attention),
    "fork attention, bfloat16, only read": functools.partial(over_a_fork, only_read),
}


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
    """A fork, the first token of its rows, and one pass of attention."""
    query = torch.randn(SAMPLES, NANO.heads, 1, NANO.dim, dtype=NANO.dtype)
    clock.start()
    lease = prompt.fork(SAMPLES)
    clock.lap(f"fork(8){which}")
    append(lease, one)
    clock.lap(f"its first token{which}")
    for k, v in views(lease):
        scaled_dot_product_attention(query, k, v)
    clock.lap(f"its first attention{which}")
    del k, v  # views keep their pages
    lease.release()
    clock.lap(f"its release{which}")


def in_a_new_pool(clock: Clock, tokens: Pair, one: Pair) -> None:
    with NANO.pool(4096, SAMPLES) as pool, filled(pool, tokens) as prompt:
        forked(clock, prompt, one, "")


def copy_over(clock: Clock, pairs: list[Pair], kept: list[Pair]) -> None:
    """Copies the prompt into caches that are kept from generation to generation."""
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
        forked(Clock(), prompt, one, "")  # the first fork of a pool takes longer
        copy_over(Clock(), pairs, kept)
        end, rounds = time.perf_counter() + seconds, 0
        while time.perf_counter() < end or rounds < 7:
            in_a_new_pool(clock, tokens, one)
            forked(clock, prompt, one, ", again")
            forked(Clock(), other, one, "")  # the addresses show the other prompt afterwards
            forked(clock, prompt, one, ", other prompt before")
            copy_over(clock, pairs, kept)
            rounds += 1
    return {"turns": clock.samples.turns}
