#include "kv/prepare.h"

#include "base/size.h"
#include "kv/block.h"
#include "kv/journal.h"
#include "kv/mapping.h"

/* What of the row's blocks a view of `view` tokens shows past `to`, as far as it is not known to be
 * zeros: tokens [lo, hi). Past the table's end views show zeros anyway. If there is any, then to
 * the end of the block, which views of the next tokens will show. */
static mt_kvspan
dirt(const mt_kvlease *lease, size_t layer, size_t row, size_t to, size_t view)
{
    size_t step = lease->pool->geom.block_tokens;
    size_t taken =
        mt_size_max(mt_kvlease_slot(lease, row)->taken, mt_kvgeom_blocks(&lease->pool->geom, to));
    size_t lo = to < *mt_kvlease_writable_to(lease, layer, row)
                    ? to
                    : mt_size_max(*mt_kvlease_zero_to(lease, layer, row), to);
    size_t hi = mt_size_min(view, taken * step);

    return (mt_kvspan){lo, hi > lo ? mt_kvgeom_blocks(&lease->pool->geom, hi) * step : lo};
}

static bool
row_is_mapped(const mt_kvlease *lease, size_t layer, size_t row, size_t view)
{
    size_t from = lease->from[row], to = lease->to[row];
    size_t unit = row * lease->pool->geom.units + mt_kvgeom_unit(&lease->pool->geom, layer);

    if (to > from && (from < lease->owned_from[unit] || to > lease->owned_to[unit])) return false;
    return view <= lease->mapped_to[unit];
}

static bool
is_clean(const mt_kvlease *lease, size_t layer, size_t view)
{
    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvspan left = dirt(lease, layer, row, lease->to[row], view);

        if (left.lo < left.hi) return false;
    }
    return true;
}

/* Without the lock where all rows end at the view: the lease's own arrays say it. */
static bool
is_ready(mt_kvlease *lease, size_t layer, size_t view)
{
    bool clean, ragged = false;

    for (size_t row = 0; row < lease->rows; row++) {
        if (!row_is_mapped(lease, layer, row, view)) return false;
        ragged |= view > lease->to[row];
    }
    if (!ragged) return true;
    mt_lock_take(&lease->pool->lock); /* slots move when the pool grows */
    clean = is_clean(lease, layer, view);
    mt_lock_give(&lease->pool->lock);
    return clean;
}

/* Blocks that are written: by the caller, and by cleaning. */
static mt_kvspan
written(const mt_kvlease *lease, size_t layer, size_t row, size_t view)
{
    const mt_kvgeom *g = &lease->pool->geom;
    size_t from = lease->from[row], to = lease->to[row];
    mt_kvspan left = dirt(lease, layer, row, to, view), w = {from / g->block_tokens, 0};

    w.hi = to > from ? mt_kvgeom_blocks(g, to) : w.lo;
    if (left.lo == left.hi) return w;
    if (w.lo == w.hi) w.lo = left.lo / g->block_tokens;
    w.hi = mt_size_max(w.hi, mt_kvgeom_blocks(g, left.hi));
    return w;
}

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
follow(mt_kvlease *lease, size_t unit, size_t row, size_t view, mt_kvspan write, mt_error *err)
{
    const mt_kvgeom *g = &lease->pool->geom;
    size_t shown = lease->mapped_to[row * g->units + unit];
    mt_kvspan see = {shown / g->block_tokens, mt_kvgeom_blocks(g, view)};

    if (write.hi > write.lo) see.lo = mt_size_min(see.lo, write.lo);
    /* what was shown stays in sight: what lies ahead of `see` may be mapped otherwise */
    see.hi = mt_size_max(see.hi, mt_size_max(write.hi, shown / g->block_tokens));
    if (see.lo >= see.hi) return MT_OK;
    return mt_kvmap_follow(lease->pool, lease->first + row, unit, &see, &write, err);
}

/* Where the system allows no more stretches, the row's blocks move to one home, which all of its
 * addresses map: then there is nothing left to follow but what is in view. */
static mt_status
follow_or_move(mt_kvjournal *j, size_t unit, size_t row, size_t view, mt_kvspan write,
               mt_error *err)
{
    mt_kvlease *lease = j->lease;
    mt_status st = follow(lease, unit, row, view, write, err);
    size_t blocks = mt_kvgeom_blocks(&lease->pool->geom, view);

    if (st == MT_EAGAIN && mt_kvmap_relax(lease->pool))
        st = follow(lease, unit, row, view, write, err);
    if (st != MT_EAGAIN) return st;
    if ((st = mt_kvgrow_move(j, row, blocks, err)) != MT_OK) return st;
    return follow(lease, unit, row, view, write, err);
}

static mt_status
prepare_row(mt_kvjournal *j, size_t layer, size_t row, size_t view, mt_error *err)
{
    mt_kvspan write = written(j->lease, layer, row, view), left;
    mt_status st = mt_kvgrow_own(j, row, write.lo, write.hi, err);

    if (st == MT_OK)
        st = follow_or_move(j, mt_kvgeom_unit(&j->lease->pool->geom, layer), row, view, write, err);
    if (st != MT_OK) return st;
    left = dirt(j->lease, layer, row, j->lease->to[row], view);
    return left.lo < left.hi ? zero_tokens(j->lease, layer, row, left, err) : MT_OK;
}

/* The caller may write up to `to` now; from there on it is zeros, as far as it was cleaned. */
static void
note_clean(mt_kvlease *lease, size_t layer, size_t row, size_t view)
{
    uint32_t *zero_to = mt_kvlease_zero_to(lease, layer, row),
             *writable_to = mt_kvlease_writable_to(lease, layer, row);
    size_t to = lease->to[row], hi = dirt(lease, layer, row, to, view).hi;

    *zero_to = (uint32_t)(to < *writable_to && hi < *writable_to ? hi : mt_size_max(*zero_to, hi));
    *writable_to = (uint32_t)to;
}

/* The row's part of what prepare promised, for the next call to see. pre: committed. */
static void
note_ready(mt_kvlease *lease, size_t layer, size_t row, size_t view)
{
    const mt_kvgeom *g = &lease->pool->geom;
    size_t at = row * g->units + mt_kvgeom_unit(g, layer), step = g->block_tokens;
    size_t blocks = mt_size_max(mt_kvgeom_blocks(g, view), lease->mapped_to[at] / step);

    lease->mapped_to[at] = (uint32_t)(blocks * step);
    if (!lease->opening) note_clean(lease, layer, row, view);
    if (lease->to[row] == lease->from[row]) return;
    lease->owned_from[at] = (uint32_t)(lease->from[row] / step * step);
    lease->owned_to[at] = (uint32_t)(mt_kvgeom_blocks(g, lease->to[row]) * step);
}

/* For all rows at once, so that a refusal takes nothing and says what the whole call lacks. */
static mt_status
promise_rows(mt_kvjournal *j, size_t layer, size_t view, mt_error *err)
{
    size_t blocks = 0;

    for (size_t row = 0; row < j->lease->rows; row++) {
        mt_kvspan write = written(j->lease, layer, row, view);

        blocks += mt_kvgrow_missing(j->lease, row, write.lo, write.hi);
    }
    return blocks > 0 ? mt_kvjournal_promise(j, blocks, err) : MT_OK;
}

static mt_status
prepare_locked(mt_kvlease *lease, size_t layer, size_t view, mt_error *err)
{
    mt_status st;
    mt_kvjournal j;

    mt_kvjournal_begin(&j, lease);
    st = promise_rows(&j, layer, view, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = mt_kvgrow_extend_nearest(&j, row, written(lease, layer, row, view).hi, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = prepare_row(&j, layer, row, view, err);
    if (st == MT_OK)
        st = mt_kvgrow_follow_copies(&j, mt_kvgeom_unit(&lease->pool->geom, layer),
                                     mt_kvgeom_blocks(&lease->pool->geom, view), err);
    if (st != MT_OK) {
        mt_kvjournal_undo(&j, err);
        for (size_t row = 0; row < lease->rows; row++)
            mt_kvlease_unready(lease, row); /* a mapping may have failed half-way */
        return st;
    }
    mt_kvjournal_commit(&j);
    for (size_t row = 0; row < lease->rows; row++)
        note_ready(lease, layer, row, view);
    return MT_OK;
}

static void
note_roomed(mt_kvlease *lease, size_t layer)
{
    for (size_t row = 0; row < lease->rows; row++) {
        uint32_t *writable_to = mt_kvlease_writable_to(lease, layer, row);

        if (*writable_to < lease->to[row]) *writable_to = (uint32_t)lease->to[row];
    }
}

mt_status
mt_kvgrow_prepare(mt_kvlease *lease, size_t layer, size_t view, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    mt_status st;
    mt_error why;

    if (is_ready(lease, layer, view)) {
        if (!lease->opening) note_roomed(lease, layer);
        return MT_OK;
    }
    do {
        mt_lock_take(&pool->lock);
        st = prepare_locked(lease, layer, view, &why);
    } while (mt_kvpool_again(pool, st, &why, err));
    return st;
}

void
mt_kvlease_unready(mt_kvlease *lease, size_t row)
{
    size_t units = lease->pool->geom.units;

    for (size_t at = row * units; at < (row + 1) * units; at++)
        lease->owned_from[at] = lease->owned_to[at] = lease->mapped_to[at] = 0;
}

void
mt_kvlease_unclean(mt_kvlease *lease, size_t row)
{
    size_t end = mt_kvlease_slot(lease, row)->taken * lease->pool->geom.block_tokens;

    for (size_t layer = 0; layer < lease->pool->geom.config.layers; layer++) {
        uint32_t *zero_to = mt_kvlease_zero_to(lease, layer, row),
                 *writable_to = mt_kvlease_writable_to(lease, layer, row);

        if (*zero_to > end) *zero_to = (uint32_t)end;
        if (*writable_to > *zero_to) *writable_to = *zero_to;
    }
}
