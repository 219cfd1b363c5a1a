/* How this file works. A lease gets the run of free slots where the blocks that it will need lie
 * already (best_run), or a new arena where there is none. Forking names the parent's blocks in the
 * child's tables and copies nothing. Appending is three calls: room prepares the layer, write copies
 * tokens, advance makes the rows longer. Releasing gives the blocks back, unless views still hold
 * the lease. */
#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/kv.h"
#include "kv/mapping.h"
#include "kv/prepare.h"

/* --- which slots --- */

typedef struct mt_score { /* of a run of slots: more `wanted` is better, then fewer `others` */
    size_t wanted;        /* resident blocks where the lease will need them: at places [lo, hi) */
    size_t others;        /* idle blocks that some other lease may want */
} mt_score;

/* False where the lease cannot have these slots. */
static bool
run_score(const mt_kvpool *pool, size_t first, size_t rows, size_t lo, size_t hi, bool named,
          mt_score *out)
{
    *out = (mt_score){0, 0};
    for (size_t i = first; i < first + rows; i++) {
        const mt_kvslot *s = &pool->slots[i];
        size_t wanted = 0;

        if (s->lease != NULL || s->exposed || (!named && s->named > 0)) return false;
        for (size_t place = lo; s->idle > 0 && place < hi; place++)
            wanted += mt_kvblock_is_idle(&s->blocks[place]);
        if (lo == hi) wanted = s->idle; /* its length is not known: the more the better */
        out->wanted += wanted;
        out->others += s->idle - wanted;
    }
    return true;
}

/* The best run of free slots within one arena, with or without those whose extents hold blocks that
 * others have named; slot_count when there is none. */
static size_t
best_run(const mt_kvpool *pool, size_t rows, size_t lo, size_t hi, bool named)
{
    size_t arena = pool->geom.config.max_rows, best = pool->slot_count;
    mt_score best_score = {0, 0}, score;

    for (size_t first = 0; first < pool->slot_count; first++) {
        if (first % arena + rows > arena) continue;
        if (!run_score(pool, first, rows, lo, hi, named, &score)) continue;
        if (best < pool->slot_count &&
            (score.wanted != best_score.wanted ? score.wanted < best_score.wanted
                                               : score.others >= best_score.others))
            continue;
        best = first;
        best_score = score;
    }
    return best;
}

/* --- the struct --- */

static size_t
marks_bytes(const mt_kvlease *lease)
{
    const mt_kvgeom *g = &lease->pool->geom;

    return lease->max_rows *
           (g->config.layers * sizeof *lease->layer_marks + g->units * sizeof *lease->unit_marks);
}

static void
free_lease(mt_kvlease *lease)
{
    mt_alloc mem = lease->pool->mem;

    mem.put(mem.ctx, lease->layer_marks, marks_bytes(lease));
    mem.put(mem.ctx, lease, sizeof *lease);
}

static mt_kvlease *
new_lease(mt_kvpool *pool, size_t rows)
{
    mt_kvlease *lease = mt_alloc_zeroed(&pool->mem, 1, sizeof *lease);

    if (lease == NULL) return NULL;
    lease->pool = pool;
    lease->rows = lease->max_rows = rows;
    lease->holds = 1;
    lease->layer_marks = mt_alloc_zeroed(&pool->mem, 1, marks_bytes(lease));
    if (lease->layer_marks == NULL) {
        free_lease(lease);
        return NULL;
    }
    lease->unit_marks = (mt_kvunit_marks *)(lease->layer_marks + rows * pool->geom.config.layers);
    return lease;
}

/* --- lending --- */

static void
occupy(mt_kvlease *lease, size_t first)
{
    mt_kvpool *pool = lease->pool;

    lease->first = first;
    lease->base = pool->slots[first].base;
    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvslot *s = mt_kvlease_slot(lease, row);

        s->lease = lease;
        s->taken = s->reach = 0;
        s->extent = first + row;
        assert(!s->stale && !s->exposed);
    }
    lease->next = pool->leases;
    if (lease->next != NULL) lease->next->prev = lease;
    pool->leases = lease;
}

static mt_status
lend(mt_kvpool *pool, size_t rows, size_t lo, size_t hi, size_t promise, mt_kvlease **out,
     mt_error *err)
{
    enum { SOME_ARENAS = 4 };
    mt_kvlease *lease;
    size_t first;
    mt_status st;

    if (rows == 0 || rows > pool->geom.config.max_rows)
        return mt_fail_shape(err, MT_SHAPE_ROWS, rows, pool->geom.config.max_rows);
    if ((lease = new_lease(pool, rows)) == NULL) return mt_fail(err, MT_ENOMEM, "kvpool", 0);
    if ((st = mt_kvblock_promise(lease, promise, err)) != MT_OK) goto no_promise;
    /* A row whose extent others have named finds its blocks elsewhere, in more map areas; so a pool
     * has some arenas before it takes such a slot. */
    first = best_run(pool, rows, lo, hi, false);
    if (first == pool->slot_count && first >= SOME_ARENAS * pool->geom.config.max_rows)
        first = best_run(pool, rows, lo, hi, true);
    if (first == pool->slot_count && (st = mt_kvpool_add_arena(pool, err)) != MT_OK) goto no_slots;
    occupy(lease, first); /* where there was none, the new arena begins there */
    *out = lease;
    return MT_OK;

no_slots: /* the promise stands */
    mt_kvblock_unpromise(lease, promise);
no_promise: /* the lease is linked nowhere */
    free_lease(lease);
    return st;
}

typedef struct acquisition {
    mt_kvpool *pool;
    size_t rows, tokens;
    mt_kvlease **out;
} acquisition;

static mt_status
acquire_locked(void *arg, mt_error *err)
{
    const acquisition *a = arg;
    size_t blocks = mt_kvgeom_blocks(&a->pool->geom, a->tokens), promise;
    mt_status st;

    if (!mt_size_mul(a->rows, blocks, &promise)) return mt_fail(err, MT_EOVERFLOW, "kvpool", 0);
    st = lend(a->pool, a->rows, 0, blocks, promise, a->out, err);
    a->pool->ever.acquired += st == MT_OK;
    return st;
}

mt_status
mt_kvpool_acquire(mt_kvpool *pool, size_t rows, size_t tokens, mt_kvlease **out, mt_error *err)
{
    acquisition a = {pool, rows, mt_size_min(tokens, pool->geom.config.max_tokens), out};

    return mt_kvpool_retry(pool, acquire_locked, &a, err);
}

/* --- giving back --- */

static void
lease_free_slot(mt_kvpool *pool, size_t index)
{
    mt_kvslot *s = &pool->slots[index];

    mt_kvblock_unexpose(pool, index); /* before its blocks are unnamed: they are kept */
    s->extent = index;
    for (size_t place = 0; place < s->taken; place++)
        mt_kvblock_unname(pool, s->table[place]);
    pool->stale -= s->stale;
    s->stale = false;
    s->taken = 0;
    s->lease = NULL;
    s->used_at = ++pool->clock;
    mt_kvmap_end_row(pool, index);
    s->reach = 0;
}

static void
lease_take_back(mt_kvlease *lease)
{
    mt_kvpool *pool = lease->pool;

    for (size_t row = 0; row < lease->max_rows; row++)
        lease_free_slot(pool, lease->first + row);
    if (lease->prev != NULL) lease->prev->next = lease->next;
    if (lease->prev == NULL) pool->leases = lease->next;
    if (lease->next != NULL) lease->next->prev = lease->prev;
    mt_kvblock_unpromise(lease, lease->promised);
    if (pool->closed) mt_kvblock_drop(pool, 0);
    mt_kvblock_shrink_reservation(pool);
    free_lease(lease);
}

/* pre: the lock is held; it is given. */
static void
unhold_locked(mt_kvlease *lease)
{
    mt_kvpool *pool = lease->pool;

    assert(lease->holds > 0);
    if (--lease->holds == 0) lease_take_back(lease);
    mt_kvpool_unlock_or_free(pool);
}

void
mt_kvlease_release(mt_kvlease *lease)
{
    mt_lock_take(&lease->pool->lock);
    assert(!lease->released);
    lease->released = true;
    lease->pool->ever.released++;
    unhold_locked(lease);
}

void
mt_kvlease_hold(mt_kvlease *lease)
{
    mt_lock_take(&lease->pool->lock);
    lease->holds++;
    mt_lock_give(&lease->pool->lock);
}

void
mt_kvlease_unhold(mt_kvlease *lease)
{
    mt_lock_take(&lease->pool->lock);
    unhold_locked(lease);
}

/* --- forking --- */

static void
copy_row(mt_kvlease *child, size_t row, const mt_kvlease *parent, size_t from)
{
    mt_kvpool *pool = child->pool;
    mt_kvslot *to = mt_kvlease_slot(child, row);
    const mt_kvslot *s = mt_kvlease_slot(parent, from);

    to->taken = mt_kvlease_blocks(parent, from);
    for (size_t place = 0; place < to->taken; place++) {
        to->table[place] = s->table[place];
        mt_kvblock_name(pool, s->table[place]);
    }
    to->reach = to->taken;
    for (size_t layer = 0; layer < pool->geom.config.layers; layer++)
        mt_kvlease_set_length(child, layer, row, mt_kvlease_marks(parent, layer, from)->length);
}

/* Blocks that the children need beside the shared ones, for tokens each. */
static bool
promise_of(const mt_kvlease *parent, size_t n, size_t tokens, size_t *whole, size_t *promise)
{
    const mt_kvgeom *g = &parent->pool->geom;
    size_t blocks = mt_kvgeom_blocks(g, mt_size_min(tokens, g->config.max_tokens)), one;

    *promise = 0;
    *whole = g->blocks;
    for (size_t row = 0; row < parent->rows; row++) {
        size_t full = mt_kvlease_row_tokens(parent, row) / g->block_tokens;

        *whole = mt_size_min(*whole, full);
        if (!mt_size_mul(n, blocks > full ? blocks - full : 0, &one)) return false;
        if (!mt_size_add(*promise, one, promise)) return false;
    }
    return true;
}

typedef struct forking {
    mt_kvlease *parent;
    size_t n, tokens;
    mt_kvlease **out;
} forking;

static mt_status
fork_locked(void *arg, mt_error *err)
{
    const forking *f = arg;
    mt_kvlease *parent = f->parent, *child = NULL;
    mt_kvpool *pool = parent->pool;
    size_t rows = parent->rows * f->n, whole, promise;
    mt_status st;

    if (!promise_of(parent, f->n, f->tokens, &whole, &promise))
        return mt_fail(err, MT_EOVERFLOW, "kvpool", 0);
    st = lend(pool, rows, whole, pool->geom.blocks, promise, &child, err);
    if (st != MT_OK) return st;
    assert(child != NULL);
    for (size_t row = 0; row < rows; row++)
        copy_row(child, row, parent, row / f->n);
    for (size_t row = 0; st == MT_OK && row < rows; row++)
        st = mt_kvmap_main_extent(pool, child->first + row, err);
    if (st != MT_OK) {
        lease_take_back(child);
        return st;
    }
    for (size_t row = 0; row < parent->rows; row++)
        mt_kvprepare_forget_maps(parent, row); /* its blocks are shared now */
    pool->ever.forked++;
    *f->out = child;
    return MT_OK;
}

mt_status
mt_kvlease_fork(mt_kvlease *parent, size_t n, size_t tokens, mt_kvlease **out, mt_error *err)
{
    size_t most = parent->pool->geom.config.max_rows, rows;
    forking f = {parent, n, tokens, out};
    mt_status st;

    if (!mt_size_mul(parent->rows, n, &rows)) return mt_fail(err, MT_EOVERFLOW, "kvpool", 0);
    if (rows == 0 || rows > most) return mt_fail_shape(err, MT_SHAPE_ROWS, rows, most);
    st = mt_kvwritten_save(parent, NULL, parent->rows, NULL, err);
    if (st != MT_OK) return st;
    return mt_kvpool_retry(parent->pool, fork_locked, &f, err);
}

/* --- appending --- */

mt_status
mt_kvlease_room(mt_kvlease *lease, size_t layer, const mt_kvstep *step, mt_error *err)
{
    mt_kvwant want = {.layer = layer, .step = *step};

    for (size_t row = 0; row < lease->rows; row++) {
        size_t from = mt_kvlease_marks(lease, layer, row)->length;
        size_t count = mt_kvstep_count(step, row);
        mt_status st = mt_kvlease_check_tokens(lease, from, count, err);

        if (st != MT_OK) return st;
        want.view = mt_size_max(want.view, from + count);
    }
    return mt_kvprepare(lease, &want, err);
}

/* `tokens` rows of one head; the caller's tokens and ours may both lie apart. They may overlap:
 * the caller's may be a view of the same lease. */
static void
write_head(char *dst, const char *src, size_t tokens, size_t bytes, size_t dst_stride,
           ptrdiff_t src_stride)
{
    if (tokens == 0) return; /* an empty tensor may have no address */
    if (dst_stride == bytes && src_stride == (ptrdiff_t)bytes) {
        memmove(dst, src, tokens * bytes);
        return;
    }
    for (size_t i = 0; i < tokens; i++) {
        /* from the end where the destination lies behind, as memmove does */
        size_t t = (uintptr_t)dst > (uintptr_t)src ? tokens - 1 - i : i;

        memmove(dst + t * dst_stride, src + (ptrdiff_t)t * src_stride, bytes);
    }
}

static void
lease_write_row(mt_kvlease *lease, size_t layer, size_t row, size_t tokens, size_t which,
                const mt_kvsource *from)
{
    const mt_kvgeom *g = &lease->pool->geom;
    const char *src = from->data + (ptrdiff_t)row * from->row_stride;
    char *dst = lease->base + row * g->slot_bytes + mt_kvgeom_offset(g, layer, which) +
                mt_kvlease_marks(lease, layer, row)->length * g->token_bytes;

    for (size_t h = 0; h < g->config.heads; h++) {
        write_head(dst, src, tokens, g->row_bytes, g->token_bytes, from->token_stride);
        dst += g->head_stride;
        src += from->head_stride;
    }
}

void
mt_kvlease_write(mt_kvlease *lease, size_t layer, const mt_kvstep *step, const mt_kvsource *k,
                 const mt_kvsource *v)
{
    for (size_t row = 0; row < lease->rows; row++) {
        assert(mt_kvlease_marks(lease, layer, row)->length + mt_kvstep_count(step, row) <=
               mt_kvlease_marks(lease, layer, row)->writable_to);
        lease_write_row(lease, layer, row, mt_kvstep_count(step, row), 0, k);
        lease_write_row(lease, layer, row, mt_kvstep_count(step, row), 1, v);
    }
}

void
mt_kvlease_advance(mt_kvlease *lease, size_t layer, const mt_kvstep *step)
{
    mt_lock_take(&lease->pool->lock); /* the pool's statistics read lengths */
    for (size_t row = 0; row < lease->rows; row++) {
        mt_kvlayer_marks *m = mt_kvlease_marks(lease, layer, row);

        m->length += (uint32_t)mt_kvstep_count(step, row);
        assert(m->length <= lease->pool->geom.config.max_tokens);
        if (m->zero_to < m->length) m->zero_to = m->length;
        if (m->writable_to < m->length) m->writable_to = m->length;
    }
    mt_lock_give(&lease->pool->lock);
}

mt_status
mt_kvlease_show(mt_kvlease *lease, size_t layer, size_t tokens, mt_error *err)
{
    mt_kvwant want = {.layer = layer, .view = tokens};

    assert(tokens <= lease->pool->geom.config.max_tokens);
    return mt_kvprepare(lease, &want, err);
}

/* --- shrinking --- */

static void
crop_row(mt_kvlease *lease, size_t row, size_t length)
{
    mt_kvpool *pool = lease->pool;
    mt_kvslot *s = mt_kvlease_slot(lease, row);
    size_t slot = lease->first + row, keep;

    for (size_t layer = 0; layer < pool->geom.config.layers; layer++)
        if (mt_kvlease_marks(lease, layer, row)->length > length)
            mt_kvlease_set_length(lease, layer, row, length);
    keep = mt_kvlease_blocks(lease, row);
    if (keep == s->taken) return;
    if (mt_kvmap_leave(pool, slot, &(mt_kvspan){keep, s->taken}, false, NULL) == MT_OK)
        mt_kvblock_let_go_from(pool, slot, keep);
    /* Where it failed the blocks are in view, and stay the row's. */
    mt_kvprepare_forget_zeros(lease, row);
    mt_kvprepare_forget_maps(lease, row);
}

void
mt_kvlease_crop(mt_kvlease *lease, const size_t *lengths)
{
    mt_kvpool *pool = lease->pool;

    mt_lock_take(&pool->lock);
    for (size_t row = 0; row < lease->rows; row++)
        if (lengths[row] < mt_kvlease_row_tokens(lease, row)) crop_row(lease, row, lengths[row]);
    mt_kvblock_shrink_reservation(pool);
    mt_kvpool_unlock(pool);
}
