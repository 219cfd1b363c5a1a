/* The gate history against an array of entries (model.h), with late values, slices and failed
 * allocations. */
#include "budget/rig.h"
#include "core/gate/history.h"
#include "gate/steps.h"

static const mt_gatehist_config plain = {.max_entries = 100,
                                         .max_bytes = 4 << 20,
                                         .trim = MT_TRIM_HALF,
                                         .keep = MT_KEEP_ALL,
                                         .dtype = MT_DTYPE_SAME,
                                         .top_k = 1,
                                         .statistics = true};
static rig rigged;

static rig *
begin_with(mt_gatehist_config config, uint64_t seed)
{
    rig_begin(&rigged, &config, seed);
    return &rigged;
}

static rig *
begin(uint64_t seed)
{
    return begin_with(plain, seed);
}

/* float32 rows of 4 experts: 16 bytes a row. */
static void
push_rows(rig *g, size_t rows)
{
    CHECK(rig_push(g, MT_F32, rows, 4, LAYOUT_PACKED) == MT_OK);
}

/* --- against the model ------------------------------------------------------------------------ */

static size_t
roll(void *ctx, size_t n)
{
    return rng_below(ctx, n);
}

/* In a budget with room for everything it is the same history. */
static void
any_run_matches_the_model(void)
{
    for (uint64_t seed = 0; seed < 400; seed++) {
        rng r = rng_seeded(seed);
        steps s = {.g = &rigged, .roll = roll, .ctx = &r};
        mt_gatehist_config config = rig_any_config(&r, &s.experts);
        mt_ledger *ledger = make_ledger(&mt_alloc_libc, SIZE_MAX, "x", NULL);

        config.ledger = seed % 4 == 0 ? ledger : NULL;
        rig_begin(&rigged, &config, seed);
        for (int step = 0; step < 60; step++)
            steps_one(&s);
        steps_end(&s);
        CHECK(mt_ledger_used(ledger) == 0);
        mt_ledger_drop(ledger);
    }
}

/* Every layout with a few rows; some with enough for two chunks of scratch, the last not full. */
static void
converts(mt_dtype from, int to, mt_keep keep, size_t experts)
{
    mt_gatehist_config config = plain;
    rig *g;

    config.dtype = to;
    config.keep = keep;
    config.top_k = 2;
    config.statistics = experts < 100; /* marks for a wide row take 2 KiB an expert */
    g = begin_with(config, (uint64_t)from * 100 + (uint64_t)(to + 1) * 10 + keep);
    for (int how = 0; how < LAYOUTS; how++)
        rig_push(g, from, 5, experts, (layout)how);
    rig_push(g, from, MT_CHUNK / experts + 3, experts, LAYOUT_PACKED);
    if (from % 3 == 0) rig_push(g, from, MT_CHUNK / experts + 3, experts, LAYOUT_TRANSPOSED);
    rig_end(g);
}

static void
every_dtype_is_recorded_as_every_other(void)
{
    for (int from = 0; from < MT_DTYPE_COUNT; from++)
        for (int to = MT_DTYPE_SAME; to <= MT_BF16; to++)
            for (int keep = 0; keep < 2; keep++)
                converts((mt_dtype)from, to, (mt_keep)keep, 37);
}

static void
rows_as_long_as_the_scratch_chunk_are_recorded(void)
{
    for (int keep = 0; keep < 2; keep++) {
        converts(MT_F32, MT_DTYPE_SAME, (mt_keep)keep, MT_CHUNK - 1);
        converts(MT_F64, MT_F16, (mt_keep)keep, MT_CHUNK);
        converts(MT_BF16, MT_F64, (mt_keep)keep, MT_CHUNK + 1);
    }
}

/* More than all of the scratch: it must be gathered piece by piece. */
static void
a_large_strided_tensor_is_recorded_without_statistics(void)
{
    for (int how = 0; how < LAYOUTS; how++) {
        mt_gatehist_config config = plain;
        rig *g;
        config.statistics = false;
        g = begin_with(config, (uint64_t)how);
        CHECK(rig_push(g, MT_F64, 5 * MT_CHUNK / 16, 16, (layout)how) == MT_OK);
        rig_end(g);
    }
}

/* Indices of 1, 2 and 4 bytes. */
static void
the_largest_are_kept_for_any_number_of_experts(void)
{
    static const size_t widths[] = {2, 255, 256, 257, 65535, 65536, 65537};
    static const size_t index[] = {1, 1, 1, 2, 2, 2, 4};

    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        mt_gatehist_config config = plain;
        rig *g;
        config.keep = MT_KEEP_TOPK;
        config.top_k = 2;
        config.statistics = false; /* marks for 65537 experts are 130 MiB */
        g = begin_with(config, i);
        rig_push(g, MT_F32, 2, widths[i], LAYOUT_PACKED);
        rig_push(g, MT_BF16, 1, widths[i], LAYOUT_GAPS);
        CHECK(mt_gatehist_bytes(g->h) == 2 * 2 * (index[i] + 4) + 2 * (index[i] + 2));
        rig_end(g);
    }
}

static void
nothing_is_allocated_after_the_first_entry(void)
{
    mt_gatehist_config config = plain;
    rig *g;

    config.max_entries = 20;
    config.max_bytes = 999;
    g = begin_with(config, 7);
    push_rows(g, 1);
    rig_fail(g, 0);
    for (int i = 0; i < 300; i++)
        push_rows(g, rng_below(&g->r, 9));
    CHECK(g->fault.calls == 0);
    rig_end(g);
}

/* --- refusals --------------------------------------------------------------------------------- */

/* Neither admit nor push may change anything. */
static void
refuses(rig *g, mt_rows rows, mt_status want, size_t asked, size_t limit)
{
    mt_error err = {.status = MT_OK};
    size_t experts = mt_gatehist_experts(g->h);

    CHECK(mt_gatehist_admit(g->h, &rows, &err) == want);
    CHECK(err.status == want && err.asked == asked && err.limit == limit);
    CHECK(want != MT_ELIMIT || err.used == mt_gatehist_bytes(g->h));
    CHECK(mt_gatehist_push(g->h, &rows, NULL) == want);
    CHECK(mt_gatehist_experts(g->h) == experts);
    model_agrees(&g->m, g->h);
}

static void
what_cannot_be_recorded_changes_nothing(void)
{
    mt_gatehist_config config = plain;
    rig *g;

    config.max_bytes = 100;
    config.top_k = 2;
    g = begin_with(config, 7);
    for (int used = 0; used < 2; used++) {
        size_t other = used ? 4 : 2; /* what a width is held against: experts, or top_k */
        refuses(g, mt_rows_packed(NULL, MT_F32, 3, 0), MT_ESHAPE, 0, other);
        refuses(g, mt_rows_packed(NULL, MT_F32, 1, 1), MT_ESHAPE, 1, other);
        refuses(g, mt_rows_packed(NULL, MT_F32, 7, 4), MT_ELIMIT, 7 * 16, 100);
        if (!used) push_rows(g, 2);
    }
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, 5), MT_ESHAPE, 5, 4);
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, 3), MT_ESHAPE, 3, 4);
    refuses(g, mt_rows_packed(NULL, MT_F32, (size_t)1 << 32, 4), MT_ESHAPE, (size_t)1 << 32,
            UINT32_MAX);
    push_rows(g, 6); /* and it still works */
    rig_end(g);
    g = begin(1); /* without a small limit */
    refuses(g, mt_rows_packed(NULL, MT_F64, UINT32_MAX, MT_EXPERTS_MAX), MT_ELIMIT,
            (size_t)8 * UINT32_MAX * MT_EXPERTS_MAX, 4 << 20);
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, MT_EXPERTS_MAX + 1), MT_ESHAPE, MT_EXPERTS_MAX + 1,
            MT_EXPERTS_MAX);
    rig_end(g);
}

static void
the_number_of_experts_is_fixed_by_the_first_entry_for_ever(void)
{
    rig *g = begin(1);

    CHECK(mt_gatehist_experts(g->h) == 0);
    push_rows(g, 0);
    CHECK(mt_gatehist_experts(g->h) == 4);
    mt_gatehist_clear(g->h);
    model_clear(&g->m);
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, 5), MT_ESHAPE, 5, 4);
    push_rows(g, 2);
    rig_end(g);
}

/* --- faults ----------------------------------------------------------------------------------- */

static void
a_failed_new_leaves_nothing(void)
{
    for (long n = 0;; n++) {
        mt_gatehist *h = NULL;
        mt_error err = {.status = MT_OK};
        rig g;
        rig_prepare(&g, 1);
        rig_fail(&g, n);
        if (mt_gatehist_new(&g.mem, &g.vm, &plain, &h, &err) == MT_OK) {
            CHECK(n == 2);
            mt_gatehist_free(h);
            CHECK(g.fault.live == 0);
            return;
        }
        CHECK(err.status == MT_ENOMEM && h == NULL && g.fault.live == 0);
    }
}

static void
limits_that_no_machine_has_are_refused(void)
{
    mt_gatehist_config config = plain;
    mt_gatehist *h = NULL;
    rig g;

    rig_prepare(&g, 1);
    config.max_entries = SIZE_MAX / 2;
    CHECK(mt_gatehist_new(&g.mem, &g.vm, &config, &h, NULL) == MT_EOVERFLOW);
    config.max_entries = 1;
    config.max_bytes = SIZE_MAX;
    CHECK(mt_gatehist_new(&g.mem, &g.vm, &config, &h, NULL) == MT_EOVERFLOW);
    CHECK(h == NULL && g.fault.live == 0);
    mt_gatehist_free(NULL);
}

static void
a_failed_push_records_nothing(void)
{
    for (long n = 0;; n++) {
        rig *g = begin(9);
        long live = g->fault.live;
        mt_status st;
        rig_fail(g, n);
        st = rig_push(g, MT_F32, 3, 4, LAYOUT_PACKED);
        if (st != MT_OK) {
            CHECK(mt_gatehist_experts(g->h) == 0 && g->fault.live == live);
            rig_fail(g, -1);
            push_rows(g, 2);
        }
        rig_end(g);
        if (st != MT_OK) continue;
        CHECK(n == 3); /* scratch and two blocks of statistics */
        return;
    }
}

int
main(void)
{
    RUN(any_run_matches_the_model);
    RUN(every_dtype_is_recorded_as_every_other);
    RUN(rows_as_long_as_the_scratch_chunk_are_recorded);
    RUN(a_large_strided_tensor_is_recorded_without_statistics);
    RUN(the_largest_are_kept_for_any_number_of_experts);
    RUN(nothing_is_allocated_after_the_first_entry);
    RUN(what_cannot_be_recorded_changes_nothing);
    RUN(the_number_of_experts_is_fixed_by_the_first_entry_for_ever);
    RUN(a_failed_new_leaves_nothing);
    RUN(limits_that_no_machine_has_are_refused);
    RUN(a_failed_push_records_nothing);
    CHECK_DONE();
}
