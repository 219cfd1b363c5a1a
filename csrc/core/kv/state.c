/* How this file works. First come the getters of leases, which take no lock: a lease is one
 * thread's. The second part makes arenas: max_rows slots each, with one range of addresses and of
 * the store for all of them. The third part is the pool's lock: trying again when others gave back
 * what the ledger lacked, and the end, when the pool is closed and the last lease is over. */
#include "kv/state.h"

#include <assert.h>

#include "base/size.h"

/* --- looking --- */

size_t
mt_kvlease_rows(const mt_kvlease *lease)
{
    return lease->rows;
}

size_t
mt_kvlease_max_rows(const mt_kvlease *lease)
{
    return lease->max_rows;
}

mt_kvpool *
mt_kvlease_pool(const mt_kvlease *lease)
{
    return lease->pool;
}

const mt_kvgeom *
mt_kvlease_geom(const mt_kvlease *lease)
{
    return &lease->pool->geom;
}

void *
mt_kvlease_base(const mt_kvlease *lease)
{
    return lease->base;
}

size_t
mt_kvlease_length(const mt_kvlease *lease, size_t layer, size_t row)
{
    return mt_kvlease_marks(lease, layer, row)->length;
}

size_t
mt_kvlease_longest(const mt_kvlease *lease, size_t layer)
{
    size_t longest = 0;

    for (size_t row = 0; row < lease->rows; row++)
        longest = mt_size_max(longest, mt_kvlease_marks(lease, layer, row)->length);
    return longest;
}

size_t
mt_kvlease_shortest(const mt_kvlease *lease, size_t layer)
{
    size_t shortest = SIZE_MAX;

    for (size_t row = 0; row < lease->rows; row++)
        shortest = mt_size_min(shortest, mt_kvlease_marks(lease, layer, row)->length);
    return shortest;
}

size_t
mt_kvlease_row_tokens(const mt_kvlease *lease, size_t row)
{
    size_t tokens = 0;

    for (size_t layer = 0; layer < lease->pool->geom.config.layers; layer++)
        tokens = mt_size_max(tokens, mt_kvlease_marks(lease, layer, row)->length);
    return tokens;
}

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
    mt_kvslot *slots;

    if (!mt_size_mul(rows, g->slot_bytes, &bytes)) return no_room(err, SIZE_MAX);
    if (!mt_size_mul(first + rows, g->blocks, &numbers) || numbers > MT_KV_MOST)
        return no_room(err, bytes);
    slots = mt_alloc_grown(&pool->mem, pool->slots, &pool->slot_room, first + rows, sizeof *slots);
    if (slots == NULL) return no_room(err, bytes);
    pool->slots = slots;
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

/* --- the lock, and the end --- */

static bool
state_ask_others(mt_kvpool *pool, size_t bytes)
{
    mt_ledger *ledger = mt_member_ledger(pool->member);
    size_t free = mt_ledger_available(ledger);

    if (free >= bytes) return true; /* another part gave bytes back meanwhile */
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
        /* Other members may use what it released. A refused try that released nothing wakes no
         * thread: a waiting one would wake itself. */
        if (news) mt_ledger_notify(mt_member_ledger(pool->member));
    } while (st == MT_ELIMIT && state_ask_others(pool, why.asked));
    if (st != MT_OK && err != NULL) *err = why;
    return st;
}

void
mt_kvpool_free(mt_kvpool *pool)
{
    mt_alloc mem = pool->mem;

    for (size_t i = 0; i < pool->slot_count; i++)
        slot_fini(pool, &pool->slots[i]);
    mem.put(mem.ctx, pool->slots, pool->slot_room * sizeof *pool->slots);
    mem.put(mem.ctx, pool->scratch, 3 * pool->geom.blocks * sizeof *pool->scratch);
    mt_gauge_subtract(pool->mapped_again, mt_kvpool_mapped_again(pool));
    mt_gauge_add_once(pool->mapped_again, 0 - (pool->live + pool->idle) * pool->geom.block_bytes);
    pool->store.close(pool->store.ctx);
    mt_lock_fini(&pool->lock);
    mem.put(mem.ctx, pool, sizeof *pool);
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
    mt_kvpool_free(pool);
}
