"""nanochat's KVCache, in pages of a KVPool.

    from memtools.integrations.nanochat import KVCache      # in place of nanochat.engine's

nanochat has had two caches of that name, and engines that were written for either one work:

    new    KVCache(batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype)
           attention writes into get_layer_cache(i), (B, T, H, D), and calls advance(n)
    older  KVCache(batch_size, num_heads, seq_len, head_dim, num_layers)
           K, V = insert_kv(layer, k, v), (B, H, T, D); dtype and device come with the first k

With one pool for all caches of an engine, a generation uses the pages of the one before it:

    pool = pool_for(model, max_tokens=2048, max_sequences=16, limit="1 GiB")
    nanochat.engine.KVCache = cache_class(pool)

Memory is taken as tokens come, not by the constructor; `prefill` shares the prompt's pages with all
rows in place of copying them; and all pages go back when the object dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import memtools
from memtools._base.torch import connect

if TYPE_CHECKING:
    import torch

    from memtools import Budget, KVLease, KVPool
else:
    torch = connect().torch

_STEP = 1024  # past seq_len insert_kv() grows by so many tokens, as nanochat does
# The least tokens and rows of a pool that a cache makes for itself: a larger cache that is
# prefilled from it lies in the same pool.
_TOKENS, _ROWS = 8192, 256


def pool_for(
    model: Any,
    max_tokens: int,
    max_sequences: int,
    limit: int | str | Budget | None = None,
    **options: Any,
) -> KVPool:
    """Make a KVPool for all caches of an engine in nanochat's style.

    Args:
        model: the model, or its config: an object with `n_layer`, `n_head` and `n_embd`, and with
            `n_kv_head` and `head_dim` if they do not follow from these. Of a model the device is
            taken as well, and the dtype that nanochat would use: bfloat16 on CUDA, else the dtype
            of its weights.
        max_tokens: tokens that a row can hold, at least the largest `seq_len` of a cache. It costs
            addresses only.
        max_sequences: rows that a cache can have, at least 1.
        limit: the most bytes of pages, an int or like `"2 GiB"`, or a Budget; None, the default, is
            no limit.
        options: further arguments of KVPool, such as `device` and `dtype` for a config.

    Raises ValueError if the config lacks an entry.
    """
    config = getattr(model, "config", model)
    missing = [name for name in ("n_layer", "n_head", "n_embd") if not hasattr(config, name)]
    if missing:
        raise ValueError(
            f"{type(config).__name__} has no {', '.join(missing)}: it is no config in nanochat's "
            "style; make a memtools.KVPool of your own sizes"
        )
    heads = config.n_head
    sizes = {
        "num_layers": config.n_layer,
        "num_kv_heads": getattr(config, "n_kv_head", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.n_embd // heads,
        "max_tokens": max_tokens,
        "max_sequences": max_sequences,
        "limit": limit,
        "name": "nanochat.KVCache",
    }
    return memtools.KVPool(**{**sizes, **_kind_of(model), **options})


def _kind_of(model: Any) -> dict[str, Any]:
    """The device and dtype of a model's cache; empty for a config."""
    weights = next(model.parameters(), None) if hasattr(model, "parameters") else None
    if weights is None:
        return {}
    on_cuda = weights.device.type == "cuda"
    return {"device": weights.device, "dtype": torch.bfloat16 if on_cuda else weights.dtype}


def cache_class(pool: KVPool) -> type[KVCache]:
    """Make a subclass of KVCache whose caches lie in `pool`, for an engine to use as its own."""
    return type("KVCache", (KVCache,), {"shared_pool": pool, "__module__": __name__})


class KVCache:
    """K and V of `batch_size` sequences: a drop-in for nanochat's KVCache.

    `prefill(other)` shares pages if both caches lie in one pool, or neither was given a pool.
    `reset()` and `prefill()` may move this cache and the one it is prefilled from: read `k_cache`,
    `v_cache` and `get_layer_cache` again after them, as nanochat does in every forward pass.

    On CUDA `k_cache` and `get_layer_cache` take the pages of all `seq_len` tokens, because kernels
    write there without telling; `insert_kv` takes pages as tokens come.

    Args:
        batch_size: rows, at least 1.
        num_heads: heads of K, and of V, in each layer.
        seq_len: the most tokens of a row.
        head_dim: elements of one head.
        num_layers: layers of the model.
        device: the device of K and V. None, the default, as in nanochat's older style, takes that
            of the first `insert_kv` or `prefill`.
        dtype: their dtype; None as for `device`.
        pool: a KVPool of these layers, heads and elements, so that caches share a limit, statistics
            and idle pages. None, the default, takes the pool of `cache_class()`, or makes one of
            its own without a limit.

    Raises:
        ValueError: the pool does not fit.
        BudgetError: raised by the call that needs room which the pool's limit does not leave.
    """

    #: The model may keep something here; prefill() expands it to all rows.
    prev_embedding: Any = None
    #: Set by cache_class(), and used if `pool` is None.
    shared_pool: ClassVar[KVPool | None] = None

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        seq_len: int,
        head_dim: int,
        num_layers: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        pool: KVPool | None = None,
    ) -> None:
        self.batch_size, self.n_heads, self.max_seq_len = batch_size, num_heads, seq_len
        self.head_dim, self.n_layers = head_dim, num_layers
        pool = self.shared_pool if pool is None else pool
        self._pool, self._is_own_pool = pool, pool is None
        self._lease: KVLease | None = None
        # K and V as the engine has them. None where the lease has to make its buffers writable
        # first, which it has to again after a crop and after a fork of it.
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pos = 0
        if pool is not None:
            device, dtype = self._check_pool(pool, device, dtype)
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._make_lengths()

    def _check_pool(
        self, pool: KVPool, device: Any, dtype: Any
    ) -> tuple[torch.device, torch.dtype]:
        asked = {
            "num_layers": self.n_layers,
            "num_kv_heads": self.n_heads,
            "head_dim": self.head_dim,
            "dtype": dtype or pool.dtype,
            "device type": torch.device(device or pool.device).type,
        }
        has = {name: getattr(pool, name, pool.device.type) for name in asked}
        wrong = [f"{name} {has[name]}, not {x}" for name, x in asked.items() if has[name] != x]
        if self.max_seq_len > pool.max_tokens:
            wrong.append(f"max_tokens {pool.max_tokens}, less than seq_len {self.max_seq_len}")
        if self.batch_size > pool.max_sequences:
            wrong.append(f"max_sequences {pool.max_sequences}, less than {self.batch_size} rows")
        if wrong:
            raise ValueError(f"the pool does not fit this cache: it has {'; '.join(wrong)}")
        return pool.device, pool.dtype

    def _make_lengths(self) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be changed outside it
            self.cache_seqlens = torch.zeros(
                self.batch_size, dtype=torch.int32, device=self._device or "cpu"
            )

    # --- rows of the pool -------------------------------------------------------------------------

    def _own_pool(self, tokens: int) -> KVPool:
        return memtools.KVPool(
            self.n_layers,
            self.n_heads,
            self.head_dim,
            max_tokens=tokens,
            max_sequences=max(_ROWS, self.batch_size),
            dtype=self._dtype or torch.bfloat16,
            device=self._device or "cpu",
            name="nanochat.KVCache",
        )

    def _rows(self) -> KVLease:
        """The lease. It is acquired when it is needed, as prefill() shares another cache's."""
        if self._lease is None:
            if self._pool is None:
                self._pool = self._own_pool(max(_TOKENS, 4 * self.max_seq_len))
            self._lease = self._pool.acquire(self.batch_size)
        return self._lease

    def _hold(self, lease: KVLease | None) -> None:
        """Go on with this lease, or none, and release the one before."""
        before, self._lease, self._views = self._lease, lease, None
        if before is not None:
            before.release()

    def _set_pos(self, pos: int) -> None:
        self._pos = pos
        self.cache_seqlens.fill_(pos)

    def _take_lengths(self) -> None:
        """Give the lease the lengths of `cache_seqlens`, which an engine may have changed."""
        lengths, lease = self.cache_seqlens.tolist(), self._rows()
        if any(has > wanted for has, wanted in zip(lease.lengths, lengths, strict=True)):
            lease.crop(lengths)
            self._views = None
        more = [wanted - has for has, wanted in zip(lease.lengths, lengths, strict=True)]
        if any(more):
            lease.advance(more)

    # --- what both styles have -------------------------------------------------------------------

    def get_pos(self) -> int:
        """The number of tokens in each row: `cache_seqlens[0]`."""
        return int(self.cache_seqlens[0].item())

    def reset(self) -> None:
        """Empty the cache, and give its pages back to the pool."""
        self._hold(None)
        self._set_pos(0)
        self.prev_embedding = None

    def prefill(self, other: Any) -> None:
        """Start with the tokens that another cache holds. If both lie in one pool, none is copied.

        Args:
            other: a cache of this class or of nanochat's own, with one row for all rows of this
                cache or as many rows as this one.

        Raises AssertionError if this cache is not empty or `other` does not fit, as nanochat does;
        TypeError if it is not a KV cache.
        """
        self._check_other(other)
        pos = int(other.get_pos())
        if pos > 0:
            if isinstance(other, KVCache):
                other._take_lengths()
            if isinstance(other, KVCache) and self._shares_with(other):
                lease = other._rows()
                self._pool, self._dtype, self._device = other._pool, other._dtype, other._device
                self._hold(lease.fork(self.batch_size // other.batch_size))
                other._views = None
            else:
                self._copy(other, pos)
            self._set_pos(pos)
            self._take_lengths()
        if getattr(other, "prev_embedding", None) is not None:
            self.prev_embedding = other.prev_embedding.expand(self.batch_size, -1, -1).clone()

    def _check_other(self, other: Any) -> None:
        """Refuse a cache that does not fit, also under python -O, where assert does nothing."""
        sizes = ("n_layers", "n_heads", "head_dim", "batch_size", "max_seq_len", "get_pos")
        missing = [name for name in sizes if not hasattr(other, name)]
        if missing:
            raise TypeError(
                f"prefill() takes a KV cache, got {type(other).__name__} without {missing[0]}"
            )
        if self.get_pos() != 0:
            raise AssertionError("Cannot prefill a non-empty KV cache")
        if isinstance(other, KVCache) and other._dtype is None:
            raise AssertionError("Cannot prefill with a None KV cache")
        for name in ("n_layers", "n_heads", "head_dim"):
            if getattr(self, name) != getattr(other, name):
                raise AssertionError(f"{name}: {getattr(self, name)} != {getattr(other, name)}")
        if other.batch_size not in (1, self.batch_size):
            raise AssertionError(f"Batch dim mismatch: {self.batch_size} != {other.batch_size}")
        if self.max_seq_len < other.max_seq_len:
            raise AssertionError(f"Seq len mismatch: {self.max_seq_len} < {other.max_seq_len}")

    def _shares_with(self, other: KVCache) -> bool:
        pool = other._rows().pool
        if self._views is not None:  # the engine has them, and expects the prompt there
            return False
        if self._dtype not in (None, pool.dtype) or self._device not in (None, other._device):
            return False
        if not (self._is_own_pool and other._is_own_pool):
            return pool is self._pool
        return pool.max_tokens >= self.max_seq_len and pool.max_sequences >= self.batch_size

    def _copy(self, other: Any, pos: int) -> None:
        for layer in range(self.n_layers):
            k, v = _tokens_of(other, layer, pos)
            if layer == 0:
                self._take_kind(k)
                self._take_lengths()  # drops what an insert_kv() left that was not finished
            self._rows().update(layer, self._fitted(k), self._fitted(v))

    def _take_kind(self, k: torch.Tensor) -> None:
        """Take dtype and device from the first tensor, if the cache was made without them."""
        if self._dtype is None:
            self._dtype = k.dtype
        if self._device is None:
            self._device = k.device
            self._make_lengths()

    def _fitted(self, x: torch.Tensor) -> torch.Tensor:
        """x as assignment to a slice would take it: of any dtype, and one row for all rows."""
        x = x.to(self._device, self._dtype)
        return x.expand(self.batch_size, -1, -1, -1) if x.shape[0] == 1 else x

    # --- the new style ---------------------------------------------------------------------------

    def _full(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._views is None:
            lease = self._rows()
            if lease.pool.device.type != "cpu":
                lease.reserve(self.max_seq_len)
            k, v = (x[:, :, :, : self.max_seq_len].transpose(2, 3) for x in lease.buffers())
            self._views = k, v
        return self._views

    @property
    def k_cache(self) -> torch.Tensor:
        """K, `(n_layers, batch_size, max_seq_len, n_heads, head_dim)`, a view with strides of its
        own, to be written in place. Behind the last token it reads zeros."""
        return self._full()[0]

    @property
    def v_cache(self) -> torch.Tensor:
        """V; see `k_cache`."""
        return self._full()[1]

    def get_layer_cache(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, `(batch_size, max_seq_len, n_heads, head_dim)`, as views.

        Args:
            layer_idx: the layer, from 0.
        """
        k, v = self._full()
        return k[layer_idx], v[layer_idx]

    def advance(self, num_tokens: int) -> None:
        """Count tokens that were written to all layers of every row.

        Args:
            num_tokens: how many, behind those that were there.

        Raises IndexError if there would be more than `max_seq_len`.
        """
        pos = self._pos + num_tokens
        if pos > self.max_seq_len:
            raise IndexError(
                f"cannot advance from {self._pos} by {num_tokens} tokens: seq_len is "
                f"{self.max_seq_len}; make the cache with a larger seq_len"
            )
        self._rows().advance(num_tokens)
        self._pos = pos
        self.cache_seqlens += num_tokens

    # --- the older style -------------------------------------------------------------------------

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of `kv_cache`, `(n_layers, 2, batch_size, n_heads, max_seq_len, head_dim)`."""
        rows = (self.batch_size, self.n_heads, self.max_seq_len, self.head_dim)
        return (self.n_layers, 2, *rows)

    @property
    def kv_cache(self) -> torch.Tensor | None:
        """K and V in one view of shape `kv_shape`; None before the first tokens."""
        if self._lease is None:
            return None
        k, v = (x.transpose(2, 3) for x in self._full())
        rows = k.stride()
        strides = (rows[0], v.storage_offset() - k.storage_offset(), *rows[1:])
        return k.as_strided(self.kv_shape, strides)

    @property
    def pos(self) -> int:
        """The number of tokens in every row. It can be set, lower to drop tokens, or higher."""
        return self._pos

    @pos.setter
    def pos(self, pos: int) -> None:
        self._set_pos(pos)
        if self._lease is not None:
            self._take_lengths()

    def insert_kv(
        self, layer_idx: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens of one layer at `pos`. The last layer's call advances `pos`.

        Args:
            layer_idx: the layer's number, from 0.
            k, v: the tokens, `(B, H, t, D)`. The cache grows if they exceed `max_seq_len`.

        Returns views of all tokens of the layer, `(B, H, T, D)`.

        Raises IndexError if a pool that was given ends before the last token.
        """
        self._take_kind(k)
        k, v = self._fitted(k), self._fitted(v)
        end = self._pos + k.shape[2]
        if end > self.max_seq_len:
            self._grow(end)
        if self._rows().seq_length(layer_idx) < self._pos:  # pos was set ahead of the tokens
            self._take_lengths()
        lease = self._rows()
        if lease.seq_length(layer_idx) == self._pos:
            pair = lease.update(layer_idx, k, v)
        else:
            pair = self._insert_again(layer_idx, k, v)
        if layer_idx == self.n_layers - 1:
            self._set_pos(end)
        return pair

    def _insert_again(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """insert_kv() over tokens of this layer that are there: `pos` has not advanced since."""
        lease, start, count = self._rows(), self._pos, k.shape[2]
        over = min(lease.seq_length(layer) - start, count)
        with torch.no_grad():
            for view, new in zip(lease.layer(layer), (k, v), strict=True):
                view[:, :, start : start + over] = new[:, :, :over]
        if over < count:
            lease.update(layer, k[:, :, over:], v[:, :, over:])
        return lease.layer(layer, tokens=start + count)

    def _grow(self, end: int) -> None:
        needed = -(-(end + _STEP) // _STEP) * _STEP
        if self._is_own_pool and needed > self._rows().pool.max_tokens:
            self._move(self._own_pool(4 * needed))
        most = self._rows().pool.max_tokens
        if end <= most:  # else update() says so
            self.max_seq_len, self._views = min(needed, most), None

    def _move(self, pool: KVPool) -> None:
        """Move to a pool with more addresses: the only case in which growth copies tokens."""
        before, lease = self._rows(), pool.acquire(self.batch_size)
        for layer in range(self.n_layers):
            if before.seq_length(layer) > 0:
                lease.update(layer, *before.layer(layer))
        self._pool = pool
        self._hold(lease)


def _tokens_of(other: Any, layer: int, pos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (B, H, pos, D), of a KVCache of this module or of nanochat's own."""
    if isinstance(other, KVCache):
        return other._rows().layer(layer, tokens=pos)
    k, v = other.get_layer_cache(layer)
    return k[:, :pos].transpose(1, 2), v[:, :pos].transpose(1, 2)
