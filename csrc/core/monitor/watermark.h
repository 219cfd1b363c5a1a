/* watermark.h -- reports once when memory has risen past a part of its limit. Each mark is of one
 * memory: the host's, or that of a device.
 *
 *   used / limit      ________          ______
 *   0.90  ----------/----------\------/--------     reported at each of the two rises: 
 *   0.855 ---------/------------\----/---------     memory fell 5 % below the mark between
 *                 /              \__/
 *
 * Plain data, no lock. */
#ifndef MT_MONITOR_WATERMARK_H
#define MT_MONITOR_WATERMARK_H

#include <stdbool.h>
#include <stdint.h>

/* Of which memory a mark is; device i is MT_MARK_DEVICE + i. */
enum { MT_WATERMARKS = 32, MT_MARK_HOST = 0, MT_MARK_DEVICE = 1 };

typedef struct mt_watermarks {
    double at[MT_WATERMARKS];        /* 0: free */
    unsigned char of[MT_WATERMARKS]; /* which memory */
    uint64_t used[MT_WATERMARKS];    /* of it, when the mark was passed last; 0: never */
    uint32_t armed;
} mt_watermarks;

/* The mark's number, or -1 when all are in use. One that memory is above already is reported
 * by the next look at it. pre: fraction > 0. */
int mt_watermarks_add(mt_watermarks *m, unsigned char of, double fraction);
/* False when there is no such mark. */
bool mt_watermarks_remove(mt_watermarks *m, unsigned i);

/* The marks of that memory that are passed now and were armed, a bit each. pre: limit > 0. */
uint32_t mt_watermarks_look(mt_watermarks *m, unsigned char of, uint64_t used, uint64_t limit);

#endif
