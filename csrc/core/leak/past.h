/* past.h -- what the blocks of a series say about a rise that was found: is it new, and is it over?
 *
 *      /|  /|  /.   regained: what was given   |        ._____   over: no new level for longer than
 *     / | / | /     back is taken again, in    |      .'         it ever took to the next of twenty
 *    /  |/  |/      no more time than before   |    .'           levels while it rose
 *
 * Both are questions of order and of counts of readings: no noise model, no time. Some 100 ns. */
#ifndef MT_LEAK_PAST_H
#define MT_LEAK_PAST_H

#include <stdbool.h>
#include <stddef.h>

#include "leak/minima.h"

/* Whether the series was where it is before, fell, and has not risen for longer since than from the
 * foot before to this one: then it regains what it gave back. `of`: the lows or the highs of f.
 * `level`: where the rise has come to, by `rise` bytes at least. */
bool mt_past_regains(const mt_minima *f, const double *of, double level, double rise);

/* Whether the rise of the newest n lows has ended: it came to no new level for `longer` times as
 * long as it ever took while it rose, and for a twelfth of the run. pre: 0 < n <= f->n. */
bool mt_past_ended(const mt_minima *f, size_t n, double longer);

#endif
