/* store_suite.h -- what every mt_store_ops must do, lazy or not: store_suite(&bench) runs it all.
 *
 *   a memfd, its system calls failing          lazy, private writes
 *   memstore.h, the strict store of tests      neither
 *   the CUDA store over the fake driver        neither */
#ifndef MT_TESTS_KIT_STORE_SUITE_H
#define MT_TESTS_KIT_STORE_SUITE_H

#include "kit/store_sim.h"

static const store_bench *bench;

/* A store of one arena, all of it taken and mapped one to one. */
static sim
sim_mapped_store(size_t pages)
{
    sim m = sim_new(bench);

    CHECK(sim_extend(&m, pages) == MT_OK);
    CHECK(sim_take(&m, 0, pages) == MT_OK);
    CHECK(sim_map(&m, 0, 0, pages, MT_MAP_SHARED) == MT_OK);
    return m;
}

static void
whole_page_reads_zeros(const sim *m, const unsigned char *page)
{
    unsigned char part[64], zeros[64] = {0};

    for (size_t at = 0; at < m->ops.page_bytes; at += sizeof part) {
        m->on->peek(m->on->ctx, part, page + at, sizeof part);
        CHECK(memcmp(part, zeros, sizeof part) == 0);
    }
}

/* ---- pages ---- */

static void
a_dropped_page_is_gone_and_comes_back_as_zeros(void)
{
    sim m = sim_mapped_store(6);
    size_t full;

    for (size_t i = 0; i < 6; i++)
        sim_poke(&m, i, 0xFFFFFFFFFFFFFFFFu - i);
    sim_check(&m);
    full = m.ops.physical(m.ops.ctx);
    sim_drop(&m, 1, 3);
    CHECK(m.ops.physical(m.ops.ctx) == full - 3 * m.ops.page_bytes);
    sim_check_physical(&m);
    CHECK(sim_take(&m, 1, 3) == MT_OK);
    CHECK(sim_map(&m, 1, 1, 3, MT_MAP_SHARED) == MT_OK);
    for (size_t i = 1; i < 4; i++)
        whole_page_reads_zeros(&m, sim_at(&m, i));
    sim_check(&m); /* 0, 4 and 5 are as they were */
    sim_drop(&m, 0, 6);
    CHECK(m.ops.physical(m.ops.ctx) == 0);
    sim_drop(&m, 2, 2); /* not physical: nothing happens */
    CHECK(m.ops.physical(m.ops.ctx) == 0);
    sim_close(&m);
}

/* ---- addresses ---- */

static void
a_window_spans_pages_of_an_arena(void)
{
    sim m = sim_new(bench);
    size_t unit = m.ops.page_bytes;
    void *at = NULL;

    CHECK(sim_extend(&m, 3) == MT_OK);
    CHECK(sim_extend(&m, 5) == MT_OK);
    CHECK(sim_take(&m, 0, 3) == MT_OK);
    CHECK(sim_take(&m, 3, 5) == MT_OK);
    CHECK(m.ops.window(m.ops.ctx, 4 * unit, 3 * unit, &at, NULL) == MT_OK);
    for (size_t i = 0; i < 3; i++) {
        sim_write(&m, (unsigned char *)at + i * unit, 40 + i);
        m.value[4 + i] = 40 + i;
    }
    sim_check(&m);
    sim_close(&m);
}

static void
settling_forgets_many_scattered_copies(void)
{
    sim m = sim_mapped_store(SIM_PAGES);

    for (size_t i = 0; i < SIM_PAGES; i++)
        sim_poke(&m, i, 300 + i);
    CHECK(sim_map(&m, 0, 0, SIM_PAGES, MT_MAP_PRIVATE) == MT_OK);
    for (size_t round = 0; round < 3; round++) {
        for (size_t i = round; i < SIM_PAGES; i += 2 + round)
            sim_poke(&m, i, 400 + i);
        sim_check(&m);
        CHECK(sim_settle(&m, 0, SIM_PAGES) == MT_OK);
        sim_check(&m);
    }
    sim_close(&m);
}

/* ---- at random ---- */

/* A stretch of at least one page within one arena. */
static size_t
any_stretch(const sim *m, rng *r, size_t *n)
{
    size_t from = rng_below(r, m->pages), most = mt_size_min(sim_span(m, from), 6);

    *n = 1 + rng_below(r, most);
    return from;
}

static bool
all_taken(const sim *m, size_t page, size_t n)
{
    while (n > 0 && m->taken[page + n - 1])
        n--;
    return n == 0;
}

static mt_status
map_any(sim *m, rng *r)
{
    size_t n, page = any_stretch(m, r, &n), at = rng_below(r, m->pages);
    mt_map_kind kind = rng_below(r, 2) ? MT_MAP_SHARED : MT_MAP_PRIVATE;

    n = mt_size_min(n, sim_span(m, at));
    return all_taken(m, page, n) ? sim_map(m, at, page, n, kind) : MT_OK;
}

static mt_status
write_any(sim *m, rng *r, uint64_t value)
{
    size_t at = rng_below(r, m->pages), from = rng_below(r, m->pages);

    if (rng_below(r, 3) == 0) {
        bench->fail_at(bench->ctx, -1); /* the model knows no window that fails */
        if (m->taken[from]) sim_poke_window(m, from, value);
        return MT_OK;
    }
    if (!sim_writable(m, at)) return MT_OK;
    if (rng_below(r, 2) && sim_mapped(m, from)) {
        bool same =
            m->cell[from].kind == m->cell[at].kind && m->cell[from].page == m->cell[at].page;

        if (!same || at == from) return sim_copy(m, at, from);
    }
    sim_poke(m, at, value);
    return MT_OK;
}

static mt_status
one_call(sim *m, rng *r, uint64_t value)
{
    size_t n, at = any_stretch(m, r, &n);

    switch (rng_below(r, 12)) {
    case 0:
        n = 1 + rng_below(r, 7);
        return m->arenas < SIM_ARENAS && m->pages + n <= SIM_PAGES ? sim_extend(m, n) : MT_OK;
    case 1:
        return sim_map_zero(m, at, n);
    case 2:
        return sim_settle(m, at, n);
    case 3:
    case 4:
        return sim_take(m, at, n);
    case 5:
    case 6:
    case 7:
        return map_any(m, r);
    case 8:
        if (!m->ops.lazy) sim_unmap(m, at, n);
        return MT_OK;
    default:
        return write_any(m, r, value);
    }
}

/* Every third call some call of the system fails. What failed changed nothing, but for map, after
 * which the model knows nothing of the stretch, and settle, which is tried again. */
static void
random_calls_do_as_the_model(void)
{
    for (uint64_t seed = 0; seed < 60; seed++) {
        rng r = rng_seeded(seed);
        sim m = sim_new(bench);

        CHECK(sim_extend(&m, 1 + rng_below(&r, 20)) == MT_OK);
        for (uint64_t step = 1; step < 150; step++) {
            long fired = bench->fired(bench->ctx);
            mt_status st;

            bench->fail_at(bench->ctx, rng_below(&r, 3) == 0 ? (long)rng_below(&r, 3) : -1);
            st = one_call(&m, &r, step);
            bench->fail_at(bench->ctx, -1);
            if (st != MT_OK) {
                CHECK(bench->fired(bench->ctx) > fired);
                CHECK(sim_settle(&m, 0, sim_span(&m, 0)) == MT_OK);
                for (size_t a = 1; a < m.arenas; a++)
                    CHECK(sim_settle(&m, m.first[a], sim_span(&m, m.first[a])) == MT_OK);
                sim_repair(&m);
            }
            if (rng_below(&r, 8) == 0) {
                size_t n, page = any_stretch(&m, &r, &n);

                sim_drop(&m, page, n);
            }
            if (rng_below(&r, 6) == 0) sim_check(&m);
            sim_check_physical(&m);
        }
        sim_check(&m);
        sim_close(&m);
    }
}

/* The life of a small pool; the first call that fails is handed back. */
static mt_status
script(sim *m)
{
    mt_status st;

    if (m->pages == 0 && (st = sim_extend(m, 8)) != MT_OK) return st;
    if ((st = sim_take(m, 0, 6)) != MT_OK) return st;
    if ((st = sim_map(m, 0, 0, 4, MT_MAP_SHARED)) != MT_OK) return st;
    sim_poke(m, 1, 71);
    if ((st = sim_map(m, 4, 0, 2, MT_MAP_PRIVATE)) != MT_OK) return st;
    sim_poke(m, 5, 72);
    if ((st = sim_map_zero(m, 6, 2)) != MT_OK) return st;
    if ((st = sim_settle(m, 0, 8)) != MT_OK) return st;
    if ((st = sim_copy(m, 0, 1)) != MT_OK) return st;
    if ((st = sim_copy(m, 2, 2)) != MT_OK) return st;
    return m->ops.use_stream(m->ops.ctx, NULL, NULL);
}

/* Fails each call of the system in turn, the making of the store included. What remains then does
 * the whole of it. */
static void
any_failing_call_leaves_a_store_that_works(void)
{
    long n = 0, live = bench->live(bench->ctx), fired;

    do {
        sim m = {.on = bench};
        mt_status st;

        fired = bench->fired(bench->ctx);
        bench->fail_at(bench->ctx, n++);
        st = bench->make(bench->ctx, &m.ops);
        if (st == MT_OK) {
            st = script(&m);
            bench->fail_at(bench->ctx, -1);
            fired = bench->fired(bench->ctx) - fired;
            CHECK(st == MT_OK || fired > 0);
            CHECK(script(&m) == MT_OK);
            sim_check(&m);
            sim_close(&m);
        } else {
            bench->fail_at(bench->ctx, -1);
            fired = bench->fired(bench->ctx) - fired;
            CHECK(fired > 0);
        }
        CHECK(bench->live(bench->ctx) == live);
    } while (fired > 0);
    CHECK(n > 5);
}

static void
store_suite(const store_bench *on)
{
    bench = on;
    RUN(a_dropped_page_is_gone_and_comes_back_as_zeros);
    RUN(a_window_spans_pages_of_an_arena);
    RUN(settling_forgets_many_scattered_copies);
    RUN(random_calls_do_as_the_model);
    RUN(any_failing_call_leaves_a_store_that_works);
}

#endif
