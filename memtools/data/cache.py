"""ByteCache: what was used last, up to a number of bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, KeysView, MutableMapping, ValuesView
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, overload

from memtools import _core
from memtools._base.size import format_bytes
from memtools._base.text import as_name
from memtools.budget import check_device
from memtools.data.share import default_limit
from memtools.data.sizes import size_of_entry

if TYPE_CHECKING:
    from memtools.budget import Budget

_NONE: Any = object()  # no value

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class CacheInfo(NamedTuple):
    """The figures of a ByteCache at one moment. The first four are those of functools.lru_cache."""

    #: reads that found their value
    hits: int
    #: reads that found none
    misses: int
    #: the limit in bytes; None for a Budget without a limit
    maxsize: int | None
    #: the bytes of all entries
    currsize: int
    #: how many entries there are
    entries: int
    #: entries that made room for others
    evictions: int
    #: values that were larger than the limit, or than other parts of a Budget left
    not_kept: int


class CachedFunction(Protocol[P, R]):
    """A function whose results a ByteCache keeps."""

    @property
    def __wrapped__(self) -> Callable[P, R]:
        """The function itself."""

    @property
    def cache(self) -> ByteCache:
        """The cache that holds the results."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __get__(self, obj: None, owner: type, /) -> CachedFunction[P, R]: ...
    @overload
    def __get__(self, obj: object, owner: type | None = None, /) -> Callable[..., R]: ...
    def cache_info(self) -> CacheInfo:
        """Return the figures of the whole cache, in bytes."""

    def cache_clear(self) -> None:
        """Drop the results of this function. Counts begin at 0 if the cache is empty then."""

    def cache_parameters(self) -> dict[str, Any]:
        """Return `maxsize`, the limit in bytes, and `typed`."""


class ByteCache(_core.ByteCache, MutableMapping[Any, Any]):
    """A cache that keeps what was used last, up to a number of bytes. Use it as a decorator, as
    functools.lru_cache, or as a dict.

    The bytes of the entries never exceed the limit. An entry that does not fit evicts those that
    were not used for the longest time. Thread-safe. Values are handed out as they are, without a
    copy: whoever changes an array that came from the cache changes the cached one.

    After a fork, the child has the entries, which lie in pages that both processes share until one
    writes to them. Its figures begin at 0, and from then on each of the two has its own cache. A
    copied or unpickled cache, which is what a spawned worker gets, is empty and has the same
    settings.

    Args:
        limit: the most bytes, at least 1, as an int or like `"2 GiB"`, in each process that uses
            the cache; or a Budget, whose other parts then count too. None, the default, is a
            quarter of what the job may use (the container's limit, or else the machine's memory),
            divided by the number of DataLoader workers and by the ranks on this machine, and at
            least 16 MiB. It is found when a process first needs it: to keep a value, or to say it.
        size: called with a value, returns its bytes; the limit counts just that. None, the default,
            counts `size_of(value)`, the key, and what an entry takes itself.
        typed: whether a decorated function tells arguments apart that are equal and of different
            types, such as 3 and 3.0; False by default.
        name: what reports of a Budget call it; "ByteCache" by default.

    Raises TypeError if an argument has another type, ValueError if `limit` is not written like a
    size or is a Budget of another device than the host.
    """

    __slots__ = ("_limit", "_size", "_typed")

    _limit: int | str | Budget | None
    _size: Callable[[Any], int] | None
    _typed: bool

    def __new__(
        cls,
        limit: int | str | Budget | None = None,
        *,
        size: Callable[[Any], int] | None = None,
        typed: bool = False,
        name: str = "ByteCache",
    ) -> ByteCache:
        if callable(limit):
            raise TypeError("ByteCache takes a limit, got a function; write @ByteCache() above it")
        if size is not None and not callable(size):
            raise TypeError(f"size is a function of a value, got {type(size).__name__}")
        check_device(limit, "cpu", "ByteCache")
        measure = size_of_entry if size is None else functools.partial(_size_by, size)
        self = super().__new__(cls, limit, measure, default_limit, as_name("name", name))
        self._limit, self._size, self._typed = limit, size, bool(typed)
        return self

    def __call__(self, function: Callable[P, R]) -> CachedFunction[P, R]:
        """Decorate a function or a method: its results are kept in this cache.

        Arguments have to be hashable. An exception of the function propagates, and nothing is kept.
        The decorated function has `cache_info()`, `cache_clear()`, `cache_parameters()`,
        `__wrapped__` and `cache`. Several functions may share one cache.

        Raises TypeError if `function` is not callable.
        """
        cached = _core.CachedFunction(function, self, self._typed)
        return functools.update_wrapper(cached, function)  # type: ignore[return-value]

    @property
    def limit(self) -> int | None:
        """The most bytes in this process; None for a Budget without a limit."""
        return self._info()[2]

    def cache_info(self) -> CacheInfo:
        """Return the figures of the cache, in bytes."""
        return CacheInfo(*self._info())

    def cache_clear(self) -> None:
        """Drop all entries, and begin to count anew."""
        self.clear()
        self._zero()

    def __iter__(self) -> Iterator[Any]:
        """The keys at this moment, the least recently used one first."""
        return iter([key for key, _ in self._entries()])

    def popitem(self) -> tuple[Any, Any]:
        """Take the least recently used entry out and return its key and value.

        Raises KeyError if there is none.
        """
        for key in self:
            if (value := self.pop(key, _NONE)) is not _NONE:  # else another thread was faster
                return key, value
        raise KeyError("popitem(): the cache is empty")

    def keys(self) -> KeysView[Any]:
        """The keys; to go through them counts nothing and changes no order."""
        return KeysView(self)

    def items(self) -> ItemsView[Any, Any]:
        """The keys and values; to go through them counts nothing and changes no order."""
        return _Items(self)

    def values(self) -> ValuesView[Any]:
        """The values; to go through them counts nothing and changes no order."""
        return _Values(self)

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
        return iter(self._mapping._entries())

    def __contains__(self, item: object) -> bool:
        return item in self._mapping._entries()


class _Values(ValuesView[Any]):
    """The values as they are when the iteration begins."""

    _mapping: ByteCache

    def __iter__(self) -> Iterator[Any]:
        return iter([value for _, value in self._mapping._entries()])

    def __contains__(self, value: object) -> bool:
        return value in list(self)


def _size_by(size: Callable[[Any], int], key: object, value: object) -> int:
    return size(value)


def too_large(size: int, limit: int) -> NoReturn:
    """Raise what `cache[key] = value` raises for a value that is larger than the limit."""
    asked, most = format_bytes(size), format_bytes(limit)
    if asked == most:
        asked, most = f"{size:,} B", f"{limit:,} B"
    raise ValueError(
        f"a value of {asked} is larger than the cache's limit of {most}; raise the limit, or call "
        "put(), which leaves such a value out"
    )
