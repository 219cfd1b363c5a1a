"""The rows of a KVPool behind a PooledCache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtools._base.torch import connect

if TYPE_CHECKING:
    import torch

    from memtools import KVLease, KVPool
else:
    torch = connect().torch

View = tuple["torch.Tensor", "torch.Tensor"]


def as_held(pool: KVPool, k: torch.Tensor, v: torch.Tensor) -> View:
    """k and v in the pool's dtype, if that is autocast's doing: it leaves some models with float32
    keys beside bfloat16 values, and attention rounds both to its own dtype afterwards. Otherwise as
    they are: another dtype is a mistake, and the pool says so."""
    if k.dtype is v.dtype is pool.dtype or not torch.is_autocast_enabled(k.device.type):
        return k, v
    return k.to(pool.dtype), v.to(pool.dtype)


class Rows:
    """The lease behind a PooledCache, or how to get it."""

    def __init__(self, pool: KVPool, batch_size: int | None, num_tokens: int) -> None:
        self.pool = pool
        self.lease: KVLease | None = None
        self.released = False
        self._batch_size = batch_size  # None: whatever the first update brings
        self.num_tokens = num_tokens
        self._fitting: KVLease | None = None  # the lease, once an update was seen to fit it
        self._forwards = -1  # since generate() began; -1: not in generate(), or not to be watched
        if batch_size is not None:
            self.hold(pool.acquire(batch_size, num_tokens))

    def hold(self, lease: KVLease) -> None:
        """Goes on with this lease in place of the one before."""
        before, self.lease, self._fitting = self.lease, lease, None
        self._most = lease.batch_size  # select() takes no more rows than there were at acquire
        if before is not None:
            before.release()

    def release(self) -> None:
        self.released = True
        self.drop()

    def drop(self) -> None:
        lease, self.lease, self._fitting = self.lease, None, None
        if lease is not None:
            lease.release()

    def restart(self) -> None:
        if self.lease is not None and self._batch_size is not None:
            self.lease.crop(0)
        else:
            self.drop()

    def length(self, layer: int) -> int:
        return 0 if self.lease is None else self.lease.seq_length(layer)

    def views(self, layer: int) -> View | tuple[None, None]:
        return (None, None) if self.lease is None else self.lease.layer(layer)

    def update(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> View:
        k, v = as_held(self.pool, k, v)
        lease = self._fitting
        if lease is None:
            lease = self._begin(layer, k)
        if layer == 0 and self._forwards >= 0:
            self._watch(lease, k.shape[2])
        return lease.update(layer, k, v)

    def _begin(self, layer: int, k: torch.Tensor) -> KVLease:
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

    def generate_begins(self) -> None:
        self._forwards = 0

    def tokens_come_back(self) -> None:
        """Assisted decoding: whole drafts come in, what was not accepted is cropped."""
        self._forwards = -1

    def _watch(self, lease: KVLease, count: int) -> None:
        """After its first forward, generate() without use_cache gives all tokens again, one more
        than there are: they would be appended, and the answer be wrong without a word."""
        self._forwards += 1
        if self._forwards < 2:
            return
        self._forwards = -1
        if count > 1 and count == lease.seq_length(0) + 1:
            raise ValueError(
                f"the model gives all {count} tokens again after the cache took {count - 1}: "
                "generate() ran with use_cache=False; leave it out, or leave out the cache"
            )

    def at_most(self, rows: list[int]) -> KVLease:
        """A lease that may select this many rows: the one there is, or a fork with more of them."""
        assert self.lease is not None
        if len(rows) > self._most:
            self.hold(self.lease.fork(-(-len(rows) // self.lease.batch_size)))
        return self.lease
