#include "port/probe.h"

#include <stdbool.h>
#include <string.h>

void
mt_sample_clear(mt_sample *out)
{
    memset(out, 0xff, offsetof(mt_sample, devices)); /* MT_UNKNOWN is all ones */
    out->devices = 0;
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
