#include "py/base/natives.h"

#include <stdlib.h>

mt_natives *
mt_natives_new(void)
{
    mt_natives *natives = calloc(1, sizeof *natives);

    if (natives == NULL) return NULL;
    atomic_init(&natives->refs, 1);
    return natives;
}

mt_natives *
mt_natives_hold(mt_natives *natives)
{
    atomic_fetch_add(&natives->refs, 1);
    return natives;
}

void
mt_natives_drop(mt_natives *natives)
{
    if (natives == NULL || atomic_fetch_sub(&natives->refs, 1) > 1) return;
    mt_cudart_close(natives->cudart);
    free(natives);
}
