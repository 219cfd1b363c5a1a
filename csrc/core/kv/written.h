/* written.h -- what code wrote privately into rows, over blocks which they share. */
#ifndef MT_KV_WRITTEN_H
#define MT_KV_WRITTEN_H

#include "kv/lease.h"

/* Whether code wrote privately over blocks of a row: not looked at, no, yes. */
typedef enum mt_kvwritten { MT_KV_UNSEEN, MT_KV_PLAIN, MT_KV_WRITTEN } mt_kvwritten;

/* Puts what code wrote privately into rows into blocks that are the rows' own, so that other rows
 * can name them. The rows are index[i] for i < n, but where that is i itself; or the first n where
 * index is NULL. Writes what it found to written[row] of each of the lease's rows, where `written`
 * is not NULL and the store has private writes at all. Takes the pool's lock, and asks other
 * members of the ledger as mt_kvprepare does. */
mt_status mt_kvwritten_save(mt_kvlease *lease, const size_t *index, size_t n, mt_kvwritten *written,
                            mt_error *err);

#endif
