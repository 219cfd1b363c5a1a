#include "monitor/pace.h"

#include "base/size.h"
#include "port/probe.h"

enum {
    MS = 1000000,
    OFTEN_NS = 100000000,
    CHILDREN_NS = 200000000,
    SAMPLE_SHARE = 30,  /* of a core: one part in so many */
    SELDOM_SHARE = 200, /* for each of the three */
    LOOKS_BEFORE = 16,  /* samples in the time that is left at the rate of the last interval */
};

static const struct seldom {
    unsigned what;
    uint64_t interval_ns;
} seldom[MT_PACE_SELDOM] = {
    {MT_READ_SWAP, OFTEN_NS}, {MT_READ_HEAP, OFTEN_NS}, {MT_READ_CHILDREN, CHILDREN_NS}};

void
mt_pace_init(mt_pace *p, uint64_t interval_ns, uint64_t now)
{
    *p = (mt_pace){
        .interval_ns = interval_ns, .wait_ns = interval_ns, .next_ns = now, .used = MT_UNKNOWN};
}

unsigned
mt_pace_due(const mt_pace *p, uint64_t now)
{
    int first = 0;

    for (int i = 1; i < MT_PACE_SELDOM; i++)
        if (p->due[i] < p->due[first]) first = i;
    return p->due[first] <= now ? seldom[first].what : 0;
}

void
mt_pace_seldom(mt_pace *p, unsigned what, uint64_t now, uint64_t cost_ns)
{
    for (int i = 0; i < MT_PACE_SELDOM; i++)
        if (seldom[i].what == what)
            p->due[i] = now + mt_u64_max(seldom[i].interval_ns, SELDOM_SHARE * cost_ns);
}

/* From three quarters of the limit on, the part of the last quarter that is left. */
static uint64_t
by_place(uint64_t interval, uint64_t used, uint64_t limit)
{
    double left = used < limit ? 4 * (1 - (double)used / (double)limit) : 0;

    return left < 1 ? (uint64_t)((double)interval * left) : interval;
}

static uint64_t
by_rise(const mt_pace *p, uint64_t now, uint64_t used, uint64_t limit)
{
    double rate, left;

    /* MT_UNKNOWN is more than anything. */
    if (used <= p->used || now <= p->used_at) return p->interval_ns;
    rate = (double)(used - p->used) / (double)(now - p->used_at);
    left = used < limit ? (double)(limit - used) / rate / LOOKS_BEFORE : 0;
    return left < (double)p->interval_ns ? (uint64_t)left : p->interval_ns;
}

static uint64_t
interval_at(mt_pace *p, uint64_t now, uint64_t used, uint64_t limit)
{
    uint64_t wait = p->interval_ns;

    if (used != MT_UNKNOWN && limit != MT_UNKNOWN) {
        wait = mt_u64_min(by_place(wait, used, limit), by_rise(p, now, used, limit));
        wait = mt_u64_max(wait, mt_u64_min(MS, p->interval_ns));
    }
    p->used = used;
    p->used_at = now;
    return wait;
}

/* The first cost counts in full, a later one by an eighth: one that was dear does not stop the
 * samples, one that always is slows them down. */
uint64_t
mt_pace_next(mt_pace *p, uint64_t now, uint64_t cost_ns, uint64_t used, uint64_t limit)
{
    p->cost_ns = p->cost_ns == 0 ? cost_ns : (7 * p->cost_ns + cost_ns) / 8;
    p->wait_ns = mt_u64_max(interval_at(p, now, used, limit), SAMPLE_SHARE * p->cost_ns);
    p->next_ns += p->wait_ns;
    if (p->next_ns <= now) p->next_ns = now + p->wait_ns;
    return p->next_ns;
}
