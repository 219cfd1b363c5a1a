#include "leak/forecast.h"

#include <math.h>

/* Block by block, how far the series went above its floor over the last half of the blocks, in
 * order of size; returns how many. */
static size_t
excursions(const mt_minima *f, double out[MT_MINIMA_BLOCKS])
{
    size_t n = 0;

    for (size_t i = f->n - f->n / 2; i < f->n; i++, n++) {
        double v = f->highs[i] - f->lows[i];
        size_t k = n;
        for (; k > 0 && out[k - 1] > v; k--)
            out[k] = out[k - 1];
        out[k] = v;
    }
    return n;
}

/* As numpy does it: between the two nearest. */
static double
quantile(const double *sorted, size_t n, double share)
{
    double at = share * (double)(n - 1), below = floor(at);
    size_t i = (size_t)below;

    return i + 1 < n ? sorted[i] + (at - below) * (sorted[i + 1] - sorted[i]) : sorted[n - 1];
}

static double
largest_jump(const mt_minima *f, double slope)
{
    double jump = 0;

    for (size_t i = f->n - mt_leakfit_blocks(f, 0) + 1; i < f->n; i++)
        jump = fmax(jump, f->lows[i] - f->lows[i - 1] - slope);
    return jump;
}

static const double ERRORS = 2.5; /* standard errors of the slope, and so much of itself: */
static const double OF_SLOPE = .10, OF_FEW = .30, FEW_STEPS = 256, MOST_ERROR = .45;

mt_line
mt_line_of_floor(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS], double stride)
{
    const mt_leakfit *w = &fit[mt_leakfit_straight(fit)];
    double above[MT_MINIMA_BLOCKS], block = (double)f->length * stride;
    size_t n = excursions(f, above);

    return (mt_line){
        .slope = w->slope / block,
        .error = (ERRORS * w->se + OF_SLOPE * fabs(w->slope)) / block,
        .end = w->end,
        .past = (double)f->count * stride,
        .highest = fmax(fit[0].end, fmax(fit[1].end, fit[2].end)),
        .jump = largest_jump(f, w->slope),
        .most = above[n - 1],
        .often = quantile(above, n, .9),
        .middle = quantile(above, n, .5),
    };
}

/* A line through few steps says less of what comes than one through many: its error is larger than
 * its own scatter shows, and smaller with each step. */
mt_line
mt_line_of_drift(const mt_steady *drift)
{
    double steps = (double)(drift->until - drift->since);
    double few = (OF_FEW - OF_SLOPE) * fmax(0, 1 - steps / FEW_STEPS);
    double error = ERRORS * drift->se + (OF_SLOPE + few) * fabs(drift->slope);

    return (mt_line){
        .slope = drift->slope,
        .error = fmin(error, MOST_ERROR * fabs(drift->slope)),
        .end = drift->end,
        .highest = drift->end,
        .jump = drift->jump,
        .most = drift->above,
    };
}

mt_line
mt_line_flat(double bytes)
{
    return (mt_line){.end = bytes, .highest = bytes};
}

/* Steps from the newest reading until `room` bytes are filled at `slope` bytes a step, counted from
 * the line's end. */
static double
steps_until(const mt_line *line, double room, double slope)
{
    if (room <= 0) return 0;
    if (slope <= 0) return HUGE_VAL;
    return fmax(0, room / slope - line->past);
}

/* The forecast where `coming` bytes may be added at any moment, and `rate` bytes a step grow beside
 * the series. */
static mt_forecast
foretell(const mt_line *line, double limit, double coming, double rate)
{
    double s = line->slope + rate, u = line->error, room = limit - coming;

    return (mt_forecast){
        .lo = steps_until(line, room - line->highest - line->most - line->jump, s + u),
        .mid = steps_until(line, room - line->end - line->often, s),
        .hi = steps_until(line, limit - line->end - line->middle / 2, s - u),
    };
}

mt_forecast
mt_forecast_steps(const mt_line *line, const mt_outlook *outlook)
{
    double coming = outlook->coming, rate = outlook->rate, limit = outlook->limit, ends;
    mt_forecast soon = foretell(line, limit, coming, rate), later;

    if (rate <= 0 || outlook->rated == HUGE_VAL) return soon;
    ends = outlook->rated / rate; /* then all of it is there */
    later = foretell(line, limit - outlook->rated, coming, 0);
    return (mt_forecast){
        .lo = soon.lo <= ends ? soon.lo : later.lo,
        .mid = soon.mid <= ends ? soon.mid : later.mid,
        .hi = soon.hi <= ends ? soon.hi : later.hi,
    };
}
