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

/* A block of count * size zero bytes, of which a large one takes memory only where it is written
 * (with libc's, and others that have `zeroed`); NULL when there is no memory or the product
 * overflows. */
void *mt_alloc_zeroed(const mt_alloc *mem, size_t count, size_t size);

/* An array of *room items of `size` bytes (NULL where *room is 0) with room for `need` of them: the
 * block itself, or one of twice the room in its place, whose new items are zeros. NULL without
 * memory; block and *room are then as they were. pre: need > 0. */
void *mt_alloc_grown(const mt_alloc *mem, void *block, size_t *room, size_t need, size_t size);

#endif
