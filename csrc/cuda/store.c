/* store.c -- how this file works.
 *
 * pages[] has one element for each page of the store and, at the same index, for one page of
 * addresses: whether the page is taken, which handle it has and whether it was zeroed, and what the
 * address shows. Addresses are mapped page by page. Before a mapping is taken away the host waits
 * for the work on all streams that were used (streams.h), in clear(). What the driver refuses to
 * take away stays in that table as it was, and is tried again by the next call that comes to it. */
#include "cuda/store.h"

#include <assert.h>
#include <sys/types.h>

#include "core/base/size.h"
#include "cuda/driver.h"
#include "cuda/streams.h"

static const size_t NOTHING = SIZE_MAX;   /* what an address shows, beside pages by number */
static const size_t ZEROS = SIZE_MAX - 1; /* the page of zeros */

typedef enum window_state { WINDOW_NONE, WINDOW_MAPPED, WINDOW_OPEN } window_state;

/* Page i of the store, and page i of the addresses, which begins as its home. */
typedef struct page {
    mt_cupage handle;
    size_t uses; /* addresses that show it; its window apart */
    window_state window;
    bool taken;   /* physical */
    bool fresh;   /* taken by the call that is running */
    bool clean;   /* zeroed since it was taken */
    size_t shows; /* what the address shows */
} page;

typedef struct arena {
    char *base, *window;
    size_t first, count; /* pages */
} arena;

typedef struct store {
    mt_alloc mem;
    mt_cudrv *drv;
    mt_birth birth;
    size_t page_bytes;
    page *pages;
    size_t count, room;
    size_t taken; /* of them */
    arena *arenas;
    size_t arena_count, arena_room;
    mt_custreams streams;
    char *zeros_at; /* NULL: there is no page of zeros yet */
    mt_cupage zeros;
} store;

/* ---- growing, finding ---- */

/* Room for n more pages in one more arena. */
static mt_status
cuda_store_make_room(store *s, size_t n, mt_error *err)
{
    page *pages = mt_alloc_grown(&s->mem, s->pages, &s->room, s->count + n, sizeof *pages);
    arena *arenas;

    if (pages == NULL) return mt_fail(err, MT_ENOMEM, "mt_store_cuda", 0);
    s->pages = pages;
    arenas = mt_alloc_grown(&s->mem, s->arenas, &s->arena_room, s->arena_count + 1, sizeof *arenas);
    if (arenas == NULL) return mt_fail(err, MT_ENOMEM, "mt_store_cuda", 0);
    s->arenas = arenas;
    return MT_OK;
}

static const arena *
arena_of_page(const store *s, size_t i)
{
    const arena *a = s->arenas;

    assert(i < s->count);
    while (i - a->first >= a->count)
        a++;
    return a;
}

static size_t
page_at(const store *s, const char *at)
{
    const arena *a = s->arenas;

    while ((uintptr_t)at - (uintptr_t)a->base >= a->count * s->page_bytes) {
        a++;
        assert(a < s->arenas + s->arena_count);
    }
    return a->first + (size_t)(at - a->base) / s->page_bytes;
}

static char *
window_of(const store *s, size_t i)
{
    const arena *a = arena_of_page(s, i);

    return a->window + (i - a->first) * s->page_bytes;
}

static mt_status
enqueue_zero(store *s, char *at, size_t bytes, mt_error *err)
{
    const mt_custreams *on = &s->streams;

    return on->dev->zero(on->dev->ctx, on->device, at, bytes, on->now, err);
}

/* ---- what addresses show ---- */

static void
set_shown(store *s, size_t i, size_t what)
{
    page *p = &s->pages[i];

    if (p->shows < ZEROS) s->pages[p->shows].uses--;
    if (what < ZEROS) s->pages[what].uses++;
    p->shows = what;
}

static bool
shows_any(const store *s, size_t i, size_t n)
{
    while (n > 0 && s->pages[i + n - 1].shows == NOTHING)
        n--;
    return n > 0;
}

/* Takes away what n addresses from page i on show. pre: no work of the device touches them any
 * more. */
static mt_status
unmap_pages(store *s, char *at, size_t i, size_t n, mt_error *err)
{
    for (size_t k = 0; k < n; k++) {
        mt_status st;

        if (s->pages[i + k].shows == NOTHING) continue;
        st = mt_cudrv_unmap(s->drv, at + k * s->page_bytes, s->page_bytes, err);
        if (st != MT_OK) return st;
        set_shown(s, i + k, NOTHING);
    }
    return MT_OK;
}

static mt_status
clear(store *s, char *at, size_t i, size_t n, mt_error *err)
{
    mt_status st;

    if (!shows_any(s, i, n)) return MT_OK;
    st = mt_custreams_wait(&s->streams, err);
    return st == MT_OK ? unmap_pages(s, at, i, n, err) : st;
}

/* Maps page first + k, or the page of zeros where first is ZEROS, at address i + k. */
static mt_status
map_pages(store *s, char *at, size_t i, size_t n, size_t first, mt_error *err)
{
    for (size_t k = 0; k < n; k++) {
        size_t what = first == ZEROS ? ZEROS : first + k;
        mt_cupage handle = first == ZEROS ? s->zeros : s->pages[what].handle;
        mt_status st;

        assert(first == ZEROS || s->pages[what].taken);
        st = mt_cudrv_map(s->drv, at + k * s->page_bytes, s->page_bytes, handle, err);
        if (st != MT_OK) return st;
        set_shown(s, i + k, what);
    }
    return mt_cudrv_allow(s->drv, at, n * s->page_bytes, err);
}

/* Zeroes those of pages [first, first + n), mapped at `at`, that are new. */
static mt_status
clean_pages(store *s, char *at, size_t first, size_t n, mt_error *err)
{
    for (size_t k = 0, run; k < n; k += run) {
        mt_status st;

        for (run = 0; k + run < n && !s->pages[first + k + run].clean;)
            run++;
        if (run == 0) {
            run = 1;
            continue;
        }
        if ((st = mt_custreams_ready(&s->streams, err)) != MT_OK) return st;
        st = enqueue_zero(s, at + k * s->page_bytes, run * s->page_bytes, err);
        if (st != MT_OK) return st;
        for (size_t j = k; j < k + run; j++)
            s->pages[first + j].clean = true;
    }
    return MT_OK;
}

static void
unmap(void *ctx, void *at, size_t bytes)
{
    store *s = ctx;

    clear(s, at, page_at(s, at), bytes / s->page_bytes, NULL);
}

static mt_status
cuda_store_map(void *ctx, void *at, size_t bytes, size_t offset, mt_map_kind kind, mt_error *err)
{
    store *s = ctx;
    size_t i = page_at(s, at), n = bytes / s->page_bytes, first = offset / s->page_bytes;
    /* Nothing is taken away while the stream in use is captured. */
    mt_status st = shows_any(s, i, n) ? mt_custreams_ready(&s->streams, err) : MT_OK;

    (void)kind; /* a device has no private writes */
    if (st == MT_OK) st = clear(s, at, i, n, err);
    if (st == MT_OK) st = map_pages(s, at, i, n, first, err);
    return st == MT_OK ? clean_pages(s, at, first, n, err) : st;
}

static mt_status
make_zeros(store *s, mt_error *err)
{
    void *at = NULL;
    mt_status st;

    if (s->zeros_at != NULL) return MT_OK;
    st = mt_cudrv_create(s->drv, s->page_bytes, &s->zeros, err);
    if (st != MT_OK) return st;
    st = mt_cudrv_reserve(s->drv, s->page_bytes, s->page_bytes, &at, err);
    if (st != MT_OK) goto release;
    if ((st = mt_cudrv_map(s->drv, at, s->page_bytes, s->zeros, err)) != MT_OK) goto unreserve;
    if ((st = mt_cudrv_allow(s->drv, at, s->page_bytes, err)) == MT_OK) {
        s->zeros_at = at;
        return MT_OK;
    }
    mt_cudrv_unmap(s->drv, at, s->page_bytes, NULL);
unreserve: /* the address maps nothing */
    mt_cudrv_unreserve(s->drv, at, s->page_bytes, NULL);
release: /* the page has no address */
    mt_cudrv_release(s->drv, s->zeros, NULL);
    return st;
}

static mt_status
map_zero(void *ctx, void *at, size_t bytes, mt_error *err)
{
    store *s = ctx;
    size_t i = page_at(s, at), n = bytes / s->page_bytes;
    mt_status st = make_zeros(s, err);

    if (st == MT_OK) st = mt_custreams_ready(&s->streams, err);
    if (st == MT_OK) st = enqueue_zero(s, s->zeros_at, s->page_bytes, err);
    if (st == MT_OK) st = clear(s, at, i, n, err);
    return st == MT_OK ? map_pages(s, at, i, n, ZEROS, err) : st;
}

/* ---- pages ---- */

static bool
release_page(store *s, page *p)
{
    if (mt_cudrv_release(s->drv, p->handle, NULL) != MT_OK) return false;
    p->taken = false;
    s->taken--;
    return true;
}

static mt_status
cuda_store_take(void *ctx, size_t offset, size_t bytes, mt_error *err)
{
    store *s = ctx;
    page *from = &s->pages[offset / s->page_bytes], *end = from + bytes / s->page_bytes;
    mt_status st = MT_OK;

    for (page *p = from; p < end && st == MT_OK; p++) {
        if (p->taken) continue;
        if ((st = mt_cudrv_create(s->drv, s->page_bytes, &p->handle, err)) != MT_OK) break;
        p->taken = p->fresh = true;
        s->taken++;
    }
    if (st == MT_ENOMEM && err != NULL) err->asked = bytes;
    for (page *p = from; p < end; p++) {
        if (st != MT_OK && p->fresh) release_page(s, p);
        p->fresh = false;
    }
    return st;
}

/* Takes a page's last mappings away: its window's, and those that an unmap could not. */
static mt_status
hide_page(store *s, size_t i)
{
    page *p = &s->pages[i];
    mt_status st = MT_OK;

    for (size_t at = 0; at < s->count && p->uses > 0 && st == MT_OK; at++) {
        const arena *a = arena_of_page(s, at);
        if (s->pages[at].shows == i)
            st = unmap_pages(s, a->base + (at - a->first) * s->page_bytes, at, 1, NULL);
    }
    if (st != MT_OK || p->window == WINDOW_NONE) return st;
    st = mt_cudrv_unmap(s->drv, window_of(s, i), s->page_bytes, NULL);
    if (st == MT_OK) p->window = WINDOW_NONE;
    return st;
}

static void
drop(void *ctx, size_t offset, size_t bytes)
{
    store *s = ctx;
    size_t first = offset / s->page_bytes, n = bytes / s->page_bytes;
    bool mapped = false, idle;

    for (size_t i = first; i < first + n; i++) {
        mapped = mapped || s->pages[i].uses > 0 || s->pages[i].window != WINDOW_NONE;
        s->pages[i].clean = false; /* also of one that stays */
    }
    idle = !mapped || mt_custreams_wait(&s->streams, NULL) == MT_OK;
    for (size_t i = first; i < first + n && idle; i++)
        if (s->pages[i].taken && hide_page(s, i) == MT_OK) release_page(s, &s->pages[i]);
}

/* A window stays mapped until its page is dropped, so there is nothing to undo when this fails. */
static mt_status
open_window(store *s, char *at, size_t first, size_t n, mt_error *err)
{
    mt_status st;

    for (size_t k = 0; k < n; k++) {
        page *p = &s->pages[first + k];

        assert(p->taken);
        if (p->window != WINDOW_NONE) continue;
        st = mt_cudrv_map(s->drv, at + k * s->page_bytes, s->page_bytes, p->handle, err);
        if (st != MT_OK) return st;
        p->window = WINDOW_MAPPED;
    }
    if ((st = mt_cudrv_allow(s->drv, at, n * s->page_bytes, err)) != MT_OK) return st;
    for (size_t k = 0; k < n; k++)
        s->pages[first + k].window = WINDOW_OPEN;
    return MT_OK;
}

static mt_status
window(void *ctx, size_t offset, size_t bytes, void **out, mt_error *err)
{
    store *s = ctx;
    size_t first = offset / s->page_bytes, n = bytes / s->page_bytes, open = 0;
    char *at = window_of(s, first);
    mt_status st = MT_OK;

    while (open < n && s->pages[first + open].window == WINDOW_OPEN)
        open++;
    if (open < n) st = open_window(s, at, first, n, err);
    if (st == MT_OK) st = clean_pages(s, at, first, n, err);
    if (st == MT_OK) *out = at;
    return st;
}

static size_t
physical(void *ctx)
{
    const store *s = ctx;

    return s->taken * s->page_bytes;
}

/* ---- the rest of the table ---- */

static mt_status
extend(void *ctx, size_t bytes, void **base, mt_error *err)
{
    store *s = ctx;
    size_t n = bytes / s->page_bytes;
    void *home = NULL, *view = NULL;
    mt_status st = cuda_store_make_room(s, n, err);

    if (st != MT_OK) return st;
    st = mt_cudrv_reserve(s->drv, bytes, s->page_bytes, &home, err);
    if (st != MT_OK) return st;
    st = mt_cudrv_reserve(s->drv, bytes, s->page_bytes, &view, err);
    if (st != MT_OK) {
        mt_cudrv_unreserve(s->drv, home, bytes, NULL);
        return st;
    }
    s->arenas[s->arena_count++] = (arena){home, view, s->count, n};
    for (size_t i = s->count; i < s->count + n; i++)
        s->pages[i] = (page){.shows = NOTHING};
    s->count += n;
    *base = home;
    return MT_OK;
}

static mt_status
settle(void *ctx, void *at, size_t bytes, mt_error *err)
{
    (void)ctx;
    (void)at;
    (void)bytes;
    (void)err;
    return MT_OK;
}

static mt_status
copy(void *ctx, void *dst, const void *src, size_t bytes, mt_error *err)
{
    mt_custreams *on = &((store *)ctx)->streams;
    mt_status st = mt_custreams_ready(on, err);

    if (st != MT_OK) return st;
    return on->dev->copy_d2d(on->dev->ctx, on->device, dst, src, bytes, on->now, err);
}

static mt_status
cuda_store_zero(void *ctx, void *dst, size_t bytes, mt_error *err)
{
    store *s = ctx;
    mt_status st = mt_custreams_ready(&s->streams, err);

    return st == MT_OK ? enqueue_zero(s, dst, bytes, err) : st;
}

static mt_status
use_stream(void *ctx, void *stream, mt_error *err)
{
    return mt_custreams_use(&((store *)ctx)->streams, stream, err);
}

static void
cuda_store_give_back(store *s)
{
    for (const arena *a = s->arenas; a < s->arenas + s->arena_count; a++) {
        size_t bytes = a->count * s->page_bytes;

        unmap_pages(s, a->base, a->first, a->count, NULL);
        for (size_t i = a->first; i < a->first + a->count; i++)
            if (s->pages[i].taken && hide_page(s, i) == MT_OK) release_page(s, &s->pages[i]);
        mt_cudrv_unreserve(s->drv, a->base, bytes, NULL);
        mt_cudrv_unreserve(s->drv, a->window, bytes, NULL);
    }
    if (s->zeros_at == NULL) return;
    mt_cudrv_unmap(s->drv, s->zeros_at, s->page_bytes, NULL);
    mt_cudrv_unreserve(s->drv, s->zeros_at, s->page_bytes, NULL);
    mt_cudrv_release(s->drv, s->zeros, NULL);
}

static void
close_store(void *ctx)
{
    store *s = ctx;
    mt_alloc mem;
    bool forked;

    if (s == NULL) return;
    forked = !mt_birth_is_here(&s->birth);
    if (s->arenas != NULL && !forked && mt_custreams_wait(&s->streams, NULL) == MT_OK)
        cuda_store_give_back(s);
    mt_custreams_fini(&s->streams, forked);
    mt_cudrv_close(s->drv);
    mem = s->mem;
    mem.put(mem.ctx, s->pages, s->room * sizeof *s->pages);
    mem.put(mem.ctx, s->arenas, s->arena_room * sizeof *s->arenas);
    mem.put(mem.ctx, s, sizeof *s);
}

mt_status
mt_store_cuda_new(const mt_alloc *mem, mt_cudart *rt, int device, size_t page_bytes,
                  const mt_birth *birth, mt_store_ops *out, mt_error *err)
{
    store *s = mt_alloc_zeroed(mem, 1, sizeof *s);
    size_t unit = 0;
    mt_status st;

    if (s == NULL) return mt_fail(err, MT_ENOMEM, "mt_store_cuda_new", 0);
    s->mem = *mem;
    s->birth = *birth;
    st = mt_custreams_init(&s->streams, mem, mt_cudart_dev_ops(rt), device, err);
    if (st == MT_OK) st = mt_cudrv_open(mem, rt, device, &s->drv, err);
    if (st == MT_OK) st = mt_cudrv_granularity(s->drv, &unit, err);
    s->page_bytes = page_bytes > 0 ? page_bytes : unit;
    if (st == MT_OK && (s->page_bytes % unit != 0 || (s->page_bytes & (s->page_bytes - 1)) != 0))
        st = mt_fail_shape(err, MT_SHAPE_PAGE_BYTES, page_bytes, unit);
    if (st != MT_OK) {
        close_store(s);
        return st;
    }
    *out = (mt_store_ops){
        .page_bytes = s->page_bytes,
        .max_maps = SIZE_MAX,
        .extend = extend,
        .take = cuda_store_take,
        .drop = drop,
        .map = cuda_store_map,
        .map_zero = map_zero,
        .unmap = unmap,
        .settle = settle,
        .window = window,
        .copy = copy,
        .zero = cuda_store_zero,
        .use_stream = use_stream,
        .physical = physical,
        .close = close_store,
        .ctx = s,
    };
    return MT_OK;
}
