"""The shape of a transformers model's KV cache, and pools of that shape.

It is read from the config where all layers keep K and V of one shape. For other models one token is
run through the model with transformers' own cache:

layer   transformers' own cache          in the pool
0       a state of linear attention      (the layer keeps it by itself)
1       K of 512, V of 64 elements       layer 0, heads of 512: V has 448 zeros behind it
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

import memtools
from memtools._base.modelconfig import CacheShape, cache_shape
from memtools._base.torch import connect
from memtools.integrations.transformers._settings import cache_argument

if TYPE_CHECKING:
    import torch

    from memtools import Budget, KVPool
else:
    torch = connect().torch

# A pool whose heads are as wide as the widest K or V may be so many times as large as needed.
_MOST_PADDING = 2.0
# Models that a pool cannot serve, for a reason that their cache does not show.
_BY_TYPE = {
    "cpmant": "it adds its own tokens before each prompt",
    "moshi": "it has no mask for its window, which transformers' own cache cuts off",
    "mimo_v2_flash": "its sliding layers have twice the heads of the others",
    "gpt_neox_japanese": "its attention takes keys and values only where they lie packed in memory",
}
# Models with a past that is no Cache of transformers, or that a first call would change.
_UNSERVED = {
    "big_bird": "it turns sparse attention off for good at its first short text",
    "bigbird_pegasus": "it turns sparse attention off for good at its first short text",
    "xlm": "it keeps keys and values in its own dictionary",
    "xlstm": "it is a recurrent model without keys and values",
}


class Geometry(NamedTuple):
    """The shape of a model's cache, by the names of KVPool's parameters."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


_measured: weakref.WeakKeyDictionary[Any, CacheShape | str] = weakref.WeakKeyDictionary()


def geometry(model: Any) -> Geometry:
    """The shape of the model's cache.

    Raises ValueError if the cache is not K and V of one number of heads in every layer that keeps
    them.
    """
    check_cache(model)
    shape = _shape(model)
    if isinstance(shape, str):
        raise ValueError(
            f"a KVPool cannot hold the cache of {type(model).__name__}: {shape}; use transformers' "
            "own cache"
        )
    return Geometry(*shape, model.dtype, model.device)


def check_cache(model: Any) -> None:
    """Raise ValueError if the model takes no Cache of transformers, or cannot be served at all."""
    why = _UNSERVED.get(getattr(model.config, "model_type", ""))
    if not cache_argument(model) and not model.config.is_encoder_decoder:
        why = "its forward takes no cache of keys and values"
    if why is not None:
        raise ValueError(f"a KVPool cannot serve {type(model).__name__}: {why}; use model.generate")


def why_no_pool(model: Any) -> str:
    """Why a pool cannot hold the cache of a model that takes a cache; "" if it can."""
    shape = _shape(model)
    return shape if isinstance(shape, str) else ""


def arranged(model: Any, pooled: list[Any]) -> list[Any]:
    """The layers of a cache for the model: in turn those of the pool where the model keeps K and V
    of each token, and transformers' own layers where it does not."""
    if _is_ordinary(config := model.config.get_text_config(decoder=True)):
        return pooled
    rest = iter(pooled)
    return [next(rest) if _keeps_tokens(layer) else layer for layer in _own_cache(config).layers]


def goes_unpadded(model: Any) -> bool:
    """Whether prompts can go through the model one by one: a pool holds all that it keeps, and
    positions are not rotated by the length of the longest row (longrope, dynamic)."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {
        str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)
    }
    if any("dynamic" in kind or kind == "longrope" for kind in kinds):
        return False
    return _is_ordinary(config) or all(map(_keeps_tokens, _own_cache(config).layers))


def _own_cache(config: Any) -> Any:
    return DynamicCache(config=config)


def _keeps_tokens(layer: Any) -> bool:
    """Whether a layer of transformers keeps K and V of every token. The mask of a sliding layer
    hides those before its window."""
    return type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)


def _is_ordinary(config: Any) -> bool:
    """Whether a text model's config says that all layers keep K and V of one shape."""
    if getattr(config, "is_heterogeneous", False) or getattr(config, "num_kv_shared_layers", None):
        return False
    latent = getattr(config, "kv_lora_rank", None) or getattr(config, "qk_head_dim", None)
    keys, values = (getattr(config, name, None) for name in ("head_dim", "v_head_dim"))
    return not (
        latent
        or (keys and values and keys != values)
        or getattr(config, "num_attention_heads", None) is None
        or not all(map(_keeps_tokens, _own_cache(config).layers))
    )


def _shape(model: Any) -> CacheShape | str:
    """The layers, heads and width of heads that a pool has for the model, or why there is none."""
    config = model.config
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model, with two caches"
    config = config.get_text_config(decoder=True)
    if reason := _BY_TYPE.get(getattr(config, "model_type", "")):
        return reason
    try:
        is_ordinary = _is_ordinary(config)
    except KeyError as unknown:
        return f"it has layers of type {unknown.args[0]}, which transformers' cache does not know"
    if is_ordinary:
        return cache_shape(config)
    if model not in _measured:
        _measured[model] = _measure(model, config)
    return _measured[model]


def _measure(model: Any, config: Any) -> CacheShape | str:
    """What a forward pass of one token leaves in transformers' own cache."""
    cache = _own_cache(config)
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    with without_chance(model), torch.no_grad():
        try:
            model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            return f"a forward pass of one token fails ({type(error).__name__}: {error})"
    kept = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    others = {type(layer).__name__ for layer in kept if not _keeps_tokens(layer)}
    if others or not kept:
        kinds = others or {type(layer).__name__ for layer in cache.layers}
        return f"it has layers of type {', '.join(sorted(kinds))}"
    if any(layer.keys is None for layer in kept):
        return "some of its layers keep nothing"
    shapes = [(x.shape[1], x.shape[3]) for layer in kept for x in (layer.keys, layer.values)]
    heads, widths = {heads for heads, _ in shapes}, [width for _, width in shapes]
    if len(heads) > 1:
        return f"its keys and values have {' and '.join(map(str, sorted(heads)))} heads"
    padding = max(widths) * len(widths) / sum(widths)
    if padding > _MOST_PADDING:
        return f"with all heads of {max(widths)} elements it would take {padding:.1f} x the memory"
    return CacheShape(len(kept), heads.pop(), max(widths))


@contextlib.contextmanager
def without_chance(model: Any) -> Iterator[None]:
    """All modules in eval mode: two passes with dropout differ in any case."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def pool_for(
    model: Any,
    max_tokens: int,
    max_sequences: int,
    limit: int | str | Budget | None = None,
    **options: Any,
) -> KVPool:
    """Make a KVPool with the layers, heads, dtype and device of a transformers model.

    Heads are as wide as the widest keys or values. If these differ, the pool takes more memory than
    the cache needs: 1.78 times as much for DeepSeek-V3.

    Args:
        model: a decoder-only model of transformers.
        max_tokens: tokens of a sequence, prompt and answer together, without the last one. It costs
            addresses, not memory.
        max_sequences: rows of a batch; `prompts * num_samples` for groups.
        limit: the most bytes of pages, or like "2 GiB"; or a Budget.
        options: further arguments of KVPool, such as `dtype=torch.bfloat16` for a float32
            model that generates under autocast.

    Raises ValueError if layers have different numbers of heads or padding would take more than
    twice the memory.
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
