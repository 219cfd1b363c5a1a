/* How this file works. Only tables and references change what a row *is*. `renew` makes every such
 * change: it takes a block for one place of a row's table, fills it with what the old one held, and
 * adds an entry to the journal. Owning, extending and moving are loops around it. Undo goes through
 * the entries from the last to the first; commit lets go of the blocks that were replaced.
 *
 * Most calls of mt_kvprepare find in the marks that all is ready (is_ready) and only move a
 * mark. The others take the pool's lock and go through the four steps for all rows, with a journal:
 * promise_rows makes sure of all blocks that are missing, prepare_row owns, maps and zeroes one
 * row, and note_ready writes down what was reached. What a call writes to, and what it has to make
 * zeros of, is worked out from the marks and the table whenever it is needed (tokens_of,
 * unknown_tokens, written_blocks), never stored. */
#include "kv/prepare.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/mapping.h"

/* --- marks --- */

void
mt_kvprepare_forget_maps(mt_kvlease *lease, size_t row)
{
    for (size_t unit = 0; unit < lease->pool->geom.units; unit++)
        *mt_kvlease_unit_marks(lease, unit, row) = (mt_kvunit_marks){0};
}

void
mt_kvprepare_forget_zeros(mt_kvlease *lease, size_t row)
{
    size_t end = mt_kvlease_slot(lease, row)->taken * lease->pool->geom.block_tokens;

    for (size_t layer = 0; layer < lease->pool->geom.config.layers; layer++) {
        mt_kvlayer_marks *m = mt_kvlease_marks(lease, layer, row);

        if (m->zero_to > end) m->zero_to = (uint32_t)end;
        if (m->writable_to > m->zero_to) m->writable_to = m->zero_to;
        assert(m->length <= m->writable_to);
    }
}

/* --- the journal --- */

void
mt_kvjournal_begin(mt_kvjournal *j, mt_kvlease *lease)
{
    *j = (mt_kvjournal){.lease = lease};
}

mt_status
mt_kvjournal_promise(mt_kvjournal *j, size_t more, mt_error *err)
{
    size_t left = j->lease->promised, add = more > left ? more - left : 0;
    mt_kventry *entry;
    mt_status st;

    if (more > 0) {
        entry = mt_alloc_grown(&j->lease->pool->mem, j->entry, &j->room, j->count + more,
                               sizeof *entry);
        if (entry == NULL) return mt_fail(err, MT_ENOMEM, "kvpool", 0);
        j->entry = entry;
    }
    if (add == 0) return MT_OK;
    if ((st = mt_kvblock_promise(j->lease, add, err)) == MT_OK) j->promised += add;
    return st;
}

/* Fills a block that was just taken for `place`: a copy of the old one's tokens as the row sees
 * them, or zeros where it stood for zeros, or where a view that was taken before would show what
 * the block held. Zeros behind the tokens: some layers' may be known to be clean there. */
static mt_status
journal_fill(mt_kvpool *pool, size_t slot, size_t place, uint32_t block, uint32_t was, size_t keep,
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
    if ((st = journal_fill(lease->pool, slot, place, got, was, keep, err)) != MT_OK) {
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
        if (mt_kvmap_window(pool, e->was, at, &old, NULL) != MT_OK) return false;
        if (mt_kvmap_window(pool, copy, at, &new, NULL) != MT_OK) return false;
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
journal_undo(mt_kvjournal *j, mt_error *why)
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
journal_commit(mt_kvjournal *j)
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
    mt_alloc mem = j->lease->pool->mem;

    if (st == MT_OK)
        journal_commit(j);
    else
        journal_undo(j, err);
    mem.put(mem.ctx, j->entry, j->room * sizeof *j->entry);
    j->entry = NULL;
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

/* The row takes the blocks that cost nothing (mt_kvblock_nearest) for the places past its table's
 * end, up to place hi, as long as there are any, before another row takes them for itself. pre:
 * they are promised. */
static mt_status
extend_nearest(mt_kvjournal *j, size_t row, size_t hi, mt_error *err)
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

/* What code wrote privately at `place` of the row goes into the block there, if that is the row's
 * alone, or else into a copy, which then is. */
static mt_status
own_written(mt_kvjournal *j, size_t row, size_t place, mt_error *err)
{
    mt_status st;

    if (is_own(j->lease, row, place))
        return mt_kvmap_save_private(j->lease->pool, j->lease->first + row, place, err);
    if ((st = mt_kvjournal_promise(j, 1, err)) != MT_OK) return st;
    return renew(j, row, place, MT_KV_ANY, j->lease->pool->geom.block_tokens, err);
}

/* --- moving --- */

/* Whether only the row itself, at the block's own place, names or shows the extent's blocks
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

/* The extent that the row moved to before, its own if it did not; or that of a slot that no row
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

/* Where map areas are short: the row's blocks move into one extent, its own or that of a free slot,
 * and all its addresses map that extent, in one map area. Blocks of zeros are added for the first
 * `view` places and for all others that a view has ever reached, so that no view shows what lies
 * behind them in that extent. pre: a lazy store. */
static mt_status
move_row(mt_kvjournal *j, size_t row, size_t view, mt_error *err)
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
        if (st == MT_EAGAIN) st = move_row(j, e.row, view, err);
    }
    return st;
}

/* The other units of rows whose blocks were copied show the old blocks, which are other rows'.
 * They follow at once, all but this unit (SIZE_MAX: all). Where map areas are short the row moves,
 * with as many blocks as a view of this unit shows. */
static mt_status
follow_copies(mt_kvjournal *j, size_t unit, size_t view, mt_error *err)
{
    mt_status st = MT_OK;

    for (size_t i = 0; st == MT_OK && i < j->count; i++) /* a move adds entries */
        if (j->entry[i].was != MT_KV_NEW && j->entry[i].was != MT_KV_ZERO)
            st = follow_copy(j, j->entry[i], unit, view, err);
    return st;
}

/* --- what was written privately --- */

static mt_status
save_row(mt_kvjournal *j, size_t row, mt_kvwritten *written, mt_error *err)
{
    const mt_kvpool *pool = j->lease->pool;
    size_t slot = j->lease->first + row, at = 0, place;
    mt_status st = MT_OK;

    *written = MT_KV_PLAIN;
    if (!mt_kvmap_has_private(pool, slot, pool->slots[slot].taken)) return MT_OK;
    while (st == MT_OK && mt_kvmap_next_private(pool, slot, &at, &place)) {
        *written = MT_KV_WRITTEN;
        st = own_written(j, row, place, err);
    }
    return st;
}

/* The rows that are copied, each once. */
typedef struct saving {
    mt_kvlease *lease;
    const size_t *index;
    size_t n;
    mt_kvwritten *written;
} saving;

static mt_status
save_rows(void *arg, mt_error *err)
{
    const saving *k = arg;
    mt_kvlease *lease = k->lease;
    mt_kvwritten *written = k->written;
    mt_kvjournal j;
    mt_status st = MT_OK;

    for (size_t row = 0; written != NULL && row < lease->rows; row++)
        written[row] = MT_KV_UNSEEN;
    mt_kvjournal_begin(&j, lease);
    for (size_t i = 0; st == MT_OK && i < k->n; i++) {
        size_t row = k->index == NULL ? i : k->index[i];
        mt_kvwritten found;

        if (k->index != NULL && row == i) continue;
        if (written != NULL && written[row] != MT_KV_UNSEEN) continue;
        st = save_row(&j, row, &found, err);
        if (written != NULL) written[row] = found;
    }
    if (st == MT_OK) st = follow_copies(&j, SIZE_MAX, 0, err);
    return mt_kvjournal_end(&j, st, err);
}

mt_status
mt_kvwritten_save(mt_kvlease *lease, const size_t *index, size_t n, mt_kvwritten *written,
                  mt_error *err)
{
    saving k = {lease, index, n, written};

    if (!lease->pool->store.private_writes) return MT_OK;
    return mt_kvpool_retry(lease->pool, save_rows, &k, err);
}

/* --- what is missing --- */

/* The tokens of the row that are to be written: [lo, hi). Those that it holds are the same in each
 * layer, so that the first layer's call takes all blocks or none. */
static mt_kvspan
tokens_of(const mt_kvlease *lease, const mt_kvwant *want, size_t row)
{
    size_t length = mt_kvlease_marks(lease, want->layer, row)->length;
    size_t to = mt_size_max(length + mt_kvstep_count(&want->step, row), want->to);

    assert(to <= lease->pool->geom.config.max_tokens);
    if (want->held) return (mt_kvspan){0, mt_size_max(mt_kvlease_row_tokens(lease, row), to)};
    return (mt_kvspan){length, to};
}

/* Tokens [lo, hi) of the row, past token `to`, up to which it is to be written, which the view
 * shows and which are not known to be zeros. What lies past the table's end is never among them:
 * addresses map zeros there. If there are any, then all up to the end of the block, because views
 * of the next tokens will show those. */
static mt_kvspan
unknown_tokens(const mt_kvlease *lease, const mt_kvwant *want, size_t row, size_t to)
{
    const mt_kvgeom *g = &lease->pool->geom;
    const mt_kvlayer_marks *m = mt_kvlease_marks(lease, want->layer, row);
    size_t taken = mt_size_max(mt_kvlease_slot(lease, row)->taken, mt_kvgeom_blocks(g, to));
    size_t lo = to < m->writable_to ? to : mt_size_max(m->zero_to, to);
    size_t hi = mt_size_min(want->view, taken * g->block_tokens);

    return (mt_kvspan){lo, hi > lo ? mt_kvgeom_blocks(g, hi) * g->block_tokens : lo};
}

static size_t
unit_of(const mt_kvlease *lease, const mt_kvwant *want)
{
    return mt_kvgeom_unit(&lease->pool->geom, want->layer);
}

/* Where all rows end at the view, the marks are enough, and the lock is not taken. */
static bool
is_ready(mt_kvlease *lease, const mt_kvwant *want)
{
    size_t unit = unit_of(lease, want);
    bool zeros = true, ragged = false;

    for (size_t row = 0; row < lease->rows; row++) {
        const mt_kvunit_marks *m = mt_kvlease_unit_marks(lease, unit, row);
        mt_kvspan t = tokens_of(lease, want, row);

        if (t.hi > t.lo && (t.lo < m->owned_from || t.hi > m->owned_to)) return false;
        if (want->view > m->mapped_to) return false;
        ragged |= want->view > t.hi;
    }
    if (!ragged) return true;
    mt_lock_take(&lease->pool->lock); /* slots move when the pool grows */
    for (size_t row = 0; zeros && row < lease->rows; row++) {
        mt_kvspan left = unknown_tokens(lease, want, row, tokens_of(lease, want, row).hi);

        zeros = left.lo >= left.hi;
    }
    mt_lock_give(&lease->pool->lock);
    return zeros;
}

/* Blocks that are written to: by the caller, and by making zeros. */
static mt_kvspan
written_blocks(const mt_kvlease *lease, const mt_kvwant *want, size_t row)
{
    const mt_kvgeom *g = &lease->pool->geom;
    mt_kvspan t = tokens_of(lease, want, row), left = unknown_tokens(lease, want, row, t.hi);
    mt_kvspan w = {t.lo / g->block_tokens, 0};

    w.hi = t.hi > t.lo ? mt_kvgeom_blocks(g, t.hi) : w.lo;
    if (left.lo == left.hi) return w;
    if (w.lo == w.hi) w.lo = left.lo / g->block_tokens;
    w.hi = mt_size_max(w.hi, mt_kvgeom_blocks(g, left.hi));
    return w;
}

/* --- the steps --- */

/* Zeros in tokens [lo, hi) of one layer's K and V. Heads follow each other where tokens do not. */
static mt_status
zero_tokens(mt_kvlease *lease, size_t layer, size_t row, mt_kvspan t, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    const mt_kvgeom *g = &pool->geom;
    bool head_major = g->config.layout == MT_KV_HEAD_MAJOR;
    bool gaps = g->config.layer_group > 1;
    size_t pieces = head_major ? g->config.heads : gaps ? t.hi - t.lo : 1;
    size_t stride = head_major ? g->head_stride : g->token_bytes;
    size_t bytes = gaps ? g->config.heads * g->row_bytes : (t.hi - t.lo) * g->token_bytes;
    mt_status st = MT_OK;

    for (size_t which = 0; which < 2; which++) {
        char *at = lease->base + row * g->slot_bytes + mt_kvgeom_offset(g, layer, which) +
                   t.lo * g->token_bytes;

        for (size_t i = 0; st == MT_OK && i < pieces; i++, at += stride)
            st = pool->store.zero(pool->store.ctx, at, bytes, err);
    }
    return st;
}

/* The row's addresses follow its table, in this unit, from what was ready before on to `view`. */
static mt_status
prepare_follow(mt_kvlease *lease, const mt_kvwant *want, size_t row, mt_kvspan write, mt_error *err)
{
    const mt_kvgeom *g = &lease->pool->geom;
    size_t unit = unit_of(lease, want);
    size_t mapped = mt_kvlease_unit_marks(lease, unit, row)->mapped_to / g->block_tokens;
    mt_kvspan see = {mapped, mt_kvgeom_blocks(g, want->view)};

    if (write.hi > write.lo) see.lo = mt_size_min(see.lo, write.lo);
    /* what was mapped stays in sight: what lies ahead of `see` may be mapped otherwise */
    see.hi = mt_size_max(see.hi, mt_size_max(write.hi, mapped));
    if (see.lo >= see.hi) return MT_OK;
    return mt_kvmap_follow(lease->pool, lease->first + row, unit, &see, &write, err);
}

/* Where the system allows no more map areas, the row's blocks move to one extent, which all of its
 * addresses map: then there is nothing left to follow but what is in view. */
static mt_status
follow_or_move(mt_kvjournal *j, const mt_kvwant *want, size_t row, mt_kvspan write, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    mt_status st = prepare_follow(lease, want, row, write, err);

    if (st != MT_EAGAIN) return st;
    st = move_row(j, row, mt_kvgeom_blocks(&lease->pool->geom, want->view), err);
    return st == MT_OK ? prepare_follow(lease, want, row, write, err) : st;
}

static mt_status
prepare_row(mt_kvjournal *j, const mt_kvwant *want, size_t row, mt_error *err)
{
    mt_kvspan write = written_blocks(j->lease, want, row), left;
    mt_status st = mt_kvjournal_own(j, row, write.lo, write.hi, err);

    if (st == MT_OK) st = follow_or_move(j, want, row, write, err);
    if (st != MT_OK) return st;
    left = unknown_tokens(j->lease, want, row, tokens_of(j->lease, want, row).hi);
    return left.lo < left.hi ? zero_tokens(j->lease, want->layer, row, left, err) : MT_OK;
}

/* For all rows at once, so that a refusal takes nothing and says what the whole call lacks. */
static mt_status
promise_rows(mt_kvjournal *j, const mt_kvwant *want, mt_error *err)
{
    size_t blocks = 0;

    for (size_t row = 0; row < j->lease->rows; row++) {
        mt_kvspan write = written_blocks(j->lease, want, row);

        blocks += mt_kvjournal_missing(j->lease, row, write.lo, write.hi);
    }
    return blocks > 0 ? mt_kvjournal_promise(j, blocks, err) : MT_OK;
}

/* --- what is ready --- */

/* The row's part of what was made ready, for the next call to see: the caller may write the step's
 * tokens now, and the view shows zeros behind them. pre: committed. */
static void
note_ready(mt_kvlease *lease, const mt_kvwant *want, size_t row)
{
    const mt_kvgeom *g = &lease->pool->geom;
    mt_kvlayer_marks *m = mt_kvlease_marks(lease, want->layer, row);
    mt_kvunit_marks *u = mt_kvlease_unit_marks(lease, unit_of(lease, want), row);
    mt_kvspan t = tokens_of(lease, want, row);
    size_t hi = unknown_tokens(lease, want, row, t.hi).hi, step = g->block_tokens;

    u->mapped_to = (uint32_t)mt_size_max(mt_kvgeom_blocks(g, want->view) * step, u->mapped_to);
    if (t.hi > t.lo) {
        u->owned_from = (uint32_t)(t.lo / step * step);
        u->owned_to = (uint32_t)(mt_kvgeom_blocks(g, t.hi) * step);
    }
    if (want->own_only) return;
    if (t.hi >= m->writable_to || hi >= m->writable_to) hi = mt_size_max(m->zero_to, hi);
    m->zero_to = (uint32_t)hi;
    m->writable_to = (uint32_t)t.hi;
    assert(m->length <= m->zero_to);
}

/* All was ready: the caller may write further than before. */
static void
note_writable(mt_kvlease *lease, const mt_kvwant *want)
{
    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvlayer_marks *m = mt_kvlease_marks(lease, want->layer, row);

        m->writable_to = (uint32_t)mt_size_max(m->writable_to, tokens_of(lease, want, row).hi);
    }
}

/* --- together --- */

typedef struct preparation {
    mt_kvlease *lease;
    const mt_kvwant *want;
} preparation;

static mt_status
prepare_locked(void *arg, mt_error *err)
{
    const preparation *p = arg;
    const mt_kvwant *want = p->want;
    mt_kvlease *lease = p->lease;
    mt_status st;
    mt_kvjournal j;

    mt_kvjournal_begin(&j, lease);
    st = promise_rows(&j, want, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = extend_nearest(&j, row, written_blocks(lease, want, row).hi, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = prepare_row(&j, want, row, err);
    if (st == MT_OK)
        st = follow_copies(&j, unit_of(lease, want),
                           mt_kvgeom_blocks(&lease->pool->geom, want->view), err);
    st = mt_kvjournal_end(&j, st, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        note_ready(lease, want, row);
    return st;
}

mt_status
mt_kvprepare(mt_kvlease *lease, const mt_kvwant *want, mt_error *err)
{
    preparation p = {lease, want};

    assert(want->layer < lease->pool->geom.config.layers);
    assert(want->view <= lease->pool->geom.config.max_tokens);
    if (!is_ready(lease, want)) return mt_kvpool_retry(lease->pool, prepare_locked, &p, err);
    if (!want->own_only) note_writable(lease, want);
    return MT_OK;
}
