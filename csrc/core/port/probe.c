#include "port/probe.h"

#include <stdbool.h>
#include <string.h>

void
mt_sample_clear(mt_sample *out)
{
    memset(out, 0xff, offsetof(mt_sample, devices)); /* MT_UNKNOWN is all ones */
    out->devices = out->weighing_ns = 0;
}

void
mt_sample_count_once(mt_sample *x, mt_gauge *mapped_again)
{
    bool known = x->rss < MT_UNLIMITED && x->priv < MT_UNLIMITED;
    uint64_t shared = known && x->rss > x->priv ? x->rss - x->priv : 0;

    x->mapped_again = mt_gauge_within(mapped_again, known ? shared : UINT64_MAX);
}

uint64_t
mt_sample_process(const mt_sample *x)
{
    if (x->rss >= MT_UNLIMITED || x->mapped_again >= MT_UNLIMITED) return x->rss;
    return x->rss > x->mapped_again ? x->rss - x->mapped_again : 0;
}

static uint64_t
known(uint64_t bytes)
{
    return bytes < MT_UNLIMITED ? bytes : 0;
}

/* The process and its children, with that part of the job's shared memory that this process does
 * not map, and what is swapped out. Shared memory is read more rarely than the rest: what pools map
 * again, which shm_mapped counts as well, is taken off by its newest figure, so that rows which
 * came since count once. */
uint64_t
mt_sample_job(const mt_sample *x)
{
    uint64_t own = mt_sample_process(x);

    if (own >= MT_UNLIMITED) return own;
    if (x->shm < MT_UNLIMITED && x->shm_mapped < MT_UNLIMITED) {
        uint64_t again = known(x->mapped_again);
        uint64_t once = x->shm_mapped > again ? x->shm_mapped - again : 0;
        own += x->shm > once ? x->shm - once : 0;
    }
    return own + known(x->children_priv) + known(x->swap) + known(x->children_swap);
}

uint64_t
mt_sample_job_swap(const mt_sample *x)
{
    if (x->swap >= MT_UNLIMITED || x->children_swap >= MT_UNLIMITED) return MT_UNKNOWN;
    return x->swap + x->children_swap;
}
