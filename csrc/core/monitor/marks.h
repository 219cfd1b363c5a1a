/* marks.h -- watermarks: tells once when memory has risen past a part of its limit.
 *
 *   used / limit      ________          ______
 *   0.90  ----------/----------\------/--------     told at each of the two rises, because
 *   0.855 ---------/------------\----/---------     memory fell 5 % below the mark in between
 *                 /              \__/
 *
 * Plain data, no lock. */
#ifndef MT_MONITOR_MARKS_H
#define MT_MONITOR_MARKS_H

#include <stdbool.h>
#include <stdint.h>

enum { MT_MARKS = 32 };

typedef struct mt_marks {
    double at[MT_MARKS]; /* 0: free */
    uint32_t armed;
} mt_marks;

/* The mark's number, or -1 when all are in use. One that memory is above already is told by the
 * next look. pre: fraction > 0. */
int mt_marks_add(mt_marks *m, double fraction);
/* False when there is no such mark. */
bool mt_marks_remove(mt_marks *m, unsigned i);

/* The marks that are passed now and were armed, a bit each. pre: limit > 0. */
uint32_t mt_marks_look(mt_marks *m, uint64_t used, uint64_t limit);

#endif
