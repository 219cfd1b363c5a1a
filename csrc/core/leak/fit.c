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

/* Moves the k + 1 least to the front, the greatest of them to x[k]: Hoare's selection. */
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
    double mid, res[MT_FLOOR_BLOCKS] = {0}, squares = 0, lagged = 0, rho, count = (double)n;
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
    double least[MT_GROUPS], middle[MT_GROUPS], group[MT_FLOOR_BLOCKS / MT_GROUPS] = {0};
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

/* e[i] = the least from i on; with n equal jumps (sum of jumps)^2 / sum of squares is n. */
static double
jumps_of(const double *b, size_t n)
{
    double floor = b[n - 1], squares = 0, least;

    for (size_t i = n - 1; i-- > 0; floor = least) {
        least = fmin(floor, b[i]);
        squares += (floor - least) * (floor - least);
    }
    return squares > 0 ? (b[n - 1] - floor) * (b[n - 1] - floor) / squares : 0;
}

size_t
mt_leakfit_blocks(const mt_floor *f, size_t w)
{
    return w == 0 ? f->n * 3 / 4 : f->n / (2 * w);
}

void
mt_leakfit_window(const mt_floor *f, size_t w, mt_leakfit *out)
{
    size_t n = mt_leakfit_blocks(f, w);
    const double *b = f->lows + f->n - n;
    double noise, mid;

    assert(f->n >= MT_FLOOR_FIRST && w < MT_WINDOWS);
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
mt_leakfit_may_rise(const mt_floor *f, double bar)
{
    const double *end = f->lows + f->n;

    for (size_t w = 0; w < MT_WINDOWS; w++) {
        size_t size = mt_leakfit_blocks(f, w) / MT_GROUPS;
        if (least(end - size, size) - least(end - MT_GROUPS * size, size) > bar) return true;
    }
    return false;
}

/* --- the rules ------------------------------------------------------------------------------- */

bool
mt_leakfit_growing(const mt_leakfit fit[MT_WINDOWS], mt_leakbar bar)
{
    for (size_t w = 0; w < MT_WINDOWS; w++)
        if (fit[w].rise > bar.bytes && fit[w].z > 5 && fit[w].snr > 2) return true;
    return false;
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
    return fit[2].slope >= (.5 - slack) * fit[0].slope;
}

bool
mt_leakfit_lasting(const mt_leakfit fit[MT_WINDOWS], mt_leakbar bar, double length, double slack)
{
    const mt_leakfit *a = &fit[0], *b = &fit[1], *c = &fit[2];

    if (counts(a, bar, length) && a->z >= 4 && a->shape >= .88 - slack && a->jumps >= 5 &&
        a->even >= -.2 && goes_on(fit, slack))
        return true;
    if (counts(b, bar, length) && b->snr >= 8 && b->shape >= .90 - slack && b->front >= .6 &&
        a->shape >= .76 - slack && goes_on(fit, slack))
        return true;
    /* A late onset: the long window must not slow down. */
    return counts(c, bar, length) && c->z >= 4 && c->snr >= 6.5 && c->even >= -.8 &&
           c->shape >= .60 - slack && a->shape >= .80 - slack;
}

static bool
is_straight(const mt_leakfit *fit)
{
    return fit->shape >= .8 && fit->shape <= 1.25;
}

size_t
mt_leakfit_straight(const mt_leakfit fit[MT_WINDOWS])
{
    return is_straight(&fit[0]) ? 0 : is_straight(&fit[1]) ? 1 : 2;
}

/* How far block i lies from the line. */
static double
off_line(const mt_floor *f, const mt_leakfit *fit, size_t i)
{
    return fabs(f->lows[i] - fit->end + fit->slope * (double)(f->n - 1 - i));
}

/* By the shortest window: in a longer one the growth may have begun. Before it a block belongs to
 * the growth as long as it lies no further from the line than those in the window do, and one
 * block's growth, and what the slope's error makes of the distance. */
size_t
mt_leakfit_onset(const mt_floor *f, const mt_leakfit fit[MT_WINDOWS])
{
    const mt_leakfit *line = &fit[MT_WINDOWS - 1];
    size_t start = f->n - line->blocks, onset = start;
    double furthest = fabs(line->slope);

    if (line->slope <= 0) return f->n - fit[mt_leakfit_straight(fit)].blocks;
    for (size_t i = start; i < f->n; i++)
        furthest = fmax(furthest, fabs(line->slope) + off_line(f, line, i));
    while (onset > 0 &&
           off_line(f, line, onset - 1) <= furthest + 2.5 * line->se * (double)(start - onset + 1))
        onset--;
    return onset;
}
