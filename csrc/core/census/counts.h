/* counts.h -- counts by key: a hash table from a few words to a count and a sum of bytes.
 *
 *   key, up to 2^16 words          line (numbered in the order of arrival)
 *   [type, dtype, device, 2, 512, 8] ──► 0: count 300, bytes 4915200
 *   [type, dtype, device, 1, 64]     ──► 1: count 12, bytes 3072
 *
 * A census of a heap asks it half a million times, so a hit costs one hash of the key and, almost
 * always, one comparison. Lines stay where they are in order; their addresses hold until the next
 * new key. Not thread-safe. */
#ifndef MT_CENSUS_COUNTS_H
#define MT_CENSUS_COUNTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/index.h"
#include "base/status.h"

typedef struct mt_counts_line {
    size_t key;   /* where in the table's words it begins */
    size_t words; /* of the key */
    uint64_t count, bytes;
    uint64_t tag; /* the caller's: 0 in a new line */
} mt_counts_line;

typedef struct mt_counts {
    const mt_alloc *mem;
    mt_counts_line *lines;
    mt_index index; /* of the lines */
    int64_t *words;
    size_t n, lines_cap, words_n, words_cap;
} mt_counts;

/* Takes no memory yet. */
void mt_counts_init(mt_counts *t, const mt_alloc *mem);
void mt_counts_fini(mt_counts *t);

/* *out is the key's line, made with zeros when it is new. MT_ENOMEM, and nothing has changed. */
mt_status mt_counts_line_of(mt_counts *t, const int64_t *key, size_t words, size_t *out,
                            mt_error *err);

/* The key's words; until the next new key. */
const int64_t *mt_counts_key(const mt_counts *t, size_t line);

/* Keys in a fixed order: negative, 0 or positive, as words compare from the first. */
int mt_counts_compare(const mt_counts *t, size_t line, size_t other);

#endif
