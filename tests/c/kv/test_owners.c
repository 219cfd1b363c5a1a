/* Views that were taken before rows shrank, changed places or ended never show or reach what is
 * somebody else's, whatever is done in whatever order: by hand, and at random with calls of the
 * world failing. */
#include "kv/owners.h"
#include "kv/plain.h"

enum { STEPS = 120, SEEDS = 20 };

/* ---- by hand ---- */

/* Rows let go of blocks that nobody else has. What code wrote there privately goes into no block
 * when the row takes one of them again. */
static void
what_was_written_privately_goes_with_a_reorder(void)
{
    static const size_t third[] = {2, 2, 2, 3}, one[MODEL_ROWS] = {1, 1, 1, 1};
    static rig g;
    mlease *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 2, 0), 2 * BLOCK);
    m = &g.lease[1];
    CHECK(rig_fork(&g, m, &g.lease[0], 2, 0) == MT_OK);
    rig_look_at_all(&g, true);
    rig_end_of(&g, &g.lease[0]);
    token_write(m->lease, 0, 0, 1, 999);
    CHECK(rig_reorder(&g, m, third, 4) == MT_OK);
    rig_crop(&g, m, one);
    append(&g, m, 3);
    rig_look_at_all(&g, true);
    CHECK(mt_kvpool_check(g.pool));
    rig_end(&g);
}

/* Row 0 of a fork is alone with the prompt's last block and wrote to it privately. It becomes row
 * 1, which is copied into that block. Each call fails in turn: then row 0 has what it wrote. */
static void
a_reorder_shows_what_is_copied_and_not_what_was_written_before(void)
{
    for (long n = -1; n < 60; n++) {
        static const size_t second[] = {1, 1}, lengths[] = {3, 2}, one[MODEL_ROWS] = {0, 1};
        static rig g;
        mlease *prompt, *m;

        begin(&g, RIG_LINUX, SIZE_MAX);
        prompt = lend(&g, 0, 1, 0);
        append(&g, prompt, 3);
        m = &g.lease[1];
        CHECK(rig_fork(&g, m, prompt, 2, 0) == MT_OK);
        rig_end_of(&g, prompt);
        rig_look_at_all(&g, true);
        m->row[0].id[1][1] = 999;
        token_write(m->lease, 0, 1, 1, 999);
        rig_crop(&g, m, lengths);
        for (size_t layer = 0; layer < rig_layers(&g); layer++)
            CHECK(rig_update(&g, m, layer, one, false) == MT_OK);
        rig_fail(&g, n);
        (void)rig_reorder(&g, m, second, 2);
        rig_fail(&g, -1);
        rig_look_at_all(&g, true);
        append(&g, m, 1);
        rig_look_at_all(&g, true);
        rig_end(&g);
    }
}

/* Row 0 of a fork wrote over a token of the prompt, which it has for itself. It becomes row 1,
 * which names the same block and did not. */
static void
a_reorder_drops_what_was_written_over_shared_tokens(void)
{
    static const size_t second[] = {1, 1};
    static rig g;
    mlease *prompt, *m;

    begin(&g, RIG_LINUX, SIZE_MAX);
    prompt = lend(&g, 0, 1, 0);
    append(&g, prompt, 2 * BLOCK);
    m = &g.lease[1];
    CHECK(rig_fork(&g, m, prompt, 2, 0) == MT_OK);
    rig_look_at_all(&g, true);
    m->row[0].id[1][1] = 999;
    token_write(m->lease, 0, 1, 1, 999);
    rig_look_at_all(&g, true);
    CHECK(rig_reorder(&g, m, second, 2) == MT_OK);
    rig_look_at_all(&g, true);
    append(&g, m, 1);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* Forks that cannot leave the prompt's last block, for want of stretches, go on naming it: what
 * they wrote over other tokens is nowhere else. */
static void
forks_that_shrink_keep_what_they_wrote(void)
{
    static const size_t less[MODEL_ROWS] = {BLOCK, BLOCK, BLOCK, BLOCK};
    static rig g;
    mlease *m;

    begin(&g, RIG_FEW_MAPS, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    m = &g.lease[1];
    CHECK(rig_fork(&g, m, &g.lease[0], 4, 0) == MT_OK);
    rig_look_at_all(&g, true);
    for (size_t row = 0; row < 4; row++) {
        m->row[row].id[0][1] = (uint32_t)(999 + row);
        token_write(m->lease, row, 0, 1, (uint32_t)(999 + row));
    }
    rig_crop(&g, m, less);
    rig_look_at_all(&g, true);
    for (size_t row = 0; row < 4; row++)
        token_write(m->lease, row, 0, 2 * BLOCK, 888); /* by a view from before */
    rig_look_at_all(&g, true);
    append(&g, m, 1);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* The only idle block is one that a shorter row may show still: it leaves that, and the page goes
 * on to the other row. */
static void
an_idle_block_in_an_old_view_is_taken_before_a_new_page(void)
{
    static const size_t two[MODEL_ROWS] = {2 * BLOCK};
    static rig g;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), 3 * BLOCK);
    rig_crop(&g, &g.lease[0], two);
    append(&g, lend(&g, 1, 1, 0), BLOCK);
    CHECK(stats_of(&g).recycled == 1 && stats_of(&g).dropped == 0);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* Rows that shrank need more stretches to leave their blocks than there are: those that find none
 * keep them, and all go on. */
static void
rows_that_shrank_leave_the_process_its_mappings(void)
{
    static const size_t less[MODEL_ROWS] = {1, 1, 1, 1};
    static rig g;
    mlease *m;

    begin(&g, RIG_FEW_MAPS, SIZE_MAX);
    m = lend(&g, 0, 4, 0);
    append(&g, m, 2 * BLOCK);
    append(&g, lend(&g, 1, 1, 0), BLOCK);
    rig_end_of(&g, &g.lease[1]);
    rig_crop(&g, m, less);
    CHECK(stats_of(&g).idle_bytes == 5 * BLOCK_BYTES);
    (void)mt_kvpool_trim(g.pool, 0);
    CHECK(stats_of(&g).idle_bytes < 4 * BLOCK_BYTES && stats_of(&g).idle_bytes > 0);
    CHECK(stats_of(&g).maps <= FEW_MAPS);
    append(&g, lend(&g, 1, 4, 0), 2 * BLOCK);
    rig_look_at_all(&g, true);
    append(&g, m, BLOCK);
    rig_look_at_all(&g, true);
    rig_end(&g);
}

/* The addresses of a row that is over map their own extent for writing; a fork that is lent them
 * and names a block which lies there, as others do, writes to none of them. */
static void
a_fork_in_the_extent_of_its_prompt_writes_to_itself_alone(void)
{
    static rig g;
    mt_kvlease *rest = NULL;
    mlease *child, *last;

    begin(&g, RIG_LINUX, SIZE_MAX);
    append(&g, lend(&g, 0, 1, 0), BLOCK);
    child = &g.lease[1];
    CHECK(rig_fork(&g, child, &g.lease[0], 1, 0) == MT_OK);
    rig_end_of(&g, &g.lease[0]);
    CHECK(mt_kvpool_acquire(g.pool, 2, 0, &rest, NULL) == MT_OK);
    for (size_t i = 2; i < RIG_LEASES; i++)
        (void)lend(&g, i, 4, 0);
    last = &g.lease[0];
    CHECK(rig_fork(&g, last, child, 1, 0) == MT_OK);
    CHECK(mt_kvlease_base(last->lease) < mt_kvlease_base(child->lease)); /* the prompt's place */
    rig_look(&g, last, 0, BLOCK, true);
    rig_look(&g, child, 0, BLOCK, true);
    token_write(last->lease, 0, 0, 1, 999);
    rig_look(&g, child, 0, BLOCK, true);
    CHECK(token_shows(last->lease, 0, 0, 1, 999, true));
    mt_kvlease_release(rest);
    rig_end(&g);
}

/* ---- at random ---- */

/* As steps_one, but for code that advances over what it wrote into the views: here that is
 * everything. */
static void
one_step(rig *g)
{
    mlease *m = steps_any(g);
    size_t what = rig_roll(g, 12);

    rig_fail(g, rig_roll(g, 4) == 0 ? (long)rig_roll(g, 12) : -1);
    if (m == NULL || what < 2)
        (void)steps_acquire(g);
    else if (what < 6)
        (void)steps_update(g, m);
    else if (what < 8)
        (void)steps_crop(g, m);
    else if (what < 9)
        (void)steps_reorder(g, m);
    else if (what < 10)
        (void)steps_fork(g, m);
    else if (what < 11)
        (void)steps_trim(g);
    else
        rig_end_of(g, &g->lease[rig_roll(g, RIG_LEASES)]);
    rig_fail(g, -1);
    rig_agree(g);
    rig_glance(g);
}

static void
run_at_random(rig_store store, size_t config, uint64_t seed)
{
    static rig g;
    static owners o;
    rng r = rng_seeded(seed * 1000 + config * 10 + store + 5);
    rig_setup setup = {.config = steps_config(config), .store = store, .limit_blocks = SIZE_MAX};

    if (seed % 2 == 1) setup.limit_blocks = 4 + rng_below(&r, 40);
    rig_begin(&g, &setup, roll, &r);
    owners_init(&o);
    for (size_t step = 0; step < STEPS; step++) {
        one_step(&g);
        owners_step(&o, &g);
        if (step % 5 == 0) rig_look_at_all(&g, false);
    }
    owners_fini(&o);
    rig_end(&g);
}

static void
no_old_view_reaches_what_is_another_rows(void)
{
    for (size_t config = 0; config < STEPS_CONFIGS; config++)
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            run_at_random(RIG_LINUX, config, seed);
            run_at_random(RIG_FEW_MAPS, config, seed);
        }
}

int
main(void)
{
    RUN(what_was_written_privately_goes_with_a_reorder);
    RUN(a_reorder_shows_what_is_copied_and_not_what_was_written_before);
    RUN(a_reorder_drops_what_was_written_over_shared_tokens);
    RUN(forks_that_shrink_keep_what_they_wrote);
    RUN(an_idle_block_in_an_old_view_is_taken_before_a_new_page);
    RUN(rows_that_shrank_leave_the_process_its_mappings);
    RUN(a_fork_in_the_extent_of_its_prompt_writes_to_itself_alone);
    RUN(no_old_view_reaches_what_is_another_rows);
    CHECK_DONE();
}
