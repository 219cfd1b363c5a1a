"""prompts_once: model.generate() computes each prompt once, and goes on with a row for each answer.

generate(ids of 2 prompts)      2 rows     the model's own prefill, with all inputs of the call
    |  repeat cache, logits
    v                           2 x G      decoding, as with num_return_sequences=G

Nothing is known about the model here: what generate() would have computed G times is computed once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import GenerationMixin
from transformers.cache_utils import Cache, EncoderDecoderCache

from memtools._base.torch import connect
from memtools.integrations.transformers._cache import PooledCache

if TYPE_CHECKING:
    import torch
else:
    torch = connect().torch


@contextlib.contextmanager
def prompts_once(model: Any, samples: int, num_tokens: int | None = None) -> Iterator[None]:
    """Within, `model.generate` gives `samples` answers to each row of its inputs.

    Args:
        model: a model of transformers, or one in PEFT's wrapper.
        samples: rows for each prompt.
        num_tokens: tokens expected in each row, for which a pool keeps room.

    Raises ValueError if the model has a generate() of its own, or, after the prefill, if it keeps
    its past elsewhere than in a Cache.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if type(inner).generate is not GenerationMixin.generate:
        raise ValueError(
            f"{type(inner).__name__} has its own generate(), which cannot compute a prompt once; "
            "use model.generate"
        )
    expand, prefill = inner._expand_inputs_for_generation, inner._prefill
    inputs: dict[str, Any] = {}  # those of the prompts, before generate() repeats them

    def keep_and_expand(expand_size: int = 1, **given: Any) -> Any:
        inputs.clear()
        inputs.update(given)
        return expand(expand_size=samples, **_without_its_containers(given))

    def prefill_once(_: Any, config: Any, keywords: dict[str, Any], *args: Any, **more: Any) -> Any:
        ids = inputs["input_ids"]
        of_prompts = {name: inputs.get(name, value) for name, value in keywords.items()}
        out = prefill(ids, config, of_prompts, *args, **more)
        cache = out.get("cache", out.get("past_key_values"))
        if not isinstance(cache, Cache):
            raise ValueError(
                f"{type(inner).__name__} returns no Cache of transformers, so that a prompt that "
                "is computed once cannot be repeated; use model.generate"
            )
        pooled = [each for each in keywords.values() if isinstance(each, PooledCache)]
        for each in pooled:
            each.batch_repeat_interleave(samples, num_tokens)
        if cache not in pooled:  # Phi-3 makes one where it begins to rotate positions otherwise
            _repeat_rows(cache, samples)
        return _repeated(out, ids.shape[0], samples)

    inner._expand_inputs_for_generation, inner._prefill = keep_and_expand, prefill_once
    try:
        yield
    finally:
        del inner._expand_inputs_for_generation, inner._prefill


def _repeat_rows(cache: Any, samples: int) -> None:
    """Repeat every row of one of transformers' own caches."""
    if isinstance(cache, EncoderDecoderCache):
        _repeat_rows(cache.self_attention_cache, samples)
        _repeat_rows(cache.cross_attention_cache, samples)
        return
    if "batch_repeat_interleave" in vars(type(cache)):  # MiniMax has states besides the layers
        cache.batch_repeat_interleave(samples)
        return
    for layer in cache.layers:
        if rows := _rows(layer):
            layer.reorder_cache(torch.arange(rows).repeat_interleave(samples))


def _rows(layer: Any) -> int:
    """The rows that a layer of a cache holds; 0 for one that holds nothing."""
    states = [getattr(layer, "keys", None)]
    for name in ("conv_states", "recurrent_states"):
        states += getattr(layer, name, {}).values()
    return next((state.shape[0] for state in states if state is not None), 0)


def _without_its_containers(value: Any) -> Any:
    """The same tensors in other dicts and outputs, for generate() repeats those in place."""
    if not isinstance(value, dict):
        return value
    made = copy.copy(value)
    for name, part in value.items():
        made[name] = _without_its_containers(part)
    return made


def _repeated(value: Any, rows: int, samples: int) -> Any:
    """The same output with each row `samples` times; caches are repeated already."""
    if isinstance(value, torch.Tensor):
        fits = value.ndim > 0 and value.shape[0] == rows
        return value.repeat_interleave(samples, 0) if fits else value
    if isinstance(value, dict):
        made = copy.copy(value)
        for name, part in value.items():
            made[name] = _repeated(part, rows, samples)
        return made
    if isinstance(value, (tuple, list)):
        return type(value)(_repeated(part, rows, samples) for part in value)
    return value
