"""Whether a KVPool has everything back."""

from __future__ import annotations

import gc

import memtools


def everything_is_back(pool: memtools.KVPool) -> bool:
    """No lease, no page in use. What a failed call's traceback held is collected first; that takes
    a while beside a large library's objects."""
    if pool.stats().leases:
        gc.collect()
    return (pool.stats().leases, pool.stats().live_bytes) == (0, 0)
