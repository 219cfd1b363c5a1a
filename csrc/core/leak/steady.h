/* steady.h -- does a series rise steadily at its end? Told from few readings, and exactly.
 *
 *   bytes |                 . '          The 64 newest readings with their steps, whether one comes
 *         |             . '              at each step or only at steps 16, 24, 32, 48, 64 ...
 *         |   .     . '                  In windows of 5 to 64 of them that cover 16 steps or more:
 *         | '   ' '                      how far does it rise from one to the next, on average, and
 *         +---------|------- steps       how much do these rises differ?
 *                 since
 *
 * A drift is certain where the mean of the rises stands far above what a wander of such rises may
 * make of it. One jump is no drift, and neither is noise: both make rises that differ. Neighbours
 * are also averaged by 2, 4 and 8, which takes away noise from reading to reading and leaves the
 * drift. The more often somebody looks, the more certain it has to be.
 *
 * Steps are all that counts, never time. Pure arithmetic; an evaluation takes a few hundred
 * nanoseconds. No lock: the caller serialises. */
#ifndef MT_LEAK_STEADY_H
#define MT_LEAK_STEADY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    MT_RECENT = 64,      /* readings that are kept */
    MT_STEADY_SPAN = 16, /* steps that a window covers at least */
};

/* The newest readings: a ring, in which reading number i lies at i % MT_RECENT. */
typedef struct mt_recent {
    uint64_t count; /* of all that came */
    int64_t step[MT_RECENT];
    double bytes[MT_RECENT];
} mt_recent;

/* A drift; all zero where there is none. */
typedef struct mt_steady {
    bool certain;
    int64_t since, until; /* the first and the last step of it */
    double slope, se;     /* bytes a step, and the standard error */
    double end;           /* bytes: where the drift is at `until` */
    double off, above;    /* bytes: how far a reading lies from the line at most, and above it */
    double jump;          /* bytes: the largest rise from a reading to the next, less the drift */
    double shape;         /* late half over early half: 1 is a straight line */
    double rise;          /* bytes: over the window that is certain, */
    bool even;            /* its readings are about evenly apart */
    size_t readings;      /* of so many */
} mt_steady;

static inline void
mt_recent_add(mt_recent *r, int64_t step, double bytes)
{
    r->step[r->count % MT_RECENT] = step;
    r->bytes[r->count % MT_RECENT] = bytes;
    r->count++;
}

/* The drift at the end of the series: that of the longest window which is certain and goes on.
 * `least`: bytes below which a rise is none. `looks`: how often the series was looked at before. */
void mt_steady_look(const mt_recent *r, double least, uint64_t looks, mt_steady *out);

#endif
