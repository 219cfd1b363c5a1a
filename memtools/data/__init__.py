"""Data loading that stays within the host's memory: caches by bytes, batches by tokens.

Nothing is loaded before its first use: a data set's module imports this in every worker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools.data._cache import ByteCache as ByteCache
    from memtools.data._cache import CachedFunction as CachedFunction
    from memtools.data._cache import CacheInfo as CacheInfo
    from memtools.data._episodes import ChunkLayout as ChunkLayout
    from memtools.data._episodes import H5Episodes as H5Episodes
    from memtools.data._loader import BoundedLoader as BoundedLoader
    from memtools.data._loader import bounded as bounded
    from memtools.data._report import LoaderCost as LoaderCost
    from memtools.data._report import LoaderReport as LoaderReport
    from memtools.data._report import LoaderSettings as LoaderSettings
    from memtools.data._report import loader_report as loader_report
    from memtools.data._sampler import BudgetSampler as BudgetSampler
    from memtools.data._sizes import size_of as size_of

#: The module of each public name.
_HOMES = {
    "BoundedLoader": "_loader",
    "BudgetSampler": "_sampler",
    "ByteCache": "_cache",
    "CacheInfo": "_cache",
    "CachedFunction": "_cache",
    "ChunkLayout": "_episodes",
    "H5Episodes": "_episodes",
    "LoaderCost": "_report",
    "LoaderReport": "_report",
    "LoaderSettings": "_report",
    "bounded": "_loader",
    "loader_report": "_report",
    "size_of": "_sizes",
}

__all__ = [
    "BoundedLoader",
    "BudgetSampler",
    "ByteCache",
    "CacheInfo",
    "CachedFunction",
    "ChunkLayout",
    "H5Episodes",
    "LoaderCost",
    "LoaderReport",
    "LoaderSettings",
    "bounded",
    "loader_report",
    "size_of",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtools.data' has no attribute {name!r}")
    value = getattr(import_module(f"memtools.data.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
