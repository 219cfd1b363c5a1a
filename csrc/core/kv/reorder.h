/* reorder.h -- rows become copies of other rows: beams reorder, finished samples leave. */
#ifndef MT_KV_REORDER_H
#define MT_KV_REORDER_H

#include "kv/lease.h"

/* Row i becomes what row index[i] was, for n <= max_rows rows; repeats are welcome. Full blocks are
 * shared, the last one is copied. pre: every index < rows, n > 0. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_reorder(mt_kvlease *lease, const size_t *index, size_t n, mt_error *err);

#endif
