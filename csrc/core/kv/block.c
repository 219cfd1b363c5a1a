/* How this file works. It counts. Each block of the pool is live, idle or nothing, and every change
 * of that goes through block_take_name, make_resident, mt_kvblock_take and note_dropped, which keep
 * the sums of the pool and of the extent. The rest is choice: which idle blocks are missed least when
 * some must be dropped (victim), and which block costs a row least when it takes one (choose).
 * Where a row lets go of a block that its addresses may still map, the slot is called stale, and
 * the block remembers which slot it was (let_go), so that it is neither taken nor dropped before those
 * addresses have changed. */
#include "kv/block.h"

#include <assert.h>

#include "base/size.h"
#include "kv/mapping.h"

static size_t
need(const mt_kvpool *pool, size_t promised)
{
    return pool->live + mt_size_max(pool->idle, promised);
}

/* Has the ledger reserve so many blocks in all. */
static mt_status
reserve_up_to(mt_kvpool *pool, size_t blocks, mt_error *err)
{
    size_t bytes;
    mt_status st;

    if (blocks <= pool->reserved) return MT_OK;
    if (!mt_size_mul(blocks - pool->reserved, pool->geom.block_bytes, &bytes))
        return mt_fail(err, MT_EOVERFLOW, "promise", 0);
    st = mt_member_reserve(pool->member, bytes, err);
    if (st == MT_OK) pool->reserved = blocks;
    return st;
}

mt_status
mt_kvblock_promise(mt_kvlease *lease, size_t blocks, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    mt_status st = reserve_up_to(pool, need(pool, pool->promised + blocks), err);

    if (st != MT_OK) return st;
    pool->promised += blocks;
    lease->promised += blocks;
    return MT_OK;
}

void
mt_kvblock_unpromise(mt_kvlease *lease, size_t blocks)
{
    assert(blocks <= lease->promised && lease->promised <= lease->pool->promised);
    lease->promised -= blocks;
    lease->pool->promised -= blocks;
    mt_kvblock_shrink_reservation(lease->pool);
}

void
mt_kvblock_shrink_reservation(mt_kvpool *pool)
{
    size_t wanted = need(pool, pool->promised);

    assert(wanted <= pool->reserved);
    if (wanted == pool->reserved) return;
    mt_member_release(pool->member, (pool->reserved - wanted) * pool->geom.block_bytes);
    pool->reserved = wanted;
}

/* --- dropping --- */

/* The pages of the extent's blocks [lo, hi). */
static void
drop_pages(mt_kvpool *pool, const mt_kvslot *s, size_t lo, size_t hi)
{
    const mt_kvgeom *g = &pool->geom;

    for (size_t at = lo * g->part_bytes; at < g->slot_bytes; at += g->range_bytes)
        pool->store.drop(pool->store.ctx, s->offset + at, (hi - lo) * g->part_bytes);
}

static void
unmap_blocks(mt_kvpool *pool, const mt_kvslot *s, size_t lo, size_t hi)
{
    if (!pool->store.lazy) mt_kvmap_unmap(pool, mt_kvslot_block(s, lo), mt_kvslot_block(s, hi));
}

/* Counts the block as dropped. pre: it is idle. */
static void
note_dropped(mt_kvpool *pool, mt_kvslot *s, size_t place)
{
    assert(mt_kvblock_is_idle(&s->blocks[place]));
    mt_kvmap_count_window(pool, mt_kvslot_block(s, place), false);
    s->blocks[place].resident = false;
    s->idle--;
    pool->idle--;
    pool->ever.dropped++;
    mt_gauge_add_once(pool->mapped_again, 0 - pool->geom.block_bytes);
}

/* Whether a row that goes on may show the block still, after it let go of it. */
static bool
may_be_shown(const mt_kvpool *pool, uint32_t block)
{
    uint32_t by = mt_kvblock_at(pool, block)->let_go;

    if (by == 0 || pool->stale == 0) return false;
    return by == MT_KV_MANY || pool->slots[by - 1].stale;
}

static bool
may_drop(const mt_kvpool *pool, const mt_kvslot *s, size_t place)
{
    return mt_kvblock_is_idle(&s->blocks[place]) && !may_be_shown(pool, mt_kvslot_block(s, place));
}

/* Drops the extent's idle blocks at places [first, end): all, or those that no view may show. */
static void
drop_idle_in(mt_kvpool *pool, mt_kvslot *s, size_t first, size_t end, bool all)
{
    for (size_t lo = first, hi; lo < end; lo = hi + 1) {
        for (hi = lo;
             hi < end && (all ? mt_kvblock_is_idle(&s->blocks[hi]) : may_drop(pool, s, hi));)
            hi++;
        if (hi == lo) continue;
        unmap_blocks(pool, s, lo, hi);
        drop_pages(pool, s, lo, hi);
        for (size_t place = lo; place < hi; place++)
            note_dropped(pool, s, place);
    }
}

/* An extent that no row names is one range of the store: one call drops it. */
static void
drop_extent(mt_kvpool *pool, mt_kvslot *s)
{
    unmap_blocks(pool, s, 0, pool->geom.blocks);
    pool->store.drop(pool->store.ctx, s->offset, pool->geom.slot_bytes);
    for (size_t place = 0; place < pool->geom.blocks; place++)
        if (s->blocks[place].resident) note_dropped(pool, s, place);
}

/* Whose idle blocks are missed less: a free slot's, of them the one used longer ago; then those of
 * a row that shrank. */
static bool
is_missed_less(const mt_kvslot *s, const mt_kvslot *than)
{
    if (than == NULL || (s->lease == NULL) != (than->lease == NULL))
        return than == NULL || s->lease == NULL;
    return s->used_at < than->used_at;
}

/* Whether idle blocks of the extent can be dropped. What code may have written in place
 * stays. */
static bool
has_to_drop(const mt_kvpool *pool, const mt_kvslot *s)
{
    if (s->idle == 0 || s->exposed) return false;
    if (pool->stale == 0) return true;
    for (size_t place = 0; place < pool->geom.blocks; place++)
        if (may_drop(pool, s, place)) return true;
    return false;
}

/* The slot whose idle blocks are missed least, of those that can be dropped or of all. */
static mt_kvslot *
victim(mt_kvpool *pool, bool to_drop)
{
    mt_kvslot *best = NULL;

    for (size_t i = 0; i < pool->slot_count; i++) {
        mt_kvslot *s = &pool->slots[i];

        if (to_drop ? !has_to_drop(pool, s) : s->idle == 0 || s->exposed) continue;
        if (is_missed_less(s, best)) best = s;
    }
    return best;
}

/* A view that still shows a dropped block would make it physical again, and what is written through
 * it would be there when the block is taken the next time: so all such addresses change first, and
 * where they cannot the block stays. */
void
mt_kvblock_drop(mt_kvpool *pool, size_t keep)
{
    mt_kvslot *s;

    if (pool->idle <= keep) return;
    (void)mt_kvmap_clear_stale(pool, NULL);
    while (pool->idle > keep && (s = victim(pool, true)) != NULL)
        if (s->named == 0 && pool->stale == 0)
            drop_extent(pool, s);
        else
            drop_idle_in(pool, s, 0, pool->geom.blocks, false);
}

/* --- taking --- */

/* Whether the row in `slot` may take the block for `place`. Views of an exposed row show each
 * block of its extent at its own place. */
static bool
is_free(const mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    const mt_kvslot *extent = mt_kvblock_extent(pool, block);

    return mt_kvblock_at(pool, block)->refs == 0 &&
           (!extent->exposed || block == pool->slots[slot].first_block + place);
}

static bool
is_spare(const mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    return is_free(pool, slot, place, block) && mt_kvblock_at(pool, block)->resident;
}

/* The block that the slot's addresses map at `place`; MT_KV_ANY: none. */
static uint32_t
block_here(const mt_kvpool *pool, const mt_kvslot *s, size_t place)
{
    uint32_t mapped = mt_kvslot_mapped(pool, s, 0, place);

    return mt_kvmapped_is_block(mapped) ? mapped >> 1 : MT_KV_ANY;
}

/* The block behind the row's last one, so that both are one map area. */
static uint32_t
block_behind(const mt_kvpool *pool, const mt_kvslot *s, size_t place)
{
    uint32_t before = place > 0 && place <= s->taken ? s->table[place - 1] : MT_KV_ZERO;

    if (before == MT_KV_ZERO || mt_kvblock_index(pool, before) + 1 == pool->geom.blocks)
        return MT_KV_ANY;
    return before + 1;
}

/* The extent's first idle block that does not lie behind one in use: that row takes it next.
 */
static uint32_t
first_of_run(const mt_kvpool *pool, const mt_kvslot *s)
{
    for (size_t place = 0; s->idle > 0 && !s->exposed && place < pool->geom.blocks; place++)
        if (mt_kvblock_is_idle(&s->blocks[place]) && (place == 0 || s->blocks[place - 1].refs == 0))
            return mt_kvslot_block(s, place);
    return MT_KV_ANY;
}

/* Any idle block: where a run of them begins, which the row takes next, in its own extent or in
 * that where it is missed least; else any of the slot where they are missed least. */
static uint32_t
any_spare(mt_kvpool *pool, size_t slot)
{
    const mt_kvslot *own = &pool->slots[slot], *best = NULL;
    uint32_t found = own->lease->exposing ? MT_KV_ANY : first_of_run(pool, own);

    if (found != MT_KV_ANY) return found;
    for (size_t i = 0; i < pool->slot_count; i++) {
        const mt_kvslot *s = &pool->slots[i];
        uint32_t run = s == own || !is_missed_less(s, best) ? MT_KV_ANY : first_of_run(pool, s);

        if (run == MT_KV_ANY) continue;
        best = s;
        found = run;
    }
    if (found != MT_KV_ANY) return found;
    best = victim(pool, false);
    for (size_t place = 0; best != NULL && place < pool->geom.blocks; place++)
        if (mt_kvblock_is_idle(&best->blocks[place])) return mt_kvslot_block(best, place);
    return MT_KV_ANY;
}

/* Whether an idle block may be mapped at a place where it does not lie. Each is a map area or more
 * in every range: where they run short, rather a new page than a copy of the whole row. */
static bool
may_scatter(const mt_kvpool *pool)
{
    return pool->idle > 0 && pool->maps < pool->store.max_maps / 2;
}

static uint32_t
any_free(const mt_kvpool *pool, size_t slot, size_t place)
{
    for (uint32_t block = 0; block < pool->slot_count * pool->geom.blocks; block++)
        if (is_free(pool, slot, place, block)) return block;
    return MT_KV_ANY;
}

/* The block that costs the row least: of an exposed one the block that its addresses map, which
 * code may have written to; of one that is about to be exposed the same, because rows whose extents
 * others have named up to some place have to own all blocks up to there; the same where the row has
 * moved; else an idle one that lies there, or behind the row's last, or anywhere; a new one at its
 * own place; any. MT_KV_ANY: there is none in any extent. */
uint32_t
mt_kvblock_nearest(const mt_kvpool *pool, size_t slot, size_t place)
{
    const mt_kvslot *s = &pool->slots[slot], *extent = &pool->slots[s->extent];
    uint32_t own = mt_kvslot_block(s, place), here = block_here(pool, s, place);

    if ((s->exposed || s->lease->exposing) && s->blocks[place].refs == 0) return own;
    if (extent != s && is_free(pool, slot, place, mt_kvslot_block(extent, place)))
        return mt_kvslot_block(extent, place);
    if (here != MT_KV_ANY && is_spare(pool, slot, place, here)) return here;
    return is_spare(pool, slot, place, own) ? own : MT_KV_ANY;
}

static uint32_t
choose(mt_kvpool *pool, size_t slot, size_t place)
{
    const mt_kvslot *s = &pool->slots[slot];
    uint32_t own = mt_kvslot_block(s, place), found = mt_kvblock_nearest(pool, slot, place);

    if (found != MT_KV_ANY) return found;
    found = may_scatter(pool) ? block_behind(pool, s, place) : MT_KV_ANY;
    if (found != MT_KV_ANY && is_spare(pool, slot, place, found)) return found;
    found = may_scatter(pool) ? any_spare(pool, slot) : MT_KV_ANY;
    if (found != MT_KV_ANY) return found;
    return is_free(pool, slot, place, own) ? own : any_free(pool, slot, place);
}

bool
mt_kvblock_is_in_view(const mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    uint32_t by = mt_kvblock_at(pool, block)->let_go;
    const mt_kvslot *s = &pool->slots[slot];

    if (!may_be_shown(pool, block)) return false;
    if (by != slot + 1 || s->broken || block_here(pool, s, place) != block) return true;
    return mt_kvmap_is_seen_elsewhere(pool, slot, place, block);
}

/* A block that no row shows: an idle one, else the row's own, else any. */
static uint32_t
any_unseen(const mt_kvpool *pool, size_t slot, size_t place)
{
    uint32_t own = mt_kvslot_block(&pool->slots[slot], place), found = MT_KV_ANY;

    for (uint32_t block = 0; block < pool->slot_count * pool->geom.blocks; block++) {
        if (!is_free(pool, slot, place, block)) continue;
        if (mt_kvblock_is_in_view(pool, slot, place, block)) continue;
        if (is_spare(pool, slot, place, block)) return block;
        if (found == MT_KV_ANY || block == own) found = block;
    }
    return found;
}

/* The block to take: `exact`, or what costs least, of a new arena where there is none. Where the
 * system gives no mappings for rows to leave it, one that they need not leave; but not where it has
 * to be this one, or code may have written to it in place. */
static mt_status
find_block(mt_kvpool *pool, size_t slot, size_t place, uint32_t exact, uint32_t *block,
           mt_error *err)
{
    const mt_kvslot *s = &pool->slots[slot];
    bool in_place = s->exposed || s->lease->exposing;
    mt_status st = MT_OK;

    *block = exact != MT_KV_ANY ? exact : choose(pool, slot, place);
    if (*block != MT_KV_ANY && mt_kvblock_is_in_view(pool, slot, place, *block))
        st = mt_kvmap_clear_stale(pool, err);
    if (st == MT_EAGAIN && (exact != MT_KV_ANY || (in_place && *block == s->first_block + place)))
        return mt_fail(err, MT_ENOMEM, MT_STORE_MAPS, 0);
    if (st == MT_EAGAIN) *block = any_unseen(pool, slot, place);
    if (st != MT_OK && st != MT_EAGAIN) return st;
    if (*block != MT_KV_ANY) return MT_OK;
    *block = (uint32_t)(pool->slot_count * pool->geom.blocks);
    return mt_kvpool_add_arena(pool, err);
}

/* The pages of one block, of a store that is not lazy. */
static mt_status
take_pages(mt_kvpool *pool, const mt_kvslot *s, size_t place, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    size_t first = s->offset + place * g->part_bytes, at;
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

/* One name less; true where it was the last, and the block is idle now. */
static bool
block_take_name(mt_kvpool *pool, uint32_t block)
{
    mt_kvslot *extent = mt_kvblock_extent(pool, block);
    mt_kvblock *b = mt_kvblock_at(pool, block);

    assert(b->refs > 0 && b->resident);
    if (--b->refs > 0) return false;
    extent->named--;
    extent->idle++;
    pool->live--;
    pool->idle++;
    pool->notify_due = true;
    return true;
}

/* Where nothing could be dropped, because the idle blocks are exposed rows', one more page is one
 * more reserved, whatever was promised. */
static mt_status
make_resident(mt_kvpool *pool, mt_kvslot *extent, size_t place, mt_error *err)
{
    mt_status st;

    if (pool->idle > 0) mt_kvblock_drop(pool, pool->idle - 1); /* what is physical stays level */
    st = reserve_up_to(pool, pool->live + 1 + mt_size_max(pool->idle, pool->promised - 1), err);
    if (st == MT_OK && !pool->store.lazy) st = take_pages(pool, extent, place, err);
    if (st != MT_OK) return st;
    extent->blocks[place].resident = true;
    extent->idle++;
    pool->idle++;
    pool->ever.taken++;
    mt_gauge_add_once(pool->mapped_again, pool->geom.block_bytes);
    return MT_OK;
}

/* From now on only the addresses of this slot show the block. pre: it is in no view. */
static void
leave_to(mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    mt_kvblock *b = mt_kvblock_at(pool, block);

    assert(!mt_kvblock_is_in_view(pool, slot, place, block));
    if (!pool->store.lazy && b->resident && block_here(pool, &pool->slots[slot], place) != block)
        mt_kvmap_unmap(pool, block, block + 1);
    mt_kvmap_hide_in_free_slots(pool, slot, place, block);
    mt_kvmap_forget_private(pool, slot, place, block);
    b->let_go = 0;
}

mt_status
mt_kvblock_take(mt_kvlease *lease, size_t slot, size_t place, uint32_t exact, uint32_t *block,
                mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    uint32_t found;
    mt_kvslot *extent;
    mt_kvblock *b;
    mt_status st;

    assert(lease->promised > 0 && place < pool->geom.blocks);
    if ((st = find_block(pool, slot, place, exact, &found, err)) != MT_OK) return st;
    extent = mt_kvblock_extent(pool, found);
    b = mt_kvblock_at(pool, found);
    assert(b->refs == 0);
    leave_to(pool, slot, place, found);
    if (b->resident)
        pool->ever.recycled++;
    else if ((st = make_resident(pool, extent, mt_kvblock_index(pool, found), err)) != MT_OK)
        return st;
    extent->idle--;
    pool->idle--;
    b->refs = 1;
    extent->named++;
    pool->live++;
    lease->promised--;
    pool->promised--;
    pool->peak = mt_size_max(pool->peak, pool->live + pool->idle);
    *block = found;
    return MT_OK;
}

void
mt_kvblock_untake(mt_kvlease *lease, size_t slot, uint32_t block, bool filled)
{
    mt_kvslot *extent = mt_kvblock_extent(lease->pool, block);
    size_t place = mt_kvblock_index(lease->pool, block);

    (void)block_take_name(lease->pool, block);
    assert(mt_kvblock_is_idle(&extent->blocks[place]));
    mt_kvblock_note_shown(lease->pool, slot, block);
    if (filled && extent->exposed) drop_idle_in(lease->pool, extent, place, place + 1, true);
    lease->promised++;
    lease->pool->promised++;
}

void
mt_kvblock_note_undone(const mt_kvpool *pool, size_t reserved, mt_error *why)
{
    size_t bytes = (reserved - pool->reserved) * pool->geom.block_bytes;

    if (why->status != MT_ELIMIT) return;
    why->asked += bytes;
    why->used -= bytes;
}

/* --- naming --- */

void
mt_kvblock_name(mt_kvpool *pool, uint32_t block)
{
    if (block == MT_KV_ZERO) return;
    assert(mt_kvblock_at(pool, block)->refs > 0);
    mt_kvblock_at(pool, block)->refs++;
}

/* A row that sees all of its extent sees zeros where it names nothing. */
void
mt_kvblock_unname(mt_kvpool *pool, uint32_t block)
{
    mt_kvslot *extent;
    size_t place;

    if (block == MT_KV_ZERO) return;
    extent = mt_kvblock_extent(pool, block);
    place = mt_kvblock_index(pool, block);
    if (block_take_name(pool, block) && extent->exposed)
        drop_idle_in(pool, extent, place, place + 1, true);
}

void
mt_kvblock_note_shown(mt_kvpool *pool, size_t slot, uint32_t block)
{
    mt_kvslot *s = &pool->slots[slot];
    uint32_t *by = &mt_kvblock_at(pool, block)->let_go;

    *by = *by == 0 || *by == slot + 1 ? (uint32_t)slot + 1 : MT_KV_MANY;
    pool->stale += !s->stale;
    s->stale = true;
}

/* pre: it does not need to leave the block at `place`, or has. */
static void
note_left(mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    (void)place; /* for the assertion alone */
    assert(!mt_kvmap_must_leave(pool, slot, block) ||
           !mt_kvmap_shows(pool, &pool->slots[slot], place, block));
    mt_kvblock_note_shown(pool, slot, block);
}

void
mt_kvblock_let_go(mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    if (block == MT_KV_ZERO) return;
    note_left(pool, slot, place, block);
    mt_kvblock_unname(pool, block);
}

void
mt_kvblock_let_go_from(mt_kvpool *pool, size_t slot, size_t keep)
{
    mt_kvslot *s = &pool->slots[slot];
    size_t end = s->taken;

    while (s->taken > keep) {
        size_t place = --s->taken;

        if (s->table[place] != s->first_block + place) {
            mt_kvblock_let_go(pool, slot, place, s->table[place]);
            continue;
        }
        note_left(pool, slot, place, s->table[place]);
        (void)block_take_name(pool, s->table[place]);
    }
    if (s->exposed) drop_idle_in(pool, s, keep, end, true);
}

void
mt_kvblock_unexpose(mt_kvpool *pool, size_t slot)
{
    mt_kvslot *s = &pool->slots[slot];
    size_t end = s->exposed ? pool->geom.blocks : 0;

    for (size_t lo = 0, hi; lo < end; lo = hi + 1) {
        for (hi = lo; hi < end && !s->blocks[hi].resident;)
            hi++;
        if (hi > lo) drop_pages(pool, s, lo, hi);
    }
    s->exposed = false;
}

/* --- content --- */

/* Where the row in `slot` reads its block at `place` of the unit, if not in the block itself. */
static const char *
written_over(const mt_kvpool *pool, size_t slot, size_t unit, size_t place, uint32_t block)
{
    const mt_kvslot *s;

    if (slot == SIZE_MAX || !pool->store.private_writes) return NULL;
    s = &pool->slots[slot];
    if (mt_kvslot_mapped(pool, s, unit, place) != (block << 1 | MT_MAPPED_PRIVATE)) return NULL;
    return s->base + place * pool->geom.part_bytes;
}

mt_status
mt_kvblock_copy(mt_kvpool *pool, uint32_t to, uint32_t from, size_t tokens, size_t slot,
                size_t place, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    mt_status st = MT_OK;
    void *dst, *window;

    for (size_t at = 0; st == MT_OK && tokens > 0 && at < g->slot_bytes; at += g->range_bytes) {
        const char *src = written_over(pool, slot, at / g->unit_bytes, place, from);

        if (src == NULL) {
            if ((st = mt_kvmap_window(pool, from, at, &window, err)) != MT_OK) break;
            src = window;
        } else {
            src += at;
        }
        if ((st = mt_kvmap_window(pool, to, at, &dst, err)) != MT_OK) break;
        st = pool->store.copy(pool->store.ctx, dst, src, tokens * g->token_bytes, err);
    }
    return st;
}

mt_status
mt_kvblock_zero(mt_kvpool *pool, uint32_t block, size_t from, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    size_t skip = from * g->token_bytes;
    mt_status st = MT_OK;
    void *dst;

    if (skip == g->part_bytes) return MT_OK;
    for (size_t at = 0; st == MT_OK && at < g->slot_bytes; at += g->range_bytes) {
        if ((st = mt_kvmap_window(pool, block, at, &dst, err)) != MT_OK) break;
        st = pool->store.zero(pool->store.ctx, (char *)dst + skip, g->part_bytes - skip, err);
    }
    return st;
}
