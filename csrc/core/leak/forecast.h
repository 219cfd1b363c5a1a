/* forecast.h -- in how many samples a growing series reaches a limit, as an interval.
 *
 *   limit ------------------------------------------+----------+-----------------+----
 *                                                 lo/       mid/              hi/
 *   highs   ^ ^ ^ ^ ^  the sawtooth rides on it    /        .'             .-'
 *   lows  ._._._._._.  the floor's line, and s + u, s, s - u from its end
 *
 * The error of the slope alone makes an interval far too narrow (59 % instead of 90), so u is 2.5
 * standard errors and a tenth of the slope; lo also expects the highest excursion above the floor
 * and the largest jump of the floor once more. It holds if the program goes on as it is: what will
 * be loaded later no series can tell. */
#ifndef MT_LEAK_FORECAST_H
#define MT_LEAK_FORECAST_H

#include "leak/minima.h"
#include "leak/fit.h"

typedef struct mt_forecast {
    double lo, mid, hi; /* 0 or more; HUGE_VAL where it does not grow */
} mt_forecast;

typedef struct mt_outlook {
    double limit;  /* bytes, of the series as it was added */
    double coming; /* bytes that will be added at any moment: lo and mid expect them */
    double rate;   /* bytes a block that grow beside the series, */
    double rated;  /* until they are so many; HUGE_VAL: for ever */
} mt_outlook;

/* The uncertainty u of a fit's slope, bytes a block. */
double mt_forecast_error(const mt_leakfit *fit);

/* Samples from the newest one on. pre: `fit` are f's three windows. */
mt_forecast mt_forecast_samples(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS],
                                const mt_outlook *outlook);

#endif
