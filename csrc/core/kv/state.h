/* state.h -- the structures behind kv.h, for this room: slots, blocks, leases, and the pool's lock.
 *
 *   pool -- slot 0:  addresses | row's table | extent: blocks 0 ... n-1      of the store
 *        |  slot 1:  addresses | row's table | extent: blocks n ... 2n-1
 *        |  slot 2:  ...
 *
 *   table[place] = number of the block that holds the row's tokens of that place
 *   number       = slot of the extent x n + the block's index in the extent
 *
 * A slot is two things. It is a range of addresses, with the row that lives there; the range has n
 * places of one block each. And it is an *extent*: a part of the store with room for n blocks. A
 * block has one number in the whole pool, and any row may name it at any place of its table. A
 * fresh row names the blocks of its own slot's extent, each at its own place, so that addresses and
 * store run in parallel: one mapping for a whole arena of slots. A forked row names its parent's
 * blocks, and a row that finds idle blocks elsewhere names those.
 *
 *   block            refs > 0            live: so many rows name it
 *                    refs = 0, resident  idle: physical, and its content means nothing
 *                    refs = 0            nothing
 *
 * Each slot keeps what its addresses map now, for each unit and place: a *mapping*, which is a
 * block, zeros, or nothing. Mappings follow the table late. They are kept as differences from what
 * a new arena maps, so that rows and tokens that are never used cost no memory: the arrays come as
 * zeros, and pages that are never written take no memory.
 *
 * A place of a unit is *in sight* when a view may have touched its addresses, so that the system
 * may have page-table entries for them. The pages of a block that is in sight at several places are
 * counted several times in the resident set of the process; `sights` counts those places.
 *
 * Isolation. An address that a view of a lease has ever shown maps one of
 *   - the block that the lease's row names at that place,
 *   - zeros,
 *   - an idle block that the row *let go* of: no row's content. Before that block is taken or
 *     dropped, all such addresses change (mt_kvmap_clear_stale),
 *   - a block of its own extent, while the row is exposed: no other row takes one there.
 * So a row lets go of a block that another row names only after its addresses have left it. */
#ifndef MT_KV_STATE_H
#define MT_KV_STATE_H

#include <assert.h>

#include "base/lock.h"
#include "kv/kv.h"

enum {
    MT_KV_ZERO = 0x7FFFFFFF, /* in a table: these tokens are zeros and no block holds them */
    MT_KV_MOST = 0x7FFFFFF0, /* blocks that a pool may have */
};
#define MT_KV_ANY  UINT32_MAX /* to take: whichever block costs least */
#define MT_KV_MANY UINT32_MAX /* in let_go: more than one slot */

/* A mapping: block << 1 | private, or one of these. */
enum { MT_MAPPED_PRIVATE = 1 };
#define MT_MAPPED_ZERO    UINT32_C(0xFFFFFFFE) /* MT_KV_ZERO << 1 */
#define MT_MAPPED_NONE    UINT32_C(0xFFFFFFFC) /* nothing is mapped */
#define MT_MAPPED_UNKNOWN UINT32_C(0xFFFFFFFA) /* a call failed half-way: map again */

typedef struct mt_kvblock {
    uint32_t refs;   /* rows that name it */
    uint32_t let_go; /* the slot + 1 whose row let go of it and may map it still; MT_KV_MANY; 0 */
    uint32_t sights; /* places of units, over all slots, that map it and are in sight */
    bool resident;   /* it is physical, as far as we took it */
    bool windowed;   /* its window was used, and counts as a sight in each unit */
    bool counted;    /* for mt_kvpool_stats: among the blocks of leases that linger */
} mt_kvblock;

typedef struct mt_kvslot {
    mt_kvlease *lease;    /* NULL: free */
    char *base;           /* addresses */
    size_t offset;        /* of the extent's blocks in the store; laid out as the addresses are */
    uint64_t used_at;     /* the pool's clock at the last release */
    uint32_t first_block; /* the number of the extent's block 0 */
    mt_kvblock *blocks;   /* [blocks] of the extent */
    size_t named;         /* of them: with refs > 0 */
    size_t idle;          /* of them: resident with refs = 0 */
    /* Of the row and the addresses: */
    uint32_t *table;       /* [blocks] of the row: a block's number, or MT_KV_ZERO */
    size_t taken;          /* table[0 .. taken) is valid: covers the row's tokens */
    size_t reach;          /* places [0, reach) were in a view or the table since it was lent */
    uint32_t *differences; /* [units x blocks] mappings, each xor what a new arena maps there */
    bool *in_sight;        /* [units x blocks] see above */
    uint32_t *seen;        /* [units] places from here on are not in sight */
    size_t maps;           /* map areas its addresses are mapped in, beyond the arena's one */
    size_t extent;         /* the slot whose extent the row moved to; its own where it did not */
    bool lazy;             /* a new arena maps the extent, not nothing */
    bool stale;            /* the row let go of blocks that its addresses may map still */
    bool broken;           /* a call that was to change its addresses failed half-way */
    bool exposed;          /* pages may appear on touch past `taken` */
} mt_kvslot;

struct mt_kvpool {
    mt_alloc mem;
    mt_store_ops store;
    mt_kvgeom geom;
    mt_member *member;
    mt_lock lock; /* guards everything below, and all slots */
    mt_kvslot *slots;
    size_t slot_count, slot_room; /* arenas x max_rows */
    uint32_t *scratch; /* [3 x blocks] mappings of a unit: wanted, had, and to be counted */
    size_t live, idle, promised; /* blocks; live + max(idle, promised) are reserved */
    size_t reserved;             /* blocks, in the ledger */
    size_t peak;                 /* largest live + idle */
    size_t maps;                 /* map areas, over all slots and arenas */
    size_t maps_allowed;         /* so many before the system is asked again */
    size_t refusals;             /* for want of map areas, since it was asked */
    size_t stale;                /* slots that are */
    size_t extra_sights;         /* sights beyond the first of each block in each unit */
    mt_gauge *mapped_again;      /* the same in bytes, with other pools'; or NULL */
    uint64_t clock;
    mt_kvlease *leases; /* doubly linked: alive and lingering */
    bool notify_due;    /* blocks became idle, and threads that wait in the ledger were not woken */
    bool closed;
    mt_kvstats ever; /* the counts of what was done; the rest of it is zeros */
};

/* What is known of one layer of a row, and of one unit; what it means stands in prepare.h. */
typedef struct mt_kvlayer_marks {
    uint32_t length, writable_to, zero_to;
} mt_kvlayer_marks;
typedef struct mt_kvunit_marks {
    uint32_t owned_from, owned_to, mapped_to;
} mt_kvunit_marks;

struct mt_kvlease {
    mt_kvpool *pool;
    mt_kvlease *prev, *next;
    size_t first, rows, max_rows; /* slots first .. first + max_rows are ours */
    size_t promised;              /* blocks */
    size_t holds;                 /* the owner's, and hold()'s; guarded by the pool's lock */
    bool released;
    bool exposed;
    bool exposing; /* expose is under way: its rows take blocks of their own extents */
    char *base;
    /* Of this lease's one thread, in one piece of memory: */
    mt_kvlayer_marks *layer_marks; /* [row x layers + layer] */
    mt_kvunit_marks *unit_marks;   /* [row x units + unit] */
};

/* The number of the extent's block at this place. */
static inline uint32_t
mt_kvslot_block(const mt_kvslot *s, size_t place)
{
    return s->first_block + (uint32_t)place;
}

/* What a new arena maps at this place. */
static inline uint32_t
mt_kvslot_initial(const mt_kvslot *s, size_t place)
{
    return s->lazy ? mt_kvslot_block(s, place) << 1 : MT_MAPPED_NONE;
}

static inline uint32_t
mt_kvslot_mapped(const mt_kvpool *pool, const mt_kvslot *s, size_t unit, size_t place)
{
    return s->differences[unit * pool->geom.blocks + place] ^ mt_kvslot_initial(s, place);
}

/* Whether a mapping is one of a block, and not of zeros or nothing. */
static inline bool
mt_kvmapped_is_block(uint32_t mapped)
{
    return mapped < MT_MAPPED_UNKNOWN;
}

/* The slot whose extent holds the block. */
static inline mt_kvslot *
mt_kvblock_extent(const mt_kvpool *pool, uint32_t block)
{
    assert(pool->geom.blocks > 0 && block / pool->geom.blocks < pool->slot_count);
    return &pool->slots[block / pool->geom.blocks];
}

/* Its place there. */
static inline size_t
mt_kvblock_index(const mt_kvpool *pool, uint32_t block)
{
    return block % pool->geom.blocks;
}

static inline mt_kvblock *
mt_kvblock_at(const mt_kvpool *pool, uint32_t block)
{
    return &mt_kvblock_extent(pool, block)->blocks[mt_kvblock_index(pool, block)];
}

static inline bool
mt_kvblock_is_idle(const mt_kvblock *block)
{
    return block->resident && block->refs == 0;
}

static inline mt_kvslot *
mt_kvlease_slot(const mt_kvlease *lease, size_t row)
{
    return &lease->pool->slots[lease->first + row];
}

static inline mt_kvlayer_marks *
mt_kvlease_marks(const mt_kvlease *lease, size_t layer, size_t row)
{
    return &lease->layer_marks[row * lease->pool->geom.config.layers + layer];
}

static inline mt_kvunit_marks *
mt_kvlease_unit_marks(const mt_kvlease *lease, size_t unit, size_t row)
{
    return &lease->unit_marks[row * lease->pool->geom.units + unit];
}

/* The row ends there, in this layer, and nothing is known of what lies behind. */
static inline void
mt_kvlease_set_length(mt_kvlease *lease, size_t layer, size_t row, size_t length)
{
    uint32_t to = (uint32_t)length;

    *mt_kvlease_marks(lease, layer, row) = (mt_kvlayer_marks){to, to, to};
}

typedef struct mt_kvspan { /* blocks, or tokens, [lo, hi) */
    size_t lo, hi;
} mt_kvspan;

/* MT_ESHAPE (tokens) where a row that has so many tokens cannot have `count` more. */
static inline mt_status
mt_kvlease_check_tokens(const mt_kvlease *lease, size_t has, size_t count, mt_error *err)
{
    size_t most = lease->pool->geom.config.max_tokens;

    if (count <= most - has) return MT_OK;
    return mt_fail_shape(err, MT_SHAPE_TOKENS, count > SIZE_MAX - has ? SIZE_MAX : has + count,
                         most);
}

/* The row's longest layer, and the blocks that hold it. */
static inline size_t
mt_kvlease_blocks(const mt_kvlease *lease, size_t row)
{
    return mt_kvgeom_blocks(&lease->pool->geom, mt_kvlease_row_tokens(lease, row));
}

/* Bytes of pages that views show more than once, beyond the first time. */
static inline size_t
mt_kvpool_mapped_again(const mt_kvpool *pool)
{
    return pool->extra_sights * pool->geom.unit_ranges * pool->geom.part_bytes;
}

/* --- slots, the lock and the end --- */

/* One more arena of max_rows slots: pool->slots may move. */
mt_status mt_kvpool_add_arena(mt_kvpool *pool, mt_error *err);
/* Gives the lock, and wakes the threads that wait in the ledger. pre: a lease of the pool is alive, or it
 * is not closed. */
void mt_kvpool_unlock(mt_kvpool *pool);
/* The same for the end of a lease, or of the pool: frees the pool when it is closed and nothing is
 * lent. */
void mt_kvpool_unlock_or_free(mt_kvpool *pool);
/* Frees a pool that is no longer used, and its store. */
void mt_kvpool_free(mt_kvpool *pool);
/* Calls once(arg, &error) under the lock, which it takes and gives, and again as long as that is
 * refused with MT_ELIMIT and the ledger's other members give back something of what it lacks.
 * Returns the last status; its error goes to err. */
typedef mt_status mt_kvtry(void *arg, mt_error *err);
mt_status mt_kvpool_retry(mt_kvpool *pool, mt_kvtry *once, void *arg, mt_error *err);

#endif
