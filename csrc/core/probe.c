#include "probe.h"

#include <string.h>

void
mt_sample_clear(mt_sample *out)
{
    memset(out, 0xff, offsetof(mt_sample, devices)); /* MT_UNKNOWN is all ones */
    out->devices = 0;
}
