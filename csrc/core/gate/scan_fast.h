/* scan_fast.h -- the vector version of gatescan's sums, for blocks that hold nothing special.
 *
 * It counts expert e whenever gate e is not below the row's top_k-th largest gate, which the
 * compiler turns into vector compares without any index. That is right unless a row has a NaN, an
 * infinity or equal gates at the edge. Equal gates show in counts that do not add up to
 * rows * top_k: the block is then counted again, gate by gate. NaN and infinity show in the sums,
 * and the caller scans the block the exact way.
 *
 * With top-1 and 16, 32, 48 or 64 experts, as most routers have, scan_wide.c is one and a half times
 * as fast as the plain loops: the compiler reduces each row to its maximum on its own, and there
 * four rows share the shuffles. By it the statistics of an append of [2048, 64] stay well below a
 * twelfth of what torch takes for the same (docs/internals/performance.md). */
#ifndef MT_GATE_SCAN_FAST_H
#define MT_GATE_SCAN_FAST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MT_FAST_EXPERTS = 1024, MT_FAST_TOP_K = 8, MT_FAST_ROWS = 512 };

/* Writes (does not add) sum[e] and count[e] of packed rows. False when the block needs the exact
 * way; the arrays then hold nothing of use. pre: experts <= MT_FAST_EXPERTS, 0 < top_k <=
 * min(experts, MT_FAST_TOP_K), rows <= MT_FAST_ROWS. */
bool mt_gatefast_block(const float *x, size_t rows, size_t experts, unsigned top_k, double *sum,
                       uint32_t *count);

#endif
