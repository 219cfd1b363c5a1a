/* vmem.h -- address space and the pages behind it, as core sees them.
 *
 *     reserve                     touch                       forget                release
 *   [ . . . . . . . . ]   ->   [ # # # . . . . . ]   ->   [ . . . . . . . . ]   ->   (gone)
 *     addresses only              pages appear zeroed        addresses only
 *
 * A table that csrc/os fills (and tests, with faults). What the KV-cache pool needs beyond that,
 * pages that are mapped and shared, is in store.h. */
#ifndef MT_PORT_VMEM_H
#define MT_PORT_VMEM_H

#include <stddef.h>

#include "base/status.h"

typedef struct mt_vmem_ops {
    /* Reserves bytes (> 0, any size) of readable, writable, zero-filled, page-aligned memory that
     * costs physical pages only where touched. *out is written on MT_OK only. MT_ENOMEM. */
    mt_status (*reserve)(void *ctx, size_t bytes, void **out, mt_error *err);
    /* Gives the whole range back. base and bytes as reserved; NULL is ignored; cannot fail. */
    void (*release)(void *ctx, void *base, size_t bytes);
    /* Gives the pages that lie wholly in [at, at + bytes) back; the range stays reserved, and what
     * it held is undefined. Cannot fail. */
    void (*forget)(void *ctx, void *at, size_t bytes);
    void *ctx;
} mt_vmem_ops;

#endif
