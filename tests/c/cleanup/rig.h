/* rig.h -- a policy, a time and a reading that a test moves by hand. */
#ifndef MT_TESTS_CLEANUP_RIG_H
#define MT_TESTS_CLEANUP_RIG_H

#include "kit/check.h"
#include "core/cleanup/policy.h"

#define MS  1000000ull
#define SEC 1000000000ull
#define MIB (1ull << 20)
#define GIB (1ull << 30)

enum { CLOCK = 0, OTHER = 5 };

typedef struct rig {
    mt_policy p;
    uint64_t now;
    mt_sample x;         /* what a reading says */
    uint64_t given;      /* limit */
    unsigned read, ever; /* what the last decision read, and all of them */
} rig;

static const mt_policy_setup rig_usual = {.pressure = 0.8, .max_cost = 0.01};

/* Half of a limit of 10 GiB is used, no device, no rules; the time is not 0. */
static inline rig
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

static inline rig
rig_new(void)
{
    return rig_of(&rig_usual);
}

/* A rule of one cadence, 0 for none, of one clock. */
static inline void
rig_rule(rig *r, unsigned action, unsigned clock, uint64_t every, unsigned triggers, bool later)
{
    mt_policy_rule rule = {.triggers = triggers, .later = later};

    rule.every[clock] = every;
    mt_policy_rule_set(&r->p, action, &rule);
}

static inline unsigned
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
static inline unsigned
rig_tick(rig *r, unsigned clock)
{
    r->read = 0;
    if (!mt_policy_tick(&r->p, clock, 1)) return 0;
    return rig_decide(r, clock, mt_policy_reads(&r->p, clock, r->now));
}

static inline unsigned
rig_tick_at(rig *r, unsigned clock, uint64_t ns)
{
    r->now += ns;
    return rig_tick(r, clock);
}

/* n ticks without anything asked for. */
static inline void
rig_quiet(rig *r, unsigned clock, int n, uint64_t ns)
{
    for (int i = 0; i < n; i++)
        CHECK(rig_tick_at(r, clock, ns) == 0);
}

/* An action that took so long frees so many of 10 GiB; of the host, and it does not grow back. */
static inline void
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
static inline mt_device_sample *
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

#endif
