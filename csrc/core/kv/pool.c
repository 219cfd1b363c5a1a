/* How this file works. The first part makes arenas: max_rows slots each, with one stretch of
 * addresses and of the store for all of them. The second part is the pool as a member of its
 * ledger, its lock, and its end, when it is closed and the last lease is over. The third part adds
 * up statistics. */
#include "kv/private.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"
#include "kv/block.h"
#include "kv/mapping.h"

/* --- arenas --- */

/* A slot's arrays are one piece of memory: blocks, table, differences, seen, in_sight. They are
 * smaller than the slot itself, which has a page and more for each place of each unit. */
static size_t
slot_array_bytes(const mt_kvgeom *g)
{
    size_t n = g->blocks, places = g->units * n;

    return n * sizeof(mt_kvblock) + (n + places + g->units) * sizeof(uint32_t) +
           places * sizeof(bool);
}

static bool
slot_init(mt_kvpool *pool, mt_kvslot *s, size_t index)
{
    size_t n = pool->geom.blocks, units = pool->geom.units;

    *s = (mt_kvslot){.lease = NULL, .extent = index, .lazy = pool->store.lazy};
    s->first_block = (uint32_t)(index * n);
    s->blocks = mt_alloc_zeroed(&pool->mem, 1, slot_array_bytes(&pool->geom));
    if (s->blocks == NULL) return false;
    s->table = (uint32_t *)(s->blocks + n);
    s->differences = s->table + n;
    s->seen = s->differences + units * n;
    s->in_sight = (bool *)(s->seen + units);
    return true;
}

static void
slot_fini(mt_kvpool *pool, mt_kvslot *s)
{
    pool->mem.put(pool->mem.ctx, s->blocks, slot_array_bytes(&pool->geom));
}

static bool
make_room(mt_kvpool *pool)
{
    size_t want = pool->slot_count + pool->geom.config.max_rows;
    mt_kvslot *slots;

    if (want <= pool->slot_room) return true;
    want = mt_size_max(want, 2 * pool->slot_room);
    if ((slots = mt_alloc_zeroed(&pool->mem, want, sizeof *slots)) == NULL) return false;
    if (pool->slots != NULL) memcpy(slots, pool->slots, pool->slot_count * sizeof *slots);
    pool->mem.put(pool->mem.ctx, pool->slots, pool->slot_room * sizeof *slots);
    pool->slots = slots;
    pool->slot_room = want;
    return true;
}

/* As the store says it, where what fails first is our own account of so many addresses. */
static mt_status
no_room(mt_error *err, size_t bytes)
{
    mt_fail(err, MT_ENOMEM, MT_STORE_ADDRESSES, 0);
    if (err != NULL) err->asked = bytes;
    return MT_ENOMEM;
}

mt_status
mt_kvpool_add_arena(mt_kvpool *pool, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    size_t rows = g->config.max_rows, first = pool->slot_count, made = 0, bytes, numbers;
    mt_status st = MT_OK;
    void *base = NULL;

    if (!mt_size_mul(rows, g->slot_bytes, &bytes)) return no_room(err, SIZE_MAX);
    if (!mt_size_mul(first + rows, g->blocks, &numbers) || numbers > MT_KV_MOST || !make_room(pool))
        return no_room(err, bytes);
    while (made < rows && slot_init(pool, &pool->slots[first + made], first + made))
        made++;
    if (made < rows) st = no_room(err, bytes);
    if (st == MT_OK) st = pool->store.extend(pool->store.ctx, bytes, &base, err);
    if (st != MT_OK) {
        while (made-- > 0)
            slot_fini(pool, &pool->slots[first + made]);
        return st;
    }
    for (size_t i = 0; i < rows; i++) {
        pool->slots[first + i].base = (char *)base + i * g->slot_bytes;
        pool->slots[first + i].offset = (first + i) * g->slot_bytes;
    }
    pool->slot_count += rows;
    pool->maps++;
    return MT_OK;
}

/* --- the pool --- */

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
give_back(void *ctx, size_t bytes)
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

static size_t
mapped_again_bytes(const mt_kvpool *pool)
{
    return pool->extra_sights * pool->geom.unit_ranges * pool->geom.part_bytes;
}

static void
free_parts(mt_kvpool *pool)
{
    mt_alloc mem = pool->mem;

    for (size_t i = 0; i < pool->slot_count; i++)
        slot_fini(pool, &pool->slots[i]);
    mem.put(mem.ctx, pool->slots, pool->slot_room * sizeof *pool->slots);
    mem.put(mem.ctx, pool->scratch, 3 * pool->geom.blocks * sizeof *pool->scratch);
    mt_gauge_subtract(pool->mapped_again, mapped_again_bytes(pool));
    mt_gauge_add_once(pool->mapped_again, 0 - (pool->live + pool->idle) * pool->geom.block_bytes);
    pool->store.close(pool->store.ctx);
    mt_lock_fini(&pool->lock);
    mem.put(mem.ctx, pool, sizeof *pool);
}

static mt_status
new_parts(mt_kvpool *pool, mt_ledger *ledger, const char *name, const mt_kvconfig *config,
          mt_error *err)
{
    mt_member_ops ops = {.idle = idle_bytes, .give_back = give_back, .ctx = pool};
    mt_status st = mt_kvgeom_init(&pool->geom, config, pool->store.page_bytes, err);

    if (st != MT_OK) return st;
    pool->scratch = mt_alloc_zeroed(&pool->mem, 3 * pool->geom.blocks, sizeof *pool->scratch);
    if (pool->scratch == NULL) return mt_fail(err, MT_ENOMEM, "kvpool", 0);
    return mt_ledger_join(ledger, name, 0, &ops, &pool->member, err);
}

mt_status
mt_kvpool_new(const mt_alloc *mem, const mt_store_ops *store, mt_ledger *ledger, const char *name,
              const mt_kvconfig *config, mt_gauge *mapped_again, mt_kvpool **out, mt_error *err)
{
    mt_kvpool *pool = mt_alloc_zeroed(mem, 1, sizeof *pool);
    mt_status st;

    if (pool == NULL) {
        store->close(store->ctx);
        return mt_fail(err, MT_ENOMEM, "kvpool", 0);
    }
    pool->mem = *mem;
    pool->store = *store;
    pool->mapped_again = mapped_again;
    mt_lock_init(&pool->lock);
    if ((st = new_parts(pool, ledger, name, config, err)) != MT_OK) {
        free_parts(pool);
        return st;
    }
    *out = pool;
    return MT_OK;
}

void
mt_kvpool_unlock(mt_kvpool *pool)
{
    /* Held, because another thread may free the pool as soon as the lock is given. */
    mt_ledger *ledger = mt_ledger_hold(mt_member_ledger(pool->member));

    assert(!pool->closed || pool->leases != NULL);
    pool->notify_due = false;
    mt_lock_give(&pool->lock);
    mt_ledger_notify(ledger);
    mt_ledger_drop(ledger);
}

/* Leaving the ledger waits for a give_back of ours, which takes the lock: so not under it. */
void
mt_kvpool_unlock_or_free(mt_kvpool *pool)
{
    if (!pool->closed || pool->leases != NULL) {
        mt_kvpool_unlock(pool);
        return;
    }
    mt_lock_give(&pool->lock);
    mt_ledger_leave(pool->member);
    free_parts(pool);
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
        (void)mt_kvmap_unmap_idle(pool); /* other pools may be short of stretches */
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

static bool
ask_others(mt_kvpool *pool, size_t bytes)
{
    mt_ledger *ledger = mt_member_ledger(pool->member);
    size_t free = mt_ledger_available(ledger);

    if (free >= bytes) return true; /* somebody gave back in between */
    return mt_ledger_reclaim(ledger, pool->member, bytes) > 0;
}

mt_status
mt_kvpool_retry(mt_kvpool *pool, mt_kvtry *once, void *arg, mt_error *err)
{
    mt_status st;
    mt_error why;

    do {
        bool news;

        mt_lock_take(&pool->lock);
        st = once(arg, &why);
        news = st == MT_OK || pool->notify_due;
        pool->notify_due = false;
        mt_lock_give(&pool->lock);
        /* What it let go of may be room for others. A refused try that let go of nothing wakes
         * nobody: who waits would wake itself. */
        if (news) mt_ledger_notify(mt_member_ledger(pool->member));
    } while (st == MT_ELIMIT && ask_others(pool, why.asked));
    if (st != MT_OK && err != NULL) *err = why;
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

/* Blocks that released leases hold, each once, whoever else has them. */
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

static size_t
shared_blocks(const mt_kvpool *pool)
{
    size_t shared = 0;

    for (size_t i = 0; i < pool->slot_count; i++)
        for (size_t place = 0; pool->slots[i].named > 0 && place < pool->geom.blocks; place++)
            shared += pool->slots[i].blocks[place].refs > 1;
    return shared;
}

void
mt_kvpool_stats(mt_kvpool *pool, mt_kvstats *out)
{
    size_t unit = pool->geom.block_bytes;

    mt_lock_take(&pool->lock);
    *out = pool->ever;
    out->live_bytes = pool->live * unit;
    out->shared_bytes = shared_blocks(pool) * unit;
    out->idle_bytes = pool->idle * unit;
    out->promised_bytes = pool->promised * unit;
    out->reserved_bytes = pool->reserved * unit;
    out->physical_bytes = pool->store.physical(pool->store.ctx);
    out->peak_bytes = pool->peak * unit;
    out->address_bytes = pool->slot_count * pool->geom.slot_bytes;
    out->maps = pool->maps;
    out->mapped_again_bytes = mapped_again_bytes(pool);
    for (const mt_kvlease *lease = pool->leases; lease != NULL; lease = lease->next)
        add_lease(lease, out);
    out->lingering_bytes = lingering_blocks(pool) * unit;
    mt_lock_give(&pool->lock);
}
