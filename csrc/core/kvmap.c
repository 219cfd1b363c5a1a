#include "kvpool_private.h"

#include <assert.h>

#include "size.h"

/* Mappings of one unit, each xor `key`: a slot's own, or with key 0 those it should have. */
typedef struct mt_unitmaps {
    const uint32_t *value; /* [blocks] */
    uint32_t key;
} mt_unitmaps;

static mt_unitmaps
maps_of(const mt_kvpool *pool, const mt_kvslot *s, size_t unit)
{
    return (mt_unitmaps){s->changed + unit * pool->geom.blocks, s->fresh};
}

static void
copy_maps(const mt_kvpool *pool, const mt_kvslot *s, size_t unit, uint32_t *out)
{
    mt_unitmaps from = maps_of(pool, s, unit);

    for (size_t tb = 0; tb < pool->geom.blocks; tb++)
        out[tb] = from.value[tb] ^ from.key;
}

static void
set_maps(mt_kvslot *s, size_t lo, size_t hi, uint32_t have)
{
    for (size_t i = lo; i < hi; i++)
        s->changed[i] = have ^ s->fresh;
}

/* Stretches of one unit. One that is mapped to a single home throughout is contiguous over its
 * ranges, in addresses and in the store; its own home is the arena's own stretch. */
static size_t
unit_maps(const mt_kvpool *pool, mt_unitmaps maps, uint32_t own)
{
    size_t runs = 1, n = pool->geom.blocks;
    uint32_t first = maps.value[0] ^ maps.key;

    for (size_t tb = 1; tb < n; tb++)
        runs += maps.value[tb] != maps.value[tb - 1];
    if (runs > 1) return runs * pool->geom.unit_ranges;
    return first != own && first != MT_HAVE_NONE;
}

static uint32_t
own_home(const mt_kvpool *pool, const mt_kvslot *s)
{
    return (uint32_t)(s - pool->slots) << 1;
}

size_t
mt_kvmap_count(const mt_kvpool *pool, const mt_kvslot *s)
{
    size_t maps = 0;

    for (size_t unit = 0; unit < pool->geom.units; unit++)
        maps += unit_maps(pool, maps_of(pool, s, unit), own_home(pool, s));
    return maps;
}

/* Maps blocks [lo, hi) of the unit's ranges to `to`. */
static mt_status
map_run(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t lo, size_t hi, uint32_t to,
        mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    const mt_store_ops *store = &pool->store;
    mt_map_kind kind = to & MT_HAVE_PRIVATE ? MT_MAP_PRIVATE : MT_MAP_SHARED;
    size_t bytes = (hi - lo) * g->part_bytes, at = unit * g->unit_bytes + lo * g->part_bytes;
    mt_status st = MT_OK;

    for (size_t r = 0; st == MT_OK && r < g->unit_ranges; r++, at += g->range_bytes) {
        pool->map_calls++;
        if (to == MT_HAVE_ZERO)
            st = store->map_zero(store->ctx, s->base + at, bytes, err);
        else
            st = store->map(store->ctx, s->base + at, bytes, pool->slots[to >> 1].offset + at, kind,
                            err);
    }
    return st;
}

static mt_status
map_changes(mt_kvpool *pool, mt_kvslot *s, size_t unit, const uint32_t *want, mt_error *err)
{
    size_t first = unit * pool->geom.blocks;
    mt_status st = MT_OK;

    for (size_t lo = 0, hi; st == MT_OK && lo < pool->geom.blocks; lo = hi) {
        bool same = mt_kvslot_have(s, first + lo) == want[lo];

        for (hi = lo + 1; hi < pool->geom.blocks && want[hi] == want[lo] &&
                          (mt_kvslot_have(s, first + hi) == want[hi]) == same;)
            hi++;
        if (same) continue;
        st = map_run(pool, s, unit, lo, hi, want[lo], err);
        set_maps(s, first + lo, first + hi, st == MT_OK ? want[lo] : MT_HAVE_UNKNOWN);
    }
    return st;
}

/* Brings the unit from `have` to `want`, unless that would be too many stretches. One stretch
 * always passes: to it a row moves when there are too many, and max_maps leaves the system a tenth.
 */
static mt_status
change(mt_kvpool *pool, mt_kvslot *s, size_t unit, const uint32_t *want, mt_error *err)
{
    size_t before = unit_maps(pool, maps_of(pool, s, unit), own_home(pool, s));
    size_t after = unit_maps(pool, (mt_unitmaps){want, 0}, own_home(pool, s));
    mt_status st;

    if (after > before && after > 1 && pool->maps - before + after > pool->store.max_maps)
        return mt_fail(err, MT_EAGAIN, "max_map_count", 0);
    st = map_changes(pool, s, unit, want, err);
    after = unit_maps(pool, maps_of(pool, s, unit), own_home(pool, s));
    pool->maps = pool->maps - before + after;
    s->maps = s->maps - before + after;
    return st;
}

/* What block tb should map, and whether `have` serves already. */
static uint32_t
wanted(const mt_kvpool *pool, const mt_kvslot *s, size_t tb, bool write, uint32_t have)
{
    uint32_t home = tb < s->taken ? s->table[tb] : MT_KV_ZERO, shared = home << 1;
    bool alone;

    if (tb >= s->taken && s->exposed && s->refs[tb] == 0) return own_home(pool, s);
    if (home == MT_KV_ZERO) return MT_HAVE_ZERO;
    if (have == shared || (!write && have == (shared | MT_HAVE_PRIVATE))) return have;
    alone = shared == own_home(pool, s) || pool->slots[home].refs[tb] == 1;
    return write || alone ? shared : shared | MT_HAVE_PRIVATE;
}

mt_status
mt_kvmap_follow(mt_kvpool *pool, size_t slot, size_t unit, const mt_kvspan *see,
                const mt_kvspan *write, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    uint32_t *want = pool->scratch, last, had = 0;
    bool changed = false;

    copy_maps(pool, s, unit, want);
    for (size_t tb = see->lo; tb < see->hi; tb++) {
        had = want[tb];
        want[tb] = wanted(pool, s, tb, tb >= write->lo && tb < write->hi, had);
        changed |= want[tb] != had;
    }
    if (!changed) return MT_OK;
    /* The same for what lies ahead costs nothing now and a call per range later. */
    last = want[see->hi - 1];
    if (pool->store.lazy && see->hi >= s->taken && last != had &&
        (last == MT_HAVE_ZERO || (last == own_home(pool, s) && write->hi > write->lo)))
        for (size_t tb = see->hi; tb < pool->geom.blocks; tb++)
            want[tb] = last;
    return change(pool, s, unit, want, err);
}

mt_status
mt_kvmap_unit(mt_kvpool *pool, size_t slot, size_t unit, uint32_t home, mt_error *err)
{
    assert(pool->store.lazy);
    for (size_t tb = 0; tb < pool->geom.blocks; tb++)
        pool->scratch[tb] = home << 1;
    return change(pool, &pool->slots[slot], unit, pool->scratch, err);
}

mt_status
mt_kvmap_home(mt_kvpool *pool, size_t slot, size_t unit, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    uint32_t *want = pool->scratch;

    assert(pool->store.lazy);
    copy_maps(pool, s, unit, want);
    for (size_t tb = s->taken; tb < pool->geom.blocks; tb++)
        want[tb] = own_home(pool, s);
    return change(pool, s, unit, want, err);
}

/* --- a whole home at once --- */

static size_t
times_named(const mt_kvslot *s, uint32_t home)
{
    size_t times = 0;

    for (size_t tb = 0; tb < s->taken; tb++)
        times += s->table[tb] == home;
    return times;
}

/* The home that names most of the table, of the two likeliest: the first block's, which is the
 * oldest ancestor's, and the middle one's. */
static uint32_t
main_home(const mt_kvslot *s)
{
    uint32_t first = s->table[0], middle = s->table[s->taken / 2];

    return times_named(s, first) >= times_named(s, middle) ? first : middle;
}

/* Whether following the table block by block touches less than half of it. */
static bool
mostly_mapped(const mt_kvslot *s)
{
    size_t same = 0;

    for (size_t tb = 0; tb < s->taken; tb++)
        same += mt_kvslot_have(s, tb) >> 1 == s->table[tb];
    return 2 * same >= s->taken;
}

static void
recount(mt_kvpool *pool, mt_kvslot *s)
{
    pool->maps -= s->maps;
    s->maps = mt_kvmap_count(pool, s);
    pool->maps += s->maps;
}

static mt_status
map_whole(mt_kvpool *pool, mt_kvslot *s, uint32_t to, mt_error *err)
{
    mt_map_kind kind = to & MT_HAVE_PRIVATE ? MT_MAP_PRIVATE : MT_MAP_SHARED;
    mt_status st = pool->store.map(pool->store.ctx, s->base, pool->geom.slot_bytes,
                                   pool->slots[to >> 1].offset, kind, err);

    pool->map_calls++;
    set_maps(s, 0, pool->geom.units * pool->geom.blocks, st == MT_OK ? to : MT_HAVE_UNKNOWN);
    recount(pool, s);
    return st;
}

mt_status
mt_kvmap_alias(mt_kvpool *pool, size_t slot, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    uint32_t home;

    if (!pool->store.lazy || s->taken == 0 || mostly_mapped(s)) return MT_OK;
    if ((home = main_home(s)) == MT_KV_ZERO || home == slot) return MT_OK;
    return map_whole(pool, s, home << 1 | MT_HAVE_PRIVATE, err);
}

void
mt_kvmap_reset(mt_kvpool *pool, size_t slot)
{
    mt_kvslot *s = &pool->slots[slot];

    if (pool->store.lazy && s->maps > 0) (void)map_whole(pool, s, own_home(pool, s), NULL);
}

bool
mt_kvmap_relax(mt_kvpool *pool)
{
    size_t before = pool->maps;

    for (size_t i = 0; i < pool->slot_count; i++)
        if (pool->slots[i].lease == NULL) mt_kvmap_reset(pool, i);
    return pool->maps < before;
}

/* --- the end of a row, the end of a block --- */

static bool
is_private(uint32_t have)
{
    return (have & MT_HAVE_PRIVATE) != 0; /* the special values are even */
}

void
mt_kvmap_settle(mt_kvpool *pool, size_t slot)
{
    mt_kvslot *s = &pool->slots[slot];
    size_t n = pool->geom.units * pool->geom.blocks, any = 0;

    if (!pool->store.private_writes) return;
    for (size_t i = 0; i < n; i++)
        any += is_private(mt_kvslot_have(s, i));
    if (any == 0) return;
    if (pool->store.settle(pool->store.ctx, s->base, pool->geom.slot_bytes, NULL) == MT_OK) return;
    for (size_t i = 0; i < n; i++)
        if (is_private(mt_kvslot_have(s, i))) set_maps(s, i, i + 1, MT_HAVE_UNKNOWN);
    recount(pool, s);
}

/* A live row's stale views read zeros from now on, rather than nothing at all. */
static uint32_t
clear_run(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t lo, size_t hi)
{
    const mt_kvgeom *g = &pool->geom;
    size_t bytes = (hi - lo) * g->part_bytes, at = unit * g->unit_bytes + lo * g->part_bytes;

    if (s->lease != NULL && map_run(pool, s, unit, lo, hi, MT_HAVE_ZERO, NULL) == MT_OK)
        return MT_HAVE_ZERO;
    for (size_t r = 0; r < g->unit_ranges; r++, at += g->range_bytes)
        pool->store.unmap(pool->store.ctx, s->base + at, bytes);
    return MT_HAVE_NONE;
}

static bool
may_map(uint32_t have, size_t home)
{
    return have >> 1 == home || have == MT_HAVE_UNKNOWN;
}

static void
forget_in(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t home, size_t from, size_t end)
{
    size_t first = unit * pool->geom.blocks;

    for (size_t lo = from, hi; lo < end; lo = hi + 1) {
        for (hi = lo; hi < end && may_map(mt_kvslot_have(s, first + hi), home);)
            hi++;
        if (hi > lo) set_maps(s, first + lo, first + hi, clear_run(pool, s, unit, lo, hi));
    }
}

void
mt_kvmap_forget(mt_kvpool *pool, size_t home, size_t lo, size_t hi)
{
    assert(!pool->store.lazy);
    for (size_t i = 0; i < pool->slot_count; i++) {
        mt_kvslot *s = &pool->slots[i];

        for (size_t unit = 0; unit < pool->geom.units; unit++)
            forget_in(pool, s, unit, home, lo, hi);
        recount(pool, s);
    }
}
