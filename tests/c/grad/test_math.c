/* gradmath: how right the sums of squares are, and what happens to every odd number. */
#include "grad/model.h"

static const mt_dtype dtypes[] = {MT_F32, MT_F64, MT_F16, MT_BF16};

static float *
floats(size_t n)
{
    float *x = malloc(n * sizeof *x);

    CHECK(x != NULL);
    return x;
}

static double
error_of(const float *x, size_t n)
{
    long double exact = 0; /* one after the other, a double's own error would count */

    for (size_t i = 0; i < n; i++)
        exact += (long double)x[i] * (long double)x[i];
    return fabs(sqrt(mt_grad_square(MT_F32, x, n).squares / (double)exact) - 1);
}

/* Equal values err all the same way, block after block: the worst that a long tensor can do. */
static void
a_norm_is_right_to_1e_7(void)
{
    enum { N = 1 << 21 };
    float *x = floats(N);
    rng r = rng_seeded(1);

    for (int round = 0; round < 20; round++) {
        float value = (float)(rng_unit(&r) + 0.01);
        for (size_t i = 0; i < N; i++)
            x[i] = value;
        CHECK(error_of(x, N) <= 1e-7);
    }
    for (size_t i = 0; i < N; i++)
        x[i] = (float)(rng_unit(&r) - 0.5);
    CHECK(error_of(x, N) <= 1e-8);
    free(x);
}

/* Squares that overflow a float, vanish in it or lose bits: in double, to its last digits. */
static void
very_large_and_very_small_values_keep_all_digits(void)
{
    static const float sizes[] = {1e25f, 3e38f, 1e-25f, 1e-38f, 1e-45f, 1.2e-19f, 1e-20f};
    enum { N = 10000 };
    float *x = floats(N);

    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        for (size_t i = 0; i < N; i++)
            x[i] = i % 3 == 0 ? -sizes[s] : sizes[s];
        CHECK(error_of(x, N) <= (s == 5 ? 1e-7 : 1e-13));
    }
    for (size_t i = 0; i < N; i++) /* one large value beside small ones in each block */
        x[i] = i % 4096 == 77 ? 1e30f : 1e-3f;
    CHECK(error_of(x, N) <= 1e-13);
    free(x);
}

/* A sum of 0 in float is said of zeros of both signs, and of what float squares lose. */
static void
zeros_are_told_from_what_vanishes(void)
{
    enum { N = 2 * 4096 + 77 };
    double room[N];

    for (size_t d = 0; d < 4; d++) {
        mt_grad_span s = {room, N, dtypes[d]};
        double tiny = dtypes[d] == MT_F16 ? 0x1p-24 : 0x1p-133; /* the least that all have */

        for (size_t i = 0; i < N; i++)
            grad_put(&s, i, i % 3 == 0 ? -0.0 : 0.0);
        CHECK(mt_grad_square(s.dtype, room, N).squares == 0);
        for (size_t at = 0; at < N; at += 13) {
            grad_put(&s, at, -tiny);
            CHECK(mt_grad_square(s.dtype, room, N).squares == tiny * tiny);
            grad_put(&s, at, 0);
        }
    }
}

static void
float64_is_squared_in_double(void)
{
    double x[1000], exact = 0;

    for (size_t i = 0; i < 1000; i++) {
        x[i] = 1e-100 * (double)(i + 1);
        exact += x[i] * x[i];
    }
    CHECK(fabs(mt_grad_square(MT_F64, x, 1000).squares / exact - 1) <= 1e-13);
    for (size_t i = 0; i < 1000; i++)
        x[i] = 1e200;
    mt_grad_sum sum = mt_grad_square(MT_F64, x, 1000);
    CHECK(isinf(sum.squares) && sum.infs == 0 && sum.nans == 0); /* the sum is, no element is */
}

/* At every place of a block and of a tail. */
static void
each_infinity_and_nan_is_counted(void)
{
    enum { N = 4096 + 77 };
    double room[N];

    for (size_t d = 0; d < 4; d++) {
        mt_grad_span s = {room, N, dtypes[d]};
        for (size_t i = 0; i < N; i++)
            grad_put(&s, i, 0.5);
        for (size_t at = 0; at < N; at += 13) {
            grad_put(&s, at, (double)NAN);
            grad_put(&s, (at + 5000) % N, at % 2 ? (double)INFINITY : -(double)INFINITY);
            mt_grad_sum sum = mt_grad_square(s.dtype, room, N);
            CHECK(sum.nans == 1 && sum.infs == 1 && isnan(sum.squares));
            grad_put(&s, at, 0.5);
            sum = mt_grad_square(s.dtype, room, N);
            CHECK(sum.nans == 0 && sum.infs == 1 && isinf(sum.squares));
            grad_put(&s, (at + 5000) % N, 0.5);
        }
        CHECK(mt_grad_square(s.dtype, room, N).squares == 0.25 * N);
    }
}

static void
check_scaled(double factor)
{
    enum { N = 200 };
    static const double values[] = {1, -1, 1e30, 3e38, 1e-38, 1e-44, 0, -0.0, 65504, 6e-8, 0.1};
    double room[N], before[N];

    for (size_t d = 0; d < 4; d++) {
        mt_grad_span s = {room, N, dtypes[d]}, old = {before, N, dtypes[d]};
        for (size_t i = 0; i < N; i++)
            grad_put(&s, i, values[i % 11] * (double)(1 + i / 11));
        grad_put(&s, 150, (double)NAN);
        grad_put(&s, 151, -(double)INFINITY);
        memcpy(before, room, sizeof room);
        mt_grad_scale(s.dtype, room, N, factor);
        for (size_t i = 0; i < N; i++)
            CHECK(grad_same(grad_get(&s, i), grad_scaled(&old, i, factor)));
    }
}

static void
a_factor_does_what_one_element_says(void)
{
    static const double factors[] = {1,    0.3,   -2,    0x1p-16, 0,           1e-40,
                                     1e40, 1e-60, 1e300, 3.4e38,  1.17549e-38, 1e-45};

    for (size_t f = 0; f < sizeof factors / sizeof *factors; f++)
        check_scaled(factors[f]);
    check_scaled((double)NAN);
    check_scaled((double)INFINITY);
}

/* A factor of 1e-45 would be a float of one bit: 1e38 * 1e-45 must still be 1e-7. */
static void
a_factor_beyond_float_keeps_its_digits(void)
{
    float x[3] = {1e38f, 1e-30f, -2e38f};

    mt_grad_scale(MT_F32, x, 3, 1e-45);
    CHECK(fabs((double)x[0] / 1e-7 - 1) < 1e-6 && x[1] == 0);
    mt_grad_scale(MT_F32, x, 3, 1e45);
    CHECK(fabs((double)x[2] / -2e38 - 1) < 1e-6);
}

int
main(void)
{
    RUN(a_norm_is_right_to_1e_7);
    RUN(very_large_and_very_small_values_keep_all_digits);
    RUN(zeros_are_told_from_what_vanishes);
    RUN(float64_is_squared_in_double);
    RUN(each_infinity_and_nan_is_counted);
    RUN(a_factor_does_what_one_element_says);
    RUN(a_factor_beyond_float_keeps_its_digits);
    CHECK_DONE();
}
