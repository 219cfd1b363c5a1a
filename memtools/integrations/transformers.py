"""memtools.KVPool in transformers: a cache for `model.generate`, and generation of groups.

    pool = pool_for(model, max_tokens=2048, max_sequences=16)
    with PooledCache.for_model(model, pool) as cache:
        model.generate(input_ids, past_key_values=cache, max_new_tokens=64)
    generate_group(model, input_ids, 16, pool, max_new_tokens=64, do_sample=True)

Needs transformers 5.21 or newer.
"""

from memtools.integrations._transformers_cache import PooledCache
from memtools.integrations._transformers_group import generate_group
from memtools.integrations._transformers_model import pool_for

__all__ = ["PooledCache", "generate_group", "pool_for"]
