/* The gate history against an array of entries (model.h), with late values, slices and failed
 * allocations. */
#include "budget/rig.h"
#include "core/gate/history.h"
#include "gate/rig.h"

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

enum { LATE_MOST = 4 };

/* Entries that were claimed and wait for their values, as those of a device do. */
static struct {
    tensor values;
    uint64_t number;
} late[LATE_MOST];
static size_t late_count;

static tensor
any_tensor(rig *g, size_t most, size_t experts)
{
    mt_dtype dtype = (mt_dtype)rng_below(&g->r, MT_DTYPE_COUNT);

    return tensor_new(&g->r, dtype, rng_below(&g->r, most + 1), experts,
                      (layout)rng_below(&g->r, LAYOUTS));
}

static void
claim_one(rig *g, size_t experts)
{
    tensor t = any_tensor(g, 3, experts);
    mt_status want = model_admit(&g->m, &t.rows);

    CHECK(mt_gatehist_admit(g->h, &t.rows, NULL) == want);
    if (want != MT_OK) {
        tensor_free(&t);
        return;
    }
    late[late_count].values = t;
    late[late_count].number = mt_gatehist_claim(g->h, &t.rows);
    CHECK(late[late_count++].number == model_claim(&g->m, &t.rows));
}

/* Values arrive in any order. The entry may have been evicted or cleared meanwhile. */
static void
fill_one(rig *g, size_t i)
{
    mt_gatehist_fill(g->h, late[i].number, &late[i].values.rows);
    model_fill(&g->m, late[i].number, &late[i].values.rows);
    tensor_free(&late[i].values);
    late[i] = late[--late_count];
}

/* The statistics of the newest n entries. */
static void
recount(rig *g, size_t n)
{
    model_sums want = model_recount(&g->m, n);
    mt_gatestats got;

    mt_gatestats_init(&got, &g->mem, g->m.config.top_k);
    CHECK(mt_gatestats_reserve(&got, g->m.experts, NULL) == MT_OK);
    mt_gatehist_recount(g->h, n, &got);
    sums_agree(&want, &got);
    mt_gatestats_fini(&got);
    model_sums_free(&want);
}

/* Any slice, forwards or backwards. pre: there are entries. */
static void
slice(rig *g)
{
    size_t len = g->m.len, start = rng_below(&g->r, len), step = 1 + rng_below(&g->r, 4);
    bool down = rng_below(&g->r, 2);
    size_t most = down ? start / step + 1 : (len - start + step - 1) / step;

    rig_slice(g, start, down ? -(ptrdiff_t)step : (ptrdiff_t)step, rng_below(&g->r, most + 1));
}

static void
random_step(rig *g, size_t experts)
{
    size_t pick = rng_below(&g->r, 40);
    bool readable = g->m.len > 0 && model_all_filled(&g->m);

    if (pick == 0) {
        mt_gatehist_clear(g->h);
        model_clear(&g->m);
    } else if (pick == 1) {
        mt_gatehist_reset_stats(g->h);
        model_reset_stats(&g->m);
    } else if (pick < 5 && readable) {
        slice(g);
    } else if (pick < 7 && readable) {
        recount(g, rng_below(&g->r, g->m.len + 1));
    } else if (pick < 12 && late_count < LATE_MOST) {
        claim_one(g, experts);
    } else if (pick < 20 && late_count > 0) {
        fill_one(g, rng_below(&g->r, late_count));
    } else {
        rig_push_any(g, pick < 30 ? 3 : 12, experts);
    }
    model_agrees(&g->m, g->h);
}

/* In a budget with room for everything it is the same history. */
static void
any_run_matches_the_model(void)
{
    for (uint64_t seed = 0; seed < 400; seed++) {
        rng r = rng_seeded(seed);
        size_t experts;
        mt_gatehist_config config = rig_any_config(&r, &experts);
        mt_ledger *ledger = make_ledger(&mt_alloc_libc, SIZE_MAX, "x", NULL);
        rig *g;

        config.ledger = seed % 4 == 0 ? ledger : NULL;
        g = begin_with(config, seed);
        for (int step = 0; step < 60; step++)
            random_step(g, experts);
        while (late_count > 0)
            fill_one(g, 0);
        model_agrees(&g->m, g->h);
        rig_end(g);
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

static void
an_admit_that_was_never_claimed_fixes_nothing(void)
{
    rig *g = begin(1);
    static const size_t widths[] = {9, 3, 5000, 3, 4};

    for (size_t i = 0; i < 5; i++) {
        mt_rows rows = mt_rows_packed(NULL, MT_F32, 1, widths[i]);
        CHECK(mt_gatehist_admit(g->h, &rows, NULL) == MT_OK);
        model_agrees(&g->m, g->h);
    }
    CHECK(rig_push(g, MT_F32, 2, 7, LAYOUT_PACKED) == MT_OK);
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

static void
a_failed_admit_of_another_width_leaves_a_working_history(void)
{
    mt_rows first = mt_rows_packed(NULL, MT_F32, 1, 4);
    mt_rows other = mt_rows_packed(NULL, MT_F32, 1, 9);

    for (long n = 0; n < 3; n++) {
        rig *g = begin(10);
        CHECK(mt_gatehist_admit(g->h, &first, NULL) == MT_OK);
        rig_fail(g, n);
        CHECK(mt_gatehist_admit(g->h, &other, NULL) == MT_ENOMEM);
        model_agrees(&g->m, g->h);
        rig_fail(g, -1);
        push_rows(g, 2);
        rig_end(g);
    }
}

static void
a_failed_slice_leaves_nothing(void)
{
    rig *g = begin(11);
    long n = -1, live;

    for (int i = 0; i < 6; i++)
        push_rows(g, 2);
    live = g->fault.live;
    do {
        rig_fail(g, ++n);
        rig_slice(g, 1, 2, 2);
        CHECK(g->fault.live == live);
    } while (g->fault.calls > n);
    CHECK(n == 5); /* the history, its arena, scratch and two blocks of statistics */
    rig_end(g);
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
    RUN(an_admit_that_was_never_claimed_fixes_nothing);
    RUN(a_failed_new_leaves_nothing);
    RUN(limits_that_no_machine_has_are_refused);
    RUN(a_failed_push_records_nothing);
    RUN(a_failed_admit_of_another_width_leaves_a_working_history);
    RUN(a_failed_slice_leaves_nothing);
    CHECK_DONE();
}
