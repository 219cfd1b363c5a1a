/* The fused statistics against a naive reference in doubles: loads exactly, sums to 1e-12. */
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kit/check.h"
#include "core/gate/scan_fast.h"
#include "core/gate/scan.h"
#include "kit/rng.h"

enum {
    BLOCK = MT_FAST_ROWS, /* rows that are scanned together */
    MANY = 2 * BLOCK + 88,
    MOST_EXPERTS = 1025,
    MOST_GATES = MANY * 130
};

typedef struct reference {
    double importance[MOST_EXPERTS], magnitude[MOST_EXPERTS];
    uint64_t load[MOST_EXPERTS], tokens, nonfinite;
} reference;

static float gates[MOST_GATES];

/* The k-th pass finds the largest gate not yet taken; of equal ones the first. */
static void
naive_top(const double *row, size_t experts, unsigned top_k, size_t *out)
{
    bool taken[MOST_EXPERTS] = {false};

    for (unsigned k = 0; k < top_k; k++) {
        size_t best = experts;
        for (size_t e = 0; e < experts; e++) {
            if (taken[e]) continue;
            if (best == experts || row[e] > row[best] || (isnan(row[e]) && !isnan(row[best])))
                best = e;
        }
        taken[best] = true;
        out[k] = best;
    }
}

static void
naive_row(const double *row, size_t experts, unsigned top_k, reference *ref)
{
    size_t top[MT_TOP_K_MAX];
    bool finite = true;

    ref->tokens++;
    for (size_t e = 0; e < experts; e++)
        if (!isfinite(row[e])) finite = false;
    if (!finite) {
        ref->nonfinite++;
        return;
    }
    for (size_t e = 0; e < experts; e++) {
        ref->importance[e] += row[e];
        ref->magnitude[e] += fabs(row[e]);
    }
    naive_top(row, experts, top_k, top);
    for (unsigned k = 0; k < top_k; k++)
        ref->load[top[k]]++;
}

typedef struct found {
    double importance[MOST_EXPERTS + 1];
    uint64_t load[MOST_EXPERTS + 1];
    mt_gatesums sums;
} found;

/* Sums that hold something already, and a guard behind each array. */
static void
begin(found *f, size_t experts)
{
    for (size_t e = 0; e <= experts; e++) {
        f->importance[e] = e == experts ? -99 : 0;
        f->load[e] = e == experts ? 99 : 1000 + e;
    }
    f->sums = (mt_gatesums){f->importance, f->load, 77, 55};
}

static void
agrees(const found *f, const reference *ref, size_t experts)
{
    CHECK(f->sums.tokens == 77 + ref->tokens && f->sums.nonfinite == 55 + ref->nonfinite);
    for (size_t e = 0; e < experts; e++) {
        CHECK(f->load[e] == 1000 + e + ref->load[e]);
        CHECK(fabs(f->importance[e] - ref->importance[e]) <= 1e-12 * ref->magnitude[e]);
    }
    CHECK(f->importance[experts] == -99 && f->load[experts] == 99);
}

/* The same gates as float32 and as float64. */
static void
scans_like_the_reference(size_t rows, size_t experts, unsigned top_k)
{
    static reference ref;
    static found single, twice;
    static double wide[MOST_GATES];

    ref = (reference){.tokens = 0};
    for (size_t i = 0; i < rows * experts; i++)
        wide[i] = (double)gates[i];
    for (size_t r = 0; r < rows; r++)
        naive_row(wide + r * experts, experts, top_k, &ref);
    begin(&single, experts);
    mt_gatescan(gates, MT_GATE_F32, rows, experts, top_k, &single.sums);
    agrees(&single, &ref, experts);
    begin(&twice, experts);
    mt_gatescan(wide, MT_GATE_F64, rows, experts, top_k, &twice.sums);
    agrees(&twice, &ref, experts);
}

typedef float draw(rng *r);

static float
probability(rng *r)
{
    return (float)rng_unit(r);
}

static float
logit(rng *r)
{
    return (float)(rng_unit(r) * 20 - 10);
}

static float
negative(rng *r)
{
    return (float)(-rng_unit(r) - 1);
}

static float
one_of_four(rng *r)
{
    return (float)rng_below(r, 4) * 0.25f;
}

static float
signed_zero(rng *r)
{
    static const float values[] = {0.0f, -0.0f, 0.0f, -0.0f, -1.0f, 0x1p-149f, -0x1p-149f};

    return values[rng_below(r, sizeof values / sizeof *values)];
}

static float
extreme(rng *r)
{
    static const float values[] = {FLT_MAX, -FLT_MAX, FLT_MIN, 1.0f, -0x1p-149f};
    double near = (double)FLT_MAX * (1 - rng_unit(r) / 8);

    return rng_below(r, 3) ? (float)(rng_below(r, 2) ? near : -near) : values[rng_below(r, 5)];
}

static float
anything(rng *r)
{
    static const float values[] = {NAN, INFINITY, -INFINITY};

    return rng_below(r, 60) == 0 ? values[rng_below(r, 3)] : logit(r);
}

static void
fill(rng *r, draw *one, size_t n)
{
    CHECK(n <= MOST_GATES);
    for (size_t i = 0; i < n; i++)
        gates[i] = one(r);
}

static unsigned
at_most(size_t experts, unsigned top_k)
{
    return experts < top_k ? (unsigned)experts : top_k;
}

static void
every_width_and_top_k_agree(void)
{
    rng r = rng_seeded(1);

    for (size_t experts = 1; experts <= 130; experts++)
        for (unsigned top_k = 1; top_k <= at_most(experts, 9); top_k++) {
            size_t rows = 1 + rng_below(&r, 23);
            fill(&r, probability, rows * experts);
            scans_like_the_reference(rows, experts, top_k);
        }
}

static void
the_widest_rows_agree(void)
{
    static const size_t widths[] = {255, 256, 257, 1023, 1024, 1025};
    rng r = rng_seeded(2);

    for (size_t i = 0; i < 6; i++)
        for (unsigned top_k = 1; top_k <= 9; top_k += i < 4 ? 2 : 1) {
            fill(&r, i % 2 ? probability : logit, 11 * widths[i]);
            scans_like_the_reference(11, widths[i], top_k);
        }
}

/* Whatever the gates are, for widths that have their own loop and ones that do not. */
static void
every_kind_of_gate_agrees(void)
{
    static draw *const kinds[] = {probability, logit,   negative, one_of_four,
                                  signed_zero, extreme, anything};
    static const size_t widths[] = {1, 2, 3, 5, 8, 9, 16, 32, 33, 48, 64, 128};

    for (size_t i = 0; i < sizeof widths / sizeof *widths * 7; i++) {
        rng r = rng_seeded(i);
        size_t width = widths[i / 7];
        for (unsigned top_k = 1; top_k <= at_most(width, 9); top_k += 1 + top_k / 3)
            for (size_t rows = 1; rows < 64; rows += 1 + rows) {
                fill(&r, kinds[i % 7], rows * width);
                scans_like_the_reference(rows, width, top_k);
            }
    }
}

static void
rows_of_one_value_agree(void)
{
    static const float values[] = {0.0f, -0.0f, 0.125f, -3.0f, FLT_MAX, -FLT_MAX};

    for (size_t v = 0; v < sizeof values / sizeof *values; v++)
        for (size_t experts = 1; experts <= 17; experts++) {
            size_t rows = BLOCK + 44;
            for (size_t i = 0; i < rows * experts; i++)
                gates[i] = values[v];
            for (unsigned top_k = 1; top_k <= at_most(experts, 9); top_k++)
                scans_like_the_reference(rows, experts, top_k);
        }
}

static void
any_number_of_rows_agrees(void)
{
    static const size_t counts[] = {
        0, 1, 2, 3, 4, 5, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, MANY};
    rng r = rng_seeded(8);

    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (unsigned top_k = 1; top_k <= 3; top_k++) {
            fill(&r, probability, counts[i] * 8);
            scans_like_the_reference(counts[i], 8, top_k);
            fill(&r, logit, counts[i] * 16);
            scans_like_the_reference(counts[i], 16, top_k);
            fill(&r, one_of_four, counts[i] * 7); /* every block the exact way */
            scans_like_the_reference(counts[i], 7, top_k);
        }
}

/* One or two special gates in one row, at places where blocks and groups of four begin and end. */
static void
a_special_row_is_left_out(size_t experts, unsigned top_k, float first, float second)
{
    static const size_t places[] = {
        0, 3, 4, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, MANY - 1};
    rng r = rng_seeded(experts);

    fill(&r, logit, MANY * experts);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        float *row = gates + places[i] * experts;
        float left = row[0], right = row[experts - 1];
        row[experts - 1] = second;
        row[0] = first;
        scans_like_the_reference(MANY, experts, top_k);
        row[experts - 1] = right;
        row[0] = left;
    }
}

static void
rows_that_are_not_finite_are_left_out(void)
{
    static const size_t widths[] = {1, 2, 8, 11, 16, 48};

    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (unsigned top_k = 1; top_k <= at_most(widths[i], 2); top_k++) {
            a_special_row_is_left_out(widths[i], top_k, NAN, 0);
            a_special_row_is_left_out(widths[i], top_k, 0, -NAN);
            a_special_row_is_left_out(widths[i], top_k, INFINITY, 1);
            a_special_row_is_left_out(widths[i], top_k, -INFINITY, 0);
            a_special_row_is_left_out(widths[i], top_k, INFINITY, -INFINITY);
        }
}

/* All pairs of all rows of three gates out of seven values: no two rows can hide each other, nor can
 * infinities whose sum is not one. */
static void
every_pair_of_small_rows_agrees(void)
{
    static const float values[] = {-1.0f, -0.0f, 0.0f, 1.0f, NAN, INFINITY, -INFINITY};

    for (unsigned code = 0; code < 7 * 7 * 7 * 7 * 7 * 7; code++) {
        unsigned rest = code;
        for (size_t i = 0; i < 6; i++, rest /= 7)
            gates[i] = values[rest % 7];
        for (unsigned top_k = 1; top_k <= 3; top_k++)
            scans_like_the_reference(2, 3, top_k);
    }
}

/* The fast way may always say no, but then it is not fast: it must take what is not special. */
static bool
fast_takes(size_t rows, size_t experts, unsigned top_k)
{
    static double sum[MT_FAST_EXPERTS];
    static uint32_t count[MT_FAST_EXPERTS];

    return mt_gatefast_block(gates, rows, experts, top_k, sum, count);
}

static void
distinct_gates_go_the_fast_way_and_others_do_not(void)
{
    rng r = rng_seeded(13);

    for (size_t experts = 2; experts <= 130; experts++)
        for (unsigned top_k = 1; top_k <= at_most(experts - 1, MT_FAST_TOP_K); top_k++) {
            size_t rows = 9 + experts % 4;
            for (size_t i = 0; i < rows * experts; i++) /* a permutation in every row */
                gates[i] = (float)((i % experts * 131 + i / experts * 7 + top_k) % experts);
            CHECK(fast_takes(rows, experts, top_k));
            gates[rng_below(&r, rows * experts)] = rng_below(&r, 2) ? NAN : -INFINITY;
            CHECK(!fast_takes(rows, experts, top_k));
        }
    gates[0] = gates[1] = 1; /* a tie that decides, and one that does not */
    CHECK(fast_takes(1, 2, 1) && fast_takes(1, 2, 2));
    gates[0] = gates[1] = -FLT_MAX; /* the number that marks gates already taken */
    CHECK(!fast_takes(1, 2, 1));
}

static void
doubles_are_compared_as_doubles(void)
{
    double rows[] = {1, 1 + 0x1p-52, 1, -1, -1 - 0x1p-52, -1 - 0x1p-51, 1e308, 1.1e308, 0};
    found f;

    begin(&f, 3);
    mt_gatescan(rows, MT_GATE_F64, 3, 3, 1, &f.sums);
    CHECK(f.load[0] == 1000 + 1 && f.load[1] == 1001 + 2 && f.load[2] == 1002);
    CHECK(f.importance[1] == 1.1e308 && f.sums.nonfinite == 55);
}

static void
orders_like_the_reference(const double *row, size_t experts)
{
    float narrow[MOST_EXPERTS];
    size_t want[MT_TOP_K_MAX];

    for (size_t e = 0; e < experts; e++)
        narrow[e] = (float)row[e];
    for (unsigned k = 1; k <= at_most(experts, MT_TOP_K_MAX); k++) {
        uint32_t got[MT_TOP_K_MAX + 1], twice[MT_TOP_K_MAX + 1];
        naive_top(row, experts, k, want);
        got[k] = twice[k] = 4711;
        mt_gatescan_top(narrow, MT_GATE_F32, experts, k, got);
        mt_gatescan_top(row, MT_GATE_F64, experts, k, twice);
        for (unsigned i = 0; i < k; i++)
            CHECK(got[i] == want[i] && twice[i] == want[i]);
        CHECK(got[k] == 4711 && twice[k] == 4711);
    }
}

static void
the_largest_come_first_and_nan_before_all(void)
{
    static draw *const kinds[] = {logit, one_of_four, signed_zero, anything, extreme};
    rng r = rng_seeded(11);
    double row[MOST_EXPERTS];

    for (size_t experts = 1; experts <= 80; experts++)
        for (size_t kind = 0; kind < 5; kind++) {
            for (size_t e = 0; e < experts; e++)
                row[e] = (double)kinds[kind](&r);
            orders_like_the_reference(row, experts);
        }
}

int
main(void)
{
    RUN(every_width_and_top_k_agree);
    RUN(the_widest_rows_agree);
    RUN(every_kind_of_gate_agrees);
    RUN(rows_of_one_value_agree);
    RUN(any_number_of_rows_agrees);
    RUN(rows_that_are_not_finite_are_left_out);
    RUN(every_pair_of_small_rows_agrees);
    RUN(distinct_gates_go_the_fast_way_and_others_do_not);
    RUN(doubles_are_compared_as_doubles);
    RUN(the_largest_come_first_and_nan_before_all);
    CHECK_DONE();
}
