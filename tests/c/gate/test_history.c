/* The gate history against an array of entries, on every path that a training loop can take. */
#include "core/gate/history_private.h"
#include "gate/rig_plain.h"

/* --- against the model ------------------------------------------------------------------------ */

static void
random_step(rig *g, size_t experts)
{
    size_t pick = rng_below(&g->r, 40), len = g->m.len;

    if (pick == 0) {
        mt_gatehist_clear(g->h);
        model_clear(&g->m);
    } else if (pick == 1) {
        mt_gatehist_reset_stats(g->h);
        model_reset_stats(&g->m);
    } else if (pick < 5 && len > 0) {
        size_t start = rng_below(&g->r, len);
        rig_slice(g, start, 1, rng_below(&g->r, len - start + 1));
    } else {
        rig_push_any(g, pick < 30 ? 3 : 12, experts);
    }
    model_agrees(&g->m, g->h);
}

static void
any_run_matches_the_model(void)
{
    for (uint64_t seed = 0; seed < 400; seed++) {
        rng r = rng_seeded(seed);
        size_t experts;
        mt_gatehist_config config = rig_any_config(&r, &experts);
        rig *g = begin_with(config, seed);
        for (int step = 0; step < 60; step++)
            random_step(g, experts);
        rig_end(g);
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
a_long_run_fills_windows_like_the_totals(void)
{
    mt_gatehist_config config = plain;
    uint64_t tokens = 0, entries = 0, n;
    double importance[4];
    uint64_t load[4];
    mt_gatesums got = {.importance = importance, .load = load};
    const mt_gatestats *s;
    rig *g;

    config.max_entries = 3;
    g = begin_with(config, 1);
    s = mt_gatehist_stats(g->h);
    for (int i = 0; i < 700; i++)
        push_rows(g, rng_below(&g->r, 4));
    for (size_t i = 0; i < mt_gatestats_windows(s); i++) {
        mt_gatestats_window(s, i, &got, &n);
        entries += n;
        tokens += got.tokens;
    }
    CHECK(entries == 700 && tokens == g->m.sums.tokens);
    rig_end(g);
}

/* --- limits ----------------------------------------------------------------------------------- */

static rig *
begin_limited(mt_trim trim, size_t max_entries, size_t max_bytes)
{
    mt_gatehist_config config = plain;

    config.trim = trim;
    config.max_entries = max_entries;
    config.max_bytes = max_bytes;
    return begin_with(config, 7);
}

/* After i pushes of `rows` rows each, how many entries there are; 0 ends the list. */
static void
lengths_are(rig *g, size_t rows, const size_t *lengths)
{
    for (size_t i = 0; lengths[i] > 0; i++) {
        push_rows(g, rows);
        CHECK(mt_gatehist_len(g->h) == lengths[i]);
    }
    rig_end(g);
}

static void
half_of_the_entries_stay_when_there_are_too_many(void)
{
    static const size_t even[] = {1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 0};
    static const size_t odd[] = {1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 0};
    static const size_t two[] = {1, 2, 1, 2, 1, 0};
    static const size_t one[] = {1, 1, 1, 0};

    lengths_are(begin_limited(MT_TRIM_HALF, 6, 1 << 20), 1, even);
    lengths_are(begin_limited(MT_TRIM_HALF, 5, 1 << 20), 0, odd);
    lengths_are(begin_limited(MT_TRIM_HALF, 2, 1 << 20), 2, two);
    lengths_are(begin_limited(MT_TRIM_HALF, 1, 1 << 20), 2, one);
}

static void
half_of_the_bytes_stay_when_there_are_too_many(void)
{
    static const size_t four[] = {1, 2, 3, 4, 2, 3, 4, 2, 0};
    static const size_t three[] = {1, 2, 3, 1, 2, 3, 1, 0};
    static const size_t one[] = {1, 1, 0}; /* one entry is over half: it stays alone */

    lengths_are(begin_limited(MT_TRIM_HALF, 100, 4 * 32), 2, four);
    lengths_are(begin_limited(MT_TRIM_HALF, 100, 4 * 32 - 1), 2, three);
    lengths_are(begin_limited(MT_TRIM_HALF, 100, 33), 2, one);
}

static void
the_oldest_goes_when_the_limit_is_met(void)
{
    static const size_t by_count[] = {1, 2, 3, 3, 3, 3, 3, 0};
    static const size_t by_bytes[] = {1, 2, 2, 2, 2, 0};

    lengths_are(begin_limited(MT_TRIM_OLDEST, 3, 1 << 20), 2, by_count);
    lengths_are(begin_limited(MT_TRIM_OLDEST, 100, 95), 2, by_bytes);
}

static void
a_large_entry_drops_as_many_as_it_needs(void)
{
    rig *g = begin_limited(MT_TRIM_OLDEST, 10, 6 * 16);

    for (int i = 0; i < 6; i++)
        push_rows(g, 1);
    push_rows(g, 3);
    CHECK(mt_gatehist_len(g->h) == 4 && mt_gatehist_bytes(g->h) == 6 * 16);
    push_rows(g, 6);
    CHECK(mt_gatehist_len(g->h) == 1 && mt_gatehist_bytes(g->h) == 6 * 16);
    rig_end(g);
}

static void
entries_without_rows_count_as_entries(void)
{
    rig *g = begin_limited(MT_TRIM_OLDEST, 4, 16);

    push_rows(g, 1);
    for (int i = 0; i < 9; i++)
        push_rows(g, 0);
    CHECK(mt_gatehist_len(g->h) == 4 && mt_gatehist_bytes(g->h) == 0);
    rig_end(g);
}

static void
the_arena_is_as_large_as_what_it_holds(void)
{
    rig *g = begin_limited(MT_TRIM_OLDEST, 10, 1 << 20);

    for (int i = 0; i < 95; i++)
        push_rows(g, 5);
    CHECK(mt_gatehist_extent(g->h) == 10 * 5 * 16);
    rig_end(g);
}

static void
nothing_is_allocated_after_the_first_entry(void)
{
    rig *g = begin_limited(MT_TRIM_HALF, 20, 999);

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
    CHECK(mt_gatehist_push(g->h, &rows, NULL) == want);
    CHECK(mt_gatehist_experts(g->h) == experts);
    model_agrees(&g->m, g->h);
}

static void
what_cannot_be_recorded_changes_nothing(void)
{
    rig *g = begin_limited(MT_TRIM_HALF, 5, 100);

    for (int used = 0; used < 2; used++) {
        size_t other = used ? 4 : 1; /* what a width is held against: experts, or top_k */
        refuses(g, mt_rows_packed(NULL, MT_F32, 3, 0), MT_ESHAPE, 0, other);
        refuses(g, mt_rows_packed(NULL, MT_F32, 7, 4), MT_ELIMIT, 7 * 16, 100);
        if (used) CHECK(mt_gatehist_len(g->h) == 1);
        if (!used) push_rows(g, 2);
    }
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, 5), MT_ESHAPE, 5, 4);
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, 3), MT_ESHAPE, 3, 4);
    refuses(g, mt_rows_packed(NULL, MT_F32, (size_t)1 << 32, 4), MT_ESHAPE, (size_t)1 << 32,
            UINT32_MAX);
    push_rows(g, 6); /* and it still works */
    rig_end(g);
}

static void
the_error_of_a_limit_says_what_is_used(void)
{
    rig *g = begin_limited(MT_TRIM_HALF, 5, 100);
    mt_rows rows = mt_rows_packed(NULL, MT_F64, 4, 4);
    mt_error err;

    push_rows(g, 3);
    CHECK(mt_gatehist_admit(g->h, &rows, &err) == MT_ELIMIT && err.used == 48 && err.asked == 128);
    rig_end(g);
}

static void
shapes_beyond_all_bounds_are_refused(void)
{
    rig *g = begin(1);
    mt_rows huge = mt_rows_packed(NULL, MT_F64, UINT32_MAX, MT_EXPERTS_MAX);
    mt_rows wide = mt_rows_packed(NULL, MT_F32, 1, MT_EXPERTS_MAX + 1);

    CHECK(mt_gatehist_admit(g->h, &huge, NULL) == MT_ELIMIT);
    CHECK(mt_gatehist_admit(g->h, &wide, NULL) == MT_ESHAPE);
    model_agrees(&g->m, g->h);
    rig_end(g);
}

static void
fewer_experts_than_top_k_are_refused(void)
{
    mt_gatehist_config config = plain;
    rig *g;

    config.top_k = 3;
    g = begin_with(config, 1);
    refuses(g, mt_rows_packed(NULL, MT_F32, 1, 2), MT_ESHAPE, 2, 3);
    CHECK(rig_push(g, MT_F32, 1, 3, LAYOUT_PACKED) == MT_OK);
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

/* --- admit, claim and fill apart -------------------------------------------------------------- */

static uint64_t
claim_rows(rig *g, const mt_rows *rows)
{
    uint64_t number;

    CHECK(mt_gatehist_admit(g->h, rows, NULL) == MT_OK);
    number = mt_gatehist_claim(g->h, rows);
    CHECK(number == model_claim(&g->m, rows));
    model_agrees(&g->m, g->h);
    return number;
}

static void
fill_rows(rig *g, uint64_t number, const mt_rows *rows)
{
    mt_gatehist_fill(g->h, number, rows);
    model_fill(&g->m, number, rows);
    model_agrees(&g->m, g->h);
}

/* Eight claims over room for three: five are evicted before anything arrives. */
static void
fills_in_order(const size_t *order, bool statistics)
{
    mt_gatehist_config config = plain;
    tensor late[8];
    uint64_t number[8];
    rig *g;

    config.trim = MT_TRIM_OLDEST;
    config.max_entries = 3;
    config.statistics = statistics;
    g = begin_with(config, order[0]);
    for (size_t i = 0; i < 8; i++) {
        late[i] = tensor_new(&g->r, MT_F16, 1 + i % 3, 4, (layout)(i % LAYOUTS));
        number[i] = claim_rows(g, &late[i].rows);
    }
    for (size_t i = 0; i < 8; i++) {
        fill_rows(g, number[order[i]], &late[order[i]].rows);
        tensor_free(&late[order[i]]);
    }
    CHECK(mt_gatehist_len(g->h) == 3 && model_all_filled(&g->m));
    CHECK(!statistics || mt_gatehist_stats(g->h)->entries == 8);
    rig_end(g);
}

static void
entries_may_arrive_late_and_in_any_order(void)
{
    static const size_t orders[][8] = {
        {0, 1, 2, 3, 4, 5, 6, 7}, {7, 6, 5, 4, 3, 2, 1, 0}, {5, 0, 7, 2, 6, 1, 3, 4}};

    for (size_t i = 0; i < 3; i++) {
        fills_in_order(orders[i], true);
        fills_in_order(orders[i], false);
    }
}

static void
an_entry_that_was_cleared_before_it_arrived_is_only_counted(void)
{
    rig *g = begin(3);
    tensor t = tensor_new(&g->r, MT_F32, 3, 4, LAYOUT_PACKED);
    uint64_t number = claim_rows(g, &t.rows);

    mt_gatehist_clear(g->h);
    model_clear(&g->m);
    push_rows(g, 2);
    fill_rows(g, number, &t.rows);
    CHECK(mt_gatehist_stats(g->h)->total.tokens == 5);
    tensor_free(&t);
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
    RUN(a_long_run_fills_windows_like_the_totals);
    RUN(half_of_the_entries_stay_when_there_are_too_many);
    RUN(half_of_the_bytes_stay_when_there_are_too_many);
    RUN(the_oldest_goes_when_the_limit_is_met);
    RUN(a_large_entry_drops_as_many_as_it_needs);
    RUN(entries_without_rows_count_as_entries);
    RUN(the_arena_is_as_large_as_what_it_holds);
    RUN(nothing_is_allocated_after_the_first_entry);
    RUN(what_cannot_be_recorded_changes_nothing);
    RUN(the_error_of_a_limit_says_what_is_used);
    RUN(shapes_beyond_all_bounds_are_refused);
    RUN(fewer_experts_than_top_k_are_refused);
    RUN(the_number_of_experts_is_fixed_by_the_first_entry_for_ever);
    RUN(an_admit_that_was_never_claimed_fixes_nothing);
    RUN(entries_may_arrive_late_and_in_any_order);
    RUN(an_entry_that_was_cleared_before_it_arrived_is_only_counted);
    CHECK_DONE();
}
