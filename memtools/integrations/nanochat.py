"""nanochat's KVCache, in pages of a KVPool.

    from memtools.integrations.nanochat import KVCache      # in place of nanochat.engine's

nanochat has had two caches of that name, and engines written after either work:

    new    KVCache(batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype)
           attention writes into get_layer_cache(i), (B, T, H, D), and calls advance(n)
    older  KVCache(batch_size, num_heads, seq_len, head_dim, num_layers)
           K, V = insert_kv(layer, k, v), (B, H, T, D); dtype and device come with the first k

All caches of an engine in one pool, which a second generation finds filled with idle pages:

    pool = pool_for(model, max_tokens=2048, max_sequences=16, limit="1 GiB")
    nanochat.engine.KVCache = cache_class(pool)

Memory comes as tokens do, not with the constructor; `prefill` shares the prompt's pages with all
rows in place of copying it to each; and everything goes back when the object dies.
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

_STEP = 1024  # insert_kv() past seq_len grows by this, as nanochat does
_ROOM = 8192  # addresses of a pool of one's own: for the rows that prefill() from it, too
_ROWS = 256


def pool_for(
    model: Any,
    max_tokens: int,
    max_sequences: int,
    limit: int | str | Budget | None = None,
    **options: Any,
) -> KVPool:
    """A KVPool for all caches of an engine in nanochat's style.

    Args:
        model: the model, or its config: an object with `n_layer`, `n_head` and `n_embd`, and with
            `n_kv_head` and `head_dim` where they are not what follows from these. A model also says
            the device, and the dtype as nanochat has it: bfloat16 on CUDA, else its weights'.
        max_tokens: of one row, the largest `seq_len` that is asked for. It costs addresses only.
        max_sequences: rows of one cache at most.
        limit: bytes of pages at most, an int or like `"2 GiB"`, or a Budget; None is unlimited.
        options: passed on to KVPool; `device` and `dtype` where the model does not say them.

    Raises ValueError for a config without these entries.
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
    """Device and dtype of a model's cache; nothing for a config."""
    weights = next(model.parameters(), None) if hasattr(model, "parameters") else None
    if weights is None:
        return {}
    on_cuda = weights.device.type == "cuda"
    return {"device": weights.device, "dtype": torch.bfloat16 if on_cuda else weights.dtype}


def cache_class(pool: KVPool) -> type[KVCache]:
    """KVCache with all its caches in `pool`: what an engine calls in place of its own class."""
    return type("KVCache", (KVCache,), {"shared_pool": pool, "__module__": __name__})


class KVCache:
    """K and V of `batch_size` sequences; a drop-in for nanochat's.

    Args:
        batch_size, num_heads, seq_len, head_dim, num_layers: as in nanochat; heads are those of K
            and V, seq_len is the most tokens of a row.
        device, dtype: of the tensors. None, in the older style: those of the first `insert_kv` or
            `prefill`.
        pool: a KVPool of these layers, heads and head_dim, for one budget, for statistics, and for
            pages that the next cache finds ready. None takes that of `cache_class()`, or makes one
            of its own, without a limit.

    `prefill(other)` shares pages where both caches are of one pool, or neither was given any.
    `reset()` and `prefill()` may move the cache, and the one it is prefilled from: take `k_cache`,
    `v_cache` and `get_layer_cache` after them anew, as nanochat does in every forward.

    On CUDA, `k_cache` and `get_layer_cache` take the pages of all `seq_len` tokens, because kernels
    write there unannounced; `insert_kv` takes them as they come.

    Raises:
        ValueError: a pool that does not fit.
        BudgetError: the pool's limit leaves no room; by whatever needs the room.
    """

    prev_embedding: Any = None  #: free for the model's use; prefill() expands it to all rows
    shared_pool: ClassVar[KVPool | None] = None  #: of cache_class(), used where `pool` is None

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
        # As handed out. None where the lease has to make its buffers writable first: also after a
        # crop, and after a fork of it.
        self._views: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pos = 0
        if pool is not None:
            device, dtype = self._check_pool(pool, device, dtype)
        self._device = None if device is None else torch.device(device)
        self._dtype = dtype
        self._make_seqlens()

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

    def _make_seqlens(self) -> None:
        with torch.inference_mode(False):  # else nobody could change it outside of that mode
            self.cache_seqlens = torch.zeros(
                self.batch_size, dtype=torch.int32, device=self._device or "cpu"
            )

    # --- rows of the pool ----------------------------------------------------------------------

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
        """The lease, acquired when it is needed: until then prefill() can share another's."""
        if self._lease is None:
            if self._pool is None:
                self._pool = self._own_pool(max(_ROOM, 4 * self.max_seq_len))
            self._lease = self._pool.acquire(self.batch_size)
        return self._lease

    def _hold(self, lease: KVLease | None) -> None:
        """Goes on with this lease in place of the one before, whose views are no longer ours."""
        before, self._lease, self._views = self._lease, lease, None
        if before is not None:
            before.release()

    def _set_pos(self, pos: int) -> None:
        self._pos = pos
        self.cache_seqlens.fill_(pos)

    def _settle(self) -> None:
        """The lease's lengths become those of cache_seqlens, which anybody may have changed."""
        lengths, lease = self.cache_seqlens.tolist(), self._rows()
        if any(has > wanted for has, wanted in zip(lease.lengths, lengths, strict=True)):
            lease.crop(lengths)
            self._views = None
        more = [wanted - has for has, wanted in zip(lease.lengths, lengths, strict=True)]
        if any(more):
            lease.advance(more)

    # --- what both styles have -------------------------------------------------------------------

    def get_pos(self) -> int:
        """Tokens of the first row, and so of all: `cache_seqlens[0]`."""
        return int(self.cache_seqlens[0].item())

    def reset(self) -> None:
        """Empties the cache; its pages go back to the pool."""
        self._hold(None)
        self._set_pos(0)
        self.prev_embedding = None

    def prefill(self, other: Any) -> None:
        """Starts with what `other` holds; one row of it serves all rows of this cache.

        AssertionError unless this cache is empty and `other` fits. Where both are of one pool no
        token is copied. `other` may also be a cache of nanochat's own.
        """
        self._check_other(other)
        pos = int(other.get_pos())
        if pos > 0:
            if isinstance(other, KVCache):
                other._settle()
            if isinstance(other, KVCache) and self._shares_with(other):
                lease = other._rows()
                self._pool, self._dtype, self._device = other._pool, other._dtype, other._device
                self._hold(lease.fork(self.batch_size // other.batch_size))
                other._views = None
            else:
                self._copy(other, pos)
            self._set_pos(pos)
            self._settle()
        if getattr(other, "prev_embedding", None) is not None:
            self.prev_embedding = other.prev_embedding.expand(self.batch_size, -1, -1).clone()

    def _check_other(self, other: Any) -> None:
        """`raise` and not `assert`, which goes with python -O."""
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
        if self._views is not None:  # whoever holds them expects the prompt there
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
                self._settle()  # not one token from an insert_kv() that was left half done
            self._rows().update(layer, self._fitted(k), self._fitted(v))

    def _take_kind(self, k: torch.Tensor) -> None:
        """In the older style dtype and device come with the first tensor."""
        if self._dtype is None:
            self._dtype = k.dtype
        if self._device is None:
            self._device = k.device
            self._make_seqlens()

    def _fitted(self, x: torch.Tensor) -> torch.Tensor:
        """As assignment to a slice of the cache takes it: any kind, and one row for all."""
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
        """K, `(n_layers, batch_size, max_seq_len, n_heads, head_dim)`: a view of strides of its
        own, for writing in place. Past the tokens it reads zeros."""
        return self._full()[0]

    @property
    def v_cache(self) -> torch.Tensor:
        """V, as `k_cache`."""
        return self._full()[1]

    def get_layer_cache(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (K, V) of one layer, `(batch_size, max_seq_len, n_heads, head_dim)`."""
        k, v = self._full()
        return k[layer_idx], v[layer_idx]

    def advance(self, num_tokens: int) -> None:
        """`num_tokens` more were written to all layers. IndexError past `max_seq_len`."""
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
        """`(n_layers, 2, batch_size, n_heads, seq_len, head_dim)`, after growth the larger one."""
        rows = (self.batch_size, self.n_heads, self.max_seq_len, self.head_dim)
        return (self.n_layers, 2, *rows)

    @property
    def kv_cache(self) -> torch.Tensor | None:
        """K and V in one view of `kv_shape`; None before the first tokens."""
        if self._lease is None:
            return None
        k, v = (x.transpose(2, 3) for x in self._full())
        rows = k.stride()
        strides = (rows[0], v.storage_offset() - k.storage_offset(), *rows[1:])
        return k.as_strided(self.kv_shape, strides)

    @property
    def pos(self) -> int:
        """Tokens of every row. May be set: back, to drop tokens, or ahead."""
        return self._pos

    @pos.setter
    def pos(self, pos: int) -> None:
        self._set_pos(pos)
        if self._lease is not None:
            self._settle()

    def insert_kv(
        self, layer_idx: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k and v, `(B, H, t, D)`, at `pos` and returns all up to there, `(B, H, T, D)`.

        The last layer's call moves `pos`. Past `seq_len` the cache grows, up to a given pool's
        `max_tokens`: IndexError beyond.
        """
        self._take_kind(k)
        k, v = self._fitted(k), self._fitted(v)
        end = self._pos + k.shape[2]
        if end > self.max_seq_len:
            self._grow(end)
        if self._rows().seq_length(layer_idx) < self._pos:  # pos was set ahead of the tokens
            self._settle()
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
        """Over tokens that an insert_kv() of this layer wrote, after which `pos` did not move."""
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
        """To a pool with more addresses: the one case in which growing copies."""
        before, lease = self._rows(), pool.acquire(self.batch_size)
        for layer in range(self.n_layers):
            if before.seq_length(layer) > 0:
                lease.update(layer, *before.layer(layer))
        self._pool = pool
        self._hold(lease)


def _tokens_of(other: Any, layer: int, pos: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (B, H, pos, D), of a KVCache of ours or of nanochat."""
    if isinstance(other, KVCache):
        return other._rows().layer(layer, tokens=pos)
    k, v = other.get_layer_cache(layer)
    return k[:, :pos].transpose(1, 2), v[:, :pos].transpose(1, 2)
