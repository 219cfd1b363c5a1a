#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "os/base/pages.h"

#include <stdlib.h>
#include <sys/mman.h>

enum { LEAST = 64 << 10 };

static void *
pages_get(void *ctx, size_t bytes)
{
    void *block;

    (void)ctx;
    if (bytes < LEAST) return malloc(bytes);
    block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return block == MAP_FAILED ? NULL : block;
}

static void *
zeroed(void *ctx, size_t bytes)
{
    return bytes < LEAST ? calloc(1, bytes) : pages_get(ctx, bytes);
}

static void
pages_put(void *ctx, void *block, size_t bytes)
{
    (void)ctx;
    if (block != NULL && bytes >= LEAST)
        (void)munmap(block, bytes);
    else
        free(block);
}

const mt_alloc mt_alloc_pages = {.get = pages_get, .zeroed = zeroed, .put = pages_put, .ctx = NULL};
