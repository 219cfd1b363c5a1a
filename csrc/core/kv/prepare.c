/* How this file works. Most calls find in the marks that all is ready (is_ready) and only move a
 * mark. The others take the pool's lock and go through the four steps for all rows, with a journal:
 * promise_rows makes sure of all blocks that are missing, prepare_row owns, maps and zeroes one
 * row, and note_ready writes down what was reached. What a call writes to, and what it has to make
 * zeros of, is worked out from the marks and the table whenever it is needed (tokens_of,
 * unknown_tokens, written_blocks), never stored. */
#include "kv/prepare.h"

#include <assert.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/journal.h"
#include "kv/mapping.h"

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

/* Where all rows end at the view the marks alone say it, without the lock. */
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
follow(mt_kvlease *lease, const mt_kvwant *want, size_t row, mt_kvspan write, mt_error *err)
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

/* Where the system allows no more stretches, the row's blocks move to one extent, which all of its
 * addresses map: then there is nothing left to follow but what is in view. */
static mt_status
follow_or_move(mt_kvjournal *j, const mt_kvwant *want, size_t row, mt_kvspan write, mt_error *err)
{
    mt_kvlease *lease = j->lease;
    mt_status st = follow(lease, want, row, write, err);

    if (st != MT_EAGAIN) return st;
    st = mt_kvjournal_move(j, row, mt_kvgeom_blocks(&lease->pool->geom, want->view), err);
    return st == MT_OK ? follow(lease, want, row, write, err) : st;
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

/* --- the marks --- */

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
        st = mt_kvjournal_extend_nearest(&j, row, written_blocks(lease, want, row).hi, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = prepare_row(&j, want, row, err);
    if (st == MT_OK)
        st = mt_kvjournal_follow_copies(&j, unit_of(lease, want),
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
