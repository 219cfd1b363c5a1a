/* alloc.h -- where core's small blocks come from.
 *
 * A table, so that tests pass an allocator that fails at the n-th call and counts what is live.
 * Big, long-lived blocks (arenas) come from mt_vmem_ops instead. */
#ifndef MT_BASE_ALLOC_H
#define MT_BASE_ALLOC_H

#include <stddef.h>

typedef struct mt_alloc {
    void *(*get)(void *ctx, size_t bytes);             /* NULL when there is no memory; bytes > 0 */
    void *(*zeroed)(void *ctx, size_t bytes);          /* the same, zeros; may be NULL */
    void (*put)(void *ctx, void *block, size_t bytes); /* bytes as asked for; NULL is ignored */
    void *ctx;
} mt_alloc;

/* malloc and free. */
extern const mt_alloc mt_alloc_libc;

/* A block of count * size zero bytes, of which a large one takes no memory where nobody writes
 * (with libc's, and others that have `zeroed`); NULL when there is no memory or the product
 * overflows. */
void *mt_alloc_zeroed(const mt_alloc *mem, size_t count, size_t size);

#endif
