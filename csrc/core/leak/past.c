#include "leak/past.h"

#include <assert.h>
#include <math.h>

static const double LONGER = 1.5; /* than the former rise took: then it is another one */
static const double NEAR = .25;   /* of a rise: as far below its end is near enough */
static const double FALL = .9;    /* of it: so far it fell in between */
static const double FOOT = .1;    /* of a rise: as high as that is still its foot */
static const double UNSEEN = 32;  /* a rise that the series began in took at most so much longer */
enum { LEVELS = 20, LAST_SHARE = 12 };

/* The newest of the first `end` lows that is at most `level`; `end` when none is. */
static size_t
newest_below(const double *lows, size_t end, double level)
{
    size_t i = end;

    while (i > 0 && lows[i - 1] > level)
        i--;
    return i > 0 ? i - 1 : end;
}

/* The newest block that came up to `level` and was followed by a fall of `fall` bytes or more; f->n
 * when there is none. *foot: the least of what followed. */
static size_t
newest_top(const mt_minima *f, const double *of, double level, double fall, double *foot)
{
    *foot = f->low;
    for (size_t i = f->n; i > 0; i--) {
        if (of[i - 1] >= level && of[i - 1] - *foot >= fall) return i - 1;
        if (f->lows[i - 1] < *foot) *foot = f->lows[i - 1];
    }
    return f->n;
}

/* Blocks from the foot of the former rise, whose top lies in block `peak` or near, to the foot of
 * this one in block `start`. If the series began above the foot, as many as the rise would have
 * taken from there at the same rate. */
static double
former_tooth(const mt_minima *f, const double *of, size_t peak, size_t start, double foot)
{
    double top = of[peak];
    size_t before;

    for (size_t i = peak; i <= start; i++)
        if (of[i] > top) top = of[i];
    before = newest_below(f->lows, peak, foot + FOOT * (top - foot));
    if (before < peak) return (double)(start - before);
    return ((double)start + 1) * fmin(fmax((top - foot) / fmax(top - f->lows[0], 1), 1), UNSEEN);
}

bool
mt_past_regains(const mt_minima *f, const double *of, double level, double rise)
{
    double foot, filling = (double)f->count / (double)f->length;
    size_t top = newest_top(f, of, level - NEAR * rise, FALL * rise, &foot), start;

    if (top == f->n) return false;
    start = newest_below(f->lows, f->n, foot + FOOT * (level - foot));
    if (start == f->n) start = f->n - 1;
    if (start < top) start = top;
    return (double)(f->n - 1 - start) + filling <=
           LONGER * former_tooth(f, of, top, start, foot) + 1;
}

bool
mt_past_ended(const mt_minima *f, size_t n, double longer)
{
    const double *b = f->lows + f->n - n;
    double first = b[0], most = b[0], step;
    size_t longest = 0, last = 0, level = 0;

    assert(n > 0 && n <= f->n);
    for (size_t i = 0; i < n; i++) {
        if (b[i] < first) first = b[i];
        if (b[i] > most) most = b[i];
    }
    step = (most - first) / LEVELS;
    for (size_t i = 0; i < n; i++) {
        if (b[i] < first + step * (double)(level + 1) || level + 1 == LEVELS) continue;
        if (level > 0 && i - last > longest) longest = i - last;
        last = i;
        while (level + 2 < LEVELS + 1 && b[i] >= first + step * (double)(level + 1))
            level++;
    }
    return n - last > f->n / LAST_SHARE && (double)(n - last) > longer * (double)longest;
}
