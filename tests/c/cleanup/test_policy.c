/* When to clean up: cadences, what is asked for, what pays, back-off and the budget. */
#include "cleanup/rig.h"

enum { LATER = 4 }; /* ticks until what may grow back is judged */

/* --- cadences --------------------------------------------------------------------------------- */

static void
a_cadence_is_due_at_its_multiples(void)
{
    rig r = rig_new();

    rig_rule(&r, 3, CLOCK, 5, 0, false);
    for (uint64_t t = 1; t <= 100; t++) {
        unsigned mask = rig_tick_at(&r, CLOCK, MS);

        CHECK(mask == (t % 5 == 0 ? 8 : 0));
        CHECK(rig_tick(&r, OTHER) == mask); /* its own ticks do not count */
        if (mask != 0) rig_done(&r, 3, 1, GIB / 8);
    }
    CHECK(r.p.action[3].paid == 20 && r.p.action[3].why == MT_WHEN_DUE);
    CHECK(r.ever == 0); /* no trigger: memory is not read */
}

static void
each_clock_has_its_own_multiples(void)
{
    mt_policy_rule rule = {.every = {4, 3}};
    rig r = rig_new();

    mt_policy_rule_set(&r.p, 0, &rule);
    rig_rule(&r, 1, 1, 6, 0, false);
    for (uint64_t t = 1; t <= 24; t++) {
        CHECK(rig_tick(&r, 0) == (t % 4 == 0));
        if (t % 4 == 0) rig_done(&r, 0, 1, GIB / 8);
        CHECK(rig_tick(&r, 1) == (t % 3 == 0) + (t % 6 == 0 ? 2u : 0u));
        if (t % 3 == 0) rig_done(&r, 0, 1, GIB / 8);
        if (t % 6 == 0) rig_done(&r, 1, 1, GIB / 8);
    }
}

/* A rule that comes later counts its multiples from 0 as well. */
static void
several_ticks_at_once_are_due_once(void)
{
    rig r = rig_new();

    CHECK(!mt_policy_tick(&r.p, CLOCK, 7));
    rig_rule(&r, 0, CLOCK, 10, 0, false);
    CHECK(!mt_policy_tick(&r.p, CLOCK, 2));
    CHECK(mt_policy_tick(&r.p, CLOCK, 26) && rig_decide(&r, CLOCK, 0) == 1); /* 35 */
    rig_done(&r, 0, 1, GIB);
    CHECK(!mt_policy_tick(&r.p, CLOCK, 4));
    CHECK(mt_policy_tick(&r.p, CLOCK, 1) && rig_decide(&r, CLOCK, 0) == 1); /* 40 */
    rig_done(&r, 0, 1, GIB);
    CHECK(mt_policy_tick(&r.p, CLOCK, MT_POLICY_EVERY) && rig_decide(&r, CLOCK, 0) == 1);
    CHECK(r.p.action[0].due[CLOCK] == MT_POLICY_EVERY + 44); /* 2^48 ends with 6 */
}

static void
what_is_not_done_is_asked_for_again(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 5, 0, false);
    rig_rule(&r, 1, CLOCK, 6, 0, false);
    rig_quiet(&r, CLOCK, 4, 1);
    CHECK(rig_tick(&r, CLOCK) == 1);
    CHECK(rig_decide(&r, CLOCK, 0) == 1); /* the same answer twice */
    CHECK(rig_tick(&r, OTHER) == 1);      /* of any clock */
    CHECK(rig_tick(&r, CLOCK) == 3);
    rig_done(&r, 0, 1, 0);
    CHECK(rig_tick(&r, CLOCK) == 2);
    rig_done(&r, 1, 1, 0);
    CHECK(rig_tick(&r, CLOCK) == 0 && rig_tick(&r, OTHER) == 0);
    CHECK(!(r.p.ticks[OTHER] >= r.p.next[OTHER]));
}

static void
an_empty_rule_takes_the_action_back(void)
{
    mt_policy_rule empty = {.triggers = 0};
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 2, MT_WHEN_HOST_PRESSURE, true);
    rig_quiet(&r, CLOCK, 1, SEC);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1);
    rig_done(&r, 0, 1, GIB);
    CHECK(r.p.waiting == 1);
    r.x.rss = 9 * GIB;
    CHECK(rig_tick_at(&r, CLOCK, 2 * SEC) == 1);
    mt_policy_rule_set(&r.p, 0, &empty);
    CHECK(r.p.waiting == 0);
    r.ever = 0;
    rig_quiet(&r, CLOCK, 50, SEC);
    CHECK(r.ever == 0);
}

/* --- paying and back-off ---------------------------------------------------------------------- */

/* Does what is due at each of the next n multiples of `every`; what is in between is quiet. */
static void
keep(rig *r, uint64_t every, int n, uint64_t freed)
{
    for (int i = 0; i < n; i++) {
        do {
            r->now += SEC;
            if (rig_tick(r, CLOCK) == 1) break;
            CHECK(r->p.ticks[CLOCK] % every != 0);
        } while (true);
        CHECK(r->p.ticks[CLOCK] % every == 0);
        rig_done(r, 0, 1, freed);
    }
}

static void
what_frees_next_to_nothing_twice_is_backed_off(void)
{
    uint64_t percent = 10 * GIB / 100 + 1, less = 10 * GIB / 100;
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 4, 0, false);
    keep(&r, 4, 3, percent);
    CHECK(r.p.action[0].paid == 3 && r.p.action[0].backoff == 1 && r.p.action[0].paid_last);
    keep(&r, 4, 1, less);
    CHECK(!r.p.action[0].paid_last && r.p.action[0].backoff == 1); /* once is chance */
    keep(&r, 4, 1, percent);
    keep(&r, 4, 2, less);
    CHECK(r.p.action[0].backoff == 2);
    keep(&r, 8, 1, less);
    keep(&r, 16, 1, less);
    keep(&r, 32, 1, 0);
    keep(&r, 64, 1, 0);
    keep(&r, 128, 1, 0);
    CHECK(r.p.action[0].backoff == 64);
    keep(&r, 256, 3, 0); /* not beyond */
    CHECK(r.p.action[0].backoff == 64 && r.p.action[0].paid == 4);
    keep(&r, 256, 1, percent);
    CHECK(r.p.action[0].backoff == 1);
    keep(&r, 4, 1, less);
    keep(&r, 4, 1, less); /* the row of those begins anew */
    CHECK(r.p.action[0].backoff == 2 && r.p.action[0].skipped == 0);
    CHECK(r.p.unpaid_ns == 13);
}

static bool
does_pay(uint64_t host_before, uint64_t host_after, uint64_t host_total, uint64_t device_before,
         uint64_t device_after, uint64_t device_total)
{
    mt_policy_result did = {
        7, host_before, host_after, host_total, device_before, device_after, device_total};
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 4, 0, true); /* without a level after it, it is judged at once */
    mt_policy_done(&r.p, 0, r.now, &did, NULL);
    CHECK(r.p.action[0].paid + (r.p.unpaid_ns == 7) == 1);
    return r.p.action[0].paid_last;
}

static void
the_larger_of_both_gains_counts(void)
{
    const uint64_t none = MT_UNKNOWN;

    CHECK(does_pay(100, 99, 100, none, none, none) && does_pay(none, none, none, 100, 99, 100));
    CHECK(!does_pay(100, 99, 101, 1000, 991, 1000));
    CHECK(does_pay(100, 99, 101, 1000, 990, 1000) && does_pay(100, 98, 101, 1000, 2000, 1000));
    CHECK(!does_pay(100, 200, 100, 100, 100, 100)); /* it grew */
    CHECK(!does_pay(100, 50, none, 100, 50, 0));
    CHECK(!does_pay(none, 50, 100, 100, none, 100));
    CHECK(!does_pay(none, none, none, none, none, none));
}

/* --- judged later ----------------------------------------------------------------------------- */

/* Frees 1 GiB of 10 at tick 100, then `again` grows back; whether that paid. */
static bool
pays_later(uint64_t again)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 100, 0, true);
    rig_quiet(&r, CLOCK, 99, MS);
    CHECK(rig_tick(&r, CLOCK) == 1);
    rig_done(&r, 0, MS, GIB);
    r.x.rss += again;
    rig_quiet(&r, CLOCK, LATER - 1, MS);
    rig_quiet(&r, OTHER, 3 * LATER, MS); /* of the same clock */
    CHECK(r.ever == 0 && r.p.action[0].paid == 0 && r.p.unpaid_ns == 0);
    rig_quiet(&r, CLOCK, 1, MS);
    CHECK(r.read & MT_READ_RSS && r.read & MT_READ_DEVICES);
    CHECK(r.p.action[0].paid + (r.p.unpaid_ns == MS) == 1);
    r.ever = 0;
    rig_quiet(&r, CLOCK, 20, MS); /* that was all */
    CHECK(r.ever == 0);
    return r.p.action[0].paid_last;
}

static void
what_grew_back_was_not_freed(void)
{
    uint64_t percent = 10 * GIB / 100 + 1;

    CHECK(pays_later(0) && pays_later(GIB / 2) && pays_later(GIB - percent));
    CHECK(!pays_later(GIB - percent + 2) && !pays_later(GIB) && !pays_later(5 * GIB));
}

static void
a_device_that_filled_again_was_not_freed(void)
{
    for (int again = 0; again < 2; again++) {
        rig r = rig_new();
        mt_device_sample *d = rig_device(&r);
        mt_policy_result did = {1, MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN, 10 * GIB, 9 * GIB, 40 * GIB};
        mt_policy_level level;

        rig_device(&r);
        rig_rule(&r, 0, CLOCK, 100, 0, true);
        d->free += GIB;
        level = mt_policy_level_of(&r.x);
        CHECK(level.device == 19 * GIB);
        mt_policy_done(&r.p, 0, r.now, &did, &level);
        if (again == 1) d->free -= GIB;
        rig_quiet(&r, CLOCK, LATER, MS);
        CHECK(r.p.action[0].paid_last == (again == 0) && r.p.waiting == 0);
    }
}

static void
a_level_is_what_is_known(void)
{
    rig r = rig_new();

    CHECK(mt_policy_level_of(&r.x).host == 5 * GIB);
    CHECK(mt_policy_level_of(&r.x).device == MT_UNKNOWN);
    rig_device(&r)->free = MT_UNKNOWN;
    CHECK(mt_policy_level_of(&r.x).device == 10 * GIB); /* what is reserved */
    rig_device(&r);
    CHECK(mt_policy_level_of(&r.x).device == 20 * GIB);
    r.x.device[0].reserved = MT_UNKNOWN;
    CHECK(mt_policy_level_of(&r.x).device == 10 * GIB);
    r.x.device[0] = r.x.device[1];
    r.x.device[1].free = r.x.device[1].reserved = MT_UNKNOWN;
    CHECK(mt_policy_level_of(&r.x).device == 10 * GIB);
    r.x.rss = MT_UNKNOWN;
    CHECK(mt_policy_level_of(&r.x).host == MT_UNKNOWN);
}

/* A verdict at a tick of one clock moves what is due of another. */
static void
a_verdict_counts_for_all_clocks(void)
{
    mt_policy_rule rule = {.every = {[CLOCK] = 100, [OTHER] = 10}, .later = true};
    rig r = rig_new();

    mt_policy_rule_set(&r.p, 0, &rule);
    for (int i = 0; i < 3; i++)
        rig_done(&r, 0, 1, 0);
    rig_quiet(&r, CLOCK, LATER, SEC);
    CHECK(r.p.action[0].backoff == 4 && r.p.waiting == 0);
    rig_done(&r, 0, 1, GIB);
    rig_quiet(&r, OTHER, 9, SEC);
    rig_quiet(&r, CLOCK, LATER, SEC);
    CHECK(r.p.action[0].backoff == 1);
    CHECK(rig_tick(&r, OTHER) == 1);
}

/* Due again after two ticks: the first is judged then, before it is asked for. */
static void
it_is_judged_at_the_latest_when_it_is_due_again(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 2, 0, true);
    for (int i = 1; i <= 2; i++) {
        rig_quiet(&r, CLOCK, 1, SEC);
        CHECK(rig_tick_at(&r, CLOCK, SEC) == 1);
        CHECK(r.p.action[0].unpaid_row == (unsigned)i - 1);
        rig_done(&r, 0, 1, GIB);
        r.x.rss += GIB;
    }
    rig_quiet(&r, CLOCK, 1, SEC);
    rig_quiet(&r, CLOCK, 1, SEC); /* 6: found out that it never paid; now due at multiples of 4 */
    CHECK(r.p.action[0].backoff == 2 && r.p.waiting == 0);
    rig_quiet(&r, CLOCK, 1, SEC);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1);
    rig_done(&r, 0, 1, GIB);
    rig_quiet(&r, CLOCK, 3, SEC);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1); /* 12: judged and done */
    CHECK(r.p.action[0].backoff == 1 && r.p.action[0].paid == 1);
}

/* A multiple of the doubled cadence is kept in the decision that doubles it. */
static void
a_multiple_of_both_cadences_is_kept(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 4, 0, true);
    for (int i = 0; i < 3; i++) { /* 4, 8, and 12 is none of 8 */
        rig_quiet(&r, CLOCK, 3, SEC);
        CHECK(rig_tick_at(&r, CLOCK, SEC) == (i < 2));
        if (i < 2) rig_done(&r, 0, 1, GIB);
        r.x.rss += GIB;
    }
    rig_quiet(&r, CLOCK, 3, SEC);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1 && r.p.action[0].backoff == 2); /* 16 */
    rig_done(&r, 0, 1, GIB / 2);
    rig_rule(&r, 0, CLOCK, 1, 0, true); /* 17 is none of 2, 18 is */
    r.x.rss += GIB;
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 0);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 0 && r.p.action[0].backoff == 4);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 0);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1); /* 20 is one of 4 */
}

/* Somebody does it himself, twice between two decisions. */
static void
done_again_it_is_judged_by_where_that_began(void)
{
    for (int again = 0; again < 2; again++) {
        rig r = rig_new();

        rig_rule(&r, 0, CLOCK, 100, 0, true);
        rig_done(&r, 0, 1, GIB);
        if (again) r.x.rss += GIB;
        rig_done(&r, 0, 1, GIB);
        CHECK(r.p.action[0].paid == (again ? 0 : 1) && r.p.waiting == 1);
    }
}

/* --- the budget ------------------------------------------------------------------------------- */

/* 1 % of the time: 10 ms may be spent once in 2 s, since what is spent already counts too. */
static void
what_does_not_pay_keeps_to_the_budget(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 10, 0, false);
    rig_quiet(&r, CLOCK, 9, MS);
    CHECK(rig_tick_at(&r, CLOCK, MS) == 1); /* the first time is free */
    rig_done(&r, 0, 10 * MS, 0);
    r.now = 1000 * SEC + 1900 * MS;
    rig_quiet(&r, CLOCK, 10, MS);
    CHECK(r.p.action[0].skipped == 1); /* and not 1 more at each tick */
    rig_quiet(&r, CLOCK, 9, MS);
    r.now = 1000 * SEC + 2000 * MS - 1;
    rig_quiet(&r, CLOCK, 1, 0);
    CHECK(r.p.action[0].skipped == 2);
    rig_quiet(&r, CLOCK, 9, 0);
    CHECK(rig_tick_at(&r, CLOCK, 1) == 1); /* at the next multiple */
    CHECK(r.p.action[0].skipped == 2);
}

static void
what_paid_last_time_is_not_held_back(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 1, 0, false);
    for (int i = 0; i < 20; i++) {
        CHECK(rig_tick_at(&r, CLOCK, MS) == 1);
        rig_done(&r, 0, SEC, GIB / 8);
    }
    CHECK(rig_tick_at(&r, CLOCK, MS) == 1);
    rig_done(&r, 0, SEC, 0);
    rig_quiet(&r, CLOCK, 100, MS);
    CHECK(r.p.action[0].skipped == 100);
    mt_policy_forget(&r.p, r.now);
    CHECK(rig_tick_at(&r, CLOCK, MS) == 1); /* as if for the first time */
}

static void
all_actions_share_the_budget(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 1, 0, false);
    rig_rule(&r, 1, CLOCK, 1, 0, false);
    r.now += 200 * MS; /* enough for 2 ms */
    CHECK(rig_tick(&r, CLOCK) == 3);
    rig_done(&r, 0, MS, 0);
    rig_done(&r, 1, MS / 2, 0);
    CHECK(rig_tick(&r, CLOCK) == 2);
    CHECK(r.p.action[0].skipped == 1 && r.p.action[1].skipped == 0);
    rig_done(&r, 1, MS / 2, GIB / 8); /* costs nothing: it paid */
    CHECK(r.p.unpaid_ns == 3 * MS / 2);
}

static void
strict_keeps_its_cadences_whatever_they_cost(void)
{
    mt_policy_setup with = rig_usual;
    rig r;

    with.strict = true;
    r = rig_of(&with);
    rig_rule(&r, 0, CLOCK, 3, MT_WHEN_HOST_PRESSURE, false);
    for (uint64_t t = 1; t <= 300; t++) {
        unsigned mask = rig_tick_at(&r, CLOCK, MS);

        CHECK(mask == (t % 3 == 0));
        if (mask != 0) rig_done(&r, 0, SEC, 0);
    }
    CHECK(r.p.action[0].skipped == 0 && r.p.action[0].paid == 0);
    r.x.rss = 9 * GIB; /* triggers as ever: they rest */
    CHECK(r.p.action[0].backoff == 64);
    CHECK(rig_tick_at(&r, CLOCK, 6399 * SEC) == 0 && r.read != 0);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1 && r.p.action[0].why == MT_WHEN_HOST_PRESSURE);
}

/* --- together, and anew ----------------------------------------------------------------------- */

static void
ranks_decide_at_multiples_only(void)
{
    mt_policy_setup with = rig_usual;
    rig r;

    with.together = 10;
    r = rig_of(&with);
    rig_rule(&r, 0, 1, 3, 0, false);
    rig_rule(&r, 1, CLOCK, 4, MT_WHEN_HOST_PRESSURE, false);
    r.x.rss = 9 * GIB;
    for (uint64_t t = 1; t <= 9; t++) {
        CHECK(!mt_policy_tick(&r.p, 0, 1));
        CHECK(!mt_policy_tick(&r.p, 1, 1));
    }
    CHECK(mt_policy_tick(&r.p, 0, 1)); /* to be agreed, with what came up since */
    CHECK(mt_policy_reads(&r.p, 0, r.now) != 0);
    CHECK(rig_decide(&r, 0, MT_READ_RSS) == 3);
    CHECK(r.p.action[0].why == MT_WHEN_DUE);
    CHECK(r.p.action[1].why == (MT_WHEN_DUE | MT_WHEN_HOST_PRESSURE));
    rig_done(&r, 0, 1, 0);
    r.now += SEC;
    CHECK(!mt_policy_tick(&r.p, 1, 100) && !mt_policy_tick(&r.p, 0, 9));
    CHECK(mt_policy_tick(&r.p, 0, 1) && rig_decide(&r, 0, 0) == 3); /* 1 was not done */
    rig_done(&r, 0, 1, 0);
    rig_done(&r, 1, 1, 0);
    rig_rule(&r, 1, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    r.x.rss = GIB;
    CHECK(!mt_policy_tick(&r.p, 0, 9));
    CHECK(mt_policy_tick(&r.p, 0, 1) &&
          rig_decide(&r, 0, 0) == 0); /* nothing, and agreed as well */
    CHECK(mt_policy_tick(&r.p, 0, 25) && rig_decide(&r, 0, 0) == 0);  /* 55, once */
    CHECK(!mt_policy_tick(&r.p, 0, 4) && mt_policy_tick(&r.p, 0, 1)); /* 60 */
}

/* What waits to be judged is, at the decision after its 4 ticks, of whichever clock. */
static void
ranks_judge_later_too(void)
{
    mt_policy_setup with = rig_usual;
    rig r;

    with.together = 3;
    r = rig_of(&with);
    rig_rule(&r, 0, 1, 100, 0, true);
    CHECK(!mt_policy_tick(&r.p, 0, 2));
    CHECK(rig_tick(&r, 0) == 0 && r.read == 0);
    rig_done(&r, 0, 1, GIB);
    r.x.rss += GIB;
    for (uint64_t t = 4; t <= 9; t++)
        CHECK(rig_tick(&r, 0) == 0 && (r.read != 0) == (t == 9));
    CHECK(r.p.action[0].unpaid_row == 1);
}

static void
forgetting_keeps_counts_and_rules(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 2, MT_WHEN_HOST_PRESSURE, false);
    rig_rule(&r, 1, CLOCK, 100, MT_WHEN_HOST_PRESSURE, true);
    for (int i = 0; i < 64; i++)
        if (rig_tick_at(&r, CLOCK, SEC) & 1) rig_done(&r, 0, 1, 0);
    rig_done(&r, 1, 1, GIB);
    CHECK(r.p.action[0].backoff == 32 && r.p.waiting == 2);
    r.x.rss = 9 * GIB;
    CHECK(rig_tick_at(&r, CLOCK, 3 * SEC) == 2);
    mt_policy_forget(&r.p, r.now);
    CHECK(r.p.asked == 0 && r.p.waiting == 0 && r.p.unpaid_ns == 0 && r.p.start_ns == r.now);
    CHECK(r.p.ticks[CLOCK] == 65 && r.p.action[0].paid == 0 && r.p.action[0].backoff == 1);
    r.x.rss = GIB;
    CHECK(rig_tick(&r, CLOCK) == 1); /* 66 is a multiple of 2 */
}

int
main(void)
{
    RUN(a_cadence_is_due_at_its_multiples);
    RUN(each_clock_has_its_own_multiples);
    RUN(several_ticks_at_once_are_due_once);
    RUN(what_is_not_done_is_asked_for_again);
    RUN(an_empty_rule_takes_the_action_back);
    RUN(what_frees_next_to_nothing_twice_is_backed_off);
    RUN(the_larger_of_both_gains_counts);
    RUN(what_grew_back_was_not_freed);
    RUN(a_device_that_filled_again_was_not_freed);
    RUN(a_level_is_what_is_known);
    RUN(a_verdict_counts_for_all_clocks);
    RUN(it_is_judged_at_the_latest_when_it_is_due_again);
    RUN(a_multiple_of_both_cadences_is_kept);
    RUN(done_again_it_is_judged_by_where_that_began);
    RUN(what_does_not_pay_keeps_to_the_budget);
    RUN(what_paid_last_time_is_not_held_back);
    RUN(all_actions_share_the_budget);
    RUN(strict_keeps_its_cadences_whatever_they_cost);
    RUN(ranks_decide_at_multiples_only);
    RUN(ranks_judge_later_too);
    RUN(forgetting_keeps_counts_and_rules);
    CHECK_DONE();
}
