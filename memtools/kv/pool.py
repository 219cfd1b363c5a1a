"""KVPool and KVLease: KV caches in pages that are taken as tokens come, shared and recycled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from memtools import _core
from memtools._base.size import format_bytes, parse_bytes
from memtools.budget import Budget, check_device
from memtools.kv import tensors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVStats:
    """What a pool holds, in bytes, and what it has done so far, in counts.

    Bytes are those of pages: a page that several rows share counts once. `live + idle` is what the
    pool occupies; `reserved` is what it counts in its budget.
    """

    live_bytes: int  #: pages that hold tokens of leases
    shared_bytes: int  #: of them: named by more than one row
    idle_bytes: int  #: physical, kept for the next lease; trim() gives them back
    promised_bytes: int  #: reserved for num_tokens hints and not taken yet
    reserved_bytes: int  #: in the budget: live + max(idle, promised)
    physical_bytes: int  #: what the system itself counts for the pool
    peak_bytes: int  #: largest live + idle so far
    payload_bytes: int  #: tokens of all rows as if nothing were shared: what copies would take
    address_bytes: int  #: address space, which is not memory
    maps: int  #: stretches of it that are mapped, an upper bound
    mapped_again_bytes: int  #: pages that views show once more: resident bytes count them each time
    leases: int  #: alive, lingering ones too
    rows: int  #: of those leases
    lingering: int  #: leases that were released while views of them live
    lingering_bytes: int  #: pages that those views keep
    acquired: int  #: leases by acquire(), ever
    forked: int  #: leases by fork(), ever
    released: int  #: leases that ended, ever
    taken: int  #: blocks taken from the system, ever
    recycled: int  #: blocks used again without that, ever
    dropped: int  #: blocks given back to the system, ever
    copied: int  #: blocks copied because a row wrote to one that was shared, ever
    map_calls: int  #: stretches mapped, ever
    limit_bytes: int | None  #: of the budget the pool counts in; None: unlimited
    lingering_names: tuple[str, ...]  #: "lease 3 (16 rows x 1,088 tokens), 2 views"

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

    The cache of one generation: `update(layer, k, v)` appends tokens and returns everything the
    layer holds, as views that any attention takes. Nothing is moved or copied as it grows. `fork`
    continues it in several rows that share what is there; `crop`, `reorder` and `select` are what
    speculative decoding, beam search and finished rows ask for.

    Leaving the block, `release()` or garbage collection gives every page back in that moment.
    Views that live longer keep their pages until the last of them dies. One thread at a time uses
    a lease; a second one gets a RuntimeError. A released lease raises ValueError, in a forked
    child everything raises RuntimeError.
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
    """KV caches for generation: right-sized, growing without copies, shared and recycled.

    Every row of a lease has its own range of addresses for `max_tokens` tokens; pages come as
    tokens do. A whole batch is one strided tensor `[B, H_kv, T, D]` at addresses that do not
    change. Pages of an ended lease stay for the next one, until `trim()`.

    Args:
        num_layers: layers of the model.
        num_kv_heads: heads of K and of V in each.
        head_dim: elements of one head.
        max_tokens: tokens that a row can hold. It costs addresses, not memory.
        max_sequences: rows that one lease can have; there may be any number of leases.
        dtype: of K and V, a torch.dtype or its name.
        device: `"cpu"`, `"cuda"` or `"cuda:1"`.
        limit: bytes of all pages at most, shared ones once, as an int or like `"2 GiB"`; a
            `Budget` that other parts count in as well, if it counts the device's memory; None for
            no limit.
        layout: `"head"` keeps the tokens of a head together, the host's default: attention reads
            it fastest. `"token"` keeps the heads of a token together, the default on CUDA, where
            pages are large.
        layer_group: layers that share pages, for `layout="token"`: more waste less memory on
            large pages.
        page_bytes: of one page, a power of two; None for the system's (4 KiB, 2 MiB on CUDA).
        name: how budgets and errors call the pool.

    Raises:
        ValueError, TypeError: an argument that makes no sense.
        MemoryError: the system refuses.
        DeviceError: CUDA is asked for and not there.
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
        check_device(limit, str(place), name)
        sizes = (num_layers, num_kv_heads, head_dim, max_tokens, max_sequences)
        return super().__new__(
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

    def acquire(
        self,
        batch_size: int = 1,
        num_tokens: int = 0,
        *,
        wait: bool = False,
        timeout: float | None = None,
    ) -> KVLease:
        """Lend `batch_size` empty rows, with room promised for `num_tokens` tokens each.

        The promise is a hint, capped at `max_tokens`: rows may grow past it, as long as the limit
        allows, and what is promised is reserved at once. With `wait`, a call that does not fit
        waits for its turn, first come, first served, up to `timeout` seconds; other threads run
        meanwhile, and Ctrl-C works.

        Raises BudgetError when it does not fit (with `wait`: when it never could), TimeoutError,
        ValueError for more than `max_sequences` rows; then nothing has changed. Takes a few us,
        and no page.
        """
        return self._acquire(KVLease, batch_size, num_tokens, wait, timeout)

    def would_fit(self, batch_size: int, num_tokens: int, *, shared_tokens: int = 0) -> bool:
        """Whether so many more rows of so many tokens would fit now, `shared_tokens` of them once.

        Counts what everybody who shares the budget holds idle as free. Another thread may take the
        room before you do.
        """
        return self._would_fit(batch_size, num_tokens, shared_tokens)

    def stats(self) -> KVStats:
        """What the pool holds now and has done so far; takes about 10 us."""
        numbers, limit, lingering = self._stats()
        names = tuple(_lingering_name(*line) for line in lingering)
        values: tuple[Any, ...] = (*numbers, limit, names)
        return KVStats(*values)

    def trim(self, target: int | str = 0) -> int:
        """Give idle pages back to the system until the pool holds `target` bytes; returns how many.

        Pages used longest ago go first. What leases hold stays, and so do all addresses.
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


def _lingering_name(number: int, rows: int, tokens: int, views: int) -> str:
    kept = f"{views} view{'s' if views != 1 else ''}" if views else "views"
    return f"lease {number} ({rows} row{'s' if rows != 1 else ''} x {tokens:,} tokens), {kept}"
