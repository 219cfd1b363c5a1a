"""The shape of a transformers model's KV cache, read from its config, and pools of that shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import memtools
from memtools._base.modelconfig import cache_shape
from memtools._base.torch import connect
from memtools.integrations.transformers._settings import cache_argument

if TYPE_CHECKING:
    import torch

    from memtools import Budget, KVPool
else:
    torch = connect().torch

# Layers that keep K and V of every token. The mask of a sliding layer hides those before its
# window.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# Models that a pool cannot serve, for a reason that their config does not show.
_BY_TYPE = {
    "cpmant": "it puts tokens of its own before each prompt",
    "mimo_v2_flash": "its sliding layers have twice the heads of the others",
    "xlm": "it keeps keys and values in a dictionary of its own",
    "xlstm": "it is a recurrent model without keys and values",
    "gpt_neox_japanese": "its attention takes keys and values only where they lie packed in memory",
}


class Geometry(NamedTuple):
    """The shape of a model's cache, by the names of KVPool's parameters."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


def geometry(model: Any) -> Geometry:
    """The shape of the model's cache.

    Raises ValueError if the cache is not K and V of one shape in every layer.
    """
    config, name = model.config, type(model).__name__
    if not (config.is_encoder_decoder or cache_argument(model)):
        raise ValueError(
            f"a KVPool cannot serve {name}: its forward takes no cache of keys and values; "
            "generate without a pool"
        )
    if config.is_encoder_decoder:
        fault: str | None = "it is an encoder-decoder model, with two caches"
    else:
        config = config.get_text_config(decoder=True)
        fault = _why_unfit(config)
    if fault is not None:
        raise ValueError(
            f"a KVPool cannot hold the cache of {name}: {fault}; use transformers' own cache"
        )
    return Geometry(*cache_shape(config), model.dtype, model.device)


def _why_unfit(config: Any) -> str | None:
    """Why a pool cannot hold the cache of a decoder with this config; None if it can."""
    if reason := _BY_TYPE.get(getattr(config, "model_type", "")):
        return reason
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
    return None


def pool_for(
    model: Any,
    max_tokens: int,
    max_sequences: int,
    limit: int | str | Budget | None = None,
    **options: Any,
) -> KVPool:
    """Make a KVPool with the layers, heads, dtype and device of a transformers model.

    Args:
        model: a decoder-only model of transformers.
        max_tokens: tokens that a sequence can have, prompt and answer together, at least 1; the
            last token of an answer needs no room. It costs addresses only: pages are taken as
            tokens come.
        max_sequences: rows that a batch can have, at least 1; `prompts * num_samples` for groups.
        limit: the most bytes of pages, an int or like `"2 GiB"`, or a Budget; None, the default, is
            no limit.
        options: further arguments of KVPool. `dtype=torch.bfloat16` serves a float32 model that
            generates under autocast, in half the memory.

    Raises TypeError if `model` has no config, ValueError if its cache is not K and V of one shape
    in every layer.
    """
    if not hasattr(model, "config"):
        raise TypeError(f"pool_for() takes a model of transformers, got {type(model).__name__}")
    sizes = {"max_tokens": max_tokens, "max_sequences": max_sequences, "limit": limit}
    return memtools.KVPool(**{**geometry(model)._asdict(), **sizes, **options})


def check_pool(model: Any, pool: KVPool) -> None:
    """Raise ValueError if the pool does not fit the model; the message names every difference.
    Under autocast a pool of autocast's dtype fits as well."""
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
