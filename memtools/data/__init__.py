"""Data loading that stays within the host's memory: caches by bytes, batches by tokens.

Nothing is loaded before its first use: a data set's module imports this in every worker.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtools.data.cache import ByteCache as ByteCache
    from memtools.data.cache import CachedFunction as CachedFunction
    from memtools.data.cache import CacheInfo as CacheInfo
    from memtools.data.episodes import ChunkLayout as ChunkLayout
    from memtools.data.episodes import H5Episodes as H5Episodes
    from memtools.data.loader import BoundedLoader as BoundedLoader
    from memtools.data.loader import bounded as bounded
    from memtools.data.report import LoaderCost as LoaderCost
    from memtools.data.report import LoaderReport as LoaderReport
    from memtools.data.report import LoaderSettings as LoaderSettings
    from memtools.data.report import loader_report as loader_report
    from memtools.data.sampler import BudgetSampler as BudgetSampler
    from memtools.data.sizes import size_of as size_of

#: where each public name lives
_HOMES = {
    "BoundedLoader": "loader",
    "BudgetSampler": "sampler",
    "ByteCache": "cache",
    "CacheInfo": "cache",
    "CachedFunction": "cache",
    "ChunkLayout": "episodes",
    "H5Episodes": "episodes",
    "LoaderCost": "report",
    "LoaderReport": "report",
    "LoaderSettings": "report",
    "bounded": "loader",
    "loader_report": "report",
    "size_of": "sizes",
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
