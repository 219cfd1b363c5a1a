#include "monitor/watermark.h"

#include <assert.h>

#define REARM 0.95

int
mt_watermarks_add(mt_watermarks *m, unsigned char of, double fraction)
{
    assert(fraction > 0);
    for (int i = 0; i < MT_WATERMARKS; i++) {
        if (m->at[i] > 0) continue;
        m->at[i] = fraction;
        m->of[i] = of;
        m->used[i] = 0;
        m->armed |= 1u << i;
        return i;
    }
    return -1;
}

bool
mt_watermarks_remove(mt_watermarks *m, unsigned i)
{
    if (i >= MT_WATERMARKS || !(m->at[i] > 0)) return false;
    m->at[i] = 0;
    return true;
}

uint32_t
mt_watermarks_look(mt_watermarks *m, unsigned char of, uint64_t used, uint64_t limit)
{
    double part = (double)used / (double)limit;
    uint32_t passed = 0;

    assert(limit > 0);
    for (unsigned i = 0; i < MT_WATERMARKS; i++) {
        if (!(m->at[i] > 0) || m->of[i] != of) continue;
        if (part >= m->at[i])
            passed |= m->armed & 1u << i;
        else if (part < REARM * m->at[i])
            m->armed |= 1u << i;
    }
    for (unsigned i = 0; i < MT_WATERMARKS; i++)
        if (passed >> i & 1) m->used[i] = used;
    m->armed &= ~passed;
    return passed;
}
