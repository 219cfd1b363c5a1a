#include "monitor/peaks.h"

#include <assert.h>
#include <stddef.h>

#include "port/probe.h"

struct mt_peaks {
    mt_alloc mem;
    mt_mark_ops mark;
    size_t refs;
    mt_interval *open;
};

mt_status
mt_peaks_new(const mt_alloc *mem, const mt_mark_ops *mark, mt_peaks **out, mt_error *err)
{
    mt_peaks *p = mt_alloc_zeroed(mem, 1, sizeof *p);

    if (p == NULL) {
        mark->close(mark->ctx);
        return mt_fail(err, MT_ENOMEM, "malloc", 0);
    }
    p->mem = *mem;
    p->mark = *mark;
    p->refs = 1;
    *out = p;
    return MT_OK;
}

mt_peaks *
mt_peaks_hold(mt_peaks *p)
{
    p->refs++;
    return p;
}

void
mt_peaks_drop(mt_peaks *p)
{
    mt_alloc mem;

    if (p == NULL || --p->refs > 0) return;
    assert(p->open == NULL);
    p->mark.close(p->mark.ctx);
    mem = p->mem;
    mem.put(mem.ctx, p, sizeof *p);
}

/* --- what the mark says, with each page counted once ------------------------------------------ */

static uint64_t
less(uint64_t bytes, uint64_t again)
{
    if (bytes == MT_UNKNOWN) return MT_UNKNOWN;
    return bytes > again ? bytes - again : 0;
}

static uint64_t
now_once(mt_peaks *p)
{
    uint64_t shared, now = p->mark.now(p->mark.ctx, &shared);

    if (now == MT_UNKNOWN || p->mark.mapped_again == NULL) return now;
    return less(now, mt_gauge_within(p->mark.mapped_again, shared));
}

/* The mark with each page counted once: the most that was in use since its reset, or 0 where that
 * is at most `known`. Where pages are mapped more than once *exact is false: then it was at
 * least so much. */
static uint64_t
high_once(mt_peaks *p, uint64_t known, bool *exact)
{
    uint64_t again = p->mark.mapped_again == NULL ? 0 : mt_gauge_most(p->mark.mapped_again);
    uint64_t high = p->mark.high(p->mark.ctx, again == 0 ? known : 0), now;

    *exact = again == 0;
    if (again == 0 || high == MT_UNKNOWN) return high;
    high = less(high, again);
    now = now_once(p);
    return now != MT_UNKNOWN && now > high ? now : high;
}

/* --- intervals -------------------------------------------------------------------------------- */

static void
peaks_raise_to(mt_interval *in, uint64_t bytes)
{
    if (bytes == MT_UNKNOWN)
        in->exact = false;
    else if (in->peak == MT_UNKNOWN || in->peak < bytes)
        in->peak = bytes;
}

/* The mark counts for the intervals that began with its reset or later; the peak of an older one can
 * only be raised to what is in use now. */
void
mt_peaks_look(mt_peaks *p)
{
    uint64_t high = MT_UNKNOWN, now = MT_UNKNOWN;
    uint64_t known = MT_UNKNOWN; /* of each interval that the mark counts for, at least */
    bool any_marked = false, any_not = false, exact = true;

    for (mt_interval *in = p->open; in != NULL; in = in->next) {
        *(in->marked ? &any_marked : &any_not) = true;
        if (in->marked) known = in->peak == MT_UNKNOWN ? 0 : mt_u64_min(known, in->peak);
    }
    if (any_marked) high = high_once(p, known, &exact);
    if (any_not) now = now_once(p);
    for (mt_interval *in = p->open; in != NULL; in = in->next) {
        peaks_raise_to(in, in->marked ? high : now);
        if (in->marked && !exact) in->exact = false;
    }
}

void
mt_peaks_begin(mt_peaks *p, mt_interval *in)
{
    mt_peaks_look(p);
    *in = (mt_interval){.next = p->open, .peak = MT_UNKNOWN};
    if (p->open != NULL) p->open->prev = in;
    p->open = in;
    if (p->mark.reset(p->mark.ctx)) {
        if (p->mark.mapped_again != NULL) mt_gauge_reset_most(p->mark.mapped_again);
        in->exact = true;
        for (mt_interval *each = in; each != NULL; each = each->next)
            each->marked = true;
    } else {
        peaks_raise_to(in, now_once(p));
    }
}

void
mt_peaks_end(mt_peaks *p, mt_interval *in)
{
    assert(in->prev != NULL || p->open == in);
    mt_peaks_look(p);
    if (in->next != NULL) in->next->prev = in->prev;
    *(in->prev != NULL ? &in->prev->next : &p->open) = in->next;
    in->prev = in->next = NULL;
}
