/* gate.h -- a bounded history of gate tensors, with statistics over all that ever passed.
 *
 *     rows ──► admit ──► claim ──────► fill ──► ring: [ rec | rec | rec | . . . ]   at most
 *              may fail  evicts, gives   │                                          max_entries,
 *              changes   the record a    └────► stats: importance, load, ...        max_bytes
 *              nothing   place                  (every row, once, for ever)
 *
 * push() does the three at once. A tensor that is still on its way from a device is admitted and
 * claimed at append time, so that length and eviction are exact, and filled when it arrives.
 *
 * With a ledger, memory of the arena is reserved there before it is touched, in steps, so that most
 * entries cost no call. When the ledger refuses, the history evicts and stays within what it holds.
 *
 * What a record's bytes are, row.h says. No lock: the caller serialises. No Python, torch or
 * CUDA. */
#ifndef MT_GATE_GATE_H
#define MT_GATE_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"
#include "gate/row.h"
#include "gate/stats.h"
#include "budget/ledger.h"
#include "base/rows.h"
#include "base/status.h"
#include "port/vmem.h"

typedef enum mt_trim {
    MT_TRIM_HALF = 0,   /* an entry that does not fit leaves half of the exceeded limit occupied */
    MT_TRIM_OLDEST = 1, /* it drops as many of the oldest as it needs */
} mt_trim;

enum { MT_DTYPE_SAME = -1 }; /* record in the dtype that comes */

typedef struct mt_gatehist_config {
    size_t max_entries; /* > 0 */
    size_t max_bytes;   /* > 0, of record bytes */
    mt_trim trim;
    mt_keep keep;
    int dtype;      /* a writable mt_dtype, or MT_DTYPE_SAME */
    unsigned top_k; /* 1 to MT_TOP_K_MAX */
    bool statistics;
    mt_ledger *ledger; /* where the bytes of the arena are reserved; NULL: nowhere. Borrowed: every
                        * history made with it holds it */
    bool owner_asks;   /* admit leaves it to the owner to ask the others in the ledger */
} mt_gatehist_config;

typedef struct mt_gatehist mt_gatehist;

/* pre: config is valid as commented above. MT_ENOMEM, MT_EOVERFLOW. */
mt_status mt_gatehist_new(const mt_alloc *mem, const mt_vmem_ops *vm,
                          const mt_gatehist_config *config, mt_gatehist **out, mt_error *err);
void mt_gatehist_free(mt_gatehist *h);

/* Says whether rows of this shape and dtype can be recorded, and makes ready for them; data is not
 * looked at. After MT_OK, claim() cannot fail for them.
 *   MT_ESHAPE  cols is 0, above MT_EXPERTS_MAX, not the number of experts so far, or below top_k
 *   MT_ELIMIT  one record is larger than max_bytes (asked > limit == max_bytes), or than what is
 *              held in the ledger, which refuses more (asked <= max_bytes); the others were asked
 *   MT_EAGAIN  the ledger refuses, and the owner has not asked the others for mt_gatehist_lacks()
 *              bytes since it last changed (mt_ledger_reclaim, which may take long): ask, try again
 *   MT_ENOMEM, MT_EOVERFLOW */
mt_status mt_gatehist_admit(mt_gatehist *h, const mt_rows *shape, mt_error *err);

/* What the last MT_EAGAIN was for; and to say that the others were asked for it. */
typedef struct mt_gatehist_lack {
    size_t bytes;
    uint64_t seen; /* mt_ledger_changes before they were refused */
} mt_gatehist_lack;

mt_gatehist_lack mt_gatehist_lacks(const mt_gatehist *h);
void mt_gatehist_asked(mt_gatehist *h, mt_gatehist_lack lack);

/* Gives an admitted shape its place as the newest entry and returns its number. */
uint64_t mt_gatehist_claim(mt_gatehist *h, const mt_rows *shape);

/* Writes the claimed entry's record, unless it was evicted, and counts its rows. pre: once per
 * number, with the shape that was claimed. */
void mt_gatehist_fill(mt_gatehist *h, uint64_t number, const mt_rows *rows);

/* admit, claim and fill. On failure nothing is recorded, in part or whole. */
mt_status mt_gatehist_push(mt_gatehist *h, const mt_rows *rows, mt_error *err);

const mt_gatehist_config *mt_gatehist_configuration(const mt_gatehist *h);
size_t mt_gatehist_len(const mt_gatehist *h);
size_t mt_gatehist_bytes(const mt_gatehist *h);      /* live record bytes, <= max_bytes */
size_t mt_gatehist_extent(const mt_gatehist *h);     /* bytes of the arena in use so far */
size_t mt_gatehist_experts(const mt_gatehist *h);    /* 0 until the first is admitted */
uint64_t mt_gatehist_appended(const mt_gatehist *h); /* entries ever claimed */

/* Shape and dtype of entry i (0 is the oldest) with data NULL. pre: i < len. */
mt_rows mt_gatehist_shape(const mt_gatehist *h, size_t i);

/* Writes entry i as packed rows of its dtype; gates that were not kept are zero.
 * pre: i < len, entry i is filled. */
void mt_gatehist_copy(const mt_gatehist *h, size_t i, void *dst);

/* Drops all records. The statistics stay. With a ledger the arena's memory is given back. pre: no
 * admitted shape waits for its claim, if there is a ledger. */
void mt_gatehist_clear(mt_gatehist *h);

/* A history of `count` entries start, start + step, ... with the same limits, its own memory, and
 * statistics of just these. pre: step != 0; all of them exist and are filled. MT_ENOMEM; MT_ELIMIT
 * where the ledger refuses their bytes, with them as `asked`: the owner may ask the others in it,
 * and try again. */
mt_status mt_gatehist_slice(const mt_gatehist *h, size_t start, ptrdiff_t step, size_t count,
                            mt_gatehist **out, mt_error *err);

/* An equal history: its entries, their numbers, and all statistics. pre and failures as of slice. */
mt_status mt_gatehist_clone(const mt_gatehist *h, mt_gatehist **out, mt_error *err);

/* Statistics of everything ever filled; reset forgets them. */
const mt_gatestats *mt_gatehist_stats(const mt_gatehist *h);
void mt_gatehist_reset_stats(mt_gatehist *h);

/* Statistics of the last n records as they were kept, into s, which the caller has initialised and
 * reserved. pre: n <= len, all of them are filled. */
void mt_gatehist_recount(const mt_gatehist *h, size_t n, mt_gatestats *s);

/* True while every invariant holds; for tests. */
bool mt_gatehist_check(const mt_gatehist *h);

#endif
