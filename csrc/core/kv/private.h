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

#include "kv/pool.h"
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
    uint32_t *scratch;            /* [2 x blocks] mappings of a unit, wanted and had */
    size_t live, idle, promised;  /* blocks; live + max(idle, promised) are reserved */
    size_t reserved;              /* blocks, in the ledger */
    size_t peak;                  /* largest live + idle */
    size_t maps;                  /* stretches, over all slots and arenas */
    size_t maps_allowed;          /* so many before the system is asked again */
    size_t refusals;              /* for want of stretches, since it was asked */
    size_t stale;                 /* slots that are */
    size_t again;                 /* sights beyond the first of each block in each unit */
    mt_gauge *mapped_again;       /* the same in bytes, with other pools'; or NULL */
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
    bool opening;  /* prepare makes blocks ready, and is asked for what they hold after that */
    char *base;
    /* Of this lease's one thread, [row x layers + layer]: */
    uint32_t *lengths;
    uint32_t *clean;    /* tokens [roomed, clean) are known to be zeros, */
    uint32_t *roomed;   /* those before it may be written to since the last room */
    uint32_t *ready_lo; /* [row x units + unit] tokens [lo, hi) are owned, mapped and writable */
    uint32_t *ready_hi;
    uint32_t *shown;   /* [row x units + unit] tokens [0, shown) are mapped as the table says */
    size_t *from, *to; /* [row] tokens to write, for prepare */
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

typedef struct mt_kvspan { /* blocks [lo, hi) */
    size_t lo, hi;
} mt_kvspan;

/* --- block.c: counting, promising, naming and dropping blocks. All expect the lock. --- */

/* Promises the lease `blocks` more: MT_ELIMIT with the bytes that the ledger lacks as `asked`. */
mt_status mt_kvblock_promise(mt_kvlease *lease, size_t blocks, mt_error *err);
/* Takes back what is left of a promise. */
void mt_kvblock_unpromise(mt_kvlease *lease, size_t blocks);
/* A block that is nobody's, for place tb of the row in `slot`: `exact`; or with MT_KV_ANY the idle
 * one that lies there, else any idle one, else a new one, for which idle ones are dropped where the
 * count would rise; where there are no stretches for others to leave it, one that nobody shows. Its
 * refs become 1, and no address that a view has shown maps it but at that place. pre: a promise is
 * left; refs of `exact` are 0. */
mt_status mt_kvblock_take(mt_kvlease *lease, size_t slot, size_t tb, uint32_t exact,
                          uint32_t *block, mt_error *err);
/* Whether a row that goes on may show the block, which nobody names, other than at place tb of the
 * slot. */
bool mt_kvblock_is_in_view(const mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The block for place tb that is idle and mapped there without a call, or is the row's own one of
 * that place; MT_KV_ANY where there is none, or the place is no longer to have what lies there. */
uint32_t mt_kvblock_nearest(const mt_kvpool *pool, size_t slot, size_t tb);
/* Undoes a take: the block is idle, the promise is back. Where an exposed row took it and it was
 * not filled since, what code wrote there in place before is there as it was; else it reads zeros
 * there. */
void mt_kvblock_untake(mt_kvlease *lease, size_t slot, uint32_t block, bool filled);
/* A try was undone that had `reserved` blocks: what it let go of counts as asked in a refusal. */
void mt_kvblock_note_undone(const mt_kvpool *pool, size_t reserved, mt_error *why);
void mt_kvblock_name(mt_kvpool *pool, uint32_t block); /* pre: refs > 0. MT_KV_ZERO is ignored */
/* For a row that is over: nobody sees its addresses any more. MT_KV_ZERO is ignored. */
void mt_kvblock_unname(mt_kvpool *pool, uint32_t block);
/* The same for a row that goes on and named it at place tb, where its addresses may map it still.
 * pre: they do not where mt_kvblock_must_leave says so. */
void mt_kvblock_let_go(mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The same for the row's blocks from place `keep` on, where its table ends then. */
void mt_kvblock_let_go_from(mt_kvpool *pool, size_t slot, size_t keep);
/* The slot's addresses may map the block where a view shows it, though its row does not name it. */
void mt_kvblock_note_shown(mt_kvpool *pool, size_t slot, uint32_t block);
/* Whether the slot's addresses have to leave the block before its row lets go of it. */
bool mt_kvblock_must_leave(const mt_kvpool *pool, size_t slot, uint32_t block);
/* Drops idle blocks until at most `keep` idle ones are left, or none but those of exposed homes and
 * those that rows may show which let go of them, where the system gives no mappings to change that.
 */
void mt_kvblock_drop(mt_kvpool *pool, size_t keep);
/* The slot's own home is open to others again; what code wrote there without a word is dropped. */
void mt_kvblock_unexpose(mt_kvpool *pool, size_t slot);
/* Copies the first `tokens` tokens of a block to another, in all ranges. What the row in `slot`
 * wrote privately over the block at place tb is copied in its stead; SIZE_MAX: there is no row. */
mt_status mt_kvblock_copy(mt_kvpool *pool, uint32_t to, uint32_t from, size_t tokens, size_t slot,
                          size_t tb, mt_error *err);
/* Zeros in all ranges of a block, from its token `from` on. */
mt_status mt_kvblock_zero(mt_kvpool *pool, uint32_t block, size_t from, mt_error *err);
/* An address of the block's part at `at` bytes into the slot, less its place. */
mt_status mt_kvblock_window(mt_kvpool *pool, uint32_t block, size_t at, void **out, mt_error *err);
/* Brings the ledger's reservation down to the need. */
void mt_kvblock_fit(mt_kvpool *pool);

/* --- mapping.c: what addresses map. All expect the lock. --- */

/* Makes the blocks `see` of the slot's unit follow its table (past `taken`: zeros), those of
 * `write` writable. MT_EAGAIN when that would take more stretches than there may be. */
mt_status mt_kvmap_follow(mt_kvpool *pool, size_t slot, size_t unit, const mt_kvspan *see,
                          const mt_kvspan *write, mt_error *err);
/* Maps one home at all addresses of the slot, for writing: one stretch. Views show places [0, end).
 * Lazy stores. */
mt_status mt_kvmap_move(mt_kvpool *pool, size_t slot, size_t home, size_t end, mt_error *err);
/* Maps the slot's own home at blocks [taken, end) of the unit, for writing. Lazy stores. */
mt_status mt_kvmap_home(mt_kvpool *pool, size_t slot, size_t unit, mt_error *err);
/* One mapping of a whole home, where that is what most of the table names and not mapped yet. */
mt_status mt_kvmap_alias(mt_kvpool *pool, size_t slot, mt_error *err);
/* Addresses of all rows that map blocks which their rows let go of map the table again, or zeros.
 * After it no block is in a view of a row that does not name it. MT_EAGAIN where that takes more
 * stretches than there may be: some rows have not changed, and are stale still. */
mt_status mt_kvmap_clear(mt_kvpool *pool, mt_error *err);
/* The row's addresses leave those of its blocks in the span that it must leave before it lets go of
 * them: zeros there, `anyway` however many stretches that takes; where it fails all are zeros until
 * they are used again. But not those of a row that has private writes before the span, as long as
 * writes in the span can be kept from others: it goes on naming the blocks. MT_EAGAIN, or as the
 * store says. */
mt_status mt_kvmap_leave(mt_kvpool *pool, size_t slot, const mt_kvspan *span, bool anyway,
                         mt_error *err);
/* The same for all blocks that somebody is to name and another table, which is to be the row's,
 * does not: its blocks. pre: refs count names as they are to be. `own` is one of that table that is
 * to be the row's alone; or MT_KV_ZERO. MT_EAGAIN as above: some have changed. */
mt_status mt_kvmap_become(mt_kvpool *pool, size_t slot, const uint32_t *table, size_t taken,
                          uint32_t own, mt_error *err);
/* All of the slot's addresses are zeros, in one stretch, until they are used again. With it goes
 * what was written privately. MT_EAGAIN: the store is not lazy. */
mt_status mt_kvmap_blank(mt_kvpool *pool, size_t slot, mt_error *err);
/* The row's addresses show again what its table names, wherever a view has been, after a change
 * that came to nothing; where that fails they are zeros. */
mt_status mt_kvmap_restore(mt_kvpool *pool, size_t slot);
/* Whether the row's addresses map any of its blocks [0, end) privately. */
bool mt_kvmap_has_private(const mt_kvpool *pool, size_t slot, size_t end);
/* The next part of one of the row's blocks that code wrote to privately: at *at bytes into the slot
 * or behind. Writes its place to *tb and the end of the part to *at; false: there is none. */
bool mt_kvmap_next_private(const mt_kvpool *pool, size_t slot, size_t *at, size_t *tb);
/* What the row wrote privately is gone: it shows its blocks. */
mt_status mt_kvmap_drop_private(mt_kvpool *pool, size_t slot);
/* What the row wrote privately over its block tb goes into the block. pre: it is its own. */
mt_status mt_kvmap_keep(mt_kvpool *pool, size_t slot, size_t tb, mt_error *err);
/* Whether the block is in sight anywhere but at place tb of the slot. */
bool mt_kvmap_is_elsewhere(const mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The row takes the block for place tb: what it wrote privately there before, when it had the block
 * as well, is nothing that the block is to hold. */
void mt_kvmap_forget_private(mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* The row in `slot` takes the block for place tb: free slots have it in sight no more. */
void mt_kvmap_yield(mt_kvpool *pool, size_t slot, size_t tb, uint32_t block);
/* All free slots map their own homes; false: none had anything to give. */
bool mt_kvmap_relax(mt_kvpool *pool);
/* The row is over: forgets private writes, and what others map as well is in sight no more. What is
 * mapped stays mapped for the next row, unless the pool has very many stretches. */
void mt_kvmap_settle(mt_kvpool *pool, size_t slot);
/* Nobody maps blocks [first, end) after it; for stores that are not lazy. */
void mt_kvmap_forget(mt_kvpool *pool, uint32_t first, uint32_t end);
/* A block's window was used for the first time, or is gone: what it adds to the sights. */
void mt_kvmap_window(mt_kvpool *pool, uint32_t block, bool used);
/* Stretches of a slot, counted anew. */
size_t mt_kvmap_count(mt_kvpool *pool, const mt_kvslot *s);
/* Whether the slot's addresses map the block at place tb in some unit. */
bool mt_kvmap_shows(const mt_kvpool *pool, const mt_kvslot *s, size_t tb, uint32_t block);

/* --- pool.c --- */

/* A new, empty lease of rows slots side by side, those with the most resident blocks in
 * [lo, hi) of their homes. MT_ENOMEM, MT_ELIMIT, MT_ESHAPE. */
mt_status mt_kvpool_lend(mt_kvpool *pool, size_t rows, size_t lo, size_t hi, size_t promise,
                         mt_kvlease **out, mt_error *err);
/* One more arena of max_rows slots: pool->slots may move. */
mt_status mt_kvpool_extend(mt_kvpool *pool, mt_error *err);
/* Gives back slots, blocks and the struct. */
void mt_kvpool_take_back(mt_kvlease *lease);
/* Frees the pool when it is closed and nothing is lent. pre: the lock is held; it is given. */
void mt_kvpool_unlock_or_free(mt_kvpool *pool);
/* The end of a try under the lock, which it gives: whether to try again, because the ledger's other
 * members gave something of what it lacked. Else *why goes to err. */
bool mt_kvpool_again(mt_kvpool *pool, mt_status st, const mt_error *why, mt_error *err);

/* The row's longest layer, and the blocks that hold it. */
size_t mt_kvlease_blocks(const mt_kvlease *lease, size_t row);
/* Nothing past the row's table is known to be zeros any more. */
void mt_kvlease_unclean(mt_kvlease *lease, size_t row);
/* Nothing is known to be ready any more. */
void mt_kvlease_unready(mt_kvlease *lease, size_t row);

#endif
