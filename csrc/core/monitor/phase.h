/* phase.h -- named phases: how often, how long, and what memory each needed at most.
 *
 *   enter("train") ──► token ──► leave(token) ──► what this one was        open: one slot each
 *                                     │
 *                                     └──► row "train": count, time, peaks, one per name
 *
 * Phases may nest and overlap: each peak is exact by itself (see peaks.h), so nothing has to be
 * left in the order in which it was entered. Any thread that has the token of a phase may
 * leave it, once. A phase that is never left costs its slot.
 *
 * Everything is in one block of a fixed size. When there are more names than rows, those that come
 * too late are counted together in the last row, whose name is MT_PHASE_OTHERS. When all slots are
 * open, enter refuses. One thread uses them at a time. */
#ifndef MT_MONITOR_PHASE_H
#define MT_MONITOR_PHASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "monitor/peaks.h"
#include "base/status.h"

#define MT_PHASE_OTHERS "(others)"

enum {
    MT_PHASE_NAME = 48, /* bytes of a name, with its final 0; longer ones are cut */
    MT_PHASE_OPEN = 64, /* that may be open at once */
};

/* Bytes are MT_UNKNOWN where nothing could be read. */
typedef struct mt_phase_seen {
    uint64_t peak;
    uint64_t ns;
    bool exact; /* false: the peak was at least that */
} mt_phase_seen;

typedef struct mt_phase_row {
    char name[MT_PHASE_NAME];
    uint64_t count; /* of those that were left */
    uint64_t total_ns, most_ns;
    uint64_t peak;    /* the highest of all */
    uint64_t inexact; /* of count, those whose peak was "at least" */
} mt_phase_row;

typedef struct mt_phases mt_phases;

/* Holds `peaks`. pre: rows > 1. *out is written on MT_OK only. MT_ENOMEM, MT_EOVERFLOW. */
mt_status mt_phases_new(const mt_alloc *mem, mt_peaks *peaks, size_t rows, mt_phases **out,
                        mt_error *err);
/* Ends what is open without counting it. NULL is ignored. */
void mt_phases_free(mt_phases *phases);

/* A token, or 0 when MT_PHASE_OPEN are open. */
uint64_t mt_phases_enter(mt_phases *phases, const char *name, size_t len);
/* False for a token that is not open: it was left already, or never given out. */
bool mt_phases_leave(mt_phases *phases, uint64_t token, mt_phase_seen *out);

/* Copies at most n rows, in the order in which the names came; returns how many there are. */
size_t mt_phases_rows(mt_phases *phases, mt_phase_row *out, size_t n);
/* Copies the name of the open phase that was entered last, cut to MT_PHASE_NAME; false where none
 * is open. */
bool mt_phases_current(mt_phases *phases, char out[MT_PHASE_NAME]);

#endif
