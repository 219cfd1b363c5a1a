/* Histories taken apart and put together: what comes out is equal, and pieces that do not fit are
 * refused. */
#include "gate/rig.h"

static const mt_gatehist_config plain = {.max_entries = 6,
                                         .max_bytes = 200,
                                         .trim = MT_TRIM_OLDEST,
                                         .keep = MT_KEEP_ALL,
                                         .dtype = MT_DTYPE_SAME,
                                         .top_k = 2,
                                         .statistics = true};
static rig rigged;

/* A history of 3 experts after `pushes` entries of any dtype. */
static rig *
begin(mt_keep keep, bool statistics, int pushes)
{
    mt_gatehist_config config = plain;

    config.keep = keep;
    config.statistics = statistics;
    rig_begin(&rigged, &config, (uint64_t)pushes);
    for (int i = 0; i < pushes; i++)
        rig_push_any(&rigged, 4, 3);
    return &rigged;
}

/* Takes over `again`. */
static void
is_the_same_and_goes_on_the_same(rig *g, mt_gatehist *again, size_t experts)
{
    model_agrees(&g->m, again);
    CHECK(mt_gatehist_check(again) && same_history(g->h, again));
    for (int i = 0; i < 10; i++) {
        tensor t = tensor_new(&g->r, MT_F32, rng_below(&g->r, 4), experts, LAYOUT_PACKED);
        mt_status st = rig_push_rows(g, &t.rows);
        CHECK(mt_gatehist_push(again, &t.rows, NULL) == st);
        CHECK(same_history(g->h, again));
        tensor_free(&t);
    }
    mt_gatehist_free(again);
}

static void
what_was_taken_apart_is_put_together_equal(void)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        rng r = rng_seeded(seed);
        size_t experts, pushes = rng_below(&r, seed % 9 ? 30 : 300);
        mt_gatehist_config config = rig_any_config(&r, &experts);
        mt_gatestate state;
        mt_gatehist *again;
        rig *g = &rigged;
        rig_begin(g, &config, seed);
        for (size_t i = 0; i < pushes; i++)
            rig_push_any(g, 5, experts);
        if (seed % 7 == 0) {
            mt_gatehist_clear(g->h);
            model_clear(&g->m);
        }
        if (seed % 5 == 0) {
            mt_gatehist_reset_stats(g->h);
            model_reset_stats(&g->m);
        }
        state = state_of(g->h);
        if (seed % 2 == 0)
            CHECK(restore_new(g, &config, &state, &again) == MT_OK);
        else
            CHECK(mt_gatehist_clone(g->h, &again, NULL) == MT_OK);
        state_free(&state);
        is_the_same_and_goes_on_the_same(g, again, experts);
        rig_end(g);
    }
}

static void
a_slice_is_put_together_like_any_other(void)
{
    rig *g = begin(MT_KEEP_TOPK, true, 12);
    mt_gatehist *slice;

    CHECK(mt_gatehist_slice(g->h, g->m.len - 1, -2, 2, &slice, NULL) == MT_OK);
    state_round_trips(g, slice);
    mt_gatehist_free(slice);
    rig_end(g);
}

/* Refused with this state, in blocks of just these lengths. */
static bool
refuses(rig *g, mt_gatestate state)
{
    void *sums = block_of(state.sums_bytes), *index = block_of(state.index_bytes),
         *records = block_of(state.records_bytes);
    mt_gatestate true_state = state_of(g->h), given = state;
    mt_gatehist *h;
    mt_status st;

    memset(sums, 0, state.sums_bytes);
    memset(index, 0, state.index_bytes);
    memset(records, 0, state.records_bytes);
    memcpy(sums, true_state.sums, mt_size_min(state.sums_bytes, true_state.sums_bytes));
    memcpy(index, true_state.index, mt_size_min(state.index_bytes, true_state.index_bytes));
    memcpy(records, true_state.records, mt_size_min(state.records_bytes, true_state.records_bytes));
    given.sums = sums;
    given.index = index;
    given.records = records;
    st = restore_new(g, mt_gatehist_configuration(g->h), &given, &h);
    mt_gatehist_free(h);
    state_free(&given);
    state_free(&true_state);
    return st == MT_EFORMAT;
}

/* Each number and length, some too small and some too large. */
static void
numbers_that_make_no_sense_are_refused(void)
{
    static const uint64_t others[] = {0, 2, 4, 5, 8, 1ull << 32, 1ull << 61, UINT64_MAX};

    for (int kind = 0; kind < 4; kind++) {
        rig *g = begin((mt_keep)(kind & 1), kind & 2, 9);
        mt_gatestate whole = mt_gatehist_state(g->h);
        CHECK(!refuses(g, whole));
        for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
            mt_gatestate experts = whole, appended = whole, counted = whole, span = whole;
            experts.experts = (size_t)others[i];
            appended.appended = others[i];
            counted.counted = span.span = others[i];
            /* Of top-k records, whose rows are as long for 2 and 4 experts, an index tells. */
            if (whole.sums_bytes > 0 || others[i] == 0 || others[i] > MT_EXPERTS_MAX)
                CHECK(refuses(g, experts));
            if (others[i] < whole.index_bytes / 8 || others[i] > UINT64_MAX / 2)
                CHECK(refuses(g, appended));
            if (whole.sums_bytes > 0) CHECK(refuses(g, counted) && refuses(g, span));
        }
        rig_end(g);
    }
}

static void
pieces_of_another_length_are_refused(void)
{
    for (int kind = 0; kind < 2 * 4; kind++) {
        rig *g = begin((mt_keep)(kind & 1), kind & 2, kind & 4 ? 130 : 9);
        mt_gatestate whole = mt_gatehist_state(g->h);
        for (size_t by = 1; by <= 8; by++) {
            mt_gatestate more = whole, longer = whole, more_sums = whole;
            more.records_bytes += by;
            longer.index_bytes += by;
            more_sums.sums_bytes += by;
            CHECK(refuses(g, more) && refuses(g, more_sums));
            if (by < 8 || whole.index_bytes / 8 == plain.max_entries) CHECK(refuses(g, longer));
        }
        for (size_t less = 0; less < whole.records_bytes; less++) {
            mt_gatestate fewer = whole;
            fewer.records_bytes = less;
            CHECK(refuses(g, fewer));
        }
        for (size_t less = 0; less < whole.sums_bytes; less += less < 64 ? 1 : 61) {
            mt_gatestate fewer = whole;
            fewer.sums_bytes = less;
            CHECK(refuses(g, fewer));
        }
        rig_end(g);
    }
}

/* Rows or dtype of an entry replaced. */
static void
entries_that_do_not_fit_are_refused(void)
{
    static const struct {
        size_t at;
        uint32_t value;
    } edits[] = {{0, UINT32_MAX},
                 {0, 1000},
                 {1, MT_DTYPE_COUNT},
                 {1, UINT32_MAX},
                 {10, 0x55555556} /* times 12 is 8 and 2^32 */,
                 {11, MT_F8_E5M2 + 1000}};

    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        rig *g = begin(MT_KEEP_ALL, true, 9);
        mt_gatestate state = state_of(g->h);
        mt_gatehist *h;
        memcpy((unsigned char *)state.index + 4 * edits[i].at, &edits[i].value, 4);
        CHECK(restore_new(g, &plain, &state, &h) == MT_EFORMAT);
        state_free(&state);
        rig_end(g);
    }
}

static void
what_the_limits_have_no_room_for_is_refused(void)
{
    rig *g = begin(MT_KEEP_ALL, false, 0);
    mt_gatehist_config config = *mt_gatehist_configuration(g->h), other = config;
    mt_gatestate state;
    mt_gatehist *h;

    for (int i = 0; i < 4; i++)
        rig_push(g, MT_F32, i == 0, 3, LAYOUT_PACKED);
    state = state_of(g->h);
    for (size_t limit = 1; limit < 6; limit++) {
        config.max_entries = limit;
        CHECK(restore_new(g, &config, &state, &h) == (limit < 4 ? MT_EFORMAT : MT_OK));
        mt_gatehist_free(h);
    }
    other.max_bytes = 11;
    CHECK(restore_new(g, &other, &state, &h) == MT_EFORMAT);
    other.max_bytes = 12;
    other.dtype = MT_BF16; /* not that of the entries */
    CHECK(restore_new(g, &other, &state, &h) == MT_EFORMAT);
    CHECK(mt_gatehist_restore(g->h, &state, NULL) == MT_EFORMAT); /* it has entries */
    state_free(&state);
    rig_end(g);
}

/* Both places of the index in a top-k record of 3 experts. */
static void
an_expert_that_does_not_exist_is_refused(void)
{
    rig *g = begin(MT_KEEP_TOPK, false, 0);
    const float x[] = {0.5f, 0.0f, 1.0f};
    mt_rows rows = mt_rows_packed(x, MT_F32, 1, 3);
    mt_gatestate state;
    mt_gatehist *h;

    rig_push_rows(g, &rows);
    state = state_of(g->h);
    CHECK(memcmp(state.index, (uint32_t[]){1, MT_F32}, 8) == 0);
    CHECK(memcmp(state.records, "\x02\x00\0\0\x80\x3F\0\0\0\x3F", 10) == 0);
    for (unsigned expert = 0; expert < 256; expert++)
        for (size_t k = 0; k < 2; k++) {
            unsigned char *at = (unsigned char *)state.records + k, was = *at;
            *at = (unsigned char)expert;
            CHECK(restore_new(g, mt_gatehist_configuration(g->h), &state, &h) ==
                  (expert < 3 ? MT_OK : MT_EFORMAT));
            mt_gatehist_free(h);
            *at = was;
        }
    state_free(&state);
    rig_end(g);
}

static void
a_failed_allocation_leaves_nothing(void)
{
    for (int clones = 0; clones < 2; clones++) {
        rig *g = begin(MT_KEEP_ALL, true, 9);
        mt_gatestate state = state_of(g->h);
        mt_gatehist *h;
        long n = 0;

        for (;; n++) {
            long live = g->fault.live;
            mt_status st;
            rig_fail(g, n);
            st = clones ? mt_gatehist_clone(g->h, &h, NULL) : restore_new(g, &plain, &state, &h);
            if (st == MT_OK) break;
            CHECK(st == MT_ENOMEM && g->fault.live == live);
        }
        CHECK(n == 5 && same_history(g->h, h));
        mt_gatehist_free(h);
        state_free(&state);
        rig_end(g);
    }
}

int
main(void)
{
    RUN(what_was_taken_apart_is_put_together_equal);
    RUN(a_slice_is_put_together_like_any_other);
    RUN(numbers_that_make_no_sense_are_refused);
    RUN(pieces_of_another_length_are_refused);
    RUN(entries_that_do_not_fit_are_refused);
    RUN(what_the_limits_have_no_room_for_is_refused);
    RUN(an_expert_that_does_not_exist_is_refused);
    RUN(a_failed_allocation_leaves_nothing);
    CHECK_DONE();
}
