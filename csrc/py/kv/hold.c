#include "py/kv/hold.h"

#include <stdlib.h>

mt_status
mt_kvguests_new(mt_natives *natives, mt_kvguests **out, mt_error *err)
{
    mt_kvguests *g = calloc(1, sizeof *g);

    if (g == NULL) return mt_fail(err, MT_ENOMEM, "calloc", 0);
    g->birth = mt_birth_now();
    mt_lock_init(&g->lock);
    g->natives = mt_natives_hold(natives);
    g->refs = 1;
    *out = g;
    return MT_OK;
}

/* pre: the lock is held; it is given. */
static void
drop_locked(mt_kvguests *g)
{
    bool last = --g->refs == 0;

    mt_lock_give(&g->lock);
    if (!last) return;
    mt_natives_drop(g->natives);
    mt_lock_fini(&g->lock);
    free(g);
}

void
mt_kvguests_drop(mt_kvguests *guests)
{
    if (guests == NULL || !mt_kvguests_at_home(guests)) return;
    mt_lock_take(&guests->lock);
    drop_locked(guests);
}

size_t
mt_kvguests_lingering(mt_kvguests *guests, mt_kvlinger *out, size_t cap)
{
    size_t n = 0;

    mt_lock_take(&guests->lock);
    for (const mt_kvhold *hold = guests->first; hold != NULL; hold = hold->next) {
        if (!hold->released) continue;
        if (n < cap) out[n] = hold->linger;
        if (n < cap && hold->shim != NULL) out[n].views = hold->shim->storage_uses(hold->storage);
        n++;
    }
    mt_lock_give(&guests->lock);
    return n;
}

mt_kvhold *
mt_kvhold_new(mt_kvguests *guests, mt_kvlease *lease, uint64_t number)
{
    mt_kvhold *hold = calloc(1, sizeof *hold);

    if (hold == NULL) return NULL;
    hold->guests = guests;
    hold->lease = lease;
    hold->linger.number = number;
    mt_kvlease_hold(lease);
    mt_lock_take(&guests->lock);
    guests->refs++;
    hold->next = guests->first;
    hold->link = &guests->first;
    if (hold->next != NULL) hold->next->link = &hold->next;
    guests->first = hold;
    mt_lock_give(&guests->lock);
    return hold;
}

/* pre: the lock is held; it is given. Frees the hold when both storage and lease are done with it,
 * and only then its reference to guests. */
static void
free_unless_used_locked(mt_kvhold *hold)
{
    mt_kvguests *guests = hold->guests;

    if (!hold->dropped || !atomic_load(&hold->done)) {
        mt_lock_give(&guests->lock);
        return;
    }
    free(hold);
    drop_locked(guests);
}

/* In a forked child nothing is freed: its copy of the locks may be held for ever. */
void
mt_kvhold_done(void *ctx)
{
    mt_kvhold *hold = ctx;

    if (!mt_kvguests_at_home(hold->guests)) return;
    mt_kvlease_unhold(hold->lease);
    mt_lock_take(&hold->guests->lock);
    *hold->link = hold->next;
    if (hold->next != NULL) hold->next->link = hold->link;
    atomic_store(&hold->done, true);
    free_unless_used_locked(hold);
}

void
mt_kvhold_drop(mt_kvhold *hold)
{
    if (hold == NULL || !mt_kvguests_at_home(hold->guests)) return;
    mt_lock_take(&hold->guests->lock);
    hold->dropped = true;
    free_unless_used_locked(hold);
}

void
mt_kvhold_watch(mt_kvhold *hold, const mt_torch_ops *shim, const void *storage)
{
    mt_lock_take(&hold->guests->lock);
    hold->shim = shim;
    hold->storage = storage;
    mt_lock_give(&hold->guests->lock);
}

void
mt_kvhold_linger(mt_kvhold *hold, size_t rows, size_t tokens)
{
    mt_lock_take(&hold->guests->lock);
    hold->released = true;
    hold->linger.rows = rows;
    hold->linger.tokens = tokens;
    mt_lock_give(&hold->guests->lock);
}
