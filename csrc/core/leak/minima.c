#include "leak/minima.h"

#include <assert.h>
#include <math.h>

static void
begin_block(mt_floor *f)
{
    f->low = HUGE_VAL;
    f->high = -HUGE_VAL;
    f->count = 0;
}

void
mt_floor_reset(mt_floor *f)
{
    f->n = 0;
    f->length = MT_FLOOR_LENGTH;
    begin_block(f);
}

static void
halve(mt_floor *f)
{
    for (size_t i = 0; i < MT_FLOOR_BLOCKS / 2; i++) {
        f->lows[i] = fmin(f->lows[2 * i], f->lows[2 * i + 1]);
        f->highs[i] = fmax(f->highs[2 * i], f->highs[2 * i + 1]);
    }
    f->n = MT_FLOOR_BLOCKS / 2;
    f->length *= 2;
}

bool
mt_floor_push(mt_floor *f)
{
    assert(f->n < MT_FLOOR_BLOCKS && f->count == f->length);
    f->lows[f->n] = f->low;
    f->highs[f->n] = f->high;
    f->n++;
    begin_block(f);
    if (f->n == MT_FLOOR_BLOCKS) halve(f);
    return f->n >= MT_FLOOR_FIRST && f->n % MT_FLOOR_EVERY == 0;
}
