/* half.h -- one 16-bit float to and from a float32, for loops that widen and narrow as they go.
 *
 * Widening is exact, narrowing rounds to nearest, ties to even, as torch does. */
#ifndef MT_BASE_HALF_H
#define MT_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t
mt_float_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float
mt_float_of(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Exponent and mantissa move up 13 bits; one multiply by 2^112 corrects the bias. Subnormals are
 * counted in their unit instead: moved up they would be subnormal floats, which a process may flush
 * to zero (torch.set_flush_denormal). Infinity and NaN need the full float exponent. */
static inline float
mt_half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7FFFu;
    uint32_t special = magnitude >= 0x7C00u ? 0x7F800000u : 0u;
    uint32_t normal = mt_float_bits(mt_float_of(magnitude << 13) * 0x1p112f);
    uint32_t subnormal = mt_float_bits((float)magnitude * 0x1p-24f);
    uint32_t small = 0u - (uint32_t)(magnitude < 0x400u); /* a mask, where gcc would branch */

    return mt_float_of((subnormal & small) | (normal & ~small) | special | sign);
}

/* Three cases, computed side by side so that the loop stays free of branches: normal numbers round
 * in integer arithmetic, subnormals let the adder round (0.5f has their unit in its last place),
 * and what is at least 65520 becomes infinity. */
static inline uint16_t
mt_float_to_half(float x)
{
    uint32_t bits = mt_float_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    uint32_t odd = (magnitude >> 13) & 1u;
    uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + odd) >> 13;
    uint32_t subnormal = mt_float_bits(mt_float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t half = magnitude < 0x38800000u ? subnormal : normal;

    half = magnitude >= 0x477FF000u ? 0x7C00u : half;
    half = magnitude > 0x7F800000u ? 0x7E00u : half;
    return (uint16_t)(half | sign);
}

static inline uint16_t
mt_float_to_bfloat(float x)
{
    uint32_t bits = mt_float_bits(x), odd = (bits >> 16) & 1u;

    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : (bits + 0x7FFFu + odd) >> 16);
}

static inline float
mt_bfloat_to_float(uint16_t bfloat)
{
    return mt_float_of((uint32_t)bfloat << 16);
}

#endif
