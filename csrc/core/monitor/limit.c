#include "monitor/limit.h"

/* Of this process and its children, as far as it is known. The kernel's own figures for the group
 * and the machine count each page once already. */
static uint64_t
own_bytes(const mt_sample *x)
{
    uint64_t process = mt_sample_process(x);

    if (!mt_is_number(process) || !mt_is_number(x->children_priv)) return process;
    return process + x->children_priv;
}

static uint64_t
group_bytes(const mt_sample *x)
{
    return mt_is_number(x->cgroup_used) ? x->cgroup_used : own_bytes(x);
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

    if (mt_is_number(given)) low = (mt_limit){given, own_bytes(x), "given"};
    if (mt_is_number(x->cgroup_limit) && x->cgroup_limit < low.bytes)
        low = (mt_limit){x->cgroup_limit, group_bytes(x), "cgroup"};
    if (mt_is_number(x->total) && x->total < low.bytes)
        low = (mt_limit){x->total, machine_bytes(x), "machine"};
    return low;
}
