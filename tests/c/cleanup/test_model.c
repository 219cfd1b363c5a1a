/* Random calls of a policy against a model that knows only history. */
#include "cleanup/steps.h"
#include "kit/rng.h"

enum { RUNS = 400, STEPS = 400 };

static size_t
roll(void *ctx, size_t n)
{
    return rng_below(ctx, n);
}

static void
random_calls_agree_with_the_model(void)
{
    static steps s;
    uint64_t done = 0, paid = 0, skipped = 0, most = 1, looks = 0;

    for (int run = 0; run < RUNS; run++) {
        rng r = rng_seeded((uint64_t)run);

        steps_begin(&s, roll, &r);
        for (int i = 0; i < STEPS; i++)
            steps_one(&s);
        done += s.m.deeds;
        for (int a = 0; a < MODEL_ACTIONS; a++) {
            paid += s.p.action[a].paid;
            skipped += s.p.action[a].skipped;
            if (most < s.p.action[a].backoff) most = s.p.action[a].backoff;
        }
        looks += s.p.looks;
    }
    /* All of it was seen. */
    CHECK(done > 10000 && paid > 1000 && skipped > 1000 && most == 64 && looks > 10000);
}

int
main(void)
{
    RUN(random_calls_agree_with_the_model);
    CHECK_DONE();
}
