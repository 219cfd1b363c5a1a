/* inplace.h -- rows that code writes into by itself, through views. */
#ifndef MT_KV_INPLACE_H
#define MT_KV_INPLACE_H

#include "kv/lease.h"

/* For code that writes into the views itself: tokens [0, tokens) of every row and layer are mapped,
 * those past a row's length are the row's own, and zeros. `held`: so are the tokens before it, all of
 * them, until the next fork, reorder or select; blocks that others name are copied. Lengths stay
 * until advance_all. pre and statuses as show. */
mt_status mt_kvlease_reserve(mt_kvlease *lease, size_t tokens, bool held, mt_error *err);

/* The same without taking the blocks ahead, for lazy stores only: every address up to max_tokens is
 * writable, pages appear on touch and count in physical_bytes. What no advance counts is dropped at
 * the end of the lease. It is called again after a crop, reorder or fork, before code writes on,
 * and may be called at any time. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_expose(mt_kvlease *lease, mt_error *err);

/* For tokens that code wrote into the views itself: the rows are that much longer, in all layers.
 * Past what was reserved or exposed the new tokens are zeros, which take no page until they are
 * written to. MT_ESHAPE ("tokens"); MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_advance_all(mt_kvlease *lease, const mt_kvstep *step, mt_error *err);

#endif
