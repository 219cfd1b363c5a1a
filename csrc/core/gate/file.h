/* file.h -- a gate history as bytes, without pickle.
 *
 *   u64 max_entries  u64 max_bytes  u32 trim  u32 keep  i32 dtype  u32 top_k  u32 statistics  u32 0
 *   u64 experts  u64 appended  u64 len
 *   statistics, when experts > 0 and statistics are kept:
 *       u64 entries  u64 span  u64 marks  then the totals and every mark:
 *       u64 tokens  u64 nonfinite  f64 importance[experts]  u64 load[experts]
 *   len times   u32 rows  u32 dtype
 *   the records, oldest first, one after another
 *
 * Little-endian. The caller adds what frames it: magic, version, checksum. Parsing trusts nothing:
 * a count is held against its maximum or the bytes that are there before memory is taken for it;
 * the limits cost address space only. */
#ifndef MT_GATE_FILE_H
#define MT_GATE_FILE_H

#include <stddef.h>

#include "gate/history.h"

/* Exact size of what dump() writes. pre for both: all entries are filled. */
size_t mt_gatehist_dump_bytes(const mt_gatehist *h);
void mt_gatehist_dump(const mt_gatehist *h, void *dst);

/* The history has the ledger given here, or none: files know nothing of it. Its owner asks the
 * others in the ledger, see owner_asks. MT_EFORMAT with what is wrong, MT_ENOMEM, MT_EOVERFLOW,
 * MT_ELIMIT from the ledger as for a slice; *out is written on MT_OK only. */
mt_status mt_gatehist_parse(const mt_alloc *mem, const mt_vmem_ops *vm, mt_ledger *ledger,
                            const void *src, size_t bytes, mt_gatehist **out, mt_error *err);

#endif
