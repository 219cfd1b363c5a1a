"""PooledCache: a `transformers.Cache` whose K and V lie in a KVPool.

PooledCache --.                        no layer refers to the cache: the pages go back to the
PooledLayer --+--> Rows --> KVLease    pool when the last reference to it goes, without a run
PooledLayer --'                        of the garbage collector
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never, Protocol, Self, cast

from transformers.cache_utils import Cache, CacheLayerMixin

from memtools._base.torch import connect
from memtools.integrations.transformers.model import check_pool
from memtools.integrations.transformers.rows import Rows, View

if TYPE_CHECKING:
    import torch

    from memtools import KVLease, KVPool
else:
    torch = connect().torch


class Source(Protocol):
    """Where a layer's K and V are: some rows of a lease."""

    pool: KVPool

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> View: ...
    def views(self, layer: int) -> View | tuple[None, None]: ...
    def length(self, layer: int) -> int: ...


class PooledLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a cache in a pool. `keys` and `values` are views of what is there now."""

    is_compileable = False
    is_sliding = False  # all tokens are kept; a model with a window masks what lies before it
    is_croppable = True
    supports_early_init = False

    def __init__(self, source: Source, index: int) -> None:  # the base class would assign keys
        self._source = source
        self._index = index

    @property
    def keys(self) -> torch.Tensor | None:
        return self._source.views(self._index)[0]

    @property
    def values(self) -> torch.Tensor | None:
        return self._source.views(self._index)[1]

    @property
    def is_initialized(self) -> bool:
        return self._source.length(self._index) > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: rows are acquired by the first update of the cache."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> View:
        return self._source.update(self._index, key_states, value_states)

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
    """A cache for `model.generate(..., past_key_values=cache)`, in pages of a KVPool.

    Takes greedy search, sampling, beam search and beam sampling, `num_return_sequences`, assisted
    and prompt-lookup decoding and chunked prefill, with the tokens that `DynamicCache` gives. No
    update copies what is there. Beams share the pages of what they have in common, and `fork` those
    of a prompt; leaving the `with` block, or dropping the cache, gives all pages back to the pool.
    Models with sliding windows are right too; their old tokens are kept.

    Args:
        pool: made by `pool_for(model, ...)`.
        batch_size: rows, acquired at once; None acquires as many as the first update brings, and
            again after `reset()`. Beams count: `prompts * num_beams`.
        num_tokens: tokens expected in each row, a hint: the pool keeps room for them.

    Raises:
        BudgetError: the pool's limit leaves no room; also by a later update.
        IndexError: by the update that would exceed `pool.max_tokens`; nothing is written.
        ValueError: by the first update, where the pool does not fit the model, and by generate()
            with `use_cache=False`.

    Like every cache, it holds the tokens it was given: to generate from the same prompt again,
    `rewind(n)` to the n tokens that are to stay (all of the prompt but its last token).
    """

    def __init__(self, pool: KVPool, batch_size: int | None = None, num_tokens: int = 0) -> None:
        self._rows = Rows(pool, batch_size, num_tokens)
        super().__init__(layers=[PooledLayer(self._rows, i) for i in range(pool.num_layers)])

    @classmethod
    def for_model(
        cls, model: Any, pool: KVPool, batch_size: int | None = None, num_tokens: int = 0
    ) -> Self:
        """A cache of `pool`, which is compared with the model's config first (ValueError)."""
        check_pool(model, pool)
        return cls(pool, batch_size, num_tokens)

    @classmethod
    def from_lease(cls, lease: KVLease) -> Self:
        """A cache that goes on with the rows of `lease`, and owns it from now on."""
        cache = cls(cast("KVPool", lease.pool))
        cache._rows._batch_size = lease.batch_size
        cache._rows.hold(lease)
        return cache

    @property
    def pool(self) -> KVPool:
        return self._rows.pool

    @property
    def lease(self) -> KVLease | None:
        """The rows in the pool; None before the first update of a cache without `batch_size`."""
        return self._rows.lease

    @property
    def batch_size(self) -> int:
        """Rows; -1 as long as that is open."""
        lease = self._rows.lease
        return -1 if lease is None else lease.batch_size

    # generate() sets this at its start, on every cache that a user passes.
    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, _: bool) -> None:
        self._rows.generate_begins()

    def activate_past_recording(self) -> None:
        self._rows.tokens_come_back()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> View:
        """Appends K and V `[B, H, t, D]` and returns views of all, `[B, H, T, D]`."""
        return self._rows.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._rows.length(layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` tokens away; 0 does nothing. A positive number is the
        length to crop to, as it was in transformers before version 5."""
        if tokens_to_remove != 0 and self._rows.lease is not None:
            self._rows.lease.crop(int(tokens_to_remove))

    def rewind(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens of every row: back to an earlier state, for another
        generate() from there. IndexError where there are fewer."""
        length = self.get_seq_length()
        if not 0 <= num_tokens <= length:
            raise IndexError(f"cannot rewind a cache of {length} tokens to {num_tokens}")
        if self._rows.lease is not None:
            self._rows.lease.crop(num_tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was; full pages are shared, not copied."""
        if self._rows.lease is not None:
            self._rows.lease.reorder(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | slice) -> None:
        """Keeps (or repeats) these rows: an index tensor, a mask, a list, a tuple or a slice."""
        if self._rows.lease is not None:
            every = torch.arange(self._rows.lease.batch_size)
            indices = indices.cpu() if isinstance(indices, torch.Tensor) else indices
            rows = every[indices, ...].tolist()
            self._rows.at_most(rows).select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row; the rows share their pages until they write."""
        if self._rows.lease is not None and repeats != 1:
            self._rows.hold(self._rows.lease.fork(repeats))

    def fork(self, n: int = 1, num_tokens: int | None = None) -> Self:
        """A cache of its own in which row `r * n + i` continues row r; pages are shared until they
        are written. `num_tokens` is the hint of KVPool.acquire."""
        if self._rows.lease is None:
            raise ValueError("an empty PooledCache without batch_size has no rows to fork")
        return self.from_lease(self._rows.lease.fork(n, num_tokens))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """fork(1): what transformers' guides do to use one prefilled prompt many times."""
        rows = self._rows
        return type(self)(self.pool, None, rows.num_tokens) if rows.lease is None else self.fork()

    def reset(self) -> None:
        """Drops all tokens; the pages go back to the pool."""
        self._rows.restart()

    def release(self) -> None:
        """Gives the rows back. May be called again; `generate` on it is a ValueError."""
        self._rows.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        size = f"{self.batch_size} rows of {self.get_seq_length()} tokens"
        return f"PooledCache({size if self._rows.lease is not None else 'no rows'})"
