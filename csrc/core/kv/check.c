/* What is true of a pool between any two calls; for tests and fuzzing. */
#include "base/size.h"
#include "kv/kv.h"
#include "kv/mapping.h"

/* Takes all names off the references, or puts them back: in between each is 0. */
static void
check_count_names(mt_kvpool *pool, bool back)
{
    for (size_t i = 0; i < pool->slot_count; i++) {
        const mt_kvslot *s = &pool->slots[i];

        for (size_t place = 0; place < s->taken; place++) {
            uint32_t block = s->table[place];

            if (block == MT_KV_ZERO) continue;
            mt_kvblock_at(pool, block)->refs += back ? 1U : -1U;
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
            for (size_t place = 0; place < s->seen[unit]; place++) {
                uint32_t mapped = mt_kvslot_mapped(pool, s, unit, place), block = mapped >> 1;

                if (!s->in_sight[unit * pool->geom.blocks + place] || !mt_kvmapped_is_block(mapped))
                    continue;
                mt_kvblock_at(pool, block)->sights += back ? 1U : -1U;
            }
        for (size_t place = 0; place < pool->geom.blocks; place++)
            if (s->blocks[place].windowed)
                s->blocks[place].sights +=
                    back ? (uint32_t)pool->geom.units : -(uint32_t)pool->geom.units;
    }
}

static bool
counts_hold(mt_kvpool *pool)
{
    size_t again = 0;
    bool good = true;

    for (size_t i = 0; i < pool->slot_count; i++)
        for (size_t place = 0; place < pool->geom.blocks; place++)
            again += mt_size_max(pool->slots[i].blocks[place].sights, pool->geom.units) -
                     pool->geom.units;
    check_count_names(pool, false);
    count_sights(pool, false);
    for (size_t i = 0; i < pool->slot_count; i++)
        for (size_t place = 0; place < pool->geom.blocks; place++)
            good = good && pool->slots[i].blocks[place].refs == 0 &&
                   pool->slots[i].blocks[place].sights == 0;
    check_count_names(pool, true);
    count_sights(pool, true);
    return good && again == pool->extra_sights;
}

static bool
slot_holds(mt_kvpool *pool, size_t index)
{
    const mt_kvslot *s = &pool->slots[index];
    size_t named = 0, idle = 0;

    if (s->taken > pool->geom.blocks || s->reach < s->taken) return false;
    if (s->lease == NULL && (s->taken > 0 || s->stale || s->exposed)) return false;
    for (size_t place = 0; place < pool->geom.blocks; place++) {
        const mt_kvblock *b = &s->blocks[place];

        if (b->refs > 0 && !b->resident) return false;
        named += b->refs > 0;
        idle += mt_kvblock_is_idle(b);
    }
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        for (size_t place = s->seen[unit]; place < pool->geom.blocks; place++)
            if (s->in_sight[unit * pool->geom.blocks + place]) return false;
    return s->named == named && s->idle == idle && s->maps == mt_kvmap_count_areas(pool, s);
}

/* What the lease's thread takes for mapped without looking is mapped as the table says, or to zeros
 * where another layer has made the row longer since. */
static bool
mapped_to_holds(const mt_kvlease *lease, size_t row)
{
    const mt_kvpool *pool = lease->pool;
    const mt_kvslot *s = mt_kvlease_slot(lease, row);

    for (size_t unit = 0; unit < pool->geom.units; unit++) {
        size_t end = mt_kvlease_unit_marks(lease, unit, row)->mapped_to / pool->geom.block_tokens;

        for (size_t place = 0; place < end; place++) {
            uint32_t mapped = mt_kvslot_mapped(pool, s, unit, place);
            uint32_t named = place < s->taken ? s->table[place] : MT_KV_ZERO;

            if (!s->in_sight[unit * pool->geom.blocks + place]) return false;
            if (mapped == MT_MAPPED_ZERO || (s->exposed && place >= s->taken)) continue;
            if (mapped >> 1 != named) return false;
        }
    }
    return true;
}

/* What prepare.h says of a row's marks. */
static bool
marks_hold(const mt_kvlease *lease, size_t row)
{
    const mt_kvgeom *g = &lease->pool->geom;
    size_t end = g->blocks * g->block_tokens;

    for (size_t layer = 0; layer < g->config.layers; layer++) {
        const mt_kvlayer_marks *m = mt_kvlease_marks(lease, layer, row);

        if (m->length > m->writable_to || m->length > m->zero_to) return false;
    }
    for (size_t unit = 0; unit < g->units; unit++) {
        const mt_kvunit_marks *m = mt_kvlease_unit_marks(lease, unit, row);

        if (m->owned_from > m->owned_to || m->owned_to > end || m->mapped_to > end) return false;
        if (m->owned_from % g->block_tokens != 0 || m->owned_to % g->block_tokens != 0 ||
            m->mapped_to % g->block_tokens != 0)
            return false;
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
        if (!marks_hold(lease, row) || !mapped_to_holds(lease, row)) return false;
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
