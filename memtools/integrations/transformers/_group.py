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
from typing import TYPE_CHECKING, Any, Literal

from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from memtools._base.torch import connect
from memtools.integrations.transformers._cache import PooledCache
from memtools.integrations.transformers._model import check_pool, geometry, pool_for
from memtools.integrations.transformers._prefill import (
    forget_positions,
    needs_padding,
    offsets,
    prefill_rows,
)
from memtools.integrations.transformers._settings import Settings, cache_argument

if TYPE_CHECKING:
    import torch

    from memtools import KVPool
else:
    torch = connect().torch


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
    """Generate several answers to each prompt, with each prompt computed and stored once.

    The answers are those of `model.generate(..., num_return_sequences=num_samples)`. The seed
    decides the samples as it does there; in float32 they were the same in all tests. In bfloat16
    some rows differ, because a prompt that is computed without its padding rounds differently, as
    it does when `generate` pads another way; `prefill="padded"` avoids that.

    Args:
        model: a decoder-only model of transformers, in eval mode.
        input_ids: the prompts, `[prompts, tokens]`, padded on the left.
        num_samples: answers to each prompt, at least 1.
        pool: a pool made by `pool_for(model, ...)`, with `max_tokens` of at least prompt + answer
            - 1 and `max_sequences` of at least `prompts * num_samples`. None, the default, makes
            one for this call; with a pool of your own, later calls take no new pages.
        attention_mask: `[prompts, tokens]`, 0 for padding. None, the default, infers it from
            `pad_token_id` as generate() does.
        compact_every: drop the rows that have ended every so many tokens, at least 1, so that the
            batch takes less memory and time. Greedy answers stay the same; samples become others of
            the same seed, because there are fewer rows to draw for. None, the default, keeps all
            rows to the end.
        prefill: `"unpadded"`, the default, runs one prompt after another; `"padded"` runs all at
            once as generate() does, with the activations of prompts x tokens. Both honour
            `prefill_chunk_size`. The first call for a model computes a row of 9 tokens both ways,
            in eval mode. If the logits differ, the model takes a token's place from the length of
            the cache, and all calls for it are "padded".
        generate_kwargs: arguments of `model.generate`, such as `max_new_tokens`, `do_sample` or a
            `generation_config`.

    Returns what `model.generate` returns. Row `p * num_samples + s` is answer s to prompt p. In an
    output object the cache is None, because the rows are back in the pool.

    Raises:
        ValueError: before anything runs, if the pool does not fit the model, a prompt is padded on
            the right, or an argument does not work with a shared prompt or with `compact_every`.
        IndexError: before anything runs, if prompt and answer exceed `pool.max_tokens`.
        BudgetError: before the first new token, if the pool's limit leaves no room for all rows.
    """
    geometry(model)  # ValueError for a model that no pool serves, before anything else
    settings = Settings(model, generate_kwargs)
    settings.check()
    if compact_every is not None:
        if compact_every < 1:
            raise ValueError(f"compact_every must be at least 1 token, got {compact_every}")
        settings.check_chunks()
    if prefill not in ("unpadded", "padded"):
        raise ValueError(f'prefill is "unpadded" or "padded", got {prefill!r}')
    prompts, tokens = _shape(input_ids, num_samples)
    mask = settings.mask(input_ids, attention_mask)
    begins = offsets(mask) if prefill == "unpadded" else None
    longest = tokens + settings.new_tokens(tokens) - 1
    rows = prompts * num_samples
    with contextlib.ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(pool_for(model, longest, rows))
        _check_room(model, pool, rows, longest)
        if begins is not None and needs_padding(model, input_ids):
            begins = None
        forget_positions(model)
        with pool.acquire(prompts, tokens) as parent, torch.no_grad():
            chunk = settings.get("prefill_chunk_size")
            prefill_rows(model, parent, input_ids[:, :-1], mask[:, :-1], begins, chunk)
            lease = parent.fork(num_samples, longest)
        cache = stack.enter_context(PooledCache.from_lease(lease))
        ids = input_ids.repeat_interleave(num_samples, 0)
        mask = mask.repeat_interleave(num_samples, 0)
        if compact_every is not None:
            return _generate_in_chunks(model, settings, ids, mask, cache, compact_every)
        generate_kwargs[cache_argument(model)] = cache
        out = model.generate(input_ids=ids, attention_mask=mask, **generate_kwargs)
        return out if isinstance(out, torch.Tensor) else _without_cache(out)


def _without_cache(out: Any) -> Any:
    """The same output object without the cache, whose rows go back to the pool."""
    return type(out)(**{k: v for k, v in out.items() if k not in ("cache", "past_key_values")})


def _shape(input_ids: torch.Tensor, num_samples: int) -> tuple[int, int]:
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids are [prompts, tokens], got {list(input_ids.shape)}")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
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


def _generate_in_chunks(
    model: Any,
    settings: Settings,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: PooledCache,
    every: int,
) -> torch.Tensor:
    """Generate `every` tokens at a time, and drop rows that have ended from ids, mask and cache."""
    prompt = ids.shape[1]
    left, shortest = settings.new_tokens(prompt), settings.shortest(prompt)
    eos = torch.tensor(settings.eos(), device=ids.device, dtype=ids.dtype)
    alive = torch.arange(len(ids))  # for each row of ids, mask and cache, its row of the result
    done: dict[int, torch.Tensor] = {}
    while len(alive):
        before = ids.shape[1]
        config = _remaining(settings, left, shortest - before)
        stop = StoppingCriteriaList([_AtLength(before + every)])
        ids = model.generate(
            input_ids=ids,
            attention_mask=mask,
            stopping_criteria=stop,
            **{cache_argument(model): cache},
            **config,
        )
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


class _AtLength(StoppingCriteria):  # type: ignore[misc]
    """Stops generate() at the end of a chunk, without what it does at the last token of all."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        over = input_ids.shape[1] >= self._tokens
        return torch.full((len(input_ids),), over, device=input_ids.device)


def _remaining(settings: Settings, tokens: int, shortest: int) -> dict[str, Any]:
    """Arguments of generate() for `tokens` more tokens; no row ends within the first `shortest`."""
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
    """Rows of several lengths as one tensor, filled up on the right with `pad`."""
    out = rows[0].new_full((len(rows), max(len(row) for row in rows)), pad or 0)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out
