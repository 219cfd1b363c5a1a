"""A KV cache by torch.cat, to compare KVLease with, and small pools to compare it in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from memtools import KVLease, KVPool

if TYPE_CHECKING:
    from tests.kit.cudadevice import Device

LAYERS, HEADS, WIDTH = 2, 2, 64  # float32: 16 tokens fill a page of one head
MAX_TOKENS = 100  # 7 blocks
BLOCK = 2 * LAYERS * HEADS * 4096  # bytes of one block of a row


def small_pool(**changes: Any) -> KVPool:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "max_sequences": 8, "dtype": torch.float32}
    return KVPool(LAYERS, HEADS, WIDTH, **{**options, **changes})


def some(rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, HEADS, tokens, WIDTH] of random values."""
    return torch.randn(rows, HEADS, tokens, WIDTH).to(dtype)


def fill(lease: KVLease, tokens: int) -> None:
    """Appends random tokens to every layer."""
    for layer in range(lease.pool.num_layers):
        pair = (some(lease.batch_size, tokens, lease.pool.dtype) for _ in range(2))
        lease.update(layer, *pair)


class OnDevice:
    """A lease whose tensors go to the device and come from it, so that tests may compare them."""

    def __init__(self, lease: KVLease, device: Device) -> None:
        self.lease, self.device = lease, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lease, name)

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.release()

    def read(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.device.get(pair[0]), self.device.get(pair[1])

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor, counts: Any = None) -> Any:
        return self.read(self.lease.update(layer, self.device.put(k), self.device.put(v), counts))

    def layer(self, layer: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(self.lease.layer(layer, **options))

    def fork(self, n: int, **options: Any) -> OnDevice:
        return OnDevice(self.lease.fork(n, **options), self.device)


class Plain:
    """What a lease promises, the dumb way: row -> layer -> (K, V), each [H, n, D]."""

    def __init__(self, rows: int) -> None:
        nothing = torch.empty(HEADS, 0, WIDTH)
        self.rows = [[(nothing, nothing)] * LAYERS for _ in range(rows)]

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, counts: Sequence[int] | None = None
    ) -> None:
        for number, row in enumerate(self.rows):
            n = k.shape[2] if counts is None else counts[number]
            old_k, old_v = row[layer]
            row[layer] = (
                torch.cat([old_k, k[number, :, :n]], 1),
                torch.cat([old_v, v[number, :, :n]], 1),
            )

    def write(self, row: int, layer: int, token: int, value: float) -> None:
        pair = [x.clone() for x in self.rows[row][layer]]
        for x in pair:
            x[:, token] = value
        self.rows[row][layer] = (pair[0], pair[1])

    @property
    def lengths(self) -> list[int]:
        return [max(k.shape[1] for k, _ in row) for row in self.rows]

    def crop(self, n: int | Sequence[int]) -> None:
        for number, length in enumerate(self.lengths):
            keep = n[number] if not isinstance(n, int) else n if n >= 0 else max(0, length + n)
            self.rows[number] = [(k[:, :keep], v[:, :keep]) for k, v in self.rows[number]]

    def select(self, rows: Sequence[int]) -> None:
        self.rows = [list(self.rows[row]) for row in rows]

    def fork(self, n: int) -> Plain:
        child = Plain(0)
        child.rows = [list(row) for row in self.rows for _ in range(n)]
        return child

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(row[layer][0].shape[1] for row in self.rows)
        pair = torch.zeros(2, len(self.rows), HEADS, longest, WIDTH)
        for number, row in enumerate(self.rows):
            for which in range(2):
                pair[which, number, :, : row[layer][which].shape[1]] = row[layer][which]
        return pair[0], pair[1]


def same(lease: KVLease, model: Plain) -> bool:
    """Whether the lease shows exactly what the model holds, in every layer."""
    if lease.lengths != model.lengths or lease.num_tokens != max(model.lengths):
        return False
    return all(
        torch.equal(got, want)
        for layer in range(LAYERS)
        for got, want in zip(lease.layer(layer), model.layer(layer), strict=True)
    )


def step(lease: KVLease, model: Plain, tokens: int, counts: Sequence[int] | None = None) -> None:
    """One update of every layer of both; what update returns is compared as well."""
    for layer in range(LAYERS):
        k, v = some(lease.batch_size, tokens), some(lease.batch_size, tokens)
        pair = lease.update(layer, k, v, counts)
        model.update(layer, k, v, counts)
        for got, want in zip(pair, model.layer(layer), strict=True):
            assert torch.equal(got, want)
