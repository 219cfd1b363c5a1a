/* kvpool_private.h -- the structures behind kvpool.h, for its own files only.
 *
 *   pool ── slot 0: addresses | table (row) | home blocks (store)      table[tb] = the slot whose
 *        └─ slot 1: addresses | table (row) | home blocks (store)                  home block is
 * named
 *
 * A slot is two things at one index: an address range with the row that lives there, and a *home*:
 * a place in the store for one block per tb. A fresh row names its own home's blocks, so its
 * addresses and its place in the store run in parallel: one mapping for a whole arena. A forked row
 * names its parent's. Block (h, tb) is only ever named at position tb.
 *
 *   block (h, tb):   refs > 0            live: named by that many rows
 *                    refs = 0, resident  idle: physical, content meaningless
 *                    refs = 0            nothing
 *
 * A slot's maps say what its addresses map now, per unit and tb; they follow the table late. They
 * are kept as differences from what a new arena maps, so that rows and tokens that are never used
 * cost no memory: the arrays come as zeros, and pages of zeros that nobody writes to are free. */
#ifndef MT_KVPOOL_PRIVATE_H
#define MT_KVPOOL_PRIVATE_H

#include "kvpool.h"
#include "lock.h"

enum {
    MT_KV_ZERO = 0x7FFFFFFF, /* in a table: these tokens are zeros and no block holds them */
};

/* A mapping: home << 1 | private, or one of these. */
enum { MT_HAVE_PRIVATE = 1 };
#define MT_HAVE_ZERO    UINT32_C(0xFFFFFFFE) /* MT_KV_ZERO << 1 */
#define MT_HAVE_NONE    UINT32_C(0xFFFFFFFC) /* nothing is mapped */
#define MT_HAVE_UNKNOWN UINT32_C(0xFFFFFFFA) /* a call failed half-way: map anew */

typedef struct mt_kvslot {
    mt_kvlease *lease; /* NULL: free */
    char *base;        /* addresses */
    size_t offset;     /* of the home's blocks in the store; laid out as the addresses are */
    uint64_t used_at;  /* the pool's clock at the last release */
    uint32_t *refs;    /* [blocks] rows that name this home's block */
    bool *resident;    /* [blocks] it is physical, as far as we took it */
    size_t named;      /* home blocks with refs > 0 */
    size_t idle;       /* home blocks that are resident with refs = 0 */
    uint32_t *table;   /* [blocks] of the row: home, or MT_KV_ZERO */
    size_t taken;      /* table[0 .. taken) is valid: covers the row's tokens */
    uint32_t *changed; /* [units x blocks] mappings, each xor `fresh` */
    uint32_t fresh;    /* what a new arena maps here */
    size_t maps;       /* stretches its addresses are mapped in, beyond the arena's one */
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
    uint32_t *scratch;            /* [blocks] */
    size_t live, idle, promised;  /* blocks; live + max(idle, promised) are reserved */
    size_t reserved;              /* blocks, in the ledger */
    size_t peak;                  /* largest live + idle */
    size_t maps;                  /* stretches, over all slots and arenas */
    uint64_t clock;
    mt_kvlease *leases; /* doubly linked: alive and lingering */
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
    bool opening; /* prepare makes blocks ready, and is asked for what they hold after that */
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

static inline uint32_t
mt_kvslot_have(const mt_kvslot *s, size_t at)
{
    return s->changed[at] ^ s->fresh;
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

/* --- kvblock.c: counting, promising, naming and dropping blocks. All expect the lock. --- */

/* Promises the lease `blocks` more: MT_ELIMIT with the bytes that the ledger lacks as `asked`. */
mt_status mt_kvblock_promise(mt_kvlease *lease, size_t blocks, mt_error *err);
/* Takes back what is left of a promise. */
void mt_kvblock_unpromise(mt_kvlease *lease, size_t blocks);
/* A home whose block tb is nobody's: the slot's own where possible; made physical, dropping idle
 * blocks first where the count would rise; its refs become 1. pre: a promise is left. */
mt_status mt_kvblock_take(mt_kvlease *lease, size_t slot, size_t tb, uint32_t *home, mt_error *err);
/* Undoes a take: the block is idle, the promise is back. */
void mt_kvblock_untake(mt_kvlease *lease, uint32_t home, size_t tb);
void mt_kvblock_name(mt_kvpool *pool, uint32_t home, size_t tb);   /* pre: refs > 0 */
void mt_kvblock_unname(mt_kvpool *pool, uint32_t home, size_t tb); /* MT_KV_ZERO is ignored */
/* Drops idle blocks until at most `keep` idle ones are left or only exposed slots have any. */
void mt_kvblock_drop(mt_kvpool *pool, size_t keep);
/* Copies the first `tokens` tokens of block tb from one home to the other, in all ranges. */
mt_status mt_kvblock_copy(mt_kvpool *pool, uint32_t to, uint32_t from, size_t tb, size_t tokens,
                          mt_error *err);
/* Zeros in all ranges of block tb, from its token `from` on. */
mt_status mt_kvblock_zero(mt_kvpool *pool, uint32_t home, size_t tb, size_t from, mt_error *err);
/* Brings the ledger's reservation down to the need. */
void mt_kvblock_fit(mt_kvpool *pool);

/* --- kvmap.c: what addresses map. All expect the lock. --- */

/* Makes the blocks `see` of the slot's unit follow its table (past `taken`: zeros), those of
 * `write` writable. MT_EAGAIN when that would take more stretches than there may be. */
mt_status mt_kvmap_follow(mt_kvpool *pool, size_t slot, size_t unit, const mt_kvspan *see,
                          const mt_kvspan *write, mt_error *err);
/* Maps one home at all of the unit: one stretch. Lazy stores. */
mt_status mt_kvmap_unit(mt_kvpool *pool, size_t slot, size_t unit, uint32_t home, mt_error *err);
/* Maps the slot's own home at blocks [taken, end) of the unit, for writing. Lazy stores. */
mt_status mt_kvmap_home(mt_kvpool *pool, size_t slot, size_t unit, mt_error *err);
/* One mapping of a whole home, where that is what most of the table names and not mapped yet. */
mt_status mt_kvmap_alias(mt_kvpool *pool, size_t slot, mt_error *err);
/* One mapping of the slot's own home, where what a fork left there is still mapped. Lazy stores.
 * What fails is mapped later, block by block. */
void mt_kvmap_reset(mt_kvpool *pool, size_t slot);
/* The same for all free slots; false: none had anything to give. */
bool mt_kvmap_relax(mt_kvpool *pool);
/* The row is over: forgets private writes. */
void mt_kvmap_settle(mt_kvpool *pool, size_t slot);
/* Nobody maps blocks [lo, hi) of this home after it; for stores that are not lazy. */
void mt_kvmap_forget(mt_kvpool *pool, size_t home, size_t lo, size_t hi);
/* Stretches of a slot, counted anew. */
size_t mt_kvmap_count(const mt_kvpool *pool, const mt_kvslot *s);

/* --- kvpool.c --- */

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
