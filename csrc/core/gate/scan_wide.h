/* scan_wide.h -- what scan_fast.c does by 512-bit vectors, where the processor has them. */
#ifndef MT_GATE_SCAN_WIDE_H
#define MT_GATE_SCAN_WIDE_H

#include <stddef.h>
#include <stdint.h>

/* Adds the first rows of a packed block to sum and count, as gatefast does for top_k = 1, and
 * returns how many it took: 0 without AVX-512 or when experts is not 16, 32, 48 or 64. */
size_t mt_gatewide_rows(const float *x, size_t rows, size_t experts, double *sum, uint32_t *count);

/* Counts each of the first rows once, at the lowest expert that has the row's largest gate, and
 * returns how many rows it took, as above. pre: no NaN. */
size_t mt_gatewide_first(const float *x, size_t rows, size_t experts, uint32_t *count);

#endif
