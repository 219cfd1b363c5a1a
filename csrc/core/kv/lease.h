/* lease.h -- rows of a pool that are lent: appending to them, showing and cropping them, giving
 * them back. What code writes into views by itself is in inplace.h, rows that become others in
 * reorder.h. Calls, threads and failures as in pool.h. */
#ifndef MT_KV_LEASE_H
#define MT_KV_LEASE_H

#include "kv/pool.h"

/* A lease of `rows` empty sequences, with room promised for `tokens` tokens each (a hint, capped at
 * max_tokens). MT_ESHAPE ("rows") when rows is 0 or over max_rows; MT_ELIMIT; MT_ENOMEM.
 * *out is written on MT_OK only. */
mt_status mt_kvpool_acquire(mt_kvpool *pool, size_t rows, size_t tokens, mt_kvlease **out,
                            mt_error *err);

/* A lease in which row r * n + i continues row r of `parent`, which may go on or be released. Full
 * blocks are shared, room for `tokens` tokens each in all is promised. Statuses as acquire. */
mt_status mt_kvlease_fork(mt_kvlease *parent, size_t n, size_t tokens, mt_kvlease **out,
                          mt_error *err);

/* The lease is over. Its blocks are given back in this call; or, where it is held, by the last
 * unhold, and until then its addresses stay readable. pre: called once. */
void mt_kvlease_release(mt_kvlease *lease);
void mt_kvlease_hold(mt_kvlease *lease);
void mt_kvlease_unhold(mt_kvlease *lease); /* from any thread */

size_t mt_kvlease_rows(const mt_kvlease *lease);
mt_kvpool *mt_kvlease_pool(const mt_kvlease *lease);
const mt_kvgeom *mt_kvlease_geom(const mt_kvlease *lease);
void *mt_kvlease_base(const mt_kvlease *lease);      /* of row 0; row r at r * slot_bytes */
size_t mt_kvlease_max_rows(const mt_kvlease *lease); /* rows at acquire: slots behind base */
size_t mt_kvlease_length(const mt_kvlease *lease, size_t layer, size_t row);
size_t mt_kvlease_longest(const mt_kvlease *lease, size_t layer);  /* over rows */
size_t mt_kvlease_shortest(const mt_kvlease *lease, size_t layer); /* over rows */
size_t mt_kvlease_row_tokens(const mt_kvlease *lease, size_t row); /* over layers */

/* Rows to append: counts[row] tokens each, or `count` for all where counts is NULL. */
typedef struct mt_kvstep {
    size_t count;
    const size_t *counts;
} mt_kvstep;

/* Tokens of the row in the step. */
static inline size_t
mt_kvstep_count(const mt_kvstep *step, size_t row)
{
    return step->counts != NULL ? step->counts[row] : step->count;
}

/* Where one of the two tensors [rows, H, t, D] comes from; strides in bytes, the last dimension
 * is contiguous. Row r's first counts[r] tokens are taken. */
typedef struct mt_kvsource {
    const char *data;
    ptrdiff_t row_stride, head_stride, token_stride;
} mt_kvsource;

/* Makes the layer ready to append: blocks are taken (copied where shared), mapped and writable, and
 * everything up to the new longest row is readable, with zeros past lengths. MT_ESHAPE ("tokens",
 * with the length asked and max_tokens); MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_room(mt_kvlease *lease, size_t layer, const mt_kvstep *step, mt_error *err);

/* Writes K and V at the ends of the rows of a host store. pre: room for the same step. */
void mt_kvlease_write(mt_kvlease *lease, size_t layer, const mt_kvstep *step, const mt_kvsource *k,
                      const mt_kvsource *v);

/* The layer's rows are that much longer. pre: room for the same step, and the tokens are written
 * or enqueued. */
void mt_kvlease_advance(mt_kvlease *lease, size_t layer, const mt_kvstep *step);

/* Makes tokens [0, tokens) of every row readable in this layer, with zeros past lengths. pre:
 * tokens <= max_tokens. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_show(mt_kvlease *lease, size_t layer, size_t tokens, mt_error *err);

/* Cuts row r to lengths[r] tokens, in every layer that has more; frees blocks past that. */
void mt_kvlease_crop(mt_kvlease *lease, const size_t *lengths);

#endif
