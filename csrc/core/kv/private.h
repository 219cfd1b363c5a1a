/* private.h -- the structures behind pool.h, for this room.
 *
 *   pool ── slot 0: addresses | table (row) | home: blocks 0 ... n-1        in the store
 *        ├─ slot 1: addresses | table (row) | home: blocks n ... 2n-1       table[tb] = the number
 *        └─ ...                                                             of the block named
 *
 * A slot is two things at one index: an address range with the row that lives there, and a *home*:
 * a place in the store for as many blocks as the range has places. A block has one number in the
 * whole pool, home x blocks + place, and any row may name it at any place (tb) of its table. A
 * fresh row names its own home's blocks, each at its own place, so that its addresses and its
 * place in the store run in parallel: one mapping for a whole arena. A forked row names its
 * parent's blocks, and a row that finds idle blocks elsewhere names those.
 *
 *   block            refs > 0            live: named by that many rows
 *                    refs = 0, resident  idle: physical, content meaningless
 *                    refs = 0            nothing
 *
 * A slot's maps say what its addresses map now, per unit and place; they follow the table late.
 * They are kept as differences from what a new arena maps, so that rows and tokens that are never
 * used cost no memory: the arrays come as zeros, and pages of zeros that nobody writes to are free.
 *
 * Isolation. An address that a view of a lease has ever shown maps one of
 *   - the block that the lease's row names at that place,
 *   - zeros,
 *   - an idle block that the row *let go* of: nobody's content. Whoever takes that block first has
 *     all such addresses changed (mt_kvmap_clear), and so has whoever drops it,
 *   - a block of its own home, while the row is exposed: no other row takes one there.
 * So a row lets go of a block that somebody else names only after its addresses have left it. */
#ifndef MT_KV_PRIVATE_H
#define MT_KV_PRIVATE_H

#include <assert.h>

#include "kv/lease.h"
#include "base/lock.h"

enum {
    MT_KV_ZERO = 0x7FFFFFFF, /* in a table: these tokens are zeros and no block holds them */
    MT_KV_MOST = 0x7FFFFFF0, /* blocks that a pool may have */
};
#define MT_KV_ANY  UINT32_MAX /* to take: whichever block costs least */
#define MT_KV_MANY UINT32_MAX /* in let_go: more than one slot */

/* A mapping: block << 1 | private, or one of these. */
enum { MT_HAVE_PRIVATE = 1 };
#define MT_HAVE_ZERO    UINT32_C(0xFFFFFFFE) /* MT_KV_ZERO << 1 */
#define MT_HAVE_NONE    UINT32_C(0xFFFFFFFC) /* nothing is mapped */
#define MT_HAVE_UNKNOWN UINT32_C(0xFFFFFFFA) /* a call failed half-way: map anew */

typedef struct mt_kvslot {
    mt_kvlease *lease;    /* NULL: free */
    char *base;           /* addresses */
    size_t offset;        /* of the home's blocks in the store; laid out as the addresses are */
    uint64_t used_at;     /* the pool's clock at the last release */
    uint32_t first_block; /* the number of the home's block 0 */
    /* Of the home's blocks, [blocks]: */
    uint32_t *refs;   /* rows that name it */
    uint32_t *let_go; /* the slot + 1 whose row let go of it and may map it still; MT_KV_MANY; 0 */
    uint32_t *sights; /* places of units of all slots that map it and are in sight */
    bool *resident;   /* it is physical, as far as we took it */
    bool *windowed;   /* its window was used, and counts as a sight in each unit */
    size_t named;     /* blocks with refs > 0 */
    size_t idle;      /* blocks that are resident with refs = 0 */
    /* Of the row and the addresses: */
    uint32_t *table;   /* [blocks] of the row: a block's number, or MT_KV_ZERO */
    size_t taken;      /* table[0 .. taken) is valid: covers the row's tokens */
    size_t reach;      /* places [0, reach) were in a view or the table since it was lent */
    uint32_t *changed; /* [units x blocks] mappings, each xor what a new arena maps there */
    bool *in_sight;    /* [units x blocks] mapped for a view, and not settled since: the system may
                        * have page-table entries, and then counts the resident set by them */
    uint32_t *seen;    /* [units] places from here on are not in sight */
    size_t maps;       /* stretches its addresses are mapped in, beyond the arena's one */
    size_t home;       /* the slot whose home the row moved to; its own where it did not */
    bool lazy;         /* a new arena maps the home, not nothing */
    bool stale;        /* the row let go of blocks that its addresses may map */
    bool broken;       /* a call that was to change its addresses failed half-way */
    bool exposed;      /* pages may appear on touch past `taken` */
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
    size_t maps;                 /* stretches, over all slots and arenas */
    size_t maps_allowed;         /* so many before the system is asked again */
    size_t refusals;             /* for want of stretches, since it was asked */
    size_t stale;                /* slots that are */
    size_t again;                /* sights beyond the first of each block in each unit */
    mt_gauge *mapped_again;      /* the same in bytes, with other pools'; or NULL */
    uint64_t clock;
    mt_kvlease *leases; /* doubly linked: alive and lingering */
    bool untold;        /* blocks became idle, and those who wait in the ledger were not told */
    bool closed;
    uint64_t acquired, forked, released, taken, recycled, dropped, copied, map_calls;
};

struct mt_kvlease {
    mt_kvpool *pool;
    mt_kvlease *prev, *next;
    size_t first, rows, max_rows; /* slots first .. first + max_rows are ours */
    size_t promised;              /* blocks */
    size_t holds;                 /* the owner's, and hold()'s; guarded by the pool's lock */
    bool released;
    bool exposed;
    bool exposing; /* expose is under way: its rows take blocks of their own homes */
    char *base;
    /* Of this lease's one thread; what they mean stands in prepare.h: */
    uint32_t *lengths; /* [row x layers + layer] */
    uint32_t *zero_to;
    uint32_t *writable_to;
    uint32_t *owned_from; /* [row x units + unit] */
    uint32_t *owned_to;
    uint32_t *mapped_to;
};

/* The pool's pages are so many bytes more, or fewer: modulo 2^64. */
static inline void
mt_kvpool_tell_pages(mt_kvpool *pool, uint64_t bytes)
{
    if (pool->mapped_again != NULL) mt_gauge_add_once(pool->mapped_again, bytes);
}

/* What a new arena maps at this place. */
static inline uint32_t
mt_kvslot_fresh(const mt_kvslot *s, size_t tb)
{
    return s->lazy ? (s->first_block + (uint32_t)tb) << 1 : MT_HAVE_NONE;
}

static inline uint32_t
mt_kvslot_have(const mt_kvpool *pool, const mt_kvslot *s, size_t unit, size_t tb)
{
    return s->changed[unit * pool->geom.blocks + tb] ^ mt_kvslot_fresh(s, tb);
}

/* Whether a mapping is one of a block, and not of zeros or nothing. */
static inline bool
mt_kvhave_is_block(uint32_t have)
{
    return have < MT_HAVE_UNKNOWN;
}

/* The slot whose home holds the block. */
static inline mt_kvslot *
mt_kvpool_home(const mt_kvpool *pool, uint32_t block)
{
    assert(pool->geom.blocks > 0);
    return &pool->slots[block / pool->geom.blocks];
}

/* Its place there. */
static inline size_t
mt_kvpool_place(const mt_kvpool *pool, uint32_t block)
{
    return block % pool->geom.blocks;
}

static inline uint32_t
mt_kvpool_refs(const mt_kvpool *pool, uint32_t block)
{
    return mt_kvpool_home(pool, block)->refs[mt_kvpool_place(pool, block)];
}

static inline mt_kvslot *
mt_kvlease_slot(const mt_kvlease *lease, size_t row)
{
    return &lease->pool->slots[lease->first + row];
}

/* Tokens of the row in the step. */
static inline size_t
mt_kvstep_count(const mt_kvstep *step, size_t row)
{
    return step->counts != NULL ? step->counts[row] : step->count;
}

static inline uint32_t *
mt_kvlease_len(const mt_kvlease *lease, size_t layer, size_t row)
{
    return &lease->lengths[row * lease->pool->geom.config.layers + layer];
}

static inline uint32_t *
mt_kvlease_zero_to(const mt_kvlease *lease, size_t layer, size_t row)
{
    return &lease->zero_to[row * lease->pool->geom.config.layers + layer];
}

static inline uint32_t *
mt_kvlease_writable_to(const mt_kvlease *lease, size_t layer, size_t row)
{
    return &lease->writable_to[row * lease->pool->geom.config.layers + layer];
}

typedef struct mt_kvspan { /* blocks, or tokens, [lo, hi) */
    size_t lo, hi;
} mt_kvspan;

/* The row's longest layer, and the blocks that hold it. */
static inline size_t
mt_kvlease_blocks(const mt_kvlease *lease, size_t row)
{
    return mt_kvgeom_blocks(&lease->pool->geom, mt_kvlease_row_tokens(lease, row));
}

/* --- pool.c --- */

/* One more arena of max_rows slots: pool->slots may move. */
mt_status mt_kvpool_extend(mt_kvpool *pool, mt_error *err);
/* Gives the lock, and wakes those who wait in the ledger. pre: a lease of the pool is alive, or it
 * is not closed. */
void mt_kvpool_unlock(mt_kvpool *pool);
/* The same for the end of a lease, or of the pool: frees the pool when it is closed and nothing is
 * lent. */
void mt_kvpool_unlock_or_free(mt_kvpool *pool);
/* Calls once(arg, &error) under the lock, which it takes and gives, and again as long as that is
 * refused with MT_ELIMIT and the ledger's other members give back something of what it lacks.
 * Returns the last status; its error goes to err. */
typedef mt_status mt_kvtry(void *arg, mt_error *err);
mt_status mt_kvpool_retry(mt_kvpool *pool, mt_kvtry *once, void *arg, mt_error *err);

#endif
