#include "monitor/limit.h"

mt_limit
mt_limit_of(const mt_sample *x, uint64_t given)
{
    mt_limit low = {MT_UNKNOWN, MT_UNKNOWN, ""};
    uint64_t used = mt_sample_job(x);

    if (mt_is_number(given)) low = (mt_limit){given, used, "given"};
    /* The kernel's figures for the group and the machine have all the bytes of the job already. */
    if (mt_is_number(x->cgroup_limit) && x->cgroup_limit < low.bytes) {
        if (mt_is_number(x->cgroup_used)) used = x->cgroup_used;
        low = (mt_limit){x->cgroup_limit, used, "cgroup"};
    }
    if (mt_is_number(x->total) && x->total < low.bytes) {
        used = mt_is_number(x->available) && x->available <= x->total ? x->total - x->available
                                                                      : MT_UNKNOWN;
        low = (mt_limit){x->total, used, "machine"};
    }
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
