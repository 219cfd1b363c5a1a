/* A KV pool against plain arrays under random operations, on every kind of store, in every layout,
 * with and without a budget, with calls of the world failing. */
#include "kv/steps.h"

/* Rows move to one extent only where mappings run short and several things meet: more runs there.
 */
enum { STEPS = 250, LOOK_EVERY = 7, SEEDS = 8, FEW_MAPS_SEEDS = 150 };

static size_t
roll(void *ctx, size_t n)
{
    return rng_below(ctx, n);
}

static void
run(rig_store store, size_t config, uint64_t seed)
{
    static rig g;
    rng r = rng_seeded(seed * 1000 + config * 10 + store);
    rig_setup setup = {.config = steps_config(config), .store = store, .limit_blocks = SIZE_MAX};

    if (seed % 2 == 1) setup.limit_blocks = 4 + rng_below(&r, 40);
    rig_begin(&g, &setup, roll, &r);
    for (size_t step = 0; step < STEPS; step++) {
        steps_one(&g);
        if (step % LOOK_EVERY == 0) rig_look_at_all(&g, step % (5 * LOOK_EVERY) == 0);
    }
    rig_end(&g);
}

static void
all_configs(rig_store store, uint64_t seeds)
{
    for (size_t config = 0; config < STEPS_CONFIGS; config++)
        for (uint64_t seed = 0; seed < seeds; seed++)
            run(store, config, seed);
}

static void
a_linux_pool_does_as_the_model(void)
{
    all_configs(RIG_LINUX, SEEDS);
}

static void
a_pool_with_few_mappings_does_as_the_model(void)
{
    all_configs(RIG_FEW_MAPS, FEW_MAPS_SEEDS);
}

static void
a_strict_pool_does_as_the_model(void)
{
    all_configs(RIG_STRICT, SEEDS);
    all_configs(RIG_STRICT_8K, SEEDS);
}

int
main(void)
{
    RUN(a_linux_pool_does_as_the_model);
    RUN(a_strict_pool_does_as_the_model);
    RUN(a_pool_with_few_mappings_does_as_the_model);
    CHECK_DONE();
}
