/* pool.h -- KV caches of many sequences in pages that are taken as tokens come, shared and
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
 * Blocks that nobody names any more stay physical ("idle"), so that the next lease of the same
 * shape takes no page and maps nothing. Before a new page is taken, idle ones are used or dropped:
 * physical bytes never exceed the largest need there has been. All bytes, live, idle and promised
 * to leases that were given a hint, are reserved in a ledger.
 *
 * Content: bytes of a row past its length read as zeros wherever a view shows them (see show).
 *
 * Thread-safe between leases; one lease is used by one thread at a time, except hold and unhold.
 * Every call either succeeds or leaves pool and lease as they were. */
#ifndef MT_KV_POOL_H
#define MT_KV_POOL_H

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

/* Numbers of 64 bits and nothing else: Python gets them as a list in this order. */
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
    uint64_t maps;           /* stretches mapped, an upper bound */
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
    uint64_t map_calls;                  /* stretches mapped, ever */
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
 * tokens of them stored once, after everybody gave back what is idle. */
bool mt_kvpool_would_fit(mt_kvpool *pool, size_t rows, size_t tokens, size_t shared);

/* What the pool does with its store next follows this stream (device pools). */
mt_status mt_kvpool_use_stream(mt_kvpool *pool, void *stream, mt_error *err);

#endif
