/* scan.h -- one pass over a block of gate rows: who was chosen, and how much was given.
 *
 *            expert 0   1    2    3
 *   token 0 [  .1  .6   .2   .1 ]   importance[e] += column e      (float64)
 *   token 1 [  .5  .1   .1   .3 ]   load[e]       += 1 for each of a row's top_k largest
 *
 * A row with a NaN or an infinity is counted in `nonfinite` and left out of both sums, so that one
 * bad token does not spoil statistics kept for ever. Equal gates go to the lower expert. */
#ifndef MT_GATE_SCAN_H
#define MT_GATE_SCAN_H

#include <stddef.h>
#include <stdint.h>

enum { MT_TOP_K_MAX = 64, MT_EXPERTS_MAX = 1 << 20 };

/* How gates are written where the statistics read them; narrower types are widened before. */
typedef enum mt_gate_width { MT_GATE_F32, MT_GATE_F64 } mt_gate_width;

typedef struct mt_gatesums {
    double *importance; /* [experts], sum of gates */
    uint64_t *load;     /* [experts], how often among the top_k */
    uint64_t tokens;    /* rows seen, non-finite ones included */
    uint64_t nonfinite; /* rows with a NaN or an infinity */
} mt_gatesums;

/* Adds packed rows to the sums. pre: 0 < top_k <= min(experts, MT_TOP_K_MAX). */
void mt_gatescan(const void *x, mt_gate_width width, size_t rows, size_t experts, unsigned top_k,
                 mt_gatesums *sums);

/* Adds one row of which only the top_k largest gates are known, with their experts. */
void mt_gatescan_kept(const double *gates, const uint32_t *experts, unsigned top_k,
                      mt_gatesums *sums);

/* The experts of one packed row's k largest gates, largest first, ties to the lower expert;
 * NaN sorts as largest. pre: 0 < k <= min(experts, MT_TOP_K_MAX). */
void mt_gatescan_top(const void *row, mt_gate_width width, size_t experts, unsigned k,
                     uint32_t *out);

#endif
