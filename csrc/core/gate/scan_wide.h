/* scan_wide.h -- gatefast's sums by 512-bit vectors, where the processor has them.
 *
 * The plain loops of scan_fast.c are one and a half times slower at 64 experts, because the
 * compiler reduces each row to its maximum on its own; here four rows share the shuffles. */
#ifndef MT_GATE_SCAN_WIDE_H
#define MT_GATE_SCAN_WIDE_H

#include <stddef.h>
#include <stdint.h>

/* Adds the first rows of a packed block to sum and count, as gatefast does for top_k = 1, and
 * returns how many it took: 0 without AVX-512 or when experts is not 16, 32, 48 or 64. Unless
 * copy is NULL, writes those rows there by streaming stores: pre: 64-byte aligned. The sums hide
 * behind the stores: both together take little longer than the copy. */
size_t mt_gatewide_rows(const float *x, size_t rows, size_t experts, double *sum, uint32_t *count,
                        float *copy);

/* Counts each of the first rows once, at the lowest expert that has the row's largest gate, and
 * returns how many rows it took, as above. pre: no NaN. */
size_t mt_gatewide_first(const float *x, size_t rows, size_t experts, uint32_t *count);

#endif
