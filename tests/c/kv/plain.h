/* plain.h -- a pool of one small geometry and short names for what most tests do with it. */
#ifndef MT_TESTS_KV_PLAIN_H
#define MT_TESTS_KV_PLAIN_H

#include "kv/steps.h"

/* steps_config(0): 2 layers of 2 heads of 1 KiB, 22 tokens, 4 rows; 4 tokens and 32 KiB a block. */
enum { BLOCK = 4, BLOCK_BYTES = 2 * 2 * 2 * 4096, RANGES = 2 * 2 * 2 };

static rng dice;

static inline size_t
roll(void *ctx, size_t n)
{
    return rng_below(ctx, n);
}

static inline void
begin(rig *g, rig_store store, size_t limit_blocks)
{
    rig_setup setup = {.config = steps_config(0), .store = store, .limit_blocks = limit_blocks};

    dice = rng_seeded(7);
    rig_begin(g, &setup, roll, &dice);
    CHECK(rig_geom(g)->block_bytes == (store == RIG_STRICT_8K ? 2 : 1) * BLOCK_BYTES);
}

static inline mt_kvstats
stats_of(rig *g)
{
    mt_kvstats s;

    mt_kvpool_stats(g->pool, &s);
    return s;
}

static inline void
append(rig *g, mlease *m, size_t tokens)
{
    size_t counts[MODEL_ROWS];

    for (size_t row = 0; row < m->rows; row++)
        counts[row] = tokens;
    for (size_t layer = 0; layer < rig_layers(g); layer++)
        CHECK(rig_update(g, m, layer, counts, true) == MT_OK);
    rig_agree(g);
}

static inline mlease *
lend(rig *g, size_t place, size_t rows, size_t hint)
{
    CHECK(rig_acquire(g, &g->lease[place], rows, hint) == MT_OK);
    return &g->lease[place];
}

#endif
