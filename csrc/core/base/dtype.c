#include "base/dtype.h"

#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "base/clones.h"
#include "base/half.h"

static const struct {
    const char *name;
    unsigned char size;
    bool writable;
} facts[MT_DTYPE_COUNT] = {
    [MT_F32] = {"float32", 4, true},
    [MT_F64] = {"float64", 8, true},
    [MT_F16] = {"float16", 2, true},
    [MT_BF16] = {"bfloat16", 2, true},
    [MT_F8_E4M3FN] = {"float8_e4m3fn", 1, false},
    [MT_F8_E5M2] = {"float8_e5m2", 1, false},
    [MT_F8_E4M3FNUZ] = {"float8_e4m3fnuz", 1, false},
    [MT_F8_E5M2FNUZ] = {"float8_e5m2fnuz", 1, false},
};

size_t
mt_dtype_size(mt_dtype dtype)
{
    return facts[dtype].size;
}

const char *
mt_dtype_name(mt_dtype dtype)
{
    return facts[dtype].name;
}

bool
mt_dtype_writable(mt_dtype dtype)
{
    return facts[dtype].writable;
}

/* One 8-bit float: `mantissa` bits wide, exponents biased by `bias`. The finite formats (fn, fnuz)
 * have no infinity; fnuz keeps its one NaN where -0 would be. */
static float
byte_to_float(unsigned byte, unsigned mantissa, int bias, bool fnuz)
{
    unsigned exponent = (byte & 0x7Fu) >> mantissa, unit = 1u << mantissa;
    unsigned fraction = byte & (unit - 1u);
    bool ieee = mantissa == 2 && !fnuz;
    float value;
    int power;

    if (fnuz && byte == 0x80u) return mt_float_of(0x7FC00000u);
    if (!fnuz && !ieee && (byte & 0x7Fu) == 0x7Fu) return mt_float_of(0x7FC00000u);
    if (ieee && exponent == 31)
        return mt_float_of(fraction ? 0x7FC00000u : 0x7F800000u | (byte & 0x80u) << 24);
    /* (1 + fraction / unit) * 2^(exponent - bias); a subnormal has no leading 1 and exponent 1. The
     * power of two is built as a float's exponent field. */
    value = (float)(exponent ? unit + fraction : fraction);
    power = (int)(exponent ? exponent : 1) - bias - (int)mantissa;
    value *= mt_float_of((uint32_t)(power + 127) << 23);
    return byte & 0x80u ? -value : value;
}

MT_CLONES static void
widen_half(const uint16_t *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_half_to_float(src[i]);
}

MT_CLONES static void
widen_bfloat(const uint16_t *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_bfloat_to_float(src[i]);
}

MT_CLONES static void
widen_double(const double *src, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = (float)src[i];
}

/* 8-bit gates are rare: a table of 256 per call is cheap enough and keeps no state. */
static void
widen_byte(mt_dtype dtype, const unsigned char *src, float *dst, size_t n)
{
    bool wide = dtype == MT_F8_E5M2 || dtype == MT_F8_E5M2FNUZ;
    bool fnuz = dtype == MT_F8_E4M3FNUZ || dtype == MT_F8_E5M2FNUZ;
    unsigned mantissa = wide ? 2 : 3;
    int bias = (wide ? 15 : 7) + fnuz;
    float table[256];

    for (unsigned byte = 0; byte < 256; byte++)
        table[byte] = byte_to_float(byte, mantissa, bias, fnuz);
    for (size_t i = 0; i < n; i++)
        dst[i] = table[src[i]];
}

void
mt_widen_f32(mt_dtype dtype, const void *src, float *dst, size_t n)
{
    switch (dtype) {
    case MT_F32:
        memcpy(dst, src, n * sizeof *dst);
        break;
    case MT_F64:
        widen_double(src, dst, n);
        break;
    case MT_F16:
        widen_half(src, dst, n);
        break;
    case MT_BF16:
        widen_bfloat(src, dst, n);
        break;
    default:
        widen_byte(dtype, src, dst, n);
        break;
    }
}

MT_CLONES static void
narrow_half(const float *src, uint16_t *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_float_to_half(src[i]);
}

MT_CLONES static void
narrow_bfloat(const float *src, uint16_t *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = mt_float_to_bfloat(src[i]);
}

MT_CLONES static void
narrow_double(const float *src, double *dst, size_t n)
{
    for (size_t i = 0; i < n; i++)
        dst[i] = (double)src[i];
}

void
mt_narrow_f32(mt_dtype dtype, const float *src, void *dst, size_t n)
{
    assert(mt_dtype_writable(dtype));
    switch (dtype) {
    case MT_F64:
        narrow_double(src, dst, n);
        break;
    case MT_F16:
        narrow_half(src, dst, n);
        break;
    case MT_BF16:
        narrow_bfloat(src, dst, n);
        break;
    default:
        memcpy(dst, src, n * sizeof *src);
        break;
    }
}
