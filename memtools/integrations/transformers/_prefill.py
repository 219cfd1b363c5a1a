"""The prompts of a group in a pool, each computed once and without its padding.

| . . a b c |      prompt by prompt; the row's padding is never computed and reads as zeros, which
      |-----|      the attention mask hides from the tokens that follow

This is right where a token's place comes from `position_ids`, or where only distances count. A
model that takes a token's place from the length of the cache needs the padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from transformers.cache_utils import Cache

from memtools._base.torch import connect
from memtools.integrations.transformers._cache import Pair, PooledLayer, in_pools_dtype
from memtools.integrations.transformers._settings import accepts, cache_argument

if TYPE_CHECKING:
    import torch

    from memtools import KVLease, KVPool
else:
    torch = connect().torch


class _OneRow:
    """A row of a lease from token `first` on, as the Source of a cache of one row."""

    def __init__(self, lease: KVLease, row: int, first: int) -> None:
        self.pool = cast("KVPool", lease.pool)
        self._lease, self._row, self._first = lease, row, first
        self._seen = [0] * lease.pool.num_layers

    def length(self, layer: int) -> int:
        return self._seen[layer]

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Pair:
        rows, counts = self._lease.batch_size, [0] * self._lease.batch_size
        counts[self._row] = k.shape[2]
        k, v = in_pools_dtype(self.pool, k, v)
        self._lease.update(layer, k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1), counts)
        self._seen[layer] += k.shape[2]
        return self.views(layer)

    def views(self, layer: int) -> Pair:
        row, end = slice(self._row, self._row + 1), self._first + self._seen[layer]
        k, v = self._lease.layer(layer)
        return k[row, :, self._first : end], v[row, :, self._first : end]


def offsets(mask: torch.Tensor) -> list[int]:
    """The number of padding tokens before each prompt.

    Raises ValueError if there is padding elsewhere.
    """
    first = mask.shape[1] - (mask != 0).sum(1)
    left = torch.arange(mask.shape[1], device=mask.device) >= first[:, None]
    holes = ((mask != 0) != left).any(1).nonzero()
    if len(holes):
        raise ValueError(
            f"the attention mask of prompt {int(holes[0])} has zeros between its tokens; give the "
            'attention_mask, or set prefill="padded"'
        )
    return [int(offset) for offset in first.tolist()]


def prefill_rows(
    model: Any,
    lease: KVLease,
    ids: torch.Tensor,
    offsets: list[int],
    chunk: int | None,
) -> None:
    """Run prompts through the model into the rows of a lease.

    Args:
        model: the model.
        lease: empty rows, one for each prompt.
        ids: `[prompts, tokens]`; there may be no tokens.
        offsets: the padding of each prompt, which is left out.
        chunk: tokens of a forward pass; None takes all at once.

    Raises RuntimeError if the model did not leave all tokens in the cache.
    """
    tokens = ids.shape[1]
    if tokens == 0:
        return
    ids = ids.to(lease.pool.device)  # as generate() does
    lease.advance([min(offset, tokens) for offset in offsets])  # padding reads as zeros
    for row, offset in enumerate(offsets):
        source = _OneRow(lease, row, offset)
        layers = [PooledLayer(source, i) for i in range(lease.pool.num_layers)]
        if offset < tokens:
            _forward(model, Cache(layers=layers), ids[row : row + 1, offset:], chunk)
    if set(lease.lengths) != {tokens}:
        raise RuntimeError(
            f"the model left {lease.lengths} of {tokens} prompt tokens in the cache; call "
            "model.eval(), since gradient checkpointing in training mode goes without a cache"
        )


def _forward(model: Any, cache: Any, ids: torch.Tensor, chunk: int | None) -> None:
    """Fill the cache by forward passes of `chunk` tokens; their logits are not needed."""
    extra = {cache_argument(model): cache}
    if accepts(model, "logits_to_keep"):  # only those of one token are computed
        extra["logits_to_keep"] = 1
    else:
        model = model.base_model
    tokens = ids.shape[1]
    for begin in range(0, tokens, chunk or tokens):
        end = min(begin + (chunk or tokens), tokens)
        if accepts(model, "position_ids"):
            extra["position_ids"] = torch.arange(begin, end, device=ids.device)[None]
        model(input_ids=ids[:, begin:end], use_cache=True, **extra)


def forget_positions(model: Any) -> None:
    """Delete the `rope_deltas` that vision models of the Qwen family keep of the last batch, one
    for each row: generate() would add them to the rows of another batch."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None
