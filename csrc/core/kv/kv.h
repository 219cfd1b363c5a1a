/* kv.h -- what the room offers: KV caches of many sequences in pages that are taken as tokens come, shared and
 * recycled.
 *
 *   lease of 3 rows            row 0        row 1        row 2       slots side by side: one stride
 *   addresses              | A A a . . . | A A b . . . | A A c . . . |
 *                            \_|_________/_|__________/  |
 *   blocks (store)           A A: the prompt, once     a b c: each row's own tail
 *
 * Each sequence has a *slot*: a reserved, contiguous range of addresses for max_tokens tokens (see
 * geometry.h). Behind it lie *blocks* of block_tokens tokens. A slot's block table says which block
 * holds which tokens; several slots may name the same block (fork, reorder), and one that is to
 * write to a shared block first gets its own copy. The mapping of addresses to blocks follows the
 * table late, layer by layer, when a layer is used: a fork costs one mapping per row.
 *
 * Blocks that no row names any more stay physical ("idle"), so that the next lease of the same
 * shape takes no page and maps nothing. Before a new page is taken, idle ones are used or dropped:
 * physical bytes never exceed the largest need there has been. All bytes, live, idle and promised
 * to leases that were given a hint, are reserved in a ledger.
 *
 * Content: bytes of a row past its length read as zeros wherever a view shows them (see show).
 *
 * Thread-safe between leases; one lease is used by one thread at a time, except hold and unhold.
 * Every call either succeeds or leaves pool and lease as they were. */
#ifndef MT_KV_KV_H
#define MT_KV_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "base/gauge.h"
#include "kv/geometry.h"
#include "budget/ledger.h"
#include "base/status.h"
#include "port/store.h"

typedef struct mt_kvpool mt_kvpool;
typedef struct mt_kvlease mt_kvlease;

/* All members are uint64_t: py/kv/pool.c reads them by position. */
typedef struct mt_kvstats {
    uint64_t live_bytes;     /* blocks that hold tokens of leases, shared ones once */
    uint64_t shared_bytes;   /* of them: blocks that more than one row names */
    uint64_t idle_bytes;     /* physical, kept for the next lease */
    uint64_t promised_bytes; /* reserved for hints, not taken yet */
    uint64_t reserved_bytes; /* in the ledger */
    uint64_t physical_bytes; /* by the system's own account */
    uint64_t peak_bytes;     /* largest live + idle so far */
    uint64_t payload_bytes;  /* tokens x bytes of a token over all rows, as copies would take */
    uint64_t address_bytes;  /* reserved address space */
    uint64_t maps;           /* map areas mapped, an upper bound */
    uint64_t
        mapped_again_bytes;   /* of pages that views show more than once, beyond the first time */
    uint64_t leases, rows;    /* alive, those below too */
    uint64_t lingering;       /* leases released while views of them live */
    uint64_t lingering_bytes; /* blocks of such leases, each once */
    uint64_t acquired, forked, released; /* leases, ever */
    uint64_t taken;                      /* blocks taken from the system, ever */
    uint64_t recycled;                   /* blocks used again without that */
    uint64_t dropped;                    /* blocks given back to the system, ever */
    uint64_t copied;                     /* blocks copied on write */
    uint64_t map_calls;                  /* map areas mapped, ever */
} mt_kvstats;

/* Takes over the store, also on failure; joins the ledger as `name` (rank 0). `mapped_again`, or
 * NULL, is kept at the bytes of pages that this pool maps for views beyond the first time, with
 * those of other pools: the resident set counts them each time. It outlives the pool. MT_ENOMEM,
 * MT_EOVERFLOW. *out is written on MT_OK only. */
mt_status mt_kvpool_new(const mt_alloc *mem, const mt_store_ops *store, mt_ledger *ledger,
                        const char *name, const mt_kvconfig *config, mt_gauge *mapped_again,
                        mt_kvpool **out, mt_error *err);
/* The pool lends no more and drops what is idle; it is freed when its last lease is. pre: called
 * once, and no other call of the pool itself runs or follows, except use_stream and await while a
 * lease is alive. NULL is ignored. */
void mt_kvpool_close(mt_kvpool *pool);

const mt_kvgeom *mt_kvpool_geom(const mt_kvpool *pool);
void mt_kvpool_stats(mt_kvpool *pool, mt_kvstats *out);

/* Drops idle blocks, those used longest ago first, until physical bytes are at most `target` or
 * nothing is idle; returns the bytes given back. Addresses stay. */
size_t mt_kvpool_trim(mt_kvpool *pool, size_t target_bytes);

/* Returns when no other thread is inside of the pool; a trim may be for a long time. */
void mt_kvpool_await(mt_kvpool *pool);

/* Whether `rows` more sequences of `tokens` tokens would fit the ledger now, with `shared` leading
 * tokens of them stored once, if all members gave back what is idle. */
bool mt_kvpool_would_fit(mt_kvpool *pool, size_t rows, size_t tokens, size_t shared);

/* What the pool does with its store next follows this stream (device pools). */
mt_status mt_kvpool_use_stream(mt_kvpool *pool, void *stream, mt_error *err);

/* --- leases: appending to rows, showing and cropping them, giving them back --- */

/* A lease of `rows` empty sequences, with room promised for `tokens` tokens each (a hint, capped at
 * max_tokens). MT_ESHAPE (rows) when rows is 0 or over max_rows; MT_ELIMIT; MT_ENOMEM.
 * *out is written on MT_OK only. */
mt_status mt_kvpool_acquire(mt_kvpool *pool, size_t rows, size_t tokens, mt_kvlease **out,
                            mt_error *err);

/* A lease in which row r * n + i continues row r of `parent`, which may go on or be released. Full
 * blocks are shared, room for `tokens` tokens each in all is promised. Statuses as acquire. */
mt_status mt_kvlease_fork(mt_kvlease *parent, size_t n, size_t tokens, mt_kvlease **out,
                          mt_error *err);

/* The lease is over. Its blocks are given back in this call; or, where it is held, by the last
 * unhold, and until then its addresses stay readable. pre: called once. */
void mt_kvlease_release(mt_kvlease *lease);
void mt_kvlease_hold(mt_kvlease *lease);
void mt_kvlease_unhold(mt_kvlease *lease); /* from any thread */

size_t mt_kvlease_rows(const mt_kvlease *lease);
mt_kvpool *mt_kvlease_pool(const mt_kvlease *lease);
const mt_kvgeom *mt_kvlease_geom(const mt_kvlease *lease);
void *mt_kvlease_base(const mt_kvlease *lease);      /* of row 0; row r at r * slot_bytes */
size_t mt_kvlease_max_rows(const mt_kvlease *lease); /* rows at acquire: slots behind base */
size_t mt_kvlease_length(const mt_kvlease *lease, size_t layer, size_t row);
size_t mt_kvlease_longest(const mt_kvlease *lease, size_t layer);  /* over rows */
size_t mt_kvlease_shortest(const mt_kvlease *lease, size_t layer); /* over rows */
size_t mt_kvlease_row_tokens(const mt_kvlease *lease, size_t row); /* over layers */

/* Rows to append: counts[row] tokens each, or `count` for all where counts is NULL. */
typedef struct mt_kvstep {
    size_t count;
    const size_t *counts;
} mt_kvstep;

/* Tokens of the row in the step. */
static inline size_t
mt_kvstep_count(const mt_kvstep *step, size_t row)
{
    return step->counts != NULL ? step->counts[row] : step->count;
}

/* Where one of the two tensors [rows, H, t, D] comes from; strides in bytes, the last dimension
 * is contiguous. Row r's first counts[r] tokens are taken. */
typedef struct mt_kvsource {
    const char *data;
    ptrdiff_t row_stride, head_stride, token_stride;
} mt_kvsource;

/* Makes the layer ready to append: blocks are taken (copied where shared), mapped and writable, and
 * everything up to the new longest row is readable, with zeros past lengths. MT_ESHAPE (tokens,
 * with the length asked and max_tokens); MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_room(mt_kvlease *lease, size_t layer, const mt_kvstep *step, mt_error *err);

/* Writes K and V at the ends of the rows of a host store. pre: room for the same step. */
void mt_kvlease_write(mt_kvlease *lease, size_t layer, const mt_kvstep *step, const mt_kvsource *k,
                      const mt_kvsource *v);

/* The layer's rows are that much longer. pre: room for the same step, and the tokens are written
 * or enqueued. */
void mt_kvlease_advance(mt_kvlease *lease, size_t layer, const mt_kvstep *step);

/* Makes tokens [0, tokens) of every row readable in this layer, with zeros past lengths. pre:
 * tokens <= max_tokens. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_show(mt_kvlease *lease, size_t layer, size_t tokens, mt_error *err);

/* Cuts row r to lengths[r] tokens, in every layer that has more; frees blocks past that. */
void mt_kvlease_crop(mt_kvlease *lease, const size_t *lengths);

/* --- rows that code writes into by itself, through views (inplace.c) --- */

/* For code that writes into the views itself: tokens [0, tokens) of every row and layer are mapped,
 * those past a row's length are the row's own, and zeros. `held`: so are the tokens before it, all of
 * them, until the next fork, reorder or select; blocks that others name are copied. Lengths stay
 * until advance_all. pre and statuses as show. */
mt_status mt_kvlease_reserve(mt_kvlease *lease, size_t tokens, bool held, mt_error *err);

/* The same without taking the blocks ahead, for lazy stores only: every address up to max_tokens is
 * writable, pages appear on touch and count in physical_bytes. What no advance counts is dropped at
 * the end of the lease. It is called again after a crop, reorder or fork, before code writes on,
 * and may be called at any time. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_expose(mt_kvlease *lease, mt_error *err);

/* For tokens that code wrote into the views itself: the rows are that much longer, in all layers.
 * Past what was reserved or exposed the new tokens are zeros, which take no page until they are
 * written to. MT_ESHAPE (tokens); MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_advance_all(mt_kvlease *lease, const mt_kvstep *step, mt_error *err);

/* --- rows that become copies of other rows: beams reorder, finished samples leave --- */

/* Row i becomes what row index[i] was, for n <= max_rows rows; repeats are welcome. Full blocks are
 * shared, the last one is copied. pre: every index < rows, n > 0. MT_ELIMIT; MT_ENOMEM. */
mt_status mt_kvlease_reorder(mt_kvlease *lease, const size_t *index, size_t n, mt_error *err);

/* --- for tests --- */

/* Every invariant: references, counts, the ledger's reservation, mappings. Takes the lock. */
bool mt_kvpool_check(mt_kvpool *pool);

#endif
