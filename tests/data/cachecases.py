"""Calls of memtools._core's ByteCache and CachedFunction, good and bad, for test_leaks.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from memtools import Budget, _core
from memtools.data import ByteCache
from tests.kit.refusals import refused

Case = Callable[[], object]
CACHE = ByteCache("1 KiB", size=len)
BUDGET = Budget("1 KiB")


def raise_error(*_: object) -> Any:
    raise LookupError


def filled() -> ByteCache:
    cache = ByteCache("1 KiB", size=len)
    for key in range(20):
        cache[key] = b"x" * 100
    return cache


def function(cache: ByteCache | None = None) -> Any:
    return (cache or filled())(lambda *_, **__: b"x" * 100)


def cycle() -> None:
    """A value that holds its cache, and a function its own wrapper."""
    cache = filled()
    cache["a"] = [cache]
    load = cache(lambda: [load])
    load()


class Unequal:
    def __hash__(self) -> int:
        return 5

    def __eq__(self, other: object) -> bool:
        raise LookupError


def unequal() -> None:
    cache = filled()
    cache[Unequal()] = b"x"
    for use in (cache.get, cache.__contains__, cache.__delitem__, lambda key: cache.put(key, b"")):
        refused(LookupError, lambda use=use: use(Unequal()))  # type: ignore[misc]


LOAD = function()
CASES: dict[str, list[Case]] = {
    "ByteCache": [
        filled,
        ByteCache,
        lambda: ByteCache(BUDGET).put("a", b"x" * 200),
        lambda: refused(ValueError, lambda: ByteCache(0)),
        lambda: refused(TypeError, lambda: _core.ByteCache(1, 1, 1, "x")),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.ByteCache()),  # type: ignore[call-arg]
        cycle,
        unequal,
        gc.collect,
    ],
    "ByteCache.__new__": [lambda: _core.ByteCache(None, len, len, "x")],  # type: ignore[arg-type]
    "ByteCache.__getitem__": [
        lambda: filled()[19],
        lambda: refused(KeyError, lambda: CACHE["none"]),
        lambda: refused(KeyError, lambda: CACHE[1, 2]),
        lambda: refused(TypeError, lambda: CACHE[[]]),
    ],
    "ByteCache.__setitem__": [
        lambda: CACHE.__setitem__("a", b"abc"),
        lambda: refused(ValueError, lambda: CACHE.__setitem__("a", bytes(2000))),
        lambda: refused(TypeError, lambda: CACHE.__setitem__("a", 3)),
        lambda: ByteCache().__setitem__("a", b"abc"),
    ],
    "ByteCache.__delitem__": [
        lambda: filled().__delitem__(19),
        lambda: refused(KeyError, lambda: CACHE.__delitem__("none")),
    ],
    "ByteCache.__contains__": [lambda: "a" in CACHE, lambda: 19 in filled()],
    "ByteCache.__len__": [lambda: len(CACHE)],
    "ByteCache.get": [
        lambda: filled().get(19),
        lambda: CACHE.get("none", 5),
        lambda: refused(TypeError, lambda: CACHE.get()),  # type: ignore[call-arg]
    ],
    "ByteCache.put": [
        lambda: filled().put("a", b"x" * 900),
        lambda: filled().put("a", bytes(2000)),
        lambda: refused(TypeError, lambda: CACHE.put("a", 3)),
        lambda: refused(TypeError, lambda: CACHE.put("a")),  # type: ignore[call-arg]
        lambda: refused(LookupError, lambda: ByteCache(5, size=raise_error).put(1, 2)),
    ],
    "ByteCache.pop": [
        lambda: filled().pop(19),
        lambda: filled().pop("none", 5),
        lambda: filled().popitem(),
        lambda: refused(KeyError, lambda: CACHE.pop("none")),
        lambda: refused(TypeError, lambda: CACHE.pop([])),
        lambda: refused(TypeError, lambda: CACHE.pop()),  # type: ignore[call-arg]
    ],
    "ByteCache.clear": [lambda: filled().clear()],
    "ByteCache._entries": [lambda: filled()._entries(), CACHE._entries],
    "ByteCache._info": [CACHE._info, lambda: ByteCache()._info()],
    "ByteCache._zero": [CACHE._zero],
    "CachedFunction": [
        function,
        lambda: LOAD(5),
        lambda: LOAD(5, "a", b=3),
        lambda: LOAD(*range(30), b=3),
        lambda: LOAD(object()),
        lambda: function(ByteCache("1 KiB", size=len, typed=True))(3, a=2.0),
        lambda: refused(TypeError, lambda: LOAD([])),
        lambda: refused(LookupError, lambda: CACHE(raise_error)(3)),
        lambda: refused(TypeError, lambda: _core.CachedFunction(1, CACHE)),  # type: ignore[arg-type]
        lambda: refused(TypeError, lambda: _core.CachedFunction(len, 1)),  # type: ignore[arg-type]
    ],
    "CachedFunction.__new__": [lambda: _core.CachedFunction(len, CACHE, True)],
    "CachedFunction.__vectorcalloffset__": [lambda: _core.CachedFunction.__vectorcalloffset__],  # type: ignore[attr-defined]
    "CachedFunction.__call__": [lambda: LOAD.__call__(7)],
    "CachedFunction.__get__": [lambda: LOAD.__get__(3)(), lambda: LOAD.__get__(None, int)],
    "CachedFunction.__repr__": [lambda: repr(LOAD)],
    "CachedFunction.__reduce__": [LOAD.__reduce__],
    "CachedFunction.__copy__": [LOAD.__copy__],
    "CachedFunction.__deepcopy__": [lambda: LOAD.__deepcopy__({})],
    "CachedFunction.__dict__": [lambda: LOAD.__dict__],
    "CachedFunction.cache": [lambda: LOAD.cache],
    "CachedFunction.cache_info": [lambda: LOAD.cache_info()],
    "CachedFunction.cache_clear": [lambda: function().cache_clear()],
    "CachedFunction.cache_parameters": [lambda: LOAD.cache_parameters()],
}
for _name in ("nbytes", "name"):
    CASES[f"ByteCache.{_name}"] = [lambda name=_name: getattr(CACHE, name)]  # type: ignore[misc]
