"""KVPool and KVLease: KV caches in pages that are taken as tokens come, shared, and used again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from memtools import _core
from memtools._base import reclaim
from memtools._base.modelconfig import cache_shape, entry
from memtools._base.number import whole_number
from memtools._base.size import format_bytes, parse_bytes
from memtools._base.text import as_name
from memtools._budget import Budget, check_device
from memtools._kv import tensors

if TYPE_CHECKING:
    import torch

CUDA_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class KVStats:
    """What a pool holds now, in bytes, and what it has done, in counts.

    Shared pages count once. The pool occupies `live_bytes + idle_bytes`. A block is the pages of
    the same few tokens in all layers.
    """

    live_bytes: int  #: pages that hold tokens of leases
    shared_bytes: int  #: the part of live_bytes that more than one row uses
    idle_bytes: int  #: pages kept for the next lease
    promised_bytes: int  #: reserved for the num_tokens of leases, not taken yet
    reserved_bytes: int  #: live_bytes + max(idle_bytes, promised_bytes), which the budget counts
    physical_bytes: int  #: what the system counts for the pool
    peak_bytes: int  #: the largest live_bytes + idle_bytes
    payload_bytes: int  #: the tokens of all rows as if nothing were shared
    address_bytes: int  #: address space, which is not memory
    maps: int  #: memory map areas, an upper bound
    mapped_again_bytes: int  #: pages mapped at a further address, where resident bytes repeat them
    leases: int  #: alive, including those in `lingering`
    rows: int  #: rows of these leases
    lingering: int  #: released leases with live views
    lingering_bytes: int  #: pages that such views keep
    acquired: int  #: leases made by acquire()
    forked: int  #: leases made by fork()
    released: int  #: leases that ended
    taken: int  #: blocks taken from the system
    recycled: int  #: blocks used again
    dropped: int  #: blocks given back to the system
    copied: int  #: shared blocks copied because a row wrote to them
    map_calls: int  #: memory map areas ever made
    limit_bytes: int | None  #: the budget's limit
    #: the leases of `lingering`, like "lease 3 (16 rows x 1,088 tokens), 2 views"
    lingering_names: tuple[str, ...]

    def __str__(self) -> str:
        limit = "" if self.limit_bytes is None else f" of {format_bytes(self.limit_bytes)}"
        lingering = f", {self.lingering} kept by views" if self.lingering else ""
        return (
            f"{format_bytes(self.live_bytes)} live ({format_bytes(self.shared_bytes)} shared), "
            f"{format_bytes(self.idle_bytes)} idle, {format_bytes(self.reserved_bytes)}{limit} "
            f"reserved; {self.leases} leases of {self.rows} rows{lingering}"
        )


class KVLease(_core.KVLease):
    """Rows of a KV cache, lent by `KVPool.acquire` until the `with` block ends.

    `update(layer, k, v)` appends tokens and returns all tokens of the layer as views for any
    attention kernel; nothing is copied as it grows. Leaving the block, `release()` and garbage
    collection return every page at once, except pages of live views.

    Raises RuntimeError if two threads use a lease at the same time or a forked child uses it;
    ValueError after its release.
    """

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KVLease is memory of this process; send tensors, or fork() it")

    def __repr__(self) -> str:
        if self.released:
            return f"KVLease({self.name}, released)"
        try:
            rows = f"{self.batch_size} rows x {self.num_tokens:,} tokens"
        except RuntimeError:  # another thread is inside, a forked child, or views that torch moved
            rows = "in use elsewhere"
        return f"KVLease({self.name}, {rows})"


class KVPool(_core.KVPool):
    """A pool of KV caches for generation, which grow without copies and share their pages.

    Every row of a lease has an address range for `max_tokens` tokens, into which pages are mapped
    as tokens come. A batch is one strided tensor `[B, H_kv, T, D]` at a fixed address. Pages of a
    released lease stay for the next one until `trim()`.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and of V in each layer.
        head_dim: elements of one head.
        max_tokens: tokens that a row can hold. It costs addresses, not memory.
        max_sequences: rows of one lease. The number of leases is not limited.
        dtype: the dtype of K and V, a torch.dtype or its name.
        device: `"cpu"`, `"cuda"` (the current device) or like `"cuda:1"`.
        limit: the most bytes of pages, or like `"2 GiB"`, or a `Budget`. Shared pages count once.
        layout: what lies together: `"head"` a head's tokens, fastest and the default on the host;
            `"token"` a token's heads, for CUDA's large pages.
        layer_group: layers that share a page with `layout="token"`. More waste less memory with
            large pages.
        page_bytes: the page size, a power of two, or like `"2 MiB"`. None: 4 KiB on the host, 2 MiB
            on CUDA.
        name: the name in budgets and errors.

    Raises ValueError if the Budget is for another device, MemoryError if the system refuses the
    initial memory, DeviceError if there is no such device.
    """

    __slots__ = ()

    def __new__(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        max_tokens: int,
        max_sequences: int,
        dtype: torch.dtype | str = "bfloat16",
        device: torch.device | str = "cpu",
        limit: int | str | Budget | None = None,
        layout: Literal["head", "token"] | None = None,
        layer_group: int = 1,
        page_bytes: int | str | None = None,
        name: str = "KVPool",
    ) -> KVPool:
        kind = tensors.dtype_of(dtype)
        place, cuda = tensors.device_of(device)
        check_device(limit, str(place), as_name("name", name))
        sizes = (num_layers, num_kv_heads, head_dim, max_tokens, max_sequences)
        pool = super().__new__(
            cls,
            *sizes,
            kind,
            kind.itemsize,
            place,
            cuda,
            limit,
            layout or ("head" if cuda < 0 else "token"),
            layer_group,
            0 if page_bytes is None else parse_bytes(page_bytes, "page_bytes"),
            name,
            tensors,
        )
        reclaim.offer(pool)
        return pool

    @staticmethod
    def estimate(
        config: Any,
        tokens: int,
        sequences: int = 1,
        *,
        shared_tokens: int = 0,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        layout: Literal["head", "token"] | None = None,
        layer_group: int = 1,
        page_bytes: int | str | None = None,
    ) -> int:
        """Return the bytes of pages that a model's cache takes, without making a pool or a device.

        It equals `live_bytes` of a pool with these tokens, which count in all layers, also in those
        with a sliding window.

        Args:
            config: the model's configuration, such as `model.config`, or a dict with
                num_hidden_layers, num_key_value_heads (None: num_attention_heads) and head_dim
                (None: hidden_size / num_attention_heads).
            tokens: tokens of each row.
            sequences: rows of all leases together.
            shared_tokens: how many of the tokens all rows share, as after `fork`.
            dtype: of K and V. None: the configuration's, or bfloat16.
            device, layout, layer_group, page_bytes: as for KVPool.

        Raises ValueError if the configuration lacks an entry.
        """
        tokens = whole_number("tokens", tokens, 0)
        sequences = whole_number("sequences", sequences)
        shared = whole_number("shared_tokens", shared_tokens, 0)
        if shared > tokens:
            raise ValueError(f"shared_tokens must be at most tokens, got {shared:,} of {tokens:,}")
        text = getattr(config, "get_text_config", None)  # of a model of texts and images
        config = text() if callable(text) else config
        shape, is_cuda = cache_shape(config), tensors.device_of(device)[1] >= 0
        with KVPool(  # It takes addresses alone, and knows its blocks.
            *shape,
            max_tokens=1,
            max_sequences=1,
            dtype=_dtype_of(config) if dtype is None else dtype,
            layout=layout or ("token" if is_cuda else "head"),
            layer_group=layer_group,
            page_bytes=CUDA_PAGE if is_cuda and page_bytes is None else page_bytes,
        ) as pool:
            whole = shared // pool.block_tokens  # The last shared block is copied at a write.
            blocks = whole + sequences * (-(-tokens // pool.block_tokens) - whole)
            return blocks * pool.block_bytes

    def acquire(
        self,
        batch_size: int = 1,
        num_tokens: int = 0,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> KVLease:
        """Lend empty rows. Takes a few us, and no page.

        Args:
            batch_size: the number of rows, 1 to max_sequences.
            num_tokens: tokens expected in each row, for which room is reserved. Rows may grow
                beyond it within the limit.
            wait: wait for room, in the order of the calls, instead of raising BudgetError.
            timeout: the most seconds to wait.

        Returns the lease, a context manager. An error changes nothing.

        Raises BudgetError if the rows do not fit (with `wait`, if they can never fit), TimeoutError
        if they did not fit in time.
        """
        return self._acquire(KVLease, batch_size, num_tokens, wait, timeout)

    def would_fit(self, batch_size: int, num_tokens: int, *, shared_tokens: int = 0) -> bool:
        """Return whether more rows would fit now; another thread may take the room first.

        Idle memory of the budget's other parts counts as free.

        Args:
            batch_size: rows to add.
            num_tokens: tokens of each row.
            shared_tokens: how many of the tokens all rows share, as after `fork`.
        """
        return self._would_fit(batch_size, num_tokens, shared_tokens)

    def stats(self) -> KVStats:
        """Return the figures of the pool. Takes 4 to 9 us."""
        numbers, limit, lingering = self._stats()
        names = tuple(_lingering_name(*line) for line in lingering)
        values: tuple[Any, ...] = (*numbers, limit, names)
        return KVStats(*values)

    def trim(self, target: int | str = 0) -> int:
        """Return idle pages to the system, least recently used first. Leases and addresses stay.

        Args:
            target: the bytes that the pool may keep, or like `"1 GiB"`.

        Returns how many bytes were returned.
        """
        return self._trim(0 if target == 0 else parse_bytes(target, "target"))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a KVPool is memory of this process; make one where you need it")

    def __repr__(self) -> str:
        shape = f"{self.num_layers} layers x {self.num_kv_heads} heads x {self.head_dim}"
        kind = f"{str(self.dtype).removeprefix('torch.')}, {self.device}"
        if self.closed:
            return f"{self.name}({shape}, {kind}, closed)"
        try:
            return f"{self.name}({shape}, {kind}: {self.stats()})"
        except RuntimeError:  # a forked child
            return f"{self.name}({shape}, {kind}, of another process)"


def _dtype_of(config: Any) -> Any:
    """The dtype of a configuration; bfloat16, as of KVPool, where it has none."""
    found = entry(config, "dtype")
    found = entry(config, "torch_dtype") if found is None else found
    return "bfloat16" if found is None else found


def _lingering_name(number: int, rows: int, tokens: int, views: int) -> str:
    kept = f"{views} view{'s' if views != 1 else ''}" if views else "views"
    return f"lease {number} ({rows} row{'s' if rows != 1 else ''} x {tokens:,} tokens), {kept}"
