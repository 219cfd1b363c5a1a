/* scan_fast.c -- how this file works.
 *
 * Each row's threshold is its top_k-th largest gate, and every gate that is not below it is counted
 * (add_rows, four rows at a time). Three checks follow: sums that are not finite mean that the
 * caller must count the block the exact way; counts that do not add up mean equal gates at a
 * threshold, and the block is counted again with one gate taken out at a time (count_rows). The
 * loops are compiled for several instruction sets and, with top-1, for the common numbers of
 * experts. */

/* Lets the compiler use vector maxima, whose result for a NaN is unspecified: a block with a NaN is
 * found out by its sums (with integer arithmetic) and done again by the caller. */
#if !defined(__clang__)
#pragma GCC optimize("finite-math-only", "no-signed-zeros")
#endif

#include "gate/scan_fast.h"

#include <assert.h>
#include <float.h>
#include <string.h>

#include "base/clones.h"
#include "gate/scan_wide.h"

#define INLINE static inline __attribute__((always_inline))

INLINE float
largest(const float *row, size_t experts)
{
    float best = row[0];

    for (size_t e = 1; e < experts; e++)
        best = row[e] > best ? row[e] : best;
    return best;
}

INLINE float
largest_below(const float *row, size_t experts, float limit)
{
    float best = -FLT_MAX;

    for (size_t e = 0; e < experts; e++) {
        float x = row[e] < limit ? row[e] : -FLT_MAX;
        best = x > best ? x : best;
    }
    return best;
}

/* The top_k-th largest gate, equal gates taken as one: then too many pass it, and the counts show that.
 */
INLINE float
threshold(const float *row, size_t experts, unsigned top_k)
{
    float edge = largest(row, experts);

    for (unsigned k = 1; k < top_k; k++)
        edge = largest_below(row, experts, edge);
    return edge;
}

/* Four rows at a time: one load and store of the sums for four rows of gates. */
INLINE void
add_four(const float *a, size_t experts, unsigned top_k, double *restrict sum,
         uint32_t *restrict count)
{
    const float *b = a + experts, *c = b + experts, *d = c + experts;
    float ta = threshold(a, experts, top_k), tb = threshold(b, experts, top_k);
    float tc = threshold(c, experts, top_k), td = threshold(d, experts, top_k);

    for (size_t e = 0; e < experts; e++)
        sum[e] += ((double)a[e] + (double)b[e]) + ((double)c[e] + (double)d[e]);
    for (size_t e = 0; e < experts; e++)
        count[e] += (uint32_t)(a[e] >= ta) + (uint32_t)(b[e] >= tb) + (uint32_t)(c[e] >= tc) +
                    (uint32_t)(d[e] >= td);
}

INLINE void
add_one(const float *a, size_t experts, unsigned top_k, double *restrict sum,
        uint32_t *restrict count)
{
    float edge = threshold(a, experts, top_k);

    for (size_t e = 0; e < experts; e++) {
        sum[e] += (double)a[e];
        count[e] += a[e] >= edge;
    }
}

INLINE void
add_rows(const float *x, size_t rows, size_t experts, unsigned top_k, double *restrict sum,
         uint32_t *restrict count)
{
    size_t r = 0;

    for (; r + 4 <= rows; r += 4)
        add_four(x + r * experts, experts, top_k, sum, count);
    for (; r < rows; r++)
        add_one(x + r * experts, experts, top_k, sum, count);
}

/* The numbers of experts for which the loops over rows are compiled with a constant length, where
 * the statistics count top-1. */
#define COMMON_WIDTHS(CASE) CASE(8) CASE(16) CASE(32) CASE(64) CASE(128)

#define ADD(n)                                                                                     \
    case n:                                                                                        \
        add_rows(x, rows, n, 1, sum, count);                                                       \
        break;

MT_CLONES static void
add_block(const float *x, size_t rows, size_t experts, unsigned top_k, double *sum, uint32_t *count)
{
    switch (top_k == 1 ? experts : 0) {
        COMMON_WIDTHS(ADD)
    default:
        add_rows(x, rows, experts, top_k, sum, count);
        break;
    }
}

/* The lowest expert with this gate. pre: there is one. */
INLINE uint32_t
first_with(const float *row, size_t experts, float gate)
{
    int32_t first = INT32_MAX;

    for (size_t e = 0; e < experts; e++) {
        int32_t hit = row[e] == gate ? (int32_t)e : INT32_MAX;
        first = hit < first ? hit : first;
    }
    return (uint32_t)first;
}

/* Counts the top_k one after the other, which ties need: many rows of a bfloat16 router
 * have some, all rows of one that starts from zeros. False when a gate is the number that marks
 * those taken. */
INLINE bool
count_rows(const float *x, size_t rows, size_t experts, unsigned top_k, uint32_t *count)
{
    float rest[MT_FAST_EXPERTS];

    for (size_t r = 0; r < rows; r++) {
        memcpy(rest, x + r * experts, experts * sizeof *rest);
        for (unsigned k = 0; k < top_k; k++) {
            float gate = largest(rest, experts);
            if (gate <= -FLT_MAX) return false;
            uint32_t at = first_with(rest, experts, gate);
            count[at]++;
            if (k + 1 < top_k) rest[at] = -FLT_MAX;
        }
    }
    return true;
}

#define COUNT(n)                                                                                   \
    case n:                                                                                        \
        return count_rows(x, rows, n, 1, count);

MT_CLONES static bool
count_in_turn(const float *x, size_t rows, size_t experts, unsigned top_k, uint32_t *count)
{
    switch (top_k == 1 ? experts : 0) {
        COMMON_WIDTHS(COUNT)
    default:
        return count_rows(x, rows, experts, top_k, count);
    }
}

/* Whether no gate was NaN or infinite. A double holds the sum of a block of floats without
 * overflow, so that its exponent field is all ones only then, and carries into bit 11. */
MT_CLONES static bool
all_finite(const double *sum, size_t experts)
{
    uint64_t carry = 0;

    for (size_t e = 0; e < experts; e++) {
        uint64_t bits;
        memcpy(&bits, &sum[e], sizeof bits);
        carry |= (bits >> 52 & 0x7FF) + 1;
    }
    return carry < 0x800;
}

MT_CLONES static uint64_t
total_of(const uint32_t *count, size_t experts)
{
    uint64_t total = 0;

    for (size_t e = 0; e < experts; e++)
        total += count[e];
    return total;
}

bool
mt_gatefast_block(const float *x, size_t rows, size_t experts, unsigned top_k, double *sum,
                  uint32_t *count)
{
    size_t done = 0;

    assert(experts <= MT_FAST_EXPERTS && rows <= MT_FAST_ROWS);
    assert(top_k > 0 && top_k <= MT_FAST_TOP_K && top_k <= experts);
    memset(sum, 0, experts * sizeof *sum);
    memset(count, 0, experts * sizeof *count);
    if (top_k == 1) done = mt_gatewide_rows(x, rows, experts, sum, count);
    add_block(x + done * experts, rows - done, experts, top_k, sum, count);
    if (!all_finite(sum, experts)) return false;
    if (total_of(count, experts) == (uint64_t)rows * top_k) return true;
    memset(count, 0, experts * sizeof *count);
    done = top_k == 1 ? mt_gatewide_first(x, rows, experts, count) : 0;
    return count_in_turn(x + done * experts, rows - done, experts, top_k, count);
}
