"""generate_group: prefill each prompt once, fork it, sample from all forks at once.

"unpadded"  | . . a b c |  d      all tokens but the last go through the model once per prompt
            | e f g h i |  j      ('.': no padding is computed, it reads as zeros)
                 | fork: shared pages
row 0..G-1  | . . a b c |  d x x x    generate() sees the whole prompt, and a cache that holds
row G..     | e f g h i |  j y y      all of it but one token: it feeds the last and goes on

"padded"    generate() runs its own prefill for a row per prompt; after it the cache is repeated:
            rows of a pool share their pages, rows of transformers' own cache are copied
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from memtools._base.torch import connect
from memtools.integrations.transformers._cache import PooledCache
from memtools.integrations.transformers._first_call import NEW_TOKENS, gives_the_same_logits
from memtools.integrations.transformers._model import (
    check_cache,
    check_pool,
    goes_unpadded,
    pool_for,
    why_no_pool,
)
from memtools.integrations.transformers._prefill import (
    forget_positions,
    offsets,
    prefill_rows,
)
from memtools.integrations.transformers._prompts_once import prompts_once
from memtools.integrations.transformers._settings import Settings, cache_argument

if TYPE_CHECKING:
    import torch

    from memtools import KVPool
else:
    torch = connect().torch

#: How prompts are computed: see above; "copied" is "padded" without a pool.
Way = Literal["unpadded", "padded", "copied"]
_logger = logging.getLogger("memtools")


def generate_group(
    model: Any,
    input_ids: torch.Tensor | None = None,
    num_samples: int | None = None,
    pool: KVPool | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    compact_every: int | None = None,
    prefill: Literal["unpadded", "padded"] = "unpadded",
    **generate_kwargs: Any,
) -> Any:
    """Generate several answers to each prompt, with each prompt computed and stored once.

    The answers are those of `model.generate(..., num_return_sequences=num_samples)` with the same
    seed: equal in float32 in all tests. In bfloat16 some rows differ, because prompts are computed
    without padding; `prefill="padded"` avoids that.

    If a model's cache does not fit a pool (encoder-decoders, layers with different heads, linear
    attention), the prompt's cache is copied for each answer. The first call for a model compares
    logits with `model.generate` on 9 tokens, and falls back to "padded" if necessary.

    Args:
        model: a model of transformers, in eval mode.
        input_ids: the prompts, `[prompts, tokens]`, padded on the left; or `inputs`.
        num_samples: answers to each prompt. None: `num_return_sequences`.
        pool: from `pool_for(model, ...)`, with `max_tokens` of at least prompt + answer - 1 and
            `max_sequences` of at least `prompts * num_samples`. None: a new pool.
        attention_mask: `[prompts, tokens]`, 0 for padding. None: inferred from `pad_token_id`.
        compact_every: every N tokens, drop the rows that have ended. Greedy answers do not change;
            samples differ. None: keep all rows.
        prefill: `"unpadded"` runs one prompt after another; `"padded"` runs all at once as
            generate() does. Both honour `prefill_chunk_size`.
        generate_kwargs: arguments of `model.generate`, such as `do_sample`. Inputs other than ids
            (`pixel_values`, `inputs_embeds` ...) use the "padded" prefill.

    Returns what `model.generate` returns, without the cache. Row `p * num_samples + s` is answer s
    to prompt p.

    Raises ValueError if the pool does not fit the model, a prompt is padded on the right, an
    argument does not work with a shared prompt or with `compact_every`, or the logits differ;
    IndexError beyond `pool.max_tokens`; BudgetError without room for all rows.
    """
    check_cache(model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not inner.generate.__module__.startswith("transformers."):
        raise ValueError(
            f"the program has replaced generate() of {type(inner).__name__}, and what that does "
            "with a cache is not known: use model.generate"
        )
    settings = Settings(model, generate_kwargs)
    if input_ids is None and not model.config.is_encoder_decoder:
        input_ids = generate_kwargs.pop("inputs", None)
    samples = settings.take_samples(num_samples)
    settings.check()
    if compact_every is not None:
        if compact_every < 1:
            raise ValueError(f"compact_every must be at least 1 token, got {compact_every}")
        settings.check_chunks()
    if prefill not in ("unpadded", "padded"):
        raise ValueError(f'prefill is "unpadded" or "padded", got {prefill!r}')
    if pool is None and (why := _why_copied(model, input_ids)):
        if compact_every is not None:
            raise ValueError(f"compact_every drops rows of a pool, and there is none: {why}")
        _logger.info("generate_group() copies the prompt's cache for each answer: %s", why)
        if input_ids is not None:
            which_way(model, input_ids, ("copied",))
            generate_kwargs["input_ids"] = input_ids
        return _copied(model, samples, generate_kwargs | {"attention_mask": attention_mask})
    if input_ids is None:
        raise ValueError("a pool needs to know the prompts: give input_ids, or leave out the pool")
    prompts, tokens = _shape(input_ids)
    mask = settings.mask(input_ids, attention_mask)
    unpadded = prefill == "unpadded" and not settings.inputs() and goes_unpadded(model)
    if unpadded:
        offsets(mask)
    longest = tokens + settings.new_tokens(tokens) - 1
    with contextlib.ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(pool_for(model, longest, prompts * samples))
        _check_room(model, pool, prompts * samples, longest)
        way = which_way(model, input_ids, ("unpadded", "padded") if unpadded else ("padded",))
        call = _Call(settings, input_ids, mask, samples, longest, compact_every)
        return _pooled(model, call, pool, way)


def which_way(model: Any, ids: torch.Tensor, ways: tuple[Way, ...]) -> Way:
    """The first of these ways whose logits are those of generate(), which the first call finds."""
    for way in ways:
        if gives_the_same_logits(model, ids, way, functools.partial(_row, model, way)):
            return way
    raise ValueError(
        f"{type(model).__name__} has other logits with a prompt that is computed once than in "
        "model.generate, by a row of 9 tokens: use model.generate"
    )


def _row(
    model: Any, way: Way, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **keywords: Any
) -> Any:
    """Two answers to a short row, for the first call."""
    if way == "copied":
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        return _copied(model, 2, keywords | inputs)
    longest = input_ids.shape[1] + NEW_TOKENS - 1
    call = _Call(Settings(model, keywords), input_ids, attention_mask, 2, longest)
    with pool_for(model, longest, 2) as pool:
        return _pooled(model, call, pool, way)


class _Call(NamedTuple):
    settings: Settings
    ids: torch.Tensor
    mask: torch.Tensor
    samples: int
    longest: int  # tokens of a row at the end, less one
    every: int | None = None


def _pooled(model: Any, call: _Call, pool: KVPool, way: Way) -> Any:
    """The answers with all rows in the pool."""
    (prompts, tokens), ids, mask = call.ids.shape, call.ids, call.mask
    forget_positions(model)
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(PooledCache.for_model(model, pool, prompts, tokens))
        once: Any = contextlib.nullcontext()
        if way == "unpadded" and cache.lease is not None:
            chunk = call.settings.get("prefill_chunk_size")
            with torch.no_grad():
                prefill_rows(model, cache.lease, ids[:, :-1], offsets(mask), chunk)
            cache.batch_repeat_interleave(call.samples, call.longest)
            ids, mask = (x.repeat_interleave(call.samples, 0) for x in (ids, mask))
        else:
            once = prompts_once(model, call.samples, call.longest)
        if call.every is not None:
            return _generate_in_chunks(model, call, ids, mask, cache, once)
        keywords = call.settings.keywords | {cache_argument(model): cache}
        with once:
            out = model.generate(input_ids=ids, attention_mask=mask, **keywords)
        return _without_cache(out)


def _copied(model: Any, samples: int, keywords: dict[str, Any]) -> Any:
    """The answers with transformers' own cache, copied for each answer."""
    forget_positions(model)
    with prompts_once(model, samples):
        return _without_cache(model.generate(**keywords))


def _why_copied(model: Any, input_ids: torch.Tensor | None) -> str:
    """Why the prompt's cache is copied for each answer; "" if a pool shares it."""
    why = why_no_pool(model)
    return why or ("" if input_ids is not None else "there are no input_ids")


def _without_cache(out: Any) -> Any:
    """The same output object without the cache, whose rows go back to the pool."""
    if isinstance(out, torch.Tensor):
        return out
    return type(out)(**{k: v for k, v in out.items() if k not in ("cache", "past_key_values")})


def _shape(input_ids: torch.Tensor) -> tuple[int, int]:
    if input_ids.ndim != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids are [prompts, tokens], got {list(input_ids.shape)}")
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
    call: _Call,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: PooledCache,
    once: contextlib.AbstractContextManager[None],
) -> torch.Tensor:
    """Generate `every` tokens at a time, and drop rows that have ended from ids, mask and cache.
    Within `once`, which is entered for the first tokens, a prompt becomes the rows of its answers.
    """
    settings, every, prompt = call.settings, call.every or 1, ids.shape[1]
    left, shortest = settings.new_tokens(prompt), settings.shortest(prompt)
    eos = torch.tensor(settings.eos(), device=ids.device, dtype=ids.dtype)
    rows = len(call.ids) * call.samples
    alive = torch.arange(rows)  # for each row of ids, mask and cache, its row of the result
    done: dict[int, torch.Tensor] = {}
    while len(alive):
        before = ids.shape[1]
        config = _remaining(settings, left, shortest - before)
        stop = StoppingCriteriaList([_AtLength(before + every)])
        with once:
            ids = model.generate(
                input_ids=ids,
                attention_mask=mask,
                stopping_criteria=stop,
                **{cache_argument(model): cache},
                **config,
            )
        once = contextlib.nullcontext()
        mask = mask.repeat_interleave(len(ids) // len(mask), 0)
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
