#include "leak/minima.h"

#include <assert.h>
#include <math.h>

static void
begin_block(mt_minima *f)
{
    f->low = HUGE_VAL;
    f->high = -HUGE_VAL;
    f->count = 0;
}

void
mt_minima_reset(mt_minima *f)
{
    f->n = 0;
    f->length = MT_MINIMA_LENGTH;
    begin_block(f);
}

static void
halve(mt_minima *f)
{
    for (size_t i = 0; i < MT_MINIMA_BLOCKS / 2; i++) {
        f->lows[i] = fmin(f->lows[2 * i], f->lows[2 * i + 1]);
        f->highs[i] = fmax(f->highs[2 * i], f->highs[2 * i + 1]);
    }
    f->n = MT_MINIMA_BLOCKS / 2;
    f->length *= 2;
}

bool
mt_minima_push(mt_minima *f)
{
    assert(f->n < MT_MINIMA_BLOCKS && f->count == f->length && f->low <= f->high);
    f->lows[f->n] = f->low;
    f->highs[f->n] = f->high;
    f->n++;
    begin_block(f);
    if (f->n == MT_MINIMA_BLOCKS) halve(f);
    return f->n >= MT_MINIMA_FIRST && f->n % MT_MINIMA_EVERY == 0;
}
