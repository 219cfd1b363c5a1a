/* How this file works. `renew` makes every change: it takes a block for one place of a row's
 * table, fills it with what the old one held, and adds an entry. Owning, extending and moving are
 * loops around it. Undo goes through the entries from the last to the first; commit lets go of the
 * blocks that were replaced. */
#include "kv/journal.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/mapping.h"
#include "kv/prepare.h"

/* --- the journal --- */

void
mt_kvjournal_begin(mt_kvjournal *j, mt_kvlease *lease)
{
    *j = (mt_kvjournal){.lease = lease};
}

static void
free_entries(mt_kvjournal *j)
{
    const mt_alloc *mem = &j->lease->pool->mem;

    if (j->entry != NULL) mem->put(mem->ctx, j->entry, j->room * sizeof *j->entry);
    j->entry = NULL;
}

static bool
make_room(mt_kvjournal *j, size_t more)
{
    const mt_alloc *mem = &j->lease->pool->mem;
    size_t want = mt_size_max(j->count + more, 2 * j->room);
    mt_kventry *entry;

    if (j->count + more <= j->room) return true;
    if ((entry = mt_alloc_zeroed(mem, want, sizeof *entry)) == NULL) return false;
    if (j->count > 0) memcpy(entry, j->entry, j->count * sizeof *entry);
    free_entries(j);
    j->entry = entry;
    j->room = want;
    return true;
}

mt_status
mt_kvjournal_promise(mt_kvjournal *j, size_t more, mt_error *err)
{
    size_t left = j->lease->promised, add = more > left ? more - left : 0;
    mt_status st;

    if (!make_room(j, more)) return mt_fail(err, MT_ENOMEM, "kvpool", 0);
    if (add == 0) return MT_OK;
    if ((st = mt_kvblock_promise(j->lease, add, err)) == MT_OK) j->promised += add;
    return st;
}

/* Fills a block that was just taken for `place`: a copy of the old one's tokens as the row sees
 * them, or zeros where it stood for zeros, or where a view that was taken before would show what
 * the block held. Zeros behind the tokens: some layers' may be known to be clean there. */
static mt_status
fill(mt_kvpool *pool, size_t slot, size_t place, uint32_t block, uint32_t was, size_t keep,
     mt_error *err)
{
    const mt_kvslot *s = &pool->slots[slot];
    mt_status st;

    if (was == MT_KV_NEW && (place >= s->reach || s->exposed)) return MT_OK; /* code wrote there */
    if (was == MT_KV_NEW || was == MT_KV_ZERO) return mt_kvblock_zero(pool, block, 0, err);
    pool->ever.copied++;
    st = mt_kvblock_copy(pool, block, was, keep, slot, place, err);
    return st != MT_OK ? st : mt_kvblock_zero(pool, block, keep, err);
}

/* Gives `place` of the row's table a new block, `exact` or MT_KV_ANY; copies the first `keep`
 * tokens of the old. */
static mt_status
renew(mt_kvjournal *j, size_t row, size_t place, uint32_t exact, size_t keep, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    size_t slot = lease->first + row;
    bool added = place == mt_kvlease_slot(lease, row)->taken;
    uint32_t got, was = added ? MT_KV_NEW : mt_kvlease_slot(lease, row)->table[place];
    mt_status st = mt_kvblock_take(lease, slot, place, exact, &got, err);

    if (st != MT_OK) return st;
    if ((st = fill(lease->pool, slot, place, got, was, keep, err)) != MT_OK) {
        mt_kvblock_untake(lease, slot, got, true);
        return st;
    }
    assert(j->count < j->room && place <= mt_kvlease_slot(lease, row)->taken);
    j->entry[j->count++] = (mt_kventry){.row = row, .place = place, .was = was, .copied = keep};
    mt_kvlease_slot(lease, row)->table[place] = got;
    mt_kvlease_slot(lease, row)->taken += added;
    return MT_OK;
}

/* Whether the copy has what the row wrote privately, and the old block has not. */
static bool
has_written(mt_kvpool *pool, const mt_kventry *e, uint32_t copy)
{
    const mt_kvgeom *g = &pool->geom;
    size_t bytes = e->copied * g->token_bytes;
    void *old, *new;

    if (!pool->store.private_writes || e->was == MT_KV_NEW || e->was == MT_KV_ZERO) return false;
    for (size_t at = 0; at < g->slot_bytes; at += g->range_bytes) {
        if (mt_kvblock_window(pool, e->was, at, &old, NULL) != MT_OK) return false;
        if (mt_kvblock_window(pool, copy, at, &new, NULL) != MT_OK) return false;
        if (memcmp(old, new, bytes) != 0) return true;
    }
    return false;
}

/* The row goes on with the copy. Addresses that show the old block show zeros until they are used
 * again. */
static void
keep_copy(mt_kvlease *lease, const mt_kventry *e)
{
    mt_kvslot *s = mt_kvlease_slot(lease, e->row);
    size_t slot = lease->first + e->row;
    uint32_t copy = s->table[e->place];

    s->table[e->place] = e->was;
    if (mt_kvmap_leave(lease->pool, slot, &(mt_kvspan){e->place, e->place + 1}, true, NULL) !=
        MT_OK)
        (void)mt_kvmap_zeros(lease->pool, slot, NULL);
    s->table[e->place] = copy;
    mt_kvblock_let_go(lease->pool, slot, e->place, e->was);
}

/* In the end no mapping counts as right: one may have failed half-way. */
static void
undo(mt_kvjournal *j, mt_error *why)
{
    mt_kvpool *pool = j->lease->pool;
    size_t reserved = pool->reserved, kept = 0;

    while (j->count > 0) {
        const mt_kventry *e = &j->entry[--j->count];
        mt_kvslot *s = mt_kvlease_slot(j->lease, e->row);

        if (has_written(pool, e, s->table[e->place])) {
            keep_copy(j->lease, e);
            kept++;
            continue;
        }
        mt_kvblock_untake(j->lease, j->lease->first + e->row, s->table[e->place],
                          e->was != MT_KV_NEW);
        if (e->was == MT_KV_NEW)
            s->taken--;
        else
            s->table[e->place] = e->was;
    }
    mt_kvblock_unpromise(j->lease, j->promised - mt_size_min(kept, j->promised));
    mt_kvblock_note_undone(pool, reserved, why);
    for (size_t row = 0; row < j->lease->rows; row++)
        mt_kvprepare_forget_maps(j->lease, row);
}

static void
commit(mt_kvjournal *j)
{
    for (size_t i = 0; i < j->count; i++) {
        const mt_kventry *e = &j->entry[i];

        if (e->was != MT_KV_NEW)
            mt_kvblock_let_go(j->lease->pool, j->lease->first + e->row, e->place, e->was);
    }
    mt_kvblock_shrink_reservation(j->lease->pool);
}

mt_status
mt_kvjournal_end(mt_kvjournal *j, mt_status st, mt_error *err)
{
    if (st == MT_OK)
        commit(j);
    else
        undo(j, err);
    free_entries(j);
    return st;
}

/* --- owning --- */

static bool
is_own(const mt_kvlease *lease, size_t row, size_t place)
{
    uint32_t named = mt_kvlease_slot(lease, row)->table[place];

    return named != MT_KV_ZERO && mt_kvblock_at(lease->pool, named)->refs == 1;
}

/* Tokens of block at `place` that the row holds in some layer. */
static size_t
held_in(const mt_kvlease *lease, size_t row, size_t place)
{
    size_t first = place * lease->pool->geom.block_tokens, held = mt_kvlease_row_tokens(lease, row);

    return held > first ? mt_size_min(held - first, lease->pool->geom.block_tokens) : 0;
}

size_t
mt_kvjournal_missing(const mt_kvlease *lease, size_t row, size_t lo, size_t hi)
{
    size_t taken = mt_kvlease_slot(lease, row)->taken, more = hi > taken ? hi - taken : 0;

    for (size_t place = lo; place < mt_size_min(hi, taken); place++)
        more += !is_own(lease, row, place);
    return more;
}

mt_status
mt_kvjournal_own(mt_kvjournal *j, size_t row, size_t lo, size_t hi, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    size_t taken = mt_kvlease_slot(lease, row)->taken;
    size_t more = mt_kvjournal_missing(lease, row, lo, hi);
    mt_status st;

    assert(lo <= taken);
    if (more == 0) return MT_OK;
    st = mt_kvjournal_promise(j, more, err);
    for (size_t place = lo; st == MT_OK && place < hi; place++)
        if (place >= taken || !is_own(lease, row, place))
            st = renew(j, row, place, MT_KV_ANY, held_in(lease, row, place), err);
    return st;
}

mt_status
mt_kvjournal_extend_nearest(mt_kvjournal *j, size_t row, size_t hi, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    size_t place = mt_kvlease_slot(lease, row)->taken;
    mt_status st = MT_OK;

    for (; st == MT_OK && place < hi; place++) {
        if (mt_kvblock_nearest(lease->pool, lease->first + row, place) == MT_KV_ANY) return MT_OK;
        st = renew(j, row, place, MT_KV_ANY, 0, err);
    }
    return st;
}

mt_status
mt_kvjournal_own_written(mt_kvjournal *j, size_t row, size_t place, mt_error *err)
{
    mt_status st;

    if (is_own(j->lease, row, place))
        return mt_kvmap_save_private(j->lease->pool, j->lease->first + row, place, err);
    if ((st = mt_kvjournal_promise(j, 1, err)) != MT_OK) return st;
    return renew(j, row, place, MT_KV_ANY, j->lease->pool->geom.block_tokens, err);
}

/* --- moving --- */

/* Nobody but the row itself, alone and at the block's own place, names or shows one of blocks
 * [0, hi). */
static bool
is_free_for(const mt_kvlease *lease, size_t row, size_t extent, size_t hi)
{
    const mt_kvslot *s = mt_kvlease_slot(lease, row), *h = &lease->pool->slots[extent];

    for (size_t place = 0; place < hi; place++) {
        uint32_t block = mt_kvslot_block(h, place);

        if (h->blocks[place].refs > 1) return false;
        if (h->blocks[place].refs == 1 && (place >= s->taken || s->table[place] != block))
            return false;
        if (h->blocks[place].refs == 0 &&
            mt_kvblock_is_in_view(lease->pool, lease->first + row, place, block))
            return false;
    }
    return true;
}

/* The extent that the row moved to before, its own if it did not; or that of a slot that nobody
 * uses. */
static mt_status
find_extent(mt_kvlease *lease, size_t row, size_t hi, size_t *extent, mt_error *err)
{
    mt_kvpool *pool = lease->pool;

    *extent = mt_kvlease_slot(lease, row)->extent;
    if (pool->slots[*extent].lease == NULL && is_free_for(lease, row, *extent, hi)) return MT_OK;
    *extent = lease->first + row;
    if (is_free_for(lease, row, *extent, hi)) return MT_OK;
    for (*extent = 0; *extent < pool->slot_count; ++*extent)
        if (pool->slots[*extent].lease == NULL && is_free_for(lease, row, *extent, hi))
            return MT_OK;
    return mt_kvpool_add_arena(pool, err); /* then it is the first of the new ones */
}

/* Whole blocks: code may have written past lengths. */
static mt_status
copy_to(mt_kvjournal *j, size_t row, size_t hi, size_t extent, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    mt_kvpool *pool = lease->pool;
    uint32_t first = pool->slots[extent].first_block;
    size_t taken = mt_kvlease_slot(lease, row)->taken, more = hi;
    mt_status st;

    for (size_t place = 0; place < taken; place++)
        more -= mt_kvlease_slot(lease, row)->table[place] == first + place;
    st = mt_kvjournal_promise(j, more, err);
    for (size_t place = 0; st == MT_OK && place < hi; place++) {
        if (place < taken && mt_kvlease_slot(lease, row)->table[place] == first + place) {
            st = mt_kvmap_save_private(pool, lease->first + row, place, err);
            continue;
        }
        st = renew(j, row, place, first + (uint32_t)place, pool->geom.block_tokens, err);
        if (st == MT_OK && place >= taken)
            st = mt_kvblock_zero(pool, first + (uint32_t)place, 0, err);
    }
    return st;
}

mt_status
mt_kvjournal_move(mt_kvjournal *j, size_t row, size_t view, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    const mt_kvslot *s = mt_kvlease_slot(lease, row);
    size_t hi = mt_size_max(view, mt_size_max(s->reach, s->taken)), extent;
    mt_status st;

    assert(!s->exposed);
    if ((st = find_extent(lease, row, hi, &extent, err)) != MT_OK) return st;
    mt_kvlease_slot(lease, row)->extent = extent;
    if ((st = copy_to(j, row, hi, extent, err)) != MT_OK) return st;
    mt_kvprepare_forget_maps(lease, row);
    return mt_kvmap_extent(lease->pool, lease->first + row, extent, hi, err);
}

/* --- following at once --- */

static mt_status
follow_copy(mt_kvjournal *j, mt_kventry e, size_t unit, size_t view, mt_error *err)
{
    mt_kvpool *pool = j->lease->pool;
    mt_kvspan place = {e.place, e.place + 1};
    mt_status st = MT_OK;

    for (size_t u = 0; st == MT_OK && u < pool->geom.units; u++) {
        uint32_t mapped = mt_kvslot_mapped(pool, mt_kvlease_slot(j->lease, e.row), u, e.place);

        if (u == unit) continue;
        if (mapped != MT_MAPPED_UNKNOWN && mapped >> 1 != e.was) continue;
        st = mt_kvmap_follow(pool, j->lease->first + e.row, u, &place, &place, err);
        if (st == MT_EAGAIN) st = mt_kvjournal_move(j, e.row, view, err);
    }
    return st;
}

mt_status
mt_kvjournal_follow_copies(mt_kvjournal *j, size_t unit, size_t view, mt_error *err)
{
    mt_status st = MT_OK;

    for (size_t i = 0; st == MT_OK && i < j->count; i++) /* a move adds entries */
        if (j->entry[i].was != MT_KV_NEW && j->entry[i].was != MT_KV_ZERO)
            st = follow_copy(j, j->entry[i], unit, view, err);
    return st;
}
