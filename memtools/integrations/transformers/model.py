"""What a KV cache of a transformers model looks like, read from its config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import memtools
from memtools._base.torch import connect
from memtools.integrations.transformers.settings import accepts

if TYPE_CHECKING:
    import torch

    from memtools import Budget, KVPool
else:
    torch = connect().torch

# Layers that keep K and V of every token. Where a window is smaller, the mask sees to it.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# What no other entry of a config tells.
_BY_TYPE = {
    "cpmant": "it puts tokens of its own before each prompt",
    "mimo_v2_flash": "its sliding layers have twice the heads of the others",
    "gpt_neox_japanese": "its attention takes keys and values only where they lie packed in memory",
}


class Geometry(NamedTuple):
    """Of one model's cache; the names are KVPool's."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def geometry(model: Any) -> Geometry:
    """Raises ValueError for a model whose cache is not K and V of one shape in every layer."""
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(_unfit(model, "it is an encoder-decoder model, with two caches"))
    if not accepts(model, "past_key_values"):
        raise ValueError(
            f"a KVPool cannot serve {type(model).__name__}: its forward takes no past_key_values, "
            "it keeps no keys and values; generate without a pool"
        )
    config = config.get_text_config(decoder=True)
    fault = _why_unfit(config)
    if fault is not None:
        raise ValueError(_unfit(model, fault))
    heads = config.num_attention_heads
    return Geometry(
        config.num_hidden_layers,
        _kv_heads(config),
        getattr(config, "head_dim", None) or config.hidden_size // heads,
        model.dtype,
        model.device,
    )


def _kv_heads(config: Any) -> int:
    """Heads of K and V in the cache. Falcon has one or, in its newer form, repeats its few before
    they come there."""
    if getattr(config, "new_decoder_architecture", False):
        return int(config.num_attention_heads)
    if getattr(config, "multi_query", False):
        return 1
    few = (getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads"))
    return int(next(filter(None, few), config.num_attention_heads))


def _unfit(model: Any, fault: str) -> str:
    name = type(model).__name__
    return f"a KVPool cannot hold the cache of {name}: {fault}; use transformers' own cache"


def _why_unfit(config: Any) -> str | None:
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if getattr(config, "kv_lora_rank", None) or getattr(config, "qk_head_dim", None):
        return "its keys and values differ in size (multi-head latent attention)"
    keys, values = (getattr(config, name, None) for name in ("head_dim", "v_head_dim"))
    if keys and values and keys != values:
        return f"its keys have heads of {keys} elements and its values of {values}"
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "is_heterogeneous", False):
        return "its layers differ in what they keep"
    if getattr(config, "num_attention_heads", None) is None:
        return f"{type(config).__name__} has no num_attention_heads"
    return _BY_TYPE.get(config.model_type)


def pool_for(
    model: Any,
    max_tokens: int,
    max_sequences: int,
    limit: int | str | Budget | None = None,
    **options: Any,
) -> KVPool:
    """A KVPool with the layers, heads, dtype and device of a transformers model.

    Args:
        model: any decoder-only model of transformers.
        max_tokens: of one sequence, prompt and answer together; the last token of an answer needs
            no room. Only addresses: pages are taken as tokens come.
        max_sequences: rows of one batch, `prompts * num_samples` for groups.
        limit: physical bytes at most, an int or like `"2 GiB"`, or a Budget; None is unlimited.
        options: passed on to KVPool. `dtype=torch.bfloat16` serves a float32 model that generates
            under autocast, in half the memory.

    Raises ValueError for a model that keeps something else than K and V of one shape in all layers.
    """
    if not hasattr(model, "config"):
        raise TypeError(f"pool_for() takes a model of transformers, got {type(model).__name__}")
    sizes = {"max_tokens": max_tokens, "max_sequences": max_sequences, "limit": limit}
    return memtools.KVPool(**{**geometry(model)._asdict(), **sizes, **options})


def check_pool(model: Any, pool: KVPool) -> None:
    """Raises ValueError that names every difference between the pool and the model. Under autocast
    a pool of its dtype fits too."""
    wanted = geometry(model)
    device = wanted.device.type
    if torch.is_autocast_enabled(device) and pool.dtype is torch.get_autocast_dtype(device):
        wanted = wanted._replace(dtype=pool.dtype)
    differ = [
        f"{name} {getattr(pool, name)} (the model has {value})"
        for name, value in wanted._asdict().items()
        if getattr(pool, name) != value
    ]
    if differ:
        raise ValueError(
            f"the pool does not fit {type(model).__name__}: {', '.join(differ)}; "
            f"make one by pool_for(model, max_tokens={pool.max_tokens}, "
            f"max_sequences={pool.max_sequences})"
        )
