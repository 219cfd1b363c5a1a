/* store_sim.h -- a store beside a dumb model of it: what every page and every address must show.
 *
 *   model   page[]   the value of each page of the store, and whether it is physical
 *           cell[]   what each page of addresses shows: nothing, a page, a page with a copy of its
 *                    own on top, zeros
 *
 * Pages and addresses are numbered alike, arena after arena. A page's content is one number,
 * written at its two ends and in its middle. Memory is reached through peek and poke alone: on a
 * device it is no memory of ours. */
#ifndef MT_TESTS_KIT_STORE_SIM_H
#define MT_TESTS_KIT_STORE_SIM_H

#include <string.h>

#include "kit/check.h"
#include "core/base/size.h"
#include "core/port/store.h"
#include "kit/rng.h"

/* What the suite runs on. */
typedef struct store_bench {
    mt_status (*make)(void *ctx, mt_store_ops *out); /* a new store of no bytes */
    /* Reads and writes mapped memory, after everything that is enqueued. */
    void (*peek)(void *ctx, void *to, const void *at, size_t bytes);
    void (*poke)(void *ctx, void *at, const void *from, size_t bytes);
    void (*fail_at)(void *ctx, long n); /* the n-th call from now (0: the next) of the system or
                                         * driver fails; -1: none */
    long (*fired)(void *ctx);           /* calls failed so far */
    long (*live)(void *ctx);            /* what was not given back: blocks, descriptors, handles */
    bool exact; /* physical() is page_bytes x the pages that are physical. Where lazy, a page is
                 * once it was read or written, but for map_zero. */
    void *ctx;
} store_bench;

enum { SIM_PAGES = 64, SIM_ARENAS = 12 };

typedef enum cell_kind { CELL_NONE, CELL_SHARED, CELL_PRIVATE, CELL_ZERO } cell_kind;

typedef struct cell {
    cell_kind kind;
    size_t page;
    bool copied; /* of a private one: written to, shows `value` */
    uint64_t value;
} cell;

typedef struct sim {
    const store_bench *on;
    mt_store_ops ops;
    size_t arenas, pages;
    unsigned char *base[SIM_ARENAS];
    size_t first[SIM_ARENAS + 1]; /* page of each arena */
    cell cell[SIM_PAGES];
    uint64_t value[SIM_PAGES];
    bool taken[SIM_PAGES];    /* always true where lazy */
    bool physical[SIM_PAGES]; /* where not lazy: as taken */
} sim;

static inline sim
sim_new(const store_bench *on)
{
    sim m = {.on = on};

    CHECK(on->make(on->ctx, &m.ops) == MT_OK);
    CHECK(m.ops.page_bytes >= 64 && (m.ops.page_bytes & (m.ops.page_bytes - 1)) == 0);
    CHECK(m.ops.max_maps > 0 && m.ops.physical(m.ops.ctx) == 0);
    return m;
}

static inline size_t
sim_arena(const sim *m, size_t i)
{
    size_t a = 0;

    CHECK(i < m->pages);
    while (m->first[a + 1] <= i)
        a++;
    return a;
}

static inline unsigned char *
sim_at(const sim *m, size_t i)
{
    size_t a = sim_arena(m, i);

    return m->base[a] + (i - m->first[a]) * m->ops.page_bytes;
}

/* Pages from i to the end of its arena. */
static inline size_t
sim_span(const sim *m, size_t i)
{
    return m->first[sim_arena(m, i) + 1] - i;
}

/* ---- one page's bytes ---- */

static inline void
sim_write(const sim *m, unsigned char *page, uint64_t value)
{
    size_t last = m->ops.page_bytes - sizeof value;
    size_t places[] = {0, last / 2 / sizeof value * sizeof value, last};

    for (size_t i = 0; i < 3; i++)
        m->on->poke(m->on->ctx, page + places[i], &value, sizeof value);
}

static inline bool
sim_reads(const sim *m, const unsigned char *page, uint64_t value)
{
    size_t last = m->ops.page_bytes - sizeof value;
    size_t places[] = {0, last / 2 / sizeof value * sizeof value, last};
    uint64_t got;

    for (size_t i = 0; i < 3; i++) {
        m->on->peek(m->on->ctx, &got, page + places[i], sizeof got);
        if (got != value) return false;
    }
    return true;
}

static inline unsigned char *
sim_window(const sim *m, size_t page)
{
    void *at = NULL;

    CHECK(m->ops.window(m->ops.ctx, page * m->ops.page_bytes, m->ops.page_bytes, &at, NULL) ==
          MT_OK);
    return at;
}

/* ---- the operations: on the store, and when it succeeds on the model ---- */

static inline mt_status
sim_extend(sim *m, size_t pages)
{
    void *base = NULL;
    mt_status st = m->ops.extend(m->ops.ctx, pages * m->ops.page_bytes, &base, NULL);

    CHECK(m->arenas < SIM_ARENAS && m->pages + pages <= SIM_PAGES);
    if (st != MT_OK) return st;
    CHECK(base != NULL && (uintptr_t)base % m->ops.page_bytes == 0);
    for (size_t i = m->pages; i < m->pages + pages; i++) {
        m->cell[i] = (cell){.kind = m->ops.lazy ? CELL_SHARED : CELL_NONE, .page = i};
        m->taken[i] = m->ops.lazy;
    }
    m->base[m->arenas++] = base;
    m->pages += pages;
    m->first[m->arenas] = m->pages;
    return MT_OK;
}

static inline mt_status
sim_take(sim *m, size_t page, size_t n)
{
    mt_status st = m->ops.take(m->ops.ctx, page * m->ops.page_bytes, n * m->ops.page_bytes, NULL);

    for (size_t i = page; st == MT_OK && i < page + n; i++) {
        m->taken[i] = true;
        if (!m->ops.lazy) m->physical[i] = true;
    }
    return st;
}

static inline mt_status
sim_map(sim *m, size_t at, size_t page, size_t n, mt_map_kind kind)
{
    size_t unit = m->ops.page_bytes;
    mt_status st = m->ops.map(m->ops.ctx, sim_at(m, at), n * unit, page * unit, kind, NULL);
    bool own = kind == MT_MAP_PRIVATE && m->ops.private_writes;

    for (size_t i = 0; i < n; i++)
        m->cell[at + i] = (cell){.kind = st != MT_OK ? CELL_NONE
                                         : own       ? CELL_PRIVATE
                                                     : CELL_SHARED,
                                 .page = page + i};
    return st;
}

static inline mt_status
sim_map_zero(sim *m, size_t at, size_t n)
{
    mt_status st = m->ops.map_zero(m->ops.ctx, sim_at(m, at), n * m->ops.page_bytes, NULL);

    for (size_t i = at; i < at + n; i++)
        m->cell[i] = (cell){.kind = st == MT_OK ? CELL_ZERO : CELL_NONE};
    return st;
}

static inline void
sim_unmap(sim *m, size_t at, size_t n)
{
    m->ops.unmap(m->ops.ctx, sim_at(m, at), n * m->ops.page_bytes);
    for (size_t i = at; i < at + n; i++)
        m->cell[i] = (cell){.kind = CELL_NONE};
}

/* After a failure a part may be forgotten: nothing can be said before it succeeds. */
static inline mt_status
sim_settle(sim *m, size_t at, size_t n)
{
    mt_status st = m->ops.settle(m->ops.ctx, sim_at(m, at), n * m->ops.page_bytes, NULL);

    for (size_t i = at; i < at + n && st == MT_OK; i++)
        m->cell[i].copied = false;
    return st;
}

/* Takes the pages out of use first, as drop asks: copies of them are forgotten, and where the store
 * is not lazy nothing maps them. */
static inline void
sim_drop(sim *m, size_t page, size_t n)
{
    for (size_t i = 0; i < m->pages; i++) {
        cell *c = &m->cell[i];

        if (c->kind != CELL_SHARED && c->kind != CELL_PRIVATE) continue;
        if (c->page < page || c->page >= page + n) continue;
        if (!m->ops.lazy)
            sim_unmap(m, i, 1);
        else if (c->copied)
            CHECK(sim_settle(m, i, 1) == MT_OK);
    }
    m->ops.drop(m->ops.ctx, page * m->ops.page_bytes, n * m->ops.page_bytes);
    for (size_t i = page; i < page + n; i++) {
        m->value[i] = 0;
        m->physical[i] = false;
        m->taken[i] = m->ops.lazy;
    }
}

/* ---- through addresses ---- */

static inline bool
sim_mapped(const sim *m, size_t at)
{
    return m->cell[at].kind != CELL_NONE;
}

/* May be written to: zeros are for reading. */
static inline bool
sim_writable(const sim *m, size_t at)
{
    return sim_mapped(m, at) && m->cell[at].kind != CELL_ZERO;
}

static inline void
sim_touch(sim *m, size_t at)
{
    const cell *c = &m->cell[at];

    if (c->kind != CELL_ZERO && !c->copied) m->physical[c->page] = true;
}

static inline uint64_t
sim_shown(const sim *m, size_t at)
{
    const cell *c = &m->cell[at];

    if (c->kind == CELL_ZERO) return 0;
    return c->copied ? c->value : m->value[c->page];
}

static inline void
sim_wrote(sim *m, size_t at, uint64_t value)
{
    cell *c = &m->cell[at];

    sim_touch(m, at);
    if (c->kind == CELL_PRIVATE) {
        c->copied = true;
        c->value = value;
    } else {
        m->value[c->page] = value;
    }
}

static inline void
sim_poke(sim *m, size_t at, uint64_t value)
{
    sim_write(m, sim_at(m, at), value);
    sim_wrote(m, at, value);
}

static inline void
sim_poke_window(sim *m, size_t page, uint64_t value)
{
    sim_write(m, sim_window(m, page), value);
    m->value[page] = value;
    m->physical[page] = true;
}

/* Page to page, by the store's own copy, or zero where from == to. */
static inline mt_status
sim_copy(sim *m, size_t to, size_t from)
{
    size_t unit = m->ops.page_bytes;
    uint64_t value = to == from ? 0 : sim_shown(m, from);
    mt_status st;

    if (to == from)
        st = m->ops.zero(m->ops.ctx, sim_at(m, to), unit, NULL);
    else
        st = m->ops.copy(m->ops.ctx, sim_at(m, to), sim_at(m, from), unit, NULL);
    if (st != MT_OK) return st;
    if (to != from) sim_touch(m, from);
    sim_wrote(m, to, value);
    return MT_OK;
}

/* ---- comparing ---- */

static inline void
sim_check_physical(const sim *m)
{
    size_t pages = 0;

    for (size_t i = 0; i < m->pages; i++)
        pages += m->physical[i];
    if (m->on->exact) CHECK(m->ops.physical(m->ops.ctx) == pages * m->ops.page_bytes);
}

/* Every address that is mapped, then every page through its window. Makes lazy pages physical. */
static inline void
sim_check(sim *m)
{
    for (size_t i = 0; i < m->pages; i++) {
        if (!sim_mapped(m, i)) continue;
        CHECK(sim_reads(m, sim_at(m, i), sim_shown(m, i)));
        sim_touch(m, i);
    }
    for (size_t i = 0; i < m->pages; i++) {
        if (!m->taken[i]) continue;
        CHECK(sim_reads(m, sim_window(m, i), m->value[i]));
        m->physical[i] = true;
    }
    sim_check_physical(m);
}

/* Maps addresses that a failure, or nothing yet, left without content. */
static inline void
sim_repair(sim *m)
{
    for (size_t i = 0; i < m->pages; i++)
        if (!sim_mapped(m, i)) CHECK(sim_map_zero(m, i, 1) == MT_OK);
}

static inline void
sim_close(sim *m)
{
    m->ops.close(m->ops.ctx);
}

#endif
