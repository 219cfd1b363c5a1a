/* Reading, slicing and clearing a gate history, and what a failed allocation leaves behind. */
#include "gate/rig_plain.h"

static void
a_later_write_to_the_tensor_changes_nothing(void)
{
    rig *g = begin(4);
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    mt_rows rows = mt_rows_packed(x, MT_F32, 2, 4);

    rig_push_rows(g, &rows);
    x[3] = 99;
    model_agrees(&g->m, g->h);
    rig_end(g);
}

static void
a_clear_keeps_the_statistics_and_the_numbering(void)
{
    rig *g = begin(5);

    push_rows(g, 3);
    push_rows(g, 2);
    mt_gatehist_clear(g->h);
    model_clear(&g->m);
    model_agrees(&g->m, g->h);
    CHECK(mt_gatehist_len(g->h) == 0 && mt_gatehist_bytes(g->h) == 0);
    CHECK(mt_gatehist_stats(g->h)->total.tokens == 5 && mt_gatehist_appended(g->h) == 2);
    push_rows(g, 1);
    CHECK(mt_gatehist_appended(g->h) == 3 && mt_gatehist_stats(g->h)->total.tokens == 6);
    rig_end(g);
}

static void
slices_all_ways(rig *g)
{
    size_t len = g->m.len;

    for (size_t start = 0; start < len; start++)
        for (ptrdiff_t step = 1; step <= 4; step++) {
            size_t up = (len - start + (size_t)step - 1) / (size_t)step;
            size_t down = start / (size_t)step + 1;
            rig_slice(g, start, step, up);
            rig_slice(g, start, -step, down);
            rig_slice(g, start, step, up / 2);
        }
    rig_slice(g, 0, 1, 0);
    rig_slice(g, len, -1, 0);
}

static void
a_slice_is_a_history_of_its_own(void)
{
    for (int keep = 0; keep < 2; keep++) {
        mt_gatehist_config config = plain;
        rig *g;
        config.keep = (mt_keep)keep;
        config.max_entries = 9;
        config.max_bytes = 500;
        g = begin_with(config, 6);
        slices_all_ways(g); /* of an empty one */
        for (int i = 0; i < 25; i++)
            rig_push_any(g, 4, 4);
        slices_all_ways(g);
        rig_end(g);
    }
}

static void
a_slice_outlives_its_history(void)
{
    rig *g = begin(7);
    mt_gatehist *slice;
    model copy;

    for (int i = 0; i < 6; i++)
        push_rows(g, 2);
    CHECK(mt_gatehist_slice(g->h, 5, -2, 3, &slice, NULL) == MT_OK);
    model_slice(&g->m, 5, -2, 3, &copy);
    mt_gatehist_free(g->h);
    model_agrees(&copy, slice);
    mt_gatehist_free(slice);
    model_fini(&copy);
    g->h = NULL;
    rig_end(g);
}

static void
a_recount_of_everything_is_what_was_counted_directly(void)
{
    rig *g = begin(8);

    for (int i = 0; i < 90; i++)
        rig_push_any(g, 6, 5);
    for (size_t n = 0; n <= g->m.len; n += 9) {
        mt_gatestats s;
        model_sums want = model_recount(&g->m, n);
        mt_gatestats_init(&s, &g->mem, 1);
        CHECK(mt_gatestats_reserve(&s, 5, NULL) == MT_OK);
        mt_gatehist_recount(g->h, n, &s);
        sums_agree(&want, &s);
        if (n == g->m.len) sums_agree(&g->m.sums, &s);
        mt_gatestats_fini(&s);
        model_sums_free(&want);
    }
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

static void
the_check_finds_a_record_of_the_wrong_size(void)
{
    rig *g = begin(12);

    push_rows(g, 2);
    CHECK(mt_gatehist_check(g->h));
    ((mt_gatehist_config *)mt_gatehist_configuration(g->h))->max_bytes = 31;
    CHECK(!mt_gatehist_check(g->h));
    ((mt_gatehist_config *)mt_gatehist_configuration(g->h))->max_bytes = 1 << 20;
    ((mt_gatehist_config *)mt_gatehist_configuration(g->h))->keep = MT_KEEP_TOPK;
    CHECK(!mt_gatehist_check(g->h));
    rig_end(g);
}

int
main(void)
{
    RUN(a_later_write_to_the_tensor_changes_nothing);
    RUN(a_clear_keeps_the_statistics_and_the_numbering);
    RUN(a_slice_is_a_history_of_its_own);
    RUN(a_slice_outlives_its_history);
    RUN(a_recount_of_everything_is_what_was_counted_directly);
    RUN(a_failed_new_leaves_nothing);
    RUN(limits_that_no_machine_has_are_refused);
    RUN(a_failed_push_records_nothing);
    RUN(a_failed_admit_of_another_width_leaves_a_working_history);
    RUN(a_failed_slice_leaves_nothing);
    RUN(the_check_finds_a_record_of_the_wrong_size);
    CHECK_DONE();
}
