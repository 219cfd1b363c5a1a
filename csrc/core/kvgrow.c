#include "kvgrow.h"

#include <assert.h>
#include <string.h>

#include "size.h"

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

/* Fills a block that was just taken: a copy of the old one's tokens, or zeros where it stood for
 * zeros. Zeros behind the tokens: some layers' may be known to be clean there. */
static mt_status
fill(mt_kvpool *pool, uint32_t home, uint32_t was, size_t tb, size_t keep, mt_error *err)
{
    mt_status st;

    if (was == MT_KV_NEW) return MT_OK;
    if (was == MT_KV_ZERO) return mt_kvblock_zero(pool, home, tb, 0, err);
    pool->copied++;
    st = mt_kvblock_copy(pool, home, was, tb, keep, err);
    return st != MT_OK ? st : mt_kvblock_zero(pool, home, tb, keep, err);
}

mt_status
mt_kvjournal_renew(mt_kvjournal *j, size_t row, size_t tb, size_t home, size_t keep, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    bool added = tb == mt_kvlease_slot(lease, row)->taken;
    uint32_t got, was = added ? MT_KV_NEW : mt_kvlease_slot(lease, row)->table[tb];
    mt_status st = mt_kvblock_take(lease, home, tb, &got, err);

    if (st != MT_OK) return st;
    if ((st = fill(lease->pool, got, was, tb, keep, err)) != MT_OK) {
        mt_kvblock_untake(lease, got, tb);
        return st;
    }
    assert(j->count < j->room && tb <= mt_kvlease_slot(lease, row)->taken);
    j->entry[j->count++] = (mt_kventry){.row = row, .tb = tb, .was = was};
    mt_kvlease_slot(lease, row)->table[tb] = got;
    mt_kvlease_slot(lease, row)->taken += added;
    return MT_OK;
}

void
mt_kvjournal_undo(mt_kvjournal *j, mt_error *why)
{
    const mt_kvpool *pool = j->lease->pool;
    size_t reserved = pool->reserved;

    while (j->count > 0) {
        const mt_kventry *e = &j->entry[--j->count];
        mt_kvslot *s = mt_kvlease_slot(j->lease, e->row);

        mt_kvblock_untake(j->lease, s->table[e->tb], e->tb);
        if (e->was == MT_KV_NEW)
            s->taken--;
        else
            s->table[e->tb] = e->was;
        mt_kvlease_unready(j->lease, e->row);
    }
    mt_kvblock_unpromise(j->lease, j->promised);
    free_entries(j);
    if (why->status != MT_ELIMIT) return;
    reserved = (reserved - pool->reserved) * pool->geom.block_bytes;
    why->asked += reserved;
    why->used -= reserved;
}

void
mt_kvjournal_commit(mt_kvjournal *j)
{
    for (size_t i = 0; i < j->count; i++)
        if (j->entry[i].was != MT_KV_NEW)
            mt_kvblock_unname(j->lease->pool, j->entry[i].was, j->entry[i].tb);
    mt_kvblock_fit(j->lease->pool);
    free_entries(j);
}

/* --- owning --- */

static bool
is_own(const mt_kvlease *lease, size_t row, size_t tb)
{
    uint32_t named = mt_kvlease_slot(lease, row)->table[tb];

    return named != MT_KV_ZERO && lease->pool->slots[named].refs[tb] == 1;
}

/* Tokens of block tb that the row holds in some layer. */
static size_t
held_in(const mt_kvlease *lease, size_t row, size_t tb)
{
    size_t first = tb * lease->pool->geom.block_tokens, held = mt_kvlease_row_tokens(lease, row);

    return held > first ? mt_size_min(held - first, lease->pool->geom.block_tokens) : 0;
}

size_t
mt_kvgrow_missing(const mt_kvlease *lease, size_t row, size_t lo, size_t hi)
{
    size_t taken = mt_kvlease_slot(lease, row)->taken, more = hi > taken ? hi - taken : 0;

    for (size_t tb = lo; tb < mt_size_min(hi, taken); tb++)
        more += !is_own(lease, row, tb);
    return more;
}

mt_status
mt_kvgrow_own(mt_kvjournal *j, size_t row, size_t lo, size_t hi, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    size_t taken = mt_kvlease_slot(lease, row)->taken;
    size_t more = mt_kvgrow_missing(lease, row, lo, hi);
    mt_status st;

    assert(lo <= taken);
    if (more == 0) return MT_OK;
    st = mt_kvjournal_promise(j, more, err);
    for (size_t tb = lo; st == MT_OK && tb < hi; tb++)
        if (tb >= taken || !is_own(lease, row, tb))
            st = mt_kvjournal_renew(j, row, tb, lease->first + row, held_in(lease, row, tb), err);
    return st;
}

/* --- moving --- */

/* Nobody but the row itself, alone, names a block of this home. */
static bool
is_free_for(const mt_kvlease *lease, size_t row, size_t home, size_t hi)
{
    const mt_kvslot *s = mt_kvlease_slot(lease, row), *h = &lease->pool->slots[home];

    for (size_t tb = 0; tb < hi; tb++)
        if (h->refs[tb] > 1 || (h->refs[tb] == 1 && (tb >= s->taken || s->table[tb] != home)))
            return false;
    return true;
}

/* The row's own home, or that of a slot that nobody uses, which is not lent while it is named; the
 * one that the row moved to before, if it did. */
static mt_status
find_home(mt_kvlease *lease, size_t row, size_t hi, size_t *home, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    const mt_kvslot *s = mt_kvlease_slot(lease, row);

    *home = s->taken > 0 ? s->table[0] : MT_KV_ZERO;
    if (*home != MT_KV_ZERO && pool->slots[*home].lease == NULL &&
        is_free_for(lease, row, *home, hi))
        return MT_OK;
    *home = lease->first + row;
    if (is_free_for(lease, row, *home, hi)) return MT_OK;
    for (*home = 0; *home < pool->slot_count; ++*home)
        if (pool->slots[*home].lease == NULL && is_free_for(lease, row, *home, hi)) return MT_OK;
    return mt_kvpool_extend(pool, err); /* then it is the first of the new ones */
}

/* Whole blocks: code may have written past lengths. */
mt_status
mt_kvgrow_move(mt_kvjournal *j, size_t row, size_t hi, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    size_t taken = mt_kvlease_slot(lease, row)->taken, home, more = hi;
    mt_status st = find_home(lease, row, hi, &home, err);

    assert(hi >= taken);
    if (st != MT_OK) return st;
    for (size_t tb = 0; tb < taken; tb++)
        more -= mt_kvlease_slot(lease, row)->table[tb] == home;
    st = mt_kvjournal_promise(j, more, err);
    for (size_t tb = 0; st == MT_OK && tb < hi; tb++) {
        if (tb < taken && mt_kvlease_slot(lease, row)->table[tb] == home) continue;
        st = mt_kvjournal_renew(j, row, tb, home, lease->pool->geom.block_tokens, err);
        if (st == MT_OK && tb >= taken)
            st = mt_kvblock_zero(lease->pool, (uint32_t)home, tb, 0, err);
    }
    return st;
}
