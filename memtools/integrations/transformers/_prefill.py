"""The prompts of a group in a pool, each computed once, with its padding as generate() does or
without it; and which of the two is right for a model.

padded     | . . a b c |      all prompts at once: [prompts, tokens]
           | e f g h i |
unpadded   | . . a b c |      prompt by prompt; the row's padding is never computed and reads as
                 |-----|      zeros, which the attention mask hides from the tokens that follow

Without padding is right where a token's place comes from `position_ids`, or where only distances
count. A model that takes a token's place from the length of the cache needs the padding.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from transformers.cache_utils import Cache

from memtools._base.torch import connect
from memtools.integrations.transformers._cache import Pair, PooledCache, PooledLayer, in_pools_dtype
from memtools.integrations.transformers._model import pool_for
from memtools.integrations.transformers._settings import accepts, cache_argument

if TYPE_CHECKING:
    import torch

    from memtools import KVLease, KVPool
else:
    torch = connect().torch

_PADDING, _TOKENS = 3, 6  # The row that shows how a model counts positions.
# By this share of their spread logits may differ, in 32 bits and in 16. Rounding makes 1e-6 and a
# few hundredths; a token in another place makes about 1.
_ROUNDING, _ROUNDING_16 = 1e-3, 0.2

_needs_padding: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


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
    mask: torch.Tensor,
    offsets: list[int] | None,
    chunk: int | None,
) -> None:
    """Run prompts through the model into the rows of a lease.

    Args:
        model: the model.
        lease: empty rows, one for each prompt.
        ids: `[prompts, tokens]`; there may be no tokens.
        mask: the attention mask, of the same shape.
        offsets: the padding of each prompt, which is then left out; None computes it, too.
        chunk: tokens of a forward pass; None takes all at once.

    Raises RuntimeError if the model did not leave all tokens in the cache.
    """
    tokens = ids.shape[1]
    if tokens == 0:
        return
    ids, mask = ids.to(lease.pool.device), mask.to(lease.pool.device)  # as generate() does
    if offsets is None:
        _forward(model, PooledCache.from_lease(lease), ids, mask, chunk)
    else:
        lease.advance([min(offset, tokens) for offset in offsets])  # padding reads as zeros
        for row, offset in enumerate(offsets):
            source = _OneRow(lease, row, offset)
            layers = [PooledLayer(source, i) for i in range(lease.pool.num_layers)]
            if offset < tokens:
                at = slice(row, row + 1), slice(offset, None)
                _forward(model, Cache(layers=layers), ids[at], mask[at], chunk)
    if set(lease.lengths) != {tokens}:
        raise RuntimeError(
            f"the model left {lease.lengths} of {tokens} prompt tokens in the cache; call "
            "model.eval(), since gradient checkpointing in training mode goes without a cache"
        )


def _forward(
    model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, chunk: int | None
) -> None:
    """Fill the cache by forward passes of `chunk` tokens; their logits are not needed."""
    extra = {cache_argument(model): cache}
    if accepts(model, "logits_to_keep"):  # only those of one token are computed
        extra["logits_to_keep"] = 1
    else:
        model = model.base_model
    tokens = ids.shape[1]
    for begin in range(0, tokens, chunk or tokens):
        end = min(begin + (chunk or tokens), tokens)
        _run(model, ids[:, begin:end], mask[:, :end], **extra)


def _run(model: Any, ids: torch.Tensor, mask: torch.Tensor, **extra: Any) -> Any:
    """A forward pass of the ids, which are the last tokens of the mask, with the cache among
    `extra` and the arguments that generate() would pass."""
    if accepts(model, "position_ids"):
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        extra["position_ids"] = positions[:, -ids.shape[1] :]
    if not bool(mask.all()):
        extra["attention_mask"] = mask
    return model(input_ids=ids, use_cache=True, **extra)


# --- with padding or without ----------------------------------------------------------------------


def forget_positions(model: Any) -> None:
    """Delete the `rope_deltas` that vision models of the Qwen family keep of the last batch, one
    for each row: generate() would add them to the rows of another batch."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def needs_padding(model: Any, input_ids: torch.Tensor) -> bool:
    """Whether a prompt without its padding gives other logits. This is found at the first call for
    a model, by a row of a few tokens in eval mode, and remembered for as long as the model
    lives."""
    found = _needs_padding.get(model)
    if found is None:
        found = _needs_padding[model] = _differs_without_padding(model, input_ids)
    return found


def _differs_without_padding(model: Any, input_ids: torch.Tensor) -> bool:
    ids, mask = _probe(model, input_ids)
    prompt = ids.shape[1] - 2
    forget_positions(model)
    with _without_chance(model), torch.no_grad(), pool_for(model, ids.shape[1], 2) as pool:
        logits = []
        for offset in (None, [_PADDING]):
            with pool.acquire(1) as lease:
                prefill_rows(model, lease, ids[:, :prompt], mask[:, :prompt], offset, None)
                extra = {cache_argument(model): PooledCache.from_lease(lease)}
                for end in (prompt + 1, prompt + 2):
                    out = _run(model, ids[:, end - 1 : end], mask[:, :end], **extra)
                    logits.append(out.logits[0, -1].double())
    spread = max(float(x.std()) for x in logits)
    error = max(float((a - b).abs().max()) for a, b in zip(logits[:2], logits[2:], strict=True))
    coarse = pool.dtype.itemsize < 4 or torch.is_autocast_enabled(pool.device.type)
    return not error <= (_ROUNDING_16 if coarse else _ROUNDING) * spread  # NaN: it is not known


@contextlib.contextmanager
def _without_chance(model: Any) -> Iterator[None]:
    """All modules in eval mode: two passes with dropout differ in any case."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _probe(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A row of padding and different tokens, those of the program's prompts first, and its mask."""
    size = model.config.get_text_config(decoder=True).vocab_size
    some = input_ids.flatten()[-64:].tolist()
    tokens = list(dict.fromkeys([*reversed(some), *range(min(size, 64))]))[:_TOKENS]
    ids = torch.tensor([[0] * _PADDING + tokens], device=model.device)
    return ids, (torch.arange(ids.shape[1], device=ids.device) >= _PADDING)[None].long()
