/* Every 16-bit and 8-bit float, decoded by ldexp and rounded by searching a table of all values. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kit/check.h"
#include "core/base/dtype.h"
#include "kit/rng.h"

static float
float_of(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t
bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A 16-bit format: sign, exponent, `mantissa` bits of fraction. value[m] is what the magnitude m
 * means; value[infinity] is what the next binade would begin with, where rounding overflows. */
typedef struct format {
    mt_dtype dtype;
    int mantissa, bias;
    unsigned infinity;
    double value[0x8000];
} format;

static format half = {.dtype = MT_F16, .mantissa = 10, .bias = 15, .infinity = 0x7C00};
static format bfloat = {.dtype = MT_BF16, .mantissa = 7, .bias = 127, .infinity = 0x7F80};

static void
tabulate(format *f)
{
    for (unsigned m = 0; m <= f->infinity; m++) {
        int exponent = (int)(m >> f->mantissa), unit = 1 << f->mantissa;
        int fraction = (int)m % unit;
        int power = (exponent == 0 ? 1 : exponent) - f->bias - f->mantissa;
        f->value[m] = ldexp(exponent == 0 ? fraction : unit + fraction, power);
    }
}

/* The bits that x rounds to: the nearest value; of two equally near ones the even. */
static uint16_t
nearest(const format *f, float x)
{
    unsigned low = 0, high = f->infinity, sign = signbit(x) ? 0x8000 : 0;
    double v = fabs((double)x), below, above;

    if (v >= f->value[high]) return (uint16_t)(sign | high);
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (f->value[middle] <= v)
            low = middle;
        else
            high = middle;
    }
    below = v - f->value[low];
    above = f->value[high] - v;
    if (below == above) return (uint16_t)(sign | (low % 2 == 0 ? low : high));
    return (uint16_t)(sign | (below < above ? low : high));
}

static uint16_t
narrowed(const format *f, float x)
{
    uint16_t bits;

    mt_narrow_f32(f->dtype, &x, &bits, 1);
    return bits;
}

static float
widened(mt_dtype dtype, unsigned bits)
{
    unsigned char byte = (unsigned char)bits;
    uint16_t pair = (uint16_t)bits;
    float x;

    mt_widen_f32(dtype, mt_dtype_size(dtype) == 1 ? (const void *)&byte : &pair, &x, 1);
    return x;
}

static void
sizes_and_names_are_torchs(void)
{
    static const struct {
        mt_dtype dtype;
        size_t size;
        const char *name;
        bool writable;
    } facts[] = {
        {MT_F32, 4, "float32", true},
        {MT_F64, 8, "float64", true},
        {MT_F16, 2, "float16", true},
        {MT_BF16, 2, "bfloat16", true},
        {MT_F8_E4M3FN, 1, "float8_e4m3fn", false},
        {MT_F8_E5M2, 1, "float8_e5m2", false},
        {MT_F8_E4M3FNUZ, 1, "float8_e4m3fnuz", false},
        {MT_F8_E5M2FNUZ, 1, "float8_e5m2fnuz", false},
    };

    CHECK(sizeof facts / sizeof *facts == MT_DTYPE_COUNT);
    for (int i = 0; i < MT_DTYPE_COUNT; i++) {
        CHECK((int)facts[i].dtype == i); /* the numbers are in files */
        CHECK(mt_dtype_size(facts[i].dtype) == facts[i].size);
        CHECK(strcmp(mt_dtype_name(facts[i].dtype), facts[i].name) == 0);
        CHECK(mt_dtype_writable(facts[i].dtype) == facts[i].writable);
    }
}

static void
widens_every_value(const format *f)
{
    for (unsigned bits = 0; bits <= 0xFFFF; bits++) {
        float x = widened(f->dtype, bits);
        unsigned m = bits & 0x7FFF;
        CHECK(!signbit(x) == !(bits & 0x8000));
        if (m > f->infinity)
            CHECK(isnan(x));
        else if (m == f->infinity)
            CHECK(isinf(x));
        else
            CHECK(fabs((double)x) == f->value[m]);
    }
}

static void
survives_the_round_trip(const format *f)
{
    for (unsigned bits = 0; bits <= 0xFFFF; bits++) {
        uint16_t back = narrowed(f, widened(f->dtype, bits));
        if ((bits & 0x7FFF) > f->infinity)
            CHECK((back & 0x7FFF) > f->infinity);
        else
            CHECK(back == bits);
    }
}

/* Rounding is monotonic, so it is right everywhere if it is right on each value, on each midpoint
 * and on the floats beside the midpoints. */
static void
rounds_at_every_midpoint(const format *f)
{
    for (unsigned m = 0; m < f->infinity; m++) {
        double middle = (f->value[m] + f->value[m + 1]) / 2;
        uint32_t at = bits_of((float)middle);
        CHECK((double)(float)middle == middle);
        for (uint32_t sign = 0; sign < 2; sign++) {
            uint32_t flag = sign << 31, out = sign << 15;
            CHECK(narrowed(f, float_of(flag | (at - 1))) == (out | m));
            CHECK(narrowed(f, float_of(flag | at)) == (out | (m % 2 == 0 ? m : m + 1)));
            CHECK(narrowed(f, float_of(flag | (at + 1))) == (out | (m + 1)));
        }
    }
}

/* An 8-bit float by counting: from 0 on, every code is one step above the last, and the step
 * doubles with each binade after the second. The formats differ in the first step, the codes of a
 * binade, and the codes that are no numbers. */
typedef struct tiny {
    mt_dtype dtype;
    double step; /* the smallest subnormal */
    unsigned binade;
    unsigned first_special; /* magnitudes from here on are infinity or NaN */
    unsigned infinity;      /* this magnitude is, or 0 */
    unsigned minus_zero;    /* this code is NaN rather than -0, or 0 */
    double largest;
} tiny;

static const tiny tinies[] = {
    {MT_F8_E4M3FN, 0x1p-9, 8, 0x7F, 0, 0, 448},
    {MT_F8_E5M2, 0x1p-16, 4, 0x7C, 0x7C, 0, 57344},
    {MT_F8_E4M3FNUZ, 0x1p-10, 8, 0x80, 0, 0x80, 240},
    {MT_F8_E5M2FNUZ, 0x1p-17, 4, 0x80, 0, 0x80, 57344},
};

static void
decodes_special_code(const tiny *t, unsigned magnitude)
{
    for (unsigned sign = 0; sign < 2; sign++) {
        float x = widened(t->dtype, magnitude | sign << 7);
        if (magnitude == t->infinity)
            CHECK(isinf(x) && !signbit(x) == !sign);
        else
            CHECK(isnan(x));
    }
}

static void
decodes_every_code(const tiny *t)
{
    double value = 0, step = t->step;

    for (unsigned m = 0; m < 0x80; m++) {
        if (m >= t->first_special) {
            decodes_special_code(t, m);
            continue;
        }
        if (m > 0) value += step;
        CHECK((double)widened(t->dtype, m) == value && !signbit(widened(t->dtype, m)));
        if (m > 0 || t->minus_zero == 0) {
            float negative = widened(t->dtype, 0x80 | m);
            CHECK((double)negative == -value && signbit(negative));
        }
        if (m % t->binade == 0 && m >= 2 * t->binade) step *= 2;
    }
    CHECK(value == t->largest);
    if (t->minus_zero) CHECK(isnan(widened(t->dtype, t->minus_zero)));
}

static void
every_value_widens_and_narrows_to_the_nearest(void)
{
    const format *formats[] = {&half, &bfloat};

    for (int i = 0; i < 2; i++) {
        widens_every_value(formats[i]);
        survives_the_round_trip(formats[i]);
        rounds_at_every_midpoint(formats[i]);
    }
    for (size_t i = 0; i < sizeof tinies / sizeof *tinies; i++)
        decodes_every_code(&tinies[i]);
}

static void
floats_all_over_round_to_the_nearest(void)
{
    for (uint32_t bits = 0; bits < 0x7F800000u - 7919; bits += 7919) {
        CHECK(narrowed(&half, float_of(bits)) == nearest(&half, float_of(bits)));
        CHECK(narrowed(&bfloat, -float_of(bits)) == nearest(&bfloat, -float_of(bits)));
    }
}

static void
no_nan_turns_into_a_number(void)
{
    rng r = rng_seeded(1);

    for (int i = 0; i < 100000; i++) {
        uint32_t payload = i < 23 ? 1u << i : (uint32_t)rng_next(&r) & 0x7FFFFFu;
        float x = float_of(0x7F800000u | (payload ? payload : 1));
        CHECK((narrowed(&half, x) & 0x7FFF) > 0x7C00);
        CHECK((narrowed(&bfloat, x) & 0x7FFF) > 0x7F80);
    }
}

/* Vector loops have tails: every length gives what single elements give, and writes no more. */
static void
any_number_of_elements_is_converted(void)
{
    uint16_t source[80], back[80];
    float wide[80];
    rng r = rng_seeded(2);

    for (size_t n = 0; n < 79; n++)
        for (int which = 0; which < 2; which++) {
            const format *f = which ? &half : &bfloat;
            for (size_t i = 0; i < n; i++)
                source[i] = (uint16_t)((rng_next(&r) & 0xFFFF) % f->infinity);
            wide[n] = -7;
            back[n] = 0xABCD;
            mt_widen_f32(f->dtype, source, wide, n);
            mt_narrow_f32(f->dtype, wide, back, n);
            for (size_t i = 0; i < n; i++)
                CHECK((double)wide[i] == f->value[source[i]] && back[i] == source[i]);
            CHECK(wide[n] == -7 && back[n] == 0xABCD);
        }
}

static void
doubles_round_to_floats_and_floats_are_doubles(void)
{
    double source[5] = {1 + 0x1p-24, 1 + 0x3p-24, -1e300, 0.1, 0x1p-149}, up[5];
    float got[5], want[5] = {1, 1 + 0x1p-22f, -INFINITY, 0.1f, 0x1p-149f};

    mt_widen_f32(MT_F64, source, got, 5);
    CHECK(memcmp(got, want, sizeof want) == 0);
    mt_narrow_f32(MT_F64, want, up, 5);
    for (int i = 0; i < 5; i++)
        CHECK(up[i] == (double)want[i]);
    mt_widen_f32(MT_F32, want, got, 5);
    CHECK(memcmp(got, want, sizeof want) == 0);
    mt_narrow_f32(MT_F32, want, got, 5);
    CHECK(memcmp(got, want, sizeof want) == 0);
}

int
main(void)
{
    tabulate(&half);
    tabulate(&bfloat);
    RUN(sizes_and_names_are_torchs);
    RUN(every_value_widens_and_narrows_to_the_nearest);
    RUN(floats_all_over_round_to_the_nearest);
    RUN(no_nan_turns_into_a_number);
    RUN(any_number_of_elements_is_converted);
    RUN(doubles_round_to_floats_and_floats_are_doubles);
    CHECK_DONE();
}
