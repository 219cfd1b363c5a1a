#include "leak/forecast.h"

#include <math.h>

double
mt_forecast_error(const mt_leakfit *fit)
{
    return 2.5 * fit->se + .10 * fabs(fit->slope);
}

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

/* Samples from the newest one until `room` bytes are filled at `slope` bytes a block, counted from
 * the last whole block: f->count samples have come since. */
static double
samples_until(const mt_minima *f, double room, double slope)
{
    if (room <= 0) return 0;
    if (slope <= 0) return HUGE_VAL;
    return fmax(0, room / slope * (double)f->length - (double)f->count);
}

/* The forecast where `coming` bytes may be added at any moment, and `rate` bytes a block grow
 * beside the series. */
static mt_forecast
foretell(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS], double limit, double coming,
         double rate)
{
    const mt_leakfit *w = &fit[mt_leakfit_straight(fit)];
    double s = w->slope + rate, u = mt_forecast_error(w);
    double last = fmax(fit[0].end, fmax(fit[1].end, fit[2].end));
    double ex[MT_MINIMA_BLOCKS], room = limit - coming;
    size_t n = excursions(f, ex);

    return (mt_forecast){
        .lo = samples_until(f, room - last - ex[n - 1] - largest_jump(f, w->slope), s + u),
        .mid = samples_until(f, room - w->end - quantile(ex, n, .9), s),
        .hi = samples_until(f, limit - w->end - quantile(ex, n, .5) / 2, s - u),
    };
}

mt_forecast
mt_forecast_samples(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS], const mt_outlook *outlook)
{
    double coming = outlook->coming, rate = outlook->rate, limit = outlook->limit, ends;
    mt_forecast soon = foretell(f, fit, limit, coming, rate), later;

    if (rate <= 0 || outlook->rated == HUGE_VAL) return soon;
    ends = outlook->rated / rate * (double)f->length; /* then all of it is there */
    later = foretell(f, fit, limit - outlook->rated, coming, 0);
    return (mt_forecast){
        .lo = soon.lo <= ends ? soon.lo : later.lo,
        .mid = soon.mid <= ends ? soon.mid : later.mid,
        .hi = soon.hi <= ends ? soon.hi : later.hi,
    };
}
