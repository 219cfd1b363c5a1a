/* stats.h -- gate statistics for ever, in constant memory.
 *
 *   total      importance[experts], load[experts], tokens, nonfinite
 *   marks      copies of `total` taken every `span` entries, at most MT_MARKS of them:
 *
 *     entries  0 .... span .... 2 span .... 3 span .... now
 *                      m0         m1          m2       total
 *
 * The statistics of a window are the difference of two marks. When the marks are full, every other
 * one is dropped and the span doubles: a long run has 64 to 129 windows.
 *
 * Storage is allocated by the first reserve() and never again. No lock: the caller serialises. */
#ifndef MT_GATE_STATS_H
#define MT_GATE_STATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "gate/scan.h"
#include "base/status.h"

enum { MT_MARKS = 128 };

typedef struct mt_gatestats {
    const mt_alloc *mem;
    size_t experts; /* 0 until reserve() */
    unsigned top_k;
    uint64_t entries;
    mt_gatesums total;
    uint64_t span; /* entries between two marks */
    size_t marks;
    mt_gatesums mark[MT_MARKS]; /* mark i: the totals after (i + 1) * span entries */
    double *doubles;            /* the storage behind all importance arrays */
    uint64_t *counts;           /* and behind all load arrays */
} mt_gatestats;

void mt_gatestats_init(mt_gatestats *s, const mt_alloc *mem, unsigned top_k);
void mt_gatestats_fini(mt_gatestats *s);

/* Copies sums over `experts` columns to other arrays. */
void mt_gatesums_copy(mt_gatesums *to, const mt_gatesums *from, size_t experts);

/* Makes room for `experts` columns; again with the same number is free. pre: experts > 0, not
 * another number than before. MT_ENOMEM, MT_EOVERFLOW; *s is then as it was. */
mt_status mt_gatestats_reserve(mt_gatestats *s, size_t experts, mt_error *err);

/* Adds a part of an entry: packed rows. pre: reserved, top_k <= experts. */
void mt_gatestats_add(mt_gatestats *s, const void *x, mt_gate_width width, size_t rows);

/* Ends an entry, which may have had no rows. */
void mt_gatestats_end_entry(mt_gatestats *s);

/* Back to nothing seen; the storage stays. */
void mt_gatestats_reset(mt_gatestats *s);

/* Makes *to equal. pre: reserved for as many columns, or neither is. */
void mt_gatestats_copy(mt_gatestats *to, const mt_gatestats *from);

/* Number of windows: whole spans plus the unfinished one. */
size_t mt_gatestats_windows(const mt_gatestats *s);

/* Window i as sums, written to out, whose arrays the caller supplies ([experts] each), and the
 * number of its entries. pre: i < windows. */
void mt_gatestats_window(const mt_gatestats *s, size_t i, mt_gatesums *out, uint64_t *entries);

#endif
