#include "probe.h"

void
mt_sample_clear(mt_sample *out)
{
    uint64_t *field = &out->time_ns;

    while (field != &out->devices)
        *field++ = MT_UNKNOWN;
    out->devices = 0;
}
