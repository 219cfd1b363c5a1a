"""What the parts of the KV-cache benchmark share: geometries, tokens, pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memtools import KVLease, KVPool

MIB, PAGE = 2**20, 4096
Pair = tuple[Tensor, Tensor]  # K and V: [rows, heads, tokens, head_dim]


class Geometry(NamedTuple):
    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def ranges(self) -> int:
        """Ranges of tokens that a sequence consists of: K and V of each head of each layer."""
        return self.layers * 2 * self.heads

    @property
    def token_bytes(self) -> int:
        return self.ranges * self.dim * self.dtype.itemsize

    @property
    def block_tokens(self) -> int:
        """Tokens that a page of a range holds."""
        return PAGE // (self.dim * self.dtype.itemsize)

    def empty(self, rows: int, tokens: int) -> list[Pair]:
        shape = rows, self.heads, tokens, self.dim
        return [
            (torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype))
            for _ in range(self.layers)
        ]

    def random(self, rows: int, tokens: int) -> Pair:
        """K and V of one layer, as a projection makes them."""
        torch.manual_seed(0)
        shape = rows, self.heads, tokens, self.dim
        return torch.randn(shape, dtype=self.dtype), torch.randn(shape, dtype=self.dtype)

    def pool(self, max_tokens: int, max_sequences: int) -> KVPool:
        return KVPool(
            self.layers,
            self.heads,
            self.dim,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            dtype=self.dtype,
        )


NANO = Geometry(16, 8, 128, torch.bfloat16)


def append(lease: KVLease, tokens: Pair) -> None:
    """The same tokens in every layer."""
    k, v = tokens
    for layer in range(lease.pool.num_layers):
        lease.update(layer, k, v)


def filled(pool: KVPool, tokens: Pair) -> KVLease:
    """A lease whose layers hold these tokens."""
    rows, _, count, _ = tokens[0].shape
    lease = pool.acquire(rows, count)
    append(lease, tokens)
    return lease


def views(lease: KVLease) -> list[Pair]:
    return [lease.layer(layer) for layer in range(lease.pool.num_layers)]


def clones(pairs: Sequence[Pair]) -> list[Pair]:
    """Exact contiguous copies."""
    return [
        (
            k.clone(memory_format=torch.contiguous_format),
            v.clone(memory_format=torch.contiguous_format),
        )
        for k, v in pairs
    ]
