"""cache_shape: layers and heads of a model's cache of keys and values, by the names that
configurations use.

Heads are those of K and V: with grouped queries there are fewer of them than of queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memtools._base.number import whole_number

_MISSING = object()


class CacheShape(NamedTuple):
    layers: int
    heads: int
    head_dim: int


def cache_shape(config: Any) -> CacheShape:
    """The shape of a text model's cache.

    Args:
        config: its configuration: an object, or a dict of it.

    Raises TypeError or ValueError if an entry is missing or no number.
    """
    layers = _number(config, "num_hidden_layers", "num_layers", "n_layer")
    queries = _number(config, "num_attention_heads", "n_head")
    head_dim = _number(config, "head_dim", default=None)
    if head_dim is None:
        width = _number(config, "hidden_size", "n_embd")
        if width % queries:
            raise ValueError(f"config has hidden_size {width:,}, not a multiple of {queries} heads")
        head_dim = width // queries
    return CacheShape(layers, _heads(config, queries), head_dim)


def entry(config: Any, name: str) -> Any:
    """An entry of a configuration; None if it has none."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _heads(config: Any, queries: int) -> int:
    """The heads of K and V. Falcon has one or, in its newer form, repeats its few heads before they
    come to the cache."""
    if entry(config, "new_decoder_architecture"):
        return queries
    if entry(config, "multi_query"):
        return 1
    return int(_number(config, "num_key_value_heads", "num_kv_heads", default=queries))


def _number(config: Any, *names: str, default: Any = _MISSING) -> Any:
    """The first of these entries that a configuration has and that is not None."""
    for name in names:
        value = entry(config, name)
        if value is not None:
            return whole_number(f"config.{name}", value)
    if default is _MISSING:
        raise ValueError(
            f"config has no {names[0]}: pass a model's configuration, such as model.config"
        )
    return default
