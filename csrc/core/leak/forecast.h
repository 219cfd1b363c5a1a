/* forecast.h -- in how many steps a growing series reaches a limit, as an interval.
 *
 *   limit ------------------------------------------+----------+-----------------+----
 *                                                 lo/       mid/              hi/
 *   highs   ^ ^ ^ ^ ^  the sawtooth rides on it    /        .'             .-'
 *   lows  ._._._._._.  the floor's line, and s + u, s, s - u from its end
 *
 * The error of the slope alone makes an interval far too narrow (59 % instead of 90), so u is 2.5
 * standard errors and a tenth of the slope, of few readings more; lo also expects the highest
 * excursion above the line and the largest jump of it once more. It holds if the program goes on as
 * it is: what will be loaded later no series can tell. */
#ifndef MT_LEAK_FORECAST_H
#define MT_LEAK_FORECAST_H

#include "leak/minima.h"
#include "leak/fit.h"
#include "leak/steady.h"

typedef struct mt_forecast {
    double lo, mid, hi; /* steps, 0 or more; HUGE_VAL where it does not grow */
} mt_forecast;

/* The line that stands for a series at its end. */
typedef struct mt_line {
    double slope, error;        /* bytes a step; slope - error to slope + error */
    double end;                 /* bytes, where the line ends, */
    double past;                /* so many steps before the newest reading */
    double highest;             /* bytes: the highest end that any window makes likely */
    double jump;                /* bytes that the floor rose at once at most */
    double most, often, middle; /* bytes above the line: at most, 1 time in 10, 1 time in 2 */
} mt_line;

typedef struct mt_outlook {
    double limit;  /* bytes, of the series as it was added */
    double coming; /* bytes that will be added at any moment: lo and mid expect them */
    double rate;   /* bytes a step that grow beside the series, */
    double rated;  /* until they are so many; HUGE_VAL: for ever */
} mt_outlook;

/* The line of a floor, whose samples lie `stride` steps apart. pre: `fit` are f's three windows. */
mt_line mt_line_of_floor(const mt_minima *f, const mt_leakfit fit[MT_WINDOWS], double stride);
/* Of the newest readings. pre: the drift is certain. */
mt_line mt_line_of_drift(const mt_steady *drift);
/* Of a series that stays where it is. */
mt_line mt_line_flat(double bytes);

/* Steps from the newest reading on. */
mt_forecast mt_forecast_steps(const mt_line *line, const mt_outlook *outlook);

#endif
