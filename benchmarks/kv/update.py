"""One token appended to every layer: the pool, what people write, and the bare copy in C.

Each peer has start(position), which is not timed, and step(), which appends one token to all layers
and takes what attention would read. A turn is 32 tokens from the position on, as in decoding: two
pages of every head of every row are begun in it. Turns after the first find pages that were used
before, like the second generation of a run.
"""

from __future__ import annotations

import ctypes
import time
from typing import Protocol

from transformers import LlamaConfig

from benchmarks.kit.harness import Json, Runner, compiled, interleave, statement
from benchmarks.kv.common import NANO, Pair

TURN = 2 * NANO.block_tokens
OURS, SLICE, COPY = "KVPool", "preallocated, slice", "the rows alone, memcpy in C"

COPY_SOURCE = r"""
#include <stddef.h>
#include <string.h>

/* Tokens [at, at + n) of `tensors` caches: in each, `rows` rows of `bytes` lie `stride` apart. */
void
copy_rows(char *const *caches, char *const *news, size_t tensors, size_t rows, size_t stride,
          size_t bytes, size_t at, size_t n)
{
    for (size_t token = at; token < at + n; token++)
        for (size_t t = 0; t < tensors; t++)
            for (size_t row = 0; row < rows; row++)
                memcpy(caches[t] + row * stride + token * bytes, news[t] + row * bytes, bytes);
}
"""


class Peer(Protocol):
    def start(self, at: int) -> None: ...
    def step(self) -> None: ...


class Pooled:
    """KVLease.update, in a pool that has had pages before."""

    def __init__(self, new: list[Pair], tokens: int) -> None:
        self.new, self.tokens, self.rows = new, tokens, new[0][0].shape[0]
        self.pool = NANO.pool(tokens, self.rows)
        self.lease = self.pool.acquire(self.rows, tokens)

    def start(self, at: int) -> None:
        self.lease.release()  # a generation has its own lease; crop() would clear pages again
        self.lease = self.pool.acquire(self.rows, self.tokens)
        self.lease.advance(at)  # tokens that are zeros, and take no page

    def step(self) -> None:
        update = self.lease.update
        for layer, (k, v) in enumerate(self.new):
            update(layer, k, v)


class Sliced:
    """K and V of each layer allocated once, tokens assigned to a slice."""

    def __init__(self, new: list[Pair], tokens: int) -> None:
        self.new, self.caches = new, NANO.empty(new[0][0].shape[0], tokens)

    def start(self, at: int) -> None:
        self.at = at

    def step(self) -> None:
        at, end = self.at, self.at + 1
        for (k, v), (keys, values) in zip(self.new, self.caches, strict=True):
            keys[:, :, at:end] = k
            values[:, :, at:end] = v
            keys[:, :, :end], values[:, :, :end]
        self.at = end


def config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=NANO.layers,
        num_attention_heads=NANO.heads,
        num_key_value_heads=NANO.heads,
        head_dim=NANO.dim,
        hidden_size=NANO.heads * NANO.dim,
    )


def copies(new: list[Pair], tokens: int, at: int) -> Runner:
    """What all peers do at least: the same rows copied to the same kind of place, loop in C."""
    library, rows = compiled(COPY_SOURCE), new[0][0].shape[0] * NANO.heads
    flat = [t for pair in NANO.empty(new[0][0].shape[0], tokens) for t in pair]
    sources = [t for pair in new for t in pair]
    pointers = ctypes.c_void_p * len(flat)
    size = NANO.dim * NANO.dtype.itemsize
    arguments = (
        pointers(*(t.data_ptr() for t in flat)),
        pointers(*(t.data_ptr() for t in sources)),
        *map(ctypes.c_size_t, (len(flat), rows, tokens * size, size, at)),
    )

    def run(n: int) -> float:
        start = time.perf_counter_ns()
        library.copy_rows(*arguments, ctypes.c_size_t(n))
        taken = time.perf_counter_ns() - start
        return taken if flat and sources else 0.0  # which keeps the tensors

    return run


def stepping(peer: Peer, at: int) -> Runner:
    return statement("step()", "start(at)", step=peer.step, start=peer.start, at=at)


def update(rows: int, at: int, seconds: float) -> Json:
    """Turns of all peers, the slice first."""
    tokens, new = 4096, [NANO.random(rows, 1) for _ in range(NANO.layers)]
    runners = {SLICE: stepping(Sliced(new, tokens), at), COPY: copies(new, tokens, at)}
    runners[OURS] = stepping(Pooled(new, tokens), at)
    return {"turns": interleave(runners, TURN, seconds=seconds, first=TURN).turns}
