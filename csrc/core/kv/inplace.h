/* inplace.h -- rows that code writes into by itself, through views. */
#ifndef MT_KV_INPLACE_H
#define MT_KV_INPLACE_H

#include "kv/lease.h"

/* For code that writes into the views itself: tokens up to `tokens` of every row and layer are
 * taken, mapped, writable and zero past lengths. Lengths stay: advance announces. pre, statuses as
 * show. */
mt_status mt_kvlease_open(mt_kvlease *lease, size_t tokens, mt_error *err);

/* The same without taking the blocks ahead, for lazy stores only: every address up to max_tokens is
 * writable, pages appear on touch and count in physical_bytes; what was not announced by advance is
 * dropped at the end of the lease. Again after a crop, gather or fork, before code writes on; it
 * may be called at any time. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_expose(mt_kvlease *lease, mt_error *err);

/* For tokens that code wrote into the views itself: all layers' rows are that much longer. Past
 * what was opened or exposed the new tokens are zeros, which take no page until they are written
 * to. MT_ESHAPE ("tokens"); MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_announce(mt_kvlease *lease, const mt_kvstep *step, mt_error *err);

#endif
