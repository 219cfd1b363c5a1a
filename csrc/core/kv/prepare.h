/* prepare.h */
#ifndef MT_KV_PREPARE_H
#define MT_KV_PREPARE_H

#include "kv/private.h"

/* Tokens [from, to) of each row (lease->from, lease->to) can be written, [0, view) read, with zeros
 * past `to`. Takes the lock; asks other members of the ledger when ours does not suffice. */
mt_status mt_kvgrow_prepare(mt_kvlease *lease, size_t layer, size_t view, mt_error *err);

/* Nothing past the row's table is known to be zeros any more. */
void mt_kvlease_unclean(mt_kvlease *lease, size_t row);
/* Nothing is known to be ready any more. */
void mt_kvlease_unready(mt_kvlease *lease, size_t row);

#endif
