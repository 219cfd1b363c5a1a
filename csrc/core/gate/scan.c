#include "gate/scan.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "gate/scan_fast.h"
#include "base/size.h"

/* True when gate a goes before the kept gate b: larger, or a NaN where b is none. */
static inline bool
before(double a, double b)
{
    return a > b || (isnan(a) && !isnan(b));
}

/* Insertion into a list of k: `kept` and `out` are sorted, largest first. */
static void
insert(double gate, uint32_t expert, unsigned *held, unsigned k, double *kept, uint32_t *out)
{
    unsigned at = *held;

    if (at == k && !before(gate, kept[k - 1])) return;
    if (at == k) at--;
    for (; at > 0 && before(gate, kept[at - 1]); at--) {
        kept[at] = kept[at - 1];
        out[at] = out[at - 1];
    }
    kept[at] = gate;
    out[at] = expert;
    if (*held < k) ++*held;
}

static inline double
gate_at(const void *row, mt_gate_width width, size_t e)
{
    return width == MT_GATE_F64 ? ((const double *)row)[e] : (double)((const float *)row)[e];
}

void
mt_gatescan_top(const void *row, mt_gate_width width, size_t experts, unsigned k, uint32_t *out)
{
    double kept[MT_TOP_K_MAX];
    unsigned held = 0;

    assert(k > 0 && k <= MT_TOP_K_MAX && k <= experts);
    for (size_t e = 0; e < experts; e++)
        insert(gate_at(row, width, e), (uint32_t)e, &held, k, kept, out);
}

static void
count_top(const uint32_t *top, unsigned top_k, uint64_t *load)
{
    for (unsigned k = 0; k < top_k; k++)
        load[top[k]]++;
}

/* The definition of the statistics for one row; the vector version must agree with it. */
static void
exact_row(const void *row, mt_gate_width width, size_t experts, unsigned top_k, mt_gatesums *sums)
{
    uint32_t top[MT_TOP_K_MAX];
    bool finite = true;

    for (size_t e = 0; e < experts; e++)
        finite &= isfinite(gate_at(row, width, e)) != 0;
    if (!finite) {
        sums->nonfinite++;
        return;
    }
    for (size_t e = 0; e < experts; e++)
        sums->importance[e] += gate_at(row, width, e);
    mt_gatescan_top(row, width, experts, top_k, top);
    count_top(top, top_k, sums->load);
}

static void
exact_rows(const void *x, mt_gate_width width, size_t rows, size_t experts, unsigned top_k,
           mt_gatesums *sums)
{
    size_t row = experts * (width == MT_GATE_F64 ? sizeof(double) : sizeof(float));

    for (size_t r = 0; r < rows; r++)
        exact_row((const char *)x + r * row, width, experts, top_k, sums);
}

static void
scan_block(const float *x, size_t rows, size_t experts, unsigned top_k, mt_gatesums *sums)
{
    double sum[MT_FAST_EXPERTS];
    uint32_t count[MT_FAST_EXPERTS];

    if (!mt_gatefast_block(x, rows, experts, top_k, sum, count)) {
        exact_rows(x, MT_GATE_F32, rows, experts, top_k, sums);
        return;
    }
    for (size_t e = 0; e < experts; e++) {
        sums->importance[e] += sum[e];
        sums->load[e] += count[e];
    }
}

static void
scan_fast(const float *x, size_t rows, size_t experts, unsigned top_k, mt_gatesums *sums)
{
    for (size_t r = 0; r < rows; r += MT_FAST_ROWS)
        scan_block(x + r * experts, mt_size_min(rows - r, MT_FAST_ROWS), experts, top_k, sums);
}

void
mt_gatescan(const void *x, mt_gate_width width, size_t rows, size_t experts, unsigned top_k,
            mt_gatesums *sums)
{
    assert(top_k > 0 && top_k <= MT_TOP_K_MAX && top_k <= experts);
    sums->tokens += rows;
    if (width == MT_GATE_F32 && experts <= MT_FAST_EXPERTS && top_k <= MT_FAST_TOP_K) {
        scan_fast(x, rows, experts, top_k, sums);
        return;
    }
    exact_rows(x, width, rows, experts, top_k, sums);
}

void
mt_gatescan_kept(const double *gates, const uint32_t *experts, unsigned top_k, mt_gatesums *sums)
{
    bool finite = true;

    sums->tokens++;
    for (unsigned k = 0; k < top_k; k++)
        finite &= isfinite(gates[k]) != 0;
    if (!finite) {
        sums->nonfinite++;
        return;
    }
    for (unsigned k = 0; k < top_k; k++)
        sums->importance[experts[k]] += gates[k];
    count_top(experts, top_k, sums->load);
}
