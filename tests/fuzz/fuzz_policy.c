/* Bytes to calls of a policy and of its model, compared after every one: see cleanup/steps.h. */
#include "cleanup/steps.h"
#include "input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_STEPS = 300 };

static size_t
roll(void *ctx, size_t n)
{
    return input_below(ctx, n);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static steps s;
    input in = {data, size};

    steps_begin(&s, roll, &in);
    for (int step = 0; step < MOST_STEPS && in.left > 0; step++)
        steps_one(&s);
    check_cases++;
    return 0;
}
