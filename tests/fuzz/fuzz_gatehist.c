/* Bytes to a list of operations on a gate history and its model, compared after every one.
 *
 *   bytes 0 and 1: the configuration, then operations */
#include "gate/steps.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_STEPS = 200 };

static size_t
roll(void *ctx, size_t n)
{
    return input_below(ctx, n);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static rig g;
    input in = {data, size};
    uint64_t seed = input_pair(&in);
    rng r = rng_seeded(seed);
    steps s = {.g = &g, .roll = roll, .ctx = &in};
    mt_gatehist_config config = rig_any_config(&r, &s.experts);

    rig_begin(&g, &config, seed);
    for (int step = 0; step < MOST_STEPS && in.left > 0; step++)
        steps_one(&s);
    steps_end(&s);
    check_cases++;
    return 0;
}
