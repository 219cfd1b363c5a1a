/* series.h -- a run of any length in a fixed number of bytes: the newest samples one by one, and
 * the whole time line in buckets.
 *
 *   state   [ folds : 8 bits | samples : 56 bits ]     one word, one store
 *   rows    [ 8 | 9 | 4 | 5 | 6 | 7 ]                  sample k lies in row k % rows
 *   bank 0  [ 0-1 | 2-3 | 4-5 | ... ]                  folds even: this bank counts
 *   bank 1  [ 0-3 | 4-7 | ..........]                  folds odd
 *
 *   row     stamp = sample + 1, time, value of each column, check
 *   bucket  first time, last time, then per column: least, most, last
 *
 * A bucket holds 2^folds samples. When all buckets of the bank are full, pairs of them merge into
 * the first half of the other bank, and the next store of the state makes that one count. So there
 * are always between half and all of the buckets, whatever the length of the run. An append costs
 * O(columns), and O(buckets * columns) each time the length of the run has doubled.
 *
 * A column's value is a uint64; MT_UNKNOWN is "no reading" and is left out of least, most and last,
 * which are MT_UNKNOWN only where the bucket has no reading at all.
 *
 * Killed at any instruction: sample k is first written as a row (whose stamp is taken back before
 * and published after), then added to its bucket, then counted in the state. The reader adds rows
 * that are not counted yet once more; adding twice changes nothing. So at most the one row in
 * flight is lost, with the old one whose place it takes.
 *
 * Nothing is allocated. No lock: one writer at a time; a reader works on a copy of the region. */
#ifndef MT_RECORD_SERIES_H
#define MT_RECORD_SERIES_H

#include <stddef.h>
#include <stdint.h>

#include "base/size.h"

enum {
    MT_SERIES_COLUMNS_MAX = 64,
    MT_SERIES_ROWS_MAX = 1 << 24,
    MT_SERIES_BUCKETS_MAX = 1 << 16,
    MT_SERIES_FOLDS_AT = 56, /* bit of the state word */
};

typedef struct mt_series_size {
    size_t columns, rows, buckets; /* 1 to the maximum; buckets is even */
} mt_series_size;

typedef struct mt_series {
    mt_series_size size;
    uint64_t *state, *row, *bank[2]; /* inside the region */
    uint64_t samples;                /* ever, what the state word says */
    unsigned folds;
} mt_series;

/* NULL, or what is wrong with the sizes as static text. */
const char *mt_series_fault(const mt_series_size *size);

/* Bytes of the region; a multiple of 64. pre: the sizes have no fault. */
size_t mt_series_bytes(const mt_series_size *size);

/* Makes an empty series of a region of mt_series_bytes, aligned to 8; writes all of it. */
void mt_series_init(mt_series *s, void *region, const mt_series_size *size);

/* Adds a sample: one value per column. pre: fewer than 2^40 * buckets samples. */
void mt_series_append(mt_series *s, uint64_t time_ns, const uint64_t *values);

#endif
