#include "probe.h"

#include <string.h>

void
mt_sample_clear(mt_sample *out)
{
    memset(out, 0xff, offsetof(mt_sample, devices)); /* MT_UNKNOWN is all ones */
    out->devices = 0;
}

/* The gauge counts what is mapped, rss what was touched: a page that was mapped and never read is
 * in the first alone. */
uint64_t
mt_sample_process(const mt_sample *x)
{
    if (x->rss >= MT_UNLIMITED || x->mapped_again >= MT_UNLIMITED) return x->rss;
    return x->rss > x->mapped_again ? x->rss - x->mapped_again : 0;
}
