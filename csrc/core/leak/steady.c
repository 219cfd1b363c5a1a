/* steady.c -- how this file works.
 *
 * mt_steady_look takes the newest readings in order (unroll) and tries windows of them, the longest
 * first. line_of puts a straight line through a window; one that readings lie far from, or that
 * rises too little, is given up at once. Then two tests ask whether the rise is certain, because
 * noise comes in two sorts. Where readings scatter about the line and each on its own, the line's
 * own error is right. Where they wander, it is not: drift_of holds the mean of the rises
 * from one reading to the next against their scatter, as a walk with a drift has it (a rise over h
 * steps scatters with the square root of h), also of averages of 2, 4 and 8 neighbours. certainty()
 * turns either ratio, which means little where readings are few, into standard deviations of a
 * normal distribution. longest_line goes back from the window as far as readings lie on its line. */
#include "leak/steady.h"

#include <math.h>

static const size_t WINDOWS[] = {64, 33, 17, 9, 5}; /* readings; those of each step cover 16, 32 */
enum { MANY = 12, LEAST_READINGS = 4, LEAST_GROUPS = 5, LARGEST_GROUP = 8 };
static const double LEAST_RATE = 512;   /* bytes a step: what is less is left to longer series */
static const double QUIETEST = 100;     /* bytes that any rise scatters by */
static const double CERTAIN = 3.5;      /* standard deviations at the first look, */
static const double CERTAIN_MORE = .25; /* and for each e-fold of looks */
static const double STRAIGHT = .25;     /* of the rise: as far as a reading may lie from the line */
static const double EVEN = 1.5;         /* the longest way to the next reading, over the average */
static const double MOST_RHO = .98;     /* of one residual with the next */
static const double GOES_ON = .4;       /* of the mean rate, in the newest quarter */

typedef struct points {
    size_t n;
    double x[MT_RECENT], y[MT_RECENT];
} points;

/* The kept readings, the oldest first; steps and bytes less those of the newest, so that squares
 * keep their digits. */
static void
unroll(const mt_recent *r, points *out)
{
    size_t newest = (size_t)((r->count - 1) % MT_RECENT);

    out->n = r->count < MT_RECENT ? (size_t)r->count : MT_RECENT;
    for (size_t i = 0; i < out->n; i++) {
        size_t at = (size_t)((r->count - out->n + i) % MT_RECENT);
        out->x[i] = (double)(r->step[at] - r->step[newest]);
        out->y[i] = r->bytes[at] - r->bytes[newest];
    }
}

/* Averages of `each` neighbours among the points from..; what is left over are the oldest. */
static void
average(const points *p, size_t from, size_t each, points *out)
{
    size_t n = p->n - from;

    out->n = n / each;
    from += n % each;
    for (size_t g = 0; g < out->n; g++) {
        double x = 0, y = 0;
        for (size_t i = from + g * each; i < from + (g + 1) * each; i++) {
            x += p->x[i];
            y += p->y[i];
        }
        out->x[g] = x / (double)each;
        out->y[g] = y / (double)each;
    }
}

/* `t`, which has `dof` degrees of freedom, as standard deviations of a normal distribution
 * (Wallace's approximation). */
static double
certainty(double t, double dof)
{
    double z = sqrt(dof * log1p(t * t / dof)) * (8 * dof + 1) / (8 * dof + 3);

    return t < 0 ? -z : z;
}

/* How certain the drift of a walk through the points is. */
static double
drift_of(const points *p)
{
    double span = p->x[p->n - 1] - p->x[0], count = (double)p->n - 1, scatter = 0;
    double slope = (p->y[p->n - 1] - p->y[0]) / span;

    for (size_t i = 1; i < p->n; i++) {
        double h = p->x[i] - p->x[i - 1], off = p->y[i] - p->y[i - 1] - slope * h;
        scatter += off * off / h;
    }
    scatter = fmax(scatter / (count - 1), QUIETEST * QUIETEST * count / span);
    return certainty(slope / sqrt(scatter / span), count - 1);
}

/* The same of the points from.., and of averages of them: the highest. */
static double
walk_of(const points *p, size_t from)
{
    points groups;
    double most = -HUGE_VAL;

    for (size_t each = 1; each <= LARGEST_GROUP; each *= 2) {
        average(p, from, each, &groups);
        if (groups.n < (each == 1 ? LEAST_READINGS : LEAST_GROUPS)) break;
        most = fmax(most, drift_of(&groups));
    }
    return most;
}

/* Least squares through the points from..; the steps and bytes of `out` are those of the points. */
static void
line_of(const points *p, size_t from, mt_steady *out)
{
    double n = (double)(p->n - from), x = 0, y = 0, cross = 0, squares = 0;
    double scatter = 0, lagged = 0, before = 0, above = 0, below = 0, furthest = 0, rho;

    *out = (mt_steady){.readings = p->n - from};
    for (size_t i = from; i < p->n; i++) {
        x += p->x[i];
        y += p->y[i];
    }
    x /= n;
    y /= n;
    for (size_t i = from; i < p->n; i++) {
        cross += (p->x[i] - x) * (p->y[i] - y);
        squares += (p->x[i] - x) * (p->x[i] - x);
    }
    out->slope = cross / squares;
    out->end = y - out->slope * x;
    out->rise = -p->x[from] * out->slope;
    for (size_t i = from; i < p->n; i++) {
        double off = p->y[i] - out->end - out->slope * p->x[i];
        if (off > above) above = off;
        if (off < below) below = off;
        if (i > from && off - before > out->jump) out->jump = off - before;
        if (i > from && p->x[i] - p->x[i - 1] > furthest) furthest = p->x[i] - p->x[i - 1];
        scatter += off * off;
        lagged += off * before;
        before = off;
    }
    out->above = above;
    out->off = fmax(above, -below);
    rho = scatter > 0 ? lagged / scatter : 0;
    rho = fmin(fmax(rho + (2 + 4 * fmax(rho, 0)) / n, 0), MOST_RHO); /* few make it seem less */
    scatter = fmax(scatter / (n - 2), QUIETEST * QUIETEST);
    out->se = sqrt(scatter * (1 + rho) / (1 - rho) / squares);
    out->even = furthest * (n - 1) <= EVEN * -p->x[from];
}

/* The average of the points from..to - 1. */
static double
level(const points *p, size_t from, size_t to)
{
    double sum = 0;

    for (size_t i = from; i < to; i++)
        sum += p->y[i];
    return sum / (double)(to - from);
}

/* The same of their steps. */
static double
place(const points *p, size_t from, size_t to)
{
    double sum = 0;

    for (size_t i = from; i < to; i++)
        sum += p->x[i];
    return sum / (double)(to - from);
}

/* The rate over the readings from..to - 1: from their first half to their second. */
static double
rate_of(const points *p, size_t from, size_t to)
{
    size_t half = from + (to - from) / 2;

    return (level(p, half, to) - level(p, from, half)) /
           (place(p, half, to) - place(p, from, half));
}

/* Whether the newest quarter rises as well, at two fifths of the rate or more. */
static bool
goes_on(const points *p, size_t from, double slope)
{
    size_t quarter = (p->n - from) / 4 > 2 ? (p->n - from) / 4 : 2;

    return rate_of(p, p->n - quarter, p->n) >= GOES_ON * slope;
}

/* Whether the points from.. rise for certain, and go on to: fills in *out. */
static bool
rises(const points *p, size_t from, double least, double enough, mt_steady *out)
{
    size_t middle = from + (p->n - from) / 2;
    double n = (double)(p->n - from), first;

    line_of(p, from, out);
    if (out->slope < LEAST_RATE || out->rise < least || out->off > STRAIGHT * out->rise ||
        !goes_on(p, from, out->slope))
        return false;
    if (!(out->even && n >= MANY && certainty(out->slope / out->se, n - 2) >= enough) &&
        walk_of(p, from) < enough)
        return false;
    first = rate_of(p, from, middle + 1);
    out->shape = first > 0 ? rate_of(p, middle, p->n) / first : 0;
    return true;
}

/* The sum of four readings, the newest of them `back` before the newest of all. */
static double
four(const mt_recent *r, uint64_t back)
{
    double sum = 0;

    for (uint64_t i = r->count - back - 4; i < r->count - back; i++)
        sum += r->bytes[i % MT_RECENT];
    return sum;
}

/* Whether the newest n readings lie higher at their end than in the middle, and there higher than
 * at their start. Most windows of a series that does not rise end here, after a dozen readings. */
static bool
may_rise(const mt_recent *r, size_t n)
{
    double middle;

    if (n < MANY) return true;
    middle = four(r, n / 2 - 2);
    return four(r, 0) > middle && middle > four(r, n - 4);
}

/* The first point from which on all lie on the line, as near as those from `from` on do. */
static size_t
longest_line(const points *p, size_t from, const mt_steady *line)
{
    for (; from > 0; from--) {
        double off = fabs(p->y[from - 1] - line->end - line->slope * p->x[from - 1]);
        double apart = p->x[from] - p->x[from - 1];
        if (off > line->off + (2.5 * line->se + line->slope) * apart) break;
    }
    return from;
}

void
mt_steady_look(const mt_recent *r, double least, uint64_t looks, mt_steady *out)
{
    double enough = CERTAIN + CERTAIN_MORE * log((double)looks + 1), newest;
    size_t last = (size_t)((r->count - 1) % MT_RECENT), tried = 0;
    size_t all = r->count < MT_RECENT ? (size_t)r->count : MT_RECENT;
    points p = {.n = 0};

    *out = (mt_steady){.certain = false};
    if (r->count < LEAST_READINGS) return;
    newest = r->bytes[last];
    for (size_t w = 0; w < sizeof WINDOWS / sizeof *WINDOWS; w++) {
        size_t n = all < WINDOWS[w] ? all : WINDOWS[w], from = all - n;
        if (n == tried || !may_rise(r, n)) continue;
        if (p.n == 0) unroll(r, &p);
        if (p.x[from] > -MT_STEADY_SPAN) continue;
        tried = n;
        if (!rises(&p, from, least, enough, out)) continue;
        from = longest_line(&p, from, out);
        out->certain = true;
        out->until = r->step[last];
        out->since = out->until + (int64_t)p.x[from];
        out->end += newest;
        return;
    }
    *out = (mt_steady){.certain = false};
}
