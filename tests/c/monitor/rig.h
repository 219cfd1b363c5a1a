/* rig.h -- a sampler whose memory, clock and processor are made up: the table's "thread" is
 * the caller, wait() jumps to the time that it is given, and each reading costs what the rig says.
 *
 *     rig.waits = 100; start ──► run: sample, wait ... 100 times, sample ──► returns
 */
#ifndef MT_TESTS_MONITOR_RIG_H
#define MT_TESTS_MONITOR_RIG_H

#include "kit/check.h"
#include "core/monitor/sampler.h"
#include "kit/faulty.h"

enum {
    RIG_MS = 1000000,
    RIG_BASE = MT_READ_RSS | MT_READ_CGROUP | MT_READ_PRESSURE | MT_READ_SYSTEM
};

typedef struct rig {
    mt_sampler *s;
    mt_sample now;      /* what the probe would read */
    uint64_t ns, cpu;   /* the clocks */
    uint64_t cost[9];   /* of each bit of the mask */
    uint64_t wake;      /* processor time of waking up */
    uint64_t late;      /* how much later than asked each wait returns */
    long waits;         /* until stop */
    long reads[9];      /* of each bit */
    uint64_t asked[64]; /* the first times that wait was given */
    long asks;
    void (*each)(struct rig *rig); /* in each wait */
    int closed;
    int fails; /* start() */
} rig;

static inline void
rig_read(void *ctx, unsigned mask, mt_sample *out)
{
    rig *r = ctx;

    mt_sample_clear(out);
    out->time_ns = r->ns;
    for (int bit = 0; bit < 9; bit++) {
        if (!(mask >> bit & 1)) continue;
        r->cpu += r->cost[bit];
        r->reads[bit]++;
    }
    if (mask & MT_READ_RSS) out->rss = r->now.rss, out->priv = r->now.priv;
    if (mask & MT_READ_CGROUP)
        out->cgroup_used = r->now.cgroup_used, out->cgroup_limit = r->now.cgroup_limit;
    if (mask & MT_READ_PRESSURE) out->pressure = r->now.pressure;
    if (mask & MT_READ_SYSTEM) out->available = r->now.available, out->total = r->now.total;
    if (mask & MT_READ_SWAP) out->swap = r->now.swap;
    if (mask & MT_READ_HEAP) out->heap_used = r->now.heap_used, out->heap_free = r->now.heap_free;
    if (mask & MT_READ_CHILDREN)
        out->children = r->now.children, out->children_priv = r->now.children_priv,
        out->children_swap = r->now.children_swap, out->weighing_ns = r->now.weighing_ns;
    if (mask & MT_READ_SHM) out->shm = r->now.shm, out->shm_mapped = r->now.shm_mapped;
    if (mask & MT_READ_DEVICES) {
        out->devices = r->now.devices;
        memcpy(out->device, r->now.device, sizeof out->device);
    }
}

static inline void
rig_close(void *ctx)
{
    ((rig *)ctx)->closed++;
}

static inline mt_status
rig_start(void *ctx, void (*run)(void *), void *arg, mt_error *err)
{
    rig *r = ctx;

    if (r->fails) return mt_fail(err, MT_EAGAIN, "pthread_create", 11);
    r->cpu = 0;
    run(arg);
    return MT_OK;
}

static inline bool
rig_wait(void *ctx, uint64_t at_ns)
{
    rig *r = ctx;

    if (r->asks < 64) r->asked[r->asks] = at_ns;
    r->asks++;
    CHECK(at_ns > r->ns);
    r->ns = at_ns + r->late;
    r->cpu += r->wake;
    if (r->each != NULL) r->each(r);
    return r->waits-- > 0;
}

static inline void
rig_stop(void *ctx)
{
    (void)ctx;
}

static inline uint64_t
rig_now_ns(void *ctx)
{
    return ((rig *)ctx)->ns;
}

static inline uint64_t
rig_cpu_ns(void *ctx)
{
    return ((rig *)ctx)->cpu;
}

static inline rig
rig_new(void)
{
    rig r = {.ns = 1000 * (uint64_t)RIG_MS};

    mt_sample_clear(&r.now);
    return r;
}

static inline mt_sampler_setup
rig_setup(rig *r, uint64_t interval_ns)
{
    return (mt_sampler_setup){
        .probe = {rig_read, rig_close, r},
        .ticker = {rig_start, rig_wait, rig_stop, rig_now_ns, rig_cpu_ns, rig_close, r},
        .interval_ns = interval_ns,
        .limit = MT_UNLIMITED};
}

static inline void
rig_open(rig *r, const mt_sampler_setup *setup)
{
    CHECK(mt_sampler_new(&mt_alloc_libc, setup, &r->s, NULL) == MT_OK);
}

/* Runs for so many waits. */
static inline void
rig_run(rig *r, long waits)
{
    r->waits = waits;
    CHECK(mt_sampler_start(r->s, NULL) == MT_OK);
    mt_sampler_stop(r->s);
}

static inline void
rig_free(rig *r)
{
    mt_sampler_free(r->s);
    CHECK(r->closed == 2);
}

#endif
