/* math.c -- how this file works.
 *
 * Each loop is written once, as an inline function of the element type. The function with MT_CLONES
 * that calls it has one case for each type, in which the type is a constant, so that the compiler
 * makes vectors of the loop for each type and for several instruction sets. A sum of squares goes
 * through blocks of 4,096 elements in float first; a block whose float sum cannot be trusted,
 * because squares overflowed or vanished or an element is not finite, is done again in double. */
#include "grad/math.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/clones.h"
#include "base/half.h"
#include "base/size.h"

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 4096 };
#define LANES ((size_t)16)
#define STEP  (4 * LANES)

/* Below this a block's float squares may have lost bits that count: 4096 squares of less than
 * 2^-126, which float flushes or rounds, are less than 2^-34 of it. */
#define SAFE_SUM 0x1p-80

/* With the type a constant, the switch is gone and the loop around it becomes vectors. */
INLINE float
load(const void *data, size_t i, mt_dtype dtype)
{
    switch (dtype) {
    case MT_BF16:
        return mt_bfloat_to_float(((const uint16_t *)data)[i]);
    case MT_F16:
        return mt_half_to_float(((const uint16_t *)data)[i]);
    case MT_F64:
        return (float)((const double *)data)[i];
    default:
        return ((const float *)data)[i];
    }
}

INLINE double
load_double(const void *data, size_t i, mt_dtype dtype)
{
    return dtype == MT_F64 ? ((const double *)data)[i] : (double)load(data, i, dtype);
}

INLINE void
store(void *data, size_t i, mt_dtype dtype, float value)
{
    switch (dtype) {
    case MT_BF16:
        ((uint16_t *)data)[i] = mt_float_to_bfloat(value);
        break;
    case MT_F16:
        ((uint16_t *)data)[i] = mt_float_to_half(value);
        break;
    default:
        ((float *)data)[i] = value;
        break;
    }
}

INLINE size_t
width(mt_dtype dtype)
{
    return dtype == MT_F64 ? 8 : dtype == MT_F32 ? 4 : 2;
}

INLINE const void *
element(const void *data, size_t i, mt_dtype dtype)
{
    return (const char *)data + i * width(dtype);
}

/* --- sums of squares ------------------------------------------------------------------------- */

INLINE double
square_block(const void *data, size_t n, mt_dtype dtype)
{
    double lane[LANES] = {0}, sum = 0;
    size_t i = 0;

    for (; i + STEP <= n; i += STEP) {
        for (size_t l = 0; l < LANES; l++) {
            float a = load(data, i + l, dtype), b = load(data, i + LANES + l, dtype);
            float c = load(data, i + 2 * LANES + l, dtype);
            float d = load(data, i + 3 * LANES + l, dtype);
            lane[l] += (double)((a * a + b * b) + (c * c + d * d));
        }
    }
    for (; i < n; i++) {
        double x = (double)load(data, i, dtype);
        sum += x * x;
    }
    for (size_t l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

/* pre: not float64. */
MT_CLONES static double
square_narrow(mt_dtype dtype, const void *data, size_t n)
{
    switch (dtype) {
    case MT_BF16:
        return square_block(data, n, MT_BF16);
    case MT_F16:
        return square_block(data, n, MT_F16);
    default:
        return square_block(data, n, MT_F32);
    }
}

/* The same in double, in which no square of a float overflows or loses bits. */
INLINE double
square_block_wide(const void *data, size_t n, mt_dtype dtype)
{
    double lane[LANES] = {0}, sum = 0;
    size_t i = 0;

    for (; i + LANES <= n; i += LANES) {
        for (size_t l = 0; l < LANES; l++) {
            double x = load_double(data, i + l, dtype);
            lane[l] += x * x;
        }
    }
    for (; i < n; i++) {
        double x = load_double(data, i, dtype);
        sum += x * x;
    }
    for (size_t l = 0; l < LANES; l++)
        sum += lane[l];
    return sum;
}

MT_CLONES static double
square_wide(mt_dtype dtype, const void *data, size_t n)
{
    switch (dtype) {
    case MT_BF16:
        return square_block_wide(data, n, MT_BF16);
    case MT_F16:
        return square_block_wide(data, n, MT_F16);
    case MT_F64:
        return square_block_wide(data, n, MT_F64);
    default:
        return square_block_wide(data, n, MT_F32);
    }
}

MT_CLONES static bool
all_zero_bits(const void *data, size_t bytes)
{
    const unsigned char *at = data;
    uint64_t any = 0, word;
    size_t i = 0;

    for (; i + sizeof word <= bytes; i += sizeof word) {
        memcpy(&word, at + i, sizeof word);
        any |= word;
    }
    for (; i < bytes; i++)
        any |= at[i];
    return any == 0;
}

/* The sum of one block. Where float squares may have lost bits, the block is added up again in
 * double. It is in the first-level cache by then; one of zeros, which are most of an embedding's
 * gradient, need not even that. */
static double
square(mt_dtype dtype, const void *data, size_t n)
{
    double squares;

    if (dtype == MT_F64) return square_wide(dtype, data, n);
    squares = square_narrow(dtype, data, n);
    if (squares >= SAFE_SUM && squares <= DBL_MAX) return squares;
    if (squares == 0 && all_zero_bits(data, n * width(dtype))) return 0;
    return square_wide(dtype, data, n);
}

static void
count_nonfinite(mt_dtype dtype, const void *data, size_t n, mt_grad_sum *sum)
{
    for (size_t i = 0; i < n; i++) {
        double x = load_double(data, i, dtype);
        sum->infs += fabs(x) > DBL_MAX;
        sum->nans += isnan(x) != 0;
    }
}

mt_grad_sum
mt_grad_square(mt_dtype dtype, const void *data, size_t n)
{
    mt_grad_sum sum = {0};

    for (size_t i = 0; i < n; i += BLOCK) {
        const void *block = element(data, i, dtype);
        size_t size = mt_size_min(BLOCK, n - i);
        double squares = square(dtype, block, size);
        if (!(squares <= DBL_MAX)) count_nonfinite(dtype, block, size, &sum);
        sum.squares += squares;
    }
    return sum;
}

/* --- multiplication -------------------------------------------------------------------------- */

INLINE void
scale(void *data, size_t n, mt_dtype dtype, float factor)
{
    for (size_t i = 0; i < n; i++)
        store(data, i, dtype, load(data, i, dtype) * factor);
}

/* pre: not float64. */
MT_CLONES static void
scale_narrow(mt_dtype dtype, void *data, size_t n, float factor)
{
    switch (dtype) {
    case MT_BF16:
        scale(data, n, MT_BF16, factor);
        break;
    case MT_F16:
        scale(data, n, MT_F16, factor);
        break;
    default:
        scale(data, n, MT_F32, factor);
        break;
    }
}

MT_CLONES static void
scale_f64(void *data, size_t n, double factor)
{
    double *x = data;

    for (size_t i = 0; i < n; i++)
        x[i] = x[i] * factor;
}

/* For a factor that a float would round to 0, to infinity or to few bits. */
static void
scale_wide(mt_dtype dtype, void *data, size_t n, double factor)
{
    for (size_t i = 0; i < n; i++) {
        store(data, i, dtype, (float)((double)load(data, i, dtype) * factor));
    }
}

static bool
fits_float(double factor)
{
    double size = fabs(factor);

    return size >= FLT_MIN && size <= FLT_MAX;
}

void
mt_grad_scale(mt_dtype dtype, void *data, size_t n, double factor)
{
    if (dtype == MT_F64)
        scale_f64(data, n, factor);
    else if (!fits_float(factor))
        scale_wide(dtype, data, n, factor);
    else
        scale_narrow(dtype, data, n, (float)factor);
}
