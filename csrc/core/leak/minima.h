/* minima.h -- a series of any length as 64 to 127 blocks: the least and the greatest of each.
 *
 *   samples   . . . . | . . . . | . . . . |   4 to a block, at first
 *   blocks      lo hi     lo hi     lo hi     when 128 are full, pairs become one: 64 blocks
 *                                             of twice as many samples
 *
 * The lows are the floor of the series: what is never given back. Spikes and sawteeth that are
 * shorter than a block do not show in them. The blocks cover the whole series in 2 KiB, a sample
 * costs two comparisons, and nothing is allocated. No lock: the caller serialises. */
#ifndef MT_LEAK_MINIMA_H
#define MT_LEAK_MINIMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MT_MINIMA_BLOCKS = 128, MT_MINIMA_FIRST = 64, MT_MINIMA_EVERY = 8, MT_MINIMA_LENGTH = 4 };

typedef struct mt_minima {
    double low, high; /* of the block that is being filled */
    uint64_t count;   /* samples in it */
    uint64_t length;  /* samples of a whole block */
    size_t n;         /* whole blocks */
    double lows[MT_MINIMA_BLOCKS], highs[MT_MINIMA_BLOCKS];
} mt_minima;

/* Nothing seen. */
void mt_minima_reset(mt_minima *f);

/* Ends a block. True when the series should be looked at: there are 64 blocks or more, and eight
 * more than the last time. That is after each 6 to 12 % of the series, 40 times in 8,000 samples.
 */
bool mt_minima_push(mt_minima *f);

/* Adds a sample, which is finite. True as for push. */
static inline bool
mt_minima_add(mt_minima *f, double y)
{
    if (y < f->low) f->low = y;
    if (y > f->high) f->high = y;
    return ++f->count == f->length && mt_minima_push(f);
}

#endif
