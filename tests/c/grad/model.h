/* model.h -- random gradients of all kinds, and what the native passes must make of them, one
 * element after the other. */
#ifndef MT_TESTS_GRAD_MODEL_H
#define MT_TESTS_GRAD_MODEL_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/grad/set.h"
#include "kit/check.h"
#include "kit/rng.h"

enum { GRAD_SPANS = 9 };

typedef struct gradrig {
    mt_grad_span span[GRAD_SPANS];
    size_t n;
    rng *random;
} gradrig;

/* --- one element ----------------------------------------------------------------------------- */

static inline double
grad_get(const mt_grad_span *s, size_t i)
{
    const char *at = (const char *)s->data + i * mt_dtype_size(s->dtype);
    float narrow;
    double x;

    if (s->dtype == MT_F64) {
        memcpy(&x, at, sizeof x);
        return x;
    }
    mt_widen_f32(s->dtype, at, &narrow, 1);
    return (double)narrow;
}

static inline void
grad_put(mt_grad_span *s, size_t i, double x)
{
    char *at = (char *)s->data + i * mt_dtype_size(s->dtype);
    float narrow = (float)x;

    if (s->dtype == MT_F64)
        memcpy(at, &x, sizeof x);
    else
        mt_narrow_f32(s->dtype, &narrow, at, 1);
}

static inline bool
grad_same(double a, double b)
{
    return isnan(a) ? isnan(b) : memcmp(&a, &b, sizeof a) == 0;
}

/* --- random sets ----------------------------------------------------------------------------- */

/* Lengths around everything that the passes count in. */
static inline size_t
grad_length(gradrig *r)
{
    static const size_t near[] = {0, 1, 16, 64, 4096, 8192, 1 << 15, 1 << 16};
    size_t length = near[rng_below(r->random, 8)] + rng_below(r->random, 4);

    return length < 2 ? length : length - 2;
}

static inline double
grad_value(gradrig *r, size_t kind)
{
    static const double scale[] = {1, 1e-3, 1e25, 1e-25, 1e-41, 0, 3e4, 1e-30};
    double x = (double)rng_below(r->random, 256) / 128 - 1;

    return x * scale[kind];
}

/* A block with the exact size, so that a sanitiser sees every step too far. */
static inline void
grad_fill(gradrig *r, mt_grad_span *s)
{
    size_t kind = rng_below(r->random, 8), special = rng_below(r->random, 6);
    double values[64];

    for (size_t i = 0; i < 64; i++)
        values[i] = grad_value(r, rng_below(r->random, 16) == 0 ? rng_below(r->random, 8) : kind);
    for (size_t i = 0; i < s->n; i++)
        grad_put(s, i, values[(i * 7 + i / 64) % 64]);
    if (s->n > 0 && special == 0) grad_put(s, rng_below(r->random, 256) % s->n, (double)NAN);
    if (s->n > 0 && special <= 1) grad_put(s, rng_below(r->random, 256) % s->n, -(double)INFINITY);
}

static inline void
grad_make(gradrig *r, rng *random)
{
    *r = (gradrig){.random = random};
    r->n = rng_below(random, GRAD_SPANS + 1);
    for (size_t i = 0; i < r->n; i++) {
        mt_grad_span *s = &r->span[i];
        *s = (mt_grad_span){.n = grad_length(r), .dtype = (mt_dtype)rng_below(random, 4)};
        s->data = malloc(s->n * mt_dtype_size(s->dtype) + (s->n == 0));
        CHECK(s->data != NULL);
        grad_fill(r, s);
    }
}

static inline void
grad_drop(gradrig *r)
{
    for (size_t i = 0; i < r->n; i++)
        free(r->span[i].data);
}

/* --- what must come out ---------------------------------------------------------------------- */

static inline mt_grad_total
grad_expect(const mt_grad_span *spans, size_t n)
{
    mt_grad_total t = {.first_bad = SIZE_MAX};

    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < spans[i].n; k++) {
            double x = grad_get(&spans[i], k);
            t.sum.squares += x * x;
            t.sum.infs += isinf(x) != 0;
            t.sum.nans += isnan(x) != 0;
            if (!isfinite(x) && t.first_bad == SIZE_MAX) t.first_bad = i;
        }
    return t;
}

/* Three roundings of a float at most are in a sum of squares: 3 * 2^-24 of it. */
static inline void
grad_check_total(const mt_grad_total *got, const mt_grad_total *want)
{
    double error = fabs(got->sum.squares - want->sum.squares);

    CHECK(got->first_bad == want->first_bad);
    CHECK(got->sum.infs == want->sum.infs && got->sum.nans == want->sum.nans);
    CHECK(grad_same(got->sum.squares, want->sum.squares) || error <= 1.8e-7 * want->sum.squares);
}

/* In float where the factor is one, else in double. */
static inline double
grad_scaled(const mt_grad_span *s, size_t i, double factor)
{
    bool is_float =
        factor == 0 || !isfinite(factor) || (fabs(factor) >= FLT_MIN && fabs(factor) <= FLT_MAX);
    double x = grad_get(s, i);
    char out[8];
    mt_grad_span one = {out, 1, s->dtype};

    if (s->dtype == MT_F64) return x * factor;
    grad_put(&one, 0, is_float ? (double)((float)x * (float)factor) : x * factor);
    return grad_get(&one, 0);
}

#endif
