/* When to clean up, by examples: absurd numbers, and when memory is looked at. What is due, what it is
 * asked for, what pays and what rests is compared with a model: see test_model.c. */
#include "kit/check.h"
#include "core/cleanup/policy.h"

#define MS  1000000ull
#define SEC 1000000000ull
#define MIB (1ull << 20)
#define GIB (1ull << 30)

enum { CLOCK = 0, OTHER = 5 };
enum { LOOKS = MT_READ_RSS | MT_READ_CGROUP | MT_READ_SYSTEM | MT_READ_DEVICES };

typedef struct rig {
    mt_policy p;
    uint64_t now;
    mt_sample x;         /* what a reading says */
    uint64_t given;      /* limit */
    unsigned read, ever; /* what the last decision read, and all of them */
} rig;

static const mt_policy_setup rig_usual = {.pressure = 0.8, .max_cost = 0.01};

/* Half of a limit of 10 GiB is used, no device, no rules; the time is not 0. */
static rig
rig_of(const mt_policy_setup *with)
{
    rig r = {.now = 1000 * SEC, .given = 10 * GIB};

    mt_sample_clear(&r.x);
    for (int i = 0; i < MT_SAMPLE_DEVICES; i++) /* which there are not */
        r.x.device[i] = (mt_device_sample){7, 7, 70, 7, 700, 70};
    r.x.rss = 5 * GIB;
    r.x.heap_free = 0;
    mt_policy_init(&r.p, with, r.now);
    return r;
}

static rig
rig_new(void)
{
    return rig_of(&rig_usual);
}

/* A rule of one cadence, 0 for none, of one clock. */
static void
rig_rule(rig *r, unsigned action, unsigned clock, uint64_t every, unsigned triggers, bool later)
{
    mt_policy_rule rule = {.triggers = triggers, .later = later};

    rule.every[clock] = every;
    mt_policy_rule_set(&r->p, action, &rule);
}

static unsigned
rig_decide(rig *r, unsigned clock, unsigned reads)
{
    mt_sample x = r->x;
    uint64_t free = x.heap_free;

    r->read = reads;
    r->ever |= reads;
    if (!(reads & MT_READ_HEAP)) x.heap_free = MT_UNKNOWN;
    if (reads & MT_READ_HEAP && free != MT_UNKNOWN) mt_policy_heap_read(&r->p, r->now, MS / 1000);
    return mt_policy_decide(&r->p, clock, r->now, reads != 0 ? &x : NULL,
                            mt_limit_of(&x, r->given));
}

/* One tick, and what is asked for. */
static unsigned
rig_tick(rig *r, unsigned clock)
{
    r->read = 0;
    if (!mt_policy_tick(&r->p, clock, 1)) return 0;
    return rig_decide(r, clock, mt_policy_reads(&r->p, clock, r->now));
}

static unsigned
rig_tick_at(rig *r, unsigned clock, uint64_t ns)
{
    r->now += ns;
    return rig_tick(r, clock);
}

/* n ticks without anything asked for. */
static void
rig_quiet(rig *r, unsigned clock, int n, uint64_t ns)
{
    for (int i = 0; i < n; i++)
        CHECK(rig_tick_at(r, clock, ns) == 0);
}

/* An action that took so long frees so many of 10 GiB; of the host, and it does not grow back. */
static void
rig_done(rig *r, unsigned action, uint64_t ns, uint64_t freed)
{
    mt_policy_result did = {ns,         5 * GIB,    5 * GIB - freed, 10 * GIB,
                            MT_UNKNOWN, MT_UNKNOWN, MT_UNKNOWN};
    mt_policy_level level;

    r->now += ns;
    r->x.rss -= freed;
    level = mt_policy_level_of(&r->x);
    mt_policy_done(&r->p, action, r->now, &did, &level);
}

/* A device of 40 GiB without pressure, fragments or much of a cache. */
static mt_device_sample *
rig_device(rig *r)
{
    mt_device_sample *d = &r->x.device[r->x.devices++];

    *d = (mt_device_sample){.allocated = 8 * GIB,
                            .allocated_peak = 9 * GIB,
                            .reserved = 10 * GIB,
                            .free = 30 * GIB,
                            .total = 40 * GIB,
                            .inactive_split = 0};
    return d;
}

/* --- absurd numbers --------------------------------------------------------------------------- */

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

/* What is expensive rests four thousand times as long as it took, and what was done makes it unknown. */
static void
the_heap_is_read_rarely(void)
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
    RUN(several_ticks_at_once_are_due_once);
    RUN(a_level_is_what_is_known);
    RUN(a_rest_does_not_overflow);
    RUN(looks_are_50_ms_apart_at_any_pace);
    RUN(the_pace_may_change);
    RUN(clocks_share_their_looks);
    RUN(nothing_is_read_without_a_trigger);
    RUN(the_first_tick_looks);
    RUN(the_heap_is_read_rarely);
    CHECK_DONE();
}
