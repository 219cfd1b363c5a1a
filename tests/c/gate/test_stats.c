/* Totals and windows against a list of what every entry added. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kit/check.h"
#include "core/gate/stats.h"
#include "kit/faulty.h"
#include "kit/rng.h"

enum { EXPERTS = 3, ENTRIES = 2000, MOST_ROWS = 4 };

/* sum[n] is the truth after n entries, top_k 1. */
typedef struct truth {
    double importance[EXPERTS];
    uint64_t load[EXPERTS], tokens, nonfinite;
} truth;

typedef struct rig {
    faulty fault;
    mt_alloc mem;
    mt_gatestats stats;
    truth sum[ENTRIES + 1];
    size_t entries;
    rng r;
} rig;

static rig rigged;

static rig *
begin(uint64_t seed)
{
    rig *g = &rigged;

    *g = (rig){.fault = {.fail_at = -1}, .r = rng_seeded(seed)};
    g->mem = faulty_alloc(&g->fault);
    mt_gatestats_init(&g->stats, &g->mem, 1);
    CHECK(mt_gatestats_reserve(&g->stats, EXPERTS, NULL) == MT_OK);
    return g;
}

static void
end(rig *g)
{
    mt_gatestats_fini(&g->stats);
    CHECK(g->fault.live == 0);
    mt_gatestats_fini(&g->stats); /* again is harmless */
}

/* A row of distinct gates, now and then with an infinity; counted in t. */
static void
one_row(rng *r, float *row, truth *t)
{
    size_t best = rng_below(r, EXPERTS);
    bool finite = rng_below(r, 50) != 0;

    for (size_t e = 0; e < EXPERTS; e++)
        row[e] = (float)e * 0.125f + (e == best ? 1.0f : 0.0f);
    t->tokens++;
    if (!finite) {
        row[best] = INFINITY;
        t->nonfinite++;
        return;
    }
    t->load[best]++;
    for (size_t e = 0; e < EXPERTS; e++)
        t->importance[e] += (double)row[e];
}

/* An entry of 0 to MOST_ROWS rows, added in two parts, the second as doubles. */
static void
add_entry(rig *g)
{
    float x[MOST_ROWS * EXPERTS];
    double wide[MOST_ROWS * EXPERTS];
    size_t rows = rng_below(&g->r, MOST_ROWS + 1), cut = rng_below(&g->r, rows + 1);
    truth *t = &g->sum[g->entries + 1];

    *t = g->sum[g->entries];
    for (size_t i = 0; i < rows; i++)
        one_row(&g->r, x + i * EXPERTS, t);
    for (size_t i = 0; i < rows * EXPERTS; i++)
        wide[i] = (double)x[i];
    mt_gatestats_add(&g->stats, x, MT_GATE_F32, cut);
    mt_gatestats_add(&g->stats, wide + cut * EXPERTS, MT_GATE_F64, rows - cut);
    mt_gatestats_end_entry(&g->stats);
    g->entries++;
}

/* got is what lay between two moments. All gates are multiples of 1/8, so that sums are exact. */
static void
lies_between(const mt_gatesums *got, const truth *from, const truth *to)
{
    CHECK(got->tokens == to->tokens - from->tokens);
    CHECK(got->nonfinite == to->nonfinite - from->nonfinite);
    for (size_t e = 0; e < EXPERTS; e++) {
        CHECK(got->load[e] == to->load[e] - from->load[e]);
        CHECK(got->importance[e] == to->importance[e] - from->importance[e]);
    }
}

/* The span is 1 and doubles whenever the 129th mark would be set. */
static uint64_t
span_after(size_t entries)
{
    uint64_t span = 1;

    while (entries >= (MT_MARKS + 1) * span)
        span *= 2;
    return span;
}

static void
windows_are_right(rig *g)
{
    const mt_gatestats *s = &g->stats;
    uint64_t span = span_after(g->entries), seen = 0, entries;
    size_t windows = (g->entries + span - 1) / span;
    double importance[EXPERTS];
    uint64_t load[EXPERTS];
    mt_gatesums got = {.importance = importance, .load = load};

    CHECK(mt_gatestats_windows(s) == windows && windows <= MT_MARKS + 1);
    CHECK(g->entries < MT_MARKS || windows >= MT_MARKS / 2);
    for (size_t i = 0; i < windows; i++) {
        mt_gatestats_window(s, i, &got, &entries);
        CHECK(entries == (i + 1 < windows ? span : g->entries - seen));
        lies_between(&got, &g->sum[seen], &g->sum[seen + entries]);
        seen += entries;
    }
    CHECK(seen == g->entries);
}

static void
totals_are_right(rig *g)
{
    static const truth nothing;

    CHECK(g->stats.entries == g->entries);
    lies_between(&g->stats.total, &nothing, &g->sum[g->entries]);
}

static void
windows_add_up_to_the_total_after_any_number_of_entries(void)
{
    rig *g = begin(1);

    windows_are_right(g);
    while (g->entries < ENTRIES) {
        add_entry(g);
        totals_are_right(g);
        windows_are_right(g);
    }
    end(g);
}

static void
a_reset_forgets_everything_and_allocates_nothing(void)
{
    rig *g = begin(3);
    static const size_t counts[] = {0, 1, 128, 700, 129, 40};

    for (size_t i = 0; i < 6; i++) {
        while (g->entries < counts[i])
            add_entry(g);
        windows_are_right(g);
        mt_gatestats_reset(&g->stats);
        g->entries = 0;
        totals_are_right(g);
        windows_are_right(g);
        CHECK(g->fault.calls == 2);
    }
    end(g);
}

static void
a_failed_reserve_leaves_nothing_and_can_be_tried_again(void)
{
    for (long fail_at = 0;; fail_at++) {
        faulty f = {.fail_at = fail_at};
        mt_alloc mem = faulty_alloc(&f);
        mt_gatestats s;
        mt_error err = {0};
        mt_status st;
        mt_gatestats_init(&s, &mem, 1);
        st = mt_gatestats_reserve(&s, EXPERTS, &err);
        if (st == MT_OK) CHECK(fail_at == 2);
        if (st != MT_OK) {
            CHECK(st == MT_ENOMEM && err.status == st && f.live == 0 && s.experts == 0);
            CHECK(mt_gatestats_windows(&s) == 0 && s.entries == 0);
            f.fail_at = -1;
            CHECK(mt_gatestats_reserve(&s, EXPERTS, &err) == MT_OK && s.experts == EXPERTS);
        }
        mt_gatestats_fini(&s);
        CHECK(f.live == 0);
        if (st == MT_OK) return;
    }
}

static void
a_number_of_experts_that_cannot_be_is_refused(void)
{
    faulty f = {.fail_at = -1};
    mt_alloc mem = faulty_alloc(&f);
    mt_gatestats s;

    mt_gatestats_init(&s, &mem, 1);
    CHECK(mt_gatestats_reserve(&s, SIZE_MAX / 2, NULL) == MT_EOVERFLOW);
    CHECK(mt_gatestats_reserve(&s, SIZE_MAX / (MT_MARKS + 1), NULL) != MT_OK); /* times 8 */
    CHECK(f.calls == 0 && s.experts == 0);
    mt_gatestats_reset(&s);
    mt_gatestats_fini(&s);
}

int
main(void)
{
    RUN(windows_add_up_to_the_total_after_any_number_of_entries);
    RUN(a_reset_forgets_everything_and_allocates_nothing);
    RUN(a_failed_reserve_leaves_nothing_and_can_be_tried_again);
    RUN(a_number_of_experts_that_cannot_be_is_refused);
    CHECK_DONE();
}
