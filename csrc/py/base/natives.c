#include "py/base/natives.h"

#include <stdlib.h>

#include "os/base/forkmark.h"

mt_natives *
mt_natives_new(void)
{
    mt_natives *natives = calloc(1, sizeof *natives);
    void *zeros;

    if (natives == NULL) return NULL;
    atomic_init(&natives->refs, 1);
    if (mt_forkmark_zeros(sizeof *natives->mapped_again, &zeros, NULL) == MT_OK)
        natives->mapped_again = zeros;
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
    mt_forkmark_free_zeros(natives->mapped_again);
    free(natives);
}
