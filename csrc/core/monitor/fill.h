/* fill.h -- how fast something fills: its last readings, and whether they rise for certain.
 *
 *   bytes         . . '     a reading a second, the newest 32
 *           . . '
 *     . . '                 certain: 8 readings or more, and of all pairs of two of them the later
 *                           is higher in so many more than it is lower, that these are 9 in 10
 *
 * So it is a fact about the last seconds, and no forecast. Plain data, no lock. */
#ifndef MT_MONITOR_FILL_H
#define MT_MONITOR_FILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MT_FILL_READINGS = 32, MT_FILL_LEAST = 8 };

typedef struct mt_fill_reading {
    uint64_t time_ns, steps, bytes;
} mt_fill_reading;

/* All zeros: no reading yet. */
typedef struct mt_fill {
    size_t len;
    mt_fill_reading at[MT_FILL_READINGS]; /* the oldest first */
} mt_fill;

/* Times do not fall. A reading within a second of the one before is left out, and where the bytes
 * are MT_UNKNOWN all readings are forgotten. */
void mt_fill_add(mt_fill *f, mt_fill_reading now);

/* By how much it rose over the readings, in how many nanoseconds and steps. False where it is not
 * certain that it rises. */
bool mt_fill_rise(const mt_fill *f, mt_fill_reading *out);

#endif
