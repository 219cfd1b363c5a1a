/* written.h -- what code wrote privately into rows, over blocks which they share. */
#ifndef MT_KV_WRITTEN_H
#define MT_KV_WRITTEN_H

#include "kv/lease.h"

/* What is known of a row's addresses: whether code wrote privately over blocks. */
typedef enum mt_kvwritten { MT_KV_UNSEEN, MT_KV_PLAIN, MT_KV_WRITTEN } mt_kvwritten;

/* What code wrote privately into rows, over blocks which they share, becomes blocks of their own,
 * so that other rows can become what these are: rows index[i] for i < n, but where it is i itself;
 * all n where index is NULL. Writes to written[row], of each of the lease's rows, what it found of
 * those, where that is not NULL and the store has private writes at all. Takes the lock; asks
 * others as prepare does. */
mt_status mt_kvgrow_keep_written(mt_kvlease *lease, const size_t *index, size_t n,
                                 mt_kvwritten *written, mt_error *err);

#endif
