/* A KV pool's promises as numbers: pages, mappings, copies. What random operations show is in
 * test_model.c. */
#include "kv/plain.h"

/* ---- pages ---- */

static void
physical_bytes_are_the_tokens_in_whole_blocks(void)
{
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 3, 0);
    CHECK(stats_of(&g).physical_bytes == 0 && stats_of(&g).reserved_bytes == 0);
    append(&g, m, 1);
    CHECK(stats_of(&g).physical_bytes == 3 * BLOCK_BYTES);
    append(&g, m, BLOCK - 1);
    CHECK(stats_of(&g).physical_bytes == 3 * BLOCK_BYTES);
    append(&g, m, 2 * BLOCK + 1);
    CHECK(stats_of(&g).physical_bytes == 12 * BLOCK_BYTES);
    CHECK(stats_of(&g).payload_bytes == (size_t)3 * 13 * RANGES * 1024);
    rig_end(&g);
}

static void
a_hint_is_reserved_and_not_physical(void)
{
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, 12);
    m = lend(&g, 0, 2, 4 * BLOCK + 1);
    CHECK(stats_of(&g).promised_bytes == 10 * BLOCK_BYTES);
    CHECK(stats_of(&g).reserved_bytes == 10 * BLOCK_BYTES && stats_of(&g).physical_bytes == 0);
    CHECK(rig_acquire(&g, &g.lease[1], 1, 3 * BLOCK) == MT_ELIMIT);
    append(&g, m, 4 * BLOCK + 1);
    CHECK(stats_of(&g).promised_bytes == 0);
    CHECK(stats_of(&g).reserved_bytes == 10 * BLOCK_BYTES);
    rig_end(&g);
}

static void
a_second_generation_takes_nothing_and_maps_nothing(rig_store store)
{
    static rig g;
    static faulty_store first;
    mt_kvstats was = {0}, is;

    begin(&g, store, SIZE_MAX);
    for (int round = 0; round < 3; round++) {
        mlease *m = lend(&g, 0, 3, 18);

        for (int t = 0; t < 18; t++)
            append(&g, m, 1);
        rig_end_of(&g, m);
        is = stats_of(&g);
        if (round > 0) {
            CHECK(is.taken == was.taken && is.map_calls == was.map_calls && is.dropped == 0);
            CHECK(is.recycled == was.recycled + 15 && is.physical_bytes == was.physical_bytes);
            CHECK(g.store.takes == first.takes && g.store.extends == first.extends);
        }
        was = is;
        first = g.store;
    }
    CHECK(was.idle_bytes == 15 * BLOCK_BYTES);
    rig_end(&g);
}

static void
a_second_generation_costs_no_page(void)
{
    a_second_generation_takes_nothing_and_maps_nothing(RIG_LINUX);
    a_second_generation_takes_nothing_and_maps_nothing(RIG_STRICT);
}

static void
a_crop_gives_blocks_back_to_the_pool(void)
{
    static const size_t lengths[MODEL_ROWS] = {BLOCK + 1, 22, 0};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 3, 0);
    append(&g, m, 4 * BLOCK);
    rig_crop(&g, m, lengths);
    rig_agree(&g);
    CHECK(stats_of(&g).live_bytes == (2 + 4) * BLOCK_BYTES);
    CHECK(stats_of(&g).idle_bytes == 6 * BLOCK_BYTES);
    rig_look_at_all(&g, true);
    append(&g, m, 2);
    CHECK(stats_of(&g).recycled == 2); /* row 2's first; another for row 1's fifth */
    CHECK(stats_of(&g).physical_bytes == 12 * BLOCK_BYTES && stats_of(&g).dropped == 0);
    rig_end(&g);
}

/* ---- trim ---- */

/* What a view shows past a shorter row's end is made zeros a block at a time. */
static void
ragged_rows_are_cleaned_once_a_block(void)
{
    static const size_t ends[MODEL_ROWS] = {1, 2};
    static rig g;
    size_t zeros;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    m = lend(&g, 0, 2, 0);
    for (size_t layer = 0; layer < 2; layer++)
        CHECK(rig_update(&g, m, layer, ends, false) == MT_OK);
    zeros = g.store.zeros;
    append(&g, m, 1);
    append(&g, m, 1);
    CHECK(g.store.zeros == zeros);
    rig_look(&g, m, 0, BLOCK, true);
    rig_look(&g, m, 1, BLOCK, true);
    rig_end(&g);
}

static void
trim_drops_what_was_used_longest_ago(void)
{
    static rig g;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 2 * BLOCK);
    append(&g, lend(&g, 1, 1, 0), 3 * BLOCK);
    append(&g, lend(&g, 2, 1, 0), 4 * BLOCK);
    rig_end_of(&g, &g.lease[1]);
    rig_end_of(&g, &g.lease[0]);
    CHECK(mt_kvpool_trim(g.pool, 9 * BLOCK_BYTES) == 0);
    CHECK(mt_kvpool_trim(g.pool, 8 * BLOCK_BYTES) == 3 * BLOCK_BYTES);
    CHECK(stats_of(&g).idle_bytes == 2 * BLOCK_BYTES);
    CHECK(stats_of(&g).physical_bytes == 6 * BLOCK_BYTES);
    CHECK(mt_kvpool_trim(g.pool, 0) == 2 * BLOCK_BYTES); /* what lives stays */
    CHECK(stats_of(&g).physical_bytes == 4 * BLOCK_BYTES && stats_of(&g).dropped == 5);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

static void
trim_keeps_addresses(void)
{
    static rig g;
    size_t address_bytes;
    void *base;

    begin(&g, RIG_LINUX, SIZE_MAX);
    base = mt_kvlease_base(lend(&g, 0, 2, 22)->lease);
    append(&g, &g.lease[0], 22);
    rig_end_of(&g, &g.lease[0]);
    address_bytes = stats_of(&g).address_bytes;
    CHECK(mt_kvpool_trim(g.pool, 0) == 12 * BLOCK_BYTES && stats_of(&g).reserved_bytes == 0);
    CHECK(mt_kvlease_base(lend(&g, 0, 2, 22)->lease) == base);
    append(&g, &g.lease[0], 22);
    CHECK(stats_of(&g).address_bytes == address_bytes && g.store.extends == 1);
    rig_end(&g);
}

/* ---- fork ---- */

static void
a_fork_stores_the_prompt_once(void)
{
    static rig g;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
    CHECK(stats_of(&g).live_bytes == 3 * BLOCK_BYTES);
    CHECK(stats_of(&g).shared_bytes == 3 * BLOCK_BYTES && stats_of(&g).rows == 5);
    rig_look_at_all(&g, true);
    append(&g, &g.lease[1], 1); /* a block of its own for each; none is copied */
    CHECK(stats_of(&g).live_bytes == 7 * BLOCK_BYTES && stats_of(&g).copied == 0);
    CHECK(stats_of(&g).physical_bytes == 7 * BLOCK_BYTES);
    rig_end_of(&g, &g.lease[0]);
    CHECK(stats_of(&g).live_bytes == 7 * BLOCK_BYTES); /* the children have it still */
    rig_look_at_all(&g, true);
    rig_end_of(&g, &g.lease[1]);
    CHECK(stats_of(&g).live_bytes == 0);
    rig_end(&g);
}

static void
a_write_copies_just_the_block_that_is_shared(void)
{
    static rig g;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK + 1);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
    append(&g, &g.lease[1], 1);
    CHECK(stats_of(&g).copied == 4 && stats_of(&g).live_bytes == (4 + 4) * BLOCK_BYTES);
    append(&g, &g.lease[0], 1); /* the last one to name it writes in place */
    CHECK(stats_of(&g).copied == 4);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

static void
a_fork_takes_one_mapping_a_row(void)
{
    static rig g;
    size_t before;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    before = faulty_store_maps(&g.store);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
    rig_look_at_all(&g, true);
    CHECK(faulty_store_maps(&g.store) - before == 4);
    before = faulty_store_maps(&g.store);
    rig_end_of(&g, &g.lease[1]); /* no view is left: one call forgets private writes */
    CHECK(faulty_store_maps(&g.store) == before && g.store.settles == 4);
    rig_end(&g);
}

/* What a fork mapped stays mapped after it, though no page is counted there: neither the prompt's
 * nor those that the rows copied or appended take another call. */
static void
a_prompt_that_is_forked_again_is_not_mapped_again(void)
{
    for (size_t partial = 0; partial < 2; partial++) {
        static rig g;
        size_t before = 0;

        begin(&g, RIG_LINUX, SIZE_MAX);
        append(&g, lend(&g, 0, 1, 0), 2 * BLOCK + partial);
        for (int round = 0; round < 4; round++) {
            before = faulty_store_maps(&g.store);
            CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
            for (size_t i = 0; i < 2 * BLOCK; i++)
                append(&g, &g.lease[1], 1);
            rig_look_at_all(&g, true);
            CHECK(partial > 0 || mt_gauge_read(&g.again) == (size_t)4 * 2 * BLOCK_BYTES);
            rig_end_of(&g, &g.lease[1]);
            CHECK(partial > 0 || mt_gauge_read(&g.again) == 0);
            CHECK(mt_kvpool_check(g.pool));
        }
        CHECK(faulty_store_maps(&g.store) == before && stats_of(&g).dropped == 0);
        rig_end(&g);
    }
}

/* Where a process may have few stretches, rows that are over leave none. */
static void
a_pool_with_few_mappings_keeps_none(void)
{
    static rig g;

    begin(&g, RIG_FEW_MAPS, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), BLOCK);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 2, 0) == MT_OK);
    append(&g, &g.lease[1], 1);
    CHECK(stats_of(&g).maps > 10);
    rig_end_of(&g, &g.lease[1]);
    CHECK(stats_of(&g).maps <= 10);
    rig_end(&g);
}

/* A longer generation in a pool of idle blocks: no row takes what lies in another row's extent. */
static void
rows_take_what_lies_in_their_own_extents_first(void)
{
    static rig g;
    size_t before;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 4, 0), 2 * BLOCK);
    rig_end_of(&g, &g.lease[0]);
    before = faulty_store_maps(&g.store);
    append(&g, lend(&g, 0, 4, 0), 4 * BLOCK);
    CHECK(faulty_store_maps(&g.store) == before && stats_of(&g).recycled == 8);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* Of idle blocks that lie elsewhere each row takes a run, which it maps by one call a range. */
static void
rows_take_idle_blocks_in_runs(void)
{
    static rig g;
    size_t before;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
    append(&g, &g.lease[1], 2 * BLOCK);
    rig_end_of(&g, &g.lease[1]);
    rig_end_of(&g, &g.lease[0]);
    append(&g, lend(&g, 0, 1, 0), BLOCK);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
    append(&g, &g.lease[1], 1);
    before = faulty_store_maps(&g.store);
    append(&g, &g.lease[1], 2 * BLOCK - 1);
    CHECK(faulty_store_maps(&g.store) == before && stats_of(&g).taken == 3 + 4 * 2);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* As the resident set counts them, once views of all layers have been there. */
static void
pages_that_are_mapped_again_are_counted(void)
{
    static rig g;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    CHECK(mt_gauge_read(&g.again) == 0 && g.again.once == 3 * (size_t)BLOCK_BYTES);
    CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 4, 0) == MT_OK);
    CHECK(mt_gauge_read(&g.again) == 0); /* nobody has looked */
    rig_look(&g, &g.lease[1], 0, 3 * BLOCK, true);
    rig_look(&g, &g.lease[1], 1, 3 * BLOCK, true);
    CHECK(mt_gauge_read(&g.again) == (size_t)4 * 3 * BLOCK_BYTES);
    append(&g, &g.lease[1], 1);
    CHECK(mt_gauge_read(&g.again) == (size_t)4 * 3 * BLOCK_BYTES);
    rig_end_of(&g, &g.lease[1]);
    CHECK(mt_gauge_read(&g.again) == 0);
    rig_end(&g);
}

/* What a row that is over showed counts no more for the row that takes its blocks. */
static void
an_idle_block_that_another_row_takes_is_not_mapped_again(void)
{
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), BLOCK);
    m = lend(&g, 1, 1, 0);
    append(&g, m, BLOCK);
    rig_look_at_all(&g, true);
    rig_end_of(&g, &g.lease[0]);
    append(&g, m, BLOCK);
    rig_look_at_all(&g, true);
    CHECK(stats_of(&g).recycled == 1 && stats_of(&g).taken == 2);
    CHECK(mt_gauge_read(&g.again) == 0);
    rig_end(&g);
}

/* Rows of differing lengths, with and without a hint: whatever is idle serves. */
static void
idle_blocks_serve_any_row_at_any_place(void)
{
    static const size_t tokens[] = {22, 5, 13, 22, 9, 17, 1, 22};

    for (rig_store store = RIG_LINUX; store <= RIG_STRICT; store += RIG_STRICT)
        for (size_t hint = 0; hint < 2; hint++) {
            static rig g;
            size_t taken = 0;

            begin(&g, store, SIZE_MAX);
            for (size_t i = 0; i < sizeof tokens / sizeof *tokens; i++) {
                append(&g, lend(&g, 0, 1, hint * tokens[i]), tokens[i]);
                CHECK(rig_fork(&g, &g.lease[1], &g.lease[0], 3, 0) == MT_OK);
                rig_end_of(&g, &g.lease[0]);
                if (tokens[i] < 22) append(&g, &g.lease[1], 22 - tokens[i] < 4 ? 1 : 4);
                rig_end_of(&g, &g.lease[1]);
                taken = mt_size_max(taken, stats_of(&g).peak_bytes / rig_geom(&g)->block_bytes);
            }
            CHECK(stats_of(&g).taken == taken && stats_of(&g).dropped == 0);
            rig_end(&g);
        }
}

/* Past what update writes nobody is to write, but code does; the others must not see it. */
static void
a_stray_write_stays_with_its_row(void)
{
    static rig g;
    mlease *prompt, *group;

    begin(&g, RIG_LINUX, SIZE_MAX);
    prompt = lend(&g, 0, 1, 0);
    append(&g, prompt, 2 * BLOCK);
    for (int round = 0; round < 3; round++) {
        group = &g.lease[1];
        CHECK(rig_fork(&g, group, prompt, 2, 0) == MT_OK);
        rig_look(&g, group, 0, 2 * BLOCK, true); /* nothing is left of the round before */
        token_write(group->lease, 0, 0, 3, 999);
        CHECK(token_shows(group->lease, 0, 0, 3, 999, true));
        CHECK(token_shows(group->lease, 1, 0, 3, prompt->row[0].id[0][3], true));
        rig_look(&g, prompt, 0, 2 * BLOCK, true);
        if (round == 1) rig_fail(&g, 0); /* what cannot be forgotten is mapped anew */
        rig_end_of(&g, group);
        rig_fail(&g, -1);
    }
    CHECK(stats_of(&g).physical_bytes == 2 * BLOCK_BYTES);
    rig_end(&g);
}

static void
would_fit_counts_a_shared_prompt_once(void)
{
    static rig g;

    begin(&g, RIG_LINUX, 10);
    CHECK(mt_kvpool_would_fit(g.pool, 4, 3 * BLOCK, 2 * BLOCK)); /* 2 + 4 x 1 */
    CHECK(!mt_kvpool_would_fit(g.pool, 4, 3 * BLOCK, 0));        /* 12 */
    CHECK(mt_kvpool_would_fit(g.pool, 4, 4 * BLOCK, 2 * BLOCK)); /* 2 + 4 x 2 */
    CHECK(!mt_kvpool_would_fit(g.pool, 4, 4 * BLOCK, 2 * BLOCK - 1));
    append(&g, lend(&g, 0, 1, 0), BLOCK);
    CHECK(!mt_kvpool_would_fit(g.pool, 4, 4 * BLOCK, 2 * BLOCK));
    CHECK(!mt_kvpool_would_fit(g.pool, 0, 1, 0) && !mt_kvpool_would_fit(g.pool, 5, 1, 0));
    CHECK(!mt_kvpool_would_fit(g.pool, 1, 23, 0));
    rig_end(&g);
}

/* ---- reorder ---- */

static void
a_reorder_shares_full_blocks_and_copies_the_last(void)
{
    static const size_t all_of_one[MODEL_ROWS] = {1, 1, 1, 1};
    static rig g;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 4, 0), 2 * BLOCK + 1);
    CHECK(rig_reorder(&g, &g.lease[0], all_of_one, 4) == MT_OK);
    CHECK(stats_of(&g).copied == 3 && stats_of(&g).taken == 12); /* over their own last blocks */
    CHECK(stats_of(&g).live_bytes == (2 + 4) * BLOCK_BYTES);
    CHECK(stats_of(&g).shared_bytes == 2 * BLOCK_BYTES);
    rig_look_at_all(&g, true);
    append(&g, &g.lease[0], 1);
    CHECK(stats_of(&g).copied == 3);
    rig_end(&g);
}

static void
rows_that_change_places_need_one_block_more(void)
{
    static const size_t swap[] = {1, 0, 3, 2};
    static rig g;

    begin(&g, RIG_LINUX, 13);
    append(&g, lend(&g, 0, 4, 0), 2 * BLOCK + 1);
    CHECK(rig_reorder(&g, &g.lease[0], swap, 4) == MT_OK);
    CHECK(stats_of(&g).copied == 4 && stats_of(&g).live_bytes == 12 * BLOCK_BYTES);
    CHECK(stats_of(&g).idle_bytes == BLOCK_BYTES && stats_of(&g).peak_bytes == 13 * BLOCK_BYTES);
    rig_look_at_all(&g, true);
    rig_end(&g);
    begin(&g, RIG_LINUX, 12);
    append(&g, lend(&g, 0, 4, 0), 2 * BLOCK + 1);
    CHECK(rig_reorder(&g, &g.lease[0], swap, 4) == MT_ELIMIT);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

static void
rings_at_several_places_need_one_block_for_all(void)
{
    static const size_t swap[] = {1, 0, 3, 2}, ragged[MODEL_ROWS] = {9, 9, 1, 1};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, 9);
    m = lend(&g, 0, 4, 0);
    for (size_t layer = 0; layer < 2; layer++)
        CHECK(rig_update(&g, m, layer, ragged, false) == MT_OK);
    CHECK(rig_reorder(&g, m, swap, 4) == MT_OK); /* 2 x 3 + 2 x 1 blocks, and one */
    rig_look_at_all(&g, true);
    CHECK(stats_of(&g).peak_bytes == 9 * BLOCK_BYTES);
    rig_end(&g);
}

/* 40 stretches are all there may be: rows that share much are copied instead, and correct. */
static void
a_pool_with_few_mappings_copies(void)
{
    static const size_t beams[MODEL_ROWS] = {3, 0, 0, 1};
    static rig g;

    begin(&g, RIG_FEW_MAPS, SIZE_MAX);
    append(&g, lend(&g, 0, 4, 0), BLOCK + 1);
    for (int i = 0; i < 6; i++) {
        CHECK(rig_reorder(&g, &g.lease[0], beams, 4) == MT_OK);
        append(&g, &g.lease[0], 2);
        CHECK(stats_of(&g).maps <= 40 + 4 * 2); /* a moved row has one stretch a layer */
        rig_look_at_all(&g, true);
    }
    rig_end(&g);
}

int
main(void)
{
    RUN(physical_bytes_are_the_tokens_in_whole_blocks);
    RUN(a_hint_is_reserved_and_not_physical);
    RUN(a_second_generation_costs_no_page);
    RUN(a_crop_gives_blocks_back_to_the_pool);
    RUN(ragged_rows_are_cleaned_once_a_block);
    RUN(trim_drops_what_was_used_longest_ago);
    RUN(trim_keeps_addresses);
    RUN(a_fork_stores_the_prompt_once);
    RUN(a_write_copies_just_the_block_that_is_shared);
    RUN(a_fork_takes_one_mapping_a_row);
    RUN(a_prompt_that_is_forked_again_is_not_mapped_again);
    RUN(a_pool_with_few_mappings_keeps_none);
    RUN(rows_take_what_lies_in_their_own_extents_first);
    RUN(rows_take_idle_blocks_in_runs);
    RUN(pages_that_are_mapped_again_are_counted);
    RUN(an_idle_block_that_another_row_takes_is_not_mapped_again);
    RUN(idle_blocks_serve_any_row_at_any_place);
    RUN(a_stray_write_stays_with_its_row);
    RUN(would_fit_counts_a_shared_prompt_once);
    RUN(a_reorder_shares_full_blocks_and_copies_the_last);
    RUN(rows_that_change_places_need_one_block_more);
    RUN(rings_at_several_places_need_one_block_for_all);
    RUN(a_pool_with_few_mappings_copies);
    CHECK_DONE();
}
