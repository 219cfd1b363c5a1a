/* gauge.h -- a number of bytes that several objects change and others read, without a lock.
 *
 * The module keeps one of them for pages that this process maps more than once:
 *
 *   pool A ── add, subtract ──┐
 *   pool B ── add, subtract ──┴──> mapped_again ──> read by the sampler and the probe
 *
 * A page that a fork of a KV lease shares is mapped once for each row, and the kernel's resident
 * set counts it each time. What the pools map beyond the first time is in this gauge, so that the
 * bytes that really fill memory are rss - mapped_again. The kernel's own rss stays what it is. */
#ifndef MT_GAUGE_H
#define MT_GAUGE_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct mt_gauge {
    _Atomic(uint64_t) bytes;
} mt_gauge;

static inline void
mt_gauge_add(mt_gauge *g, uint64_t bytes)
{
    atomic_fetch_add_explicit(&g->bytes, bytes, memory_order_relaxed);
}

/* pre: the caller added at least as much before. */
static inline void
mt_gauge_subtract(mt_gauge *g, uint64_t bytes)
{
    atomic_fetch_sub_explicit(&g->bytes, bytes, memory_order_relaxed);
}

static inline uint64_t
mt_gauge_read(mt_gauge *g)
{
    return atomic_load_explicit(&g->bytes, memory_order_relaxed);
}

#endif
