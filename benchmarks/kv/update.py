"""One token appended to every layer: by the pool, and by assignments to slices.

Each peer has start(position), which is not timed, and step(), which appends one token to all layers
and takes what attention would read. A turn is 32 tokens from the position on, as in decoding, in
which two pages of every head of every row begin. Turns after the first find pages that were used
before, like the second generation of a run.
"""

from __future__ import annotations

from typing import Protocol

from benchmarks.kit.harness import Json, Runner, interleave, statement
from benchmarks.kv.common import NANO, Pair

TURN = 2 * NANO.block_tokens
START = 1024
OURS, SLICE = "KVPool", "preallocated, slice"


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


def stepping(peer: Peer) -> Runner:
    return statement("step()", "start(at)", step=peer.step, start=peer.start, at=START)


def update(rows: int, seconds: float) -> Json:
    """Turns of all peers, the slice first."""
    tokens, new = 4096, [NANO.random(rows, 1) for _ in range(NANO.layers)]
    runners = {SLICE: stepping(Sliced(new, tokens)), OURS: stepping(Pooled(new, tokens))}
    return {"turns": interleave(runners, TURN, seconds=seconds, first=TURN).turns}
