/* triggers.c -- what a reading says to a policy: triggers, and the rest between two actions. */
#include "cleanup/private.h"

#define REARM      0.95  /* of a mark: below, pressure has fallen */
#define REST       1e9   /* nanoseconds from an action to the next by a trigger, at least */
#define REST_SHARE 100.0 /* times what it took, at least as well */
#define MIB        (1ull << 20)
#define WORTH      (64 * MIB) /* fragments and idle heap that are worth an action */
#define A_TRIM     (8 * MIB)  /* idle heap that is worth a trim under pressure */

/* --- signals ---------------------------------------------------------------------------------- */

/* Whether used is at its mark, and whether it is 5 % below. False for both where it is unknown. */
static bool
triggers_is_high(uint64_t used, uint64_t limit, double pressure, bool *fell)
{
    bool known = mt_is_number(used) && mt_is_number(limit) && limit > 0;

    *fell = known && (double)used < REARM * pressure * (double)limit;
    return known && (double)used >= pressure * (double)limit;
}

static uint64_t
taken(const mt_device_sample *d)
{
    bool known = mt_is_number(d->free) && mt_is_number(d->total) && d->free <= d->total;

    return known ? d->total - d->free : MT_UNKNOWN;
}

/* False where either is unknown. */
static bool
is_part(uint64_t bytes, uint64_t whole, double part)
{
    return mt_is_number(bytes) && mt_is_number(whole) && (double)bytes >= part * (double)whole;
}

static uint64_t
idle_cache(uint64_t reserved, uint64_t peak)
{
    if (!mt_is_number(reserved) || !mt_is_number(peak)) return MT_UNKNOWN;
    return reserved > peak ? reserved - peak : 0;
}

/* What the next peak will need: the last one, as torch counts it, or else the most of all looks. */
static uint64_t
peak_of(mt_policy *p, size_t i, const mt_device_sample *d)
{
    uint64_t *most = &p->allocated_most[i];

    if (mt_is_number(d->allocated) && (!mt_is_number(*most) || *most < d->allocated))
        *most = d->allocated;
    return mt_is_number(d->allocated_peak) ? d->allocated_peak : *most;
}

static unsigned
signals_of_device(mt_policy *p, size_t i, const mt_device_sample *d, bool *fell)
{
    uint64_t idle = idle_cache(d->reserved, peak_of(p, i, d));
    bool some = mt_is_number(d->reserved) && d->reserved > d->allocated;
    unsigned on = 0;

    if (triggers_is_high(taken(d), d->total, p->with.pressure, fell) && some)
        on |= MT_WHEN_DEVICE_PRESSURE;
    if (is_part(d->inactive_split, d->reserved, 0.25) && d->inactive_split >= WORTH)
        on |= MT_WHEN_FRAGMENTED;
    if (d->total > 0 && is_part(idle, d->total, 0.25)) on |= MT_WHEN_IDLE_CACHE;
    return on;
}

/* Pressure has fallen where it has on every device that is known. */
static void
add_devices(mt_policy *p, const mt_sample *x, mt_policy_signals *out)
{
    bool any = false, all = true, fell;

    for (size_t i = 0; i < x->devices; i++) {
        out->on |= signals_of_device(p, i, &x->device[i], &fell);
        if (taken(&x->device[i]) == MT_UNKNOWN) continue;
        any = true;
        all = all && fell;
    }
    if (any && all) out->fell |= MT_WHEN_DEVICE_PRESSURE;
}

mt_policy_signals
mt_policy_signals_of(mt_policy *p, const mt_sample *x, mt_limit limit)
{
    mt_policy_signals out = {0};
    bool fell;

    if (mt_is_number(x->heap_free)) p->heap_free = x->heap_free;
    if (triggers_is_high(limit.used, limit.bytes, p->with.pressure, &fell))
        out.on |= MT_WHEN_HOST_PRESSURE;
    if (fell) out.fell |= MT_WHEN_HOST_PRESSURE;
    if (is_part(p->heap_free, x->rss, 0.05) && p->heap_free >= WORTH) out.on |= MT_WHEN_IDLE_HEAP;
    out.heap_is_small = !mt_is_number(p->heap_free) || p->heap_free <= A_TRIM;
    add_devices(p, x, &out);
    return out;
}

mt_policy_level
mt_policy_level_of(const mt_sample *x)
{
    mt_policy_level out = {mt_sample_process(x), MT_UNKNOWN};

    for (size_t i = 0; i < x->devices; i++) {
        uint64_t bytes = taken(&x->device[i]);

        if (bytes == MT_UNKNOWN) bytes = x->device[i].reserved;
        if (!mt_is_number(bytes)) continue;
        out.device = mt_is_number(out.device) ? out.device + bytes : bytes;
    }
    return out;
}

/* --- reasons to act --------------------------------------------------------------------------- */

unsigned
mt_policy_reasons(const mt_policy_action *a, const mt_policy_signals *s)
{
    unsigned reasons = s->on & a->rule.triggers;

    if (a->rule.triggers & MT_WHEN_IDLE_HEAP && s->heap_is_small)
        reasons &= ~(unsigned)MT_WHEN_HOST_PRESSURE;
    return reasons;
}

unsigned
mt_policy_rested(const mt_policy_action *a, unsigned reasons, uint64_t now)
{
    double since = (double)mt_policy_since(a->ended_ns, now),
           rest = REST_SHARE * (double)a->last_ns;

    if (rest < REST) rest = REST;
    if (!a->tried || since >= rest * (double)a->backoff) return reasons;
    return since >= rest ? reasons & a->fell : 0;
}
