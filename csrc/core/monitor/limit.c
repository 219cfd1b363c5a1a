#include "monitor/limit.h"

/* The kernel's figures for the group and the machine have all the bytes of the job already. */
static uint64_t
group_bytes(const mt_sample *x)
{
    return mt_is_number(x->cgroup_used) ? x->cgroup_used : mt_sample_job(x);
}

static uint64_t
machine_bytes(const mt_sample *x)
{
    return mt_is_number(x->available) && x->available <= x->total ? x->total - x->available
                                                                  : MT_UNKNOWN;
}

mt_limit
mt_limit_of(const mt_sample *x, uint64_t given)
{
    mt_limit low = {MT_UNKNOWN, MT_UNKNOWN, ""};

    if (mt_is_number(given)) low = (mt_limit){given, mt_sample_job(x), "given"};
    if (mt_is_number(x->cgroup_limit) && x->cgroup_limit < low.bytes)
        low = (mt_limit){x->cgroup_limit, group_bytes(x), "cgroup"};
    if (mt_is_number(x->total) && x->total < low.bytes)
        low = (mt_limit){x->total, machine_bytes(x), "machine"};
    return low;
}

uint64_t
mt_device_used(const mt_device_sample *d)
{
    uint64_t known;

    if (!mt_is_number(d->allocated) || !mt_is_number(d->reserved) || !mt_is_number(d->free) ||
        !mt_is_number(d->total))
        return MT_UNKNOWN;
    known = d->free + d->reserved;
    return d->allocated + (known < d->total ? d->total - known : 0);
}
