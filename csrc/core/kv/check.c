/* What is true of a pool between any two calls; for tests and fuzzing. */
#include "kv/check.h"

#include "base/size.h"
#include "kv/mapping.h"
#include "kv/private.h"

/* Takes all names off the references, or puts them back: in between each is 0. */
static void
count_names(mt_kvpool *pool, bool back)
{
    for (size_t i = 0; i < pool->slot_count; i++) {
        const mt_kvslot *s = &pool->slots[i];

        for (size_t tb = 0; tb < s->taken; tb++) {
            uint32_t block = s->table[tb];

            if (block == MT_KV_ZERO) continue;
            mt_kvpool_home(pool, block)->refs[mt_kvpool_place(pool, block)] += back ? 1U : -1U;
        }
    }
}

/* The same for sights. */
static void
count_sights(mt_kvpool *pool, bool back)
{
    for (size_t i = 0; i < pool->slot_count; i++) {
        const mt_kvslot *s = &pool->slots[i];

        for (size_t unit = 0; unit < pool->geom.units; unit++)
            for (size_t tb = 0; tb < s->seen[unit]; tb++) {
                uint32_t have = mt_kvslot_have(pool, s, unit, tb), block = have >> 1;

                if (!s->in_sight[unit * pool->geom.blocks + tb] || !mt_kvhave_is_block(have))
                    continue;
                mt_kvpool_home(pool, block)->sights[mt_kvpool_place(pool, block)] +=
                    back ? 1U : -1U;
            }
        for (size_t tb = 0; tb < pool->geom.blocks; tb++)
            if (s->windowed[tb])
                s->sights[tb] += back ? (uint32_t)pool->geom.units : -(uint32_t)pool->geom.units;
    }
}

static bool
counts_hold(mt_kvpool *pool)
{
    size_t again = 0;
    bool good = true;

    for (size_t i = 0; i < pool->slot_count; i++)
        for (size_t tb = 0; tb < pool->geom.blocks; tb++)
            again += mt_size_max(pool->slots[i].sights[tb], pool->geom.units) - pool->geom.units;
    count_names(pool, false);
    count_sights(pool, false);
    for (size_t i = 0; i < pool->slot_count; i++)
        for (size_t tb = 0; tb < pool->geom.blocks; tb++)
            good = good && pool->slots[i].refs[tb] == 0 && pool->slots[i].sights[tb] == 0;
    count_names(pool, true);
    count_sights(pool, true);
    return good && again == pool->again;
}

static bool
slot_holds(mt_kvpool *pool, size_t index)
{
    const mt_kvslot *s = &pool->slots[index];
    size_t named = 0, idle = 0;

    if (s->taken > pool->geom.blocks || s->reach < s->taken) return false;
    if (s->lease == NULL && (s->taken > 0 || s->stale || s->exposed)) return false;
    for (size_t tb = 0; tb < pool->geom.blocks; tb++) {
        if (s->refs[tb] > 0 && !s->resident[tb]) return false;
        named += s->refs[tb] > 0;
        idle += s->refs[tb] == 0 && s->resident[tb];
    }
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        for (size_t tb = s->seen[unit]; tb < pool->geom.blocks; tb++)
            if (s->in_sight[unit * pool->geom.blocks + tb]) return false;
    return s->named == named && s->idle == idle && s->maps == mt_kvmap_count(pool, s);
}

/* What the lease's thread takes for mapped without looking is mapped as the table says, or to zeros
 * where another layer has made the row longer since. */
static bool
shown_holds(const mt_kvlease *lease, size_t row)
{
    const mt_kvpool *pool = lease->pool;
    const mt_kvslot *s = mt_kvlease_slot(lease, row);

    for (size_t unit = 0; unit < pool->geom.units; unit++) {
        size_t end = lease->mapped_to[row * pool->geom.units + unit] / pool->geom.block_tokens;

        for (size_t tb = 0; tb < end; tb++) {
            uint32_t have = mt_kvslot_have(pool, s, unit, tb);
            uint32_t named = tb < s->taken ? s->table[tb] : MT_KV_ZERO;

            if (!s->in_sight[unit * pool->geom.blocks + tb]) return false;
            if (have == MT_HAVE_ZERO || (s->exposed && tb >= s->taken)) continue;
            if (have >> 1 != named) return false;
        }
    }
    return true;
}

static bool
lease_holds(const mt_kvlease *lease)
{
    const mt_kvgeom *g = &lease->pool->geom;

    if (lease->rows > lease->max_rows || lease->holds == 0) return false;
    for (size_t row = 0; row < lease->max_rows; row++) {
        const mt_kvslot *s = mt_kvlease_slot(lease, row);

        if (s->lease != lease) return false;
    }
    for (size_t row = 0; row < lease->rows; row++) {
        if (mt_kvlease_slot(lease, row)->taken < mt_kvlease_blocks(lease, row)) return false;
        if (mt_kvlease_row_tokens(lease, row) > g->config.max_tokens) return false;
        if (!shown_holds(lease, row)) return false;
    }
    return true;
}

static bool
sums_hold(const mt_kvpool *pool)
{
    size_t live = 0, idle = 0, promised = 0, maps = 0, stale = 0;

    for (size_t i = 0; i < pool->slot_count; i++) {
        live += pool->slots[i].named;
        idle += pool->slots[i].idle;
        maps += pool->slots[i].maps;
        stale += pool->slots[i].stale;
    }
    for (const mt_kvlease *lease = pool->leases; lease != NULL; lease = lease->next) {
        if (!lease_holds(lease)) return false;
        promised += lease->promised;
    }
    maps += pool->slot_count / pool->geom.config.max_rows;
    return pool->live == live && pool->idle == idle && pool->promised == promised &&
           pool->maps == maps && pool->stale == stale;
}

bool
mt_kvpool_check(mt_kvpool *pool)
{
    bool good;

    mt_lock_take(&pool->lock);
    good = sums_hold(pool) && counts_hold(pool) && pool->peak >= pool->live + pool->idle &&
           pool->reserved == pool->live + mt_size_max(pool->idle, pool->promised) &&
           mt_member_reserved(pool->member) == pool->reserved * pool->geom.block_bytes;
    for (size_t i = 0; good && i < pool->slot_count; i++)
        good = slot_holds(pool, i);
    mt_lock_give(&pool->lock);
    return good;
}
