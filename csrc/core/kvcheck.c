/* What is true of a pool between any two calls; for tests and fuzzing. */
#include "kvpool_private.h"

#include "size.h"

static size_t
names_of(const mt_kvpool *pool, size_t home, size_t tb)
{
    size_t names = 0;

    for (size_t i = 0; i < pool->slot_count; i++)
        names += tb < pool->slots[i].taken && pool->slots[i].table[tb] == home;
    return names;
}

static bool
slot_holds(const mt_kvpool *pool, size_t index)
{
    const mt_kvslot *s = &pool->slots[index];
    size_t named = 0, idle = 0;

    if (s->taken > pool->geom.blocks || (s->lease == NULL && s->taken > 0)) return false;
    for (size_t tb = 0; tb < pool->geom.blocks; tb++) {
        if (s->refs[tb] != names_of(pool, index, tb)) return false;
        if (s->refs[tb] > 0 && !s->resident[tb]) return false;
        named += s->refs[tb] > 0;
        idle += s->refs[tb] == 0 && s->resident[tb];
    }
    return s->named == named && s->idle == idle && s->maps == mt_kvmap_count(pool, s);
}

static bool
lease_holds(const mt_kvlease *lease)
{
    const mt_kvgeom *g = &lease->pool->geom;

    if (lease->rows > lease->max_rows || lease->holds == 0) return false;
    for (size_t row = 0; row < lease->max_rows; row++) {
        const mt_kvslot *s = mt_kvlease_slot(lease, row);

        if (s->lease != lease || (s->exposed && !lease->exposed)) return false;
    }
    for (size_t row = 0; row < lease->rows; row++) {
        if (mt_kvlease_slot(lease, row)->taken < mt_kvlease_blocks(lease, row)) return false;
        if (mt_kvlease_row_tokens(lease, row) > g->config.max_tokens) return false;
    }
    return true;
}

static bool
sums_hold(const mt_kvpool *pool)
{
    size_t live = 0, idle = 0, promised = 0, maps = 0;

    for (size_t i = 0; i < pool->slot_count; i++) {
        live += pool->slots[i].named;
        idle += pool->slots[i].idle;
        maps += pool->slots[i].maps;
    }
    for (const mt_kvlease *lease = pool->leases; lease != NULL; lease = lease->next) {
        if (!lease_holds(lease)) return false;
        promised += lease->promised;
    }
    maps += pool->slot_count / pool->geom.config.max_rows;
    return pool->live == live && pool->idle == idle && pool->promised == promised &&
           pool->maps == maps;
}

bool
mt_kvpool_check(mt_kvpool *pool)
{
    bool good;

    mt_lock_take(&pool->lock);
    good = sums_hold(pool) && pool->peak >= pool->live + pool->idle &&
           pool->reserved == pool->live + mt_size_max(pool->idle, pool->promised) &&
           mt_member_reserved(pool->member) == pool->reserved * pool->geom.block_bytes;
    for (size_t i = 0; good && i < pool->slot_count; i++)
        good = slot_holds(pool, i);
    mt_lock_give(&pool->lock);
    return good;
}
