/* gauge.h -- a number of bytes that several objects change and others read, without a lock.
 *
 * There is one for the pages of host stores that this process maps more than once:
 *
 *   pool A ── add, subtract ──┐
 *   pool B ── add, subtract ──┴──> mapped_again ──> read by the sampler and the probe
 *
 * A page that a fork of a KV lease shares is mapped once for each row, and the kernel's resident
 * set counts it each time. What the pools map beyond the first time is in this gauge, so that the
 * bytes that really fill memory are rss - mapped_again. The kernel's own rss stays what it is.
 *
 * In a child made by fork() those mappings are closed, and what closes them sets the gauge to 0
 * (os/port/store.c). NULL is a gauge that stays at 0.
 *
 * The resident set has a page only after it was touched there, which the pools do not see. So the
 * gauge also knows how large the pools' pages are, each counted once: what is taken off a resident
 * set leaves at least that much of its shared memory.
 *
 * The gauge remembers its highest value as well, because the kernel's mark of the most that was
 * ever resident does: neither says when that was. */
#ifndef MT_BASE_GAUGE_H
#define MT_BASE_GAUGE_H

#include <assert.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mt_gauge {
    _Atomic(uint64_t) bytes;
    _Atomic(uint64_t) most; /* the highest value of `bytes` since the last reset */
    _Atomic(uint64_t) once; /* the pools' pages themselves, each counted once */
} mt_gauge;

static inline void
mt_gauge_add(mt_gauge *g, uint64_t bytes)
{
    uint64_t now, most;

    if (g == NULL) return;
    now = atomic_fetch_add_explicit(&g->bytes, bytes, memory_order_relaxed) + bytes;
    most = atomic_load_explicit(&g->most, memory_order_relaxed);
    while (most < now && !atomic_compare_exchange_weak_explicit(
                             &g->most, &most, now, memory_order_relaxed, memory_order_relaxed))
        continue;
}

/* pre: the caller added at least as much before. */
static inline void
mt_gauge_subtract(mt_gauge *g, uint64_t bytes)
{
    uint64_t before = bytes;

    if (g != NULL) before = atomic_fetch_sub_explicit(&g->bytes, bytes, memory_order_relaxed);
    assert(before >= bytes);
    (void)before;
}

static inline uint64_t
mt_gauge_read(mt_gauge *g)
{
    return g == NULL ? 0 : atomic_load_explicit(&g->bytes, memory_order_relaxed);
}

/* The pools have so many bytes of pages more, or fewer (then as a number modulo 2^64). */
static inline void
mt_gauge_add_once(mt_gauge *g, uint64_t bytes)
{
    if (g != NULL) atomic_fetch_add_explicit(&g->once, bytes, memory_order_relaxed);
}

/* How much of a resident set is counted more than once, if `shared` bytes of it are shared memory
 * or of files; UINT64_MAX where that is not known. */
static inline uint64_t
mt_gauge_within(mt_gauge *g, uint64_t shared)
{
    uint64_t bytes = mt_gauge_read(g), once, room;

    if (bytes == 0 || shared == UINT64_MAX) return bytes;
    once = atomic_load_explicit(&g->once, memory_order_relaxed);
    room = shared > once ? shared - once : 0;
    return bytes < room ? bytes : room;
}

/* The highest value since the last reset. */
static inline uint64_t
mt_gauge_most(mt_gauge *g)
{
    return g == NULL ? 0 : atomic_load_explicit(&g->most, memory_order_relaxed);
}

/* Sets the highest value back to the present one. One caller at a time. */
static inline void
mt_gauge_reset_most(mt_gauge *g)
{
    if (g != NULL) atomic_store_explicit(&g->most, mt_gauge_read(g), memory_order_relaxed);
}

#endif
