"""generate_group: prefill each prompt once, fork it, sample from all forks at once.

prompt 0   | . . a b c |  d      all tokens but the last go through the model once per prompt
prompt 1   | e f g h i |  j      ('.': no padding is computed, it reads as zeros)
                | fork: shared pages
row 0..G-1 | . . a b c |  d x x x    generate() sees the whole prompt, and a cache that holds
row G..    | e f g h i |  j y y      all of it but one token: it feeds the last and goes on
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any, Literal, cast

from transformers import GenerationConfig
from transformers.cache_utils import Cache

from memtools._bridge import connect
from memtools.integrations._transformers_cache import PooledCache, PooledLayer
from memtools.integrations._transformers_model import check_pool, pool_for
from memtools.integrations._transformers_rows import View, as_held
from memtools.integrations._transformers_settings import Settings, accepts

if TYPE_CHECKING:
    import torch

    from memtools import KVLease, KVPool
else:
    torch = connect().torch


class _OneRow:
    """One row of a lease from token `first` on, as if there were nothing else."""

    def __init__(self, lease: KVLease, row: int, first: int) -> None:
        self.pool = cast("KVPool", lease.pool)
        self._lease, self._row, self._first = lease, row, first
        self._seen = [0] * lease.pool.num_layers

    def length(self, layer: int) -> int:
        return self._seen[layer]

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> View:
        rows, counts = self._lease.batch_size, [0] * self._lease.batch_size
        counts[self._row] = k.shape[2]
        k, v = as_held(self.pool, k, v)
        self._lease.update(layer, k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1), counts)
        self._seen[layer] += k.shape[2]
        return self.views(layer)

    def views(self, layer: int) -> View:
        row, end = slice(self._row, self._row + 1), self._first + self._seen[layer]
        k, v = self._lease.layer(layer)
        return k[row, :, self._first : end], v[row, :, self._first : end]


def generate_group(
    model: Any,
    input_ids: torch.Tensor,
    num_samples: int,
    pool: KVPool | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    compact_every: int | None = None,
    prefill: Literal["unpadded", "padded"] = "unpadded",
    **generate_kwargs: Any,
) -> Any:
    """`num_samples` answers to each prompt, as `model.generate(..., num_return_sequences=...)`
    gives them, with each prompt computed and stored once.

    Row `p * num_samples + s` of the result is answer s to prompt p. The seed decides the samples
    just as in plain `generate`; in float32 they were the same in all tests. In bfloat16 some rows
    differ, as they do when plain `generate` pads another way, because a prompt that is computed
    without padding rounds differently; `prefill="padded"` avoids that.

    Args:
        model: a decoder-only model of transformers, in eval mode.
        input_ids: `[prompts, tokens]`, padded on the left.
        num_samples: answers per prompt.
        pool: made by `pool_for(model, ...)`, with `max_tokens` of at least prompt + answer - 1 and
            `max_sequences` of at least `prompts * num_samples`. None makes one for this call; keep
            your own, and no later call takes new pages.
        attention_mask: `[prompts, tokens]`, 0 where padding is. None infers it from `pad_token_id`,
            as generate() does.
        compact_every: every so many tokens, rows that have ended are dropped from the batch, whose
            memory and time shrink with it. Greedy answers stay the same; samples are drawn from
            another stream of the same seed, because there are fewer rows to draw for.
        prefill: `"unpadded"` runs prompt by prompt, `"padded"` all at once as generate() does,
            which takes activations of prompts x tokens. Both honour `prefill_chunk_size`.
        generate_kwargs: as of `model.generate`, e.g. `max_new_tokens`, `do_sample`, or a
            `generation_config`.

    Returns what `model.generate` returns; in an output object `past_key_values` is None, because
    the rows are back in the pool.

    Raises:
        ValueError: before anything runs, for a pool that does not fit the model, padding on the
            right, keywords that cannot go with a shared prompt, and such as `compact_every` cannot
            be had with.
        IndexError: prompt and answer exceed `pool.max_tokens`; before anything runs.
        BudgetError: the pool's limit leaves no room for all rows; before the first new token.
    """
    settings = Settings(model, generate_kwargs)
    settings.check()
    if compact_every is not None:
        if compact_every < 1:
            raise ValueError(f"compact_every is at least 1 token, got {compact_every}")
        settings.check_chunks()
    if prefill not in ("unpadded", "padded"):
        raise ValueError(f'prefill is "unpadded" or "padded", got {prefill!r}')
    prompts, tokens = _shape(input_ids, num_samples)
    mask = settings.mask(input_ids, attention_mask)
    offsets = _offsets(mask) if prefill == "unpadded" else None
    longest = tokens + settings.new_tokens(tokens) - 1
    rows = prompts * num_samples
    with contextlib.ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(pool_for(model, longest, rows))
        _check_room(model, pool, rows, longest)
        with pool.acquire(prompts, tokens) as parent, torch.no_grad():
            chunk = settings.get("prefill_chunk_size")
            _prefill(model, parent, input_ids[:, :-1], mask[:, :-1], offsets, chunk)
            lease = parent.fork(num_samples, longest)
        cache = stack.enter_context(PooledCache.from_lease(lease))
        ids = input_ids.repeat_interleave(num_samples, 0)
        mask = mask.repeat_interleave(num_samples, 0)
        if compact_every is not None:
            return _generate_in_chunks(model, settings, ids, mask, cache, compact_every)
        out = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, **generate_kwargs
        )
        return out if isinstance(out, torch.Tensor) else _without_cache(out)


def _without_cache(out: Any) -> Any:
    """The same output object, less the cache, whose rows go back to the pool."""
    return type(out)(**{name: value for name, value in out.items() if name != "past_key_values"})


def _shape(input_ids: torch.Tensor, num_samples: int) -> tuple[int, int]:
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids are [prompts, tokens], got {list(input_ids.shape)}")
    if num_samples < 1:
        raise ValueError(f"num_samples is at least 1, got {num_samples}")
    return input_ids.shape[0], input_ids.shape[1]


def _check_room(model: Any, pool: KVPool, rows: int, longest: int) -> None:
    check_pool(model, pool)
    if longest > pool.max_tokens:
        raise IndexError(
            f"prompt and answer take {longest} tokens, the pool holds sequences of "
            f"{pool.max_tokens}; lower max_new_tokens, or make a pool with a larger max_tokens"
        )
    if rows > pool.max_sequences:
        raise ValueError(
            f"{rows} rows are asked for, the pool lends {pool.max_sequences} at once; "
            "lower num_samples, or make a pool with a larger max_sequences"
        )


def _offsets(mask: torch.Tensor) -> list[int]:
    """Where each prompt begins. ValueError where padding is not all on the left."""
    first = mask.shape[1] - (mask != 0).sum(1)
    left = torch.arange(mask.shape[1], device=mask.device) >= first[:, None]
    holes = ((mask != 0) != left).any(1).nonzero()
    if len(holes):
        raise ValueError(
            f"the attention mask of prompt {int(holes[0])} has zeros between its tokens; give the "
            'attention_mask, or set prefill="padded"'
        )
    return [int(offset) for offset in first.tolist()]


def _prefill(
    model: Any,
    lease: KVLease,
    ids: torch.Tensor,
    mask: torch.Tensor,
    offsets: list[int] | None,
    chunk: int | None,
) -> None:
    """Fills the lease's rows with all of `ids` [prompts, tokens], which may be none."""
    tokens = ids.shape[1]
    if tokens == 0:
        return
    ids, mask = ids.to(lease.pool.device), mask.to(lease.pool.device)  # as generate() does
    if offsets is None:
        padding = None if bool(mask.all()) else mask
        _forward(model, PooledCache.from_lease(lease), ids, padding, chunk)
    else:
        lease.advance([min(offset, tokens) for offset in offsets])  # padding reads as zeros
        for row, offset in enumerate(offsets):
            source = _OneRow(lease, row, offset)
            layers = [PooledLayer(source, i) for i in range(lease.pool.num_layers)]
            if offset < tokens:
                _forward(model, Cache(layers=layers), ids[row : row + 1, offset:], None, chunk)
    if set(lease.lengths) != {tokens}:
        raise RuntimeError(
            f"the model left {lease.lengths} of {tokens} prompt tokens in the cache; call "
            "model.eval(), since gradient checkpointing in training mode goes without a cache"
        )


def _forward(
    model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None, chunk: int | None
) -> None:
    """Runs the ids through the model for the sake of the cache, `chunk` tokens at a time."""
    extra: dict[str, Any] = {}
    if accepts(model, "logits_to_keep"):  # of all logits, those of one token
        extra["logits_to_keep"] = 1
    else:
        model = model.base_model
    positions = None
    if mask is not None and accepts(model, "position_ids"):
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
    tokens = ids.shape[1]
    for begin in range(0, tokens, chunk or tokens):
        end = min(begin + (chunk or tokens), tokens)
        if mask is not None:
            extra["attention_mask"] = mask[:, :end]
        if positions is not None:
            extra["position_ids"] = positions[:, begin:end]
        model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **extra)


def _generate_in_chunks(
    model: Any,
    settings: Settings,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: PooledCache,
    every: int,
) -> torch.Tensor:
    """generate() `every` tokens at a time; rows that have ended leave ids, mask and cache."""
    prompt = ids.shape[1]
    left, shortest = settings.new_tokens(prompt), settings.shortest(prompt)
    eos = torch.tensor(settings.eos(), device=ids.device, dtype=ids.dtype)
    alive = torch.arange(len(ids))  # rows of the result that ids, mask and cache stand for
    done: dict[int, torch.Tensor] = {}
    while len(alive):
        before = ids.shape[1]
        chunk = _chunk(settings, min(every, left), shortest - before)
        ids = model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **chunk)
        left -= ids.shape[1] - before
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - before)], 1)
        ended = torch.isin(ids[:, before:], eos).any(1) | (left == 0)
        done |= {int(alive[i]): ids[i] for i in ended.nonzero()[:, 0].tolist()}
        going = (~ended).cpu().nonzero()[:, 0]
        if 0 < len(going) < len(alive):
            cache.batch_select_indices(going)
        on = going.to(ids.device)
        alive, ids, mask = alive[going], ids[on], mask[on]
    return _stacked([done[i] for i in range(len(done))], settings.pad())


def _chunk(settings: Settings, tokens: int, shortest: int) -> dict[str, Any]:
    """Keywords of generate() for so many tokens more, the first `shortest` of which end nothing."""
    keywords = settings.keywords | {
        "max_length": None,
        "max_new_tokens": tokens,
        "min_length": None,
        "min_new_tokens": max(0, min(shortest, tokens)),
    }
    config = copy.deepcopy(keywords.pop("generation_config", None)) or GenerationConfig()
    rest = config.update(**keywords)
    return {"generation_config": config, **rest}


def _stacked(rows: list[torch.Tensor], pad: int | None) -> torch.Tensor:
    """Rows that ended at several lengths, filled up on the right."""
    out = rows[0].new_full((len(rows), max(len(row) for row in rows)), pad or 0)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
