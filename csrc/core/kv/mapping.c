/* How this file works. A row's table says which blocks it names; its addresses are mapped to them
 * unit by unit, when a unit is used. Every change goes the same way: the unit's mappings as they
 * are (`had`) and as they should be (`want`) stand in two arrays, and `change` maps what differs,
 * in as few map areas as the blocks' numbers allow, unless there are too many. A whole slot can
 * also be mapped at once, to one extent or to zeros (map_whole). What is mapped where for a view is
 * counted in `sights`, so that the pool knows which pages the system counts more than once. */
#include "kv/mapping.h"

#include <assert.h>
#include <string.h>

#include "base/size.h"

/* --- what is in sight --- */

/* Counts that one more place of a unit, or one fewer, maps the block and is in sight. A block counts
 * as mapped again from more sights on than it has units. */
static void
count_sight(mt_kvpool *pool, uint32_t mapped, bool more)
{
    size_t bytes = pool->geom.unit_ranges * pool->geom.part_bytes;
    uint32_t *sights, with_it;

    if (!mt_kvmapped_is_block(mapped)) return;
    sights = &mt_kvblock_at(pool, mapped >> 1)->sights;
    assert(more || *sights > 0);
    with_it = more ? ++*sights : (*sights)--;
    if (with_it <= pool->geom.units) return;
    assert(more || pool->extra_sights > 0);
    pool->extra_sights += more ? 1 : SIZE_MAX;
    if (pool->mapped_again == NULL) return;
    if (more)
        mt_gauge_add(pool->mapped_again, bytes);
    else
        mt_gauge_subtract(pool->mapped_again, bytes);
}

static bool
is_in_sight(const mt_kvpool *pool, const mt_kvslot *s, size_t unit, size_t place)
{
    return s->in_sight[unit * pool->geom.blocks + place];
}

static void
set_in_sight(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t place, bool in_sight)
{
    if (is_in_sight(pool, s, unit, place) == in_sight) return;
    s->in_sight[unit * pool->geom.blocks + place] = in_sight;
    count_sight(pool, mt_kvslot_mapped(pool, s, unit, place), in_sight);
}

/* These places of the unit are in a view now. */
static void
map_see(mt_kvpool *pool, mt_kvslot *s, size_t unit, const mt_kvspan *span)
{
    for (size_t place = span->lo; place < span->hi; place++)
        set_in_sight(pool, s, unit, place, true);
    if (s->seen[unit] < span->hi) s->seen[unit] = (uint32_t)span->hi;
}

/* The system has no page-table entries for the slot's addresses. */
static void
see_nothing(mt_kvpool *pool, mt_kvslot *s)
{
    for (size_t unit = 0; unit < pool->geom.units; unit++) {
        for (size_t place = 0; place < s->seen[unit]; place++)
            set_in_sight(pool, s, unit, place, false);
        if (s->seen[unit] > 0) s->seen[unit] = 0;
    }
}

bool
mt_kvmap_is_seen_elsewhere(const mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    const mt_kvslot *s = &pool->slots[slot];
    size_t here = mt_kvblock_at(pool, block)->windowed ? pool->geom.units : 0;

    for (size_t unit = 0; unit < pool->geom.units; unit++)
        here += is_in_sight(pool, s, unit, place) &&
                mt_kvslot_mapped(pool, s, unit, place) >> 1 == block;
    return mt_kvblock_at(pool, block)->sights > here;
}

void
mt_kvmap_count_window(mt_kvpool *pool, uint32_t block, bool used)
{
    bool *windowed = &mt_kvblock_at(pool, block)->windowed;

    if (!pool->store.lazy || *windowed == used) return;
    *windowed = used;
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        count_sight(pool, block << 1, used);
}

mt_status
mt_kvmap_window(mt_kvpool *pool, uint32_t block, size_t at, void **out, mt_error *err)
{
    const mt_kvslot *extent = mt_kvblock_extent(pool, block);

    at += mt_kvblock_index(pool, block) * pool->geom.part_bytes;
    mt_kvmap_count_window(pool, block, true);
    return pool->store.window(pool->store.ctx, extent->offset + at, pool->geom.part_bytes, out,
                              err);
}

/* --- mappings as arrays --- */

static void
set_have(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t place, uint32_t mapped)
{
    uint32_t *differences = &s->differences[unit * pool->geom.blocks + place];
    uint32_t value = mapped ^ mt_kvslot_initial(s, place);

    if (*differences == value) return; /* an array of zeros that is never written takes no memory */
    if (is_in_sight(pool, s, unit, place)) {
        count_sight(pool, mt_kvslot_mapped(pool, s, unit, place), false);
        count_sight(pool, mapped, true);
    }
    *differences = value;
}

/* The unit's mappings as they are, in one third of the scratch; what they should be, which starts
 * with the same, in another. */
typedef struct unit_maps {
    uint32_t *want, *had;
} unit_maps;

static unit_maps
maps_of(mt_kvpool *pool, const mt_kvslot *s, size_t unit)
{
    unit_maps m = {pool->scratch, pool->scratch + pool->geom.blocks};

    for (size_t place = 0; place < pool->geom.blocks; place++)
        m.want[place] = m.had[place] = mt_kvslot_mapped(pool, s, unit, place);
    return m;
}

/* Whether a place mapped as `next` lies behind one mapped as `mapped` in one map area. */
static bool
continues(const mt_kvpool *pool, uint32_t mapped, uint32_t next)
{
    if (!mt_kvmapped_is_block(mapped) || !mt_kvmapped_is_block(next)) return mapped == next;
    return next == mapped + 2 && mt_kvblock_index(pool, next >> 1) != 0;
}

/* Map areas of one unit. One that is mapped to a single extent throughout is contiguous over its
 * ranges, in addresses and in the store; its own extent is the arena's own map area. */
static size_t
areas_of(const mt_kvpool *pool, const mt_kvslot *s, const uint32_t *maps)
{
    size_t runs = 1;

    for (size_t place = 1; place < pool->geom.blocks; place++)
        runs += !continues(pool, maps[place - 1], maps[place]);
    if (runs > 1) return runs * pool->geom.unit_ranges;
    return maps[0] != s->first_block << 1 && maps[0] != MT_MAPPED_NONE;
}

static size_t
areas_now(mt_kvpool *pool, const mt_kvslot *s, size_t unit)
{
    uint32_t *maps = pool->scratch + 2 * pool->geom.blocks; /* not the two of a change under way */

    for (size_t place = 0; place < pool->geom.blocks; place++)
        maps[place] = mt_kvslot_mapped(pool, s, unit, place);
    return areas_of(pool, s, maps);
}

size_t
mt_kvmap_count_areas(mt_kvpool *pool, const mt_kvslot *s)
{
    size_t maps = 0;

    for (size_t unit = 0; unit < pool->geom.units; unit++)
        maps += areas_now(pool, s, unit);
    return maps;
}

bool
mt_kvmap_shows(const mt_kvpool *pool, const mt_kvslot *s, size_t place, uint32_t block)
{
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        if (mt_kvslot_mapped(pool, s, unit, place) >> 1 == block) return true;
    return false;
}

/* --- changing them --- */

/* Bytes from the slot's base to `place` of the unit's first range. */
static size_t
at_place(const mt_kvpool *pool, size_t unit, size_t place)
{
    return unit * pool->geom.unit_bytes + place * pool->geom.part_bytes;
}

static mt_status
map_stretch(mt_kvpool *pool, void *at, size_t bytes, size_t offset, uint32_t to, mt_error *err)
{
    const mt_store_ops *store = &pool->store;
    mt_map_kind kind = to & MT_MAPPED_PRIVATE ? MT_MAP_PRIVATE : MT_MAP_SHARED;

    pool->ever.map_calls++;
    if (to == MT_MAPPED_ZERO) return store->map_zero(store->ctx, at, bytes, err);
    return store->map(store->ctx, at, bytes, offset, kind, err);
}

/* Maps places [lo, hi) of the unit's ranges to a run of blocks from `to` on; a whole unit is one
 * map area. */
static mt_status
map_run(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t lo, size_t hi, uint32_t to,
        mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    bool whole = hi - lo == g->blocks;
    size_t bytes = whole ? g->unit_bytes : (hi - lo) * g->part_bytes, offset = 0;
    char *at = s->base + at_place(pool, unit, lo);
    mt_status st = MT_OK;

    if (to != MT_MAPPED_ZERO)
        offset = mt_kvblock_extent(pool, to >> 1)->offset +
                 at_place(pool, unit, mt_kvblock_index(pool, to >> 1));
    for (size_t r = 0; st == MT_OK && r < (whole ? 1 : g->unit_ranges); r++) {
        st = map_stretch(pool, at, bytes, offset, to, err);
        at += g->range_bytes;
        offset += g->range_bytes;
    }
    return st;
}

/* What was written privately over the block at this place goes into the block. */
static mt_status
save_private(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t place, mt_error *err)
{
    const mt_kvgeom *g = &pool->geom;
    uint32_t block = mt_kvslot_mapped(pool, s, unit, place) >> 1;
    const char *from = s->base + at_place(pool, unit, place);
    mt_status st = MT_OK;
    void *to;

    if (!pool->store.private_writes) return MT_OK;
    for (size_t r = 0; st == MT_OK && r < g->unit_ranges; r++, from += g->range_bytes) {
        st = mt_kvmap_window(pool, block, unit * g->unit_bytes + r * g->range_bytes, &to, err);
        if (st == MT_OK) st = pool->store.copy(pool->store.ctx, to, from, g->part_bytes, err);
    }
    return st;
}

mt_status
mt_kvmap_save_private(mt_kvpool *pool, size_t slot, size_t place, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    uint32_t mine = s->table[place] << 1 | MT_MAPPED_PRIVATE;
    mt_status st = MT_OK;

    assert(mt_kvblock_at(pool, s->table[place])->refs == 1);
    for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++)
        if (mt_kvslot_mapped(pool, s, unit, place) == mine)
            st = save_private(pool, s, unit, place, err);
    return st;
}

static mt_status
map_changes(mt_kvpool *pool, mt_kvslot *s, size_t unit, unit_maps m, mt_error *err)
{
    mt_status st = MT_OK;

    for (size_t lo = 0, hi; st == MT_OK && lo < pool->geom.blocks; lo = hi) {
        hi = lo + 1;
        if (m.want[lo] == m.had[lo]) continue;
        while (hi < pool->geom.blocks && m.want[hi] != m.had[hi] &&
               continues(pool, m.want[hi - 1], m.want[hi]))
            hi++;
        for (size_t place = lo; st == MT_OK && place < hi && place < s->taken; place++)
            if (m.had[place] == (m.want[place] | MT_MAPPED_PRIVATE) &&
                is_in_sight(pool, s, unit, place))
                st = save_private(pool, s, unit, place, err);
        if (st != MT_OK) return st;
        st = map_run(pool, s, unit, lo, hi, m.want[lo], err);
        s->broken |= st != MT_OK;
        for (size_t place = lo; place < hi; place++)
            set_have(pool, s, unit, place, st == MT_OK ? m.want[place] : MT_MAPPED_UNKNOWN);
    }
    return st;
}

/* Whether the pool may have so many map areas. The process has one limit for all that it maps, so
 * this reads from the system what is left. A quarter of that is this pool's until the next reading,
 * as others may map, too. A reading takes milliseconds if there are many areas, so a refusal stands
 * for some time. */
static bool
may_have(mt_kvpool *pool, size_t maps)
{
    enum { ASK_AGAIN = 256 };
    const mt_store_ops *store = &pool->store;

    if (maps <= pool->maps_allowed) return true;
    if (maps > store->max_maps) return false;
    if (store->maps_left == NULL) return true;
    if (pool->refusals > 0) {
        pool->refusals++;
        if (pool->refusals <= ASK_AGAIN) return false;
    }
    pool->maps_allowed = pool->maps + store->maps_left(store->ctx) / 4;
    pool->refusals = maps > pool->maps_allowed;
    return pool->refusals == 0;
}

/* How many map areas a change may take. */
typedef enum limit {
    ALLOWED,      /* as many as the pool may have now */
    AFTER_OTHERS, /* as many as it may have, if need be without those of free slots */
    ANY_NUMBER
} limit;

/* Brings the unit to m.want, if it is not there, or fails with MT_EAGAIN where that takes too many
 * map areas. Only this function gives up mappings of free slots for those of a row and tries
 * again. One map area always passes: to it a row moves when there are too many. An exposed row does not move:
 * code writes into its extent. */
static mt_status
change(mt_kvpool *pool, mt_kvslot *s, size_t unit, unit_maps m, limit most, mt_error *err)
{
    size_t before, after;
    mt_status st;

    if (memcmp(m.want, m.had, pool->geom.blocks * sizeof *m.want) == 0) return MT_OK;
    before = areas_of(pool, s, m.had);
    after = areas_of(pool, s, m.want);
    if (most != ANY_NUMBER && after > before && after > 1 && !s->exposed &&
        !may_have(pool, pool->maps - before + after) &&
        !(most == AFTER_OTHERS && mt_kvmap_unmap_idle(pool) &&
          may_have(pool, pool->maps - before + after)))
        return mt_fail(err, MT_EAGAIN, MT_STORE_MAPS, 0);
    st = map_changes(pool, s, unit, m, err);
    after = areas_now(pool, s, unit); /* fewer or more where it failed half-way */
    pool->maps = pool->maps - before + after;
    s->maps = s->maps - before + after;
    return st;
}

static void
map_recount(mt_kvpool *pool, mt_kvslot *s)
{
    pool->maps -= s->maps;
    s->maps = mt_kvmap_count_areas(pool, s);
    pool->maps += s->maps;
}

void
mt_kvmap_forget_private(mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    mt_kvslot *s = &pool->slots[slot];
    bool found = false;

    for (size_t unit = 0; unit < pool->geom.units; unit++) {
        if (mt_kvslot_mapped(pool, s, unit, place) != (block << 1 | MT_MAPPED_PRIVATE)) continue;
        set_have(pool, s, unit, place, MT_MAPPED_UNKNOWN);
        found = true;
    }
    if (found) map_recount(pool, s);
}

/* --- following the table --- */

static uint32_t
named_at(const mt_kvslot *s, size_t place)
{
    return place < s->taken ? s->table[place] : MT_KV_ZERO;
}

/* What `place` should map, if not what it has. A row that wrote to a block which others name as
 * well goes on mapping it as it did; but not one that finds it mapped so by the row before it. */
static uint32_t
wanted(const mt_kvpool *pool, const mt_kvslot *s, size_t unit, size_t place, bool write)
{
    uint32_t block = named_at(s, place), shared = block << 1;
    uint32_t mapped = mt_kvslot_mapped(pool, s, unit, place);

    if (place >= s->taken && s->exposed && s->blocks[place].refs == 0)
        return mt_kvslot_block(s, place) << 1;
    if (block == MT_KV_ZERO) return MT_MAPPED_ZERO;
    if (!write && mapped == (shared | MT_MAPPED_PRIVATE)) return mapped;
    if (write || mt_kvblock_at(pool, block)->refs == 1) return shared;
    if (mapped == shared && (s->exposed || is_in_sight(pool, s, unit, place))) return mapped;
    return shared | MT_MAPPED_PRIVATE;
}

/* The same for what lies ahead costs nothing now and a call per range later: zeros, or the blocks
 * behind a row's last one, which it will rather take than others. Not where a view has been: it
 * shows zeros there, and goes on to. */
static void
look_ahead(const mt_kvpool *pool, const mt_kvslot *s, unit_maps m, size_t end, bool write)
{
    uint32_t last = m.want[end - 1];

    if (!pool->store.lazy || end < s->taken || end < s->reach || last == m.had[end - 1]) return;
    if (last == MT_MAPPED_ZERO)
        for (size_t place = end; place < pool->geom.blocks; place++)
            m.want[place] = MT_MAPPED_ZERO;
    else if (write)
        for (size_t place = end; place < pool->geom.blocks && continues(pool, last, last + 2);
             place++)
            m.want[place] = last += 2;
}

mt_status
mt_kvmap_follow(mt_kvpool *pool, size_t slot, size_t unit, const mt_kvspan *span,
                const mt_kvspan *write, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    unit_maps m = maps_of(pool, s, unit);
    mt_status st;

    assert(span->lo < span->hi && span->hi <= pool->geom.blocks);
    s->reach = mt_size_max(s->reach, mt_size_max(span->hi, s->taken));
    for (size_t place = span->lo; place < span->hi; place++)
        m.want[place] = wanted(pool, s, unit, place, place >= write->lo && place < write->hi);
    look_ahead(pool, s, m, span->hi, write->hi > write->lo);
    st = change(pool, s, unit, m, AFTER_OTHERS, err);
    if (st == MT_OK) map_see(pool, s, unit, span);
    return st;
}

mt_status
mt_kvmap_own_extent(mt_kvpool *pool, size_t slot, size_t unit, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    unit_maps m = maps_of(pool, s, unit);

    assert(pool->store.lazy);
    s->reach = pool->geom.blocks;
    for (size_t place = s->taken; place < pool->geom.blocks; place++) {
        assert(s->blocks[place].refs == 0);
        m.want[place] = mt_kvslot_block(s, place) << 1;
    }
    return change(pool, s, unit, m, ALLOWED, err);
}

/* --- leaving blocks --- */

/* Whether a place that maps `mapped` shows what the row neither names there nor has for itself. */
static bool
maps_other_block(const mt_kvpool *pool, const mt_kvslot *s, size_t place, uint32_t mapped)
{
    const mt_kvslot *extent;

    if (mapped == MT_MAPPED_UNKNOWN) return true;
    if (!mt_kvmapped_is_block(mapped) || mapped >> 1 == named_at(s, place)) return false;
    extent = mt_kvblock_extent(pool, mapped >> 1);
    if (mt_kvblock_index(pool, mapped >> 1) != place || extent->blocks[place].refs > 0) return true;
    return !extent->exposed || extent != s;
}

/* Places where a view has been map the table again: all of them, as many map areas as that takes,
 * because the row had about as many before; or those that map a block which the row no longer names. */
static mt_status
follow_again(mt_kvpool *pool, mt_kvslot *s, bool all, mt_error *err)
{
    mt_status st = MT_OK;

    for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++) {
        unit_maps m = maps_of(pool, s, unit);

        for (size_t place = 0; place < s->reach; place++) {
            if (!all && !maps_other_block(pool, s, place, m.had[place])) continue;
            m.want[place] = wanted(pool, s, unit, place, false);
            if (m.want[place] == m.had[place]) continue;
            /* Also where all was mapped at once. */
            map_see(pool, s, unit, &(mt_kvspan){place, place + 1});
        }
        st = change(pool, s, unit, m, all ? ANY_NUMBER : AFTER_OTHERS, err);
    }
    return st;
}

mt_status
mt_kvmap_clear_stale(mt_kvpool *pool, mt_error *err)
{
    mt_status all = MT_OK;

    for (size_t i = 0; pool->stale > 0 && i < pool->slot_count; i++) {
        mt_kvslot *s = &pool->slots[i];
        mt_status st;

        if (!s->stale) continue;
        st = follow_again(pool, s, false, err);
        if (st == MT_EAGAIN) {
            all = st;
            continue;
        }
        if (st != MT_OK) return st;
        s->stale = s->broken = false;
        pool->stale--;
    }
    return all;
}

/* Maps all of the slot: to an extent, or to zeros. */
static mt_status
map_whole(mt_kvpool *pool, mt_kvslot *s, uint32_t to, mt_error *err)
{
    size_t offset = to == MT_MAPPED_ZERO ? 0 : mt_kvblock_extent(pool, to >> 1)->offset;
    mt_status st = map_stretch(pool, s->base, pool->geom.slot_bytes, offset, to, err);

    s->broken = st != MT_OK;
    see_nothing(pool, s);
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        for (size_t place = 0; place < pool->geom.blocks; place++) {
            uint32_t mapped = to == MT_MAPPED_ZERO ? to : to + 2 * (uint32_t)place;

            set_have(pool, s, unit, place, st == MT_OK ? mapped : MT_MAPPED_UNKNOWN);
        }
    map_recount(pool, s);
    return st;
}

mt_status
mt_kvmap_zeros(mt_kvpool *pool, size_t slot, mt_error *err)
{
    enum { TRIES = 2 }; /* what others have is at stake */
    mt_status st = MT_EAGAIN;

    for (int i = 0; st != MT_OK && pool->store.lazy && i < TRIES; i++)
        st = map_whole(pool, &pool->slots[slot], MT_MAPPED_ZERO, err);
    return st;
}

mt_status
mt_kvmap_restore(mt_kvpool *pool, size_t slot)
{
    if (follow_again(pool, &pool->slots[slot], true, NULL) == MT_OK) return MT_OK;
    return mt_kvmap_zeros(pool, slot, NULL);
}

bool
mt_kvmap_has_private(const mt_kvpool *pool, size_t slot, size_t end)
{
    const mt_kvslot *s = &pool->slots[slot];

    assert(end <= s->taken);
    for (size_t unit = 0; pool->store.private_writes && unit < pool->geom.units; unit++)
        for (size_t place = 0; place < end; place++)
            if (mt_kvslot_mapped(pool, s, unit, place) ==
                (s->table[place] << 1 | MT_MAPPED_PRIVATE))
                return true;
    return false;
}

bool
mt_kvmap_next_private(const mt_kvpool *pool, size_t slot, size_t *at, size_t *place)
{
    const mt_kvgeom *g = &pool->geom;
    const mt_kvslot *s = &pool->slots[slot];

    while (*at < g->slot_bytes) {
        size_t unit, step = g->part_bytes;

        *at += pool->store.written(pool->store.ctx, s->base + *at, g->slot_bytes - *at);
        if (*at >= g->slot_bytes) break;
        unit = *at / g->unit_bytes;
        *place = *at % g->range_bytes / step;
        *at = (*at / step + 1) * step;
        if (*place >= s->taken || s->table[*place] == MT_KV_ZERO) continue;
        if (mt_kvslot_mapped(pool, s, unit, *place) == (s->table[*place] << 1 | MT_MAPPED_PRIVATE))
            return true;
    }
    return false;
}

/* The system may keep page-table entries for the addresses: they are in sight still. */
mt_status
mt_kvmap_drop_private(mt_kvpool *pool, size_t slot)
{
    const mt_kvgeom *g = &pool->geom;
    const mt_kvslot *s = &pool->slots[slot];
    size_t at = 0, place;
    mt_status st = MT_OK;

    if (!mt_kvmap_has_private(pool, slot, s->taken)) return MT_OK;
    while (st == MT_OK && mt_kvmap_next_private(pool, slot, &at, &place))
        st = pool->store.settle(pool->store.ctx, s->base + at - g->part_bytes, g->part_bytes, NULL);
    return st;
}

bool
mt_kvmap_must_leave(const mt_kvpool *pool, size_t slot, uint32_t block)
{
    const mt_kvslot *extent = mt_kvblock_extent(pool, block);

    return mt_kvblock_at(pool, block)->refs > 1 ||
           (extent->exposed && extent != &pool->slots[slot]);
}

/* Places that must leave their blocks map zeros: `anyway`, or unless that takes too many map areas;
 * all, or only those where a write would reach the block. */
static mt_status
map_leave(mt_kvpool *pool, size_t slot, const mt_kvspan *span, bool anyway, bool writable,
          mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    mt_status st = MT_OK;

    for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++) {
        unit_maps m = maps_of(pool, s, unit);

        for (size_t place = span->lo; place < span->hi; place++) {
            if (s->table[place] == MT_KV_ZERO) continue;
            if (!mt_kvmap_must_leave(pool, slot, s->table[place])) continue;
            if (writable && m.had[place] == (s->table[place] << 1 | MT_MAPPED_PRIVATE)) continue;
            if (m.had[place] == MT_MAPPED_UNKNOWN || m.had[place] >> 1 == s->table[place])
                m.want[place] = MT_MAPPED_ZERO;
        }
        st = change(pool, s, unit, m, anyway ? ANY_NUMBER : AFTER_OTHERS, err);
    }
    return st;
}

mt_status
mt_kvmap_leave(mt_kvpool *pool, size_t slot, const mt_kvspan *span, bool anyway, mt_error *err)
{
    mt_status st = map_leave(pool, slot, span, anyway, false, err);

    if (st == MT_OK) return st;
    if (mt_kvmap_has_private(pool, slot, span->lo) &&
        map_leave(pool, slot, span, true, true, NULL) == MT_OK)
        return st;
    return mt_kvmap_zeros(pool, slot, err);
}

/* Whether a place that maps `mapped` must leave it before the row's table becomes another one. It
 * leaves what no row may have as well, so that it is free for others: mt_kvmap_clear_stale may
 * find too few map areas for that, and cannot map all of a row to zeros, whose views must go on. */
static bool
must_change(const mt_kvpool *pool, const mt_kvslot *s, size_t place, uint32_t mapped, uint32_t next)
{
    const mt_kvslot *extent;

    if (mapped == MT_MAPPED_UNKNOWN) return true;
    if (!mt_kvmapped_is_block(mapped) || mapped >> 1 == next) return false;
    if (mapped >> 1 == named_at(s, place)) return true;
    extent = mt_kvblock_extent(pool, mapped >> 1);
    return mt_kvblock_at(pool, mapped >> 1)->refs > 0 || (extent->exposed && extent != s);
}

mt_status
mt_kvmap_leave_for_table(mt_kvpool *pool, size_t slot, const uint32_t *table, size_t taken,
                         uint32_t own, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    size_t end = mt_size_max(s->reach, taken);
    mt_status st = MT_OK;

    assert(taken <= pool->geom.blocks);
    for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++) {
        unit_maps m = maps_of(pool, s, unit);

        for (size_t place = 0; place < end; place++) {
            uint32_t next = place < taken ? table[place] : MT_KV_ZERO;

            /* Blocks are mapped privately, but for the row's own one: whether it will be alone with
             * the others is not known before all rows have changed. */
            if (must_change(pool, s, place, m.had[place], next))
                m.want[place] =
                    next << 1 | (next == own || next == MT_KV_ZERO ? 0 : MT_MAPPED_PRIVATE);
        }
        st = change(pool, s, unit, m, AFTER_OTHERS, err);
    }
    return st;
}

/* --- a whole extent at once --- */

/* Block 0 of the extent that the most of the table lies in, each block at its own place, of the two
 * likeliest: the first block's, which is the oldest ancestor's, and the middle one's. MT_KV_ZERO:
 * half of the table does not. */
static uint32_t
main_extent(const mt_kvpool *pool, const mt_kvslot *s)
{
    uint32_t blocks[] = {s->table[0], s->table[s->taken / 2]}, best = MT_KV_ZERO;
    size_t most = (s->taken - 1) / 2;

    for (size_t i = 0; i < 2; i++) {
        size_t times = 0;
        uint32_t first;

        if (blocks[i] == MT_KV_ZERO) continue;
        first = mt_kvblock_extent(pool, blocks[i])->first_block;
        for (size_t place = 0; place < s->taken; place++)
            times += s->table[place] == first + place;
        if (times <= most) continue;
        most = times;
        best = first;
    }
    return best;
}

/* Whether following the table block by block touches the last one at most, which a row that was
 * here before had a copy of. Anything else takes a call for each range. */
static bool
map_is_mapped(const mt_kvpool *pool, const mt_kvslot *s)
{
    size_t same = 0;

    for (size_t place = 0; place < s->taken; place++)
        same += mt_kvslot_mapped(pool, s, 0, place) >> 1 == s->table[place];
    return same + 1 >= s->taken;
}

mt_status
mt_kvmap_main_extent(mt_kvpool *pool, size_t slot, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    uint32_t first;

    if (!pool->store.lazy || s->taken == 0 || map_is_mapped(pool, s)) return MT_OK;
    if ((first = main_extent(pool, s)) == MT_KV_ZERO || first == s->first_block) return MT_OK;
    return map_whole(pool, s, first << 1 | MT_MAPPED_PRIVATE, err);
}

mt_status
mt_kvmap_extent(mt_kvpool *pool, size_t slot, size_t extent, size_t end, mt_error *err)
{
    mt_kvslot *s = &pool->slots[slot];
    mt_kvspan views = {0, end};
    mt_status st = map_whole(pool, s, pool->slots[extent].first_block << 1, err);

    assert(pool->store.lazy);
    for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++)
        map_see(pool, s, unit, &views);
    return st;
}

static void
unmap_idle_slot(mt_kvpool *pool, mt_kvslot *s)
{
    assert(s->lease == NULL && pool->store.lazy);
    (void)map_whole(pool, s, s->first_block << 1, NULL);
}

bool
mt_kvmap_unmap_idle(mt_kvpool *pool)
{
    size_t before = pool->maps;

    for (size_t i = 0; i < pool->slot_count; i++)
        if (pool->slots[i].lease == NULL && pool->slots[i].maps > 0)
            unmap_idle_slot(pool, &pool->slots[i]);
    return pool->maps < before;
}

/* --- the end of a row, the end of a block --- */

/* Whether what the place of a finished row shows must be dropped: code may have written there what
 * is in no block and would stay with the addresses; or another row, or other addresses such as the
 * window's, have the block as well. */
static bool
must_reset(const mt_kvpool *pool, const mt_kvslot *s, size_t unit, size_t place)
{
    uint32_t mapped = mt_kvslot_mapped(pool, s, unit, place);
    bool is_block = mt_kvmapped_is_block(mapped);
    const mt_kvblock *b;

    if (place < s->reach && (is_block ? mapped & MT_MAPPED_PRIVATE : mapped != MT_MAPPED_NONE))
        return true;
    if (!is_block || !is_in_sight(pool, s, unit, place)) return false;
    b = mt_kvblock_at(pool, mapped >> 1);
    return b->refs > 0 || b->sights > pool->geom.units;
}

/* Drops what those places of the unit show. */
static mt_status
reset_unit(mt_kvpool *pool, mt_kvslot *s, size_t unit)
{
    const mt_kvgeom *g = &pool->geom;
    size_t end = mt_size_max(s->seen[unit], s->reach);
    mt_status st = MT_OK;

    for (size_t lo = 0, hi; st == MT_OK && lo < end; lo = hi + 1) {
        char *at = s->base + at_place(pool, unit, lo);

        for (hi = lo; hi < end && must_reset(pool, s, unit, hi);)
            hi++;
        for (size_t r = 0; st == MT_OK && hi > lo && r < g->unit_ranges; r++, at += g->range_bytes)
            st = pool->store.settle(pool->store.ctx, at, (hi - lo) * g->part_bytes, NULL);
        for (size_t place = lo; st == MT_OK && place < hi; place++)
            set_in_sight(pool, s, unit, place, false);
    }
    return st;
}

static mt_status
reset_slot(mt_kvpool *pool, mt_kvslot *s)
{
    mt_status st = pool->store.settle(pool->store.ctx, s->base, pool->geom.slot_bytes, NULL);

    if (st == MT_OK) see_nothing(pool, s);
    return st;
}

/* Whether a slot without a row may keep its map areas: not so many that others lack them, nor so
 * scattered that the next row had better map again. */
static bool
may_keep(const mt_kvpool *pool, const mt_kvslot *s)
{
    enum { EACH_RANGE = 3 }; /* what is shared, the row's own, and what lies ahead */

    return pool->maps <= pool->store.max_maps / 4 &&
           s->maps <= EACH_RANGE * pool->geom.units * pool->geom.unit_ranges;
}

void
mt_kvmap_end_row(mt_kvpool *pool, size_t slot)
{
    mt_kvslot *s = &pool->slots[slot];
    size_t must = 0, others = 0; /* places to release, and other ones in sight */
    mt_status st = MT_OK;

    assert(s->lease == NULL);
    if (!pool->store.lazy) return;
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        for (size_t place = 0; place < mt_size_max(s->seen[unit], s->reach); place++)
            if (must_reset(pool, s, unit, place))
                must++;
            else
                others += is_in_sight(pool, s, unit, place);
    if (must == 0) return;
    if (!may_keep(pool, s))
        st = MT_EAGAIN;
    else if (others == 0)
        st = reset_slot(pool, s);
    else
        for (size_t unit = 0; st == MT_OK && unit < pool->geom.units; unit++)
            st = reset_unit(pool, s, unit);
    if (st != MT_OK) unmap_idle_slot(pool, s);
}

static bool
has_in_sight(const mt_kvpool *pool, const mt_kvslot *s, uint32_t block)
{
    for (size_t unit = 0; unit < pool->geom.units; unit++)
        for (size_t place = 0; place < s->seen[unit]; place++)
            if (is_in_sight(pool, s, unit, place) &&
                mt_kvslot_mapped(pool, s, unit, place) >> 1 == block)
                return true;
    return false;
}

static void
hide(mt_kvpool *pool, mt_kvslot *s, uint32_t block)
{
    if (s->lease != NULL || !has_in_sight(pool, s, block)) return;
    if (reset_slot(pool, s) != MT_OK) unmap_idle_slot(pool, s);
}

/* The block is nearly always in sight of its extent, and mostly of no other slot. */
void
mt_kvmap_hide_in_free_slots(mt_kvpool *pool, size_t slot, size_t place, uint32_t block)
{
    if (!pool->store.lazy || !mt_kvmap_is_seen_elsewhere(pool, slot, place, block)) return;
    hide(pool, mt_kvblock_extent(pool, block), block);
    for (size_t i = 0; i < pool->slot_count && mt_kvmap_is_seen_elsewhere(pool, slot, place, block);
         i++)
        hide(pool, &pool->slots[i], block);
}

/* A live row's stale views read zeros from now on, rather than nothing at all. */
static uint32_t
clear_run(mt_kvpool *pool, mt_kvslot *s, size_t unit, size_t lo, size_t hi)
{
    const mt_kvgeom *g = &pool->geom;
    size_t bytes = (hi - lo) * g->part_bytes, at = at_place(pool, unit, lo);

    if (s->lease != NULL && map_run(pool, s, unit, lo, hi, MT_MAPPED_ZERO, NULL) == MT_OK)
        return MT_MAPPED_ZERO;
    for (size_t r = 0; r < g->unit_ranges; r++, at += g->range_bytes)
        pool->store.unmap(pool->store.ctx, s->base + at, bytes);
    return MT_MAPPED_NONE;
}

static bool
may_map(uint32_t mapped, uint32_t first, uint32_t end)
{
    if (!mt_kvmapped_is_block(mapped)) return mapped == MT_MAPPED_UNKNOWN;
    return mapped >> 1 >= first && mapped >> 1 < end;
}

void
mt_kvmap_unmap(mt_kvpool *pool, uint32_t first, uint32_t end)
{
    assert(!pool->store.lazy);
    for (size_t i = 0; i < pool->slot_count; i++) {
        mt_kvslot *s = &pool->slots[i];
        bool changed = false;

        for (size_t unit = 0; unit < pool->geom.units; unit++)
            for (size_t lo = 0, hi; lo < pool->geom.blocks; lo = hi + 1) {
                uint32_t left;

                for (hi = lo; hi < pool->geom.blocks &&
                              may_map(mt_kvslot_mapped(pool, s, unit, hi), first, end);)
                    hi++;
                if (hi == lo) continue;
                left = clear_run(pool, s, unit, lo, hi);
                for (size_t place = lo; place < hi; place++)
                    set_have(pool, s, unit, place, left);
                changed = true;
            }
        if (changed) map_recount(pool, s);
    }
}
