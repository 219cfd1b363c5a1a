/* peaks.h -- the exact peak of each of several intervals that overlap, by one mark that rises.
 *
 *   memory          __/\___      ____/\/\_____
 *   mark       ____/       |____/             |___      the kernel's: rises with memory, and can
 *                          ^reset             ^reset    be set back to what is in use now
 *   intervals  A [-----------------------------------
 *   intervals              B [-----------]
 *   intervals                                C [-----
 *
 * The beginning of an interval reads the mark for those that are open and sets it back; the end of
 * one reads it for all. Between two resets every open interval was open all the time, so each peak
 * is exact however the intervals nest or overlap, over threads too: memory is the process's.
 *
 * Where the mark cannot be set back, an interval's peak is the most of what was in use when any
 * interval began or ended: `exact` is false, and the peak means "at least". The same holds while
 * pages are mapped more than once: the mark counts them each time, and how much of it they were at
 * the highest moment is not known, so all that they ever were is taken off, and the peak is at
 * least what is in use now.
 *
 * One thread uses it at a time. The intervals are the callers' memory, in a list. */
#ifndef MT_MONITOR_PEAKS_H
#define MT_MONITOR_PEAKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/gauge.h"
#include "base/status.h"

/* All in bytes; MT_UNKNOWN where it cannot be read. */
typedef struct mt_mark_ops {
    bool (*reset)(void *ctx); /* sets the mark back to what is in use; false when it cannot */
    /* The mark; 0 stands for one that is at most `known`, where that is cheaper to find out. */
    uint64_t (*high)(void *ctx, uint64_t known);
    uint64_t (*now)(void *ctx, uint64_t *shared); /* in use; `shared` of it is shared memory or of
                                                   * files, which is only written with a result */
    void (*close)(void *ctx);
    void *ctx;
    mt_gauge
        *mapped_again; /* borrowed: what high() and now() count more than once; NULL: nothing */
} mt_mark_ops;

typedef struct mt_interval {
    struct mt_interval *prev, *next;
    uint64_t peak; /* so far; MT_UNKNOWN when nothing could be read */
    bool exact;
    bool marked; /* the mark was set back since it began: what it says belongs to this interval */
} mt_interval;

typedef struct mt_peaks mt_peaks;

/* One reference. Takes the mark over, and closes it at the end, or at once on failure. *out is
 * written on MT_OK only. MT_ENOMEM. */
mt_status mt_peaks_new(const mt_alloc *mem, const mt_mark_ops *mark, mt_peaks **out, mt_error *err);
mt_peaks *mt_peaks_hold(mt_peaks *peaks);
/* NULL is ignored. pre, at the last: no interval is open. */
void mt_peaks_drop(mt_peaks *peaks);

/* Two calls of the mark where others are open, one where none is. `in` stays where it is until it
 * has ended. */
void mt_peaks_begin(mt_peaks *peaks, mt_interval *in);
/* Brings every open interval's peak up to date. */
void mt_peaks_look(mt_peaks *peaks);
/* The same, and closes `in`; its peak and exact stay readable. */
void mt_peaks_end(mt_peaks *peaks, mt_interval *in);

#endif
