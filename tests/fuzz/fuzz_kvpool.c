/* Bytes to a list of operations on a KV pool and its model, compared after every one.
 *
 *   byte 0: the store, byte 1: the geometry, byte 2: the budget in blocks (0: none), then
 * operations */
#include "kv/steps.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_STEPS = 60, LOOK_EVERY = 6 };

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
    rig_setup setup = {.store = (rig_store)input_below(&in, RIG_STORES),
                       .config = steps_config(input_below(&in, STEPS_CONFIGS)),
                       .limit_blocks = input_below(&in, 48)};

    if (setup.limit_blocks == 0) setup.limit_blocks = SIZE_MAX;
    rig_begin(&g, &setup, roll, &in);
    for (int step = 0; step < MOST_STEPS && in.left > 0; step++) {
        steps_one(&g);
        if (step % LOOK_EVERY == 0) rig_look_at_all(&g, false);
    }
    rig_look_at_all(&g, true);
    rig_end(&g);
    check_cases++;
    return 0;
}
