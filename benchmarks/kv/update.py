"""One token appended to every layer: the pool, what people write, and the bare copy in C.

Each peer has start(position), which is not timed, and step(), which appends one token to all layers
and takes what attention would read. A turn is 32 tokens from the position on, as in decoding: two
pages of every head of every row are begun in it. Turns after the first find pages that were used
before, like the second generation of a run; `fresh` measures the first.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from benchmarks.kit.harness import Json, Runner, Samples, compiled, interleave, statement
from benchmarks.kv.common import NANO, Pair, append

TURN = 2 * NANO.block_tokens
OURS, SLICE, COPY = "KVPool", "preallocated, slice", "the rows alone, memcpy in C"
DYNAMIC = "transformers DynamicCache"

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


class IndexPut(Sliced):
    """The same, the position being a tensor: gpt-fast and torchtune."""

    def start(self, at: int) -> None:
        self.position = torch.tensor([at])

    def step(self) -> None:
        at = self.position
        for (k, v), (keys, values) in zip(self.new, self.caches, strict=True):
            keys[:, :, at] = k
            values[:, :, at] = v
        self.position = at + 1


class NanochatStyle:
    """One [layers, rows, tokens, heads, head_dim] for K and one for V; positions in a tensor."""

    def __init__(self, new: list[Pair], tokens: int) -> None:
        rows = new[0][0].shape[0]
        shape = NANO.layers, rows, tokens, NANO.heads, NANO.dim
        self.keys = torch.empty(shape, dtype=NANO.dtype)  # zeros there; only speed counts here
        self.values = torch.empty(shape, dtype=NANO.dtype)
        self.new = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in new]
        self.lengths = torch.zeros(rows, dtype=torch.int32)

    def start(self, at: int) -> None:
        self.lengths.fill_(at)

    def step(self) -> None:
        for layer, (k, v) in enumerate(self.new):
            keys, values = self.keys[layer], self.values[layer]
            at = int(self.lengths[0].item())
            end = at + k.shape[1]
            keys[:, at:end] = k
            values[:, at:end] = v
            keys[:, :end].transpose(1, 2), values[:, :end].transpose(1, 2)
        self.lengths += 1


def config() -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=NANO.layers,
        num_attention_heads=NANO.heads,
        num_key_value_heads=NANO.heads,
        head_dim=NANO.dim,
        hidden_size=NANO.heads * NANO.dim,
    )


class Static:
    """transformers' StaticCache as it is."""

    def __init__(self, new: list[Pair], tokens: int) -> None:
        self.new, self.cache = new, StaticCache(config=config(), max_cache_len=tokens)
        self.step()

    def start(self, at: int) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(at)

    def step(self) -> None:
        update = self.cache.update
        for layer, (k, v) in enumerate(self.new):
            update(k, v, layer)


class Dynamic:
    """transformers' DynamicCache. All layers start from the same tensor, to save memory."""

    def __init__(self, new: list[Pair]) -> None:
        self.new, self.cache = new, DynamicCache(config=config())
        self.past: dict[int, torch.Tensor] = {}

    def start(self, at: int) -> None:
        rows = self.new[0][0].shape[0]
        if at not in self.past:
            self.past = {at: torch.zeros(rows, NANO.heads, at, NANO.dim, dtype=NANO.dtype)}
            for layer, (k, v) in zip(self.cache.layers, self.new, strict=True):
                layer.lazy_initialization(k, v)
        for layer in self.cache.layers:
            layer.keys = layer.values = self.past[at]

    def step(self) -> None:
        update = self.cache.update
        for layer, (k, v) in enumerate(self.new):
            update(k, v, layer)


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


PEERS: dict[str, Callable[[list[Pair], int], Peer]] = {
    OURS: Pooled,
    SLICE: Sliced,
    "preallocated, index_put": IndexPut,
    "nanochat style": NanochatStyle,
    "transformers StaticCache": Static,
}


def update(rows: int, at: int, seconds: float) -> Json:
    """Turns of all peers, the DynamicCache's apart and beside its own turns of the slice."""
    tokens, new = 4096, [NANO.random(rows, 1) for _ in range(NANO.layers)]
    peers = {name: make(new, tokens) for name, make in PEERS.items()}
    runners = {SLICE: stepping(peers[SLICE], at), COPY: copies(new, tokens, at)}
    runners |= {name: stepping(peer, at) for name, peer in peers.items() if name != SLICE}
    turns = interleave(runners, TURN, seconds=seconds, first=TURN).turns
    blocks = by_place(peers[OURS], at)
    runners = {SLICE: runners[SLICE], DYNAMIC: stepping(Dynamic(new), at)}
    rounds = 1 if rows * at > 32_768 else 3  # a single token takes seconds there
    slow = interleave(runners, {SLICE: TURN, DYNAMIC: 1}, seconds=0, first=0, least=rounds)
    return {"turns": turns, "dynamic": slow.turns, "in_a_block": blocks}


def by_place(peer: Peer, at: int) -> list[float]:
    """The least time of each of 32 tokens: those that begin a page beside those that do not."""
    least = [float("inf")] * TURN
    for _ in range(20):
        peer.start(at)
        for i in range(TURN):
            start = time.perf_counter_ns()
            peer.step()
            least[i] = min(least[i], time.perf_counter_ns() - start)
    return least


def update_rows(results: list[Json]) -> list[Json]:
    samples = Samples(results[0]["turns"])
    rows = samples.summary(SLICE)
    dynamic = Samples(results[0]["dynamic"]).summary(SLICE)
    least = results[0]["in_a_block"]
    first = [i for i in range(TURN) if i % NANO.block_tokens == 0]
    for row in rows:
        if row["name"] == OURS:
            inside = [least[i] for i in range(TURN) if i not in first]
            row["inside_a_page_min_ns"] = sum(inside) / len(inside)
            row["page_begun_min_ns"] = sum(least[i] for i in first) / len(first)
    return rows + [row for row in dynamic if row["name"] == DYNAMIC]


# --- pages that nobody has touched --------------------------------------------------------------


def fresh(prompt: int, tokens: int, _seconds: float) -> Json:
    """A first generation: all caches are made anew for every turn, and the kernel clears each page
    as it is begun. Nanoseconds of CPU time a token, after a prompt that counts if there is no more.
    """
    new, samples = [NANO.random(4, 1) for _ in range(NANO.layers)], Samples({SLICE: [], OURS: []})
    start, clock = NANO.random(4, prompt), time.thread_time_ns
    for _ in range(5):
        for name in samples.turns:
            begin = clock()
            peer: Any = Pooled(new, 4096) if name == OURS else Sliced(new, 4096)
            write_prompt(peer, start)
            begin = clock() if tokens else begin
            for _ in range(tokens):
                peer.step()
            samples.turns[name].append((clock() - begin) / (tokens or prompt))
            if name == OURS:
                pool = peer.lease.pool
                peer.lease.release()
                pool.close()
            del peer
    return {"turns": samples.turns}


def write_prompt(peer: Pooled | Sliced, prompt: Pair) -> None:
    if isinstance(peer, Pooled):
        append(peer.lease, prompt)
        return
    peer.start(prompt[0].shape[2])
    for keys, values in peer.caches:
        keys[:, :, : peer.at] = prompt[0]
        values[:, :, : peer.at] = prompt[1]
