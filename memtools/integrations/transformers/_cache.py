"""PooledCache: a `transformers.Cache` whose K and V lie in a KVPool.

PooledCache --.                        no layer refers to the cache: the pages go back to the
PooledLayer --+--> Rows --> KVLease    pool when the last reference to it goes, without a run
PooledLayer --'                        of the garbage collector
own layer                              a layer of linear attention keeps its state by itself
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never, Protocol, Self, cast

from transformers.cache_utils import Cache, CacheLayerMixin

from memtools._base.torch import connect
from memtools.integrations.transformers._model import arranged, check_pool

if TYPE_CHECKING:
    import torch

    from memtools import KVLease, KVPool
else:
    torch = connect().torch

#: K and V of a layer, `[B, H, T, D]`.
Pair = tuple["torch.Tensor", "torch.Tensor"]


class Source(Protocol):
    """Where a layer's K and V are: some rows of a lease."""

    pool: KVPool

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Pair: ...
    def views(self, layer: int) -> Pair | tuple[None, None]: ...
    def length(self, layer: int) -> int: ...


def in_pools_dtype(pool: KVPool, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """k and v in the pool's dtype under autocast, which leaves some models with float32 keys beside
    bfloat16 values: attention rounds both to its own dtype afterwards. Without autocast they stay
    as they are: another dtype is a mistake there, and the pool refuses it."""
    if k.dtype is v.dtype is pool.dtype or not torch.is_autocast_enabled(k.device.type):
        return k, v
    return k.to(pool.dtype), v.to(pool.dtype)


class Rows:
    """The rows of a cache: the lease, or how to acquire it.

    Args:
        pool: the pool.
        batch_size: rows to acquire at once; None acquires as many as the first update brings.
        num_tokens: tokens expected in each row.
    """

    def __init__(self, pool: KVPool, batch_size: int | None, num_tokens: int) -> None:
        self.pool = pool
        self.num_tokens = num_tokens
        self.batch_size = batch_size
        self.lease: KVLease | None = None
        self.most = 0  # rows that select() can take: as many as the lease had at first
        self.released = False
        #: forward passes since generate() began; -1: outside of it, or not to be watched
        self.forwards = -1
        self._fitting: KVLease | None = None  # the lease, once an update was seen to fit it
        if batch_size is not None:
            self.hold(pool.acquire(batch_size, num_tokens))

    def hold(self, lease: KVLease | None) -> None:
        """Go on with this lease, or none, and release the one before."""
        before, self.lease, self._fitting = self.lease, lease, None
        self.most = 0 if lease is None else lease.batch_size
        if before is not None:
            before.release()

    def length(self, layer: int) -> int:
        return 0 if self.lease is None else self.lease.seq_length(layer)

    def views(self, layer: int) -> Pair | tuple[None, None]:
        return (None, None) if self.lease is None else self.lease.layer(layer)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Pair:
        k, v = in_pools_dtype(self.pool, k, v)
        lease = self._fitting
        if lease is None:
            lease = self._begin(layer, k)
        if layer == 0 and self.forwards >= 0:
            self._watch(lease, k.shape[2])
        return lease.update(layer, k, v)

    def _begin(self, layer: int, k: torch.Tensor) -> KVLease:
        """The lease, acquired if there is none yet. Raises ValueError if an update does not fit."""
        if self.released:
            raise ValueError("this PooledCache was released; make a new one, or reset() it instead")
        pool = self.pool
        heads, dim = k.shape[1], k.shape[3]
        holds = (pool.num_kv_heads, pool.head_dim, pool.dtype, pool.device)
        if layer >= pool.num_layers or (heads, dim, k.dtype, k.device) != holds:
            raise ValueError(
                f"layer {layer} of the model gives {heads} heads of {dim}, {k.dtype} on {k.device}"
                f"; the pool has {pool.num_layers} layers with {pool.num_kv_heads} heads of "
                f"{pool.head_dim}, {pool.dtype} on {pool.device}; make one by pool_for(model, ...)"
            )
        if self.lease is None:
            self.hold(pool.acquire(k.shape[0], self.num_tokens))
        assert self.lease is not None
        if self.lease.batch_size != k.shape[0]:
            raise ValueError(
                f"the cache has {self.lease.batch_size} rows, the model runs {k.shape[0]}; make it "
                f"with batch_size={k.shape[0]}, or give every row its own by "
                "cache.batch_repeat_interleave(n)"
            )
        self._fitting = self.lease
        return self.lease

    def _watch(self, lease: KVLease, count: int) -> None:
        """Look at the second forward pass of a generate(). With use_cache=False it brings all
        tokens again and one more, which would be appended, and the answer would be wrong."""
        self.forwards += 1
        if self.forwards < 2:
            return
        self.forwards = -1
        if count > 1 and count == lease.seq_length(0) + 1:
            raise ValueError(
                f"the model gives all {count} tokens again after the cache took {count - 1}: "
                "generate() ran with use_cache=False, as an argument or in a generation_config; "
                "pass use_cache=True, or leave out the cache"
            )


class PooledLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache in a pool. `keys` and `values` are views of what is there now.

    Keys or values that are narrower than the pool's heads are stored with zeros behind them, which
    the views leave out.

    Args:
        source: where its K and V are.
        index: the layer's number in the pool.
    """

    is_compileable = False
    is_sliding = False  # all tokens are kept; a model with a window masks those before it
    is_croppable = True
    supports_early_init = False

    def __init__(self, source: Source, index: int) -> None:  # the base class would assign keys
        self._source = source
        self._index = index
        self.widths: tuple[int, int] | None = None  # elements of a head of K and of V, if narrower

    @property
    def keys(self) -> torch.Tensor | None:
        keys = self._source.views(self._index)[0]
        return keys if keys is None or self.widths is None else keys[..., : self.widths[0]]

    @property
    def values(self) -> torch.Tensor | None:
        values = self._source.views(self._index)[1]
        return values if values is None or self.widths is None else values[..., : self.widths[1]]

    @property
    def is_initialized(self) -> bool:
        return self._source.length(self._index) > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the first update of the cache acquires the rows."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Pair:
        width, narrow = self._source.pool.head_dim, (key_states.shape[3], value_states.shape[3])
        if max(narrow) > width or min(narrow) == width:  # a wider one is refused there
            return self._source.update(self._index, key_states, value_states)
        self.widths = narrow
        padded = (
            torch.nn.functional.pad(x, (0, width - x.shape[3])) for x in (key_states, value_states)
        )
        keys, values = self._source.update(self._index, *padded)
        return keys[..., : narrow[0]], values[..., : narrow[1]]

    def get_seq_length(self) -> int:
        return self._source.length(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._source.length(self._index) + query_length, 0

    def get_max_length(self) -> int:
        return int(self._source.pool.max_tokens)

    def _refuse(self, *args: Any, **kwargs: Any) -> Never:
        raise NotImplementedError(
            "the layers of a PooledCache share their rows: call this method of the cache itself"
        )

    reset = crop = reorder_cache = offload = prefetch = _refuse
    batch_repeat_interleave = batch_select_indices = _refuse


class PooledCache(Cache):  # type: ignore[misc]
    """A cache for `model.generate(..., cache=cache)` in pages of a KVPool (`past_key_values=`
    before transformers 5.24).

    It serves greedy search, sampling, beams, `num_return_sequences`, assisted decoding, prompt
    lookup and chunked prefill, with the tokens that `DynamicCache` gives. Old tokens of sliding
    windows are kept. Leaving the `with` block or dropping the cache returns all pages.

    To generate from the same prompt again, call `rewind(n)` with all prompt tokens but the last.

    Args:
        pool: a pool made by `pool_for(model, ...)`.
        batch_size: rows to acquire at once: `prompts * num_beams` for beams. None: as many as the
            first update has.
        num_tokens: tokens expected in each row, for which the pool keeps room.

    Raises BudgetError, also in updates, if the pool's limit leaves no room; IndexError if an update
    would exceed `pool.max_tokens`; ValueError if the pool does not fit the model, or with
    `use_cache=False`.
    """

    if TYPE_CHECKING:
        layers: list[Any]

    def __init__(self, pool: KVPool, batch_size: int | None = None, num_tokens: int = 0) -> None:
        self._rows = Rows(pool, batch_size, num_tokens)
        super().__init__(layers=[PooledLayer(self._rows, i) for i in range(pool.num_layers)])

    @classmethod
    def for_model(
        cls, model: Any, pool: KVPool, batch_size: int | None = None, num_tokens: int = 0
    ) -> Self:
        """Make a cache after checking that the pool fits the model.

        Args:
            model: a decoder-only model of transformers; ValueError if the pool does not fit it.
            pool, batch_size, num_tokens: as for PooledCache.
        """
        check_pool(model, pool)
        cache = cls(pool, batch_size, num_tokens)
        cache.layers = arranged(model, cache.layers)
        return cache

    @classmethod
    def from_lease(cls, lease: KVLease) -> Self:
        """Make a cache that continues with the rows of `lease` and owns it."""
        cache = cls(cast("KVPool", lease.pool))
        cache._rows.batch_size = lease.batch_size
        cache._rows.hold(lease)
        return cache

    @property
    def pool(self) -> KVPool:
        """Holds K and V."""
        return self._rows.pool

    @property
    def lease(self) -> KVLease | None:
        """The rows in the pool; None before the first update of a cache without `batch_size`."""
        return self._rows.lease

    @property
    def batch_size(self) -> int:
        """Rows; -1 before there are any."""
        lease = self._rows.lease
        return -1 if lease is None else lease.batch_size

    # generate() sets this at its start, for every cache that a user passes.
    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, _: bool) -> None:
        self._rows.forwards = 0

    def activate_past_recording(self) -> None:
        """Begin assisted decoding. transformers calls it."""
        self._rows.forwards = -1
        for layer in self._own_layers():
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def _own_layers(self) -> list[Any]:
        """The layers that are not in the pool."""
        return [layer for layer in self.layers if not isinstance(layer, PooledLayer)]

    def _take(self, rows: Sequence[int]) -> None:
        """Let row i of the layers that are not in the pool become what row `rows[i]` was."""
        for layer in self._own_layers():
            layer.reorder_cache(torch.tensor(rows, dtype=torch.long, device=self.pool.device))

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Pair:
        """Append K and V `[B, H, t, D]` of a layer. Returns views of all tokens, `[B, H, T, D]`."""
        if layer_idx >= len(self.layers):
            return self._rows.update(layer_idx, key_states, value_states)  # refuses the layer
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of each row in the layer."""
        layer = self.layers[layer_idx]
        return layer.get_seq_length() if isinstance(layer, PooledLayer) else self._rows.length(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end of every row.

        Args:
            tokens_to_remove: minus their number. A positive number is the length to crop to, as
                before transformers 5.
        """
        for layer in self._own_layers():
            if tokens_to_remove != 0 or getattr(layer, "record_past", False):
                layer.crop(tokens_to_remove)
        if tokens_to_remove != 0 and self._rows.lease is not None:
            self._rows.lease.crop(int(tokens_to_remove))

    def rewind(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of every row, to continue from an earlier state.

        Raises IndexError if there are fewer, ValueError if a layer keeps a state of all tokens.
        """
        if any(hasattr(layer, "has_previous_state") for layer in self._own_layers()):
            raise ValueError(
                "cannot rewind a cache with layers of linear attention, whose state has all "
                "tokens in it; fork() the cache before it continues"
            )
        length = self.get_seq_length()
        if not 0 <= num_tokens <= length:
            raise IndexError(f"cannot rewind a cache of {length} tokens to {num_tokens}")
        if self._rows.lease is not None:
            self._rows.lease.crop(num_tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace row i with row `beam_idx[i]`. Full pages are shared, not copied."""
        if self._rows.lease is not None:
            self._rows.lease.reorder(beam_idx)
            for layer in self._own_layers():
                layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keep or repeat rows. `indices` is an index tensor, a mask, a list, a tuple or a slice."""
        lease = self._rows.lease
        if lease is None:
            return
        indices = indices.cpu() if isinstance(indices, torch.Tensor) else indices
        chosen = torch.arange(lease.batch_size)[indices, ...].tolist()
        self._take(chosen)
        if len(chosen) > self._rows.most:
            repeats = -(-len(chosen) // lease.batch_size)
            lease = lease.fork(repeats)
            self._rows.hold(lease)
            chosen = [repeats * row for row in chosen]  # where the first copy of each row is
        lease.select(chosen)

    def batch_repeat_interleave(self, repeats: int, num_tokens: int | None = None) -> None:
        """Repeat every row `repeats` times; copies share pages until they are written.

        `num_tokens` is as in `fork`.
        """
        lease = self._rows.lease
        if lease is not None and (repeats != 1 or num_tokens is not None):
            rows = lease.batch_size
            self._rows.hold(lease.fork(repeats, num_tokens))
            self._take([row for row in range(rows) for _ in range(repeats)])

    def fork(self, n: int = 1, num_tokens: int | None = None) -> Self:
        """Make another cache that continues this one, sharing pages until they are written.

        Args:
            n: rows for each row of this cache. Row `r * n + i` continues row r.
            num_tokens: tokens expected in each row, including present ones. None: no room is kept.

        Raises ValueError if this cache has no rows yet.
        """
        lease = self._rows.lease
        if lease is None:
            raise ValueError("an empty PooledCache without batch_size has no rows to fork")
        made = self.from_lease(lease.fork(n, num_tokens))
        made._resemble(self)
        made._take([row for row in range(lease.batch_size) for _ in range(n)])
        return made

    def _resemble(self, other: PooledCache) -> None:
        """Have the layers of the other cache: copies of those that are not in the pool."""
        pooled = iter(self.layers)
        self.layers = [
            next(pooled) if isinstance(layer, PooledLayer) else copy.deepcopy(layer)
            for layer in other.layers
        ]
        for layer, before in zip(self.layers, other.layers, strict=True):
            if isinstance(layer, PooledLayer):
                layer.widths = before.widths

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """fork(1): transformers' guides copy a prefilled cache to use a prompt several times."""
        if self._rows.lease is not None:
            return self.fork()
        made = type(self)(self.pool, None, self._rows.num_tokens)
        made._resemble(self)
        return made

    def reset(self) -> None:
        """Drop all tokens and return the pages to the pool."""
        for layer in self._own_layers():
            layer.reset()
        if self._rows.lease is not None and self._rows.batch_size is not None:
            self._rows.lease.crop(0)
        else:
            self._rows.hold(None)

    def release(self) -> None:
        """Return the rows to the pool. Later use raises ValueError. May be called twice."""
        self._rows.released = True
        self._rows.hold(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        size = f"{self.batch_size} rows of {self.get_seq_length()} tokens"
        return f"PooledCache({size if self._rows.lease is not None else 'no rows'})"
