/* When to clean up: each rule of policy.h by itself. */
#include "check.h"
#include "core/policy.h"

#define MS  1000000ull
#define SEC 1000000000ull
#define MIB (1ull << 20)
#define GIB (1ull << 30)

static const mt_limit none = {MT_UNKNOWN, MT_UNKNOWN, ""};
static const mt_policy_setup usual = {.pressure = 0.85, .max_cost = 0.003};

static mt_policy
with_cadence(unsigned clock, uint64_t every)
{
    mt_policy_rule rule = {.triggers = 0};
    mt_policy p;

    mt_policy_init(&p, &usual, 0);
    rule.every[clock] = every;
    mt_policy_rule_set(&p, 0, &rule);
    return p;
}

/* Ticks and decides, without a reading. */
static unsigned
step(mt_policy *p, unsigned clock, uint64_t now)
{
    return mt_policy_tick(p, clock) ? mt_policy_decide(p, clock, now, NULL, none) : 0;
}

static void
done(mt_policy *p, unsigned action, uint64_t now, uint64_t cost, uint64_t freed)
{
    mt_policy_result r = {cost, GIB, GIB - freed, GIB, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN};

    mt_policy_done(p, action, now, &r, NULL);
}

static void
a_cadence_is_due_at_its_multiples(void)
{
    mt_policy p = with_cadence(0, 5);

    for (uint64_t t = 1; t <= 100; t++) {
        unsigned mask = step(&p, 0, t);

        CHECK(mask == (t % 5 == 0));
        if (mask != 0) done(&p, 0, t, 1, GIB);
    }
    CHECK(p.action[0].count == 20 && p.action[0].why == MT_WHEN_DUE);
}

static void
what_is_not_done_is_asked_for_again(void)
{
    mt_policy p = with_cadence(0, 5);

    for (int i = 0; i < 4; i++)
        CHECK(step(&p, 0, 1) == 0);
    CHECK(step(&p, 0, 1) == 1);
    CHECK(mt_policy_decide(&p, 0, 1, NULL, none) == 1); /* twice the same */
    CHECK(step(&p, 0, 1) == 1);
    CHECK(step(&p, 7, 1) == 1); /* of any clock */
    done(&p, 0, 1, 1, GIB);
    CHECK(step(&p, 0, 1) == 0);
}

int
main(void)
{
    RUN(a_cadence_is_due_at_its_multiples);
    RUN(what_is_not_done_is_asked_for_again);
    CHECK_DONE();
}
