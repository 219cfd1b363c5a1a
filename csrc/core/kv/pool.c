/* The pool as a whole: a member of its ledger that gives back what is idle, from new to close, and
 * its statistics. */
#include <assert.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/kv.h"
#include "kv/mapping.h"

/* --- the member of the ledger --- */

static size_t
idle_bytes(void *ctx)
{
    mt_kvpool *pool = ctx;
    size_t spare;

    mt_lock_take(&pool->lock);
    spare = pool->idle > pool->promised ? pool->idle - pool->promised : 0;
    mt_lock_give(&pool->lock);
    return spare * pool->geom.block_bytes;
}

static size_t
pool_give_back(void *ctx, size_t bytes)
{
    mt_kvpool *pool = ctx;
    size_t unit = pool->geom.block_bytes, before, blocks = bytes / unit + (bytes % unit != 0);

    mt_lock_take(&pool->lock);
    before = pool->reserved;
    mt_kvblock_drop(pool,
                    mt_size_max(pool->promised, pool->idle - mt_size_min(blocks, pool->idle)));
    mt_kvblock_shrink_reservation(pool);
    before -= pool->reserved;
    mt_lock_give(&pool->lock);
    return before * unit;
}

/* --- from new to close --- */

mt_status
mt_kvpool_new(const mt_alloc *mem, const mt_store_ops *store, mt_ledger *ledger, const char *name,
              const mt_kvconfig *config, mt_gauge *mapped_again, mt_kvpool **out, mt_error *err)
{
    mt_kvpool *pool = mt_alloc_zeroed(mem, 1, sizeof *pool);
    mt_member_ops ops = {.idle = idle_bytes, .give_back = pool_give_back, .ctx = pool};
    mt_status st;

    if (pool == NULL) {
        store->close(store->ctx);
        return mt_fail(err, MT_ENOMEM, "kvpool", 0);
    }
    pool->mem = *mem;
    pool->store = *store;
    pool->mapped_again = mapped_again;
    mt_lock_init(&pool->lock);
    st = mt_kvgeom_init(&pool->geom, config, store->page_bytes, err);
    if (st == MT_OK && (pool->scratch = mt_alloc_zeroed(mem, 3 * pool->geom.blocks,
                                                        sizeof *pool->scratch)) == NULL)
        st = mt_fail(err, MT_ENOMEM, "kvpool", 0);
    if (st == MT_OK) st = mt_ledger_join(ledger, name, 0, &ops, &pool->member, err);
    if (st != MT_OK) {
        mt_kvpool_free(pool);
        return st;
    }
    *out = pool;
    return MT_OK;
}

void
mt_kvpool_close(mt_kvpool *pool)
{
    if (pool == NULL) return;
    mt_lock_take(&pool->lock);
    assert(!pool->closed);
    pool->closed = true;
    mt_kvblock_drop(pool, 0);
    mt_kvblock_shrink_reservation(pool);
    mt_kvpool_unlock_or_free(pool);
}

const mt_kvgeom *
mt_kvpool_geom(const mt_kvpool *pool)
{
    return &pool->geom;
}

size_t
mt_kvpool_trim(mt_kvpool *pool, size_t target_bytes)
{
    size_t keep = target_bytes / pool->geom.block_bytes, before;

    mt_lock_take(&pool->lock);
    before = pool->idle;
    mt_kvblock_drop(pool, keep > pool->live ? keep - pool->live : 0);
    before -= pool->idle;
    if (pool->store.lazy)
        (void)mt_kvmap_unmap_idle(pool); /* other pools may be short of map areas */
    mt_kvblock_shrink_reservation(pool);
    mt_kvpool_unlock(pool);
    return before * pool->geom.block_bytes;
}

void
mt_kvpool_await(mt_kvpool *pool)
{
    mt_lock_take(&pool->lock);
    mt_lock_give(&pool->lock);
}

bool
mt_kvpool_would_fit(mt_kvpool *pool, size_t rows, size_t tokens, size_t shared)
{
    const mt_kvgeom *g = &pool->geom;
    mt_ledger *ledger = mt_member_ledger(pool->member);
    size_t whole = mt_size_min(shared, tokens) / g->block_tokens, blocks, wanted, more;

    if (rows == 0 || rows > g->config.max_rows || tokens > g->config.max_tokens) return false;
    if (!mt_size_mul(rows, mt_kvgeom_blocks(g, tokens) - whole, &blocks)) return false;
    mt_lock_take(&pool->lock);
    wanted = pool->live + mt_size_max(pool->idle, pool->promised + blocks + whole);
    wanted = wanted > pool->reserved ? wanted - pool->reserved : 0;
    mt_lock_give(&pool->lock);
    if (!mt_size_mul(wanted, g->block_bytes, &wanted)) return false;
    more = mt_ledger_idle(ledger, pool->member); /* asks the others: not under our lock */
    return wanted <= mt_ledger_available(ledger) || wanted - mt_ledger_available(ledger) <= more;
}

mt_status
mt_kvpool_use_stream(mt_kvpool *pool, void *stream, mt_error *err)
{
    mt_status st;

    mt_lock_take(&pool->lock);
    st = pool->store.use_stream(pool->store.ctx, stream, err);
    mt_lock_give(&pool->lock);
    return st;
}

/* --- statistics --- */

/* Says of the lease's blocks whether they are counted; how many of them it is news for. */
static size_t
set_counted(const mt_kvlease *lease, bool counted)
{
    size_t changed = 0;

    for (size_t row = 0; row < lease->rows; row++) {
        const mt_kvslot *s = mt_kvlease_slot(lease, row);

        for (size_t place = 0; place < s->taken; place++) {
            mt_kvblock *b;

            if (s->table[place] == MT_KV_ZERO) continue;
            b = mt_kvblock_at(lease->pool, s->table[place]);
            changed += b->counted != counted;
            b->counted = counted;
        }
    }
    return changed;
}

/* Blocks that released leases hold, each once, though other rows may have them too. */
static size_t
lingering_blocks(const mt_kvpool *pool)
{
    size_t blocks = 0;

    for (const mt_kvlease *lease = pool->leases; lease != NULL; lease = lease->next)
        if (lease->released) blocks += set_counted(lease, true);
    for (const mt_kvlease *lease = pool->leases; lease != NULL; lease = lease->next)
        if (lease->released) (void)set_counted(lease, false);
    return blocks;
}

static void
add_lease(const mt_kvlease *lease, mt_kvstats *out)
{
    const mt_kvgeom *g = &lease->pool->geom;
    const mt_kvconfig *c = &g->config;
    size_t tokens = 0;

    for (size_t row = 0; row < lease->rows; row++)
        tokens += mt_kvlease_row_tokens(lease, row);
    out->payload_bytes += tokens * 2 * c->layers * c->heads * g->row_bytes;
    out->leases++;
    out->rows += lease->rows;
    out->lingering += lease->released;
}

void
mt_kvpool_stats(mt_kvpool *pool, mt_kvstats *out)
{
    size_t unit = pool->geom.block_bytes;

    mt_lock_take(&pool->lock);
    *out = pool->ever;
    out->live_bytes = pool->live * unit;
    for (size_t i = 0; i < pool->slot_count; i++)
        for (size_t place = 0; pool->slots[i].named > 0 && place < pool->geom.blocks; place++)
            out->shared_bytes += pool->slots[i].blocks[place].refs > 1 ? unit : 0;
    out->idle_bytes = pool->idle * unit;
    out->promised_bytes = pool->promised * unit;
    out->reserved_bytes = pool->reserved * unit;
    out->physical_bytes = pool->store.physical(pool->store.ctx);
    out->peak_bytes = pool->peak * unit;
    out->address_bytes = pool->slot_count * pool->geom.slot_bytes;
    out->maps = pool->maps;
    out->mapped_again_bytes = mt_kvpool_mapped_again(pool);
    for (const mt_kvlease *lease = pool->leases; lease != NULL; lease = lease->next)
        add_lease(lease, out);
    out->lingering_bytes = lingering_blocks(pool) * unit;
    mt_lock_give(&pool->lock);
}
