/* How this file works. Code that writes into views by itself needs addresses that it may write to
 * before it says how much it wrote. There are two ways. Reserve takes the blocks ahead, layer by
 * layer, by mt_kvprepare. Expose takes none: it maps each row's own extent past the table's end, so
 * that pages appear on touch, and keeps others out of that extent. Afterwards advance_all makes the
 * rows longer: it names the blocks of exposed rows, where the tokens are already, and names zeros
 * in all others. */
#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/kv.h"
#include "kv/mapping.h"
#include "kv/prepare.h"

/* --- reserve --- */

/* The rows' tables end where they did, and what was promised then is promised again. */
static void
unreserve_rows(mt_kvlease *lease, const size_t *taken, size_t promised)
{
    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvslot *s = mt_kvlease_slot(lease, row);

        while (s->taken > taken[row]) {
            s->taken--;
            mt_kvblock_untake(lease, lease->first + row, s->table[s->taken], false);
        }
        mt_kvprepare_forget_zeros(lease, row);
        mt_kvprepare_forget_maps(lease, row);
    }
    mt_kvblock_unpromise(lease, mt_size_max(lease->promised, promised) - promised);
}

mt_status
mt_kvlease_reserve(mt_kvlease *lease, size_t tokens, bool held, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    size_t promised = lease->promised, layers = pool->geom.config.layers;
    size_t *taken = mt_alloc_zeroed(&pool->mem, lease->rows, sizeof *taken);
    mt_status st = MT_OK;

    assert(tokens <= pool->geom.config.max_tokens);
    if (taken == NULL) return mt_fail(err, MT_ENOMEM, "kvpool", 0);
    mt_lock_take(&pool->lock);
    for (size_t row = 0; row < lease->rows; row++)
        taken[row] = mt_kvlease_slot(lease, row)->taken;
    mt_lock_give(&pool->lock);
    for (size_t i = 0; st == MT_OK && i < 2 * layers; i++) { /* twice: a layer may move rows */
        mt_kvwant zeros = {.layer = i % layers, .view = tokens}, own = zeros;

        own.to = tokens;
        own.held = held;
        own.own_only = true;
        if ((st = mt_kvprepare(lease, &own, err)) == MT_OK) st = mt_kvprepare(lease, &zeros, err);
    }
    if (st != MT_OK) {
        mt_lock_take(&pool->lock);
        unreserve_rows(lease, taken, promised);
        mt_lock_give(&pool->lock);
    }
    pool->mem.put(pool->mem.ctx, taken, lease->rows * sizeof *taken);
    return st;
}

/* --- expose --- */

static mt_status
expose_row(mt_kvlease *lease, size_t row, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    mt_kvslot *s = mt_kvlease_slot(lease, row);
    mt_status st = MT_OK;

    for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++)
        st = mt_kvmap_own_extent(pool, lease->first + row, unit, err);
    for (size_t place = 0; st == MT_OK && !s->exposed && place < pool->geom.blocks; place++)
        if (mt_kvblock_is_idle(&s->blocks[place]))
            st = mt_kvblock_zero(pool, mt_kvslot_block(s, place), 0, err);
    if (st == MT_OK) s->exposed = true;
    return st;
}

/* Blocks that every row has to have of its own before it is exposed: up to the last one that others
 * have named in the extent of one of them, past its table. */
static size_t
needed(const mt_kvlease *lease)
{
    size_t blocks = 0;

    for (size_t row = 0; row < lease->rows; row++) {
        const mt_kvslot *s = mt_kvlease_slot(lease, row);
        size_t place = lease->pool->geom.blocks;

        while (place > s->taken && s->blocks[place - 1].refs == 0)
            place--;
        if (place > s->taken) blocks = mt_size_max(blocks, place);
    }
    return blocks;
}

/* Reserves as many, and takes the lock. Meanwhile another lease may take blocks of the rows'
 * extents: then more are needed. */
static mt_status
reserve_and_lock(mt_kvlease *lease, mt_error *err)
{
    const mt_kvgeom *g = &lease->pool->geom;
    size_t tokens;
    mt_status st;

    mt_lock_take(&lease->pool->lock);
    do {
        tokens = needed(lease) * g->block_tokens;
        for (size_t row = 0; row < lease->rows; row++)
            tokens = mt_size_max(tokens, mt_kvlease_slot(lease, row)->taken * g->block_tokens);
        mt_lock_give(&lease->pool->lock);
        st = mt_kvlease_reserve(lease, mt_size_min(tokens, g->config.max_tokens), false, err);
        if (st != MT_OK) return st;
        mt_lock_take(&lease->pool->lock);
    } while (needed(lease) > 0);
    return MT_OK;
}

mt_status
mt_kvlease_expose(mt_kvlease *lease, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    const mt_kvgeom *g = &pool->geom;
    mt_status st;

    assert(pool->store.lazy);
    lease->exposing = true;
    st = reserve_and_lock(lease, err);
    lease->exposing = false;
    if (st != MT_OK) return st;
    st = mt_kvmap_clear_stale(pool, err); /* what others let go of here is zeros from now on */
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = expose_row(lease, row, err);
    if (st == MT_EAGAIN) st = mt_fail(err, MT_ENOMEM, MT_STORE_MAPS, 0);
    for (size_t row = 0; st != MT_OK && row < lease->rows; row++) {
        mt_kvslot *s = mt_kvlease_slot(lease, row);

        if (!lease->exposed) s->exposed = false;
        for (size_t place = s->taken; !lease->exposed && place < g->blocks; place++)
            mt_kvblock_note_shown(pool, lease->first + row, mt_kvslot_block(s, place));
        mt_kvprepare_forget_maps(lease, row); /* a mapping may have failed half-way */
    }
    if (st != MT_OK)
        (void)mt_kvmap_clear_stale(pool, NULL); /* the rest changes when its blocks are taken */
    mt_lock_give(&pool->lock);
    if (st != MT_OK) return st;
    lease->exposed = true;
    for (size_t i = 0; i < lease->rows * g->config.layers; i++)
        lease->layer_marks[i].zero_to = (uint32_t)(g->blocks * g->block_tokens);
    return MT_OK;
}

/* --- advance --- */

/* Blocks past the row's table that the new tokens lie in. */
static mt_kvspan
new_blocks(const mt_kvlease *lease, const mt_kvstep *step, size_t row)
{
    size_t to = mt_kvlease_row_tokens(lease, row) + mt_kvstep_count(step, row);
    size_t taken = mt_kvlease_slot(lease, row)->taken;

    return (mt_kvspan){taken, mt_size_max(taken, mt_kvgeom_blocks(&lease->pool->geom, to))};
}

/* Where code may have written, the row's own extent holds it: name its blocks. */
typedef struct advance_call {
    mt_kvlease *lease;
    const mt_kvstep *step;
} advance_call;

static mt_status
name_touched(void *arg, mt_error *err)
{
    const advance_call *a = arg;
    mt_kvlease *lease = a->lease;
    mt_status st = MT_OK;
    mt_kvjournal j;
    size_t more = 0;

    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvspan w = new_blocks(lease, a->step, row);

        more += mt_kvjournal_missing(lease, row, w.lo, w.hi);
    }
    mt_kvjournal_begin(&j, lease);
    if (more > 0) st = mt_kvjournal_promise(&j, more, err);
    for (size_t row = 0; st == MT_OK && row < lease->rows; row++) {
        mt_kvspan w = new_blocks(lease, a->step, row);
        mt_kvslot *s = mt_kvlease_slot(lease, row);

        /* Of a row that came after the others were exposed no code has written the tokens: they are
         * zeros, as of places that a view has shown before. */
        if (!s->exposed) s->reach = mt_size_max(s->reach, w.hi);
        st = mt_kvjournal_own(&j, row, w.lo, w.hi, err);
    }
    return mt_kvjournal_end(&j, st, err);
}

/* Zeros in what the rows have, and the name of zeros past that. */
static mt_status
advance_zeros(mt_kvlease *lease, const mt_kvstep *step, mt_error *err)
{
    mt_kvpool *pool = lease->pool;
    mt_status st = MT_OK;

    for (size_t layer = 0; st == MT_OK && layer < pool->geom.config.layers; layer++) {
        size_t view = 0;

        for (size_t row = 0; row < lease->rows; row++)
            view = mt_size_max(view, mt_kvlease_marks(lease, layer, row)->length +
                                         mt_kvstep_count(step, row));
        st = mt_kvlease_show(lease, layer, view, err);
    }
    if (st != MT_OK) return st;
    mt_lock_take(&pool->lock);
    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvslot *s = mt_kvlease_slot(lease, row);
        size_t to = mt_kvlease_row_tokens(lease, row) + mt_kvstep_count(step, row);

        while (s->taken < mt_kvgeom_blocks(&pool->geom, to))
            s->table[s->taken++] = MT_KV_ZERO;
        s->reach = mt_size_max(s->reach, s->taken);
    }
    mt_lock_give(&pool->lock);
    return MT_OK;
}

mt_status
mt_kvlease_advance_all(mt_kvlease *lease, const mt_kvstep *step, mt_error *err)
{
    advance_call a = {lease, step};
    mt_status st = MT_OK;

    for (size_t row = 0; st == MT_OK && row < lease->rows; row++)
        st = mt_kvlease_check_tokens(lease, mt_kvlease_row_tokens(lease, row),
                                     mt_kvstep_count(step, row), err);
    if (st != MT_OK) return st;
    st = lease->exposed ? mt_kvpool_retry(lease->pool, name_touched, &a, err)
                        : advance_zeros(lease, step, err);
    for (size_t layer = 0; st == MT_OK && layer < lease->pool->geom.config.layers; layer++)
        mt_kvlease_advance(lease, layer, step);
    return st;
}
