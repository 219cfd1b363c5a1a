/* history_private.h -- what the files of the gate history share: history.c records, slice.c
 * reads, state.c takes apart and restores. */
#ifndef MT_GATE_HISTORY_PRIVATE_H
#define MT_GATE_HISTORY_PRIVATE_H

#include "gate/history.h"
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

/* Rows of a chunk; never 0. pre: experts are known. */
static inline size_t
mt_gatehist_chunk_rows(const mt_gatehist *h)
{
    return mt_size_max(1, MT_CHUNK / h->experts);
}

/* What a dtype is widened to before it is counted or ordered. */
static inline mt_gate_width
mt_gatehist_width(mt_dtype dtype)
{
    return dtype == MT_F64 ? MT_GATE_F64 : MT_GATE_F32;
}

static inline mt_gaterow_format
mt_gatehist_format(const mt_gatehist *h, size_t experts, mt_dtype dtype)
{
    return (mt_gaterow_format){h->config.keep, h->config.top_k, experts, dtype};
}

/* Allocates scratch and statistics for this many experts and fixes their number, in place of an
 * earlier one. pre: nothing was claimed yet. On failure no number is fixed. MT_ENOMEM. */
mt_status mt_gatehist_fix_experts(mt_gatehist *h, size_t experts, mt_error *err);

/* Makes an empty history that its ledger's reports call so. */
mt_status mt_gatehist_new_named(const mt_alloc *mem, const mt_vmem_ops *vm,
                                const mt_gatehist_config *config, const char *name,
                                mt_gatehist **out, mt_error *err);

/* Reserves room for `bytes` of records in all, where there is a ledger. pre: bytes <= max_bytes.
 * Asks nobody: MT_ELIMIT, and nothing has changed. */
mt_status mt_gatehist_hold(mt_gatehist *h, size_t bytes, mt_error *err);

/* Adds packed rows of any dtype to s, by way of the scratch. raw is not h->wide. */
void mt_gatehist_count(const mt_gatehist *h, const void *raw, mt_dtype dtype, size_t rows,
                       mt_gatestats *s);

#endif
