/* KV pools under one budget: what one keeps for its next lease is another's when it is short. */
#include "kv/plain.h"

enum { STEPS = 300 };

/* 16 blocks of 32 KiB for both: 4 tokens x 2 layers x K and V x 2 heads of 1 KiB. */
static void
two_pools(rig pool[2], size_t blocks, rig_store store)
{
    rig_setup setup = {.config = steps_config(0), .store = store, .limit_blocks = blocks};
    mt_ledger *ledger;

    dice = rng_seeded(blocks);
    CHECK(mt_ledger_new(&mt_alloc_libc, rig_limit(&setup, rig_page(store)), "both", NULL, &ledger,
                        NULL) == MT_OK);
    for (int i = 0; i < 2; i++)
        rig_join(&pool[i], &setup, ledger, roll, &dice);
    mt_ledger_drop(ledger);
}

static void
an_idle_pool_gives_way(void)
{
    static rig pool[2];
    size_t unit;

    two_pools(pool, 16, RIG_LINUX);
    unit = rig_geom(&pool[0])->block_bytes;
    CHECK(rig_acquire(&pool[0], &pool[0].lease[0], 4, 4 * BLOCK) == MT_OK);
    append(&pool[0], &pool[0].lease[0], 4 * BLOCK);
    CHECK(!mt_kvpool_would_fit(pool[1].pool, 1, 1, 0));
    CHECK(rig_acquire(&pool[1], &pool[1].lease[0], 1, 1) == MT_ELIMIT);
    rig_end_of(&pool[0], &pool[0].lease[0]);
    CHECK(stats_of(&pool[0]).idle_bytes == 16 * unit);

    /* 5 of the 16 blocks: a whole extent at a time goes */
    CHECK(mt_kvpool_would_fit(pool[1].pool, 1, 5 * BLOCK, 0));
    CHECK(rig_acquire(&pool[1], &pool[1].lease[0], 1, 5 * BLOCK) == MT_OK);
    CHECK(stats_of(&pool[0]).idle_bytes == 8 * unit);
    CHECK(stats_of(&pool[0]).physical_bytes == 8 * unit);
    append(&pool[1], &pool[1].lease[0], 5 * BLOCK);
    rig_agree(&pool[0]);
    rig_agree(&pool[1]);
    rig_end(&pool[0]);
    rig_end(&pool[1]);
}

/* A lease that grows past its hint asks too; the other's live blocks stay. */
static void
a_growing_row_takes_what_is_idle_and_no_more(void)
{
    static rig pool[2];
    mlease *kept, *grows;
    size_t counts[MODEL_ROWS] = {BLOCK}, blocks = 0;

    two_pools(pool, 10, RIG_LINUX);
    kept = &pool[0].lease[0];
    grows = &pool[1].lease[0];
    CHECK(rig_acquire(&pool[0], kept, 1, 0) == MT_OK);
    append(&pool[0], kept, 2 * BLOCK);
    CHECK(rig_acquire(&pool[0], &pool[0].lease[1], 3, 0) == MT_OK);
    append(&pool[0], &pool[0].lease[1], 2 * BLOCK);
    rig_end_of(&pool[0], &pool[0].lease[1]);
    CHECK(rig_acquire(&pool[1], grows, 2, 0) == MT_OK);
    counts[1] = BLOCK;
    while (rig_update(&pool[1], grows, 0, counts, true) == MT_OK)
        blocks += 2;
    CHECK(blocks == 8); /* all but the two that live */
    CHECK(stats_of(&pool[0]).idle_bytes == 0);
    rig_look_at_all(&pool[0], true);
    rig_look_at_all(&pool[1], true);
    rig_end(&pool[0]);
    rig_end(&pool[1]);
}

/* Promised blocks that are idle are not to spare. */
static void
what_is_promised_is_not_given_away(void)
{
    static rig pool[2];

    two_pools(pool, 8, RIG_LINUX);
    CHECK(rig_acquire(&pool[0], &pool[0].lease[0], 2, 0) == MT_OK);
    append(&pool[0], &pool[0].lease[0], 4 * BLOCK);
    rig_end_of(&pool[0], &pool[0].lease[0]);
    CHECK(rig_acquire(&pool[0], &pool[0].lease[0], 2, 3 * BLOCK) == MT_OK);
    CHECK(rig_acquire(&pool[1], &pool[1].lease[0], 1, 3 * BLOCK) == MT_ELIMIT);
    rig_agree(&pool[0]);
    append(&pool[0], &pool[0].lease[0], 3 * BLOCK);
    rig_end(&pool[0]);
    rig_end(&pool[1]);
}

/* Who is refused and waits would else wake itself, and try again at once, for ever. */
static void
a_refused_try_wakes_nobody(void)
{
    static const size_t cut[MODEL_ROWS] = {BLOCK}, more[MODEL_ROWS] = {1};
    static rig pool[2];
    mt_ledger *ledger;
    uint64_t before;

    two_pools(pool, 4, RIG_LINUX);
    ledger = pool[0].ledger;
    CHECK(rig_acquire(&pool[0], &pool[0].lease[0], 1, 0) == MT_OK);
    append(&pool[0], &pool[0].lease[0], 4 * BLOCK);
    before = mt_ledger_changes(ledger);
    CHECK(rig_acquire(&pool[0], &pool[0].lease[1], 1, 1) == MT_ELIMIT);
    CHECK(rig_acquire(&pool[1], &pool[1].lease[0], 1, 1) == MT_ELIMIT);
    CHECK(rig_update(&pool[0], &pool[0].lease[0], 0, more, true) == MT_ELIMIT);
    CHECK(mt_ledger_changes(ledger) == before);

    /* idle blocks stay reserved, and are room for others all the same */
    rig_crop(&pool[0], &pool[0].lease[0], cut);
    CHECK(stats_of(&pool[0]).idle_bytes > 0 && mt_ledger_changes(ledger) > before);
    CHECK(rig_acquire(&pool[1], &pool[1].lease[0], 1, 1) == MT_OK);
    rig_end(&pool[0]);
    rig_end(&pool[1]);
}

static void
two_pools_at_random_do_as_their_models(void)
{
    static rig pool[2];

    for (size_t seed = 0; seed < 12; seed++) {
        two_pools(pool, 10 + 3 * seed, seed % 3 == 2 ? RIG_STRICT : RIG_LINUX);
        for (size_t step = 0; step < STEPS; step++) {
            rig *g = &pool[rng_below(&dice, 2)];

            steps_one(g);
            rig_agree(&pool[0]);
            rig_agree(&pool[1]);
            CHECK(stats_of(&pool[0]).reserved_bytes + stats_of(&pool[1]).reserved_bytes ==
                  mt_ledger_used(g->ledger));
            if (step % 10 == 0) rig_look_at_all(g, false);
        }
        rig_end(&pool[0]);
        rig_end(&pool[1]);
    }
}

int
main(void)
{
    RUN(an_idle_pool_gives_way);
    RUN(a_growing_row_takes_what_is_idle_and_no_more);
    RUN(what_is_promised_is_not_given_away);
    RUN(a_refused_try_wakes_nobody);
    RUN(two_pools_at_random_do_as_their_models);
    CHECK_DONE();
}
