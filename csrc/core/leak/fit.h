/* fit.h -- what the floor of a series does over a window: how fast it rises, and in what shape.
 *
 *     |            . x         A leak rises as much late as early. What R says of a window:
 *     |        . x                     straight line   1      what a leak is
 *     |    . x      R = late / early   square root    .72     on the last 3/4 of the run
 *     |. x                             logarithm      .5
 *     +---early--|--late--             a finished warm-up, a full buffer   0
 *
 * Three windows end at the last block, over 3/4, 1/2 and 1/4 of the blocks: the long one tells
 * leaks from what slows down, the short ones see a late onset. Pure arithmetic on at most 95
 * numbers; about a microsecond a window. */
#ifndef MT_LEAK_FIT_H
#define MT_LEAK_FIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "leak/minima.h"

enum { MT_WINDOWS = 3, MT_GROUPS = 8 };

typedef struct mt_leakfit {
    size_t blocks;    /* of the window */
    double slope, se; /* least squares, bytes a block; its standard error with the residuals' lag-1
                       * autocorrelation, so that a wandering series does not look certain */
    double end;       /* the line at the last block, bytes */
    double z;         /* slope / se */
    double rise;      /* first to last of eight groups of blocks: the least of two ways, by the
                       * groups' minima and by their medians. `even` and `shape` are the least of
                       * both ways too */
    double even;      /* the smallest step from one group to the next, over the average step */
    double shape;     /* R above; -9 where the series does not rise */
    double snr;       /* rise over the noise about the line */
    double jumps; /* into how many equal steps the growth that is never given back could be cut */
    double front; /* slope of the last half over the slope */
} mt_leakfit;

/* The window number w (0: 3/4, 1: 1/2, 2: 1/4). pre: 64 blocks or more. */
void mt_leakfit_window(const mt_minima *f, size_t w, mt_leakfit *out);

/* How many blocks that window has. */
size_t mt_leakfit_blocks(const mt_minima *f, size_t w);

/* False where no window rises by more than `bar` bytes, by its groups' minima: the fits need not be
 * made. */
bool mt_leakfit_may_rise(const mt_minima *f, double bar);

/* What counts as a rise (bytes), and how many samples a window must cover before its shape says
 * anything. */
typedef struct mt_leakbar {
    double bytes, span;
} mt_leakbar;

/* It rises in this window, certainly, and in more than a few jumps; whether it will go on is not
 * asked. */
bool mt_leakfit_growing(const mt_leakfit *fit, mt_leakbar bar);

/* The rise of window w slows down clearly, and so does that of the next longer one. */
bool mt_leakfit_slows(const mt_leakfit fit[MT_WINDOWS], size_t w);

/* It rises spread out, and does not slow down by more than `slack` allows (0: a straight line or
 * steeper, as exactly as can be told). `length` is the number of steps of a block. */
bool mt_leakfit_lasting(const mt_leakfit fit[MT_WINDOWS], mt_leakbar bar, double length,
                        double slack);

/* The window whose line stands for the series now: the longest that is nearly straight. */
size_t mt_leakfit_straight(const mt_leakfit fit[MT_WINDOWS]);

/* The first block from which on the floor rises as it does at its end: where the growth began, as
 * far as the blocks show it. pre: `fit` are f's three windows. */
size_t mt_leakfit_onset(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS]);

#endif
