/* When to clean up by memory: each trigger at its bounds, rests, hysteresis, and when to look. */
#include "cleanup/rig.h"

enum { LOOKS = MT_READ_RSS | MT_READ_CGROUP | MT_READ_SYSTEM | MT_READ_DEVICES };

/* --- triggers --------------------------------------------------------------------------------- */

/* An action of these triggers alone, by a reading that says what r->x does. */
static bool
fires(const rig *from, unsigned triggers, unsigned why)
{
    rig r = *from;

    rig_rule(&r, 0, CLOCK, 0, triggers, false);
    if (rig_tick_at(&r, CLOCK, SEC) == 0) return false;
    CHECK(r.p.asked == 1 && r.p.action[0].why == why);
    return true;
}

static bool
fires_alone(const rig *r, unsigned trigger)
{
    CHECK(!fires(r, 31 & ~trigger & ~(trigger == MT_WHEN_IDLE_HEAP ? 1u : 0u), 0));
    return fires(r, trigger, trigger);
}

static void
host_pressure_is_a_part_of_the_limit(void)
{
    rig r = rig_new();

    r.x.total = r.x.available = 64 * GIB; /* the machine is no lower limit */
    r.x.rss = 8 * GIB - 1;
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.rss = 8 * GIB;
    CHECK(fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.rss = 7 * GIB;
    r.x.children_priv = GIB;
    CHECK(fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.cgroup_limit = 9 * GIB;
    r.x.cgroup_used = 7 * GIB;
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.cgroup_used = 8 * GIB;
    CHECK(fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.cgroup_limit = 11 * GIB; /* the given one is lower */
    CHECK(fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.children_priv = 0;
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.given = MT_UNLIMITED;
    r.x.cgroup_limit = MT_UNLIMITED;
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE)); /* nothing limits it */
    r.x.total = 20 * GIB;
    r.x.available = 4 * GIB;
    CHECK(fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.available = 4 * GIB + 1;
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.available = 21 * GIB; /* more than there is */
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE));
    r.x.available = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_HOST_PRESSURE));
}

static void
device_pressure_needs_something_to_give_back(void)
{
    rig r = rig_new();
    mt_device_sample *d;

    rig_device(&r);
    d = rig_device(&r);
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    d->free = 8 * GIB;
    CHECK(fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    d->free = 8 * GIB + 1;
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    d->free = 0;
    d->allocated = d->reserved;
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    d->reserved += 1;
    CHECK(fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    d->reserved = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    *d = (mt_device_sample){1, 1, 2, MT_UNKNOWN, 40 * GIB, 0};
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    *d = (mt_device_sample){1, 1, 2, 5 * GIB, 4 * GIB, 0}; /* more is free than there is */
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
    *d = (mt_device_sample){0, 0, 1, 0, 0, 0};
    CHECK(!fires_alone(&r, MT_WHEN_DEVICE_PRESSURE));
}

static void
fragments_are_a_quarter_of_what_is_reserved(void)
{
    rig r = rig_new();
    mt_device_sample *d = rig_device(&r);

    d->inactive_split = 10 * GIB / 4;
    CHECK(fires_alone(&r, MT_WHEN_FRAGMENTED));
    d->inactive_split -= 1;
    CHECK(!fires_alone(&r, MT_WHEN_FRAGMENTED));
    d->reserved = d->inactive_split = 64 * MIB;
    d->allocated = 0;
    CHECK(fires_alone(&r, MT_WHEN_FRAGMENTED));
    d->reserved = d->inactive_split = 64 * MIB - 1;
    CHECK(!fires_alone(&r, MT_WHEN_FRAGMENTED));
    d->inactive_split = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_FRAGMENTED));
    d->inactive_split = GIB;
    d->reserved = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_FRAGMENTED));
}

static void
an_idle_cache_is_what_the_next_peak_does_not_need(void)
{
    rig r = rig_new();
    mt_device_sample *d = rig_device(&r);

    d->reserved = 19 * GIB;
    CHECK(fires_alone(&r, MT_WHEN_IDLE_CACHE));
    d->allocated_peak += 1;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_CACHE));
    d->allocated_peak = 20 * GIB; /* reset late: more than is reserved now */
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_CACHE));
    d->allocated_peak = MT_UNKNOWN; /* then the most of all looks, which is 8 now */
    CHECK(fires_alone(&r, MT_WHEN_IDLE_CACHE));
    rig_rule(&r, 1, CLOCK, 0, MT_WHEN_IDLE_HEAP, false);
    d->allocated = 9 * GIB + 1;
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 0 && r.read != 0);
    d->allocated = GIB;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_CACHE));
    d->allocated = MT_UNKNOWN;
    mt_policy_forget(&r.p, r.now);
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_CACHE));
    d->allocated_peak = 0;
    d->total = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_CACHE));
    d->total = 0;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_CACHE));
}

static void
an_idle_heap_is_large_and_a_part_of_the_process(void)
{
    rig r = rig_new();

    r.x.rss = GIB;
    r.x.heap_free = 64 * MIB;
    CHECK(fires_alone(&r, MT_WHEN_IDLE_HEAP));
    r.x.heap_free = 64 * MIB - 1;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_HEAP));
    r.x.rss = 5 * GIB;
    r.x.heap_free = 256 * MIB;
    CHECK(fires_alone(&r, MT_WHEN_IDLE_HEAP));
    r.x.heap_free -= 1;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_HEAP));
    r.x.heap_free = GIB;
    r.x.rss = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_HEAP));
    r.x.rss = GIB;
    r.x.heap_free = MT_UNKNOWN;
    CHECK(!fires_alone(&r, MT_WHEN_IDLE_HEAP));
}

/* Of what has "idle heap" as well, host pressure alone asks only where there is some. */
static void
trimming_under_pressure_needs_something_to_trim(void)
{
    const unsigned trim = MT_WHEN_HOST_PRESSURE | MT_WHEN_IDLE_HEAP;
    rig r = rig_new();

    r.x.rss = 9 * GIB;
    r.x.heap_free = 8 * MIB;
    CHECK(!fires(&r, trim, 0));
    r.x.heap_free = 8 * MIB + 1;
    CHECK(fires(&r, trim, MT_WHEN_HOST_PRESSURE));
    r.x.heap_free = GIB;
    CHECK(fires(&r, trim, trim));
    r.x.heap_free = MT_UNKNOWN;
    CHECK(!fires(&r, trim, 0));
}

/* --- rests and hysteresis --------------------------------------------------------------------- */

/* A tick that looks, whatever the pace is. */
static unsigned
look_at(rig *r, uint64_t ns)
{
    unsigned mask;

    r->p.looked_ns = MT_UNKNOWN;
    r->p.next[CLOCK] = 0;
    mask = rig_tick_at(r, CLOCK, ns);
    CHECK(r->read != 0);
    return mask;
}

/* Time from here until it is asked for again, looked at every millisecond. */
static uint64_t
rest_of(rig *r)
{
    uint64_t from = r->now;

    while (look_at(r, MS) == 0 && r->now - from < 1000 * SEC)
        continue;
    return r->now - from;
}

static void
an_action_rests_by_its_cost_and_back_off(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    r.x.rss = 9 * GIB;
    CHECK(rig_tick_at(&r, CLOCK, MS) == 1); /* the first has nothing to rest from */
    rig_done(&r, 0, MS, 0);
    CHECK(rest_of(&r) == SEC);
    rig_done(&r, 0, 25 * MS, 0);
    CHECK(r.p.action[0].backoff == 2 && rest_of(&r) == 5 * SEC);
    rig_done(&r, 0, MS, 0);
    CHECK(rest_of(&r) == 4 * SEC);
    rig_done(&r, 0, MS, 0);
    CHECK(rest_of(&r) == 8 * SEC);
    rig_done(&r, 0, MS, GIB / 8);
    CHECK(rest_of(&r) == SEC);
}

/* Any time, however absurd, is a time. */
static void
a_rest_does_not_overflow(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    r.x.rss = 9 * GIB;
    CHECK(rig_tick_at(&r, CLOCK, MS) == 1);
    mt_policy_done(&r.p, 0, r.now, &(mt_policy_result){.ns = UINT64_MAX / 100 + 1}, NULL);
    CHECK(rest_of(&r) == 1000 * SEC);
    mt_policy_done(&r.p, 0, r.now, &(mt_policy_result){.ns = 1}, NULL);
    r.now -= 5 * SEC; /* a clock that goes back is waited for */
    CHECK(rest_of(&r) == 7 * SEC);
}

/* 5 % below the mark of 8 GiB is 7.6 GiB. */
static void
pressure_that_fell_and_came_again_does_not_wait_for_back_off(void)
{
    const uint64_t low = 76 * GIB / 10;

    for (int fell = 0; fell < 2; fell++) {
        rig r = rig_new();

        rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
        rig_rule(&r, 1, CLOCK, 0, MT_WHEN_DEVICE_PRESSURE, false);
        r.x.rss = 9 * GIB;
        for (int i = 0; i < 4; i++) {
            rest_of(&r);
            rig_done(&r, 0, MS, 0);
        }
        CHECK(r.p.action[0].backoff == 8);
        r.x.rss = fell ? low - 1 : low + 1;
        CHECK(look_at(&r, 100 * MS) == 0);
        r.x.rss = 9 * GIB;
        CHECK(look_at(&r, 100 * MS) == 0); /* at once it is not: it rests as ever */
        CHECK(rest_of(&r) == (fell ? SEC : 8 * SEC) - 200 * MS);
        rig_done(&r, 0, MS, 0);
        CHECK(r.p.action[0].backoff == 16 && rest_of(&r) == 16 * SEC); /* it has to fall again */
    }
}

static void
pressure_of_devices_falls_on_all_of_them(void)
{
    for (int fell = 0; fell < 3; fell++) {
        rig r = rig_new();
        mt_device_sample *a = rig_device(&r), *b = rig_device(&r);

        rig_device(&r)->free = MT_UNKNOWN; /* does not count */
        a->free = b->free = 8 * GIB;
        rig_rule(&r, 0, CLOCK, 0, MT_WHEN_DEVICE_PRESSURE, false);
        for (int i = 0; i < 4; i++) {
            rest_of(&r);
            rig_done(&r, 0, MS, 0);
        }
        if (fell > 0) a->free = 10 * GIB;
        if (fell > 1) b->free = 10 * GIB;
        CHECK(look_at(&r, 100 * MS) == 0);
        a->free = b->free = 8 * GIB;
        CHECK(rest_of(&r) == (fell == 2 ? SEC : 8 * SEC) - 100 * MS);
    }
}

/* What may grow back is judged before its trigger asks again, and then rests by that. */
static void
a_trigger_judges_what_waits_first(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, true);
    r.x.rss = 9 * GIB;
    CHECK(look_at(&r, MS) == 1);
    rig_done(&r, 0, MS, GIB / 2);
    r.x.rss = 9 * GIB;
    CHECK(look_at(&r, SEC) == 1 && r.p.action[0].unpaid_row == 1);
    rig_done(&r, 0, MS, GIB / 2);
    r.x.rss = 9 * GIB;
    CHECK(look_at(&r, SEC) == 0 && r.p.action[0].unpaid_row == 2 && r.p.waiting == 0);
    CHECK(rest_of(&r) == SEC);
    rig_done(&r, 0, MS, GIB / 2);
    CHECK(look_at(&r, 100 * MS) == 0);
    CHECK(r.p.waiting == 1); /* it still rests: its 4 ticks are not over */
}

/* --- looks ------------------------------------------------------------------------------------ */

/* Looks in the last of two seconds of such ticks. */
static int
looks_in_a_second(uint64_t tick_ns, uint64_t *most_ticks)
{
    rig r = rig_new();
    uint64_t since = 0;
    int looks = 0;

    *most_ticks = 0;
    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    for (uint64_t t = 0; t < 2 * SEC; t += tick_ns) {
        CHECK(rig_tick_at(&r, CLOCK, tick_ns) == 0);
        since++;
        if (r.read == 0) continue;
        CHECK(r.read == LOOKS);
        if (since > *most_ticks) *most_ticks = since;
        since = 0;
        looks += t >= SEC;
    }
    CHECK(r.p.looks > (uint64_t)looks);
    return looks;
}

static void
looks_are_50_ms_apart_at_any_pace(void)
{
    uint64_t ticks;

    CHECK(looks_in_a_second(SEC / 4, &ticks) == 4 && ticks == 1);
    CHECK(looks_in_a_second(40 * MS, &ticks) == 25 && ticks == 1);
    CHECK(looks_in_a_second(10 * MS, &ticks) == 20 && ticks == 6); /* 6 before the pace is known */
    CHECK(looks_in_a_second(MS, &ticks) == 20 && ticks == 50);
    CHECK(looks_in_a_second(MS / 4, &ticks) == 20 && ticks == 200);
    CHECK(looks_in_a_second(MS / 10, &ticks) == 39 && ticks == 256); /* 26 ms */
    /* At every 256th tick there is a decision, and nothing is read where 25 ms are not over. */
    CHECK(looks_in_a_second(MS / 100, &ticks) == 39 && ticks == 2560);
}

/* From 1 ms to 100 ms a tick: the next look comes after the 50 ticks that were set, then each
 * time. From there to 1 us: twice as many each time. */
static void
the_pace_may_change(void)
{
    rig r = rig_new();
    uint64_t gap = 1;

    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    rig_quiet(&r, CLOCK, 400, MS);
    CHECK(r.p.pace[CLOCK].gap == 50);
    rig_quiet(&r, CLOCK, 50, 100 * MS);
    CHECK(r.p.pace[CLOCK].gap == 1);
    for (int i = 0; i < 12; i++) {
        uint64_t at = r.p.pace[CLOCK].at;

        CHECK(at - r.p.ticks[CLOCK] == gap);
        while (r.p.ticks[CLOCK] < at)
            rig_quiet(&r, CLOCK, 1, MS / 1000);
        gap = gap < 128 ? 2 * gap : 256;
    }
    rig_quiet(&r, CLOCK, 256, 0); /* in no time */
    CHECK(r.p.pace[CLOCK].gap == 256);
}

static void
clocks_share_their_looks(void)
{
    rig r = rig_new();
    int looks = 0;

    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    for (int i = 0; i < 1000; i++) {
        rig_quiet(&r, (unsigned)i % 8, 1, MS);
        looks += r.read != 0;
    }
    CHECK(looks >= 20 && looks <= 41);
}

static void
nothing_is_read_without_a_trigger(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 1000, 0, true);
    rig_quiet(&r, CLOCK, 900, SEC);
    CHECK(r.ever == 0 && r.p.looks == 0);
    rig_rule(&r, 1, CLOCK, 0, MT_WHEN_FRAGMENTED, false);
    rig_quiet(&r, CLOCK, 1, SEC);
    CHECK(r.read == LOOKS);
    rig_rule(&r, 1, CLOCK, 1000, 0, false);
    r.ever = 0;
    rig_quiet(&r, CLOCK, 50, SEC);
    CHECK(r.ever == 0);
    CHECK(mt_policy_reads_now(&r.p, r.now) == LOOKS); /* for somebody who asks */
}

/* Whatever time it is, and again after forget. */
static void
the_first_tick_looks(void)
{
    rig r = rig_new();

    r.now = 0;
    mt_policy_init(&r.p, &rig_usual, 0);
    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE, false);
    rig_quiet(&r, CLOCK, 1, 0);
    CHECK(r.read != 0);
    rig_quiet(&r, OTHER, 1, 0);
    CHECK(r.read == 0);
    mt_policy_forget(&r.p, r.now);
    rig_quiet(&r, CLOCK, 1, 0);
    CHECK(r.read != 0);
}

/* What is dear rests four thousand times as long as it took, and what was done makes it unknown. */
static void
the_heap_is_read_seldom(void)
{
    rig r = rig_new();

    rig_rule(&r, 0, CLOCK, 0, MT_WHEN_HOST_PRESSURE | MT_WHEN_IDLE_HEAP, false);
    rig_quiet(&r, CLOCK, 1, SEC);
    CHECK(r.read == (LOOKS | MT_READ_HEAP));
    mt_policy_heap_read(&r.p, r.now, MS / 2);
    CHECK(mt_policy_reads_now(&r.p, r.now) == LOOKS);
    rig_quiet(&r, CLOCK, 19, 100 * MS);
    CHECK(r.read == LOOKS);
    CHECK(mt_policy_reads_now(&r.p, r.now + 100 * MS - 1) == LOOKS);
    r.x.heap_free = 32 * MIB;
    rig_quiet(&r, CLOCK, 1, 100 * MS);
    CHECK(r.read == (LOOKS | MT_READ_HEAP) && r.p.heap_free == 32 * MIB);
    mt_policy_heap_read(&r.p, r.now, 5 * MS);
    r.x.rss = 9 * GIB; /* by what was read last */
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1 && r.read == LOOKS);
    rig_done(&r, 0, MS, 0);
    CHECK(r.p.heap_free == MT_UNKNOWN);
    rig_quiet(&r, CLOCK, 18, SEC);
    CHECK(r.read == LOOKS);
    CHECK(rig_tick_at(&r, CLOCK, SEC) == 1 && r.read == (LOOKS | MT_READ_HEAP));
}

int
main(void)
{
    RUN(host_pressure_is_a_part_of_the_limit);
    RUN(device_pressure_needs_something_to_give_back);
    RUN(fragments_are_a_quarter_of_what_is_reserved);
    RUN(an_idle_cache_is_what_the_next_peak_does_not_need);
    RUN(an_idle_heap_is_large_and_a_part_of_the_process);
    RUN(trimming_under_pressure_needs_something_to_trim);
    RUN(an_action_rests_by_its_cost_and_back_off);
    RUN(a_rest_does_not_overflow);
    RUN(pressure_that_fell_and_came_again_does_not_wait_for_back_off);
    RUN(pressure_of_devices_falls_on_all_of_them);
    RUN(a_trigger_judges_what_waits_first);
    RUN(looks_are_50_ms_apart_at_any_pace);
    RUN(the_pace_may_change);
    RUN(clocks_share_their_looks);
    RUN(nothing_is_read_without_a_trigger);
    RUN(the_first_tick_looks);
    RUN(the_heap_is_read_seldom);
    CHECK_DONE();
}
