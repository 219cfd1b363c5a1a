#include "kvpool_private.h"

#include <assert.h>

#include "size.h"

static size_t
need(const mt_kvpool *pool, size_t promised)
{
    return pool->live + mt_size_max(pool->idle, promised);
}

mt_status
mt_kvblock_promise(mt_kvlease *lease, size_t blocks, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    size_t wanted = need(pool, pool->promised + blocks), bytes;
    mt_status st;

    if (wanted > pool->reserved) {
        if (!mt_size_mul(wanted - pool->reserved, pool->geom.block_bytes, &bytes))
            return mt_fail(err, MT_EOVERFLOW, "promise", 0);
        if ((st = mt_member_reserve(pool->member, bytes, err)) != MT_OK) return st;
        pool->reserved = wanted;
    }
    pool->promised += blocks;
    lease->promised += blocks;
    return MT_OK;
}

void
mt_kvblock_unpromise(mt_kvlease *lease, size_t blocks)
{
    assert(blocks <= lease->promised);
    lease->promised -= blocks;
    lease->pool->promised -= blocks;
    mt_kvblock_fit(lease->pool);
}

void
mt_kvblock_fit(mt_kvpool *pool)
{
    size_t wanted = need(pool, pool->promised);

    assert(wanted <= pool->reserved);
    if (wanted == pool->reserved) return;
    mt_member_release(pool->member, (pool->reserved - wanted) * pool->geom.block_bytes);
    pool->reserved = wanted;
}

/* --- dropping --- */

static bool
is_idle(const mt_kvslot *s, size_t tb)
{
    return s->resident[tb] && s->refs[tb] == 0;
}

static void
drop_run(mt_kvpool *pool, size_t slot, size_t lo, size_t hi)
{
    const mt_kvgeom *g = &pool->geom;
    const mt_kvslot *s = &pool->slots[slot];

    if (!pool->store.lazy) mt_kvmap_forget(pool, slot, lo, hi);
    for (size_t at = lo * g->part_bytes; at < g->slot_bytes; at += g->range_bytes)
        pool->store.drop(pool->store.ctx, s->offset + at, (hi - lo) * g->part_bytes);
}

/* A home that nobody names is one stretch of the store: one call drops it. */
static void
drop_home(mt_kvpool *pool, size_t slot)
{
    const mt_kvslot *s = &pool->slots[slot];

    if (!pool->store.lazy) mt_kvmap_forget(pool, slot, 0, pool->geom.blocks);
    pool->store.drop(pool->store.ctx, s->offset, pool->geom.slot_bytes);
}

static void
drop_runs(mt_kvpool *pool, size_t slot)
{
    const mt_kvslot *s = &pool->slots[slot];
    size_t n = pool->geom.blocks;

    for (size_t lo = 0, hi; lo < n; lo = hi + 1) {
        for (hi = lo; hi < n && is_idle(s, hi);)
            hi++;
        if (hi > lo) drop_run(pool, slot, lo, hi);
    }
}

static void
drop_idle_of(mt_kvpool *pool, size_t slot)
{
    mt_kvslot *s = &pool->slots[slot];

    if (s->named == 0)
        drop_home(pool, slot);
    else
        drop_runs(pool, slot);
    for (size_t tb = 0; tb < pool->geom.blocks; tb++)
        if (is_idle(s, tb)) s->resident[tb] = false;
    pool->idle -= s->idle;
    pool->dropped += s->idle;
    s->idle = 0;
}

/* An exposed row sees all of its home: what it does not name has to read as zeros. */
static void
drop_block(mt_kvpool *pool, size_t slot, size_t tb)
{
    mt_kvslot *s = &pool->slots[slot];

    drop_run(pool, slot, tb, tb + 1);
    s->resident[tb] = false;
    s->idle--;
    pool->idle--;
    pool->dropped++;
}

/* Whose idle blocks are missed least: a free slot's, of them the one used longest ago; then those
 * of a row that shrank. What code may have written in place is nobody's to drop. */
static mt_kvslot *
victim(mt_kvpool *pool)
{
    mt_kvslot *best = NULL;

    for (size_t i = 0; i < pool->slot_count; i++) {
        mt_kvslot *s = &pool->slots[i];

        if (s->idle == 0 || s->exposed) continue;
        if (best == NULL || (s->lease == NULL) > (best->lease == NULL) ||
            ((s->lease == NULL) == (best->lease == NULL) && s->used_at < best->used_at))
            best = s;
    }
    return best;
}

void
mt_kvblock_drop(mt_kvpool *pool, size_t keep)
{
    mt_kvslot *s;

    while (pool->idle > keep && (s = victim(pool)) != NULL)
        drop_idle_of(pool, (size_t)(s - pool->slots));
}

/* --- taking --- */

/* A slot whose home has this block free; the row's own keeps addresses and store in step, another
 * resident one at least saves the page. slot_count when there is none. */
static size_t
free_home(const mt_kvpool *pool, size_t slot, size_t tb)
{
    size_t found = pool->slot_count;

    if (pool->slots[slot].refs[tb] == 0) return slot;
    for (size_t i = 0; i < pool->slot_count; i++) {
        const mt_kvslot *s = &pool->slots[i];

        if (s->refs[tb] > 0 || s->exposed) continue;
        if (s->resident[tb]) return i;
        if (found == pool->slot_count) found = i;
    }
    return found;
}

/* The pages of one block, of a store that is not lazy. */
static mt_status
take_pages(mt_kvpool *pool, const mt_kvslot *s, size_t tb, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    size_t first = s->offset + tb * g->part_bytes, at;
    mt_status st = MT_OK;

    for (at = 0; at < g->slot_bytes; at += g->range_bytes)
        if ((st = pool->store.take(pool->store.ctx, first + at, g->part_bytes, err)) != MT_OK)
            break;
    while (st != MT_OK && at > 0) {
        at -= g->range_bytes;
        pool->store.drop(pool->store.ctx, first + at, g->part_bytes);
    }
    return st;
}

/* Where nothing could be dropped, because the idle blocks are exposed rows', one more page is one
 * more reserved, whatever was promised. */
static mt_status
reserve_for_one(mt_kvpool *pool, mt_error *err)
{
    size_t wanted = pool->live + 1 + mt_size_max(pool->idle, pool->promised - 1);
    mt_status st;

    if (wanted <= pool->reserved) return MT_OK;
    st = mt_member_reserve(pool->member, (wanted - pool->reserved) * pool->geom.block_bytes, err);
    if (st == MT_OK) pool->reserved = wanted;
    return st;
}

static mt_status
make_resident(mt_kvpool *pool, size_t home, size_t tb, mt_error *err)
{
    mt_status st;

    if (pool->idle > 0) mt_kvblock_drop(pool, pool->idle - 1); /* what is physical stays level */
    if ((st = reserve_for_one(pool, err)) != MT_OK) return st;
    if (!pool->store.lazy) {
        st = take_pages(pool, &pool->slots[home], tb, err);
        if (st != MT_OK) return st;
    }
    pool->slots[home].resident[tb] = true;
    pool->taken++;
    return MT_OK;
}

mt_status
mt_kvblock_take(mt_kvlease *lease, size_t slot, size_t tb, uint32_t *home, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    size_t found = free_home(pool, slot, tb);
    mt_status st;
    mt_kvslot *s;

    assert(lease->promised > 0);
    if (found == pool->slot_count && (st = mt_kvpool_extend(pool, err)) != MT_OK) return st;
    if (!pool->slots[found].resident[tb]) {
        if ((st = make_resident(pool, found, tb, err)) != MT_OK) return st;
    } else {
        pool->slots[found].idle--;
        pool->idle--;
        pool->recycled++;
    }
    s = &pool->slots[found];
    s->refs[tb] = 1;
    s->named++;
    pool->live++;
    lease->promised--;
    pool->promised--;
    pool->peak = mt_size_max(pool->peak, pool->live + pool->idle);
    *home = (uint32_t)found;
    return MT_OK;
}

void
mt_kvblock_untake(mt_kvlease *lease, uint32_t home, size_t tb)
{
    mt_kvblock_unname(lease->pool, home, tb);
    lease->promised++;
    lease->pool->promised++;
}

/* --- naming --- */

void
mt_kvblock_name(mt_kvpool *pool, uint32_t home, size_t tb)
{
    if (home == MT_KV_ZERO) return;
    assert(pool->slots[home].refs[tb] > 0);
    pool->slots[home].refs[tb]++;
}

void
mt_kvblock_unname(mt_kvpool *pool, uint32_t home, size_t tb)
{
    mt_kvslot *s;

    if (home == MT_KV_ZERO) return;
    s = &pool->slots[home];
    assert(s->refs[tb] > 0 && s->resident[tb]);
    if (--s->refs[tb] > 0) return;
    s->named--;
    s->idle++;
    pool->live--;
    pool->idle++;
    if (s->exposed) drop_block(pool, home, tb);
}

/* --- content --- */

static mt_status
part_window(mt_kvpool *pool, uint32_t home, size_t at, void **out, mt_error *err)
{
    return pool->store.window(pool->store.ctx, pool->slots[home].offset + at, pool->geom.part_bytes,
                              out, err);
}

mt_status
mt_kvblock_copy(mt_kvpool *pool, uint32_t to, uint32_t from, size_t tb, size_t tokens,
                mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    mt_status st = MT_OK;
    void *dst, *src;

    for (size_t at = tb * g->part_bytes; st == MT_OK && tokens > 0 && at < g->slot_bytes;
         at += g->range_bytes) {
        if ((st = part_window(pool, from, at, &src, err)) != MT_OK) break;
        if ((st = part_window(pool, to, at, &dst, err)) != MT_OK) break;
        st = pool->store.copy(pool->store.ctx, dst, src, tokens * g->token_bytes, err);
    }
    return st;
}

mt_status
mt_kvblock_zero(mt_kvpool *pool, uint32_t home, size_t tb, size_t from, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    size_t skip = from * g->token_bytes;
    mt_status st = MT_OK;
    void *dst;

    if (skip == g->part_bytes) return MT_OK;
    for (size_t at = tb * g->part_bytes; st == MT_OK && at < g->slot_bytes; at += g->range_bytes) {
        if ((st = part_window(pool, home, at, &dst, err)) != MT_OK) break;
        st = pool->store.zero(pool->store.ctx, (char *)dst + skip, g->part_bytes - skip, err);
    }
    return st;
}
