/* memstore.h -- a strict store that is not lazy, for tests: what a device's driver punishes by a
 * crash, or does not punish, is a failed CHECK here.
 *
 *   page    not taken | taken                 window and map only when taken, drop only when taken
 *   address unmapped  | page p | zeros        no page goes while an address maps it
 *
 * It stands on the Linux store: an unmapped address faults, zeros are read-only. Pages may be any
 * power of two from the system's page on. */
#ifndef MT_TESTS_KIT_MEMSTORE_H
#define MT_TESTS_KIT_MEMSTORE_H

#include <string.h>
#include <sys/mman.h>

#include "kit/check.h"
#include "core/base/alloc.h"
#include "core/base/size.h"
#include "os/port/store.h"

enum { MEM_PAGES = 1 << 14, MEM_ARENAS = 256 };

enum { MEM_UNMAPPED = -1, MEM_ZEROS = -2 }; /* in `shows`; else a page */

typedef struct memstore {
    mt_alloc mem;
    mt_store_ops under;
    size_t unit;
    size_t arenas, pages, taken_pages;
    unsigned char *base[MEM_ARENAS];
    size_t first[MEM_ARENAS + 1];
    bool taken[MEM_PAGES];
    int shows[MEM_PAGES];  /* by address */
    int mapped[MEM_PAGES]; /* addresses that show this page */
} memstore;

static inline size_t
mem_arena(const memstore *s, size_t page)
{
    size_t a = 0;

    while (a < s->arenas && s->first[a + 1] <= page)
        a++;
    CHECK(a < s->arenas);
    return a;
}

/* The page numbers of [offset, offset + bytes), which lie in one arena. */
static inline size_t
mem_pages(const memstore *s, size_t offset, size_t bytes, size_t *n)
{
    size_t page = offset / s->unit;

    CHECK(offset % s->unit == 0 && bytes % s->unit == 0 && bytes > 0);
    *n = bytes / s->unit;
    CHECK(*n <= s->first[mem_arena(s, page) + 1] - page);
    return page;
}

/* Where that is in the store below: each arena there is a page longer, so that ours can be aligned.
 */
static inline size_t
mem_below(const memstore *s, size_t offset)
{
    return offset + mem_arena(s, offset / s->unit) * s->unit;
}

/* The same for addresses. */
static inline size_t
mem_places(const memstore *s, const void *at, size_t bytes, size_t *n)
{
    uintptr_t here = (uintptr_t)at;
    size_t a = 0;

    while (a < s->arenas &&
           here - (uintptr_t)s->base[a] >= (s->first[a + 1] - s->first[a]) * s->unit)
        a++;
    CHECK(a < s->arenas);
    return mem_pages(s, s->first[a] * s->unit + (here - (uintptr_t)s->base[a]), bytes, n);
}

static inline void
mem_show(memstore *s, size_t place, int what)
{
    int was = s->shows[place];

    if (was >= 0) s->mapped[was]--;
    if (what >= 0) s->mapped[what]++;
    s->shows[place] = what;
}

static inline mt_status
mem_extend(void *ctx, size_t bytes, void **base, mt_error *err)
{
    memstore *s = ctx;
    size_t n = bytes / s->unit;
    void *at;
    mt_status st;

    CHECK(bytes % s->unit == 0 && n > 0);
    if (s->arenas == MEM_ARENAS || n > MEM_PAGES - s->pages)
        return mt_fail(err, MT_ENOMEM, "extend", 0);
    if ((st = s->under.extend(s->under.ctx, bytes + s->unit, &at, err)) != MT_OK) return st;
    CHECK(mprotect(at, bytes + s->unit, PROT_NONE) == 0);
    at = (char *)at + (s->unit - (uintptr_t)at % s->unit) % s->unit;
    for (size_t i = s->pages; i < s->pages + n; i++)
        s->shows[i] = MEM_UNMAPPED;
    s->base[s->arenas++] = at;
    s->pages += n;
    s->first[s->arenas] = s->pages;
    *base = at;
    return MT_OK;
}

static inline mt_status
mem_take(void *ctx, size_t offset, size_t bytes, mt_error *err)
{
    memstore *s = ctx;
    size_t n, page = mem_pages(s, offset, bytes, &n);

    (void)err;
    for (size_t i = page; i < page + n; i++) {
        s->taken_pages += !s->taken[i];
        s->taken[i] = true;
    }
    return MT_OK;
}

static inline void
mem_drop(void *ctx, size_t offset, size_t bytes)
{
    memstore *s = ctx;
    size_t n, page = mem_pages(s, offset, bytes, &n);

    for (size_t i = page; i < page + n; i++) {
        CHECK(s->mapped[i] == 0);
        s->taken_pages -= s->taken[i];
        s->taken[i] = false;
    }
    s->under.drop(s->under.ctx, mem_below(s, offset), bytes);
}

static inline mt_status
mem_map(void *ctx, void *at, size_t bytes, size_t offset, mt_map_kind kind, mt_error *err)
{
    memstore *s = ctx;
    size_t n, page = mem_pages(s, offset, bytes, &n), place = mem_places(s, at, bytes, &n);
    mt_status st;

    (void)kind;
    st = s->under.map(s->under.ctx, at, bytes, mem_below(s, offset), MT_MAP_SHARED, err);
    for (size_t i = 0; i < n && st == MT_OK; i++) {
        CHECK(s->taken[page + i]);
        mem_show(s, place + i, (int)(page + i));
    }
    return st;
}

static inline mt_status
mem_map_zero(void *ctx, void *at, size_t bytes, mt_error *err)
{
    memstore *s = ctx;
    size_t n, place = mem_places(s, at, bytes, &n);
    mt_status st = s->under.map_zero(s->under.ctx, at, bytes, err);

    if (st != MT_OK) return st;
    CHECK(mprotect(at, bytes, PROT_READ) == 0);
    for (size_t i = place; i < place + n; i++)
        mem_show(s, i, MEM_ZEROS);
    return MT_OK;
}

static inline void
mem_unmap(void *ctx, void *at, size_t bytes)
{
    memstore *s = ctx;
    size_t n, place = mem_places(s, at, bytes, &n);

    CHECK(mprotect(at, bytes, PROT_NONE) == 0);
    for (size_t i = place; i < place + n; i++)
        mem_show(s, i, MEM_UNMAPPED);
}

static inline mt_status
mem_settle(void *ctx, void *at, size_t bytes, mt_error *err)
{
    size_t n;

    (void)err;
    (void)mem_places(ctx, at, bytes, &n);
    return MT_OK;
}

static inline mt_status
mem_window(void *ctx, size_t offset, size_t bytes, void **out, mt_error *err)
{
    memstore *s = ctx;
    size_t n, page = mem_pages(s, offset, bytes, &n);

    for (size_t i = page; i < page + n; i++)
        CHECK(s->taken[i]);
    return s->under.window(s->under.ctx, mem_below(s, offset), bytes, out, err);
}

static inline mt_status
mem_copy(void *ctx, void *dst, const void *src, size_t bytes, mt_error *err)
{
    memstore *s = ctx;

    return s->under.copy(s->under.ctx, dst, src, bytes, err);
}

static inline mt_status
mem_zero(void *ctx, void *dst, size_t bytes, mt_error *err)
{
    memstore *s = ctx;

    return s->under.zero(s->under.ctx, dst, bytes, err);
}

static inline mt_status
mem_use_stream(void *ctx, void *stream, mt_error *err)
{
    (void)ctx;
    (void)stream;
    (void)err;
    return MT_OK;
}

static inline size_t
mem_physical(void *ctx)
{
    memstore *s = ctx;

    CHECK(s->under.physical(s->under.ctx) <= s->taken_pages * s->unit);
    return s->taken_pages * s->unit;
}

static inline void
mem_close(void *ctx)
{
    memstore *s = ctx;
    mt_alloc mem;

    if (s == NULL) return;
    mem = s->mem;
    s->under.close(s->under.ctx);
    mem.put(mem.ctx, s, sizeof *s);
}

/* page_bytes 0: the system's. */
static inline mt_status
memstore_new(const mt_alloc *mem, const mt_linux_sys *sys, size_t page_bytes, mt_store_ops *out,
             mt_error *err)
{
    memstore *s = mt_alloc_zeroed(mem, 1, sizeof *s);
    mt_status st;

    if (s == NULL) return mt_fail(err, MT_ENOMEM, "memstore_new", 0);
    s->mem = *mem;
    if ((st = mt_store_linux_new_with(mem, sys, &s->under, err)) != MT_OK) {
        mem->put(mem->ctx, s, sizeof *s);
        return st;
    }
    s->unit = mt_size_max(page_bytes, s->under.page_bytes);
    *out = (mt_store_ops){.page_bytes = s->unit,
                          .max_maps = SIZE_MAX,
                          .extend = mem_extend,
                          .take = mem_take,
                          .drop = mem_drop,
                          .map = mem_map,
                          .map_zero = mem_map_zero,
                          .unmap = mem_unmap,
                          .settle = mem_settle,
                          .window = mem_window,
                          .copy = mem_copy,
                          .zero = mem_zero,
                          .use_stream = mem_use_stream,
                          .physical = mem_physical,
                          .close = mem_close,
                          .ctx = s};
    return MT_OK;
}

#endif
