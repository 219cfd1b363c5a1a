/* check.h -- whether all that must be true of a pool between two calls is; for tests. */
#ifndef MT_KV_CHECK_H
#define MT_KV_CHECK_H

#include "kv/pool.h"

/* Every invariant: references, counts, the ledger's reservation, mappings. Takes the lock. */
bool mt_kvpool_check(mt_kvpool *pool);

#endif
