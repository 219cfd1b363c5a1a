/* fit.c -- how this file works.
 *
 * mt_leakfit_window takes the lows of the newest blocks of a series and measures them in three
 * ways: fit_line puts a straight line through them, with the error of its slope and the noise about
 * it; fit_shape cuts them into eight groups and says whether the rise slows down; jumps_of says
 * whether it came in a few steps. The rules at the end hold these figures, of three windows,
 * against fixed bars; leak.c counts how often in a row they hold. Nothing is kept from one call to
 * the next. */
#include "leak/fit.h"

#include <assert.h>
#include <math.h>
#include <string.h>

static const double QUIETEST = 100; /* bytes of noise that any series is taken to have */

/* --- medians --------------------------------------------------------------------------------- */

/* Sorts in place; for the dozen numbers of a group. */
static void
insertion_sort(double *x, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        double v = x[i];
        size_t k = i;
        for (; k > 0 && x[k - 1] > v; k--)
            x[k] = x[k - 1];
        x[k] = v;
    }
}

static double
sorted_median(const double *x, size_t n)
{
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

/* Moves the k + 1 least to the front, the greatest of them to x[k]: Hoare's selection,
 * which takes linear time: there are up to 96 residuals at each evaluation. */
static void
select_least(double *x, size_t n, size_t k)
{
    size_t lo = 0, hi = n - 1;

    while (lo < hi) {
        double pivot = x[k];
        size_t i = lo, j = hi;
        do {
            while (x[i] < pivot)
                i++;
            while (pivot < x[j])
                j--;
            if (i > j) break;
            double swapped = x[i];
            x[i++] = x[j];
            x[j] = swapped;
            if (j == 0) break;
            j--;
        } while (i <= j);
        if (j < k) lo = i;
        if (k < i) hi = j;
    }
}

/* The median; x is left in another order. pre: n > 1. */
static double
median(double *x, size_t n)
{
    double upper, lower;

    select_least(x, n, n / 2);
    upper = x[n / 2];
    if (n % 2) return upper;
    lower = x[0];
    for (size_t i = 1; i < n / 2; i++)
        lower = fmax(lower, x[i]);
    return (lower + upper) / 2;
}

/* --- the line -------------------------------------------------------------------------------- */

/* Least squares of b against 0, 1, ..., n - 1; *mid is the line in the middle. Sums are taken of
 * differences from b[0]: squares of bytes would lose the noise. */
static double
slope_of(const double *b, size_t n, double *mid)
{
    double centre = (double)(n - 1) / 2, sum = 0, cross = 0, squares;

    for (size_t i = 0; i < n; i++) {
        sum += b[i] - b[0];
        cross += ((double)i - centre) * (b[i] - b[0]);
    }
    squares = (double)n * ((double)n * (double)n - 1) / 12;
    *mid = b[0] + sum / (double)n;
    return cross / squares;
}

/* slope, se, end and z; the noise about the line is returned. */
static double
fit_line(const double *b, size_t n, mt_leakfit *out)
{
    double mid, res[MT_MINIMA_BLOCKS] = {0}, squares = 0, lagged = 0, rho, count = (double)n;
    double sxx = count * (count * count - 1) / 12;

    out->slope = slope_of(b, n, &mid);
    for (size_t i = 0; i < n; i++) {
        res[i] = b[i] - mid - out->slope * ((double)i - (count - 1) / 2);
        squares += res[i] * res[i];
        if (i > 0) lagged += res[i] * res[i - 1];
    }
    rho = squares > 0 ? lagged / squares + 1.5 / count : 0;
    rho = fmin(fmax(rho, 0), .95);
    out->se = sqrt(squares / (count - 2) * (1 + rho) / (1 - rho) / sxx);
    out->end = mid + out->slope * (count - 1) / 2;
    out->z = out->slope == 0 ? 0 : out->slope / fmax(out->se, 1e-300);
    for (size_t i = 0; i < n; i++)
        res[i] = fabs(res[i]);
    return fmax(QUIETEST, 1.4826 * median(res, n));
}

/* --- the shape ------------------------------------------------------------------------------- */

typedef struct shape {
    double rise, even, ratio;
} shape;

static shape
shape_of(const double g[MT_GROUPS])
{
    double rise = g[MT_GROUPS - 1] - g[0], mid = (g[3] + g[4]) / 2, least = HUGE_VAL;

    if (rise <= 0) return (shape){rise, -9, -9};
    for (size_t i = 1; i < MT_GROUPS; i++)
        least = fmin(least, g[i] - g[i - 1]);
    return (shape){rise, (MT_GROUPS - 1) * least / rise,
                   (g[MT_GROUPS - 1] - mid) / fmax(mid - g[0], .02 * rise + 1)};
}

/* Eight groups of n / 8 blocks; what is left over are the oldest. */
static void
fit_shape(const double *b, size_t n, mt_leakfit *out)
{
    size_t size = n / MT_GROUPS;
    double least[MT_GROUPS], middle[MT_GROUPS], group[MT_MINIMA_BLOCKS / MT_GROUPS] = {0};
    shape low, mid;

    assert(size > 0);
    b += n - size * MT_GROUPS;
    for (size_t i = 0; i < MT_GROUPS; i++) {
        memcpy(group, b + i * size, size * sizeof *group);
        insertion_sort(group, size);
        least[i] = group[0];
        middle[i] = sorted_median(group, size);
    }
    low = shape_of(least);
    mid = shape_of(middle);
    out->rise = fmin(low.rise, mid.rise);
    out->even = fmin(low.even, mid.even);
    out->shape = fmin(low.ratio, mid.ratio);
}

/* What is never given back after block i is the least of the blocks from i on. It rises by jumps,
 * of which n equal ones make (sum of jumps)^2 / (sum of squares) = n: so many jumps there are. */
static double
jumps_of(const double *b, size_t n)
{
    double kept = b[n - 1], squares = 0, before;

    for (size_t i = n - 1; i-- > 0; kept = before) {
        before = fmin(kept, b[i]);
        squares += (kept - before) * (kept - before);
    }
    return squares > 0 ? (b[n - 1] - kept) * (b[n - 1] - kept) / squares : 0;
}

size_t
mt_leakfit_blocks(const mt_minima *f, size_t w)
{
    return w == 0 ? f->n * 3 / 4 : f->n / (2 * w);
}

void
mt_leakfit_window(const mt_minima *f, size_t w, mt_leakfit *out)
{
    size_t n = mt_leakfit_blocks(f, w);
    const double *b = f->lows + f->n - n;
    double noise, mid;

    assert(f->n >= MT_MINIMA_FIRST && w < MT_WINDOWS);
    out->blocks = n;
    noise = fit_line(b, n, out);
    fit_shape(b, n, out);
    out->snr = out->rise / noise;
    out->jumps = jumps_of(b, n);
    out->front = out->slope == 0 ? 0 : slope_of(b + n - n / 2, n / 2, &mid) / out->slope;
}

static double
least(const double *b, size_t n)
{
    double low = b[0];

    for (size_t i = 1; i < n; i++)
        low = fmin(low, b[i]);
    return low;
}

bool
mt_leakfit_may_rise(const mt_minima *f, double bar)
{
    const double *end = f->lows + f->n;

    for (size_t w = 0; w < MT_WINDOWS; w++) {
        size_t size = mt_leakfit_blocks(f, w) / MT_GROUPS;
        if (least(end - size, size) - least(end - MT_GROUPS * size, size) > bar) return true;
    }
    return false;
}

/* --- the rules ------------------------------------------------------------------------------- */

/* The bars. They were chosen on made-up series of two seeds, 101 and 202
 * (benchmarks/leak/leaks.py), so that hardly a series without a leak passes all of a rule; what
 * they are worth on series of another seed stands in docs/guides/leaks.md. tests/leak/reference.py
 * has them once more. */
static const double GROWS_Z = 5, GROWS_SNR = 2; /* it rises now, whatever its shape, */
static const double GROWS_JUMPS = 5;            /* but not in one or two jumps */
static const double SLOWS_SNR = 4, SLOWS = .8;  /* bent, in what stands above the noise, */
static const double SLOWED = .5;                /* and more so in the next longer window; */
static const double SLOWED_ALONE = .4;          /* one that the newest quarter does not bear out */
static const double LONG_Z = 4, LONG_SHAPE = .88; /* the long window: as late as early, */
static const double LONG_JUMPS = 5;               /* in no fewer steps, */
static const double LONG_EVEN = -.2;              /* and no group of blocks much below the last */
static const double MIDDLE_SNR = 8, MIDDLE_SHAPE = .90; /* the middle one, far above the noise, */
static const double MIDDLE_FRONT = .6;            /* and its last half no flatter than that, */
static const double MIDDLE_LONG_SHAPE = .76;      /* where the long one slows down little */
static const double SHORT_Z = 4, SHORT_SNR = 6.5; /* the short one: a late onset, */
static const double SHORT_EVEN = -.8, SHORT_SHAPE = .60;
static const double SHORT_LONG_SHAPE = .80; /* where the long one does not slow down */
static const double GOES_ON = .5;           /* of the long slope, in the short window */
static const double STRAIGHT_LEAST = .8, STRAIGHT_MOST = 1.25; /* a shape that is nearly a line */

bool
mt_leakfit_growing(const mt_leakfit *fit, mt_leakbar bar)
{
    return fit->rise > bar.bytes && fit->z > GROWS_Z && fit->snr > GROWS_SNR &&
           fit->jumps >= GROWS_JUMPS;
}

bool
mt_leakfit_slows(const mt_leakfit fit[MT_WINDOWS], size_t w)
{
    if (w < MT_WINDOWS - 1) return fit[w].shape < SLOWED_ALONE;
    return fit[w].snr >= SLOWS_SNR && fit[w].shape < SLOWS && fit[w - 1].shape < SLOWED;
}

static bool
counts(const mt_leakfit *fit, mt_leakbar bar, double length)
{
    return fit->rise > bar.bytes && (double)fit->blocks * length >= bar.span;
}

/* The last quarter rises too: what fell asleep is a warm-up or a run of jumps that is over. */
static bool
goes_on(const mt_leakfit fit[MT_WINDOWS], double slack)
{
    return fit[2].slope >= (GOES_ON - slack) * fit[0].slope;
}

bool
mt_leakfit_lasting(const mt_leakfit fit[MT_WINDOWS], mt_leakbar bar, double length, double slack)
{
    const mt_leakfit *a = &fit[0], *b = &fit[1], *c = &fit[2];

    if (counts(a, bar, length) && a->z >= LONG_Z && a->shape >= LONG_SHAPE - slack &&
        a->jumps >= LONG_JUMPS && a->even >= LONG_EVEN && goes_on(fit, slack))
        return true;
    if (counts(b, bar, length) && b->snr >= MIDDLE_SNR && b->shape >= MIDDLE_SHAPE - slack &&
        b->front >= MIDDLE_FRONT && a->shape >= MIDDLE_LONG_SHAPE - slack && goes_on(fit, slack))
        return true;
    return counts(c, bar, length) && c->z >= SHORT_Z && c->snr >= SHORT_SNR &&
           c->even >= SHORT_EVEN && c->shape >= SHORT_SHAPE - slack &&
           a->shape >= SHORT_LONG_SHAPE - slack;
}

static bool
is_straight(const mt_leakfit *fit)
{
    return fit->shape >= STRAIGHT_LEAST && fit->shape <= STRAIGHT_MOST;
}

size_t
mt_leakfit_straight(const mt_leakfit fit[MT_WINDOWS])
{
    return is_straight(&fit[0]) ? 0 : is_straight(&fit[1]) ? 1 : 2;
}

/* How far block i lies from the line. */
static double
off_line(const mt_minima *f, const mt_leakfit *fit, size_t i)
{
    return fabs(f->lows[i] - fit->end + fit->slope * (double)(f->n - 1 - i));
}

/* By the shortest window: in a longer one the growth may have begun. Before it a block belongs to
 * the growth as long as it lies no further from the line than those in the window do, and one
 * block's growth, and what the slope's error makes of the distance. */
size_t
mt_leakfit_onset(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS])
{
    const mt_leakfit *line = &fit[MT_WINDOWS - 1];
    size_t start = f->n - line->blocks, onset = start;
    double furthest = fabs(line->slope);

    assert(f->n >= MT_MINIMA_FIRST && line->blocks == mt_leakfit_blocks(f, MT_WINDOWS - 1));
    if (line->slope <= 0) return f->n - fit[mt_leakfit_straight(fit)].blocks;
    for (size_t i = start; i < f->n; i++)
        furthest = fmax(furthest, fabs(line->slope) + off_line(f, line, i));
    while (onset > 0 &&
           off_line(f, line, onset - 1) <= furthest + 2.5 * line->se * (double)(start - onset + 1))
        onset--;
    return onset;
}
