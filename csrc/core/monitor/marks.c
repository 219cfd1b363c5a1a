#include "monitor/marks.h"

#define REARM 0.95

int
mt_marks_add(mt_marks *m, double fraction)
{
    for (int i = 0; i < MT_MARKS; i++) {
        if (m->at[i] > 0) continue;
        m->at[i] = fraction;
        m->armed |= 1u << i;
        return i;
    }
    return -1;
}

bool
mt_marks_remove(mt_marks *m, unsigned i)
{
    if (i >= MT_MARKS || !(m->at[i] > 0)) return false;
    m->at[i] = 0;
    return true;
}

uint32_t
mt_marks_look(mt_marks *m, uint64_t used, uint64_t limit)
{
    double part = (double)used / (double)limit;
    uint32_t passed = 0;

    for (unsigned i = 0; i < MT_MARKS; i++) {
        if (!(m->at[i] > 0)) continue;
        if (part >= m->at[i])
            passed |= m->armed & 1u << i;
        else if (part < REARM * m->at[i])
            m->armed |= 1u << i;
    }
    m->armed &= ~passed;
    return passed;
}
