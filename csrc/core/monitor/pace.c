#include "monitor/pace.h"

#include <assert.h>

#include "base/size.h"
#include "port/probe.h"

enum {
    MS = 1000000,
    OFTEN_NS = 100000000,
    CHILDREN_NS = 200000000,
    /* Of a core one part in so many, for samples and for each of the rare readings: away from the
     * limit, and near it. */
    SAMPLE_SHARE = 200,
    SAMPLE_NEAR = 30,
    RARE_SHARE = 1000,
    RARE_NEAR = 200,
    RARE_CHANGED = 50,
    USUAL_NS = 10 * MS, /* an interval for which that is meant */
    LOOKS_BEFORE = 16,  /* samples in the time that is left at the rate of the last interval */
};

static const struct rare {
    unsigned what;
    uint64_t interval_ns;
} rare[MT_PACE_RARE] = {{MT_READ_SWAP, OFTEN_NS},
                        {MT_READ_HEAP, OFTEN_NS},
                        {MT_READ_CHILDREN, CHILDREN_NS},
                        {MT_READ_SHM, CHILDREN_NS}};

void
mt_pace_init(mt_pace *p, uint64_t interval_ns, uint64_t now)
{
    assert(interval_ns > 0);
    *p = (mt_pace){
        .interval_ns = interval_ns, .wait_ns = interval_ns, .next_ns = now, .used = MT_UNKNOWN};
}

unsigned
mt_pace_due(const mt_pace *p, uint64_t now)
{
    int first = 0;

    for (int i = 1; i < MT_PACE_RARE; i++)
        if (p->due[i] < p->due[first]) first = i;
    return p->due[first] <= now ? rare[first].what : 0;
}

void
mt_pace_rare(mt_pace *p, unsigned what, uint64_t now, uint64_t cost_ns, bool changed)
{
    uint64_t share = changed ? RARE_CHANGED : p->near ? RARE_NEAR : RARE_SHARE;

    for (int i = 0; i < MT_PACE_RARE; i++)
        if (rare[i].what == what)
            p->due[i] = now + mt_u64_max(rare[i].interval_ns, share * cost_ns);
}

/* The interval that the distance to the limit and the rise since the last sample ask for: from
 * three quarters of the limit on, the part of the last quarter that is left; and LOOKS_BEFORE
 * samples before the limit is reached. */
static uint64_t
interval_at(const mt_pace *p, uint64_t now, uint64_t used, uint64_t limit)
{
    double interval = (double)p->interval_ns, wait = interval, left, rate;

    if (used == MT_UNKNOWN || limit == MT_UNKNOWN) return p->interval_ns;
    left = used < limit ? 4 * (1 - (double)used / (double)limit) : 0;
    if (left < 1) wait = interval * left;
    if (used > p->used && now > p->used_at) { /* MT_UNKNOWN is more than anything */
        rate = (double)(used - p->used) / (double)(now - p->used_at);
        left = used < limit ? (double)(limit - used) / rate / LOOKS_BEFORE : 0;
        if (left < wait) wait = left;
    }
    return mt_u64_max((uint64_t)wait, mt_u64_min(MS, p->interval_ns));
}

/* The first cost counts in full, a later one by an eighth: one that was expensive does not stop the
 * samples, one that always is slows them down. */
uint64_t
mt_pace_next(mt_pace *p, uint64_t now, uint64_t cost_ns, uint64_t used, uint64_t limit)
{
    uint64_t share = SAMPLE_SHARE * mt_u64_min(p->interval_ns, USUAL_NS) / USUAL_NS;

    p->cost_ns = p->cost_ns == 0 ? cost_ns : (7 * p->cost_ns + cost_ns) / 8;
    p->wait_ns = interval_at(p, now, used, limit);
    p->used = used;
    p->used_at = now;
    p->near = p->wait_ns < p->interval_ns;
    if (p->near || share < SAMPLE_NEAR) share = SAMPLE_NEAR;
    p->wait_ns = mt_u64_max(p->wait_ns, share * p->cost_ns);
    p->next_ns += p->wait_ns;
    if (p->next_ns <= now) p->next_ns = now + p->wait_ns;
    return p->next_ns;
}
