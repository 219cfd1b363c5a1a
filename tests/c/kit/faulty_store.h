/* faulty_store.h -- any store, of whose calls the n-th fails, with a count of each and the checks
 * of its preconditions.
 *
 *     pool --> faulty_store --> the store under test
 *                 `-- faulty: counts with the allocator, so that one loop fails every call there is
 *
 * A map that fails leaves half of its stretch mapped, as the contract allows. */
#ifndef MT_TESTS_KIT_FAULTY_STORE_H
#define MT_TESTS_KIT_FAULTY_STORE_H

#include "kit/check.h"
#include "core/port/store.h"
#include "kit/faulty.h"

enum { FAULTY_ARENAS = 512 };

typedef struct faulty_store {
    mt_store_ops under;
    faulty *faults;
    bool open;   /* not closed */
    bool device; /* copies can fail: MT_EDEVICE. On the host they are memcpy, a window is a sum. */
    size_t arenas, bytes;
    char *base[FAULTY_ARENAS];
    size_t end[FAULTY_ARENAS]; /* offset behind each */
    size_t extends, takes, drops, maps, zero_maps, unmaps, settles, copies, zeros;
} faulty_store;

/* Calls that map, of either kind. */
static inline size_t
faulty_store_maps(const faulty_store *s)
{
    return s->maps + s->zero_maps;
}

static inline mt_status
faulty_store_fails(faulty_store *s, const char *call, mt_error *err)
{
    return faulty_fails(s->faults) ? mt_fail(err, MT_ENOMEM, call, 12) : MT_OK;
}

static inline mt_status
faulty_device_fails(faulty_store *s, const char *call, mt_error *err)
{
    return s->device && faulty_fails(s->faults) ? mt_fail(err, MT_EDEVICE, call, 700) : MT_OK;
}

/* Whole pages, some of them, within one arena's offsets. */
static inline void
check_offsets(const faulty_store *s, size_t offset, size_t bytes)
{
    size_t a = 0;

    CHECK(bytes > 0 && (offset | bytes) % s->under.page_bytes == 0);
    while (a < s->arenas && s->end[a] <= offset)
        a++;
    CHECK(a < s->arenas && bytes <= s->end[a] - offset);
}

/* Addresses within one arena; page by page, or byte by byte where `unit` is 1. */
static inline void
check_addresses(const faulty_store *s, const void *at, size_t bytes, size_t unit)
{
    const char *p = at;
    size_t a = 0, begin = 0;

    CHECK(bytes > 0 && ((uintptr_t)at | bytes) % unit == 0);
    while (a < s->arenas && (p < s->base[a] || p >= s->base[a] + (s->end[a] - begin)))
        begin = s->end[a++];
    CHECK(a < s->arenas && bytes <= s->end[a] - begin - (size_t)(p - s->base[a]));
}

static inline mt_status
faulty_extend(void *ctx, size_t bytes, void **base, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_store_fails(s, "extend", err);

    CHECK(bytes > 0 && bytes % s->under.page_bytes == 0 && s->arenas < FAULTY_ARENAS);
    s->extends++;
    if (st == MT_OK) st = s->under.extend(s->under.ctx, bytes, base, err);
    if (st != MT_OK) return st;
    s->bytes += bytes;
    s->base[s->arenas] = *base;
    s->end[s->arenas++] = s->bytes;
    return MT_OK;
}

static inline mt_status
faulty_take(void *ctx, size_t offset, size_t bytes, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_store_fails(s, "take", err);

    check_offsets(s, offset, bytes);
    s->takes++;
    return st != MT_OK ? st : s->under.take(s->under.ctx, offset, bytes, err);
}

static inline void
faulty_drop(void *ctx, size_t offset, size_t bytes)
{
    faulty_store *s = ctx;

    check_offsets(s, offset, bytes);
    s->drops++;
    s->under.drop(s->under.ctx, offset, bytes);
}

static inline mt_status
faulty_map(void *ctx, void *at, size_t bytes, size_t offset, mt_map_kind kind, mt_error *err)
{
    faulty_store *s = ctx;
    size_t half = bytes / 2 / s->under.page_bytes * s->under.page_bytes;
    mt_status st = faulty_store_fails(s, "map", err);

    check_offsets(s, offset, bytes);
    check_addresses(s, at, bytes, s->under.page_bytes);
    s->maps++;
    if (st == MT_OK) return s->under.map(s->under.ctx, at, bytes, offset, kind, err);
    if (half > 0) (void)s->under.map(s->under.ctx, at, half, offset, kind, NULL);
    return st;
}

static inline mt_status
faulty_map_zero(void *ctx, void *at, size_t bytes, mt_error *err)
{
    faulty_store *s = ctx;
    size_t half = bytes / 2 / s->under.page_bytes * s->under.page_bytes;
    mt_status st = faulty_store_fails(s, "map_zero", err);

    check_addresses(s, at, bytes, s->under.page_bytes);
    s->zero_maps++;
    if (st == MT_OK) return s->under.map_zero(s->under.ctx, at, bytes, err);
    if (half > 0) (void)s->under.map_zero(s->under.ctx, at, half, NULL);
    return st;
}

static inline void
faulty_unmap(void *ctx, void *at, size_t bytes)
{
    faulty_store *s = ctx;

    CHECK(!s->under.lazy);
    check_addresses(s, at, bytes, s->under.page_bytes);
    s->unmaps++;
    s->under.unmap(s->under.ctx, at, bytes);
}

static inline mt_status
faulty_settle(void *ctx, void *at, size_t bytes, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_store_fails(s, "settle", err);

    check_addresses(s, at, bytes, s->under.page_bytes);
    s->settles++;
    return st != MT_OK ? st : s->under.settle(s->under.ctx, at, bytes, err);
}

static inline size_t
faulty_written(void *ctx, void *at, size_t bytes)
{
    faulty_store *s = ctx;

    CHECK(s->under.private_writes);
    check_addresses(s, at, bytes, s->under.page_bytes);
    return s->under.written(s->under.ctx, at, bytes);
}

static inline mt_status
faulty_window(void *ctx, size_t offset, size_t bytes, void **out, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_device_fails(s, "window", err);

    check_offsets(s, offset, bytes);
    return st != MT_OK ? st : s->under.window(s->under.ctx, offset, bytes, out, err);
}

static inline mt_status
faulty_copy(void *ctx, void *dst, const void *src, size_t bytes, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_device_fails(s, "copy", err);

    s->copies++;
    return st != MT_OK ? st : s->under.copy(s->under.ctx, dst, src, bytes, err);
}

static inline mt_status
faulty_zero(void *ctx, void *dst, size_t bytes, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_device_fails(s, "zero", err);

    s->zeros++;
    return st != MT_OK ? st : s->under.zero(s->under.ctx, dst, bytes, err);
}

static inline mt_status
faulty_use_stream(void *ctx, void *stream, mt_error *err)
{
    faulty_store *s = ctx;
    mt_status st = faulty_device_fails(s, "use_stream", err);

    return st != MT_OK ? st : s->under.use_stream(s->under.ctx, stream, err);
}

static inline size_t
faulty_physical(void *ctx)
{
    faulty_store *s = ctx;

    return s->under.physical(s->under.ctx);
}

static inline void
faulty_close(void *ctx)
{
    faulty_store *s = ctx;

    if (s == NULL) return;
    CHECK(s->open);
    s->open = false;
    s->under.close(s->under.ctx);
}

/* *s outlives the store, so that its counts can be read after close. */
static inline mt_store_ops
faulty_store_over(faulty_store *s, const mt_store_ops *under, faulty *faults)
{
    *s = (faulty_store){.under = *under, .faults = faults, .open = true};
    return (mt_store_ops){.page_bytes = under->page_bytes,
                          .max_maps = under->max_maps,
                          .lazy = under->lazy,
                          .private_writes = under->private_writes,
                          .extend = faulty_extend,
                          .take = faulty_take,
                          .drop = faulty_drop,
                          .map = faulty_map,
                          .map_zero = faulty_map_zero,
                          .unmap = faulty_unmap,
                          .settle = faulty_settle,
                          .written = faulty_written,
                          .window = faulty_window,
                          .copy = faulty_copy,
                          .zero = faulty_zero,
                          .use_stream = faulty_use_stream,
                          .physical = faulty_physical,
                          .close = faulty_close,
                          .ctx = s};
}

#endif
