/* A KV pool and code that writes into the views itself; how leases and pools end; what errors say.
 */
#include <pthread.h>

#include "kv/plain.h"

/* ---- code that writes into the views ---- */

static void
an_exposed_row_costs_what_is_touched(void)
{
    static uint32_t ids[MODEL_ROWS][MODEL_LAYERS];
    static const size_t counts[MODEL_ROWS] = {BLOCK};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, 3);
    m = lend(&g, 0, 1, 0);
    CHECK(mt_kvlease_expose(m->lease, NULL) == MT_OK);
    m->exposed = true;
    m->writable = 22;
    CHECK(stats_of(&g).physical_bytes == 0);
    for (size_t layer = 0; layer < 2; layer++)
        ids[0][layer] = rig_scribble(&g, m, 0, layer, BLOCK, BLOCK);
    CHECK(stats_of(&g).physical_bytes == 2 * BLOCK_BYTES && stats_of(&g).live_bytes == 0);
    CHECK(rig_advance_all(&g, m, counts, ids) == MT_OK);
    CHECK(stats_of(&g).live_bytes == BLOCK_BYTES && stats_of(&g).copied == 0);
    rig_look(&g, m, 0, BLOCK, true);
    rig_look(&g, m, 1, BLOCK, true);
    rig_end_of(&g, m);
    CHECK(stats_of(&g).physical_bytes == BLOCK_BYTES); /* the rest was in no advance */
    rig_end(&g);
}

/* A row that came to share a block by reorder, not by fork: what code writes there is its own. */
static void
a_write_into_a_shared_block_stays_with_its_row(void)
{
    static const size_t first_twice[] = {0, 0};
    static rig g;
    mlease *m;
    char *other;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 2, 0);
    append(&g, m, 2 * BLOCK);
    CHECK(rig_reorder(&g, m, first_twice, 2) == MT_OK);
    rig_look(&g, m, 0, 2 * BLOCK, true);
    other = (char *)mt_kvlease_base(m->lease) + rig_geom(&g)->slot_bytes;
    memset(other, 0x77, 16);
    CHECK(*(char *)mt_kvlease_base(m->lease) != 0x77 && *other == 0x77);
    rig_end_of(&g, m);
    rig_end(&g);
}

/* Rows that code wrote to in place change places, and are continued, with what was written. */
static void
private_writes_go_where_their_row_goes(void)
{
    static const size_t swap[] = {1, 0};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 2 * BLOCK);
    m = &g.lease[1];
    CHECK(rig_fork(&g, m, &g.lease[0], 2, 0) == MT_OK);
    rig_look_at_all(&g, true);
    for (size_t layer = 0; layer < rig_layers(&g); layer++) {
        m->row[0].id[layer][3] = 999;
        token_write(m->lease, 0, layer, 3, 999);
    }
    CHECK(rig_reorder(&g, m, swap, 2) == MT_OK);
    rig_look_at_all(&g, true);
    CHECK(rig_fork(&g, &g.lease[2], m, 2, 0) == MT_OK);
    rig_look_at_all(&g, true);
    append(&g, m, 1);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* Also where the call had copied the block already, in which they are, and failed after that. */
static void
private_writes_stay_when_a_call_fails(void)
{
    static const size_t counts[MODEL_ROWS] = {1, 1};
    static rig g;
    mt_status st;
    long n = 0;

    do {
        mlease *m;

        begin(&g, RIG_LINUX, SIZE_MAX);
        append(&g, lend(&g, 0, 1, 0), BLOCK + 2);
        m = &g.lease[1];
        CHECK(rig_fork(&g, m, &g.lease[0], 2, 0) == MT_OK);
        rig_look_at_all(&g, true);
        for (size_t layer = 0; layer < rig_layers(&g); layer++) {
            m->row[0].id[layer][BLOCK] = 999;
            token_write(m->lease, 0, layer, BLOCK, 999);
        }
        rig_fail(&g, n++);
        st = rig_update(&g, m, 0, counts, true);
        rig_fail(&g, -1);
        rig_look_at_all(&g, true);
        rig_end(&g);
    } while (st != MT_OK);
    CHECK(n > 5);
}

/* Rows that changed places and back map their own extents privately. The next row there maps what
 * lies ahead of it anew, and takes no page for what an ended row may have written. */
static void
private_writes_end_with_their_row(void)
{
    static const size_t swap[] = {1, 0};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 2, 0);
    append(&g, m, 3 * BLOCK);
    for (size_t i = 0; i < 2; i++) {
        CHECK(rig_reorder(&g, m, swap, 2) == MT_OK);
        rig_look_at_all(&g, true);
    }
    rig_end_of(&g, m);
    CHECK(mt_kvpool_trim(g.pool, 0) == 6 * BLOCK_BYTES);
    append(&g, lend(&g, 0, 2, 0), 1);
    CHECK(stats_of(&g).physical_bytes == 2 * BLOCK_BYTES);
    rig_end(&g);
}

/* What is appended may be a view of the same rows that reaches past their end. */
static void
tokens_that_overlap_where_they_go_are_moved(void)
{
    for (size_t config = 0; config < 3; config += 2) {
        static rig g;
        rig_setup setup = {steps_config(config), RIG_LINUX, SIZE_MAX};
        mt_kvstep step = {.count = 4};
        const mt_kvgeom *geom;
        mt_kvsource from[2];
        mlease *m;

        rig_begin(&g, &setup, roll, &dice);
        m = lend(&g, 0, 1, 0);
        append(&g, m, 3);
        geom = rig_geom(&g);
        for (size_t i = 0; i < 2; i++)
            from[i] = (mt_kvsource){.data = token_at(m->lease, 0, 0, i, 0, 1),
                                    .head_stride = (ptrdiff_t)geom->head_stride,
                                    .token_stride = (ptrdiff_t)geom->token_bytes};
        CHECK(mt_kvlease_room(m->lease, 0, &step, NULL) == MT_OK);
        token_write(m->lease, 0, 0, 3, 777); /* in place, past the end */
        token_write(m->lease, 0, 0, 4, 778);
        mt_kvlease_write(m->lease, 0, &step, &from[0], &from[1]);
        mt_kvlease_advance(m->lease, 0, &step);
        CHECK(token_shows(m->lease, 0, 0, 3, m->row[0].id[0][1], true));
        CHECK(token_shows(m->lease, 0, 0, 4, m->row[0].id[0][2], true));
        CHECK(token_shows(m->lease, 0, 0, 5, 777, true));
        CHECK(token_shows(m->lease, 0, 0, 6, 778, true));
        mt_kvlease_crop(m->lease, &(size_t){3});
        rig_end(&g);
    }
}

/* Rows 0 and 1 of lease 0 are exposed, and three idle blocks of row 0's extent are not to be
 * dropped: a limit of three blocks suffices for one block of row 0, and not for one of row 1 as
 * well. */
static mlease *
expose_at_the_limit(rig *g)
{
    mlease *m;

    begin(g, RIG_LINUX, 3);
    append(g, lend(g, 0, 1, 0), 3 * BLOCK);
    rig_end_of(g, &g->lease[0]);
    m = lend(g, 0, 2, 0);
    CHECK(rig_expose(g, m) == MT_OK && stats_of(g).idle_bytes == 3 * BLOCK_BYTES);
    return m;
}

/* The row whose tokens could be counted before the call failed, too. */
static void
a_refused_advance_leaves_what_was_written(void)
{
    static uint32_t ids[MODEL_ROWS][MODEL_LAYERS];
    static const size_t both[MODEL_ROWS] = {BLOCK, BLOCK}, one[MODEL_ROWS] = {BLOCK};
    static rig g;
    mlease *m = expose_at_the_limit(&g);

    for (size_t row = 0; row < 2; row++)
        for (size_t layer = 0; layer < 2; layer++)
            ids[row][layer] = rig_scribble(&g, m, row, layer, BLOCK, 0);
    CHECK(rig_advance_all(&g, m, both, ids) == MT_ELIMIT);
    CHECK(stats_of(&g).live_bytes == 0);
    rig_agree(&g);
    CHECK(rig_advance_all(&g, m, one, ids) == MT_OK);
    rig_look_at_all(&g, true);
    for (size_t t = 0; t < BLOCK; t++) /* in no advance yet, and there all the same */
        for (size_t layer = 0; layer < 2; layer++)
            CHECK(token_shows(m->lease, 1, layer, t, ids[1][layer] + (uint32_t)t, true));
    rig_end(&g);
}

/* The limit suffices for the new block of row 0, an idle one, and not for that of row 1 as well. */
static void
a_refused_reorder_leaves_what_was_written(void)
{
    static uint32_t ids[MODEL_ROWS][MODEL_LAYERS];
    static const size_t counts[MODEL_ROWS] = {0, 0, 0, 2}, last[] = {3, 3, 3, 3};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, 4);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    rig_end_of(&g, &g.lease[0]);
    m = lend(&g, 0, 4, 0);
    CHECK(rig_expose(&g, m) == MT_OK);
    for (size_t row = 0; row < 4; row++)
        for (size_t layer = 0; layer < 2; layer++)
            ids[row][layer] = rig_scribble(&g, m, row, layer, 2, 0);
    CHECK(rig_advance_all(&g, m, counts, ids) == MT_OK);
    CHECK(stats_of(&g).live_bytes == BLOCK_BYTES && stats_of(&g).idle_bytes == 3 * BLOCK_BYTES);
    CHECK(rig_reorder(&g, m, last, 4) == MT_ELIMIT); /* and comes back: it is not tried for ever */
    CHECK(stats_of(&g).live_bytes == BLOCK_BYTES);
    rig_agree(&g);
    for (size_t row = 0; row < 4; row++)
        for (size_t layer = 0; layer < 2; layer++)
            for (size_t t = 0; t < 2; t++)
                CHECK(token_shows(m->lease, row, layer, t, ids[row][layer] + (uint32_t)t, true));
    rig_end(&g);
}

/* Pages of a run of blocks go back in one call for each range. */
static void
a_crop_of_an_exposed_row_drops_its_blocks_at_once(void)
{
    static uint32_t ids[MODEL_ROWS][MODEL_LAYERS];
    static const size_t counts[MODEL_ROWS] = {5 * BLOCK}, cut[MODEL_ROWS] = {BLOCK};
    static rig g;
    size_t drops;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 1, 0);
    CHECK(rig_expose(&g, m) == MT_OK);
    for (size_t layer = 0; layer < 2; layer++)
        ids[0][layer] = rig_scribble(&g, m, 0, layer, 5 * BLOCK, 0);
    CHECK(rig_advance_all(&g, m, counts, ids) == MT_OK);
    drops = g.store.drops;
    rig_crop(&g, m, cut);
    CHECK(g.store.drops == drops + RANGES);
    CHECK(stats_of(&g).live_bytes == BLOCK_BYTES && stats_of(&g).dropped == 4);
    m->row[0].scribbled = 0; /* zeros again */
    rig_look(&g, m, 0, 22, true);
    rig_look(&g, m, 1, 22, true);
    rig_end(&g);
}

/* Code asks for more room before it says what it wrote. */
static void
opening_further_keeps_what_was_written(void)
{
    static uint32_t ids[MODEL_ROWS][MODEL_LAYERS];
    static const size_t counts[MODEL_ROWS] = {6, 1};

    for (rig_store store = RIG_LINUX; store <= RIG_STRICT; store += RIG_STRICT) {
        static rig g;
        mlease *m;

        begin(&g, store, SIZE_MAX);
        append(&g, lend(&g, 0, 2, 0), 22);
        rig_end_of(&g, &g.lease[0]);
        m = lend(&g, 0, 2, 22);
        append(&g, m, 1);
        CHECK(rig_reserve(&g, m, 7, false) == MT_OK);
        for (size_t row = 0; row < 2; row++)
            for (size_t layer = 0; layer < 2; layer++)
                ids[row][layer] = rig_scribble(&g, m, row, layer, counts[row], 0);
        CHECK(mt_kvlease_reserve(m->lease, 17, false, NULL) == MT_OK);
        CHECK(rig_advance_all(&g, m, counts, ids) == MT_OK);
        rig_look(&g, m, 0, 17, true);
        rig_look(&g, m, 1, 17, true);
        rig_end(&g);
    }
}

static void
advanced_zeros_take_no_page(void)
{
    static uint32_t none[MODEL_ROWS][MODEL_LAYERS];
    static const size_t counts[MODEL_ROWS] = {15, 15};
    static rig g;
    mlease *m;

    for (rig_store store = RIG_LINUX; store <= RIG_STRICT; store += RIG_STRICT) {
        begin(&g, store, SIZE_MAX);
        m = lend(&g, 0, 2, 0);
        append(&g, m, 1);
        CHECK(rig_advance_all(&g, m, counts, none) == MT_OK);
        CHECK(stats_of(&g).live_bytes == 2 * BLOCK_BYTES);
        rig_look_at_all(&g, true);
        CHECK(stats_of(&g).physical_bytes == 2 * BLOCK_BYTES);
        append(&g, m, 1); /* into a block of zeros; those before it stay without one */
        CHECK(stats_of(&g).live_bytes == 4 * BLOCK_BYTES);
        rig_look_at_all(&g, true);
        rig_end(&g);
    }
}

/* ---- the end of a lease ---- */

static void *
unhold(void *lease)
{
    mt_kvlease_unhold(lease);
    return NULL;
}

static void
a_held_lease_lingers_until_the_last_view_dies(void)
{
    static rig g;
    pthread_t thread;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 2, 22);
    append(&g, m, BLOCK);
    mt_kvlease_hold(m->lease);
    mt_kvlease_hold(m->lease);
    mt_kvlease_release(m->lease);
    m->released = true;
    CHECK(stats_of(&g).lingering == 1 && stats_of(&g).lingering_bytes == 2 * BLOCK_BYTES);
    append(&g, lend(&g, 1, 4, 0), 22); /* elsewhere */
    rig_glance(&g);
    mt_kvlease_unhold(m->lease);
    rig_glance(&g);
    CHECK(stats_of(&g).lingering == 1);
    CHECK(pthread_create(&thread, NULL, unhold, m->lease) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    *m = (mlease){.lease = NULL};
    CHECK(stats_of(&g).lingering == 0 && stats_of(&g).idle_bytes == 2 * BLOCK_BYTES);
    CHECK(stats_of(&g).promised_bytes == 0);
    rig_end(&g);
}

static void
pages_that_linger_for_several_rows_count_once(void)
{
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 2 * BLOCK);
    m = &g.lease[1];
    CHECK(rig_fork(&g, m, &g.lease[0], 3, 0) == MT_OK);
    append(&g, m, 1);
    mt_kvlease_hold(m->lease);
    mt_kvlease_release(m->lease);
    m->released = true;
    for (int again = 0; again < 2; again++) /* counting leaves no mark */
        CHECK(stats_of(&g).lingering_bytes == (2 + 3) * BLOCK_BYTES);
    rig_glance(&g);
    mt_kvlease_unhold(m->lease);
    *m = (mlease){.lease = NULL};
    CHECK(stats_of(&g).lingering_bytes == 0);
    rig_end(&g);
}

static void
a_closed_pool_goes_with_its_last_lease(void)
{
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 1, 1, 0), 22);
    m = lend(&g, 0, 1, 0);
    append(&g, m, BLOCK);
    rig_end_of(&g, &g.lease[1]);
    mt_kvlease_hold(m->lease);
    mt_kvpool_close(g.pool);
    CHECK(g.store.open && mt_ledger_used(g.ledger) == BLOCK_BYTES); /* what was idle is dropped */
    layer_agrees(m, 0, BLOCK, true);
    mt_kvlease_release(m->lease);
    layer_agrees(m, 1, BLOCK, true);
    CHECK(g.store.open);
    mt_kvlease_unhold(m->lease);
    CHECK(!g.store.open && mt_ledger_used(g.ledger) == 0);
    mt_ledger_drop(g.ledger);
    CHECK(g.faults.live == 0);
    mt_kvpool_close(NULL);
}

/* ---- what errors say ---- */

static void
errors_give_the_numbers(void)
{
    static rig g;
    mt_kvlease *lease = NULL;
    mt_error err = {0};
    mlease *m;

    begin(&g, RIG_LINUX, 8);
    CHECK(mt_kvpool_acquire(g.pool, 5, 0, &lease, &err) == MT_ESHAPE);
    CHECK(err.asked == 5 && err.limit == 4 && err.shape == MT_SHAPE_ROWS);
    m = lend(&g, 0, 2, 12);
    CHECK(mt_kvpool_acquire(g.pool, 2, 8, &lease, &err) == MT_ELIMIT && lease == NULL);
    CHECK(err.limit == 8 * BLOCK_BYTES && err.used == 6 * BLOCK_BYTES);
    CHECK(err.asked == 4 * BLOCK_BYTES);
    append(&g, m, 3 * BLOCK);
    CHECK(mt_kvlease_room(m->lease, 0, &(mt_kvstep){.count = 11}, &err) == MT_ESHAPE);
    CHECK(err.asked == 23 && err.limit == 22 && err.shape == MT_SHAPE_TOKENS);
    CHECK(mt_kvlease_room(m->lease, 0, &(mt_kvstep){.count = SIZE_MAX}, &err) == MT_ESHAPE);
    CHECK(mt_kvlease_advance_all(m->lease, &(mt_kvstep){.count = 11}, &err) == MT_ESHAPE);
    /* both rows' new blocks count, though the first alone would fit */
    CHECK(mt_kvlease_room(m->lease, 0, &(mt_kvstep){.count = 5}, &err) == MT_ELIMIT);
    CHECK(err.limit == 8 * BLOCK_BYTES && err.used == 6 * BLOCK_BYTES);
    CHECK(err.asked == 4 * BLOCK_BYTES);
    rig_agree(&g);
    append(&g, m, 4);
    rig_end(&g);
}

static void
a_stream_is_handed_to_the_store(void)
{
    static rig g;

    begin(&g, RIG_STRICT, SIZE_MAX);
    rig_fail(&g, 0);
    CHECK(mt_kvpool_use_stream(g.pool, &g, NULL) == MT_EDEVICE);
    rig_fail(&g, -1);
    CHECK(mt_kvpool_use_stream(g.pool, NULL, NULL) == MT_OK);
    rig_end(&g);
}

int
main(void)
{
    RUN(an_exposed_row_costs_what_is_touched);
    RUN(private_writes_go_where_their_row_goes);
    RUN(private_writes_stay_when_a_call_fails);
    RUN(private_writes_end_with_their_row);
    RUN(tokens_that_overlap_where_they_go_are_moved);
    RUN(a_write_into_a_shared_block_stays_with_its_row);
    RUN(pages_that_linger_for_several_rows_count_once);
    RUN(a_refused_advance_leaves_what_was_written);
    RUN(a_refused_reorder_leaves_what_was_written);
    RUN(a_crop_of_an_exposed_row_drops_its_blocks_at_once);
    RUN(opening_further_keeps_what_was_written);
    RUN(advanced_zeros_take_no_page);
    RUN(a_held_lease_lingers_until_the_last_view_dies);
    RUN(a_closed_pool_goes_with_its_last_lease);
    RUN(errors_give_the_numbers);
    RUN(a_stream_is_handed_to_the_store);
    CHECK_DONE();
}
