"""estimate: the bytes of pages that a KVPool takes for the cache of a model, before there is one.

config ──► layers, heads of K and V, head_dim, dtype
tokens ──► blocks of whole pages, in each layer, K and V (csrc/core/kv/geometry.h)

Heads are those of K and V: with grouped queries there are fewer of them than of queries.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any, NamedTuple

from memtools._base.number import whole_number
from memtools._base.size import parse_bytes
from memtools._kv import tensors

CUDA_PAGE = 2 << 20
_MISSING = object()


class _Shape(NamedTuple):
    layers: int
    heads: int
    head_dim: int


def estimate(
    config: Any,
    tokens: int,
    sequences: int,
    shared_tokens: int,
    dtype: Any,
    device: Any,
    layout: str | None,
    layer_group: int,
    page_bytes: int | str | None,
) -> int:
    """What `KVPool.estimate` returns. Raises as it does."""
    tokens = whole_number("tokens", tokens, 0)
    sequences = whole_number("sequences", sequences)
    shared = whole_number("shared_tokens", shared_tokens, 0)
    if shared > tokens:
        raise ValueError(f"shared_tokens must be at most tokens, got {shared:,} of {tokens:,}")
    shape, cuda = _shape_of(config), tensors.device_of(device)[1] >= 0
    item_bytes = tensors.dtype_of(_dtype_of(config) if dtype is None else dtype).itemsize
    if layout not in (None, "head", "token"):
        raise ValueError(f'layout must be "head" or "token", got {layout!r}')
    layout = layout or ("token" if cuda else "head")
    group = whole_number("layer_group", layer_group)
    if group > 1 and layout == "head":
        raise ValueError('layer_group is for layout="token"')
    page = CUDA_PAGE if cuda else mmap.PAGESIZE
    page = page if page_bytes is None else parse_bytes(page_bytes, "page_bytes")
    if page & (page - 1):
        raise ValueError(f"page_bytes must be a power of two, got {page:,}")
    block_tokens, block_bytes = _block(shape, item_bytes, layout, group, page)
    whole = shared // block_tokens  # The last block that is shared is copied when a row writes.
    blocks = whole + sequences * (-(-tokens // block_tokens) - whole)
    return blocks * block_bytes


def _block(shape: _Shape, item_bytes: int, layout: str, group: int, page: int) -> tuple[int, int]:
    """(tokens, bytes) of the least run of tokens that fills whole pages in all layers."""
    row = shape.head_dim * item_bytes
    if layout == "head":
        ranges, token = 2 * shape.heads * shape.layers, row
    elif group == 1:
        ranges, token = 2 * shape.layers, row * shape.heads
    else:
        ranges, token = -(-shape.layers // group), 2 * group * row * shape.heads
    block_tokens = page // math.gcd(page, token)
    return block_tokens, ranges * block_tokens * token


def _shape_of(config: Any) -> _Shape:
    """Layers, heads of K and V, and the size of a head, by the names that configurations use."""
    text = getattr(config, "get_text_config", None)  # of a model of texts and images
    config = text() if callable(text) else config
    layers = _number(config, "num_hidden_layers", "num_layers", "n_layer")
    queries = _number(config, "num_attention_heads", "n_head")
    heads = _number(config, "num_key_value_heads", default=queries)
    head_dim = _number(config, "head_dim", default=None)
    if head_dim is None:
        width = _number(config, "hidden_size", "n_embd")
        if width % queries:
            raise ValueError(f"config has hidden_size {width:,}, not a multiple of {queries} heads")
        head_dim = width // queries
    return _Shape(layers, heads, head_dim)


def _number(config: Any, *names: str, default: Any = _MISSING) -> Any:
    """The first of these entries that a configuration has and that is not None."""
    for name in names:
        value = _entry(config, name)
        if value is not None:
            return whole_number(f"config.{name}", value)
    if default is _MISSING:
        raise ValueError(
            f"config has no {names[0]}: pass a model's configuration, such as model.config"
        )
    return default


def _dtype_of(config: Any) -> Any:
    """The dtype of a configuration; bfloat16, as of KVPool, where it has none."""
    found = _entry(config, "dtype")
    found = _entry(config, "torch_dtype") if found is None else found
    return "bfloat16" if found is None else found


def _entry(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
