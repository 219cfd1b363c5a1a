#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>

#include "base/size.h"

static void *
libc_get(void *ctx, size_t bytes)
{
    (void)ctx;
    return malloc(bytes);
}

static void *
libc_zeroed(void *ctx, size_t bytes)
{
    (void)ctx;
    return calloc(1, bytes);
}

static void
libc_put(void *ctx, void *block, size_t bytes)
{
    (void)ctx;
    (void)bytes;
    free(block);
}

const mt_alloc mt_alloc_libc = {
    .get = libc_get, .zeroed = libc_zeroed, .put = libc_put, .ctx = NULL};

void *
mt_alloc_zeroed(const mt_alloc *mem, size_t count, size_t size)
{
    size_t bytes;
    void *block;

    if (!mt_size_mul(count, size, &bytes) || bytes == 0) return NULL;
    if (mem->zeroed != NULL) return mem->zeroed(mem->ctx, bytes);
    block = mem->get(mem->ctx, bytes);
    if (block != NULL) memset(block, 0, bytes);
    return block;
}

enum { FIRST_ROOM = 16 };

void *
mt_alloc_grown(const mt_alloc *mem, void *block, size_t *room, size_t need, size_t size)
{
    size_t more = mt_size_max(mt_size_max(need, FIRST_ROOM), 2 * *room);
    void *larger;

    if (need <= *room) return block;
    if ((larger = mt_alloc_zeroed(mem, more, size)) == NULL) return NULL;
    if (*room > 0) memcpy(larger, block, *room * size);
    mem->put(mem->ctx, block, *room * size);
    *room = more;
    return larger;
}
