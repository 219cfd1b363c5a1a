#include "monitor/fill.h"

#include <string.h>

#include "base/size.h"

static const uint64_t APART_NS = 1000000000;

void
mt_fill_add(mt_fill *f, mt_fill_reading now)
{
    if (now.bytes >= MT_UNLIMITED) {
        f->len = 0;
        return;
    }
    if (f->len > 0 && now.time_ns - f->at[f->len - 1].time_ns < APART_NS) return;
    if (f->len == MT_FILL_READINGS) memmove(f->at, f->at + 1, --f->len * sizeof *f->at);
    f->at[f->len++] = now;
}

bool
mt_fill_rise(const mt_fill *f, mt_fill_reading *out)
{
    const mt_fill_reading *first = f->at, *last;
    long more = 0, pairs;

    if (f->len < MT_FILL_LEAST) return false;
    last = f->at + f->len - 1;
    pairs = (long)(f->len * (f->len - 1) / 2);
    for (size_t j = 1; j < f->len; j++) {
        for (size_t i = 0; i < j; i++)
            more += (f->at[j].bytes > f->at[i].bytes) - (f->at[j].bytes < f->at[i].bytes);
    }
    if (10 * more < 9 * pairs) return false;
    *out = (mt_fill_reading){last->time_ns - first->time_ns, last->steps - first->steps,
                             last->bytes - first->bytes};
    return true;
}
