/* history.h -- the structure of a gate history: history.c records and reads, state.c takes it apart
 * and restores it. */
#ifndef MT_GATE_HISTORY_H
#define MT_GATE_HISTORY_H

#include "gate/gate.h"
#include "gate/ring.h"
#include "base/size.h"

/* Elements handled at a time: small enough that a block is still in the second-level cache when the
 * statistics read what the copy has just read, large enough that folding block sums costs nothing.
 */
enum { MT_CHUNK = 32768 };

struct mt_gatehist {
    const mt_alloc *mem;
    const mt_vmem_ops *vm;
    mt_gatehist_config config;
    mt_ring ring;
    mt_member *member;     /* has reserved ring.bound; NULL without a ledger */
    uint64_t refused;      /* the ledger's changes when it refused last, */
    size_t refused_more;   /* and how many bytes more, although others were asked */
    mt_gatehist_lack lack; /* of the last MT_EAGAIN */
    mt_gatestats stats;
    size_t experts;
    size_t scratch_bytes; /* 0 until the first admit */
    unsigned char *raw;   /* scratch: a chunk in the source's dtype, 8 bytes an element */
    unsigned char *value; /* a chunk in the record's dtype, 8 bytes an element */
    float *wide;          /* a chunk as float32 */
    unsigned char *coded; /* a chunk's record, at most 12 bytes an element */
};

static inline mt_gaterow_format
mt_gatehist_format(const mt_gatehist *h, size_t experts, mt_dtype dtype)
{
    return (mt_gaterow_format){h->config.keep, h->config.top_k, experts, dtype};
}

/* Allocates scratch and statistics for this many experts and fixes their number, in place of an
 * earlier one. pre: nothing was claimed yet. On failure no number is fixed. MT_ENOMEM. */
mt_status mt_gatehist_fix_experts(mt_gatehist *h, size_t experts, mt_error *err);

/* Reserves room for `bytes` of records in all, where there is a ledger. pre: bytes <= max_bytes.
 * Does not ask the other members: MT_ELIMIT, and nothing has changed. */
mt_status mt_gatehist_hold(mt_gatehist *h, size_t bytes, mt_error *err);

#endif
