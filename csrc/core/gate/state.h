/* state.h -- what a history holds, as pieces of memory, and a history made of such pieces.
 *
 *   sums       the totals, then every mark:
 *              u64 tokens  u64 nonfinite  f64 importance[experts]  u64 load[experts]
 *   index      of each entry, oldest first:  u32 rows  u32 dtype
 *   records    the entries' bytes, oldest first, one after another
 *
 * memtools/_gate/file.py makes a file of them. What comes from there is not trusted: each length is
 * checked before memory is taken for it, and each expert's index before it is kept. */
#ifndef MT_GATE_STATE_H
#define MT_GATE_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "gate/gate.h"

typedef struct mt_gatestate {
    size_t experts; /* 0: there is nothing else */
    uint64_t appended;
    uint64_t counted, span; /* entries in the statistics, and entries between two marks */
    const void *sums, *index, *records; /* sums: none without statistics */
    size_t sums_bytes, index_bytes, records_bytes;
} mt_gatestate;

/* The numbers and lengths of a history; the pieces are NULL. pre: all entries are filled. */
mt_gatestate mt_gatehist_state(const mt_gatehist *h);

/* Writes the pieces, which are as long as mt_gatehist_state() says. */
void mt_gatehist_state_copy(const mt_gatehist *h, void *sums, void *index, void *records);

/* Puts what the pieces hold into a history that nothing was appended to. MT_EFORMAT with what is
 * wrong; MT_ENOMEM; MT_ELIMIT from a ledger, as for a slice. On failure the history may hold a part
 * of the entries. */
mt_status mt_gatehist_restore(mt_gatehist *h, const mt_gatestate *from, mt_error *err);

#endif
