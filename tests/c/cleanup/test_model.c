/* Random calls of a policy and of a model that knows only history, compared after each one. */
#include "cleanup/model.h"
#include "kit/rng.h"

typedef struct steps {
    mt_policy p;
    model m;
    rng *random;
    uint64_t now, given, unlooked[MODEL_CLOCKS]; /* decisions wanted by looks: ticks since then */
    unsigned reads;
} steps;

static uint64_t
steps_of(steps *s, const uint64_t *from, size_t n)
{
    return from[rng_below(s->random, n)];
}

#define STEPS_OF(s, ...)                                                                           \
    steps_of(s, (const uint64_t[]){__VA_ARGS__}, sizeof((uint64_t[]){__VA_ARGS__}) / 8)

static uint64_t
steps_bytes(steps *s)
{
    const uint64_t mib = 1 << 20;

    /* Among them those at which a trigger is just on: 800 of 1,000, a quarter, a twentieth, 1 %. */
    return STEPS_OF(s, 0, 1, 8 * mib, 8 * mib + 1, 10 * mib, 40 * mib, 64 * mib, 64 * mib - 1,
                    100 * mib, 160 * mib, 256 * mib, 700 * mib, 760 * mib, 760 * mib - 1,
                    800 * mib - 1, 800 * mib, 990 * mib, 1000 * mib, 1000 * mib, 1280 * mib,
                    MT_UNKNOWN);
}

static void
steps_reading(steps *s, unsigned reads, mt_sample *x)
{
    mt_sample_clear(x);
    x->rss = steps_bytes(s);
    if (rng_below(s->random, 4) == 0) x->cgroup_limit = steps_bytes(s);
    x->cgroup_used = steps_bytes(s);
    if (reads & MT_READ_HEAP) x->heap_free = steps_bytes(s);
    x->devices = rng_below(s->random, 3);
    for (size_t i = 0; i < x->devices; i++)
        x->device[i] = (mt_device_sample){.allocated = steps_bytes(s),
                                          .allocated_peak = steps_bytes(s),
                                          .reserved = steps_bytes(s),
                                          .free = steps_bytes(s),
                                          .total = steps_bytes(s),
                                          .inactive_split = steps_bytes(s)};
}

static void
steps_compare(steps *s)
{
    for (unsigned a = 0; a < MODEL_ACTIONS; a++) {
        const mt_policy_action *is = &s->p.action[a];
        model_deed *last = model_last(&s->m, a);

        CHECK((s->p.asked >> a & 1) == s->m.asked[a]);
        CHECK((s->p.waiting >> a & 1) == (last != NULL && last->verdict == OPEN));
        CHECK(is->backoff == model_of(&s->m, a).backoff);
        CHECK(is->skipped == s->m.skipped[a] && is->why == s->m.why[a]);
        CHECK(!is->tried || is->paid_last == model_of(&s->m, a).paid_last);
        CHECK(is->tried == (last != NULL));
    }
    CHECK(s->p.unpaid_ns == model_unpaid(&s->m));
}

static void
steps_decide(steps *s, unsigned clock, unsigned reads)
{
    mt_sample x;
    mt_limit limit = {MT_UNKNOWN, MT_UNKNOWN, ""};
    unsigned mask;

    if (reads != 0) steps_reading(s, reads, &x);
    if (reads != 0) limit = mt_limit_of(&x, s->given);
    if (reads & MT_READ_HEAP) mt_policy_heap_read(&s->p, s->now, STEPS_OF(s, 0, 1000, 1000000));
    mask = mt_policy_decide(&s->p, clock, s->now, reads != 0 ? &x : NULL, limit);
    CHECK(mask == model_decide(&s->m, clock, s->now, reads != 0 ? &x : NULL, limit));
    steps_compare(s);
    /* The same once more. */
    CHECK(mt_policy_decide(&s->p, clock, s->now, NULL, limit) == mask);
    steps_compare(s);
}

/* Looks are 256 ticks apart at most, and there are none without a trigger. */
static void
steps_tick(steps *s)
{
    unsigned clock = (unsigned)rng_below(s->random, MODEL_CLOCKS), reads;
    uint64_t n = rng_below(s->random, 8) == 0 ? 1 + rng_below(s->random, 255) : 1;
    bool is = mt_policy_tick(&s->p, clock, n);
    bool wants;

    s->m.ticks[clock] += n;
    s->now += STEPS_OF(s, 0, 1, 1000, 1000000, 20000000, 1000000000);
    wants = model_wants(&s->m, clock);
    CHECK(!wants || is);
    s->unlooked[clock] = is ? 0 : s->unlooked[clock] + n;
    CHECK(s->p.triggers == 0 || s->m.with.together > 0 || s->unlooked[clock] < 256);
    if (!is || rng_below(s->random, 8) == 0)
        return; /* none where another thread is in a decision */
    CHECK(wants || (s->p.triggers != 0 && s->m.with.together == 0));
    reads = mt_policy_reads(&s->p, clock, s->now);
    for (unsigned a = 0; a < MODEL_ACTIONS; a++)
        CHECK(reads != 0 || !model_is_judged(&s->m, a, clock));
    s->reads |= reads;
    steps_decide(s, clock, reads);
}

/* What is asked for, mostly, or anything. */
static void
steps_done(steps *s)
{
    unsigned action = (unsigned)rng_below(s->random, MODEL_ACTIONS);
    uint64_t before = steps_bytes(s), ns = STEPS_OF(s, 1, 1000, 100000, 10000000, 1000000000);
    mt_policy_result did = {ns, before, steps_bytes(s), steps_bytes(s), MT_UNKNOWN, 0, 0};
    mt_policy_level level = {steps_bytes(s), steps_bytes(s)}, *after = &level;

    if (!s->m.asked[action] && rng_below(s->random, 8) != 0) return;
    if (rng_below(s->random, 2) == 0) {
        did.device_before = steps_bytes(s);
        did.device_after = steps_bytes(s);
        did.device_total = steps_bytes(s);
    }
    if (rng_below(s->random, 4) == 0) after = NULL;
    s->now += ns;
    mt_policy_done(&s->p, action, s->now, &did, after);
    model_done(&s->m, action, s->now, &did, after);
    steps_compare(s);
}

static void
steps_rule(steps *s)
{
    unsigned action = (unsigned)rng_below(s->random, MODEL_ACTIONS);
    mt_policy_rule rule = {.later = rng_below(s->random, 2) == 0};

    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        rule.every[c] = STEPS_OF(s, 0, 0, 1, 2, 3, 10, 100);
    if (rng_below(s->random, 2) == 0) rule.triggers = (unsigned)rng_below(s->random, 32);
    mt_policy_rule_set(&s->p, action, &rule);
    model_rule(&s->m, action, &rule);
    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        s->unlooked[c] = 0;
    steps_compare(s);
}

static void
steps_forget(steps *s)
{
    mt_policy_forget(&s->p, s->now);
    model_forget(&s->m, s->now);
    steps_compare(s);
}

static void
steps_begin(steps *s, rng *random)
{
    mt_policy_setup with = {.pressure = 0.8};

    s->random = random;
    s->now = 5000000000;
    s->reads = 0;
    s->given = STEPS_OF(s, 1000ull << 20, MT_UNLIMITED);
    with.max_cost = (double)STEPS_OF(s, 0, 1, 100) / 1000;
    with.strict = rng_below(random, 4) == 0;
    with.together = STEPS_OF(s, 0, 0, 1, 7);
    mt_policy_init(&s->p, &with, s->now);
    model_init(&s->m, &with, s->now);
    for (unsigned c = 0; c < MODEL_CLOCKS; c++)
        s->unlooked[c] = 0;
    for (int i = 0; i < 3; i++)
        steps_rule(s);
}

static void
steps_one(steps *s)
{
    size_t what = rng_below(s->random, 256);

    if (s->m.deeds == MODEL_DONE || what < 160)
        steps_tick(s);
    else if (what < 246)
        steps_done(s);
    else if (what < 250)
        steps_rule(s);
    else if (what < 254)
        steps_decide(s, s->m.clock, mt_policy_reads_now(&s->p, s->now));
    else
        steps_forget(s);
}

enum { RUNS = 400, STEPS = 400 };

static void
random_calls_agree_with_the_model(void)
{
    static steps s;
    uint64_t done = 0, paid = 0, skipped = 0, most = 1, looks = 0;

    for (int run = 0; run < RUNS; run++) {
        rng r = rng_seeded((uint64_t)run);

        steps_begin(&s, &r);
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
