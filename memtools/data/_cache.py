"""ByteCache: what was used last, up to a number of bytes.

    hash of a key ──► _Entry (key, value, bytes, owner)      one OrderedDict, the oldest entry first
         owner None: the cache is used as a mapping; else the decorated function whose result it is

The table is keyed by hashes, which are ints, so that it never runs code of the users' keys: that
runs without the lock, and what was found is looked at again under it. Of keys with the same hash,
such as -1 and -2, the first has the hash as its slot, and each other one a slot of its own, which
`_clashes` lists.

A hit takes no lock: each step of it is one call into C, and CPython switches threads between them.
Whatever changes the entries holds the lock, which is re-entrant, since a collection at any
allocation may run a `__del__` that uses the cache. Entries that went out are dropped after it.

The BudgetPart is the only sum of bytes: bytes are reserved before an entry is in, and released once
it is out.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from itertools import count
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, cast, overload

from memtools import _core
from memtools._base import process
from memtools._base.number import LARGEST
from memtools._base.size import format_bytes
from memtools._base.text import as_name
from memtools._budget import Budget, check_device
from memtools.data._share import default_limit
from memtools.data._sizes import size_of_entry
from memtools.errors import BudgetError

_NONE: Any = object()  # Stands for a missing value.
_NAMED: Any = object()  # Separates positional from named arguments in the key of a call.
#: A change is retried this often if keys change the cache while they are compared.
MOST_RESTARTS = 1000

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class CacheInfo(NamedTuple):
    """The figures of a ByteCache, first those of functools.lru_cache."""

    #: reads that found a value
    hits: int
    #: other reads
    misses: int
    #: the limit in bytes
    maxsize: int | None
    #: bytes of all entries
    currsize: int
    #: their number
    entries: int
    #: evicted entries
    evictions: int
    #: values that did not fit
    not_kept: int


class CachedFunction(Protocol[P, R]):
    """A function whose results a ByteCache keeps."""

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The function itself."""

    @property
    def cache(self) -> ByteCache:
        """The cache of the results."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __get__(self, obj: None, owner: type, /) -> CachedFunction[P, R]: ...
    @overload
    def __get__(self, obj: object, owner: type | None = None, /) -> Callable[..., R]: ...
    def cache_info(self) -> CacheInfo:
        """Return the figures of the whole cache."""

    def cache_clear(self) -> None:
        """Drop this function's results, and reset the counts of an empty cache."""

    def cache_parameters(self) -> dict[str, Any]:
        """Return `maxsize`, in bytes, and `typed`."""


class _Entry:
    """The value under one key."""

    __slots__ = ("bytes", "key", "owner", "slot", "value")

    def __init__(self, owner: object, key: Any, slot: Any, value: Any, size: int) -> None:
        self.owner, self.key, self.slot = owner, key, slot
        self.value, self.bytes = value, size


class ByteCache(MutableMapping[Any, Any]):
    """An LRU cache limited in bytes. Use it as a decorator, like functools.lru_cache, or as a dict.

    An entry that does not fit evicts the least recently used ones. Thread-safe. Values are not
    copied: a change to a cached array changes the cache.

    A forked child has its own cache with the parent's entries, whose pages are shared until
    written. A copied or unpickled cache, as in a spawned worker, is empty.

    Args:
        limit: the most bytes in each process, or like `"2 GiB"`; or a Budget. None: a quarter of
            the container's limit or the machine's memory, divided by the DataLoader workers and the
            ranks on this machine, at least 16 MiB.
        size: a function of a value that returns its bytes. None: `size_of` of value and key.
        typed: cache equal arguments of different types, such as 3 and 3.0, separately.
        name: the name in reports of a Budget.

    Raises ValueError if `limit` is not a size, or a Budget for a device.
    """

    __slots__ = (
        "__weakref__",
        "_budget",
        "_clashes",
        "_evictions",
        "_hits",
        "_limit",
        "_lock",
        "_mapped",
        "_misses",
        "_name",
        "_not_kept",
        "_part",
        "_size",
        "_table",
        "_typed",
    )

    def __init__(
        self,
        limit: int | str | Budget | None = None,
        *,
        size: Callable[[Any], int] | None = None,
        typed: bool = False,
        name: str = "ByteCache",
    ) -> None:
        if callable(limit):
            raise TypeError("ByteCache takes a limit, got a function; write @ByteCache() above it")
        if size is not None and not callable(size):
            raise TypeError(f"size must be a function of a value, got {type(size).__name__}")
        check_device(limit, "cpu", "ByteCache")
        self._limit, self._size, self._typed = limit, size, bool(typed)
        self._name = as_name("name", name)
        self._lock = threading.RLock()
        self._table: OrderedDict[Any, _Entry] = OrderedDict()
        self._clashes: dict[int, list[_Entry]] = {}
        self._mapped = 0  # entries of the mapping
        self._budget: Budget | None = (
            None  # None until the default limit was computed in this process.
        )
        self._part: _core.BudgetPart | None = None
        self._zero()
        if limit is not None:
            self._budget = limit if isinstance(limit, Budget) else Budget(limit, name="ByteCache")
            self._part = _core.BudgetPart(self._budget, self._name)
        _caches.add(self)

    def __call__(self, function: Callable[P, R]) -> CachedFunction[P, R]:
        """Decorate a function or a method: its results are kept in this cache.

        Arguments have to be hashable. An exception of the function propagates, and nothing is kept.
        The decorated function has `cache_info()`, `cache_clear()`, `cache_parameters()`,
        `__wrapped__` and `cache`. Several functions may share one cache.

        Raises TypeError if `function` is not callable.
        """
        if not callable(function):
            raise TypeError(f"{type(function).__name__} is not callable")
        typed = self._typed

        @functools.wraps(function)
        def cached(*args: P.args, **named: P.kwargs) -> R:
            key: Any = args
            if named:
                key = (*args, _NAMED, *named, *named.values())
            elif len(args) == 1 and not typed and not isinstance(args[0], tuple):
                key = args[0]
            if typed:
                key = (*key, *map(type, args), *map(type, named.values()))
            hashed = hash(key) ^ salt
            value = self._look_up(owner, key, hashed)
            if value is _NONE:
                value = function(*args, **named)
                self._keep(owner, key, hashed, value)
            return cast(R, value)

        # The results go together with the function. Their owner is a weak reference to it, so that
        # the cache does not keep it alive.
        owner = weakref.ref(cached, functools.partial(_drop_results, weakref.ref(self)))
        salt = id(owner)
        made: Any = cached
        made.cache, made.cache_info = self, self.cache_info
        made.cache_clear = functools.partial(self._clear_results, owner)
        made.cache_parameters = lambda: {"maxsize": self.limit, "typed": typed}
        return cast("CachedFunction[P, R]", made)

    # --- reading ----------------------------------------------------------------------------------

    def __getitem__(self, key: Any, /) -> Any:
        if (value := self._look_up(None, key, hash(key))) is _NONE:
            raise KeyError(key)
        return value

    def get(self, key: Any, default: Any = None, /) -> Any:
        """Return the value of a `key`, or `default`. Counts a hit or a miss and makes the entry the
        newest."""
        value = self._look_up(None, key, hash(key))
        return default if value is _NONE else value

    def __contains__(self, key: object, /) -> bool:
        return _match(self._of_hash(hash(key)), None, key) is not None

    def __len__(self) -> int:
        return self._mapped

    def __iter__(self) -> Iterator[Any]:
        """The keys at this moment, the least recently used one first."""
        return iter([entry.key for entry in self._entries()])

    def keys(self) -> KeysView[Any]:
        """The keys; iterating counts no hits and changes no order."""
        return KeysView(self)

    def items(self) -> ItemsView[Any, Any]:
        """The items; see `keys`."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """The values; see `keys`."""
        return _Values(self)

    def _entries(self) -> list[_Entry]:
        """The entries of the mapping at this moment, the least recently used one first."""
        return [entry for entry in list(self._table.values()) if entry.owner is None]

    def _look_up(self, owner: object, key: Any, hashed: int) -> Any:
        """The value of a key, whose entry is the newest then, or _NONE. Counts a hit or a miss."""
        entry = self._table.get(hashed)
        if entry is None or entry.owner is not owner or not (entry.key is key or entry.key == key):
            entry = _match(self._of_hash(hashed), owner, key)
        if entry is not None:
            try:
                self._table.move_to_end(entry.slot)
            except KeyError:  # it went while keys were compared, or by another thread
                pass
            else:
                self._hits += 1
                return entry.value
        self._misses += 1
        return _NONE

    def _of_hash(self, hashed: int) -> list[_Entry]:
        """The entries whose keys have this hash."""
        first = self._table.get(hashed)
        entries = [] if first is None else [first]
        return entries + self._clashes[hashed] if hashed in self._clashes else entries

    # --- changing ---------------------------------------------------------------------------------

    def __setitem__(self, key: Any, value: Any, /) -> None:
        refusal = self._keep(None, key, hash(key), value)
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal  # or this frame and the error would hold each other, and the value

    def put(self, key: Any, value: Any, /) -> bool:
        """Keep `value` under `key` if it fits, and return whether it was kept. A value that can
        never fit evicts nothing."""
        return self._keep(None, key, hash(key), value) is None

    def _keep(self, owner: object, key: Any, hashed: int, value: Any) -> Exception | None:
        """Keep a value. An entry of a function that came meanwhile stays as it is.

        Returns what `cache[key] = value` raises for one that does not fit, which is counted.
        """
        size = self._size_of(key, value)
        budget, _ = self._joined()
        limit = LARGEST if budget.limit is None else budget.limit
        out: list[_Entry] = []  # dropped when this returns, without the lock
        refusal: Exception | None = None
        for _ in range(MOST_RESTARTS):
            entry = _Entry(owner, key, hashed, value, size)
            seen = self._of_hash(hashed)
            old = _match(seen, owner, key)
            with self._lock:
                if self._of_hash(hashed) != seen:
                    continue
                if old is not None and owner is not None:
                    self._table.move_to_end(old.slot)
                elif size > limit:
                    refusal = _too_large(size, limit)
                else:
                    refusal = self._put(entry, old, out)
                self._not_kept += refusal is not None
                return refusal
        raise RuntimeError(
            "keys change the ByteCache each time that it compares them; use keys whose "
            "__eq__ leaves it alone"
        )

    def _size_of(self, key: Any, value: Any) -> int:
        if self._size is None:
            return size_of_entry(key, value)
        size = self._size(value)
        if not hasattr(size, "__index__"):
            got = type(size).__name__
            raise TypeError(f"size() must return the bytes of a value as an int, got {got}")
        if not 0 <= (whole := operator.index(size)) < 2**64:
            raise ValueError(
                f"size() must return the bytes of a value, 0 or more and below 2**64, got {whole}"
            )
        return whole

    # From here to _recount(), the lock is held.

    def _put(self, entry: _Entry, old: _Entry | None, out: list[_Entry]) -> Exception | None:
        """Take an entry in as the newest, in place of `old`, and evict the oldest ones for which
        there is no room beside it. Returns the error if there is none without all others."""
        budget, part = self._joined()
        held, refusal = 0, None  # bytes that are reserved for the entry
        if (room := budget.available) is not None and entry.bytes > part.reserved + room:
            held = entry.bytes - part.reserved  # other parts are asked for what they hold idle
            if _reserve(part, held) is not None:
                held = entry.bytes
                if (refusal := _reserve(part, held)) is not None:
                    return refusal
        try:
            if old is not None:
                self._take_out(old, out)
                held += old.bytes
            while held < entry.bytes:
                missing, room = entry.bytes - held, budget.available
                if room is None or missing <= room or not self._table:
                    if (refusal := _reserve(part, missing)) is None:
                        held = entry.bytes
                        break
                    if not self._table:  # another part of the budget was faster
                        self._recount()
                        return refusal
                held += self._evict(out)
            part.release(held - entry.bytes)
            self._take_in(entry)
        except BaseException:  # such as KeyboardInterrupt
            self._recount()
            raise
        return None

    def _take_in(self, entry: _Entry) -> None:
        if (hashed := entry.slot) in self._table:
            entry.slot = hashed, next(_slots)
            self._clashes.setdefault(hashed, []).append(entry)
        self._table[entry.slot] = entry
        self._mapped += entry.owner is None

    def _take_out(self, entry: _Entry, out: list[_Entry]) -> None:
        """Take an entry out that is in, before its bytes are released."""
        del self._table[entry.slot]
        self._went(entry)
        out.append(entry)

    def _evict(self, out: list[_Entry]) -> int:
        """Take the oldest entry out. Returns its bytes, which are still reserved."""
        _, entry = self._table.popitem(last=False)
        self._went(entry)
        out.append(entry)
        self._evictions += 1
        return entry.bytes

    def _went(self, entry: _Entry) -> None:
        self._mapped -= entry.owner is None
        if isinstance(entry.slot, tuple):
            others = self._clashes[entry.slot[0]]
            others.remove(entry)
            if not others:
                del self._clashes[entry.slot[0]]

    def _recount(self) -> None:
        """Let the sums be those of the entries again, after a change that ended halfway."""
        entries = list(self._table.values())
        self._mapped = sum(entry.owner is None for entry in entries)
        self._clashes = {}
        for entry in entries:
            if isinstance(entry.slot, tuple):
                self._clashes.setdefault(entry.slot[0], []).append(entry)
        if self._part is not None:
            self._part.release(self._part.reserved - sum(entry.bytes for entry in entries))

    # --- taking out -------------------------------------------------------------------------------

    def __delitem__(self, key: Any, /) -> None:
        if self._pop(key) is None:
            raise KeyError(key)

    def pop(self, key: Any, default: Any = _NONE, /) -> Any:
        """Remove the entry of a `key` and return its value, or `default`. Counts a hit or a miss.
        Raises KeyError if there is neither."""
        if (entry := self._pop(key)) is not None:
            self._hits += 1
            return entry.value
        self._misses += 1
        if default is _NONE:
            raise KeyError(key)
        return default

    def popitem(self) -> tuple[Any, Any]:
        """Remove the least recently used entry, and return its key and value. Raises KeyError if
        the cache is empty."""
        for entry in self._entries():
            if self._drop([entry]):
                self._hits += 1
                return entry.key, entry.value
        raise KeyError("popitem(): the cache is empty")

    def _pop(self, key: Any) -> _Entry | None:
        """Take the entry of a key out: this thread, or none."""
        hashed = hash(key)
        while (entry := _match(self._of_hash(hashed), None, key)) is not None:
            if self._drop([entry]):
                return entry
        return None

    def _drop(self, entries: list[_Entry]) -> list[_Entry]:
        """Take those of the entries out that are still in, and return them."""
        out: list[_Entry] = []
        with self._lock:
            try:
                for entry in entries:
                    if self._table.get(entry.slot) is entry:
                        self._take_out(entry, out)
                if out and self._part is not None:
                    self._part.release(sum(entry.bytes for entry in out))
            except BaseException:
                self._recount()
                raise
        return out

    def clear(self) -> None:
        """Drop all entries, also those of decorated functions."""
        self._drop(list(self._table.values()))

    def cache_clear(self) -> None:
        """Drop all entries and reset the counts."""
        self.clear()
        self._zero()

    def _clear_results(self, owner: object) -> None:
        """Drop the results of this function. Counts begin at 0 if the cache is empty then."""
        self._drop([entry for entry in list(self._table.values()) if entry.owner is owner])
        if not self._table:
            self._zero()

    # --- the limit and the figures ----------------------------------------------------------------

    def _joined(self) -> tuple[Budget, _core.BudgetPart]:
        """The budget that the entries count in, and this cache's part of it. A limit that was not
        given is found here, in each process."""
        if self._budget is None or self._part is None:
            budget = Budget(default_limit(), name="ByteCache")
            out: list[_Entry] = []
            with self._lock:
                if self._budget is None:  # else another thread was faster
                    total = sum(entry.bytes for entry in self._table.values())
                    while total > (budget.limit or 0):
                        total -= self._evict(out)
                    part = _core.BudgetPart(budget, self._name)
                    part.reserve(total, "ByteCache", "")
                    self._budget, self._part = budget, part
            return self._joined()
        return self._budget, self._part

    @property
    def limit(self) -> int | None:
        """The most bytes in this process."""
        return self._joined()[0].limit

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return 0 if self._part is None else self._part.reserved

    @property
    def name(self) -> str:
        """Shown in reports of budgets."""
        return self._name

    def cache_info(self) -> CacheInfo:
        """Return the cache's figures."""
        limit = self.limit
        return CacheInfo(
            self._hits,
            self._misses,
            limit,
            self.nbytes,
            len(self._table),
            self._evictions,
            self._not_kept,
        )

    def _zero(self) -> None:
        self._hits = self._misses = self._evictions = self._not_kept = 0

    def _forked(self) -> None:
        """In a child of fork(): its figures begin, and it finds its own default limit."""
        if not self._lock.acquire(blocking=False):  # a thread of the parent was changing entries
            self._recount()
        self._lock = threading.RLock()
        self._zero()
        if self._limit is None:
            self._budget = None

    # --- the object -------------------------------------------------------------------------------

    # Two caches are equal only if they are the same one: their values need not compare.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        info = self.cache_info()
        of = "" if info.maxsize is None else f" of {format_bytes(info.maxsize)}"
        size = format_bytes(info.currsize)
        entries = f"{info.entries:,} entr{'y' if info.entries == 1 else 'ies'}"
        return f"{type(self).__name__}({size}{of} in {entries})"

    def __reduce__(self) -> tuple[Any, ...]:
        settings: dict[str, Any] = {"size": self._size, "typed": self._typed, "name": self.name}
        return functools.partial(type(self), **settings), (self._limit,)


class _Items(ItemsView[Any, Any]):
    """The pairs as they are when the iteration begins."""

    _mapping: ByteCache

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return iter([(entry.key, entry.value) for entry in self._mapping._entries()])

    def __contains__(self, item: object) -> bool:
        return item in list(self)


class _Values(ValuesView[Any]):
    """The values as they are when the iteration begins."""

    _mapping: ByteCache

    def __iter__(self) -> Iterator[Any]:
        return iter([entry.value for entry in self._mapping._entries()])

    def __contains__(self, value: object) -> bool:
        return value in list(self)


def _match(entries: list[_Entry], owner: object, key: Any) -> _Entry | None:
    """The entry of a key among those of its hash. Runs the keys' `__eq__`, which may change the
    cache."""
    for entry in entries:
        if entry.owner is owner and (entry.key is key or entry.key == key):
            return entry
    return None


def _reserve(part: _core.BudgetPart, size: int) -> BudgetError | None:
    """Reserve bytes, or return the error, without a traceback: its frames would hold the error."""
    try:
        part.reserve(size, "ByteCache", "put() skips such a value instead of raising")
    except BudgetError as error:
        return error.with_traceback(None)
    return None


def _drop_results(cache: weakref.ref[ByteCache], owner: object) -> None:
    """A decorated function is gone."""
    if (alive := cache()) is not None:
        alive._clear_results(owner)


def _too_large(size: int, limit: int) -> ValueError:
    asked, most = format_bytes(size), format_bytes(limit)
    if asked == most:
        asked, most = f"{size:,} B", f"{limit:,} B"
    return ValueError(
        f"a value of {asked} is larger than the cache's limit of {most}; raise the limit, or call "
        "put(), which skips such a value"
    )


_slots = count()  # Numbers for entries whose hash is taken by another entry.
_caches: weakref.WeakSet[ByteCache] = weakref.WeakSet()


def _in_child() -> None:
    for cache in list(_caches):
        cache._forked()


process.at_fork(_in_child)
